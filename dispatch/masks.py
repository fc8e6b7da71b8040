"""Attention masks under the names of `transformers.modeling_attn_mask_utils`, a module that transformers 5.24 no longer has.

Masks are additive: 0 where a query may look, the dtype's lowest value where it may not. Row i of a forward of q_len tokens
over a cache of `past` sees the cache and the new tokens up to and including itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dispatch.errors import RepairError


def causal_mask(padding: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, past: int) -> Tensor:
    """Additive causal mask, [batch, 1, q_len, past + q_len].

    padding: None, or [batch, past + q_len] with 1 for a real token and 0 for padding. shape: (batch, q_len).
    """
    batch, q_len = shape
    kv_len = past + q_len
    hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).triu(past + 1)[None]
    if padding is not None:
        if padding.shape != (batch, kv_len):
            raise RepairError(
                f"attention_mask has shape {tuple(padding.shape)}, expected {(batch, kv_len)} (batch, cached + new tokens)"
            )
        hidden = hidden | ~padding.bool()[:, None, :].to(device)
    mask = torch.zeros(batch, 1, q_len, kv_len, dtype=dtype, device=device)
    return mask.masked_fill(hidden[:, None], torch.finfo(dtype).min)


def prepare_4d_causal_attention_mask(
    attention_mask: Tensor | None,
    input_shape: Sequence[int],
    inputs_embeds: Tensor,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Tensor:
    """The mask for attention written out: always a tensor, [batch, 1, q_len, past + q_len], of inputs_embeds' dtype."""
    if sliding_window is not None:
        raise RepairError(f"sliding_window={sliding_window}: this stand-in makes full causal masks only")
    return causal_mask(attention_mask, input_shape, inputs_embeds.dtype, inputs_embeds.device, past_key_values_length)


def prepare_4d_causal_attention_mask_for_sdpa(
    attention_mask: Tensor | None,
    input_shape: Sequence[int],
    inputs_embeds: Tensor,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Tensor | None:
    """The mask for scaled_dot_product_attention: None where its is_causal flag (or no mask at all) already says the same.

    That is so for one query, and for a prompt without a cache; is_causal over a cache would align the triangle to the wrong
    corner, so there a tensor comes back.
    """
    unpadded = attention_mask is None or bool(attention_mask.bool().all())
    if unpadded and sliding_window is None and (input_shape[-1] == 1 or past_key_values_length == 0):
        return None
    return prepare_4d_causal_attention_mask(attention_mask, input_shape, inputs_embeds, past_key_values_length, sliding_window)


def prepare_4d_attention_mask(mask: Tensor, dtype: torch.dtype, tgt_len: int | None = None) -> Tensor:
    """Padding alone, not causal: [batch, src] of 1 and 0 becomes [batch, 1, tgt_len, src], additive."""
    batch, src = mask.shape
    hidden = ~mask.bool()[:, None, None, :].expand(batch, 1, tgt_len or src, src)
    return torch.zeros(hidden.shape, dtype=dtype, device=mask.device).masked_fill(hidden, torch.finfo(dtype).min)


class AttentionMaskConverter:
    """Here only to be imported: DeepSeek-MoE's code names it and never calls it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RepairError("AttentionMaskConverter is not supplied; only the _prepare_4d_* functions are")
