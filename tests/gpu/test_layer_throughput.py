"""How fast one MoE layer's experts are in int8, beside what one would run otherwise, by rows and routing.

A cell alternates ours, one other implementation, and a probe of the memory's bandwidth. What is timed is checked first, against
float64. `tiny` is the embedded model's layer, 16b that of DeepSeek-MoE-16B: on a CPU marked nightly, on a GPU marked gpu.
"""

import itertools
import json
import math
import statistics
import time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dispatch.kernels import cpu
from dispatch.moe import kernels
from dispatch.quantization import Int8Weight
from dispatch.repairs import repair_transformers

TINY = Path(__file__).parents[1] / "models" / "tiny-moe"
ROUTINGS = 5  # to a cell, taken in turns
BATCHED_MM_LIMIT = 2e9  # bytes on a CPU


def config_of(shape):
    """A layer's sizes, under the names that the remote code and transformers' MixtralExperts read."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6}
    if shape == "tiny":
        stated = json.loads((TINY / "config.json").read_text())
        sizes = {name: stated[name] for name in sizes}
    remote = {"n_shared_experts": None, "hidden_act": "silu", "aux_loss_alpha": 0.0, "norm_topk_prob": False}
    mixtral = {"num_local_experts": sizes["n_routed_experts"], "intermediate_size": sizes["moe_intermediate_size"]}
    return SimpleNamespace(**sizes, **remote, **mixtral)


class Layer:
    """The experts of one layer in int8 and in float, which every float implementation shares.

    The scales are powers of two, so that int8, bf16 and fp32 hold the very same weights and one oracle serves all.
    """

    def __init__(self, shape, device):
        torch.manual_seed(0)
        self.config, self.device = config_of(shape), device
        self.dtype = torch.float32 if shape == "tiny" else torch.bfloat16
        count, hidden, intermediate = self.config.n_routed_experts, self.config.hidden_size, self.config.moe_intermediate_size
        self.gate_up, self.float_gate_up = self._weight(count, 2 * intermediate, hidden)
        self.down, self.float_down = self._weight(count, hidden, intermediate)
        # 16b: more than any cache, so that reading it also evicts the weights; tiny lives in the cache, and is measured there
        self.probed = torch.ones(2**20 if shape == "tiny" else 2**30, dtype=torch.int8, device=device)
        self.copied = torch.empty_like(self.probed) if device == "cuda" else None

    def _weight(self, count, rows, columns):
        # scales that differ fourfold, so that a wrong one shows; 73 is the deviation of values from -127 to 127
        middle = round(math.log2(columns**-0.5 / 73))
        values = torch.randint(-127, 128, (count, rows, columns), dtype=torch.int8, device=self.device)
        scales = 2.0 ** torch.randint(middle - 1, middle + 2, (count, rows), device=self.device)
        return Int8Weight(values=values, scales=scales), values.to(self.dtype).mul_(scales.to(self.dtype).unsqueeze(-1))

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function, *arguments):
        self.wait()
        started = time.perf_counter()
        function(*arguments)
        self.wait()
        return time.perf_counter() - started

    def bandwidth(self):
        """Bytes per second, measured once: read on a CPU, read and written on a GPU."""
        if self.copied is None:
            return self.probed.nbytes / self.seconds(cpu.read_once, self.probed)
        return 2 * self.probed.nbytes / self.seconds(self.copied.copy_, self.probed)

    def int8_bytes(self, ids):
        """Bytes of the experts that a routing reads, each once."""
        return ids.unique().numel() * (self.gate_up.values[0].nbytes + self.down.values[0].nbytes)


def int8(layer):
    run = kernels("auto", layer.device).experts
    return lambda x, ids, weights: run(x, layer.gate_up, layer.down, ids, weights)


def stock(layer):
    repair_transformers()
    with torch.device("meta"):
        moe = get_class_from_dynamic_module("modeling_tiny_moe.TinyMoeMoE", str(TINY))(layer.config)
    for expert, gate_up, down in zip(moe.experts, layer.float_gate_up, layer.float_down, strict=True):
        for linear, weight in zip((expert.gate_proj, expert.up_proj, expert.down_proj), (*gate_up.chunk(2), down), strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return lambda x, ids, weights: moe.moe_infer(x, ids.flatten(), weights.view(-1, 1))


def grouped_mm(layer):
    return mixtral(layer, "grouped_mm")


def batched_mm(layer):
    return mixtral(layer, "batched_mm")


def mixtral(layer, implementation):
    config = SimpleNamespace(**vars(layer.config), _experts_implementation=implementation)
    with torch.device("meta"):
        experts = MixtralExperts(config)
    experts.gate_up_proj = nn.Parameter(layer.float_gate_up, requires_grad=False)
    experts.down_proj = nn.Parameter(layer.float_down, requires_grad=False)
    return experts


def int8pack(layer):
    multiply = torch.ops.aten._weight_int8pack_mm
    first, second = layer.gate_up.scales.to(layer.dtype), layer.down.scales.to(layer.dtype)

    def run(x, ids, weights):
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = multiply(x[token], layer.gate_up.values[expert], first[expert]).chunk(2, -1)
            y = multiply(nn.functional.silu(gate) * up, layer.down.values[expert], second[expert])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out

    return run


IMPLEMENTATIONS = {function.__name__: function for function in (stock, grouped_mm, batched_mm, int8pack, int8)}


class Case:
    """Rows, the routings they take in turns, and what the first of these must give."""

    def __init__(self, layer, rows, routing):
        torch.manual_seed(1)
        config, on = layer.config, {"device": layer.device}
        self.x = torch.randn(rows, config.hidden_size, dtype=layer.dtype, **on)
        rank = torch.randperm(config.n_routed_experts, **on) + 1
        chances = (1 / rank if routing == "zipf" else torch.ones(config.n_routed_experts, **on)).expand(rows, -1)
        self.routings = []
        for _ in range(ROUTINGS):
            # drawn without replacement
            ids = chances.multinomial(config.num_experts_per_tok)
            self.routings.append((ids, torch.rand(ids.shape, **on).softmax(-1).to(layer.dtype)))
        self.expected = in_float64(layer, self.x, *self.routings[0])


def in_float64(layer, x, ids, weights):
    """The layer from its definition, an expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        first, second = (
            weight.values[expert].double() * weight.scales[expert, :, None] for weight in (layer.gate_up, layer.down)
        )
        mine = ids == expert
        token = mine.any(-1).nonzero().flatten()
        gate, up = (x[token].double() @ first.T).tensor_split(2, -1)
        out[token] += (weights.double() * mine).sum(-1)[token, None] * (gate / (1 + torch.exp(-gate)) * up @ second.T)
    return out


