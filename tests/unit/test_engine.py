"""The exact engine: every row's bits for every width at every cache length, and its logits against the model's own code."""

import functools
import os
from dataclasses import replace

import pytest
import torch
from engines import SPECS, engine, loaded, one_by_one, text, weights

from dispatch.decoder_weights import decoder_weights
from dispatch.decoding import CachedModel
from dispatch.engine import Engine
from dispatch.errors import CacheError
from dispatch.kernels import decoder_cpu, decoder_triton, grouped_gemm
from dispatch.loading import load_target
from dispatch.quantization import dequantize, quantize

LENGTH = 200
# around a block of 64 keys, where the prompt is short, and over several blocks
STARTS = (0, 1, 5, 47, 62, 63, 64, 65, 127, 128, 130, 180)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
cells = pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in SPECS for dtype in DTYPES])


@cells
def test_rows_do_not_depend_on_their_company(name, dtype):
    tokens, found = text(LENGTH), engine(name, DTYPES[dtype])
    expected = one_by_one(found, tokens)
    cached = [tensor.clone() for tensor in found.cached()]
    for start in STARTS:
        for width in range(1, 18):
            found.rollback(found.length - min(start, found.length))
            if found.length < start:
                found.forward(tokens[found.length : start])
            assert torch.equal(found.forward(tokens[start : start + width]), expected[start : start + width]), (start, width)
            for mine, theirs in zip(found.cached(), cached, strict=True):
                assert torch.equal(mine, theirs[:, :, : start + width]), (start, width)


@pytest.mark.parametrize("chunk", [7, 64, LENGTH])
@cells
def test_a_prompt_in_chunks(name, dtype, chunk):
    tokens, found = text(LENGTH), engine(name, DTYPES[dtype])
    expected = one_by_one(found, tokens)
    cached = [tensor.clone() for tensor in found.cached()]
    found.reset()
    rows = torch.cat([found.forward(tokens[at : at + chunk]) for at in range(0, LENGTH, chunk)])
    assert torch.equal(rows, expected)
    assert all(map(torch.equal, found.cached(), cached))


def test_a_long_prompt_goes_in_chunks_of_itself(monkeypatch):
    tokens, found = text(LENGTH), engine("tiny-int8-all")
    expected, cached = found.forward(tokens), found.cached()
    widths, whole = [], Engine._forward
    monkeypatch.setattr("dispatch.engine.CHUNK", 70)
    monkeypatch.setattr(Engine, "_forward", lambda self, ids: (widths.append(len(ids)), whole(self, ids))[1])
    found.reset()
    assert torch.equal(found.forward(tokens), expected)
    assert widths == [70, 70, 60]
    assert found.length == LENGTH
    assert all(map(torch.equal, found.cached(), cached))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_own_code_does_depend_on_it(dtype):
    # the positive control: the same comparison must find a difference there, or it finds nothing
    tokens, stock = text(LENGTH), loaded("tiny", DTYPES[dtype])
    target = CachedModel(stock.model, context_limit=stock.context_limit)
    expected = one_by_one(target, tokens)
    target.reset()
    assert not torch.equal(target.forward(tokens), expected)


@pytest.mark.parametrize("name", SPECS)
def test_backends_agree_in_bits(name):
    tokens = text(70)
    expected = engine(name).forward(tokens)
    found = engine(name, backend="reference")
    assert torch.equal(found.forward(tokens[:67]), expected[:67])
    assert torch.equal(found.forward(tokens[67:]), expected[67:])


