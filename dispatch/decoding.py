"""What a decode loop needs of a model: a forward over new tokens, rollback of the last n, one way to pick a token."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dispatch.errors import CacheError, InputError, NonFiniteLogitsError


class Target(Protocol):
    """A causal language model with its own key/value cache, batch of one."""

    vocab_size: int
    """Rows of logits; a token id is in [0, vocab_size)."""
    context_limit: int
    """Most tokens a sequence may have, prompt included."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    def reset(self) -> None:
        """Empties the cache."""

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Appends the tokens to the cache; returns logits [len(tokens), vocab_size], row i for the token after tokens[i]."""

    def rollback(self, count: int) -> None:
        """Drops the last `count` tokens from the cache. Raises CacheError unless 0 <= count <= length."""


def pick(logits: Tensor) -> list[int]:
    """The greedy token of each row of logits [rows, vocab]: the largest value, and among equal ones the lowest id.

    Raises NonFiniteLogitsError if any row holds inf or NaN: torch's argmax of a row of NaN is 0, a token like any other.
    """
    # a sum is finite only if all it adds up is; one copy to the host for both answers
    best = logits.argmax(-1)
    rows: list[int] = torch.where(logits.sum(-1).isfinite(), best, -1).tolist()
    if -1 not in rows:
        return rows
    for row, values in enumerate(logits):
        bad = (~torch.isfinite(values)).nonzero().flatten()
        if len(bad):
            raise NonFiniteLogitsError(
                f"logits row {row} of {len(rows)} has {len(bad)} non-finite of {len(values)} values, the first at id "
                f"{int(bad[0])}: {float(values[bad[0]])}. No token can be picked from it; look for overflow or broken weights"
            )
    # large numbers, of which only the sum overflows
    return [int(token) for token in best]


def check_prompt(prompt: Sequence[int], max_new_tokens: int, vocab_size: int, context_limit: int) -> None:
    """Raises InputError for a prompt that is empty, outside the vocabulary or fills the context, and for a budget below 1."""
    if not prompt:
        raise InputError("the prompt has no tokens: give at least one (a beginning-of-sequence id will do)")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    for position, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise InputError(f"prompt token {position} is {token}, outside the vocabulary [0, {vocab_size}): wrong tokenizer?")
    if len(prompt) >= context_limit:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and the context limit is {context_limit}: no room for a new one; shorten it"
        )


def cache_argument(model: Any) -> str:
    """The name under which a model's forward takes its cache: transformers 5.24 renamed it, remote code kept the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class CachedModel:
    """Target over a transformers causal model and a DynamicCache, forwarded as the model's own code does it."""

    def __init__(self, model: Any, *, context_limit: int) -> None:
        self._model = model
        self.context_limit = context_limit
        self.vocab_size = int(self._model.get_output_embeddings().out_features)
        self._cache_argument = cache_argument(model)
        self._device = self._model.get_input_embeddings().weight.device
        self.reset()

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    def reset(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        for index, layer in enumerate(self._cache.layers):
            if getattr(layer, "is_sliding", False) or not getattr(layer, "is_croppable", True):
                raise CacheError(
                    f"cache layer {index} is a {type(layer).__name__}, which forgets tokens and cannot be rolled back: "
                    "speculative decoding needs full attention in every layer"
                )

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> Tensor:
        expected = self.length + len(tokens)
        if not tokens or expected > self.context_limit:
            raise CacheError(
                f"forward of {len(tokens)} tokens over {self.length} cached: expected 1 or more, {self.context_limit} in all"
            )
        input_ids = torch.tensor([list(tokens)], device=self._device)
        output = self._model(input_ids=input_ids, use_cache=True, **{self._cache_argument: self._cache})
        if self.length != expected:
            raise CacheError(
                f"after a forward of {len(tokens)} tokens the cache holds {self.length}, expected {expected}: "
                "the model's code does not fill the cache it is given"
            )
        logits: Tensor = output.logits[0]
        return logits.float()

    def rollback(self, count: int) -> None:
        before = self.length
        if not 0 <= count <= before:
            raise CacheError(f"rollback of {count} tokens from a cache of {before}: expected 0 to {before}")
        if count:
            # a negative number drops that many on every 5.x; positive numbers changed their meaning
            self._cache.crop(-count)
        if self.length != before - count:
            raise CacheError(f"rollback of {count} tokens left {self.length} in the cache, expected {before - count}")
