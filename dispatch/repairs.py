"""Named repairs for remote model code that transformers 5.x breaks, applied in the process and never to a file.

Three moments, in this order: `repair_transformers` before the remote module is imported, `repair_config` on the loaded
config, `repair_model` on the loaded model after its last device or dtype move. Each is idempotent and changes nothing that
is healthy. README.md, "What is repaired", says what each is for.
"""

import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import import_utils

from dispatch import masks
from dispatch.errors import RepairError


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What one named repair did: `matched` places it looked after, `changed` of them it had to put right."""

    name: str
    matched: int
    changed: int

    def __str__(self) -> str:
        return f"{self.name} {self.changed}/{self.matched}"


def repair_transformers() -> list[RepairReport]:
    """Supplies what 5.x removed from transformers, only where it is missing. Must run before the remote code's import.

    `changed` is 1 for a name this package supplies in this process, now or at an earlier call; 0 where transformers has it.
    """
    reports = []
    for name, owner, attribute, supplied in _SUPPLIED:
        if not hasattr(owner, attribute):
            setattr(owner, attribute, supplied)
            _supplied_names.add(name)
        reports.append(RepairReport(name=name, matched=1, changed=int(name in _supplied_names)))
    if _MASKS not in sys.modules and importlib.util.find_spec(_MASKS) is None:
        sys.modules[_MASKS] = _mask_module()
        _supplied_names.add("mask-module")
    reports.append(RepairReport(name="mask-module", matched=1, changed=int("mask-module" in _supplied_names)))
    return reports


def _from_legacy_cache(cls: type[DynamicCache], past_key_values: Any = None) -> Cache:
    if isinstance(past_key_values, Cache):
        return past_key_values
    cache = cls()
    for layer, (keys, values) in enumerate(past_key_values or ()):
        cache.update(keys, values, layer)
    return cache


def _get_usable_length(self: Cache, new_seq_length: int, layer_idx: int = 0) -> int:
    return int(self.get_seq_length(layer_idx))


def _to_legacy_cache(self: Cache) -> Cache:
    # a tuple could not be rolled back, so the cache itself goes out
    return self


def _mask_module() -> types.ModuleType:
    module = types.ModuleType(_MASKS, masks.__doc__)
    module.AttentionMaskConverter = masks.AttentionMaskConverter  # type: ignore[attr-defined]
    for function in (
        masks.prepare_4d_attention_mask,
        masks.prepare_4d_causal_attention_mask,
        masks.prepare_4d_causal_attention_mask_for_sdpa,
    ):
        setattr(module, f"_{function.__name__}", function)
    return module


_MASKS = "transformers.modeling_attn_mask_utils"
_supplied_names: set[str] = set()
_SUPPLIED: list[tuple[str, Any, str, Any]] = [
    ("torch-fx-flag", import_utils, "is_torch_fx_available", lambda: False),
    ("from-legacy-cache", DynamicCache, "from_legacy_cache", classmethod(_from_legacy_cache)),
    ("usable-length", Cache, "get_usable_length", _get_usable_length),
    ("to-legacy-cache", Cache, "to_legacy_cache", _to_legacy_cache),
]


def repair_config(config: PretrainedConfig) -> RepairReport:
    """Gives remote code the `rope_scaling` its config.json states.

    5.x turns null into {"rope_type": "default", ...}, which old code takes for a scaling; that becomes None again. A real
    scaling stays, under the key "type" that old code reads. Native transformers classes read the new form and are left alone.
    """
    name = "rope-scaling"
    scaling = getattr(config, "rope_scaling", None)
    if type(config).__module__.startswith("transformers.") or not isinstance(scaling, dict):
        return RepairReport(name=name, matched=0 if scaling is None else 1, changed=0)
    theta, stated = scaling.get("rope_theta"), getattr(config, "rope_theta", None)
    if theta is not None and stated is not None and theta != stated:
        raise RepairError(f"config says rope_theta {stated} and rope_scaling says {theta}: make config.json say one")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        raise RepairError(f"rope_scaling {scaling} has neither 'rope_type' nor 'type': say which scaling it is")
    # rope_parameters is what rope_scaling reads from; setting the latter warns
    if kind == "default":
        config.rope_parameters = None
        return RepairReport(name=name, matched=1, changed=1)
    if scaling.get("type") == kind:
        return RepairReport(name=name, matched=1, changed=0)
    config.rope_parameters = {**scaling, "type": kind}
    return RepairReport(name=name, matched=1, changed=1)


def repair_model(model: PreTrainedModel) -> list[RepairReport]:
    """Puts rotary modules' non-persistent buffers back to what their own class computes.

    from_pretrained leaves those buffers as uninitialised memory, and a later `.to(dtype)` rounds inv_freq. Call it after the
    last move and before the first forward. Raises RepairError for a rotary module that cannot be rebuilt.
    """
    rotary = [(name, module) for name, module in _with_own_buffers(model) if hasattr(module, "inv_freq")]
    values = dtypes = 0
    for name, module in rotary:
        definition = definition_of(name, module, model.dtype)
        wrong = list(_differences(module, definition))
        if not wrong:
            continue
        dtypes += any(actual.dtype != expected.dtype for _, actual, expected in wrong)
        values += any(actual.dtype == expected.dtype for _, actual, expected in wrong)
        for buffer, actual, expected in wrong:
            module.register_buffer(buffer, expected.to(actual.device), persistent=False)
        if hasattr(module, "max_seq_len_cached"):
            module.max_seq_len_cached = definition.max_seq_len_cached
    return [
        RepairReport(name="rotary-buffers", matched=len(rotary), changed=values),
        RepairReport(name="rotary-dtype", matched=len(rotary), changed=dtypes),
    ]


def verify_buffers(model: PreTrainedModel) -> int:
    """Compares every non-persistent buffer with what its module's class computes; returns how many were compared.

    Raises RepairError naming module, buffer and value at the first that differs, and for a module that cannot be rebuilt.
    """
    count = 0
    for name, module in _with_own_buffers(model):
        definition = definition_of(name, module, model.dtype)
        for buffer, actual, expected in _differences(module, definition):
            raise RepairError(
                f"{name}.{buffer} ({type(module).__name__}) is {_short(actual)}; its own class computes {_short(expected)}"
                f"{_first_difference(actual, expected)}. The loader leaves non-persistent buffers unset; run repair_model "
                "after the last device or dtype move, and before any forward longer than the context"
            )
        for buffer, tensor in _own_buffers(module):
            count += 1
            if not bool(torch.isfinite(tensor).all()) or ("inv_freq" in buffer and not bool((tensor > 0).all())):
                raise RepairError(f"{name}.{buffer} holds {_short(tensor)}: expected finite values, above 0 for inv_freq")
    return count


def definition_of(name: str, module: nn.Module, dtype: torch.dtype) -> Any:
    """A second instance of the module, made by its own constructor on the CPU under the given default dtype.

    The constructor's arguments are read from the attributes of the same names. Raises RepairError if one is missing, or if the
    new instance does not carry the same values: then the class changes what it is given, and the copy would be wrong.
    """
    arguments = {}
    for parameter in inspect.signature(type(module).__init__).parameters.values():
        if parameter.name in ("self", "device") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in vars(module):
            arguments[parameter.name] = vars(module)[parameter.name]
        else:
            # also when it has a default: whether that was used cannot be known
            raise RepairError(
                f"{name} ({type(module).__name__}) has non-persistent buffers that no repair can rebuild: its constructor "
                f"takes {parameter.name!r} and the module does not keep it. Teach dispatch/repairs.py this variant"
            )
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            definition = type(module)(**arguments)
    finally:
        torch.set_default_dtype(default)
    for argument, value in arguments.items():
        if vars(definition).get(argument) != value:
            raise RepairError(
                f"{name} ({type(module).__name__}) cannot be rebuilt: its constructor turned {argument}={value!r} into "
                f"{vars(definition).get(argument)!r}. Teach dispatch/repairs.py this variant"
            )
    return definition


def _with_own_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if any(True for _ in _own_buffers(module)))


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own non-persistent buffers; a checkpoint does not hold them."""
    for name in sorted(module._non_persistent_buffers_set):
        buffer = module._buffers[name]
        if buffer is not None:
            yield name, buffer


def _differences(module: nn.Module, definition: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    expected_buffers = dict(_own_buffers(definition))
    for name, actual in _own_buffers(module):
        expected = expected_buffers.get(name)
        if expected is None:
            raise RepairError(f"{type(module).__name__}.{name} is a buffer that its own constructor does not make")
        # a table of positions may have been remade shorter or longer by a forward: what both cover must agree
        rows = min(len(actual), len(expected)) if actual.dim() else None
        same_type = actual.dtype == expected.dtype and actual.shape[1:] == expected.shape[1:]
        if not same_type or not torch.equal(
            actual[:rows].cpu() if rows else actual.cpu(), expected[:rows] if rows else expected
        ):
            yield name, actual, expected


def _first_difference(actual: Tensor, expected: Tensor) -> str:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f" (shapes {tuple(actual.shape)} and {tuple(expected.shape)})"
    index = tuple((actual.cpu() != expected).nonzero()[0].tolist())
    return f" (first at {list(index)}: {actual[index].item():.6g}, not {expected[index].item():.6g})"


def _short(tensor: Tensor) -> str:
    flat = tensor.detach().flatten()[:4].float().tolist()
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(f'{value:.6g}' for value in flat)}, ...]"
