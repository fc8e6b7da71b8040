"""The verdicts: is the baseline fit to be compared with, and does a speed-up give its tokens. Nothing here calls a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
            if self.found == second:
                lines.append(
                    "  the speculative path took the runner-up: if the gap is within rounding, forwards of different width "
                    "have decided a near tie differently; if not, the model saw another context"
                )
            else:
                lines.append(
                    "  that is not even the runner-up: the model saw another context (look at accept, rollback, cache), or, "
                    "below float32, a near tie between experts in a router went the other way"
                )
        return "\n".join(lines)


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
