"""Int8 layers in place of a loaded model's float ones: the experts of every MoE layer and, if asked, every linear layer.

MoE layers are known by what they have, not by class: `experts`, a ModuleList of SwiGLU blocks, and
`moe_infer(x, ids, weights)`, which DeepSeek's remote code calls with flat ids (V1) or with a row a token (V2, V3).
"""

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dispatch.errors import BackendError, InputError
from dispatch.kernels import cpu, reference
from dispatch.quantization import Int8Weight, quantize

BACKENDS = ("auto", "triton", "cpu", "reference")
LAYERS = ("experts", "all")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@cache
def kernels(backend: str, device_type: str) -> ModuleType:
    """The module of kernels for a backend; "auto" is triton on a GPU, and on a CPU the compiled one if it can be built."""
    if backend == "auto":
        if device_type == "cuda":
            backend = "triton"
        else:
            try:
                cpu.library()
            except BackendError as error:
                warnings.warn(f"{error}. Going on with the reference backend", UserWarning, stacklevel=2)
                return reference
            backend = "cpu"
    if backend == "triton":
        if device_type != "cuda":
            raise BackendError(f"the triton backend needs a GPU, the model is on {device_type}: use auto, cpu or reference")
        # triton is slow to import, and only there on Linux
        return importlib.import_module("dispatch.kernels.grouped_gemm")
    if backend == "cpu":
        if device_type != "cpu":
            raise BackendError(f"the cpu backend needs a model on the CPU, it is on {device_type}: use auto or triton")
        return cpu
    return reference


class Int8Linear(nn.Module):
    """y = x W^T (+ bias) with W [N, K] in int8. In place of nn.Linear; made empty, filled by `put`."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, out_features: int, in_features: int, *, bias: Tensor | None, backend: str, device: Any) -> None:
        super().__init__()
        self.out_features, self.in_features, self.backend = out_features, in_features, backend
        self.register_buffer("values", torch.empty(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scales", torch.empty(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", bias)
        # made at the first forward, and again after a move to another device
        self._weight: Int8Weight | None = None

    def put(self, weight: Tensor, name: str) -> None:
        """Quantises a float weight [N, K] into this layer. Raises InputError, naming it, for another shape or inf or NaN."""
        _put(weight, name, self.values, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        if self._weight is None or self._weight.values is not self.values:
            self._weight = Int8Weight(values=self.values, scales=self.scales)
        y: Tensor = kernels(self.backend, x.device.type).linear(x.reshape(-1, self.in_features), self._weight)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, backend={self.backend!r}"


class Int8Experts(nn.Module):
    """The E routed experts of one MoE layer in int8: gate_up [E, 2 * I, H], down [E, H, I]. Made empty, filled by `put`."""

    gate_up_values: Tensor
    gate_up_scales: Tensor
    down_values: Tensor
    down_scales: Tensor

    def __init__(self, count: int, hidden: int, intermediate: int, *, backend: str, device: Any) -> None:
        super().__init__()
        self.count, self.intermediate, self.backend = count, intermediate, backend
        for name, rows, columns in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            values = torch.empty(count, rows, columns, dtype=torch.int8, device=device)
            self.register_buffer(f"{name}_values", values)
            self.register_buffer(f"{name}_scales", torch.empty(count, rows, dtype=torch.float32, device=device))
        self._weights: tuple[Int8Weight, Int8Weight] | None = None

    def put(self, expert: int, projection: str, weight: Tensor, name: str) -> None:
        """Quantises one projection of one expert into its place; errors as in Int8Linear.put."""
        part = slice(None)
        if projection != "down_proj":
            part = slice(0, self.intermediate) if projection == "gate_proj" else slice(self.intermediate, None)
        stack = "down" if projection == "down_proj" else "gate_up"
        values, scales = getattr(self, f"{stack}_values"), getattr(self, f"{stack}_scales")
        _put(weight, name, values[expert, part], scales[expert, part])

    def moe_infer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H] through the experts ids [T, k] or [T * k], weighted -> [T, H]. The remote code's method of this name."""
        if self._weights is None or self._weights[0].values is not self.gate_up_values:
            self._weights = (
                Int8Weight(values=self.gate_up_values, scales=self.gate_up_scales),
                Int8Weight(values=self.down_values, scales=self.down_scales),
            )
        run = kernels(self.backend, x.device.type).experts
        out: Tensor = run(x, *self._weights, ids.reshape(len(x), -1), weights.reshape(len(x), -1))
        return out

    forward = moe_infer

    def extra_repr(self) -> str:
        _, hidden, intermediate = self.down_values.shape
        return f"experts={self.count}, hidden={hidden}, intermediate={intermediate}, backend={self.backend!r}"


def _put(weight: Tensor, name: str, values: Tensor, scales: Tensor) -> None:
    if weight.shape != values.shape:
        raise InputError(f"{name} is {tuple(weight.shape)}, expected {tuple(values.shape)}")
    made = quantize(weight.to(values.device), name=name)
    values.copy_(made.values)
    scales.copy_(made.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """What was put in int8: MoE layers, experts in all, further linear layers, and bytes of the whole model."""

    moe_layers: int
    experts: int
    linears: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"{self.moe_layers} MoE layers ({self.experts} experts) and {self.linears} linear layers in int8, "
            f"{self.bytes_before / 2**20:,.1f} -> {self.bytes_after / 2**20:,.1f} MiB"
        )


