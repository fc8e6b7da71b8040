"""The Triton backend: the bits of `reference`, with every sum on the int8 tensor cores, in five kernels.

`_quantize_rows` splits int16 rows in two int8 halves, `_plan` sorts token-expert pairs by expert, `_gate_up_silu` and `_linear`
multiply, `_combine` adds a token's experts in the order of its ids. The host never waits for the device, no atomics are used,
and grids depend on shapes alone, so that a CUDA graph can capture a call.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Kernels are in Triton's language, whose values have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.errors import InputError
from dispatch.kernels import reference
from dispatch.quantization import SMALLEST_SCALE, Int8Weight

TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
"""One tile for all row counts: 16 rows are the least a tensor core takes, and weights are read once up to 16 rows an expert."""
NO_FMA = {"enable_fp_fusion": False}
"""A fused multiply-add rounds once where the reference rounds twice."""
COLUMN_LIMIT = (2**31 - 1) // (128 * 127)
"""132104: the most products of a low half (-128 to 127) and a weight (-127 to 127) that an int32 accumulator holds."""
TOKEN_LIMIT = 1024
"""Tokens in one launch: the plan compares all pairs with all others, and buffers grow with it."""

ROW_LIMIT = tl.constexpr(float(reference.ROW_LIMIT))
SMALLEST = tl.constexpr(SMALLEST_SCALE)
ROUNDER = tl.constexpr(1.5 * 2**23)
"""fp32 has no digits behind the point here: adding and subtracting it rounds |x| <= 2**22 half to even, as IEEE sums do."""
LOG2_E = tl.constexpr(reference.LOG2_E)
LN_2_HIGH = tl.constexpr(reference.LN_2_HIGH)
LN_2_LOW = tl.constexpr(reference.LN_2_LOW)
TAYLOR = tl.constexpr(reference.TAYLOR)
NAN = tl.constexpr(float("nan"))
INFINITY_BITS = tl.constexpr(0x7F800000)


def linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """Rows x [M, K] times weight [N, K] -> [M, N] in x's dtype, as `reference.linear`."""
    rows, scales = quantized(x, weight.values.shape[1])
    out = torch.empty(len(x), len(weight.values), dtype=x.dtype, device=x.device)
    dense(rows, scales, weight.values, weight.scales, out)
    return out


def integer_matmul(rows: Tensor, values: Tensor) -> Tensor:
    """int16 rows [M, K] within 32639 times int8 values [N, K] -> int64 sums [M, N], from the kernel of `linear`."""
    _check_columns(rows, values.shape[1])
    high = (rows.int() + 128) >> 8
    padded = torch.zeros(2, len(rows), _padded(rows.shape[1]), dtype=torch.int8, device=rows.device)
    padded[0, :, : rows.shape[1]], padded[1, :, : rows.shape[1]] = high, rows - 256 * high
    out = torch.empty(len(rows), len(values), dtype=torch.int64, device=rows.device)
    unused = torch.ones(max(len(rows), len(values)), device=rows.device)
    dense(padded, unused, values.contiguous(), unused, out)
    return out


