"""The reference every speed-up is judged by: plain greedy decoding, one token a forward, nothing ever taken back.

It shares no loop, no cache wrapper and no rollback with the speculative path; only the tie rule (`pick`) is common to both.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from dispatch.decoding import cache_argument, check_prompt, pick
from dispatch.errors import CacheError
from dispatch.results import FinishReason, Result, TopTwo


@torch.inference_mode()
def decode_greedy(
    model: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context_limit: int,
    eos_ids: Collection[int] = (),
    to_text: Callable[[Sequence[int]], str] = str,
    use_cache: bool = True,
    keep_top_two: bool = True,
) -> Result:
    """Greedy continuation of prompt token ids by a transformers causal model, with the top two logits behind each token.

    use_cache=False forwards the whole sequence for every token: slow, and the check of this very function.
    keep_top_two=False leaves out the top two: a baseline that is timed must not do more than what it is compared with.
    Raises InputError for a bad prompt or budget, NonFiniteLogitsError for logits no token can be picked from.
    """
    embeddings = model.get_input_embeddings().weight
    check_prompt(prompt, max_new_tokens, embeddings.shape[0], context_limit)
    sequence = list(prompt)
    top_two: list[TopTwo] = []
    cache = DynamicCache(config=model.config) if use_cache else None
    arguments = {cache_argument(model): cache, "use_cache": use_cache}
    finish_reason: FinishReason | None = None
    started = prefilled = time.perf_counter()
    while finish_reason is None:
        new = sequence[-1:] if use_cache and len(sequence) > len(prompt) else sequence
        output = model(input_ids=torch.tensor([new], device=embeddings.device), **arguments)
        if cache is not None and cache.get_seq_length() != len(sequence):
            raise CacheError(f"the model's cache holds {cache.get_seq_length()} tokens, expected {len(sequence)}")
        row = output.logits[0, -1].float()
        token = pick(row[None])[0]
        if keep_top_two:
            values, ids = (pair.tolist() for pair in row.topk(2))
            other = ids[1] if ids[0] == token else ids[0]
            top_two.append(TopTwo(ids=(token, other), logits=(values[0], values[1])))
        sequence.append(token)
        new_tokens = len(sequence) - len(prompt)
        if new_tokens == 1:
            prefilled = time.perf_counter()
        if token in eos_ids:
            finish_reason = "eos"
        elif new_tokens == max_new_tokens:
            finish_reason = "max_new_tokens"
        elif len(sequence) == context_limit:
            finish_reason = "context_limit"
    ended = time.perf_counter()
    tokens = tuple(sequence[len(prompt) :])
    return Result(
        tokens=tokens,
        text=to_text(tokens),
        finish_reason=finish_reason,
        prefill_seconds=prefilled - started,
        decode_seconds=ended - prefilled,
        forwards=len(tokens) - 1,
        top_two=tuple(top_two),
    )
