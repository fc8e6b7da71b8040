"""The suite as a user runs it, in a copy of this repository: that it goes red when it must, and what it leaves behind."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dispatch.loading import load_target, save_int8
from dispatch.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = Path("snapshots", "test_decode_snapshots")
ONE_CELL = (
    "tests/gpu/test_throughput.py",
    "-k",
    "test_throughput and draft-model and k4 and prose",
    "--target=tiny",
    "--rounds=1",
)


class Copy:
    def __init__(self, root):
        self.root = root

    def run(self, *arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        settings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=self.root, env=settings, capture_output=True, text=True, timeout=500, check=False)
        return done.returncode, done.stdout + done.stderr

    def edit(self, path, old, new):
        source = (self.root / path).read_text()
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {path}"
        (self.root / path).write_text(source.replace(old, new))

    def rows(self):
        """The benchmarks in out.json; a run in which none came to be measured writes no such file."""
        path = self.root / "out.json"
        return json.loads(path.read_text())["benchmarks"] if path.exists() else []

    def evidence(self):
        (file,) = (self.root / "evidence").glob("*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def copy(tmp_path):
    for name in ("dispatch", "snapshots", "tests/gpu", "tests/models"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "conftest.py", ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return Copy(tmp_path)


def test_green_cell_and_all_it_leaves_behind(copy):
    code, output = copy.run(*ONE_CELL, "--benchmark-json=out.json")
    assert code == 0, output
    assert "dispatch: targets tiny (cpu)" in output
    assert re.search(r"tiny +draft-model +4 +1/1 +\d+\.\d% +\d\.\d\d +\d+\.\d +\d\.\d\dx", output), output
    report = json.loads((copy.root / "out.json").read_text())
    assert report["machine_info"]["torch"] == torch.__version__
    (row,) = copy.rows()
    info = row["extra_info"]
    assert (info["target"], info["prompt"], info["drafter"], info["k"], info["matched"]) == (
        "tiny",
        "prose",
        "draft-model",
        4,
        True,
    )
    assert 0 <= info["acceptance_rate"] <= 1
    assert info["seconds"] == row["stats"]["median"] > 0
    assert info["baseline_seconds"] > 0
    kinds = {record["kind"]: record for record in copy.evidence()}
    assert kinds["environment"]["torch"] == torch.__version__
    assert kinds["cell"]["token_ids"] == kinds["baseline"]["tokens"]
    assert kinds["cell"]["difference"] is None


def test_int8_findings_are_printed_and_kept(copy):
    tests = ("tests/gpu/test_int8_decode.py", "tests/gpu/test_int8_quality.py")
    code, output = copy.run(*tests, "--target=tiny-int8-experts", "--rounds=1", "--benchmark-json=out.json")
    assert code == 0, output
    kinds = {record["kind"]: record for record in copy.evidence()}
    (row,) = copy.rows()
    info = row["extra_info"]
    assert info == {name: value for name, value in kinds["int8-decode"].items() if name != "kind"}
    assert (info["target"], info["differ_first_at"]) == ("tiny-int8-experts", {})
    assert info["tokens_per_second"] == pytest.approx(4 * 64 / row["stats"]["median"])
    assert info["speed_up"] == pytest.approx(info["tokens_per_second"] / info["original_tokens_per_second"])
    rates = (
        f"{info['tokens_per_second']:.1f} tok/s, the original by its own code {info['original_tokens_per_second']:.1f} tok/s"
    )
    found = kinds["int8-quality"]["found"]
    assert re.match(r"2000 positions: same greedy token \d\d\.\d\d% .*, perplexity \d+\.\d+ -> \d", found)
    assert output.partition("= dispatch: ")[2].splitlines()[1:4] == [
        f"tiny-int8-experts decodes {rates}: {info['speed_up']:.2f}x; tokens equal on 4/4 prompts",
        f"tiny-int8-experts against its original weights: {found}",
        "",
    ]


def test_other_tokens_of_int8_are_told(copy):
    copy.edit("dispatch/quantization.py", "WEIGHT_LIMIT = 127", "WEIGHT_LIMIT = 7")
    code, output = copy.run("tests/gpu/test_int8_decode.py", "--target=tiny-int8-experts", "--benchmark-disable")
    assert code == 0, output
    differ = copy.evidence()[-1]["differ_first_at"]
    places = ", ".join(f"in {prompt} at {position}" for prompt, position in differ.items())
    assert 0 < len(differ) <= 4
    line = f"tiny-int8-experts was not timed; tokens equal on {4 - len(differ)}/4 prompts, first difference {places}\n"
    assert line in output, output


FAULTS = {
    "accept-rule": (
        "dispatch/speculative.py",
        "if token != picked[i]:",
        "if token < 0:",
        "tokens differ first at position",
    ),
    "own-token": (
        "dispatch/speculative.py",
        "picked[accepted]]",
        "picked[-1]]",
        "(tokens differ first at|expected the same tokens, fewer than committed)",
    ),
    "rollback-count": (
        "dispatch/speculative.py",
        "target.rollback(forwarded - len(new))",
        "target.rollback(max(0, forwarded - len(new) - 1))",
        "the target's cache holds",
    ),
    "rollback-content": (
        "dispatch/engine.py",
        "self._start.fill_(self._length)",
        "self._start.fill_(max(self._length, self._start.item()))",
        "tokens differ first at position .*(.|\n)* no rounding explains this: look at accept in dispatch/speculative.py",
    ),
    "rollback-content-of-the-models-own-code": (
        "dispatch/decoding.py",
        "            self._cache.crop(-count)\n",
        "            for layer in self._cache.layers:\n"
        "                layer.keys, layer.values = layer.keys[..., count:, :], layer.values[..., count:, :]\n",
        "referee: gap .* there at higher precision; noise band .*\n  DEFECT at position .*(.|\n)*  look at what was kept",
        "--numerics=fast",
    ),
    "engine-eps": (
        "dispatch/engine.py",
        "rows.rms_norm(x, layer.mlp_norm, weights.eps)",
        "rows.rms_norm(x, layer.mlp_norm, 1.0)",
        "tiny: the engine's logits are off those of the model's own code by",
    ),
    "draft-cache": ("dispatch/drafters.py", "        del self._held[agreed:]\n", "", "the draft's cache has"),
    "frequencies": (
        "dispatch/loading.py",
        "    reports += repair_model(model)\n",
        "",
        "the repair 'rotary-buffers' was expected and matched nothing",
    ),
    "collapse": (
        "dispatch/decoding.py",
        "    return rows\n",
        "    return [5] * len(rows)\n",
        r"is implausible: one repeated token \[5\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_red_and_leaves_no_row(copy, fault):
    path, old, new, message, *options = FAULTS[fault]
    copy.edit(path, old, new)
    code, output = copy.run(*ONE_CELL, "--benchmark-json=out.json", *options)
    assert code == 1, output
    assert re.search(message, output), output
    assert copy.rows() == []
    if "tokens differ" in output:
        cell = copy.evidence()[-1]
        assert cell["matched"] is False
        assert cell["difference"] in output
        assert re.search(r"tiny +draft-model +4 +0/1", output), output


INT8_FAULTS = {
    "scales-of-another-expert": (
        "dispatch/moe.py",
        "scales[expert, part])",
        "scales[expert - 1, part])",
        ("test_int8_quality.py", "--target=tiny-int8-experts"),
        r"tiny-int8-experts: perplexity rose by \d.*%, expected at most 0\.5%; the greedy token is the same at .*"
        "the greedy token changed at \\d+ positions where the original led by 1.0 or more",
    ),
    "one-scale-for-all-channels": (
        "dispatch/moe.py",
        "        _put(weight, name, self.values, self.scales)\n",
        "        _put(weight, name, self.values, self.scales)\n        self.scales.fill_(self.scales.mean())\n",
        ("test_int8_quality.py", "--target=tiny-int8-all"),
        r"tiny-int8-all: perplexity rose by \d.*%, expected at most 0\.5%; the greedy token is the same at ",
    ),
    # a forward over one token has no other
    "routing-weights-of-another-token": (
        "dispatch/moe.py",
        "weights.reshape(len(x), -1))",
        "weights.reshape(len(x), -1).flip(0))",
        ("test_token_match.py", "--target=tiny-int8-experts", "-k", "draft-model and k4 and prose", "--numerics=fast"),
        "tiny-int8-experts, prose, draft-model, k=4: tokens differ first at position",
    ),
    "weights-that-drift": (
        "dispatch/engine.py",
        "        out: Tensor = run(x,",
        "        if isinstance(experts.down, Int8Weight):\n            experts.down.scales.mul_(1.001)\n"
        "        out: Tensor = run(x,",
        ("test_int8_decode.py", "--target=tiny-int8-experts", "--rounds=1", "--benchmark-json=out.json"),
        "prose: other tokens the second time",
    ),
}


@pytest.mark.parametrize("fault", INT8_FAULTS)
def test_planted_fault_of_int8_is_red(copy, fault):
    path, old, new, (test, *choice), message = INT8_FAULTS[fault]
    copy.edit(path, old, new)
    code, output = copy.run(f"tests/gpu/{test}", *choice)
    assert code == 1, output
    assert re.search(message, output), output
    assert copy.rows() == []
    green = [r for r in copy.evidence() if r["kind"] == "int8-decode" or r.get("matched") or r.get("problems") == []]
    assert green == []


ENGINE_FAULTS = {
    "scores-a-thousandth-larger": (
        "weights.head_size**-0.5)",
        "weights.head_size**-0.5 * 1.001)",
        ("test_engine_logits.py",),
        "tiny: the exact engine is not the model: its logits are off by",
    ),
    "positions-of-several-rows": (
        "self._start.fill_(self._length)",
        "self._start.fill_(self._length + (1 < count < 6))",
        ("test_engine_speed.py", "-k", "widths"),
        "a row changes in a forward over 2",
    ),
    "weights-that-drift": (
        "        x = weights.embedding[ids]\n",
        "        x = weights.embedding[ids]\n        weights.layers[1].mlp_norm.mul_(1.003)\n",
        ("test_engine_speed.py", "-k", "decode", "--rounds=1"),
        "prose: other tokens the second time",
    ),
}


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_planted_fault_of_the_engine_is_red(copy, fault):
    old, new, (test, *choice), message = ENGINE_FAULTS[fault]
    copy.edit("dispatch/engine.py", old, new)
    code, output = copy.run(f"tests/gpu/{test}", "--target=tiny", "--benchmark-json=out.json", *choice)
    assert code == 1, output
    assert re.search(message, output), output
    assert copy.rows() == []


def test_every_target_that_fits_a_cpu_goes_through_every_gate(copy):
    code, output = copy.run("tests/gpu", "-m", "not gpu", "--collect-only", "-q")
    assert code == 0, output
    for target in ("tiny", "tiny-int8-experts", "tiny-int8-all"):
        for gate, count in {
            "test_token_match": 32,
            "test_throughput": 32,
            "test_decode": 4,
            "test_int8_is_still_the_model": 1,
            "test_the_engine_is_the_model": 1,
        }.items():
            assert len(re.findall(rf"::{gate}\[{target}(?!-int8)\b", output)) == count, (gate, target, output)


def test_snapshots_of_targets_that_did_not_run_survive_an_update(copy):
    theirs = copy.root / SNAPSHOTS / "test_decode[deepseek-moe-16b-prose].txt"
    theirs.write_text("recorded on a GPU\n")
    ours = {path.name: path.read_text() for path in (copy.root / SNAPSHOTS).iterdir()}
    choices = [("--target=tiny",), ("-m", "not gpu")]
    if not torch.cuda.is_available():
        choices.append(())  # with a GPU this would load and run the 16B
    for choice in choices:
        code, output = copy.run("tests/gpu/test_decode_snapshots.py", "--snapshot-update", *choice)
        assert code == 0, output
        assert {path.name: path.read_text() for path in (copy.root / SNAPSHOTS).iterdir()} == ours


def test_changed_token_is_one_changed_line(copy):
    path = copy.root / SNAPSHOTS / "test_decode[tiny-prose].txt"
    lines = path.read_text().splitlines(keepends=True)
    lines[6] = "   5   2000 'elsewhere'\n"
    lines[-1] = "torch: another\n"
    path.write_text("".join(lines))
    code, output = copy.run("tests/gpu/test_decode_snapshots.py", "-k", "test_decode and prose", "--target=tiny", "-vv")
    assert code == 1, output
    assert re.findall(r"^E +([-+]) +5 +\d+ '.*'$", output, re.MULTILINE) == ["-", "+"], output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so that these runs would use it")
@pytest.mark.parametrize("choice", [("-m", "gpu"), ("tests/gpu", "-k", "deepseek"), ("tests/gpu", "--target=deepseek-moe-16b")])
def test_gpu_tests_alone_without_a_gpu_fail_and_say_why(copy, choice):
    code, output = copy.run(*choice)
    assert code == 4, output
    assert re.search(r"ERROR: no usable GPU: .*\[torch .*driver .*\]\. (\d+) of \1 selected tests need one", output), output


@pytest.mark.parametrize(
    ("choice", "shapes"),
    [
        ((), {"tiny-cpu", "16b-cuda"}),
        (("-m", "not gpu"), {"tiny-cpu"}),
        (("-m", "nightly"), {"16b-cpu"}),
        (("-m", "nightly or gpu"), {"16b-cpu", "16b-cuda"}),
    ],
)
def test_nightly_cells_run_where_they_are_named(copy, choice, shapes):
    code, output = copy.run(
        "tests/gpu/test_layer_throughput.py", "-k", "test_layer and not fault", "--collect-only", "-q", *choice
    )
    assert code == 0, output
    assert set(re.findall(r"::test_layer\[(\w+-\w+)", output)) == shapes


def test_layer_that_is_wrong_leaves_no_row(copy):
    one = ("tests/gpu/test_layer_throughput.py", "-k", "tiny-cpu-5-uniform", "--benchmark-json=out.json")
    code, output = copy.run(*one)
    assert code == 0, output
    rows = {row["extra_info"]["implementation"]: row["extra_info"] for row in copy.rows()}
    assert rows.keys() == {"stock", "grouped_mm", "batched_mm", "int8pack", "int8"}
    assert all(row["effective_gb_s"] / row["bandwidth_gb_s"] == pytest.approx(row["share"]) for row in rows.values())
    assert rows["int8"]["ratio_to_int8"] == 1
    (copy.root / "out.json").unlink()
    copy.edit(
        "dispatch/kernels/cpu.py", "    rows, routing, chosen = x.float()", "    rows, routing, chosen = 1.01 * x.float()"
    )
    code, output = copy.run(*one)
    assert code == 1, output
    assert "int8: a row is off by" in output
    assert copy.rows() == []


def test_broken_gpu_is_not_skipped(copy):
    (copy.root / "plant.py").write_text(
        "from dispatch import environment\n"
        "environment.gpu_problem = lambda: environment.GpuProblem(message='no usable GPU: cuInit failed', broken=True)\n"
    )
    code, output = copy.run("tests/gpu/test_token_match.py", "-p", "plant")
    assert code == 4, output
    assert "ERROR: no usable GPU: cuInit failed. 96 of 192 selected tests need one" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--target=tinny",),
            "unknown target 'tinny': expected one of tiny, tiny-int8-experts, tiny-int8-all, deepseek-moe-16b, "
            "deepseek-moe-16b-int8-experts, deepseek-moe-16b-int8-all, a folder, or org/name@commit",
        ),
        (("--target=org/name@main",), "org/name has revision 'main': expected a full commit hash of 40 hexadecimal digits"),
        (("--target=tiny", "-m", "gpu"), "--target tiny leaves nothing to test"),
        (("--target=tests/models/tiny-moe", "--target=tests/../tests/models/tiny-moe/"), "two targets are named 'tiny-moe'"),
    ],
)
def test_targets_that_cannot_be_run(copy, arguments, message):
    code, output = copy.run("tests/gpu", *arguments)
    assert code == 4, output
    assert f"ERROR: {message}" in output


def test_target_in_a_folder(copy):
    model = copy.root / "my-model"
    shutil.copytree(copy.root / "tests/models/tiny-moe", model)
    one = ("tests/gpu/test_token_match.py", "-k", "draft-model and k4 and prose", f"--target={model}", "--device=cpu")
    code, output = copy.run(*one)
    assert code == 1, output
    assert "pass --trust-remote-code" in output
    code, output = copy.run(*one, "--trust-remote-code", f"--draft={copy.root / 'tests/models/tiny-draft'}")
    assert code == 0, output
    assert re.search(r"my-model +draft-model +4 +1/1", output), output
    code, output = copy.run(*one, "--trust-remote-code", "-rs")
    assert code == 0, output
    assert "target my-model names no draft model; give one with --draft" in output


@pytest.mark.parametrize("stored", ["original", "int8"])
def test_target_in_a_folder_in_int8(copy, stored):
    if stored == "int8":
        save_int8(load_target(TARGETS["tiny-int8-experts"]), copy.root / "my-model")
    else:
        shutil.copytree(copy.root / "tests/models/tiny-moe", copy.root / "my-model")
    code, output = copy.run(
        *("tests/gpu/test_token_match.py", "tests/gpu/test_int8_quality.py", "-rs", "--device=cpu"),
        *("-k", "test_int8_is_still_the_model or prompt-lookup and k4 and prose"),
        *("--target=my-model", "--weights=int8-experts", "--trust-remote-code"),
    )
    assert code == 0, output
    assert re.search(r"my-model +prompt-lookup +4 +1/1", output), output
    assert re.search(r"my-model: \d+ MiB, float32, weights int8-experts from safetensors", output), output
    assert ("my-model against its original weights: 2000 positions" in output) == (stored == "original"), output
    assert ("my-model holds int8 weights only: there is no original to compare with" in output) == (stored == "int8"), output


def test_benchmarks_from_other_hardware_are_not_compared(copy):
    code, output = copy.run(*ONE_CELL, "--benchmark-save=one", "--benchmark-storage=file://./kept")
    assert code == 0, output
    (saved,) = (copy.root / "kept").rglob("*.json")
    report = json.loads(saved.read_text())
    report["machine_info"]["gpu"] = "NVIDIA A40"
    saved.write_text(json.dumps(report))
    code, output = copy.run(*ONE_CELL, "--benchmark-compare", "--benchmark-storage=file://./kept")
    assert code != 0
    assert "these benchmarks were made on other hardware" in output
