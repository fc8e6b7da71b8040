"""Int8 weights: symmetric, one fp32 scale per output channel (W8)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.errors import InputError

WEIGHT_LIMIT = 127
"""Values lie in [-127, 127]: symmetric, so -128 is never used, and the kernels' bounds on sums count on that."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number. A channel of zeros gets it instead of 0, so nothing is ever divided by zero."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Weight:
    """weight [..., N, K] = values * scales[..., None], with int8 `values` of its shape and float32 `scales` [..., N]."""

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.values.dtype != torch.int8 or self.scales.dtype != torch.float32:
            raise InputError(f"values are {self.values.dtype} and scales {self.scales.dtype}, expected int8 and float32")
        if self.values.dim() < 2 or self.values.shape[:-1] != self.scales.shape:
            raise InputError(
                f"values {tuple(self.values.shape)} and scales {tuple(self.scales.shape)}: expected [..., N, K] and [..., N]"
            )
        if not (self.values.is_contiguous() and self.scales.is_contiguous()):
            raise InputError("values or scales are not contiguous: the kernels read rows one after the other")

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def quantize(weight: Tensor, *, name: str = "weight") -> Int8Weight:
    """Rounds a float weight [..., N, K] to the nearest int8 step of each output channel.

    scale = max(|channel|) / 127, at least SMALLEST_SCALE; value = round half to even(weight / scale). The error of a weight is
    at most half a scale (and the rounding of the fp32 division, 127 * 2**-24 of a scale). Channels of zeros stay exactly zero.
    Raises InputError, calling the tensor by `name`, for weights that are not floating point, empty, or not finite.
    """
    exact = _checked(weight, name).float()
    largest = exact.abs().amax(-1)
    scales = (largest / largest.new_full((), WEIGHT_LIMIT)).clamp_min(SMALLEST_SCALE)
    values = (exact / scales.unsqueeze(-1)).round_().to(torch.int8)
    return Int8Weight(values=values, scales=scales)


def _checked(weight: Tensor, name: str) -> Tensor:
    if not weight.is_floating_point() or weight.dim() < 2 or weight.shape[-1] == 0:
        raise InputError(f"{name} is {weight.dtype} {tuple(weight.shape)}, expected a float weight [..., N, K] with K >= 1")
    weight = weight.detach()
    # in fp32, where a float64 may be inf
    if not bool(torch.isfinite(weight.abs().amax(-1).float()).all()):
        index = tuple((~torch.isfinite(weight.float())).nonzero()[0].tolist())
        raise InputError(
            f"{name}{list(index)} is {float(weight[index])}, expected a finite weight: it would be spread over its channel"
        )
    return weight


def dequantize(weight: Int8Weight) -> Tensor:
    """The float32 weight [..., N, K] that the int8 one stands for."""
    return weight.values.float() * weight.scales.unsqueeze(-1)


SPLIT_BASE = 255
SPLIT_LIMIT = WEIGHT_LIMIT * SPLIT_BASE + WEIGHT_LIMIT
"""32512: the largest number whose digits to the base 255 are both within WEIGHT_LIMIT."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitWeight:
    """weight [N, K] = (255 * values[:N] + values[N:]) * scales[:, None]: int16 weights for kernels that multiply int8 ones."""

    values: Tensor
    scales: Tensor


def quantize_split(weight: Tensor, *, name: str = "weight") -> SplitWeight:
    """Rounds a float weight [N, K] to steps of max(|channel|) / 32512; for routers, which decide on small differences.

    Errors as `quantize`.
    """
    exact = _checked(weight, name).double()
    scales = (exact.abs().amax(-1) / SPLIT_LIMIT).float().clamp_min(SMALLEST_SCALE)
    values = (exact / scales.double().unsqueeze(-1)).round_().clamp_(-SPLIT_LIMIT, SPLIT_LIMIT)
    high = (values / SPLIT_BASE).round_()
    return SplitWeight(values=torch.cat([high, values - SPLIT_BASE * high]).to(torch.int8), scales=scales)
