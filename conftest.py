"""The suite as a product: its options, what each test is given, and what a run prints and leaves behind.

torch, transformers and dispatch are imported inside functions: `pytest-benchmark compare` imports this file too.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dispatch.decoding import Target
    from dispatch.drafters import Drafter
    from dispatch.evidence import EvidenceFile
    from dispatch.loading import LoadedModel
    from dispatch.oracle import Forward
    from dispatch.results import Result
    from dispatch.runner import Runner
    from dispatch.targets import ModelSpec

ROOT = Path(__file__).resolve().parent
SUITE = ROOT / "tests" / "gpu"
CELL = "dispatch_cell"
LINE = "dispatch_line"
"""Names of recorded properties: a cell of the table, and a line to print under it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dispatch", "dispatch: which model, and how it is decoded")
    group.addoption(
        "--target",
        action="append",
        default=[],
        metavar="NAME|FOLDER|ORG/NAME@COMMIT",
        help="test this target only (repeatable): tiny, deepseek-moe-16b, a model folder, or a hub id at a full commit hash",
    )
    group.addoption("--draft", metavar="FOLDER|ORG/NAME@COMMIT", help="draft model for a --target that is a folder or hub id")
    group.addoption(
        "--weights",
        choices=("original", "int8-experts", "int8-all"),
        default="original",
        help="precision of a --target that is a folder or hub id (default original)",
    )
    group.addoption("--trust-remote-code", action="store_true", help="let a --target's own Python files run; read them first")
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        help="where to load (default: tiny on the CPU, everything else on a GPU if there is one)",
    )
    group.addoption(
        "--numerics",
        choices=("exact", "fast"),
        default="exact",
        help="exact: the engine whose rows do not depend on their company, any other token is a failure; "
        "fast: the model's own code, and a referee for near ties (default exact)",
    )
    group.addoption("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to decode for each prompt (default 64)")
    group.addoption("--rounds", type=int, default=3, metavar="N", help="timed alternations of baseline and drafter (default 3)")
    group.addoption(
        "--evidence",
        metavar="FOLDER",
        default="evidence",
        help="where every finding is written as it is made (default evidence/)",
    )


def pytest_configure() -> None:
    import torch

    if not torch.cuda.is_available():
        # triton reads it when the kernels are defined; in the interpreter they compute on the CPU
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _asked(config: pytest.Config) -> dict[str, ModelSpec]:
    """The targets that --target names, by name."""
    from dispatch.errors import InputError
    from dispatch.targets import TARGETS, target_spec

    settings = {name: config.getoption(f"--{name}") for name in ("draft", "weights")}
    settings["remote_code"] = config.getoption("--trust-remote-code")
    try:
        specs = [target_spec(text, **settings) for text in config.getoption("--target")]
    except InputError as error:
        raise pytest.UsageError(str(error)) from error
    names = [spec.name for spec in specs]
    for spec in specs:
        if names.count(spec.name) > 1 or TARGETS.get(spec.name, spec) != spec:
            raise pytest.UsageError(f"two targets are named {spec.name!r}, which names tests and snapshots: rename the folder")
    return {spec.name: spec for spec in specs}


def _specs(config: pytest.Config) -> dict[str, ModelSpec]:
    from dispatch.targets import TARGETS

    return {**TARGETS, **_asked(config)}


