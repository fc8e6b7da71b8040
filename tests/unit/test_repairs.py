"""Each repair: what breaks without it, what it changes, that it runs twice without harm and leaves healthy things alone.

Runs on every supported transformers; what differs between versions is asked of the library, not of its version number.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import import_utils

from dispatch import repairs
from dispatch.errors import RepairError
from dispatch.repairs import definition_of, repair_config, repair_model, repair_transformers, verify_buffers

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny-moe"
MASKS = "transformers.modeling_attn_mask_utils"
HEAD_DIM = 32


def inverse_frequencies(base=10000.0):
    """1 / base ** (2i / dim) in float64 by Python's own power (arXiv:2104.09864, section 3.2.2)."""
    return torch.tensor([base ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], dtype=torch.float64)


def assert_frequencies(found, expected):
    # computed in fp32: a power and a reciprocal, a few ulp of 6e-8 each
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.fixture
def folder(tmp_path, request):
    """A copy under a name of its own: its Python files are imported anew, as in a fresh process."""
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    return Path(shutil.copytree(TINY, tmp_path / f"copy_{name}"))


def load_config(folder, **settings):
    repair_transformers()
    return AutoConfig.from_pretrained(folder, trust_remote_code=True, **settings)


def load_raw(folder, dtype=torch.float32, **settings):
    """The model as transformers loads it, with every repair but repair_model."""
    config = load_config(folder, **settings)
    repair_config(config)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True, dtype=dtype).eval()


def build(folder, **settings):
    """The model as its own constructors make it, with the same weights: nothing in it is left unset."""
    config = load_config(folder, **settings)
    repair_config(config)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.float().eval()


def rotary_of(model):
    return [layer.self_attn.rotary_emb for layer in model.model.layers]


pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")


@pytest.mark.parametrize(
    ("owner", "attribute", "error"),
    [
        (import_utils, "is_torch_fx_available", ImportError),
        (DynamicCache, "from_legacy_cache", AttributeError),
        (Cache, "get_usable_length", AttributeError),
        (Cache, "to_legacy_cache", AttributeError),
    ],
)
def test_what_5x_removed_breaks_the_model_and_is_supplied(folder, monkeypatch, owner, attribute, error):
    config = load_config(folder)
    repair_config(config)
    monkeypatch.delattr(owner, attribute)
    monkeypatch.setattr(repairs, "_supplied_names", set())

    def run():
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True, dtype=torch.float32).eval()
        repair_model(model)
        return model(input_ids=torch.tensor([[5, 6]]), use_cache=True)

    with pytest.raises(error, match=attribute):
        run()
    changed = [report.name for report in repair_transformers() if report.changed]
    assert len(changed) == 1
    output = run()
    assert isinstance(output["past_key_values"], DynamicCache)
    supplied = getattr(owner, attribute)
    assert [report.name for report in repair_transformers() if report.changed] == changed
    assert getattr(owner, attribute) == supplied


def test_healthy_transformers_is_left_alone(monkeypatch):
    def own(self, *args):
        raise AssertionError

    monkeypatch.setattr(Cache, "get_usable_length", own)
    monkeypatch.setattr(repairs, "_supplied_names", set())
    repair_transformers()
    assert Cache.get_usable_length is own
    assert all(report.changed == 0 for report in repair_transformers() if report.name == "usable-length")


def test_mask_module_is_supplied_only_where_it_is_missing(folder, monkeypatch):
    monkeypatch.setattr(repairs, "_supplied_names", set())
    monkeypatch.delitem(sys.modules, MASKS, raising=False)
    missing = importlib.util.find_spec(MASKS) is None
    if missing:
        with pytest.raises(ModuleNotFoundError, match="modeling_attn_mask_utils"):
            importlib.import_module(MASKS)
    report = next(report for report in repair_transformers() if report.name == "mask-module")
    assert report.changed == int(missing)
    module = importlib.import_module(MASKS)
    assert (module._prepare_4d_causal_attention_mask is repairs.masks.prepare_4d_causal_attention_mask) == missing


