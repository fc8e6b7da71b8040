"""Drafters: what proposes tokens for the target to verify. They may be wrong; they may not break their contract."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dispatch.decoding import Target, pick
from dispatch.errors import CacheError, InputError


class Drafter(Protocol):
    """Proposes continuations of one sequence at a time. The decode loop calls all four; callers of the loop call none."""

    @property
    def length(self) -> int:
        """Committed tokens its state covers; never more than were committed."""

    def reset(self) -> None:
        """Forgets the sequence. Called at the start of every decode."""

    def propose(self, sequence: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens (count >= 1) that may follow the committed sequence; fewer or none is fine."""

    def observe(self, sequence: Sequence[int]) -> None:
        """Takes in the committed sequence, which has grown; drops from its state whatever it proposed that is not in there."""


class PromptLookupDrafter:
    """Proposes what followed the most recent earlier occurrence of the sequence's last n tokens, longest n first.

    An index of n-grams grows with the committed tokens, so a proposal costs the same at any length.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"min_ngram {min_ngram} and max_ngram {max_ngram}: expected 1 <= min_ngram <= max_ngram")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self.reset()

    @property
    def length(self) -> int:
        return self._indexed

    def reset(self) -> None:
        self._indexed = 0
        self._follower: dict[tuple[int, ...], int] = {}

    def observe(self, sequence: Sequence[int]) -> None:
        # an n-gram is entered when the token after it is known, so the sequence's own end never finds itself
        for end in range(max(self._indexed, 1), len(sequence)):
            for size in self._sizes:
                if size <= end:
                    self._follower[tuple(sequence[end - size : end])] = end
        self._indexed = len(sequence)

    def propose(self, sequence: Sequence[int], count: int) -> list[int]:
        for size in self._sizes:
            if size < len(sequence):
                start = self._follower.get(tuple(sequence[-size:]))
                if start is not None:
                    return list(sequence[start : start + count])
        return []


class DraftModelDrafter:
    """Greedy tokens of a smaller model that reads the same vocabulary, with a key/value cache of its own.

    vocab_size: ids at or above it are never proposed; pass the number of ids both models know.
    """

    def __init__(self, model: Target, *, vocab_size: int) -> None:
        if not 1 <= vocab_size <= model.vocab_size:
            raise InputError(f"vocab_size is {vocab_size}, expected 1 to the draft model's {model.vocab_size} rows")
        self._model = model
        self._vocab_size = vocab_size
        self.reset()

    @property
    def length(self) -> int:
        return self._model.length

    def reset(self) -> None:
        self._model.reset()
        self._held: list[int] = []

    def observe(self, sequence: Sequence[int]) -> None:
        agreed = 0
        for held, committed in zip(self._held, sequence, strict=False):
            if held != committed:
                break
            agreed += 1
        self._model.rollback(len(self._held) - agreed)
        del self._held[agreed:]

    def propose(self, sequence: Sequence[int], count: int) -> list[int]:
        held = len(self._held)
        if self._held != list(sequence[:held]) or self._model.length != held or held >= len(sequence):
            raise CacheError(
                f"the draft's cache has {self._model.length} tokens and its record {held}, of a committed sequence of "
                f"{len(sequence)}: expected the same tokens, fewer than committed. Was observe() left out after a round?"
            )
        # the draft may have a shorter context than the target; the last proposed token is not fed back
        count = min(count, self._model.context_limit - len(sequence) + 1)
        proposed: list[int] = []
        while len(proposed) < count:
            row = self._feed(proposed[-1:] or sequence[held:])
            proposed += pick(row)
        return proposed

    def _feed(self, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits = self._model.forward(tokens)
        self._held += tokens
        return logits[-1:, : self._vocab_size]