def experts(x: Tensor, gate_up: Int8Weight, down: Int8Weight, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts, as `reference.experts`.

    On a GPU the ids are not waited for: a token with bad ids gets a row of NaN, which no gate takes for a result.
    """
    count, hidden, intermediate = down.values.shape
    reference.check_routing_shape(ids, weights, len(x))
    if not ids.is_cuda and not ids.is_meta:
        reference.check_routing(ids, weights, len(x), count)
    _check_columns(x, hidden)
    _check_columns(x.new_empty(0, intermediate), intermediate)
    out = torch.empty(len(x), hidden, dtype=x.dtype, device=x.device)
    for first in range(0, len(x), TOKEN_LIMIT):
        part = slice(first, first + TOKEN_LIMIT)
        _experts(x[part], gate_up, down, ids[part].contiguous(), weights[part].contiguous(), out[part])
    return out


def _experts(x: Tensor, gate_up: Int8Weight, down: Int8Weight, ids: Tensor, weights: Tensor, out: Tensor) -> None:
    count, hidden, intermediate = down.values.shape
    top_k = ids.shape[1]
    pairs = ids.numel()
    # every expert may have one tile that is not full
    tiles = min(count, pairs) + pairs // TILE["BLOCK_M"]
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    plan = torch.empty(3, tiles, dtype=torch.int32, device=x.device)
    block_p = 64
    _plan[(triton.cdiv(pairs, block_p) + 1,)](
        ids,
        order,
        plan,
        pairs,
        count,
        tiles,
        BLOCK_M=TILE["BLOCK_M"],
        BLOCK_P=block_p,
        BLOCK_E=triton.next_power_of_2(count),
        num_warps=8,
        **NO_FMA,
    )
    rows, scales = quantized(x, hidden)
    inner = torch.empty(pairs, intermediate, dtype=torch.float32, device=x.device)
    _gate_up_silu[(tiles, triton.cdiv(intermediate, TILE["BLOCK_N"]))](
        rows,
        scales,
        gate_up.values,
        gate_up.scales,
        inner,
        order,
        plan,
        len(x),
        intermediate,
        hidden,
        rows.shape[2],
        tiles,
        TOP_K=top_k,
        EVEN_K=hidden % TILE["BLOCK_K"] == 0,
        **TILE,
        **NO_FMA,
    )
    rows, scales = quantized(inner, intermediate)
    of_pairs = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    _linear[(tiles, triton.cdiv(hidden, TILE["BLOCK_N"]))](
        rows,
        scales,
        down.values,
        down.scales,
        of_pairs,
        order,
        plan,
        weights,
        pairs,
        hidden,
        intermediate,
        rows.shape[2],
        tiles,
        GROUPED=True,
        RAW=False,
        EVEN_K=intermediate % TILE["BLOCK_K"] == 0,
        **TILE,
        **NO_FMA,
    )
    block = 1024
    _combine[(len(x), triton.cdiv(hidden, block))](
        of_pairs, ids, out, hidden, count, TOP_K=top_k, BLOCK_S=triton.next_power_of_2(top_k), BLOCK=block, **NO_FMA
    )


def dense(rows: Tensor, scales: Tensor, values: Tensor, channel_scales: Tensor, out: Tensor) -> None:
    (_, m, stride), (n, k) = rows.shape, values.shape
    tiles = triton.cdiv(m, TILE["BLOCK_M"])
    if m == 0:
        return
    _linear[(tiles, triton.cdiv(n, TILE["BLOCK_N"]))](
        rows,
        scales,
        values,
        channel_scales,
        out,
        scales,
        scales,
        scales,
        m,
        n,
        k,
        stride,
        tiles,
        GROUPED=False,
        RAW=out.dtype == torch.int64,
        EVEN_K=k % TILE["BLOCK_K"] == 0,
        **TILE,
        **NO_FMA,
    )


def quantized(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Rows x [M, K] -> int8 [2, M, K up to a whole block], their high and low halves with zeros behind, and scales [M]."""
    _check_columns(x, columns)
    rows = torch.empty(2, len(x), _padded(columns), dtype=torch.int8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        block = 1024
        _quantize_rows[(len(x),)](x.contiguous(), rows, scales, len(x), columns, rows.shape[2], BLOCK=block, **NO_FMA)
    return rows, scales


def _padded(columns: int) -> int:
    return int(triton.cdiv(columns, TILE["BLOCK_K"])) * TILE["BLOCK_K"]


def _check_columns(x: Tensor, columns: int) -> None:
    reference.check_rows(x, columns)
    if columns > COLUMN_LIMIT:
        raise InputError(
            f"rows of {columns} values could overflow an int32 sum, expected at most {COLUMN_LIMIT}: split the weight"
        )


@triton.jit
def _quantize_rows(x, out, scales, M, K, STRIDE, BLOCK: tl.constexpr):
    """Steps 1 and 2 for the row of this program: value = 256 * high + low."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((), 0, tl.int32)
    for start in range(0, K, BLOCK):
        at = start + lane
        value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        # without their sign, floats are ordered as integers are, inf and NaN above all others
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(bits, 0))
    finite = largest < INFINITY_BITS
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full((), ROW_LIMIT, tl.float32))
    scale = tl.where(scale > SMALLEST, scale, SMALLEST)
    tl.store(scales + row, tl.where(finite, scale, NAN))
    for start in range(0, STRIDE, BLOCK):
        at = start + lane
        value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        # the scale of a row that is not finite says so; its values only have to be in range
        value = tl.where(finite, value, 0.0)
        value = ((tl.div_rn(value, tl.zeros_like(value) + scale) + ROUNDER) - ROUNDER).to(tl.int32)
        high = (value + 128) >> 8
        tl.store(out + row * STRIDE + at, high.to(tl.int8), mask=at < STRIDE)
        tl.store(out + (M + row) * STRIDE + at, (value - 256 * high).to(tl.int8), mask=at < STRIDE)


@triton.jit
def _experts_of(ids, pair, PAIRS, EXPERTS):
    """Expert of each pair: EXPERTS for a number that is none, and one more beyond the last pair, so that it sorts behind."""
    expert = tl.load(ids + pair, mask=pair < PAIRS, other=0)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)
    return tl.where(pair < PAIRS, expert, EXPERTS + 1)


@triton.jit
def _plan(ids, order, plan, PAIRS, EXPERTS, TILES, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """order [PAIRS]: pairs sorted by expert; plan [3, TILES]: each tile's expert (-1: none), first and end place in order.

    A pair's place is the number of pairs before it, counted by one program a block; the last program makes the tiles.
    """
    lane = tl.arange(0, BLOCK_P)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        pair = tl.program_id(0) * BLOCK_P + lane
        expert = _experts_of(ids, pair, PAIRS, EXPERTS)[:, None]
        place = tl.zeros((BLOCK_P,), tl.int32)
        for start in range(0, PAIRS, BLOCK_P):
            other = start + lane
            of_other = _experts_of(ids, other, PAIRS, EXPERTS)[None, :]
            before = (of_other < expert) | ((of_other == expert) & (other[None, :] < pair[:, None]))
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(order + place, pair, mask=pair < PAIRS)
    else:
        number = tl.arange(0, BLOCK_E)
        rows = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, PAIRS, BLOCK_P):
            of_other = _experts_of(ids, start + lane, PAIRS, EXPERTS)[None, :]
            rows += tl.sum(((of_other == number[:, None]) & (number[:, None] < EXPERTS)).to(tl.int32), 1)
        tiles = (rows + BLOCK_M - 1) // BLOCK_M
        end_tile = tl.cumsum(tiles, 0)
        end_row = tl.cumsum(rows, 0)
        # what must be added to a tile's number times BLOCK_M to get its first row
        shift = (end_row - rows) - (end_tile - tiles) * BLOCK_M
        for start in range(0, TILES, BLOCK_P):
            tile = start + lane
            expert = tl.sum((end_tile[None, :] <= tile[:, None]).to(tl.int32), 1)
            own = number[None, :] == expert[:, None]
            first = tile * BLOCK_M + tl.sum(tl.where(own, shift[None, :], 0), 1)
            end = tl.sum(tl.where(own, end_row[None, :], 0), 1)
            tl.store(plan + tile, tl.where(expert < EXPERTS, expert, -1), mask=tile < TILES)
            tl.store(plan + TILES + tile, first, mask=tile < TILES)
            tl.store(plan + 2 * TILES + tile, end, mask=tile < TILES)


@triton.jit
def _whole_sums(high, low):
    """Step 3 from the sums of both halves: 256 * high + low passes 2**31 and what fp32 holds, but never int64."""
    return high.to(tl.int64) * 256 + low.to(tl.int64)


@triton.jit
def exp_exact(t):
    """`reference.exp`."""
    t = tl.where(t < -87.0, -87.0, t)
    t = tl.where(t > 88.0, 88.0, t)
    t = tl.where(t == t, t, 0.0)
    n = (t * LOG2_E + ROUNDER) - ROUNDER
    r = (t - n * LN_2_HIGH) - n * LN_2_LOW
    series = tl.zeros_like(r) + TAYLOR[0]
    for i in tl.static_range(1, 8):
        series = series * r + TAYLOR[i]
    return series * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _silu(x):
    return tl.div_rn(x, 1.0 + exp_exact(-x))


@triton.jit
def _gate_up_silu(
    rows,
    row_scales,
    values,
    channel_scales,
    out,
    order,
    plan,
    TOKENS,
    N,
    K,
    STRIDE,
    TILES,
    TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [pairs, N] = silu(gate) * up for one tile of an expert; values [experts, 2 * N, K], the gate's before those of up."""
    tile = tl.program_id(0)
    expert = tl.load(plan + tile)
    if expert < 0:
        return
    place = tl.load(plan + TILES + tile) + tl.arange(0, BLOCK_M)
    used = place < tl.load(plan + 2 * TILES + tile)
    pair = tl.load(order + place, mask=used, other=0)
    token = (pair // TOP_K).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    high = rows + token[:, None] * STRIDE + k[None, :]
    low = high + tl.cast(TOKENS, tl.int64) * STRIDE
    # columns beyond N take the last one again, so that loads need no mask
    column = tl.minimum(n, N - 1)
    first = expert.to(tl.int64) * 2 * N
    gate = values + (first + column)[:, None] * K + k[None, :]
    up = values + (first + N + column)[:, None] * K + k[None, :]
    gate_high = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    gate_low = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    up_high = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    up_low = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        of_high = tl.load(high + start)
        of_low = tl.load(low + start)
        inside = EVEN_K | ((start + k)[None, :] < K)
        of_gate = tl.load(gate + start, mask=inside, other=0)
        of_up = tl.load(up + start, mask=inside, other=0)
        gate_high = tl.dot(of_high, tl.trans(of_gate), gate_high, out_dtype=tl.int32)
        gate_low = tl.dot(of_low, tl.trans(of_gate), gate_low, out_dtype=tl.int32)
        up_high = tl.dot(of_high, tl.trans(of_up), up_high, out_dtype=tl.int32)
        up_low = tl.dot(of_low, tl.trans(of_up), up_low, out_dtype=tl.int32)
    row_scale = tl.load(row_scales + token)[:, None]
    gate_scale = tl.load(channel_scales + first + column)[None, :]
    up_scale = tl.load(channel_scales + first + N + column)[None, :]
    of_gate = _whole_sums(gate_high, gate_low).to(tl.float32) * row_scale * gate_scale
    of_up = _whole_sums(up_high, up_low).to(tl.float32) * row_scale * up_scale
    at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, _silu(of_gate) * of_up, mask=used[:, None] & (n < N)[None, :])


@triton.jit
def _linear(
    rows,
    row_scales,
    values,
    channel_scales,
    out,
    order,
    plan,
    weights,
    M,
    N,
    K,
    STRIDE,
    TILES,
    GROUPED: tl.constexpr,
    RAW: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [M, N] for one tile of a matrix or, GROUPED, of an expert, times the pairs' routing weights; RAW: bare sums."""
    tile = tl.program_id(0)
    if GROUPED:
        expert = tl.load(plan + tile)
        if expert < 0:
            return
        place = tl.load(plan + TILES + tile) + tl.arange(0, BLOCK_M)
        used = place < tl.load(plan + 2 * TILES + tile)
        row = tl.load(order + place, mask=used, other=0).to(tl.int64)
        first = expert.to(tl.int64) * N
    else:
        row = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        used = row < M
        row = tl.minimum(row, M - 1)
        first = tl.zeros((), tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    high = rows + row[:, None] * STRIDE + k[None, :]
    low = high + tl.cast(M, tl.int64) * STRIDE
    column = first + tl.minimum(n, N - 1)
    weight = values + column[:, None] * K + k[None, :]
    sum_high = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    sum_low = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        of_high = tl.load(high + start)
        of_low = tl.load(low + start)
        of_weight = tl.load(weight + start, mask=EVEN_K | ((start + k)[None, :] < K), other=0)
        sum_high = tl.dot(of_high, tl.trans(of_weight), sum_high, out_dtype=tl.int32)
        sum_low = tl.dot(of_low, tl.trans(of_weight), sum_low, out_dtype=tl.int32)
    result = _whole_sums(sum_high, sum_low)
    if not RAW:
        result = result.to(tl.float32) * tl.load(row_scales + row)[:, None] * tl.load(channel_scales + column)[None, :]
        if GROUPED:
            result = result * tl.load(weights + row).to(tl.float32)[:, None]
    tl.store(out + row[:, None] * N + n[None, :], result.to(out.dtype.element_ty), mask=used[:, None] & (n < N)[None, :])


@triton.jit
def _combine(of_pairs, ids, out, HIDDEN, EXPERTS, TOP_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr):
    """Step 6 for one token: out [tokens, HIDDEN]; NaN where its ids are not different numbers in [0, EXPERTS)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_S)
    # places beyond TOP_K get numbers that nothing equals
    expert = tl.load(ids + token * TOP_K + slot, mask=slot < TOP_K, other=0)
    outside = (slot < TOP_K) & ((expert < 0) | (expert >= EXPERTS))
    expert = tl.where(slot < TOP_K, expert, -1 - slot)
    twice = (expert[:, None] == expert[None, :]) & (slot[:, None] < slot[None, :])
    bad = tl.sum(outside.to(tl.int32), 0) + tl.sum(tl.sum(twice.to(tl.int32), 1), 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        total += tl.load(of_pairs + (token * TOP_K + i) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
    total = tl.where(bad > 0, NAN, total)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