def quantize_experts(model: nn.Module, backend: str = "auto", layers: str = "experts") -> QuantizationReport:
    """Puts a model's experts, or with layers="all" every linear layer but the routers, in int8, in place.

    A layer's float weights are freed once its int8 ones are made, so the peak is the model plus one layer's int8. Biases of
    linear layers are kept in float. Raises InputError, before anything is changed, for a model in training mode, one where
    nothing matches, experts with a bias or another activation than SiLU, and layers that are in int8 already; and during
    conversion for a weight that is not finite, after which the model must be loaded again.
    """
    if model.training:
        raise InputError("the model is in training mode, and int8 weights cannot be trained: call model.eval() first")
    before = _nbytes(model)
    moe_layers = experts = linears = 0
    for name, module, empty in int8_layers(model, backend, layers, device=None):
        if isinstance(empty, Int8Experts):
            for index, expert in enumerate(module.experts):
                for projection in PROJECTIONS:
                    weight = getattr(expert, projection).weight
                    empty.put(index, projection, weight, f"{name}.experts.{index}.{projection}.weight")
            moe_layers, experts = moe_layers + 1, experts + empty.count
        else:
            empty.put(module.weight, f"{name}.weight")
            linears += 1
        install(model, name, module, empty)
    return QuantizationReport(
        moe_layers=moe_layers, experts=experts, linears=linears, bytes_before=before, bytes_after=_nbytes(model)
    )


def int8_layers(
    model: nn.Module, backend: str, layers: str, device: Any
) -> Iterator[tuple[str, Any, Int8Experts | Int8Linear]]:
    """Name, float module, and its empty int8 form, made one at a time; all checks of quantize_experts come before the first.

    device None: where the float weights are.
    """
    if backend not in BACKENDS or layers not in LAYERS:
        raise InputError(f"backend {backend!r}, layers {layers!r}: expected one of {BACKENDS} and one of {LAYERS}")
    found: list[tuple[str, Any]] = []
    routed: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, Int8Experts | Int8Linear):
            raise InputError(f"{name} is in int8 already ({type(module).__name__}): quantise a model once")
        if isinstance(getattr(module, "experts", None), nn.ModuleList) and callable(getattr(module, "moe_infer", None)):
            _check_experts(name, module.experts)
            found.append((name, module))
            # the router decides on small differences, so it keeps the precision it was loaded in
            routed.update(module.experts.modules(), module.gate.modules() if isinstance(module.gate, nn.Module) else ())
    if layers == "all":
        found += [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m not in routed]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no layer to quantise (layers={layers!r}): expected modules with `experts` (a "
            "ModuleList with gate_proj, up_proj, down_proj) and `moe_infer`. For a dense model use layers='all'"
        )
    return _empty_layers(found, backend, device)


def _empty_layers(
    found: list[tuple[str, Any]], backend: str, device: Any
) -> Iterator[tuple[str, Any, Int8Experts | Int8Linear]]:
    while found:
        # no list may hold a layer once it has been replaced
        name, module = found.pop(0)
        if isinstance(module, nn.Linear):
            on = device or module.weight.device
            size = (module.out_features, module.in_features)
            yield name, module, Int8Linear(*size, bias=_plain(module.bias), backend=backend, device=on)
        else:
            down = module.experts[0].down_proj
            on = device or down.weight.device
            hidden, intermediate = down.out_features, down.in_features
            yield name, module, Int8Experts(len(module.experts), hidden, intermediate, backend=backend, device=on)


def install(model: nn.Module, name: str, module: Any, made: Int8Experts | Int8Linear) -> None:
    """Puts an int8 layer in the float one's place."""
    if isinstance(made, Int8Experts):
        module.experts = made
        module.moe_infer = made.moe_infer
    else:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made)


def _check_experts(name: str, experts: Any) -> None:
    shapes = set()
    for index, expert in enumerate(experts):
        parts = [getattr(expert, projection, None) for projection in PROJECTIONS]
        where = f"{name}.experts.{index}"
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) != len(PROJECTIONS):
            raise InputError(f"{where} is a {type(expert).__name__}, expected linear layers {', '.join(PROJECTIONS)}")
        if any(part.bias is not None for part in linears):
            raise InputError(f"{where} has a bias, which the grouped kernels cannot carry")
        probe = torch.linspace(-4, 4, 9)
        if not torch.allclose(expert.act_fn(probe), nn.functional.silu(probe)):
            raise InputError(f"{where} has the activation {expert.act_fn}, expected SiLU: the kernels compute nothing else")
        gate, up, down = (tuple(part.weight.shape) for part in linears)
        shapes.add((gate, up, down[::-1]))
    if len({shape for shapes_of in shapes for shape in shapes_of}) != 1:
        raise InputError(f"{name} has experts of different shapes {sorted(shapes)}, expected one")


def _plain(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _nbytes(model: nn.Module) -> int:
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())
