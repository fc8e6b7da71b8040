"""What a decoder layer does beside int8 products: plain torch against float64, and both backends against it, in bits.

The Triton kernels run in the interpreter or, marked gpu, on the device.
"""

import os

import numpy as np
import pytest
import torch
from int8_layers import poison

from dispatch.errors import InputError
from dispatch.kernels import decoder_cpu, decoder_reference, decoder_triton
from dispatch.kernels.decoder_reference import KEYS
from dispatch.quantization import SplitWeight, quantize_split

EPS = 2.0**-24
"""Half a step of fp32, relative."""


FP32, BF16 = torch.float32, torch.bfloat16
MODULES = {"cpu": decoder_cpu, "interpreter": decoder_triton, "cuda": decoder_triton, "reference": decoder_reference}


class On:
    """A module's functions with their arguments on its device, and results and what was written back from there."""

    def __init__(self, backend):
        if backend == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("there is a GPU here, so that the kernels are compiled for it and not interpreted")
        self.module, self.device = MODULES[backend], "cuda" if backend == "cuda" else "cpu"

    def __call__(self, name, *arguments, **named):
        there = [
            SplitWeight(values=a.values.to(self.device), scales=a.scales.to(self.device))
            if isinstance(a, SplitWeight)
            else a.to(self.device)
            if isinstance(a, torch.Tensor)
            else a
            for a in arguments
        ]
        # the interpreter computes with numpy, which warns of inf and NaN where a GPU does not
        with np.errstate(divide="ignore", invalid="ignore"):
            result = getattr(self.module, name)(*there, **named)
        for mine, theirs in zip(arguments, there, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(theirs)
        return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
by_backend = pytest.mark.parametrize("backend", ["cpu", "interpreter", GPU])
# the interpreter's bf16 is not the hardware's
by_dtype = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend}-{name}", marks=[pytest.mark.gpu] if backend == "cuda" else [])
        for backend in ("cpu", "interpreter", "cuda")
        for dtype, name in ((FP32, "fp32"), (BF16, "bf16"))
        if (backend, dtype) != ("interpreter", BF16)
    ],
)
all_backends = pytest.mark.parametrize("backend", ["cpu", "interpreter", GPU, "reference"])


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_case(rows, heads, kv_heads, head, start, dtype=torch.float32, blocks=4):
    """qkv, rotary tables, and caches that hold `start` keys; what lies behind them is NaN, and must not be read as a number."""
    qkv = randn(rows, (heads + 2 * kv_heads) * head, dtype=dtype)
    angles = torch.outer(torch.arange(blocks * KEYS).float(), 10000 ** (-torch.arange(head // 2) / (head // 2)))
    keys, values = randn(kv_heads, blocks, head, KEYS, seed=1), randn(kv_heads, blocks, KEYS, head, seed=2)
    behind = torch.arange(blocks * KEYS).view(blocks, KEYS) >= start
    keys = keys.masked_fill(behind[None, :, None], torch.nan).to(dtype)
    values = values.masked_fill(behind[None, :, :, None], torch.nan).to(dtype)
    return qkv, angles.cos(), angles.sin(), torch.tensor([start]), keys, values


# rows, heads, kv_heads, head size, cached keys: at the borders of a block, over several, groups of heads, odd numbers of rows
ATTENTION = [
    (1, 2, 2, 32, 0),
    (1, 2, 1, 16, 63),
    (1, 2, 2, 32, 64),
    (5, 4, 2, 32, 62),
    (17, 3, 3, 48, 60),
    (9, 2, 1, 128, 127),
    (3, 2, 2, 64, 130),
]


@by_dtype
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case, backend, dtype):
    qkv, cos, sin, start, keys, values = attention_case(*case, dtype=dtype)
    caches = [(keys.clone(), values.clone()) for _ in range(2)]
    runs = On(backend), On("reference")
    q = [run("rotate_and_store", qkv, cos, sin, start, *cache) for run, cache in zip(runs, caches, strict=True)]
    assert torch.equal(q[0], q[1])
    for mine, theirs in zip(*caches, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    scale = case[3] ** -0.5
    found, expected = (run("attention", rows, *cache, start, scale) for run, rows, cache in zip(runs, q, caches, strict=True))
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_is_attention(case):
    rows, heads, kv_heads, head, before = case
    qkv, cos, sin, start, keys, values = attention_case(*case)
    q = decoder_reference.rotate_and_store(qkv, cos, sin, start, keys, values)
    found = decoder_reference.attention(q, keys, values, start, head**-0.5)
    # written from the definition in complex numbers and float64: a pair of elements turned is a product
    wide = qkv.double().view(rows, -1, head)
    at = before + torch.arange(rows)
    turn = torch.complex(cos[at].double(), sin[at].double())[:, None]
    pairs = torch.complex(wide[..., : head // 2], wide[..., head // 2 :]) * turn
    turned = torch.cat([pairs.real, pairs.imag], -1)
    for t in range(rows):
        length = before + t + 1
        for h in range(heads):
            kv = h // (heads // kv_heads)
            past = keys[kv].transpose(-1, -2).reshape(-1, head)[:length].double()
            assert torch.allclose(past[before:], turned[: t + 1, heads + kv], rtol=0, atol=1e-5)
            assert torch.equal(
                values[kv].view(-1, head)[before:length], qkv.view(rows, -1, head)[: t + 1, heads + kv_heads + kv]
            )
            weights = torch.softmax(past @ turned[t, h] * head**-0.5, 0)
            expected = weights @ values[kv].view(-1, head)[:length].double()
            # fp32 sums of `head` products in a score of about 1, then a mean of values of about 1
            assert torch.allclose(found.view(rows, heads, head)[t, h].double(), expected, rtol=0, atol=8 * head * EPS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@all_backends
def test_a_key_that_is_not_finite_poisons_the_rows_that_see_it(backend, bad):
    qkv, cos, sin, start, keys, values = attention_case(4, 2, 2, 32, 62)
    qkv.view(4, -1, 32)[2, 2, 3] = bad
    run = On(backend)
    q = run("rotate_and_store", qkv, cos, sin, start, keys, values)
    found = run("attention", q, keys, values, start, 32**-0.5).view(4, 2, 32)
    assert bool(found[2:, 0].isnan().all())
    assert bool(found[:2].isfinite().all())
    assert bool(found[2:, 1].isfinite().all())


@by_dtype
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 5, 64), (2, 33, 65), (3, 16, 63), (5, 20, 200), (9, 3, 1), (17, 100, 192)])
def test_float_linear(rows, n, k, backend, dtype):
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype)
    found = On(backend)("float_linear", x, weight)
    assert found.dtype == dtype
    assert torch.equal(found, decoder_reference.float_linear(x, weight))
    exact = x.double() @ weight.double().T
    # k / SUMS + 6 additions in a row, each off by EPS of a partial sum below the sum of magnitudes; and the rounding to dtype
    within = (k / decoder_reference.SUMS + 8) * EPS * (x.double().abs() @ weight.double().abs().T)
    rounding = exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0
    assert bool(((found.double() - exact).abs() <= within + rounding).all())


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 64), (5, 7, 33), (4, 64, 2048), (9, 16, 192)])
@by_backend
def test_linear16(rows, n, k, backend):
    x, weight = randn(rows, k), randn(n, k, seed=1)
    split = quantize_split(weight)
    found = On(backend)("linear16", x, split)
    assert torch.equal(found, decoder_reference.linear16(x, split))
    # half a step of both factors at each of the k products, steps of their rows' and channels' maxima
    step = (
        x.abs().amax(-1)[:, None].double() / 32639 * weight.abs().sum(-1)
        + weight.abs().amax(-1) / 32512 * x.abs().sum(-1)[:, None]
    )
    assert bool(((found - x.double() @ weight.double().T).abs() <= step / 2 * 1.001).all())


