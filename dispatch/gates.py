"""The verdicts: is the baseline fit to be compared with, does a speed-up give its tokens, is an int8 model still the model.

Nothing here calls a model.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.errors import InputError
from dispatch.results import Result, TopTwo

MIN_TOKENS = 8
"""A baseline shorter than this says nothing: almost anything would match it."""
MIN_DISTINCT_SHARE = 1 / 6
"""Distinct tokens per token; a loop of 10 tokens over an output of 64 is just below."""
MAX_CYCLE = 8
"""Longest repeating unit, in tokens, that counts as a cycle rather than as text that repeats itself."""
MAX_LEAD = 8
"""Tokens that may come before a cycle for it still to count as there from the start."""


def implausibility(baseline: Result) -> str | None:
    """Why a baseline's tokens are no ground for a comparison; None if they are one.

    A broken model matches itself: a collapsed output is repeated by every drafter, so that a match there proves nothing.
    Non-finite logits never get this far; `decoding.pick` raises on them.
    """
    tokens = baseline.tokens
    if len(tokens) < MIN_TOKENS:
        return f"only {len(tokens)} tokens ({baseline.finish_reason}), expected at least {MIN_TOKENS}"
    for lead in range(min(MAX_LEAD, len(tokens) // 4) + 1):
        for period in range(1, MAX_CYCLE + 1):
            rest = tokens[lead:]
            if len(rest) >= 3 * period and all(a == b for a, b in zip(rest, rest[period:], strict=False)):
                what = "one repeated token" if period == 1 else f"a cycle of {period} tokens"
                return f"{what} {list(rest[:period])} from position {lead} to the end"
    distinct = len(set(tokens))
    if distinct < MIN_DISTINCT_SHARE * len(tokens):
        return f"{distinct} distinct tokens of {len(tokens)}, expected at least {MIN_DISTINCT_SHARE:.0%}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a candidate's tokens first leave the baseline's. A token is None where that side had already ended."""

    position: int
    length: int
    expected: int | None
    found: int | None
    expected_text: str
    found_text: str
    top_two: TopTwo | None

    def __str__(self) -> str:
        lines = [
            f"tokens differ first at position {self.position} of {self.length}",
            f"  plain greedy: {self.expected} -> {self.expected_text!r}",
            f"  speculative:  {self.found} -> {self.found_text!r}",
        ]
        if self.top_two is not None:
            (first, second), (high, low) = self.top_two.ids, self.top_two.logits
            lines.append(
                f"  the target's top two there: {first} at {high:.6g}, {second} at {low:.6g}, gap {self.top_two.gap:.3g}"
            )
        return "\n".join(lines)


EXACT_HINT = (
    "  the exact engine gives a row the same bits in any company, so no rounding explains this: look at accept in "
    "dispatch/speculative.py, rollback in dispatch/engine.py, and run tests/unit/test_engine.py"
)
OWN_CODE_HINT = (
    "  the model ran by its own code, whose forwards of different width round differently, and there is no referee for it: if "
    "the gap is within rounding this may be a near tie; if not, the model saw another context (accept, rollback, cache)"
)
"""What to say below a difference: by the exact engine, and of a model that it does not know."""


def first_difference(baseline: Result, candidate: Result, to_text: Callable[[Sequence[int]], str]) -> Difference | None:
    """None if both have the same tokens over the whole length; otherwise the first position where they do not."""
    expected, found = baseline.tokens, candidate.tokens
    if expected == found:
        return None
    same = (a == b for a, b in zip(expected, found, strict=False))
    position = next((i for i, equal in enumerate(same) if not equal), min(len(expected), len(found)))
    return Difference(
        position=position,
        length=len(expected),
        expected=expected[position] if position < len(expected) else None,
        found=found[position] if position < len(found) else None,
        expected_text=to_text(expected[position:]),
        found_text=to_text(found[position:]),
        top_two=baseline.top_two[position] if position < len(baseline.top_two) else None,
    )


