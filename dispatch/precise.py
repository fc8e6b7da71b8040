"""The referee's forward: a decoder over a whole sequence from its definition, at a higher precision than any path under test.

It shares no kernel with them: plain torch matmul, softmax and sort, in float64 on a CPU and in float32 on a GPU, where float64
may be slow by a factor of 64. Weights are widened one layer at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dispatch.decoder_weights import DecoderWeights, Experts, Layer, Weight
from dispatch.quantization import SPLIT_BASE, Int8Weight, SplitWeight


@torch.inference_mode()
def precise_logits(weights: DecoderWeights, tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), vocab] in float64 on the CPU, float32 on a GPU; row i is for the token after tokens[i]."""
    device = weights.embedding.device
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    x = weights.embedding[torch.tensor(tokens, device=device)].to(dtype)
    for layer in weights.layers:
        x = x + _attention(weights, layer, _norm(x, layer.attention_norm, weights.eps))
        x = x + _mlp(layer, _norm(x, layer.mlp_norm, weights.eps))
    return _norm(x, weights.norm, weights.eps) @ _wide(weights.head, x.dtype).T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)


def _attention(weights: DecoderWeights, layer: Layer, x: Tensor) -> Tensor:
    count, kv = len(x), weights.kv_heads
    qkv = x @ _wide(layer.qkv, x.dtype).T
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    rows = qkv.view(count, -1, weights.head_size).transpose(0, 1)
    cos, sin = (table[:count].to(x.dtype) for table in (weights.cos, weights.sin))
    first, second = rows[:-kv].chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    q, k = turned[:-kv].reshape(kv, -1, count, weights.head_size), turned[-kv:, None]
    scores = q @ k.transpose(-1, -2) * weights.head_size**-0.5
    later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ rows[-kv:, None]
    out: Tensor = mixed.flatten(0, 1).transpose(0, 1).reshape(count, -1) @ _wide(layer.out, x.dtype).T
    return out if layer.out_bias is None else out + layer.out_bias


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    if layer.router is not None and layer.experts is not None:
        scores = (x @ _wide(layer.router, x.dtype).T).softmax(-1)
        found, ids = (part[:, : layer.top_k] for part in scores.sort(stable=True, dim=-1, descending=True))
        routing = found / found.sum(-1, keepdim=True) if layer.normalize else found
        for expert in sorted(set(ids.flatten().tolist())):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            out[token] += _block(layer.experts, expert, x[token]) * routing[token, slot, None]
    return out if layer.dense is None else out + _block(layer.dense, 0, x)


def _block(experts: Experts, expert: int, x: Tensor) -> Tensor:
    gate, up = (x @ _wide(experts.gate_up, x.dtype, expert).T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ _wide(experts.down, x.dtype, expert).T


def _wide(weight: Weight | SplitWeight, dtype: torch.dtype, expert: int | None = None) -> Tensor:
    """A matrix [N, K], of one expert where given, at the referee's precision."""
    if isinstance(weight, SplitWeight):
        high, low = weight.values.to(dtype).chunk(2)
        return (SPLIT_BASE * high + low) * weight.scales.to(dtype)[:, None]
    one = slice(None) if expert is None else expert
    if isinstance(weight, Int8Weight):
        return weight.values[one].to(dtype) * weight.scales[one].to(dtype)[..., None]
    return weight[one].to(dtype)