def check(implementation, run, layer, case):
    """Fails unless every row is within rounding of float64."""
    found = run(case.x, *case.routings[0]).double()
    error = float(((found - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)).max())
    rounding = torch.finfo(layer.dtype).eps / 2
    # int8: 10 steps of the rows' int16, as in test_int8_arithmetic.py, and the rounding of what goes out. Float: gate, up,
    # silu, product, down, weighting and the sum over experts round about 8 times; sums over K are in fp32
    limit = 10 / 32639 + rounding if implementation == "int8" else 8 * rounding + case.x.shape[-1] ** 0.5 * 2**-24
    assert error < limit, (
        f"{implementation}: a row is off by {error:.2g} of its length from float64, expected below {limit:.2g}"
    )


@pytest.fixture(scope="module")
def layer_of():
    """The layer of a shape and device, made when first asked for; one is held at a time."""
    return lru_cache(maxsize=1)(Layer)


@pytest.fixture(scope="module")
def case_of(layer_of):
    return lru_cache(maxsize=1)(lambda shape, device, *case: Case(layer_of(shape, device), *case))


@pytest.fixture(scope="module")
def ratios():
    """What the other implementations of a case took, in times of ours, for the line that ours, the last, reports."""
    return {}


def cells():
    made = []
    for shape, device, marks in (
        ("tiny", "cpu", ()),
        ("16b", "cpu", pytest.mark.nightly),
        ("16b", "cuda", pytest.mark.gpu),
    ):
        names = [name for name in IMPLEMENTATIONS if (device, name) != ("cuda", "int8pack")]
        rows = (1, 5, 64) if shape == "tiny" else (1, 2, 3, 5, 9, 16, 64)
        cases = itertools.product([shape], [device], rows, ("uniform", "zipf"), names)
        made += [pytest.param(*cell, id="-".join(map(str, cell)), marks=marks) for cell in cases]
    return made


