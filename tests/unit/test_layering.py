"""Who may know whom: the imports of every room, read from its source."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = sorted((ROOT / "dispatch").glob("*.py"))

# What a room may import from this package, lowest first. A new room must be placed here.
MAY_KNOW = {
    "__init__": set(),
    "errors": set(),
    "environment": set(),
    "evidence": set(),
    "prompts": set(),
    "report": set(),
    "results": set(),
    "masks": {"errors"},
    "repairs": {"errors", "masks"},
    "targets": {"errors"},
    "loading": {"errors", "repairs", "targets"},
    "decoding": {"errors"},
    "oracle": {"decoding", "errors", "results"},
    "drafters": {"decoding", "errors"},
    "speculative": {"decoding", "drafters", "errors", "results"},
    "gates": {"errors", "results"},
}
TRANSFORMERS = {"repairs", "loading", "decoding", "oracle"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            yield from ([f"dispatch.{alias.name}" for alias in node.names] if node.module == "dispatch" else [node.module])


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: path.stem)
def test_imports(path):
    names = set(imported(path))
    own = {name.split(".")[1] for name in names if name.startswith("dispatch.")}
    assert own <= MAY_KNOW[path.stem], f"{path.name} imports {sorted(own - MAY_KNOW[path.stem])}"
    others = {name.split(".")[0] for name in names if not name.startswith("dispatch.")} - set(sys.stdlib_module_names)
    allowed = {"torch", "safetensors", "huggingface_hub"} | ({"transformers"} if path.stem in TRANSFORMERS else set())
    assert others <= allowed, f"{path.name} imports {sorted(others - allowed)}"


def test_test_file_names_are_unique():
    # snapshots are stored under the test file's name alone
    stems = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(stems) == len(set(stems))


def test_conftest_imports_nothing_heavy_at_the_top():
    # pytest-benchmark compare imports it outside pytest
    top = ast.parse((ROOT / "conftest.py").read_text()).body
    names = {
        getattr(node, "module", None) or node.names[0].name for node in top if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert names <= {"__future__", "json", "os", "time", "collections.abc", "pathlib", "typing", "pytest"}