@pytest.mark.parametrize("name", ["tiny", "tiny-int8-all"])
def test_in_the_interpreter(name, monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU here, so that the kernels are compiled for it and not interpreted")
    tokens, whole = text(66), weights(name)
    # a dense and a MoE layer, and logits of 64 tokens: the interpreter is slow
    few = whole.head[:64] if isinstance(whole.head, torch.Tensor) else quantize(dequantize(whole.head)[:64])
    part = replace(whole, layers=whole.layers[:2], head=few)
    expected = Engine(part)
    rows = expected.forward(tokens)
    monkeypatch.setattr("dispatch.engine.kernels", lambda *_: grouped_gemm)
    found = Engine(part)
    assert found._rows is decoder_triton
    for cache, full in ((found._keys, expected._keys), (found._values, expected._values)):
        cache.copy_(full)
    # over a border between blocks of keys, behind a prompt that is in the cache
    found._length = 62
    assert torch.equal(found.forward(tokens[62:65]), rows[62:65])
    assert torch.equal(found.forward(tokens[65:]), rows[65:])
    for mine, theirs in zip(found.cached(), expected.cached(), strict=True):
        assert torch.equal(mine, theirs)


@functools.cache
def on_gpu(name, dtype):
    made = load_target(replace(SPECS[name], dtype=dtype), device="cuda")
    return Engine(decoder_weights(made.model, context_limit=made.context_limit))


@pytest.mark.gpu
@cells
def test_on_a_gpu(name, dtype):
    tokens, found, expected = text(LENGTH), on_gpu(name, DTYPES[dtype]), engine(name, DTYPES[dtype])
    rows = expected.forward(tokens)
    assert torch.equal(one_by_one(found, tokens).cpu(), rows)
    for start in STARTS:
        for width in (1, 2, 5, 9, 17, 40):
            found.reset()
            if start:
                found.forward(tokens[:start])
            # twice: the first may capture a graph, the second replays it
            for _ in range(2):
                part = found.forward(tokens[start : start + width])
                assert torch.equal(part.cpu(), rows[start : start + width]), (start, width)
                found.rollback(len(part))


# Logits go up to 18. Original weights: about 20 matrix products and sums in fp32 one after the other, in another order. Int8:
# both round rows to int16 (1 / 32639 of a row's largest value), and what fp32 rounding moves may fall to another step.
TOLERANCE = {
    "tiny": 18 * 40 * 2**-24,
    "tiny-draft": 18 * 40 * 2**-24,
    "tiny-int8-experts": 18 * 20 / 32639,
    "tiny-int8-all": 18 * 20 / 32639,
}


@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_logits_are_the_models(name):
    tokens = text(LENGTH)
    expected = loaded(name).model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    found = engine(name).forward(tokens)
    assert float((found - expected).abs().max()) < TOLERANCE[name]


@torch.inference_mode()
def test_frequencies_a_thousandth_off_are_seen():
    # the control of the tolerance
    tokens, of = text(LENGTH), weights("tiny")
    expected = loaded("tiny").model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    angles = torch.outer(torch.arange(256), loaded("tiny").model.model.layers[0].self_attn.rotary_emb.inv_freq * 1.001)
    found = Engine(replace(of, cos=angles.cos(), sin=angles.sin())).forward(tokens)
    assert float((found - expected).abs().max()) > TOLERANCE["tiny"]


def test_a_rollback_is_a_change_of_length():
    tokens, found = text(100), engine("tiny-int8-all")
    expected = found.forward(tokens)
    found.rollback(60)
    assert found.length == 40
    found.forward([7, 8, 9, *[5] * 57])
    found.rollback(60)
    assert torch.equal(found.forward(tokens[40:]), expected[40:])
    found.rollback(0)
    found.rollback(100)
    assert torch.equal(found.forward(tokens[:3]), expected[:3])
    found.reset()
    assert found.length == 0
    assert torch.equal(found.forward(tokens[:3]), expected[:3])


def test_two_engines_over_the_same_weights_do_not_meet():
    tokens, first, second = text(40), engine("tiny-int8-all"), engine("tiny-int8-all")
    expected = first.forward(tokens)
    second.forward(tokens[::-1])
    first.rollback(20)
    assert torch.equal(first.forward(tokens[20:]), expected[20:])


def test_what_it_refuses():
    found = engine("tiny", context_limit=10)
    assert (found.context_limit, found.vocab_size) == (10, 2048)
    assert engine("tiny", context_limit=10**6).context_limit == 256
    found.forward(text(8))
    for count in (0, 3):
        with pytest.raises(CacheError, match=f"forward of {count} tokens over 8 cached: expected 1 or more, 10 in all"):
            found.forward([5] * count)
    for count in (-1, 9):
        with pytest.raises(CacheError, match=f"rollback of {count} tokens from a cache of 8: expected 0 to 8"):
            found.rollback(count)
    assert found.length == 8


def in_company(function, change):
    """The function, given changed arguments where there are several rows: the first argument."""

    def call(first, *rest, **named):
        return function(*change(first, *rest), **named) if len(first) > 1 else function(first, *rest, **named)

    return call


FAULTS = {
    "a linear layer that adds in another order": (
        decoder_cpu,
        "float_linear",
        lambda x, weight: (x.flip(1).contiguous(), weight.flip(1).contiguous()),
    ),
    "a last bit of one norm": (decoder_cpu, "rms_norm", lambda x, weight, eps: (x * (1 + 2**-23), weight, eps)),
    "keys one place too late": (
        decoder_cpu,
        "rotate_and_store",
        lambda qkv, cos, sin, start, *caches: (qkv, cos, sin, start + 1, *caches),
    ),
    "a key is not seen": (decoder_cpu, "attention", lambda q, keys, values, start, scale: (q, keys, values, start - 1, scale)),
    "the last expert for the first": (
        decoder_cpu,
        "float_experts",
        lambda x, gate_up, down, ids, weights: (x, gate_up, down, ids.flip(1), weights.flip(1)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    tokens, found = text(80), engine("tiny")
    expected = one_by_one(found, tokens)
    module, name, change = FAULTS[fault]
    monkeypatch.setattr(module, name, in_company(getattr(module, name), change))
    found.rollback(5)
    assert not torch.equal(found.forward(tokens[75:]), expected[75:])


def test_the_type_is_a_target():
    found: Engine = engine("tiny-draft")
    for name in ("vocab_size", "context_limit", "length", "reset", "forward", "rollback"):
        assert hasattr(found, name)