@pytest.mark.benchmark(group="layer")
@pytest.mark.parametrize(("shape", "device", "rows", "routing", "implementation"), cells())
def test_layer(shape, device, rows, routing, implementation, layer_of, case_of, ratios, benchmark, record_property):
    layer = layer_of(shape, device)
    config = layer.config
    copied = rows * config.num_experts_per_tok * (layer.float_gate_up[0].nbytes + layer.float_down[0].nbytes)
    if implementation == "batched_mm" and device == "cpu" and copied > BATCHED_MM_LIMIT:
        pytest.skip(
            f"batched_mm copies every row's experts, here {copied / 1e9:.1f} GB; at most {BATCHED_MM_LIMIT / 1e9:.0f} GB here"
        )
    case = case_of(shape, device, rows, routing)
    ours, timed = int8(layer), IMPLEMENTATIONS[implementation](layer)
    our_seconds, bandwidths = [], []
    turns = itertools.cycle(case.routings)

    def take_turns():
        routed = next(turns)
        bandwidths.append(layer.bandwidth())
        if implementation != "int8":
            our_seconds.append(layer.seconds(ours, case.x, *routed))
            # evicts the weights again: int8pack reads the same ones
            bandwidths.append(layer.bandwidth())
        return (case.x, *routed), {}

    def run(*arguments):
        timed(*arguments)
        layer.wait()

    with torch.inference_mode():
        check("int8", ours, layer, case)
        check(implementation, timed, layer, case)
        # the others take seconds at 16b on a CPU
        rounds = ROUTINGS if (shape, device) == ("16b", "cpu") and implementation != "int8" else 4 * ROUTINGS
        benchmark.pedantic(run, setup=take_turns, rounds=rounds)
    if benchmark.stats is None:
        return
    seconds, bandwidth = benchmark.stats.stats.median, statistics.median(bandwidths)
    rate = statistics.mean(layer.int8_bytes(ids) for ids, _ in case.routings) / seconds
    ratio = seconds / statistics.median(our_seconds) if our_seconds else 1.0
    benchmark.extra_info.update(
        shape=shape,
        device=device,
        rows=rows,
        routing=routing,
        implementation=implementation,
        unique_experts=statistics.mean(ids.unique().numel() for ids, _ in case.routings),
        effective_gb_s=rate / 1e9,
        bandwidth_gb_s=bandwidth / 1e9,
        share=rate / bandwidth,
        ratio_to_int8=ratio,
    )
    others = ratios.setdefault((shape, device, rows, routing), {})
    if implementation != "int8":
        others[implementation] = ratio
        return
    line = (
        f"layer {shape}, {device}, {rows} row{'s' * (rows > 1)}, {routing}: int8 {seconds * 1e3:.3g} ms, {rate / 1e9:.1f} GB/s"
    )
    if shape != "tiny":
        # tiny never leaves the caches, whose rate says nothing
        kind = "read" if device == "cpu" else "copy"
        line += f", {rate / bandwidth:.0%} of {bandwidth / 1e9:.1f} GB/s {kind} bandwidth"
    beside = ", ".join(f"{name} {times:.1f}x" for name, times in others.items())
    record_property("dispatch_line", f"{line}; {beside} the time" if beside else line)


FAULTS = {
    "gate and up swapped": lambda layer: [
        tensor.copy_(tensor.roll(layer.config.moe_intermediate_size, 1))
        for tensor in (layer.gate_up.values, layer.gate_up.scales, layer.float_gate_up)
    ],
    "scales of one expert doubled": lambda layer: [tensor[3].mul_(2) for tensor in (layer.down.scales, layer.float_down)],
    "one expert in another's place": lambda layer: [
        tensor[3].copy_(tensor[4]) for tensor in (layer.down.values, layer.down.scales, layer.float_down)
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_planted_fault_is_seen(implementation, fault):
    layer = Layer("tiny", "cpu")
    case = Case(layer, 5, "uniform")
    # one row alone takes the wrong expert
    case.routings[0][0].copy_(torch.tensor([[3, 1, 2, 0], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 4], [0, 1, 2, 4]]))
    case.expected = in_float64(layer, case.x, *case.routings[0])
    check(implementation, IMPLEMENTATIONS[implementation](layer), layer, case)
    FAULTS[fault](layer)
    with pytest.raises(AssertionError, match=f"{implementation}: a row is off by"):
        check(implementation, IMPLEMENTATIONS[implementation](layer), layer, case)


def test_zipf_draws_the_first_experts_most():
    layer = Layer("tiny", "cpu")
    ids = Case(layer, 2000, "zipf").routings[0][0]
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=16).sort(descending=True).values / len(ids)
    # chances that 4 of 16 draws without replacement at 1 / rank take rank 1 and rank 16, from 200 000 draws by Python's random
    assert counts[0].item() == pytest.approx(0.804, abs=0.05)
    assert counts[-1].item() == pytest.approx(0.092, abs=0.03)
