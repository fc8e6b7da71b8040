"""The README is true: its commands are the ones that CI runs, its options and repairs are the ones there are."""

import re
from pathlib import Path

from dispatch.loading import load_target
from dispatch.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(title):
    """First column of the table under a heading, without the head."""
    section = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def test_commands_are_run_by_ci():
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
    assert len(commands) == 3
    script = (ROOT / ".ci" / "run").read_text()
    for command in commands[:2]:
        assert command in script
    # the pod's: the main command without constraints, selecting what test_suite.py shows to fail without a GPU
    assert commands[2] == 'pip install -e ".[test]" && pytest -m gpu --benchmark-json=out.json'


def test_options_are_all_there(pytestconfig):
    group = next(group for group in pytestconfig._parser._groups if group.name == "dispatch")
    assert [option.strip("`") for option in table("Options")] == [option.names()[0] for option in group.options]


def test_repairs_are_all_there():
    listed = {name for row in table("What is repaired") for name in re.findall(r"`([\w-]+)`", row)}
    assert listed == {report.name for report in load_target(TARGETS["tiny"]).repairs}


def test_files_it_names_exist():
    for path in re.findall(r"`((?:tests|dispatch|snapshots)/[\w/.-]*)`|\]\(([\w/.]+)\)", README):
        assert (ROOT / (path[0] or path[1])).exists(), path
