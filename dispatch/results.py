"""What one decode gave, and the rates derived from it. Terms are those of the speculative decoding literature."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "max_new_tokens", "context_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round: tokens drafted, and how many of them the target agreed with."""

    drafted: int
    accepted: int

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise ValueError(f"accepted {self.accepted} of {self.drafted} drafted tokens: expected 0 <= accepted <= drafted")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTwo:
    """The two largest logits behind one generated token, the picked one first."""

    ids: tuple[int, int]
    logits: tuple[float, float]

    @property
    def gap(self) -> float:
        return self.logits[0] - self.logits[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One decoded continuation. Times are in seconds; tokens exclude the prompt and include an end-of-sequence id."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prefill_seconds: float
    decode_seconds: float
    forwards: int
    """Target forwards after prefill."""
    steps: tuple[Step, ...] = ()
    """One per round of speculative decoding; empty for plain decoding."""
    top_two: tuple[TopTwo, ...] = ()
    """One per token from the oracle; empty from the speculative loop."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a result holds at least one token, found none")
        if self.top_two and len(self.top_two) != len(self.tokens):
            raise ValueError(f"{len(self.top_two)} top-two records for {len(self.tokens)} tokens: expected one each")

    @property
    def drafted(self) -> int:
        return sum(step.drafted for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, over the rounds that drafted anything (the 1 is the target's own token)."""
        drafts = sum(step.drafted > 0 for step in self.steps)
        return 1 + self.accepted / drafts if drafts else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Entry i: of the rounds that drafted more than i tokens, the share that accepted more than i."""
        longest = max((step.drafted for step in self.steps), default=0)
        return tuple(
            sum(step.accepted > i for step in self.steps) / sum(step.drafted > i for step in self.steps) for i in range(longest)
        )

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens that came from the target forwards after prefill, per forward; 1.0 for plain decoding."""
        return (len(self.tokens) - 1) / self.forwards if self.forwards else None

    @property
    def tokens_per_second(self) -> float:
        """All tokens over prefill and decode time."""
        return len(self.tokens) / (self.prefill_seconds + self.decode_seconds)
