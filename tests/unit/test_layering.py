"""Who may know whom: the imports of every room, read from its source."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dispatch"
ROOMS = sorted(PACKAGE.rglob("*.py"))

# What a room may import from this package, lowest first. A new room must be placed here.
MAY_KNOW = {
    "__init__": set(),
    "errors": set(),
    "environment": set(),
    "evidence": set(),
    "graphs": set(),
    "prompts": set(),
    "report": set(),
    "results": set(),
    "masks": {"errors"},
    "repairs": {"errors", "masks"},
    "targets": {"errors"},
    "quantization": {"errors"},
    "kernels": set(),
    "kernels.reference": {"errors", "quantization"},
    "kernels.cpu": {"errors", "quantization", "kernels.reference"},
    "kernels.grouped_gemm": {"errors", "quantization", "kernels.reference"},
    "kernels.decoder_reference": {"quantization", "kernels.reference"},
    "kernels.decoder_cpu": {"errors", "quantization", "kernels.reference", "kernels.cpu"},
    "kernels.decoder_triton": {
        "errors",
        "quantization",
        "kernels.reference",
        "kernels.grouped_gemm",
        "kernels.decoder_reference",
    },
    "kernels.machine_code": {"errors", "quantization", "kernels.grouped_gemm", "kernels.decoder_triton"},
    "moe": {"errors", "quantization", "kernels.reference", "kernels.cpu", "kernels.grouped_gemm"},
    "decoder_weights": {"errors", "moe", "quantization"},
    "engine": {
        *("errors", "decoder_weights", "graphs", "moe", "quantization"),
        *("kernels.reference", "kernels.cpu", "kernels.decoder_reference", "kernels.decoder_cpu", "kernels.decoder_triton"),
    },
    "int8_checkpoint": {"errors", "moe"},
    "loading": {"errors", "int8_checkpoint", "repairs", "targets"},
    "decoding": {"errors"},
    "oracle": {"decoding", "errors", "results"},
    "drafters": {"decoding", "errors"},
    "speculative": {"decoding", "drafters", "errors", "results"},
    "gates": {"errors", "results"},
    "precise": {"decoder_weights", "quantization"},
    "referee": {"gates", "results"},
    "runner": {"errors", "decoder_weights", "decoding", "engine", "loading", "oracle", "precise"},
}
# Who may import which other package; torch may be imported everywhere.
THIRD_PARTY = {
    "transformers": {"repairs", "int8_checkpoint", "loading", "decoding", "oracle"},
    "safetensors": {"int8_checkpoint", "loading"},
    "huggingface_hub": {"int8_checkpoint", "loading"},
    "tqdm": {"int8_checkpoint"},
    "triton": {"kernels.grouped_gemm", "kernels.decoder_triton", "kernels.machine_code"},
}


def room_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(source):
    """Full names, those given to importlib as strings included; a name that is imported from a module stands after it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield ast.literal_eval(node.args[0])


def forbidden(room, source):
    """What a room imports and may not."""
    found = set()
    for name in imported(source):
        package, _, inside = name.partition(".")
        if package == "dispatch":
            # the room is the longest part of the name that is one
            while inside not in MAY_KNOW and "." in inside:
                inside = inside.rpartition(".")[0]
            if inside not in MAY_KNOW[room]:
                found.add(f"dispatch.{inside}")
        elif package not in sys.stdlib_module_names and package != "torch" and room not in THIRD_PARTY.get(package, ()):
            found.add(package)
    return found


@pytest.mark.parametrize("path", ROOMS, ids=room_of)
def test_imports(path):
    assert room_of(path) in MAY_KNOW, f"{path.name} is a new room: say in MAY_KNOW what it may import"
    assert forbidden(room_of(path), path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("room", "source", "found"),
    [
        ("gates", "import sys, torch\nfrom dispatch.results import Result", set()),
        ("gates", "from dispatch.loading import load_target", {"dispatch.loading"}),
        ("gates", "import dispatch.loading", {"dispatch.loading"}),
        ("gates", "def f():\n    from dispatch import moe, results", {"dispatch.moe"}),
        ("moe", "from dispatch.kernels import cpu, reference", set()),
        ("moe", "from dispatch.kernels import cpu, machine_code", {"dispatch.kernels.machine_code"}),
        ("kernels.cpu", "importlib.import_module('dispatch.kernels.grouped_gemm')", {"dispatch.kernels.grouped_gemm"}),
        ("kernels.cpu", "import triton.language as tl", {"triton"}),
        ("kernels.grouped_gemm", "import triton.language as tl", set()),
        ("speculative", "from transformers.cache_utils import DynamicCache", {"transformers"}),
        ("gates", "import numpy", {"numpy"}),
        ("gates", "from dispatch.nowhere import x", {"dispatch.nowhere"}),
    ],
)
def test_an_import_that_is_not_allowed_is_found(room, source, found):
    assert forbidden(room, source) == found


def test_test_file_names_are_unique():
    # snapshots are stored under the test file's name alone
    stems = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(stems) == len(set(stems))


def test_conftest_imports_nothing_heavy_at_the_top():
    # pytest-benchmark compare imports it outside pytest
    top = ast.parse((ROOT / "conftest.py").read_text()).body
    modules = [
        getattr(node, "module", None) or node.names[0].name for node in top if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert {module.partition(".")[0] for module in modules} <= {"pytest"} | sys.stdlib_module_names
