"""The Triton backend of `decoder_reference`: same functions, same bits. No host waits, no atomics, grids by shapes alone.

Running sums over lanes are halved in pairs that the code names (`_halved`), since what tl.sum does with more than two numbers
depends on the layout that the compiler chose.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Kernels are in Triton's language, whose values have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispatch.errors import InputError
from dispatch.kernels import decoder_reference, reference
from dispatch.kernels.grouped_gemm import INFINITY_BITS, NAN, NO_FMA, ROUNDER, dense, exp_exact, quantized
from dispatch.quantization import SplitWeight

SUMS = tl.constexpr(decoder_reference.SUMS)
KEYS = tl.constexpr(decoder_reference.KEYS)
CHANNELS = 16
"""Channels of a float weight that one program multiplies."""
FLOATS = (torch.float32, torch.bfloat16)


def linear16(x: Tensor, weight: SplitWeight) -> Tensor:
    """Rows x [T, K] times int16 weights [N, K] -> float32 [T, N], as `decoder_reference.linear16`."""
    rows, scales = quantized(x, weight.values.shape[1])
    sums = torch.empty(len(x), len(weight.values), dtype=torch.int64, device=x.device)
    # bare sums: no scale is read
    dense(rows, scales, weight.values, scales, sums)
    return decoder_reference.from_halves(sums, scales, weight)


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Rows x [T, K] times float32 or bf16 weights [N, K] -> [T, N], as `decoder_reference.float_linear`."""
    reference.check_rows(x, weight.shape[1])
    return _products(x, weight, x.dtype)