GAPS = (0.0, 0.1, 0.5, 1.0, math.inf)
"""Bounds of the classes of top-2 gaps, in logits, for which agreement is told apart: quantisation may only move near ties."""
MIN_POSITIONS = 500
MAX_PERPLEXITY_RISE = 0.005
MIN_TOP_ONE = 0.97
MIN_TOP_FIVE = 0.95
SURE_GAP = 1.0
"""Above this top-2 gap, in logits, the token must be the same everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitComparison:
    """A model's logits beside the original's, teacher-forced over the same text."""

    positions: int
    top_one: float
    """Share of positions with the same greedy token."""
    top_five: float
    """Mean share of the original's five best tokens that are among the other's five best."""
    largest_difference: float
    by_gap: tuple[tuple[float, float, int, int], ...]
    """For each class of the original's top-2 gap: from, to, positions, positions that agree."""
    perplexity: float
    original_perplexity: float

    @property
    def perplexity_rise(self) -> float:
        return self.perplexity / self.original_perplexity - 1

    def problems(self) -> list[str]:
        """What keeps the model from passing for the original; empty if nothing does."""
        found = []
        if self.positions < MIN_POSITIONS:
            found.append(f"{self.positions} positions were compared, expected at least {MIN_POSITIONS}")
        if not self.perplexity_rise <= MAX_PERPLEXITY_RISE:
            found.append(f"perplexity rose by {self.perplexity_rise:.2%}, expected at most {MAX_PERPLEXITY_RISE:.1%}")
        if not self.top_one >= MIN_TOP_ONE:
            found.append(f"the greedy token is the same at {self.top_one:.2%}, expected at least {MIN_TOP_ONE:.0%}")
        if not self.top_five >= MIN_TOP_FIVE:
            found.append(f"the five best tokens overlap by {self.top_five:.2%}, expected at least {MIN_TOP_FIVE:.0%}")
        lost = sum(count - same for low, _, count, same in self.by_gap if low >= SURE_GAP)
        if lost:
            found.append(f"the greedy token changed at {lost} positions where the original led by {SURE_GAP} or more")
        return found

    def __str__(self) -> str:
        classes = ", ".join(f"{low:g} to {high:g}: {same}/{count}" for low, high, count, same in self.by_gap)
        return (
            f"{self.positions} positions: same greedy token {self.top_one:.2%} (by the original's top-2 gap, {classes}), "
            f"top-5 overlap {self.top_five:.2%}, largest logit difference {self.largest_difference:.3g}, "
            f"perplexity {self.original_perplexity:.4f} -> {self.perplexity:.4f} ({self.perplexity_rise:+.3%})"
        )


def compare_logits(original: Tensor, found: Tensor, next_tokens: Tensor) -> LogitComparison:
    """Compares logits [positions, vocab] of two models on the same text; next_tokens [positions] is how the text goes on.

    Raises InputError for shapes that differ and for logits that are not finite: no share can be taken of those.
    """
    if original.shape != found.shape or original.shape[:-1] != next_tokens.shape or not len(next_tokens):
        raise InputError(f"logits {tuple(original.shape)} and {tuple(found.shape)} for {len(next_tokens)} tokens")
    for name, logits in (("original", original), ("compared", found)):
        if not bool(torch.isfinite(logits).all()):
            raise InputError(f"the {name} model's logits hold inf or NaN: look at its weights")
    original, found = original.double(), found.double()
    best, others = original.topk(5), found.topk(5)
    agree = best.indices[:, 0] == others.indices[:, 0]
    overlap = (best.indices[:, :, None] == others.indices[:, None, :]).any(-1).double().mean()
    gaps = best.values[:, 0] - best.values[:, 1]
    classes = []
    for low, high in itertools.pairwise(GAPS):
        inside = (gaps >= low) & (gaps < high)
        classes.append((low, high, int(inside.sum()), int((agree & inside).sum())))
    losses = [torch.nn.functional.cross_entropy(logits, next_tokens).item() for logits in (original, found)]
    return LogitComparison(
        positions=len(next_tokens),
        top_one=float(agree.double().mean()),
        top_five=float(overlap),
        largest_difference=float((original - found).abs().max()),
        by_gap=tuple(classes),
        perplexity=math.exp(losses[1]),
        original_perplexity=math.exp(losses[0]),
    )
