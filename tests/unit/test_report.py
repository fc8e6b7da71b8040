"""The table from recorded cells: sums over prompts, no figure where none was measured, and a red cell stays red."""

import json

import pytest

from dispatch.evidence import EvidenceFile
from dispatch.report import near_ties, table


def cell(prompt, matched=True, drafter="prompt-lookup", k=4, **timing):
    counts = {"drafted": 20, "accepted": 5, "tokens": 64, "forwards": 42}
    return {"target": "tiny", "drafter": drafter, "k": k, "prompt": prompt, "matched": matched, **counts, **timing}


def test_no_cells_no_table():
    assert table([]) == []


def test_rates_are_ratios_of_sums():
    cells = [
        cell("a", seconds=1.0, baseline_seconds=1.5),
        cell("b", seconds=3.0, baseline_seconds=2.5),
        cell("a", k=8),
        {**cell("b", drafter="draft-model"), "drafted": 0, "accepted": 0},
    ]
    assert table(cells) == [
        "target  drafter        k  matched  acceptance  tok/forward  tok/s  speed-up",
        "tiny    prompt-lookup  4      2/2       25.0%         1.50   32.0     1.00x",
        "tiny    prompt-lookup  8      1/1       25.0%         1.50      -         -",
        "tiny    draft-model    4      1/1           -         1.50      -         -",
    ]


@pytest.mark.parametrize("cells", [[cell("a"), cell("a", matched=False)], [cell("a", matched=False), cell("a")]])
def test_one_red_cell_makes_its_prompt_red(cells):
    assert "0/1" in table(cells)[1]


def test_near_ties_are_counted_wherever_there_can_be_any():
    exact = cell("a", numerics="exact", near_ties=0)
    fast = [cell("a", numerics="fast", near_ties=count) for count in (0, 2, 1)]
    assert near_ties([exact]) == []
    assert near_ties([exact, fast[0]]) == ["near ties in numerics=fast: 0, in 0 of 1 cells; a matched prompt has none"]
    assert near_ties([exact, *fast]) == ["near ties in numerics=fast: 3, in 2 of 3 cells; a matched prompt has none"]


def test_evidence_is_there_after_each_line(tmp_path):
    file = EvidenceFile(tmp_path / "new" / "run.jsonl")
    assert not file.path.exists()
    file.write("cell", {"tokens": (1, 2)})
    assert json.loads(file.path.read_text()) == {"kind": "cell", "tokens": [1, 2]}
    EvidenceFile(file.path).write("cell", {"tokens": []})
    assert len(file.path.read_text().splitlines()) == 2
