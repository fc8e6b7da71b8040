"""A model read straight into int8, tensor by tensor, and int8 models on disk: the float experts are never held together."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from dispatch.errors import InputError, LoadError
from dispatch.moe import PROJECTIONS, Int8Experts, Int8Linear, install, int8_layers

_MARK = "dispatch_int8.json"
"""The file that says of a checkpoint folder which `layers` it holds in int8."""


def stored_layers(folder: str | Path) -> str | None:
    """Which layers a checkpoint holds in int8, "experts" or "all"; None for one in float."""
    path = Path(folder, _MARK)
    return str(json.loads(path.read_text())["layers"]) if path.exists() else None


def read_int8(
    folder: str, config: PretrainedConfig, *, layers: str, dtype: torch.dtype, remote_code: bool, device: str | torch.device
) -> Any:
    """Builds the model without memory, then fills it on `device` from the shards: int8 layers quantised, the rest in `dtype`.

    Holds what the int8 model takes and one tensor more. Reads float checkpoints (safetensors, or .bin) and those that
    `write_int8` made. Non-persistent buffers are left NaN for the repairs to fill. Raises LoadError for missing, unexpected,
    misshapen or non-finite tensors, naming the first.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote_code)  # type: ignore[no-untyped-call]
    model.eval()
    fill: dict[str, Callable[[Tensor], None]] = {}
    stored = stored_layers(folder)
    if stored not in (None, layers):
        raise LoadError(f"{folder} holds its {stored} layers in int8, and {layers} were asked for: ask for int8-{stored}")
    for name, module, empty in int8_layers(model, "auto", layers, device):
        if not stored and isinstance(empty, Int8Experts):
            for key, index, projection in _expert_keys(name, empty.count):
                fill[key] = partial(empty.put, index, projection, name=key)
        elif not stored and isinstance(empty, Int8Linear):
            fill[f"{name}.weight"] = partial(empty.put, name=f"{name}.weight")
        install(model, name, module, empty)
    tied = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
    tied = tied if config.tie_word_embeddings else set()
    for owner in model.modules():
        for own, buffer in list(owner._buffers.items()):
            if buffer is not None and own in owner._non_persistent_buffers_set:
                owner._buffers[own] = torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device=device)
    quantised = tuple(name for name, module in model.named_modules() if isinstance(module, Int8Experts | Int8Linear))
    for key in model.state_dict():
        parent, _, own = key.rpartition(".")
        if stored or parent not in quantised or own == "bias":
            fill[key] = partial(_assign, model, key, dtype, device)
    for key, tensor in _tensors(folder):
        if key not in fill:
            raise LoadError(f"{key} in {folder} is unexpected: the model has no place for it (or it came twice)")
        try:
            fill.pop(key)(tensor)
        except InputError as error:
            raise LoadError(f"{folder}: {error}") from error
    for key in tied & fill.keys():
        fill.pop(key)(model.get_input_embeddings().weight)
    if fill:
        raise LoadError(f"{len(fill)} tensors are missing from {folder}, the first {next(iter(fill))}")
    if Path(folder, "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def write_int8(model: nn.Module, source: str, folder: str | Path, *, layers: str) -> None:
    """Writes an int8 model as safetensors shards, with the configuration, code and tokenizer of the folder it came from."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: nothing is overwritten, name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(source).iterdir()):
        if path.suffix in (".json", ".py", ".model") and not path.name.endswith((".index.json", _MARK)):
            shutil.copy(path, folder)
    save_torch_state_dict(model.state_dict(), folder, metadata={"format": "pt"})
    # last, so that a folder without it is one that was not finished
    (folder / _MARK).write_text(json.dumps({"layers": layers}) + "\n")


def _expert_keys(name: str, count: int) -> Iterator[tuple[str, int, str]]:
    for index in range(count):
        for projection in PROJECTIONS:
            yield f"{name}.experts.{index}.{projection}.weight", index, projection


def _assign(model: nn.Module, key: str, dtype: torch.dtype, device: Any, tensor: Tensor) -> None:
    parent, _, own = key.rpartition(".")
    module = model.get_submodule(parent)
    held = module._parameters.get(own, module._buffers.get(own))
    assert held is not None
    if held.shape != tensor.shape:
        raise InputError(f"{key} is {tuple(tensor.shape)}, expected {tuple(held.shape)}")
    scales = isinstance(module, Int8Experts | Int8Linear) and own != "bias"
    # always a copy: what safetensors gives may be the mapped file itself
    made = tensor.detach().to(device=device, dtype=held.dtype if scales or not held.is_floating_point() else dtype, copy=True)
    if own in module._parameters:
        module._parameters[own] = nn.Parameter(made, requires_grad=False)
    else:
        module._buffers[own] = made


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one at a time, under a progress bar in bytes read."""
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("*.bin"))
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading into int8", disable=None, leave=False) as bar:
        for path in files:
            if path.suffix == ".bin":
                for key, tensor in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
                    yield key, tensor
                    bar.update(tensor.nbytes)
            else:
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118
                        tensor = file.get_tensor(key)
                        yield key, tensor
                        bar.update(tensor.nbytes)
