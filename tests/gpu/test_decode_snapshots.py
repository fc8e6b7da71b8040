"""The baseline's tokens as files to review: a changed token is one changed line in a pull request."""

from pathlib import Path

import pytest
import torch
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from dispatch.environment import describe_environment
from dispatch.prompts import PROMPTS

SNAPSHOTS = Path(__file__).resolve().parents[2] / "snapshots"
FOOTER = "--- recorded on (not compared) ---\n"
# Logits of forwards over one token and over all differ by up to 2e-5 on tiny and 2e-3 on tiny-int8-all, where one activation
# falls to another int16 step; a gap five times that is no rounding.
SMALLEST_GAP = 0.01
TOKENS = 64


class DecodeSnapshots(SingleFileSnapshotExtension):
    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location):
        return str(SNAPSHOTS / test_location.basename)

    def matches(self, *, serialized_data, snapshot_data):
        return serialized_data.partition(FOOTER)[0] == snapshot_data.partition(FOOTER)[0]


@pytest.fixture
def snapshot(snapshot):
    return snapshot.use_extension(DecodeSnapshots)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_decode(target_name, prompt, target, baseline, snapshot, request):
    name = f"test_decode[{target_name}-{prompt}].txt"
    recorded = (SNAPSHOTS / Path(__file__).stem / name).exists()
    if not (recorded or request.config.option.update_snapshots or target_name.startswith("tiny")):
        pytest.skip(f"no snapshot of {target_name} is recorded yet: run this test with --snapshot-update, and commit {name}")
    if request.config.getoption("--max-new-tokens") != TOKENS:
        pytest.skip(f"snapshots are of {TOKENS} tokens, --max-new-tokens asks for another number")
    result = baseline(prompt)
    lines = [f"{i:4} {token:6} {target.decode([token])!r}\n" for i, token in enumerate(result.tokens)]
    facts = {**describe_environment(), "smallest top-2 gap": f"{min(pair.gap for pair in result.top_two):.3g}"}
    footer = [f"{name}: {value}\n" for name, value in facts.items()]
    assert "".join([f"# {PROMPTS[prompt]!r}\n", *lines, FOOTER, *footer]) == snapshot


@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_near_tie_on_a_snapshot(target_name, prompt, target, baseline):
    if target.spec.dtype != torch.float32:
        pytest.skip(f"{target_name} runs in {target.spec.dtype}, where near ties cannot be ruled out by choice of prompts")
    gaps = [pair.gap for pair in baseline(prompt).top_two]
    assert min(gaps) > SMALLEST_GAP, f"position {gaps.index(min(gaps))} is a near tie: choose another prompt"
