"""Int8 layers in a loaded model: what is replaced, what is refused, what it costs in memory."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch.errors import InputError
from dispatch.kernels import reference
from dispatch.loading import load_target
from dispatch.moe import Int8Experts, Int8Linear, quantize_experts
from dispatch.quantization import quantize
from dispatch.targets import TARGETS


class Expert(nn.Module):
    def __init__(self, hidden=32, intermediate=24, bias=False, act_fn=nn.functional.silu):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """An MoE layer as DeepSeek's code lays it out, with a linear router; row_a_token: V3's call, flat ids: V1's."""

    def __init__(self, experts=6, row_a_token=False, **expert):
        super().__init__()
        self.experts = nn.ModuleList(Expert(**expert) for _ in range(experts))
        self.gate = nn.Linear(32, experts, bias=False)
        self.row_a_token = row_a_token

    def moe_infer(self, x, ids, weights):
        ids, weights = ids.reshape(len(x), -1), weights.reshape(len(x), -1)
        rows = zip(x, ids, weights, strict=True)
        return torch.stack([sum(w * self.experts[i](row) for i, w in zip(of, by, strict=True)) for row, of, by in rows])

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        if self.row_a_token:
            return x + self.moe_infer(x, ids, weights)
        return x + self.moe_infer(x, ids.view(-1), weights.view(-1, 1))


def model(layers=3, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32, bias=True), *(MoE(**options) for _ in range(layers))).eval()


@pytest.mark.parametrize("row_a_token", [False, True], ids=["v1-flat-ids", "v3-row-a-token"])
@pytest.mark.parametrize("layers", ["experts", "all"])
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@torch.no_grad()
def test_experts_are_replaced(row_a_token, layers, backend):
    x = torch.randn(5, 32)
    stock = model(row_a_token=row_a_token)
    expected = stock(x)
    report = quantize_experts(stock, backend=backend, layers=layers)
    assert (report.moe_layers, report.experts, report.linears) == (3, 18, int(layers == "all"))
    assert report.bytes_after < report.bytes_before
    assert f"3 MoE layers (18 experts) and {int(layers == 'all')} linear layers in int8" in str(report)
    kinds = [type(module) for module in stock.modules()]
    assert kinds.count(Int8Experts) == 3
    assert kinds.count(Expert) == 0
    assert type(stock[0]) is (Int8Linear if layers == "all" else nn.Linear)
    assert all(type(stock[i].gate) is nn.Linear for i in (1, 2, 3)), "a router was quantised"
    found = stock(x)
    # int8 steps are 1 / 127 of a channel's largest weight: rounding them adds about 0.5%, not nothing
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.02


def test_bytes_are_counted():
    report = quantize_experts(model(layers=1))
    floats = 32 * 32 + 32 + 32 * 6
    assert report.bytes_before == 4 * (floats + 6 * 3 * 32 * 24)
    assert report.bytes_after == 4 * floats + 6 * (3 * 32 * 24 + 4 * (24 + 24 + 32))


def test_every_expert_and_projection_lands_in_its_place():
    stock = model(layers=1)
    experts = [
        {name: getattr(expert, name).weight.detach().clone() for name in ("gate_proj", "up_proj", "down_proj")}
        for expert in stock[1].experts
    ]
    quantize_experts(stock)
    made = stock[1].experts
    for index, expert in enumerate(experts):
        for name, weight in expert.items():
            expected = quantize(weight)
            values, scales = {
                "gate_proj": (made.gate_up_values[index, :24], made.gate_up_scales[index, :24]),
                "up_proj": (made.gate_up_values[index, 24:], made.gate_up_scales[index, 24:]),
                "down_proj": (made.down_values[index], made.down_scales[index]),
            }[name]
            assert torch.equal(values, expected.values), (index, name)
            assert torch.equal(scales, expected.scales), (index, name)


@torch.no_grad()
def test_linear_layers_keep_their_bias_and_shape():
    layer = nn.Linear(32, 7, bias=True)
    stock = nn.Sequential(layer).eval()
    x = torch.randn(2, 3, 32)
    quantize_experts(stock, layers="all")
    expected = reference.linear(x.view(6, 32), quantize(layer.weight)).view(2, 3, 7) + layer.bias
    assert torch.equal(stock(x), expected)
    assert repr(stock[0]) == "Int8Linear(in_features=32, out_features=7, backend='auto')"