def _device(config: pytest.Config, spec: ModelSpec) -> str:
    import torch

    chosen: str | None = config.getoption("--device")
    return chosen or ("cuda" if not spec.name.startswith("tiny") and torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target_name" in metafunc.fixturenames:
        specs = _specs(metafunc.config)
        params = [pytest.param(name, id=name, marks=[pytest.mark.gpu] if spec.gpu else []) for name, spec in specs.items()]
        metafunc.parametrize("target_name", params, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_nightly(config, items)
    _keep_chosen_targets(config, items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu or config.option.collectonly:
        return
    from dispatch.environment import gpu_problem

    problem = gpu_problem()
    if problem and (problem.broken or len(on_gpu) == len(items)):
        # everything skipped would end green and mean nothing
        raise pytest.UsageError(f"{problem.message}. {len(on_gpu)} of {len(items)} selected tests need one")
    if problem:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=problem.message))


def _leave_out_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what takes minutes, unless the -m expression speaks of it."""
    if "nightly" not in config.option.markexpr:
        out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _keep_chosen_targets(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the targets that --target leaves out. Last of all hooks, or --snapshot-update would delete their snapshots."""
    chosen = _asked(config)
    if not chosen:
        return
    # what the suite has of no target is of a layer's shape
    kept = {item for item in items if _target_of(item) in chosen or not (_target_of(item) or SUITE in item.path.parents)}
    out = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
    if out and not any(map(_target_of, items)):
        raise pytest.UsageError(f"--target {', '.join(chosen)} leaves nothing to test: a -m or -k expression deselects it")


def _target_of(item: pytest.Item) -> str | None:
    name: str | None = item.callspec.params.get("target_name") if hasattr(item, "callspec") else None
    return name


@pytest.fixture(scope="session")
def target(target_name: str, request: pytest.FixtureRequest) -> LoadedModel:
    """The target under test, loaded, repaired and checked."""
    from dispatch.loading import load_target

    spec = _specs(request.config)[target_name]
    loaded = load_target(spec, device=_device(request.config, spec))
    size = sum(tensor.nbytes for tensor in loaded.model.state_dict().values()) / 2**20
    _report(request.config).append(
        f"{spec.name}: {size:,.0f} MiB, {str(spec.dtype).removeprefix('torch.')}, weights {spec.weights} from {loaded.files}; "
        f"repairs {', '.join(map(str, loaded.repairs))}"
    )
    return loaded


@pytest.fixture(scope="session")
def numerics(request: pytest.FixtureRequest) -> str:
    """The value of --numerics."""
    chosen: str = request.config.getoption("--numerics")
    return chosen


@pytest.fixture(scope="session")
def runner(target: LoadedModel, numerics: str, request: pytest.FixtureRequest) -> Runner:
    """By what the target is run."""
    from dispatch.runner import make_runner

    made = make_runner(target, numerics)
    _report(request.config).append(
        f"{target.spec.name} runs by the {made}" if made.exact else f"{target.spec.name} runs by its {made}"
    )
    return made


@pytest.fixture
def original(target: LoadedModel) -> LoadedModel:
    """An int8 target's model in its original precision beside it, for one test only: it is the larger of the two."""
    from dispatch.int8_checkpoint import stored_layers
    from dispatch.loading import load_target

    name, device = target.spec.name, target.model.device
    if target.spec.int8_layers is None:
        pytest.skip(f"{name} has its original weights: there is nothing to compare")
    if stored_layers(target.folder):
        pytest.skip(f"{target.folder} holds int8 weights only: there is no original to compare with")
    if device.type == "cuda":
        import torch

        # what an earlier test held is free only then
        gc.collect()
        torch.cuda.empty_cache()
        size = sum(path.stat().st_size for path in Path(target.folder).glob(f"*.{target.files}"))
        if torch.cuda.mem_get_info(device)[0] < size * 1.1:
            pytest.skip(f"the original takes {size / 2**30:.0f} GiB beside {name}, more than is free on this GPU")
    return load_target(replace(target.spec, weights="original"), device=device)


@pytest.fixture(scope="session")
def cached_target(runner: Runner) -> Target:
    """The target behind its own key/value cache, one for the whole session, so that a run that leaves state behind shows."""
    return runner.target()


@pytest.fixture(scope="session")
def get_drafter(target: LoadedModel, numerics: str, request: pytest.FixtureRequest) -> Callable[[str], Drafter]:
    """Gives the drafter of a name; each is made once per target and used for every prompt and k."""
    from dispatch.drafters import DraftModelDrafter, PromptLookupDrafter
    from dispatch.loading import load_draft, shared_vocabulary
    from dispatch.runner import make_runner

    made: dict[str, Drafter] = {"prompt-lookup": PromptLookupDrafter()}

    def get(name: str) -> Drafter:
        if name == "draft-model" and name not in made:
            if target.spec.draft is None:
                pytest.skip(f"target {target.spec.name} names no draft model; give one with --draft")
            draft = load_draft(target, device=_device(request.config, target.spec))
            model = make_runner(draft, numerics).target()
            made[name] = DraftModelDrafter(model, vocab_size=shared_vocabulary(target, draft))
        return made[name]

    return get


@pytest.fixture(scope="session")
def decode_baseline(target: LoadedModel, runner: Runner, request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Plain greedy decoding of a prompt by name; every call decodes anew. By the target, unless another forward is given.

    timed=True for a measurement: no more is done then than the speculative path does.
    """
    from dispatch.oracle import decode_greedy
    from dispatch.prompts import PROMPTS

    own = runner.baseline()

    def decode(prompt: str, timed: bool = False, by: Forward = own) -> Result:
        return decode_greedy(
            by,
            target.encode(PROMPTS[prompt]),
            max_new_tokens=request.config.getoption("--max-new-tokens"),
            eos_ids=target.eos_ids,
            to_text=target.decode,
            keep_top_two=not timed,
            prompt_at_once=timed or not runner.exact,
        )

    return decode


@pytest.fixture(scope="session")
def baseline(target: LoadedModel, decode_baseline: Callable[..., Result], evidence: EvidenceFile) -> Callable[[str], Result]:
    """The baseline of a prompt by name, decoded once per session. Fails the test if it is no ground for a comparison."""
    from dispatch.gates import implausibility

    decoded: dict[str, Result] = {}

    def get(prompt: str) -> Result:
        if prompt not in decoded:
            decoded[prompt] = decode_baseline(prompt)
            record = {
                "target": target.spec.name,
                "prompt": prompt,
                "tokens": decoded[prompt].tokens,
                "text": decoded[prompt].text,
            }
            evidence.write("baseline", record)
        result = decoded[prompt]
        reason = implausibility(result)
        if reason:
            pytest.fail(
                f"the baseline of {target.spec.name} on {prompt!r} is implausible: {reason}. A match with it means nothing. "
                f"It reads {result.text!r}",
                pytrace=False,
            )
        return result

    return get


@pytest.fixture(scope="session")
def decode_drafted(
    target: LoadedModel,
    cached_target: Target,
    get_drafter: Callable[[str], Drafter],
    request: pytest.FixtureRequest,
) -> Callable[[str, str, int], Result]:
    """Speculative decoding of a prompt by name, with a drafter by name and k."""
    from dispatch.prompts import PROMPTS
    from dispatch.speculative import decode_speculative

    def decode(prompt: str, drafter: str, k: int) -> Result:
        return decode_speculative(
            cached_target,
            get_drafter(drafter),
            target.encode(PROMPTS[prompt]),
            k=k,
            max_new_tokens=request.config.getoption("--max-new-tokens"),
            eos_ids=target.eos_ids,
            to_text=target.decode,
        )

    return decode


@pytest.fixture
def judge(
    target: LoadedModel,
    runner: Runner,
    baseline: Callable[[str], Result],
    evidence: EvidenceFile,
    record_property: Callable[[str, object], None],
) -> Callable[..., dict[str, Any]]:
    """Compares a speculative result with the baseline, records the finding, and fails on a difference.

    In numerics="fast" the referee may call it a near tie, which is counted and passes.
    """
    from dispatch.gates import EXACT_HINT, OWN_CODE_HINT, first_difference
    from dispatch.prompts import PROMPTS
    from dispatch.referee import rule

    def compare(result: Result, *, prompt: str, drafter: str, k: int, **timing: float) -> dict[str, Any]:
        expected = baseline(prompt)
        difference = first_difference(expected, result, target.decode)
        finding, near_ties, passed = None, 0, difference is None
        if difference is not None and (runner.exact or runner.weights is None):
            finding = f"{difference}\n{EXACT_HINT if runner.exact else OWN_CODE_HINT}"
        elif difference is not None:
            ruling = rule(
                difference,
                target.encode(PROMPTS[prompt]),
                expected,
                result,
                precise=runner.precise,
                forwards=(runner.whole, runner.one_by_one),
                to_text=target.decode,
            )
            finding, near_ties, passed = str(ruling), len(ruling.near_ties), not ruling.is_defect
        cell = {
            "target": target.spec.name,
            "prompt": prompt,
            "drafter": drafter,
            "k": k,
            "matched": difference is None,
            "numerics": "exact" if runner.exact else "fast",
            "near_ties": near_ties,
            "drafted": result.drafted,
            "accepted": result.accepted,
            "tokens": len(result.tokens),
            "forwards": result.forwards,
            **timing,
        }
        record_property(CELL, cell)
        extra = {"finish_reason": result.finish_reason, "acceptance_by_position": result.acceptance_by_position}
        evidence.write("cell", {**cell, **extra, "token_ids": result.tokens, "difference": finding})
        if not passed:
            pytest.fail(f"{target.spec.name}, {prompt}, {drafter}, k={k}: {finding}", pytrace=False)
        if finding:
            record_property(LINE, f"{target.spec.name}, {prompt}, {drafter}, k={k}: {finding}")
        return cell

    return compare


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest) -> EvidenceFile:
    """The file of this run's findings."""
    from dispatch.environment import describe_environment
    from dispatch.evidence import EvidenceFile

    folder = ROOT / request.config.getoption("--evidence")
    file = EvidenceFile(folder / time.strftime("%Y%m%d-%H%M%S.jsonl"))
    file.write("environment", describe_environment())
    _report(request.config).append(f"evidence: {os.path.relpath(file.path)}")
    return file


_LINES = pytest.StashKey[list[str]]()


def _report(config: pytest.Config) -> list[str]:
    return config.stash.setdefault(_LINES, [])


def pytest_report_header(config: pytest.Config) -> list[str]:
    from dispatch.environment import describe_environment

    facts = describe_environment()
    targets = {name: (spec, _device(config, spec)) for name, spec in (_asked(config) or _specs(config)).items()}
    names = [f"{name} ({'needs a GPU' if spec.gpu and on == 'cpu' else on})" for name, (spec, on) in targets.items()]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "triton"))
    return [
        f"dispatch: targets {', '.join(names)}",
        f"dispatch: {versions}; gpu {facts['gpu']}, driver {facts['driver']}; {facts['cpu']}",
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from dispatch.report import near_ties, table

    reports = [r for group in terminalreporter.stats.values() for r in group if isinstance(r, pytest.TestReport)]
    found: list[tuple[str, Any]] = [recorded for r in reports if r.when == "call" for recorded in r.user_properties]
    blocks = [
        table([value for name, value in found if name == CELL]),
        near_ties([value for name, value in found if name == CELL]),
        [value for name, value in found if name == LINE],
        _report(config),
    ]
    if any(blocks):
        terminalreporter.write_sep("=", "dispatch: speculative decoding against plain greedy")
        terminalreporter.write_line("\n\n".join("\n".join(block) for block in blocks if block))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if report.failed and benchmark is not None:
        # a measurement whose gate is red is no result; pytest-benchmark leaves out what has an error
        benchmark.has_error = True
    return report


def pytest_benchmark_generate_machine_info() -> dict[str, str]:
    from dispatch.environment import describe_environment

    return describe_environment()


def pytest_benchmark_compare_machine_info(
    config: pytest.Config, benchmarksession: Any, machine_info: dict[str, str], compared_benchmark: dict[str, Any]
) -> None:
    other = compared_benchmark["machine_info"]
    different = {
        name: (other.get(name), machine_info.get(name)) for name in ("gpu", "cpu") if other.get(name) != machine_info.get(name)
    }
    if different:
        raise pytest.UsageError(
            f"these benchmarks were made on other hardware, and times do not compare: {json.dumps(different)}"
        )