def test_legacy_cache_forms():
    repair_transformers()
    assert DynamicCache.from_legacy_cache(None).get_seq_length() == 0
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert DynamicCache.from_legacy_cache(cache) is cache
    assert cache.to_legacy_cache() is cache
    assert cache.get_usable_length(5) == 3
    keys, values = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4)
    converted = DynamicCache.from_legacy_cache(((keys, values), (values, keys)))
    assert converted.get_seq_length() == 5
    assert torch.equal(converted.layers[1].keys, values)


def test_rope_scaling_null_becomes_none_again(folder):
    config = load_config(folder)
    assert config.rope_scaling["rope_type"] == "default"
    with pytest.raises(KeyError, match="type"):
        AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True)
    assert repair_config(config).changed == 1
    assert config.rope_scaling is None
    report = repair_config(config)
    assert (report.matched, report.changed) == (0, 0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_real_rope_scaling_is_mapped_and_its_buffers_are_right(folder, kind, key):
    scaling = {key: kind, "factor": 2.0}
    raw = load_raw(folder, rope_scaling=dict(scaling))
    assert raw.config.rope_scaling["type"] == kind
    assert raw.config.rope_scaling["factor"] == 2.0
    names = {"linear": "TinyMoeLinearScalingRotaryEmbedding", "dynamic": "TinyMoeDynamicNTKScalingRotaryEmbedding"}
    assert type(rotary_of(raw)[0]).__name__ == names[kind]
    repair_model(raw)
    verify_buffers(raw)
    tokens = torch.randint(2, 2000, (1, 300), generator=torch.Generator().manual_seed(0))  # past the context of 256
    with torch.inference_mode():
        found, expected = raw(input_ids=tokens).logits, build(folder, rope_scaling=dict(scaling))(input_ids=tokens).logits
    # fp32 rounding, 2e-6 where the two models' weights lie at other alignments; other frequencies change logits by 0.1 and more
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    if kind == "dynamic":
        # bloc97's rule: base * (factor * length / context - (factor - 1)) ** (dim / (dim - 2))
        base = 10000 * (2 * 300 / 256 - 1) ** (HEAD_DIM / (HEAD_DIM - 2))
        assert_frequencies(rotary_of(raw)[0].inv_freq, inverse_frequencies(base))
    else:
        assert_frequencies(rotary_of(raw)[0].inv_freq, inverse_frequencies())
        # a position is halved: what plain rotary has at 50 is here at 100
        torch.testing.assert_close(
            rotary_of(raw)[0].cos_cached[100].double(), torch.cos(50 * inverse_frequencies()).repeat(2), atol=1e-5, rtol=0
        )


def test_rope_scaling_of_a_native_class_is_left_alone():
    config = LlamaConfig()
    before = dict(config.rope_scaling)
    assert repair_config(config).changed == 0
    assert config.rope_scaling == before


def test_contradicting_or_unnamed_rope_scaling_is_refused(folder):
    config = load_config(folder)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    with pytest.raises(RepairError, match=r"rope_theta 10000.0 and rope_scaling says 5000.0"):
        repair_config(config)
    config.rope_parameters = {"factor": 2.0}
    with pytest.raises(RepairError, match="neither 'rope_type' nor 'type'"):
        repair_config(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_unset_after_loading_and_repaired(folder, dtype):
    model = load_raw(folder, dtype)
    for rotary in rotary_of(model):
        # whatever the memory held; made sure of here, so that the test does not hang on luck
        rotary.inv_freq.fill_(1e-30)
    with pytest.raises(RepairError, match=r"model.layers.0.self_attn.rotary_emb.* is .*; its own class computes"):
        verify_buffers(model)
    reports = {report.name: report for report in repair_model(model)}
    assert (reports["rotary-buffers"].matched, reports["rotary-buffers"].changed) == (4, 4)
    assert reports["rotary-dtype"].changed == 0
    positions = torch.arange(256, dtype=torch.float64)
    table = torch.outer(positions, inverse_frequencies()).repeat(1, 2)
    # the angle is rounded in fp32 (255 * 6e-8) and the table in the model's dtype (half an ulp below 1)
    tolerance = 255 * 6e-8 * 2 + torch.finfo(dtype).eps / 2
    for rotary in rotary_of(model):
        assert rotary.inv_freq.dtype == torch.float32
        assert_frequencies(rotary.inv_freq, inverse_frequencies())
        assert rotary.cos_cached.dtype == dtype
        torch.testing.assert_close(rotary.cos_cached.double(), table.cos(), atol=tolerance, rtol=0)
        torch.testing.assert_close(rotary.sin_cached.double(), table.sin(), atol=tolerance, rtol=0)
    assert verify_buffers(model) == 12
    assert all(report.changed == 0 for report in repair_model(model))


def test_stale_tables_are_rebuilt_at_the_next_forward(folder):
    model = load_raw(folder)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        model(input_ids=tokens)  # tables from unset frequencies, marked as up to date
    repair_model(model)
    with torch.inference_mode():
        found, expected = model(input_ids=tokens).logits, build(folder)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)  # as above


def test_healthy_model_is_left_alone(folder):
    for model in (build(folder), LlamaForCausalLM(LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2))):
        before = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
        assert all(report.changed == 0 for report in repair_model(model))
        assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == before
        assert verify_buffers(model) > 0