def test_split_weights_are_the_int16_ones():
    weight = randn(9, 50)
    weight[3] = 0
    split = quantize_split(weight)
    high, low = split.values.long().chunk(2)
    assert int(split.values.min()) >= -127
    # half a step of a channel's largest weight in 32512 steps
    assert bool(
        ((255 * high + low) * split.scales[:, None].double() - weight).abs().le(weight.abs().amax(-1)[:, None] / 65000).all()
    )
    assert split.values[3].tolist() == split.values[12].tolist() == [0] * 50


@by_dtype
@pytest.mark.parametrize(("rows", "h"), [(1, 16), (3, 33), (5, 192), (17, 2048)])
def test_rms_norm(rows, h, backend, dtype):
    x, weight = (
        randn(rows, h, dtype=dtype) * 10 ** torch.arange(-5.0, rows - 5)[:, None].to(dtype),
        randn(h, seed=1, dtype=dtype),
    )
    found = On(backend)("rms_norm", x, weight, 1e-6)
    assert found.dtype == dtype
    assert torch.equal(found, decoder_reference.rms_norm(x, weight, 1e-6))
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    # the row in steps of 2**-21 of its largest value, six fp32 roundings; and the rounding to dtype
    assert torch.allclose(found.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 2.0**-20, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@all_backends
def test_norm_of_zeros_of_tiny_and_of_huge_rows(backend, bad):
    x = randn(5, 40)
    x[0], x[1], x[2, 7] = 0, x[1] * 1e-38, bad
    x[3] *= 1e15
    run = On(backend)
    found = run("rms_norm", x, torch.ones(40), 0.0)
    # without eps a row of zeros is 0 / 0, as it is by definition
    assert bool(found[0].isnan().all())
    assert bool(found[2].isnan().all())
    assert float(found[3].square().mean()) == pytest.approx(1, rel=1e-5)
    assert float(run("rms_norm", x, torch.ones(40), 1e-6)[0].abs().max()) == 0


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 16, 4), (5, 64, 6), (17, 5, 5), (3, 8, 1)])
@by_backend
def test_route(rows, experts, top_k, normalize, backend):
    logits = randn(rows, experts) * 3
    ids, weights = On(backend)("route", logits, top_k, normalize=normalize)
    other_ids, other_weights = decoder_reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(ids, other_ids)
    assert torch.equal(weights, other_weights)
    exact, expected = logits.double().softmax(-1).topk(top_k)
    exact = exact / exact.sum(-1, keepdim=True) if normalize else exact
    assert torch.equal(ids, expected)
    # sums of `experts` terms
    assert torch.allclose(weights.double(), exact, rtol=2 * experts * EPS, atol=0)


