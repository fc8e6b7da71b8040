"""What a decoder layer does beside int8 products, in plain torch on any device. `decoder_cpu` must give the same bits.

Every function works on rows [T, ..]; a row's result comes from that row, its position and the keys before it by one fixed
sequence of fp32 operations, so that it does not depend on the rows that go with it. Results have the dtype of the rows.

- halving: of a power of two of sums the upper half is added to the lower until one is left
- sums over a row of weights: SUMS running sums, halved
- mean square: the row in whole steps of a power of two, below 2**22, whose squares add up exactly in integers
- attention: keys in blocks of KEYS at absolute positions; of a block its largest score and its sums under it, halved; blocks
  joined in the order of positions
- router: int16 weights as 255 * high + low, exact integers again
- experts: the best first, among equals the lowest id; summed in this order

Key cache [kv_heads, blocks, D, KEYS], value cache [kv_heads, blocks, KEYS, D], both in the dtype of the rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dispatch.kernels.reference import exp, integer_matmul, quantize_rows, silu
from dispatch.quantization import SplitWeight

SUMS = 64
KEYS = 64


def linear16(x: Tensor, weight: SplitWeight) -> Tensor:
    """Rows x [T, K] times int16 weights [N, K] -> float32 [T, N], as `reference.linear` with 255 * high + low sums."""
    rows, row_scales = quantize_rows(x)
    return from_halves(integer_matmul(rows, weight.values), row_scales, weight)


def from_halves(sums: Tensor, row_scales: Tensor, weight: SplitWeight) -> Tensor:
    """int64 sums [T, 2 N] of the high halves' channels and then the low ones' -> float32 [T, N]."""
    high, low = sums.chunk(2, -1)
    return (255 * high + low).float() * row_scales.unsqueeze(-1) * weight.scales


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Rows x [T, K] times float weights [N, K] -> [T, N]."""
    wide = (SUMS - x.shape[1] % SUMS) % SUMS
    rows, channels = (torch.nn.functional.pad(t.float(), (0, wide)) for t in (x, weight))
    sums = torch.zeros(len(x), len(weight), SUMS, device=x.device)
    for k in range(0, rows.shape[1], SUMS):
        sums += rows[:, None, k : k + SUMS] * channels[None, :, k : k + SUMS]
    return halved(sums).to(x.dtype)


def halved(sums: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, by halving."""
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return sums[..., 0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight for rows x [T, H] and weight [H] (arXiv:1910.07467)."""
    rows = x.float()
    bits = rows.abs().amax(-1, keepdim=True).view(torch.int32)
    exponent = ((bits >> 23) - 21).clamp(1, 233)
    step, per_step = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    values = (rows * per_step).round().nan_to_num(0.0).long()
    mean = (values * values).sum(-1, keepdim=True).float() / rows.new_full((), rows.shape[1]) * step * step
    # torch's fp32 root is not rounded correctly on every machine; that of float64 is far more than right for fp32
    root = (mean + eps).double().sqrt().float()
    factor = (1.0 / root).where(bits < 0x7F800000, torch.nan)
    return (rows * factor * weight.float()).to(x.dtype)


def rotate_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Turns q and k of qkv [T, (heads + 2 kv_heads) * D] to positions from start [1] on (arXiv:2104.09864).

    Returns q [T, heads, D], writes k and v into the caches. cos and sin [positions, D / 2] in fp32; a pair is the elements
    d and d + D / 2.
    """
    kv_heads, _, head, _ = keys.shape
    rows = qkv.view(len(qkv), -1, head)
    at = start + torch.arange(len(qkv), device=qkv.device)
    c, s = cos[at, None], sin[at, None]
    turning, v = rows[:, :-kv_heads], rows[:, -kv_heads:]
    first, second = turning.float().chunk(2, -1)
    turned = torch.cat([first * c - second * s, second * c + first * s], -1).to(qkv.dtype)
    q, k = turned[:, :-kv_heads], turned[:, -kv_heads:]
    block, inside = at // KEYS, at % KEYS
    # indices apart by a slice: the indexed positions come first
    keys[:, block, :, inside] = k
    values[:, block, inside] = v.transpose(0, 1)
    return q.contiguous()


def attention(q: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    """softmax(q k / sqrt(D)) v of q [T, heads, D], row t over the keys up to position start + t -> [T, heads * D]."""
    rows, heads, head = q.shape
    group = heads // len(keys)
    keys, values = (cache.float().repeat_interleave(group, 0) for cache in (keys, values))
    query = q.float()
    lengths = start + 1 + torch.arange(rows, device=q.device)
    largest = torch.full((rows, heads), -torch.inf, device=q.device)
    total = torch.zeros_like(largest)
    acc = torch.zeros_like(query)
    for block in range((int(lengths[-1]) + KEYS - 1) // KEYS):
        scores = torch.zeros(rows, heads, KEYS, device=q.device)
        for d in range(head):
            scores += query[..., d, None] * keys[None, :, block, d]
        scores *= torch.tensor(scale, dtype=torch.float32)
        inside = (block * KEYS + torch.arange(KEYS, device=q.device) < lengths[:, None])[:, None].expand_as(scores)
        # a comparison that is false for NaN passes it over; it comes back in the block's total
        seen = scores.where(inside & (scores == scores), -torch.inf).amax(-1)
        finite = (scores.isfinite() | ~inside).all(-1)
        weights = exp(scores - seen[..., None]).where(inside, 0.0)
        products = (weights[..., None] * values[None, :, block]).where(inside[..., None], 0.0)
        best = torch.where(seen > largest, seen, largest)
        before, now = exp(largest - best), exp(seen - best)
        used = inside.any(-1)
        total = torch.where(used, total * before + halved(weights).where(finite, torch.nan) * now, total)
        mixed = halved(products.transpose(-1, -2))
        acc = torch.where(used[..., None], acc * before[..., None] + mixed * now[..., None], acc)
        largest = torch.where(used, best, largest)
    return (acc / total[..., None]).to(q.dtype).flatten(1)


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of fp32 logits [T, E] -> ids [T, top_k] int64 and their softmax probabilities, float32 [T, top_k].

    normalize: divided by their sum + 1e-20. A row that is not finite gets NaN for weights.
    """
    order = torch.sort(logits.nan_to_num(-torch.inf), dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k]
    largest = logits.gather(1, order[:, :1])
    terms = exp(logits - largest)
    wide = 2 ** (logits.shape[1] - 1).bit_length() - logits.shape[1]
    total = halved(torch.nn.functional.pad(terms, (0, wide)))[:, None].where(logits.isfinite().all(-1, keepdim=True), torch.nan)
    weights = terms.gather(1, ids) / total
    if normalize:
        chosen = torch.zeros_like(largest)
        for slot in range(top_k):
            chosen = chosen + weights[:, slot, None]
        weights = weights / (chosen + 1e-20)
    return ids.contiguous(), weights


def float_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts as `reference.experts`, with float weights gate_up [E, 2 * I, H] and down [E, H, I]."""
    return of_experts(x, gate_up, down, ids, weights, float_linear)


def of_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, linear: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`float_experts` by a product of its own: linear(rows [T, K], weight [N, K]) -> [T, N]."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(ids.shape[1]):
        of_slot = torch.zeros_like(out)
        for expert in sorted(set(ids[:, slot].tolist())):
            tokens = (ids[:, slot] == expert).nonzero().flatten()
            gate, up = linear(x[tokens].float(), gate_up[expert]).chunk(2, dim=-1)
            of_slot[tokens] = linear(silu(gate) * up, down[expert])
        out += of_slot * weights[:, slot, None]
    return out.to(x.dtype)
