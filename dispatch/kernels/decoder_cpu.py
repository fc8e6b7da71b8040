"""The CPU backend of `decoder_reference`: decoder.c through ctypes. Same functions, same bits, one call each."""

import torch
from torch import Tensor

from dispatch.errors import InputError
from dispatch.kernels import cpu
from dispatch.kernels.reference import check_routing, check_rows
from dispatch.quantization import SplitWeight

_FLOAT, _BF16 = torch.float32, torch.bfloat16


def linear16(x: Tensor, weight: SplitWeight) -> Tensor:
    """Rows x [T, K] times int16 weights [N, K] -> float32 [T, N], as `decoder_reference.linear16`."""
    check_rows(x, weight.values.shape[1])
    rows, n = x.float().contiguous(), len(weight.scales)
    (t, k) = rows.shape
    out = torch.empty(t, n)
    scratch = torch.empty(t * (2 * k + 4), dtype=torch.uint8)
    cpu.library().linear16(
        rows.data_ptr(), weight.values.data_ptr(), weight.scales.data_ptr(), t, n, k, out.data_ptr(), scratch.data_ptr()
    )
    return out


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Rows x [T, K] times float32 or bf16 weights [N, K] -> [T, N], as `decoder_reference.float_linear`."""
    check_rows(x, weight.shape[1])
    rows = x.float().contiguous()
    out = torch.empty(len(rows), len(weight))
    cpu.library().float_linear(rows.data_ptr(), weight.data_ptr(), _half(weight), len(rows), *weight.shape, out.data_ptr())
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows x [T, H] over their root mean square, times weight [H], as `decoder_reference.rms_norm`."""
    rows, channels = x.float().contiguous(), weight.float()
    out = torch.empty(rows.shape)
    cpu.library().rms_norm(rows.data_ptr(), channels.data_ptr(), eps, *rows.shape, out.data_ptr())
    return out.to(x.dtype)


def rotate_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [T, heads, D] of qkv at its positions, k and v into the caches, as `decoder_reference.rotate_and_store`."""
    rows = qkv.float().contiguous()
    kv_heads, blocks, head, _ = keys.shape
    heads = rows.shape[1] // head - 2 * kv_heads
    q = torch.empty(len(rows), heads, head)
    cpu.library().rotate_and_store(
        rows.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        start.data_ptr(),
        _half(keys),
        len(rows),
        heads,
        kv_heads,
        head,
        blocks,
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
    )
    return q.to(qkv.dtype)


def attention(q: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float) -> Tensor:
    """[T, heads * D] of q [T, heads, D] over the keys up to each row's position, as `decoder_reference.attention`."""
    rows = q.float().contiguous()
    t, heads, head = rows.shape
    kv_heads, blocks = keys.shape[:2]
    out = torch.empty(t, heads * head)
    cpu.library().attention(
        rows.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        start.data_ptr(),
        _half(keys),
        t,
        heads,
        kv_heads,
        head,
        blocks,
        scale,
        out.data_ptr(),
    )
    return out.to(q.dtype)


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """ids and weights [T, top_k] of fp32 logits [T, E], as `decoder_reference.route`."""
    t, experts = logits.shape
    ids, weights = torch.empty(t, top_k, dtype=torch.int64), torch.empty(t, top_k)
    cpu.library().route(logits.data_ptr(), t, experts, top_k, normalize, ids.data_ptr(), weights.data_ptr())
    return ids, weights


def float_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts with float32 or bf16 weights, as `decoder_reference.float_experts`."""
    count, hidden, intermediate = down.shape
    check_rows(x, hidden)
    check_routing(ids, weights, len(x), count)
    rows, routing, chosen = x.float().contiguous(), weights.float().contiguous(), ids.contiguous()
    sizes = (len(rows), hidden, intermediate, ids.shape[1])
    out = torch.empty(rows.shape)
    scratch = torch.empty(cpu.library().float_experts_scratch(*sizes))
    cpu.library().float_experts(
        rows.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
        chosen.data_ptr(),
        routing.data_ptr(),
        _half(down),
        *sizes,
        out.data_ptr(),
        scratch.data_ptr(),
    )
    return out.to(x.dtype)


def _half(tensor: Tensor) -> bool:
    if tensor.dtype not in (_FLOAT, _BF16) or not tensor.is_contiguous():
        raise InputError(f"a tensor of {tensor.dtype}, expected contiguous float32 or bfloat16: load the model in one of them")
    return tensor.dtype is _BF16
