"""The Triton kernels against float64 and, bit for bit, the reference: in the interpreter or, marked gpu, on the device."""

import os

import pytest
import torch
from int8_layers import in_float32, in_float64, layer, poison, rows_differ_with_company

from dispatch.errors import InputError
from dispatch.kernels import grouped_gemm, reference
from dispatch.quantization import Int8Weight, quantize

# hidden, intermediate, experts, top_k, tokens
SHAPES = {
    "whole blocks": (256, 128, 8, 2, 5),
    "tails": (192, 96, 16, 4, 5),
    "odd K": (33, 17, 5, 3, 9),
    "one token": (40, 72, 3, 2, 1),
    "several tiles an expert": (64, 48, 2, 2, 40),
    "experts without tokens": (16, 256, 64, 6, 3),
    "one column inside": (100, 1, 2, 1, 4),
    "one column outside": (1, 7, 2, 2, 3),
    "more experts than one block": (32, 32, 100, 8, 12),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU here, so that the kernels are compiled for it and not interpreted")
    return request.param


@pytest.fixture
def run(device):
    """A function of grouped_gemm or reference with its arguments on the device and its result back."""

    def call(function, *arguments):
        def moved(value):
            if isinstance(value, Int8Weight):
                return Int8Weight(values=value.values.to(device), scales=value.scales.to(device))
            return value.to(device)

        return function(*map(moved, arguments)).cpu()

    return call


@pytest.fixture
def experts(run):
    return lambda *case: run(grouped_gemm.experts, *case)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer(experts, run, shape, monkeypatch):
    case = layer(*SHAPES[shape])
    x, gate_up = case[:2]
    one = Int8Weight(values=gate_up.values[1].clone(), scales=gate_up.scales[1].clone())
    rows, _ = reference.quantize_rows(x)
    expected = in_float64(*case)
    bits = reference.experts(*case), reference.linear(x, one), reference.integer_matmul(rows, one.values)
    poison(monkeypatch)
    found = experts(*case), run(grouped_gemm.linear, x, one), run(grouped_gemm.integer_matmul, rows, one.values)
    # a row's step is 1 / 32639 of its largest value, its rounding 1/sqrt(12) of that; two roundings and the sum over K stay
    # well below 10 steps of relative error
    assert float((found[0] - expected).norm() / expected.norm()) < 10 / 32639
    for mine, theirs in zip(found, bits, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_a_row_does_not_depend_on_its_company(experts):
    # alone, among 2 to 64, and in another order
    assert not rows_differ_with_company(experts, shape=(48, 40, 6, 2), sizes=(2, 9, 16, 17, 33), alone=range(0, 64, 9))


def test_float_sums_do_depend_on_it():
    # the positive control: the same comparison must find a difference here, or it finds nothing
    assert rows_differ_with_company(in_float32, shape=(48, 40, 6, 2), sizes=(2, 9, 16, 17, 33), alone=range(0, 64, 9))


def test_all_tokens_on_one_expert(experts):
    x, gate_up, down, ids, weights = layer(48, 40, 5, 1, 35)
    ids[:] = 3
    assert torch.equal(experts(x, gate_up, down, ids, weights), reference.experts(x, gate_up, down, ids, weights))


def test_more_tokens_than_one_launch_takes(experts, monkeypatch):
    case = layer(48, 40, 5, 3, 9)
    monkeypatch.setattr(grouped_gemm, "TOKEN_LIMIT", 4)
    assert torch.equal(experts(*case), reference.experts(*case))


def test_no_tokens(experts, run):
    x, gate_up, down, ids, weights = layer(48, 40, 5, 3, 2)
    assert experts(x[:0], gate_up, down, ids[:0], weights[:0]).shape == (0, 48)
    assert run(grouped_gemm.linear, x[:0], quantize(torch.ones(3, 48))).shape == (0, 3)


# the largest halves: 127 and 127, 127 and -128, -127 and -127, -126 and -128
@pytest.mark.parametrize("value", [32639, 32384, -32639, -32384])
@pytest.mark.parametrize("k", [1, 15, 16, 17, 127, 129, 10944, 20000, grouped_gemm.COLUMN_LIMIT])
def test_sums_are_exact_at_the_extremes(run, value, k):
    rows = torch.full((2, k), value, dtype=torch.int16)
    rows[1, 1::2] *= -1
    values = torch.tensor([127, -127], dtype=torch.int8)[:, None].repeat(1, k)
    whole, left = 127 * value * k, 127 * value * (k % 2)
    assert run(grouped_gemm.integer_matmul, rows, values).tolist() == [[whole, -whole], [left, -left]]


def test_more_columns_than_the_sums_hold_are_refused():
    k = grouped_gemm.COLUMN_LIMIT + 1
    assert 128 * 127 * (k - 1) < 2**31 <= 128 * 127 * k
    with pytest.raises(InputError, match="rows of 132105 values could overflow an int32 sum, expected at most 132104"):
        grouped_gemm.linear(torch.ones(1, k), quantize(torch.ones(1, k)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_poisons_itself_alone(experts, bad):
    x, *rest = layer(64, 48, 6, 3, 5)
    x[2, 7] = bad
    found, expected = experts(x, *rest), reference.experts(x, *rest)
    assert bool(found[2].isnan().all())
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_rows_of_zeros_and_tiny_rows(run):
    weight = quantize(torch.randn(5, 33))
    x = torch.randn(3, 33)
    x[1] = 0
    x[2] *= 1e-37
    found = run(grouped_gemm.linear, x, weight)
    assert found[1].tolist() == [0.0] * 5
    assert torch.equal(found, reference.linear(x, weight))


def test_silu_over_its_range(experts):
    # one expert that passes x through: gate = x * 100, up = 1, down = identity
    x = torch.linspace(-1.2, 1.2, 64)[:, None].repeat(1, 2)
    x[:, 1] = 1
    gate_up = quantize(torch.tensor([[[100.0, 0], [0, 1]]]).repeat_interleave(2, 1))
    case = (x, gate_up, quantize(torch.eye(2)[None]), torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1))
    assert torch.equal(experts(*case), reference.experts(*case))


@pytest.mark.parametrize("row", [[0, 6, 1], [-1, 0, 1], [3, 0, 3], [2**40, 0, 1]])
def test_bad_expert_ids_are_refused(experts, device, row):
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    clean = experts(x, gate_up, down, ids, weights)
    ids[3] = torch.tensor(row)
    if device == "cpu":
        with pytest.raises(InputError, match="token 3 is routed to experts"):
            experts(x, gate_up, down, ids, weights)
    else:
        found = experts(x, gate_up, down, ids, weights)
        assert bool(found[3].isnan().all())
        assert torch.equal(found[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


@pytest.mark.parametrize("row", [[0, 6, 1], [-1, 0, 1], [3, 0, 3], [2**40, 0, 1]])
def test_bad_expert_ids_give_nan_where_nobody_waits_for_them(monkeypatch, device, row):
    # what the device does: the check on the host is taken away
    if device == "cuda":
        pytest.skip("test_bad_expert_ids_are_refused shows it on the device itself")
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    clean = reference.experts(x, gate_up, down, ids, weights)
    ids[3] = torch.tensor(row)
    monkeypatch.setattr(reference, "check_routing", lambda *_: None)
    found = grouped_gemm.experts(x, gate_up, down, ids, weights)
    assert bool(found[3].isnan().all())
    assert torch.equal(found[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


def test_shapes_that_do_not_fit_are_refused(experts, run):
    x, gate_up, down, ids, weights = layer(64, 48, 6, 3, 5)
    with pytest.raises(InputError, match=r"x is \(5, 63\), expected rows of 64 values"):
        experts(x[:, 1:], gate_up, down, ids, weights)
    with pytest.raises(InputError, match=r"x is \(5, 64\), expected rows of 3 values"):
        run(grouped_gemm.linear, x, quantize(torch.ones(2, 3)))
    with pytest.raises(InputError, match=r"expected whole numbers \[5, k\] and weights of the same shape"):
        experts(x, gate_up, down, ids[:4], weights[:4])


@pytest.mark.parametrize("fault", ["ROW_LIMIT", "LN_2_LOW", "the last kernel does not run"])
def test_a_planted_fault_is_seen(experts, device, monkeypatch, fault):
    if device == "cuda":
        pytest.skip("kernels compiled for a GPU refuse constants that have changed")
    case = layer(64, 48, 6, 3, 5)
    expected = reference.experts(*case)
    if fault == "the last kernel does not run":
        poison(monkeypatch)
        monkeypatch.setattr(grouped_gemm, "_combine", {(5, 1): lambda *_, **__: None})
    else:
        constant = getattr(grouped_gemm, fault)
        monkeypatch.setattr(grouped_gemm, fault, type(constant)(constant.value * 1.01))
    assert not torch.equal(experts(*case), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_device(dtype):
    # the interpreter's bfloat16 is wrong, so that this would prove nothing there
    x, gate_up, down, ids, weights = layer(256, 128, 8, 3, 9)
    case = (x.to(dtype), gate_up, down, ids, weights.to(dtype))
    on_gpu = [
        Int8Weight(values=v.values.cuda(), scales=v.scales.cuda()) if isinstance(v, Int8Weight) else v.cuda() for v in case
    ]
    found = grouped_gemm.experts(*on_gpu)
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), reference.experts(*case))


@pytest.mark.gpu
def test_a_cuda_graph_captures_a_layer():
    x, gate_up, down, ids, weights = layer(256, 128, 8, 3, 9)
    gate_up, down = (Int8Weight(values=w.values.cuda(), scales=w.scales.cuda()) for w in (gate_up, down))
    x, ids, weights = x.cuda(), ids.cuda(), weights.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_gemm.experts(x, gate_up, down, ids, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_gemm.experts(x, gate_up, down, ids, weights)
    x.copy_(x.flip(0))
    ids.copy_(ids.flip(0))
    graph.replay()
    assert torch.equal(out, grouped_gemm.experts(x, gate_up, down, ids, weights))
