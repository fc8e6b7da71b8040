"""The referee of numerics="fast": is a token that differs a near tie of the two forwards, or a defect?

It scores with logits of higher precision (`dispatch.precise`), teacher-forced over the candidate's own tokens, so that a near
tie hides nothing behind it. How far a forward may stray is measured, on the same tokens, from forwards that the speculative
path has no part in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.gates import Difference
from dispatch.results import Result

BEST = 4
"""A forward's noise at a position is the spread of its errors over the tokens that score best there: this many."""
MARGIN = 2.0
"""The band is the largest noise seen, times this: where a token flips, the noise is larger than at the typical position."""
MIN_ROWS = 32
"""With fewer positions to measure it at, the largest noise seen says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A token of the candidate that the referee would not have picked; gap: its logit below the best one."""

    position: int
    token: int
    best: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What the referee found of a candidate whose tokens left the baseline's."""

    difference: Difference
    gap: float | None
    """Logit of the baseline's token less that of the candidate's at the first difference; None where one of them had ended."""
    noise: float
    rows: int
    near_ties: tuple[Miss, ...]
    """Tokens that are not the best but within the noise band of it; so is the first difference, unless it is a defect."""
    defects: tuple[Miss, ...]
    problem: str | None
    """What is wrong beyond single tokens."""
    texts: tuple[str, str]
    """Of the first defect: the candidate's token and the referee's."""

    @property
    def is_defect(self) -> bool:
        return bool(self.defects or self.problem)

    def __str__(self) -> str:
        band = f"noise band {self.noise:.3g}, {MARGIN:g} times the largest of two forwards at {self.rows} positions"
        lines = [str(self.difference)]
        if self.gap is not None:
            lines.append(f"  referee: gap {self.gap:.3g} there at higher precision; {band}")
        if self.problem:
            lines.append(f"  DEFECT: {self.problem}")
        if self.defects:
            miss = self.defects[0]
            lines.append(
                f"  DEFECT at position {miss.position}: {miss.token} -> {self.texts[0]!r} is {miss.gap:.3g} below "
                f"{miss.best} -> {self.texts[1]!r}, outside the noise band; {len(self.defects)} such positions in all"
            )
        if self.is_defect:
            lines.append(
                "  look at what was kept and taken back: accept in dispatch/speculative.py, rollback in dispatch/decoding.py, "
                "the draft's state in dispatch/drafters.py"
            )
        else:
            lines.append(f"  NEAR TIE, and all that follows is within the band too: {len(self.near_ties)} near ties in all")
        return "\n".join(lines)


def rule(
    difference: Difference,
    prompt: Sequence[int],
    baseline: Result,
    candidate: Result,
    *,
    precise: Callable[[Sequence[int]], Tensor],
    forwards: Sequence[Callable[[Sequence[int]], Tensor]],
    to_text: Callable[[Sequence[int]], str],
) -> Ruling:
    """Rules on a candidate that differs from the baseline.

    precise and forwards give logits [len(tokens), vocab] of a whole sequence: the referee's, and those whose noise is measured.
    """
    sequence = [*prompt, *candidate.tokens]
    scores = precise(sequence[:-1])
    best = scores.topk(min(BEST, scores.shape[1]), -1)
    # stacked, so that NaN stays NaN
    noise = torch.stack([_noise(scores, forward(sequence[:-1]).to(scores), best.indices) for forward in forwards])
    band = MARGIN * float(noise.max())
    of_tokens = scores[len(prompt) - 1 :]
    tokens = torch.tensor(candidate.tokens, device=scores.device)
    gaps = (of_tokens.amax(-1) - of_tokens.gather(-1, tokens[:, None])[:, 0]).tolist()
    tops = of_tokens.argmax(-1).tolist()
    misses = [
        Miss(position=i, token=token, best=top, gap=gap)
        for i, (token, top, gap) in enumerate(zip(candidate.tokens, tops, gaps, strict=True))
        if token != top or i == difference.position
    ]
    position, gap, problem = difference.position, None, None
    if difference.expected is None or difference.found is None:
        problem = (
            f"one of the two ended: plain greedy with {len(baseline.tokens)} tokens ({baseline.finish_reason}), speculative "
            f"with {len(candidate.tokens)} ({candidate.finish_reason})"
        )
    else:
        row = of_tokens[position]
        gap = float(row[difference.expected] - row[difference.found])
        if float(row.max() - row[difference.expected]) > band:
            problem = f"plain greedy's own token {difference.expected} is outside the noise band there: look at its forward"
        elif "eos" not in (candidate.finish_reason, baseline.finish_reason) and len(candidate.tokens) != len(baseline.tokens):
            problem = f"{len(candidate.tokens)} tokens where plain greedy gave {len(baseline.tokens)}, and no end of sequence"
    if len(scores) < MIN_ROWS:
        problem = f"only {len(scores)} positions to measure noise at, expected at least {MIN_ROWS}: decode more tokens"
    usual = float((best.values[:, 0] - best.values[:, 1]).median())
    if not band < usual:
        problem = f"the noise band reaches the usual gap of {usual:.3g} between the two best tokens: it would excuse anything"
    defects = tuple(miss for miss in misses if miss.gap > band)
    return Ruling(
        difference=difference,
        gap=gap,
        noise=band,
        rows=len(scores),
        near_ties=tuple(miss for miss in misses if miss.gap <= band),
        defects=defects,
        problem=problem,
        texts=(to_text([defects[0].token]), to_text([defects[0].best])) if defects else ("", ""),
    )


def _noise(scores: Tensor, found: Tensor, best: Tensor) -> Tensor:
    """The largest spread over positions: how far a forward moves one of the best tokens against another."""
    errors = found.gather(-1, best) - scores.gather(-1, best)
    return (errors.amax(-1) - errors.amin(-1)).max()