def _products(x: Tensor, weight: Tensor, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """[rows, N] of x [rows, K] and weight [N, K] or, with the expert of each row, [E, N, K]."""
    *_, n, k = _checked(weight).shape
    out = torch.empty(len(x), n, dtype=dtype, device=x.device)
    grid = (len(x), triton.cdiv(n, CHANNELS))
    _float_linear[grid](x.contiguous(), weight, ids if ids is not None else x, out, n, k, ids is not None, CHANNELS, **NO_FMA)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows x [T, H] over their root mean square, times weight [H], as `decoder_reference.rms_norm`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm[(len(x),)](x.contiguous(), weight, out, eps, x.shape[1], BLOCK=1024, **NO_FMA)
    return out


def rotate_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [T, heads, D] of qkv at its positions, k and v into the caches, as `decoder_reference.rotate_and_store`."""
    kv_heads, blocks, head, _ = _checked(keys).shape
    heads = qkv.shape[1] // head - 2 * kv_heads
    q = torch.empty(len(qkv), heads, head, dtype=qkv.dtype, device=qkv.device)
    grid = (len(qkv), heads + 2 * kv_heads)
    half = triton.next_power_of_2(head // 2)
    _rotate_and_store[grid](qkv, cos, sin, start, q, keys, _checked(values), heads, kv_heads, blocks, head, HALF=half, **NO_FMA)
    return q


def attention(q: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    """[T, heads * D] of q [T, heads, D] over the keys up to each row's position, as `decoder_reference.attention`."""
    t, heads, head = q.shape
    kv_heads, blocks = _checked(keys).shape[:2]
    # of each row, head and block: D sums, the total weight and the largest score
    parts = torch.empty(t * heads, blocks, head + 2, device=q.device)
    out = torch.empty(t, heads * head, dtype=q.dtype, device=q.device)
    width = triton.next_power_of_2(head)
    _attend[(t * heads, blocks)](
        q.contiguous(),
        keys,
        _checked(values),
        start,
        parts,
        scale,
        heads,
        heads // kv_heads,
        blocks,
        D=head,
        BLOCK=width,
        **NO_FMA,
    )
    _join_blocks[(t * heads,)](parts, start, out, heads, blocks, head, BLOCK=width, num_warps=1, **NO_FMA)
    return out


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """ids and weights [T, top_k] of fp32 logits [T, E], as `decoder_reference.route`."""
    t, experts = logits.shape
    ids = torch.empty(t, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(t, top_k, device=logits.device)
    blocks = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    _route[(t,)](logits, ids, weights, experts, top_k, normalize, *blocks, num_warps=1, **NO_FMA)
    return ids, weights


def float_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts with float32 or bf16 weights, as `decoder_reference.float_experts`.

    The ids are not checked, for that the host would have to wait: those of `route` are right.
    """
    top_k, pairs = ids.shape[1], ids.flatten()
    reference.check_rows(x, down.shape[1])
    reference.check_routing_shape(ids, weights, len(x))
    rows = x[:, None].expand(-1, top_k, -1).reshape(len(pairs), -1)
    gate, up = _products(rows, gate_up, torch.float32, pairs).chunk(2, -1)
    y = _products(reference.silu(gate) * up, down, torch.float32, pairs).view(len(x), top_k, -1)
    out = torch.zeros(x.shape, device=x.device)
    for slot in range(top_k):
        out += y[:, slot] * weights[:, slot, None]
    return out.to(x.dtype)


def _checked(tensor: Tensor) -> Tensor:
    if tensor.dtype not in FLOATS or not tensor.is_contiguous():
        raise InputError(f"a tensor of {tensor.dtype}, expected contiguous float32 or bfloat16: load the model in one of them")
    return tensor


@triton.jit
def _halved(sums, FROM: tl.constexpr, REST: tl.constexpr):
    """[FROM * REST] as FROM rows, the upper half added to the lower until one is left: [REST]. FROM is a power of two."""
    if FROM > 1:
        return _halved(tl.sum(tl.reshape(sums, (2, FROM // 2 * REST)), 0), FROM // 2, REST)
    else:  # noqa: RET505 - the compiler goes on behind an if, and would not end
        return sums


@triton.jit
def _float_linear(x, weight, ids, out, N, K, GROUPED: tl.constexpr, CHANNELS: tl.constexpr):
    """CHANNELS of one row of x [rows, K] times weight [N, K] or, GROUPED, its expert's of [E, N, K]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    lane = tl.arange(0, SUMS)
    first = tl.zeros((), tl.int64)
    if GROUPED:
        first = tl.load(ids + row) * N
    # columns beyond N take the last one again; lanes first, as _halved wants it
    channel = weight + (first + tl.minimum(n, N - 1))[None, :] * K
    sums = tl.zeros((SUMS, CHANNELS), tl.float32)
    for k in range(0, K, SUMS):
        inside = k + lane < K
        a = tl.load(x + row * K + k + lane, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(channel + (k + lane)[:, None], mask=inside[:, None], other=0.0).to(tl.float32)
        sums += a[:, None] * b
    result = _halved(tl.reshape(sums, (SUMS * CHANNELS,)), SUMS, CHANNELS)
    tl.store(out + row * N + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _rms_norm(x, weight, out, eps, H, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((), 0, tl.int32)
    for start in range(0, H, BLOCK):
        value = tl.load(x + row * H + start + lane, mask=start + lane < H, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    finite = largest < INFINITY_BITS
    # whole steps of a power of two, below 2**22, whose squares add up exactly
    exponent = tl.minimum(tl.maximum((largest >> 23) - 21, 1), 233)
    step = (exponent << 23).to(tl.float32, bitcast=True)
    per_step = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    squares = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, H, BLOCK):
        value = tl.load(x + row * H + start + lane, mask=start + lane < H, other=0.0).to(tl.float32)
        value = tl.where(finite, value, 0.0)
        whole = ((value * per_step + ROUNDER) - ROUNDER).to(tl.int32).to(tl.int64)
        squares += whole * whole
    mean = tl.div_rn(tl.sum(squares, 0).to(tl.float32), tl.cast(H, tl.float32)) * step * step
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    factor = tl.where(finite, factor, NAN)
    for start in range(0, H, BLOCK):
        inside = start + lane < H
        value = tl.load(x + row * H + start + lane, mask=inside, other=0.0).to(tl.float32)
        scaled = value * factor * tl.load(weight + start + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * H + start + lane, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(qkv, cos, sin, start, q, keys, values, HEADS, KV_HEADS, BLOCKS, D, HALF: tl.constexpr):
    """One head of one row: turned into q or keys, or copied into values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(start) + row
    lane, middle = tl.arange(0, HALF), D // 2
    inside = lane < middle
    own = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D + lane
    first = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(own + middle, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + position * middle + lane, mask=inside, other=0.0)
    s = tl.load(sin + position * middle + lane, mask=inside, other=0.0)
    left, right = first * c - second * s, second * c + first * s
    if head < HEADS:
        to = q + (row * HEADS + head) * D + lane
        tl.store(to, left.to(q.dtype.element_ty), mask=inside)
        tl.store(to + middle, right.to(q.dtype.element_ty), mask=inside)
    elif head < HEADS + KV_HEADS:
        block = (head - HEADS) * BLOCKS + position // KEYS
        to = keys + (block * D + lane) * KEYS + position % KEYS
        tl.store(to, left.to(keys.dtype.element_ty), mask=inside)
        tl.store(to + middle * KEYS, right.to(keys.dtype.element_ty), mask=inside)
    else:
        to = values + ((head - HEADS - KV_HEADS) * BLOCKS * KEYS + position) * D + lane
        tl.store(to, first.to(values.dtype.element_ty), mask=inside)
        tl.store(to + middle, second.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _attend(q, keys, values, start, parts, scale, HEADS, GROUP, BLOCKS, D: tl.constexpr, BLOCK: tl.constexpr):
    """One row and head over one block of keys; nothing where the block begins behind the row."""
    index, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(start) + index // HEADS + 1
    if block * KEYS >= length:
        return
    first = ((index % HEADS) // GROUP * BLOCKS + block) * D * KEYS
    key, lane = tl.arange(0, KEYS), tl.arange(0, BLOCK)
    inside = block * KEYS + key < length
    scores = tl.zeros((KEYS,), tl.float32)
    for d in tl.range(0, D, loop_unroll_factor=16):
        scores += tl.load(q + index * D + d).to(tl.float32) * tl.load(keys + first + d * KEYS + key).to(tl.float32)
    scores *= scale
    seen = tl.where(inside & (scores == scores), scores, -float("inf"))
    largest = tl.max(seen, 0)
    finite = tl.min(((tl.abs(scores) < float("inf")) | (block * KEYS + key >= length)).to(tl.int32), 0) > 0
    weights = tl.where(inside, exp_exact(scores - largest), 0.0)
    total = tl.where(finite, tl.sum(_halved(weights, KEYS, 1), 0), NAN)
    at = values + first + key[:, None] * D + lane[None, :]
    value = tl.load(at, mask=inside[:, None] & (lane < D)[None, :], other=0.0).to(tl.float32)
    mixed = _halved(tl.reshape(weights[:, None] * value, (KEYS * BLOCK,)), KEYS, BLOCK)
    to = parts + (index * BLOCKS + block) * (D + 2)
    tl.store(to + lane, mixed, mask=lane < D)
    tl.store(to + D, total)
    tl.store(to + D + 1, largest)


@triton.jit
def _join_blocks(parts, start, out, HEADS, BLOCKS, D, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    length = tl.load(start) + index // HEADS + 1
    lane = tl.arange(0, BLOCK)
    mixed = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((), tl.float32)
    largest = tl.full((), -float("inf"), tl.float32)
    for block in range((length + KEYS - 1) // KEYS):
        of = parts + (index * BLOCKS + block) * (D + 2)
        theirs = tl.load(of + D + 1)
        best = tl.where(theirs > largest, theirs, largest)
        before, now = exp_exact(largest - best), exp_exact(theirs - best)
        total = total * before + tl.load(of + D) * now
        mixed = mixed * before + tl.load(of + lane, mask=lane < D, other=0.0) * now
        largest = best
    result = tl.div_rn(mixed, tl.zeros_like(mixed) + total)
    tl.store(out + index * D + lane, result.to(out.dtype.element_ty), mask=lane < D)


@triton.jit
def _route(logits, ids, weights, EXPERTS, TOP_K, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    there = expert < EXPERTS
    scores = tl.load(logits + row * EXPERTS + expert, mask=there, other=0.0)
    finite = tl.min((tl.abs(scores) < float("inf")).to(tl.int32), 0) > 0
    scores = tl.where(finite, scores, 0.0)
    largest = tl.max(tl.where(there, scores, -float("inf")), 0)
    terms = tl.where(there, exp_exact(scores - largest), 0.0)
    total = tl.where(finite, tl.sum(_halved(terms, BLOCK_E, 1), 0), NAN)
    chosen = tl.zeros((BLOCK_S,), tl.int64)
    shares = tl.zeros((BLOCK_S,), tl.float32)
    of_chosen = tl.zeros((), tl.float32)
    for i in range(TOP_K):
        best = tl.max(tl.where(there, scores, -float("inf")), 0)
        first = tl.min(tl.where(there & (scores == best), expert, BLOCK_E), 0)
        share = tl.div_rn(exp_exact(best - largest), total)
        of_chosen += share
        chosen = tl.where(slot == i, first.to(tl.int64), chosen)
        shares = tl.where(slot == i, share, shares)
        there = there & (expert != first)
    if NORMALIZE:
        shares = tl.div_rn(shares, tl.zeros_like(shares) + (of_chosen + 1e-20))
    tl.store(ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, shares, mask=slot < TOP_K)
