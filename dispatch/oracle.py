"""The reference every speed-up is judged by: plain greedy decoding, one token a forward, nothing ever taken back.

It shares no loop and no rollback with the speculative path, and on a model's own code no cache wrapper either; only the tie
rule (`pick`) is common to both.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dispatch.decoding import cache_argument, check_prompt, pick
from dispatch.errors import CacheError
from dispatch.results import FinishReason, Result, TopTwo


class Forward(Protocol):
    """The part of Target that takes nothing back; see there."""

    vocab_size: int
    context_limit: int

    @property
    def length(self) -> int: ...

    def reset(self) -> None: ...

    def forward(self, tokens: Sequence[int]) -> Tensor: ...


class StockModel:
    """Forward over a transformers causal model by its own code. use_cache=False reads all tokens anew every time."""

    def __init__(self, model: Any, *, context_limit: int, use_cache: bool = True) -> None:
        self._model, self._use_cache = model, use_cache
        embeddings = model.get_input_embeddings().weight
        self.vocab_size, self.context_limit, self._device = int(embeddings.shape[0]), context_limit, embeddings.device
        self.reset()

    @property
    def length(self) -> int:
        return len(self._tokens) if self._cache is None else int(self._cache.get_seq_length())

    def reset(self) -> None:
        self._cache = DynamicCache(config=self._model.config) if self._use_cache else None
        self._tokens: list[int] = []

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> Tensor:
        self._tokens += tokens
        new = self._tokens if self._cache is None else list(tokens)
        arguments = {cache_argument(self._model): self._cache, "use_cache": self._use_cache}
        output = self._model(input_ids=torch.tensor([new], device=self._device), **arguments)
        logits: Tensor = output.logits[0, -len(tokens) :]
        return logits.float()


def decode_greedy(
    model: Forward,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    to_text: Callable[[Sequence[int]], str] = str,
    keep_top_two: bool = True,
    prompt_at_once: bool = True,
) -> Result:
    """Greedy continuation of prompt token ids, with the top two logits behind each token. The model is reset first.

    keep_top_two=False leaves out the top two: a baseline that is timed must not do more than what it is compared with.
    prompt_at_once=False gives the model the prompt one token at a time as well, so that no forward has another width.
    Raises InputError for a bad prompt or budget, NonFiniteLogitsError for logits no token can be picked from.
    """
    check_prompt(prompt, max_new_tokens, model.vocab_size, model.context_limit)
    model.reset()
    sequence = list(prompt)
    top_two: list[TopTwo] = []
    finish_reason: FinishReason | None = None
    started = prefilled = time.perf_counter()
    parts = [sequence] if prompt_at_once else [[token] for token in sequence]
    while finish_reason is None:
        for part in parts:
            row = model.forward(part)[-1]
        if model.length != len(sequence):
            raise CacheError(f"the model's cache holds {model.length} tokens, expected {len(sequence)}")
        token = pick(row[None])[0]
        if keep_top_two:
            values, ids = (pair.tolist() for pair in row.topk(2))
            other = ids[1] if ids[0] == token else ids[0]
            top_two.append(TopTwo(ids=(token, other), logits=(values[0], values[1])))
        sequence.append(token)
        parts = [[token]]
        new_tokens = len(sequence) - len(prompt)
        if new_tokens == 1:
            prefilled = time.perf_counter()
        if token in eos_ids:
            finish_reason = "eos"
        elif new_tokens == max_new_tokens:
            finish_reason = "max_new_tokens"
        elif len(sequence) == model.context_limit:
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