@pytest.mark.parametrize("way", [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_dtype_moves_after_loading_are_repaired(folder, way):
    model = build(folder)
    for dtype in way:
        model.to(dtype)
    with pytest.raises(RepairError, match="inv_freq|cos_cached"):
        verify_buffers(model)
    reports = {report.name: report.changed for report in repair_model(model)}
    rounded_only = way[-1] == torch.float32
    assert reports["rotary-dtype"] == (0 if rounded_only else 4)
    assert rotary_of(model)[0].inv_freq.dtype == torch.float32
    assert_frequencies(rotary_of(model)[0].inv_freq, inverse_frequencies())
    verify_buffers(model)


class ForgetfulRotary(nn.Module):
    """Keeps its frequencies and not what they came from."""

    def __init__(self, dim, stretch=1.0):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", 1 / (stretch * torch.arange(1, dim)), persistent=False)


class ScalingRotary(nn.Module):
    """Changes what it is given, so that a second instance would change it twice."""

    def __init__(self, base):
        super().__init__()
        self.base = base * 2
        self.register_buffer("inv_freq", self.base ** -torch.arange(4.0), persistent=False)


class Window(nn.Module):
    """A non-persistent buffer that is not rotary."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.register_buffer("taper", torch.linspace(0, 1, size), persistent=False)


def with_module(folder, module):
    model = build(folder)
    model.model.extra = module
    return model


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            ForgetfulRotary(4),
            r"model.extra \(ForgetfulRotary\) .* its constructor takes 'stretch' and the module does not keep it",
        ),
        (ScalingRotary(10.0), r"model.extra \(ScalingRotary\) cannot be rebuilt: its constructor turned base=20.0 into 40.0"),
    ],
)
def test_unknown_rotary_variant_is_refused(folder, module, message):
    model = with_module(folder, module)
    for function in (repair_model, verify_buffers):
        with pytest.raises(RepairError, match=message):
            function(model)


def test_other_buffers_are_checked_and_not_touched(folder):
    model = with_module(folder, Window(3))
    assert verify_buffers(model) == 13
    model.model.extra.taper[1] = 7.0
    repair_model(model)
    with pytest.raises(
        RepairError, match=r"model.extra.taper \(Window\) is float32 \[0, 7, 1, ...\]; .* \(first at \[1\]: 7, not 0.5\)"
    ):
        verify_buffers(model)


def test_definition_leaves_random_numbers_and_default_dtype_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    definition = definition_of("window", Window(3), torch.bfloat16)
    assert definition.taper.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.rand(3), expected)