@all_backends
def test_equal_experts_the_lowest_id_first(backend):
    logits = torch.tensor([[1.0, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0], [-1, -1, 3, -1, 3, -1]])
    assert On(backend)("route", logits, 4, normalize=False)[0].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [2, 4, 0, 1]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@all_backends
def test_scores_that_are_not_finite_give_nan_weights_and_ids_in_range(backend, bad):
    logits = randn(3, 6)
    logits[1, 2] = bad
    logits[2] = bad
    ids, weights = On(backend)("route", logits, 3, normalize=True)
    assert bool(weights[1:].isnan().all())
    assert bool(weights[0].isfinite().all())
    for row in ids.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(6))


@by_dtype
@pytest.mark.parametrize("shape", [(1, 33, 17, 5, 3), (5, 192, 96, 16, 4), (9, 64, 128, 3, 1)], ids=str)
def test_float_experts(shape, backend, dtype, monkeypatch):
    tokens, hidden, inner, count, top_k = shape
    x, gate_up, down = (
        randn(tokens, hidden, dtype=dtype),
        randn(count, 2 * inner, hidden, seed=1),
        randn(count, hidden, inner, seed=2),
    )
    gate_up, down = (gate_up / hidden**0.5).to(dtype), (down / inner**0.5).to(dtype)
    ids, weights = decoder_reference.route(randn(tokens, count, seed=3), top_k, normalize=False)
    expected = decoder_reference.float_experts(x, gate_up, down, ids, weights)
    poison(monkeypatch)
    found = On(backend)("float_experts", x, gate_up, down, ids, weights)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    exact = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for slot in range(top_k):
            gate, up = (gate_up[ids[t, slot]].double() @ x[t].double()).chunk(2)
            exact[t] += weights[t, slot].double() * (down[ids[t, slot]].double() @ (gate / (1 + (-gate).exp()) * up))
    # two products of fp32 sums over at most 192 terms of order 1; and the rounding to dtype
    assert torch.allclose(found.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 0, atol=400 * EPS)


@by_backend
def test_what_does_not_fit_is_refused(backend):
    run, x = On(backend), randn(2, 8)
    with pytest.raises(InputError, match=r"x is \(2, 8\), expected rows of 9 values"):
        run("linear16", x, quantize_split(randn(3, 9)))
    with pytest.raises(InputError, match=r"x is \(2, 8\), expected rows of 9 values"):
        run("float_linear", x, randn(3, 9))
    with pytest.raises(InputError, match=r"float64, expected contiguous float32 or bfloat16"):
        run("float_linear", x, randn(3, 8, dtype=torch.float64))
    with pytest.raises(InputError, match=r"x is \(2, 8\), expected rows of 9 values"):
        run("float_experts", x, randn(3, 8, 9), randn(3, 9, 4), torch.tensor([[0], [2]]), torch.ones(2, 1))


def test_an_expert_that_is_not_there_is_refused_where_the_host_need_not_wait():
    with pytest.raises(InputError, match="token 1 is routed to experts"):
        decoder_cpu.float_experts(randn(2, 8), randn(3, 8, 8), randn(3, 8, 4), torch.tensor([[0], [3]]), torch.ones(2, 1))
