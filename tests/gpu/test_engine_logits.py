"""Gate: the exact engine is the model: its logits teacher-forced over held-out text, beside those of the model's own code."""

import pytest
import torch
from held_out import windows

from dispatch.gates import compare_logits

PRECISE = 2
"""Windows that the referee's forward reads too."""
MOST = 2.0
"""The engine may be further from the referee than the model's own code by this factor: both round, in other places. What is
below the smallest step of a logit in fp32 is no error of either."""


def test_the_engine_is_the_model(target_name, target, runner, evidence, record_property):
    if not runner.exact:
        pytest.skip(f"{target_name} runs by its {runner}: there is no engine to compare")
    text = windows(target).tolist()
    engine = runner.baseline()
    found, expected, errors = [], [], []
    for i, window in enumerate(text):
        engine.reset()
        mine, theirs = engine.forward(window[:-1]), runner.whole(window[:-1])
        found.append(mine.cpu())
        expected.append(theirs.cpu())
        if i < PRECISE:
            precise = runner.precise(window[:-1])
            errors.append([float((logits - precise).square().mean()) for logits in (mine, theirs)])
    comparison = compare_logits(torch.cat(expected), torch.cat(found), torch.tensor(text)[:, 1:].flatten())
    ours, own = (torch.tensor(errors).mean(0).sqrt()).tolist()
    problems = comparison.problems()
    floor = 2**-24 * float(torch.cat(expected).abs().max())
    if not ours <= MOST * max(own, floor):
        problems.append(f"its logits are off by {ours:.2g} (rms, from higher precision), those of its own code by {own:.2g}")
    finding = (
        f"{comparison.positions} positions: same greedy token {comparison.top_one:.2%}, largest logit difference "
        f"{comparison.largest_difference:.3g}; off by {ours:.2g} (rms) from higher precision, own code {own:.2g}"
    )
    evidence.write("engine-logits", {"target": target_name, "found": finding, "problems": problems})
    record_property("dispatch_line", f"{target_name} by the exact engine against its own code: {finding}")
    if problems:
        pytest.fail(f"{target_name}: the exact engine is not the model: {'; '.join(problems)}. {finding}", pytrace=False)
