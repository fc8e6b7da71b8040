"""The table at the end of a run, made from what the tests recorded and from nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

Cell = Mapping[str, Any]
"""One target, drafter, k, prompt: matched, drafted, accepted, tokens, forwards; timed cells add seconds, baseline_seconds."""

_HEADER = ("target", "drafter", "k", "matched", "acceptance", "tok/forward", "tok/s", "speed-up")


def table(cells: Sequence[Cell]) -> list[str]:
    """Lines of one row per target, drafter and k, over its prompts, under a header; empty without cells.

    A rate is a ratio of sums over the prompts. Times are medians of the rounds; speed-up divides by the baseline timed in
    alternation with that very row. A prompt counts as matched only if every cell recorded for it matched.
    """
    rows: dict[tuple[str, str, int], dict[str, list[Cell]]] = {}
    for cell in cells:
        rows.setdefault((cell["target"], cell["drafter"], cell["k"]), {}).setdefault(cell["prompt"], []).append(cell)
    if not rows:
        return []
    lines = [list(_HEADER)]
    for (target, drafter, k), prompts in rows.items():
        last = [group[-1] for group in prompts.values()]
        timed = [cell for group in prompts.values() for cell in group if cell.get("seconds")]
        matched = sum(all(cell["matched"] for cell in group) for group in prompts.values())
        seconds, baseline = (sum(cell[name] for cell in timed) for name in ("seconds", "baseline_seconds"))
        lines.append(
            [
                target,
                drafter,
                str(k),
                f"{matched}/{len(prompts)}",
                _ratio(sum(cell["accepted"] for cell in last), sum(cell["drafted"] for cell in last), "{:.1%}"),
                _ratio(sum(cell["tokens"] - 1 for cell in last), sum(cell["forwards"] for cell in last), "{:.2f}"),
                _ratio(sum(cell["tokens"] for cell in timed), seconds, "{:.1f}"),
                _ratio(baseline, seconds, "{:.2f}x"),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    return [
        "  ".join(text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]


def near_ties(cells: Sequence[Cell]) -> list[str]:
    """One line that counts near ties, whenever a cell was run where there can be any (numerics "fast")."""
    fast = [cell for cell in cells if cell["numerics"] == "fast"]
    if not fast:
        return []
    count, where = sum(cell["near_ties"] for cell in fast), sum(cell["near_ties"] > 0 for cell in fast)
    return [f"near ties in numerics=fast: {count}, in {where} of {len(fast)} cells; a matched prompt has none"]


def _ratio(part: float, whole: float, form: str) -> str:
    return form.format(part / whole) if whole else "-"
