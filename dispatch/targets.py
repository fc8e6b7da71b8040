"""Which models can be put to the test: the registered ones, a folder, or a hub id at a commit."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dispatch.errors import InputError

_EMBEDDED = Path(__file__).resolve().parent.parent / "tests" / "models"


WEIGHTS = ("original", "int8-experts", "int8-all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Where a model comes from and what is expected of it."""

    name: str
    source: str
    """A folder, or a hub id such as "deepseek-ai/deepseek-moe-16b-base"."""
    revision: str | None = None
    """The full commit hash of a hub id; a branch name can change under you."""
    remote_code: bool = False
    """Whether Python files that come with the model may be run."""
    expected_repairs: tuple[str, ...] = ()
    """Repairs that must find something to look after; if one does not, the model's code is not what it was."""
    dtype: torch.dtype = torch.float32
    weights: str = "original"
    """original, int8-experts (the routed experts), or int8-all (every linear layer but the routers)."""
    gpu: bool = False
    """Too large for a CPU: its tests carry the marker gpu."""
    draft: "ModelSpec | None" = None

    @property
    def int8_layers(self) -> str | None:
        """What `weights` puts in int8: "experts", "all" or None."""
        return None if self.weights == "original" else self.weights.removeprefix("int8-")

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise InputError(f"weights {self.weights!r}: expected one of {', '.join(WEIGHTS)}")
        is_folder = Path(self.source).is_dir()
        if not is_folder and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.source):
            raise InputError(f"model source {self.source!r}: expected an existing folder, or a hub id such as org/name")
        if not is_folder and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise InputError(
                f"{self.source} has revision {self.revision!r}: expected a full commit hash of 40 hexadecimal digits "
                f"(as {self.source}@<commit> on the command line), so that what is tested and what code runs cannot change"
            )


def _in_all_weights(spec: ModelSpec) -> list[ModelSpec]:
    draft = spec.draft and replace(spec.draft, weights=_of_draft("int8-all"))
    return [spec, *(replace(spec, name=f"{spec.name}-{weights}", weights=weights, draft=draft) for weights in WEIGHTS[1:])]


def _of_draft(weights: str) -> str:
    """An int8 target is drafted for in int8: what a draft gets wrong costs speed only, and it is dense."""
    return "original" if weights == "original" else "int8-all"


TARGETS: dict[str, ModelSpec] = {
    spec.name: spec
    for model in (
        ModelSpec(
            name="tiny",
            source=str(_EMBEDDED / "tiny-moe"),
            remote_code=True,
            expected_repairs=("rope-scaling", "rotary-buffers"),
            draft=ModelSpec(name="tiny-draft", source=str(_EMBEDDED / "tiny-draft")),
        ),
        ModelSpec(
            name="deepseek-moe-16b",
            source="deepseek-ai/deepseek-moe-16b-base",
            revision="521d2bc4fb69a3f3ae565310fcc3b65f97af2580",
            remote_code=True,
            expected_repairs=("rope-scaling", "rotary-buffers"),
            dtype=torch.bfloat16,
            gpu=True,
            draft=ModelSpec(
                name="deepseek-llm-7b",
                source="deepseek-ai/deepseek-llm-7b-base",
                revision="7683fea62db869066ddaff6a41d032262c490d4f",
                dtype=torch.bfloat16,
                gpu=True,
            ),
        ),
    )
    for spec in _in_all_weights(model)
}


def target_spec(text: str, *, remote_code: bool = False, draft: str | None = None, weights: str = "original") -> ModelSpec:
    """The spec for a name in TARGETS, a folder, or org/name@commit; raises InputError for anything else.

    remote_code, draft and weights apply to folders and hub ids; a named target says for itself. A draft is in int8-all where
    the target is in int8.
    """
    if text in TARGETS:
        return TARGETS[text]
    source, _, revision = text.partition("@")
    if text and Path(text).is_dir():
        source, revision = str(Path(text).resolve()), ""
    elif "/" not in text:
        raise InputError(f"unknown target {text!r}: expected one of {', '.join(TARGETS)}, a folder, or org/name@commit")
    on_gpu = torch.cuda.is_available()
    return ModelSpec(
        name=Path(source).name,
        source=source,
        revision=revision or None,
        remote_code=remote_code,
        weights=weights,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        draft=target_spec(draft, weights=_of_draft(weights)) if draft else None,
    )