class LiveBytes(TorchDispatchMode):
    """Bytes of a model's parameters that are still alive, and of all tensors made while this is on: their sum's peak."""

    def __init__(self, model):
        super().__init__()
        self.held = [(weakref.ref(p), p.nbytes) for p in model.parameters()]
        self.made = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            storage = out.untyped_storage()
            self.made += storage.nbytes()
            weakref.finalize(storage, self.drop, storage.nbytes())
        self.peak = max(self.peak, self.made + sum(nbytes for ref, nbytes in self.held if ref() is not None))
        return out

    def drop(self, nbytes):
        self.made -= nbytes


def test_memory_while_converting_is_the_model_and_one_layer():
    stock = model(layers=5, experts=16, intermediate=128)
    before = sum(p.nbytes for p in stock.parameters())
    int8_layer = 16 * (3 * 32 * 128 + 4 * (128 + 128 + 32))
    # of the projection at hand there are |w|, w / scale, the int8 values and a row of scales
    one_projection = 32 * 128 * (4 + 4 + 1) + 3 * 4 * 128
    with LiveBytes(stock) as memory:
        quantize_experts(stock)
    assert before + int8_layer < memory.peak <= before + int8_layer + one_projection
    assert memory.made == 5 * int8_layer


def test_memory_that_is_not_freed_is_seen():
    stock = model(layers=5, experts=16, intermediate=128)
    kept = [list(layer.experts) for layer in stock[1:]]
    before = sum(p.nbytes for p in stock.parameters())
    with LiveBytes(stock) as memory:
        quantize_experts(stock)
    assert memory.peak > before + 5 * 16 * 3 * 32 * 128
    assert len(kept) == 5


def test_refusals():
    with pytest.raises(InputError, match="in training mode"):
        quantize_experts(model().train())
    with pytest.raises(InputError, match="has no layer to quantise.*For a dense model use layers='all'"):
        quantize_experts(nn.Sequential(nn.Linear(4, 4)).eval())
    with pytest.raises(InputError, match=r"1\.experts\.0 has a bias"):
        quantize_experts(model(bias=True))
    with pytest.raises(InputError, match=r"1\.experts\.0 has the activation .*, expected SiLU"):
        quantize_experts(model(act_fn=nn.functional.gelu))
    with pytest.raises(InputError, match="backend 'cuda', layers 'experts': expected one of"):
        quantize_experts(model(), backend="cuda")
    with pytest.raises(InputError, match="layers 'some': expected one of"):
        quantize_experts(model(), layers="some")


@pytest.mark.parametrize("layers", ["experts", "all"])
def test_a_model_is_quantised_once(layers):
    stock = model()
    quantize_experts(stock, layers=layers)
    with pytest.raises(InputError, match="is in int8 already .*: quantise a model once"):
        quantize_experts(stock, layers="all")


def test_refused_before_anything_is_changed():
    stock = model()
    stock[3].experts[5].up_proj = nn.Linear(32, 25, bias=False)
    with pytest.raises(InputError, match="3 has experts of different shapes"):
        quantize_experts(stock)
    stock[3].experts[5].up_proj = nn.Identity()
    with pytest.raises(InputError, match=r"3\.experts\.5 is a Expert, expected linear layers"):
        quantize_experts(stock)
    assert not [module for module in stock.modules() if isinstance(module, Int8Experts)]


def test_a_non_finite_weight_is_named():
    stock = model()
    with torch.no_grad():
        stock[2].experts[4].down_proj.weight[3, 1] = torch.inf
    with pytest.raises(InputError, match=r"2\.experts\.4\.down_proj\.weight\[3, 1\] is inf"):
        quantize_experts(stock)


def test_tiny_layer_names():
    loaded = load_target(TARGETS["tiny"])
    report = quantize_experts(loaded.model, layers="all")
    # 16 attention projections, 3 of the dense layer, 9 of the shared experts, the head; three routers stay
    assert (report.moe_layers, report.experts, report.linears) == (3, 48, 16 + 3 + 9 + 1)
    assert isinstance(loaded.model.lm_head, Int8Linear)
    gates = [layer.mlp.gate for layer in loaded.model.model.layers[1:]]
    assert all(gate.weight.dtype == torch.float32 for gate in gates)


@torch.no_grad()
def test_moved_weights_are_followed():
    layer = Int8Linear(4, 8, bias=None, backend="reference", device="cpu")
    layer.put(torch.randn(4, 8), "w")
    before = layer(torch.ones(1, 8))
    other = SimpleNamespace(values=layer.values.clone(), scales=layer.scales * 2)
    layer.values, layer.scales = other.values, other.scales
    assert torch.equal(layer(torch.ones(1, 8)), before * 2)
