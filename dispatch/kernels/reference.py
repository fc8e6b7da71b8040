"""The arithmetic of W8A16 with exact integer sums, in plain torch on any device. `cpu` and `triton` must give the same bits.

An activation row is rounded to int16 with a scale of its own, multiplied with int8 weights, and added up in integers. Integer
sums do not depend on their order, so a row's result does not depend on the rows that go with it, on tiles, or on the machine.

1. row scale = max|x| / 32639 in fp32, at least 2**-126; a row that holds inf or NaN gets the scale NaN, so all it gives is NaN
2. row value = round half to even(x / row scale), in [-32639, 32639]
3. sum = sum over k of row value * weight value, an exact integer
4. y = (float32(sum) * row scale) * channel scale, each product rounded to fp32 once, in this order
5. of an expert: h = silu(gate) * up in fp32, rounded to int16 rows again (1, 2); y of `down` * routing weight
6. of a token: 0 + its experts' results in the order of its ids, in fp32; at the end one rounding to x's dtype

No product and sum is ever fused (fma), and divisions are IEEE's.
"""

import torch
from torch import Tensor

from dispatch.errors import InputError
from dispatch.quantization import SMALLEST_SCALE, Int8Weight

ROW_LIMIT = 127 * 256 + 127
"""32639: the largest number whose high and low byte, both signed, are at most 127; a GPU multiplies these bytes apart."""
LOG2_E = 1.4426950408889634
LN_2_HIGH = 355 / 512
"""ln 2 cut so that its product with a whole number up to 127 is exact in fp32, and below, what is cut off."""
LN_2_LOW = -2.1219444005469057e-4
TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
"""exp(r) = sum of r**n / n!; for |r| <= ln(2) / 2 the rest is below 5e-9, less than half a step of fp32."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Steps 1 and 2: rows [M, K] in float -> int16 values [M, K] and float32 scales [M]."""
    x = x.float()
    largest = x.abs().amax(-1)
    # on a GPU torch takes a division by a Python number for a product with its inverse
    scales = (largest / largest.new_full((), ROW_LIMIT)).clamp_min(SMALLEST_SCALE).where(largest.isfinite(), torch.nan)
    values = (x / scales.unsqueeze(-1)).round().nan_to_num(0.0)
    return values.to(torch.int16), scales


def integer_matmul(rows: Tensor, values: Tensor) -> Tensor:
    """Step 3: int16 rows [M, K] times int8 values [N, K] -> int64 sums [M, N].

    Through float64, which is exact in any order of summation: every partial sum is below 2**22 * K, and 2**53 is reached
    only at K = 2**31.
    """
    return (rows.double() @ values.double().T).long()


def linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """Rows x [M, K] times weight [N, K]: steps 1 to 4 -> [M, N] in x's dtype."""
    return _linear(x, weight.values, weight.scales).to(x.dtype)


def _linear(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    rows, row_scales = quantize_rows(x)
    return integer_matmul(rows, values).float() * row_scales.unsqueeze(-1) * scales


def exp(t: Tensor) -> Tensor:
    """exp(t) in fp32 by additions and multiplications: the same bits on every machine; t is moved into [-87, 88], NaN to 0.

    exp(t) = 2**n * exp(r), n = round(t / ln 2).
    """
    t = t.clamp(-87.0, 88.0).nan_to_num(0.0)
    n = (t * LOG2_E).round()
    r = (t - n * LN_2_HIGH) - n * LN_2_LOW
    series = torch.full_like(r, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        series = series * r + coefficient
    return series * ((n.int() + 127) << 23).view(torch.float32)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in fp32; below -88 the result is off by less than 1e-36."""
    return x / (1.0 + exp(-x))


def experts(x: Tensor, gate_up: Int8Weight, down: Int8Weight, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts, steps 1 to 6.

    x [T, H] in float; gate_up [E, 2 * I, H], the gate's rows before those of up; down [E, H, I]; ids [T, k], the experts of
    each token; weights [T, k], their routing weights. Returns [T, H] in x's dtype. Raises InputError for bad ids.
    """
    check_routing(ids, weights, len(x), len(gate_up.values))
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(ids.shape[1]):
        of_slot = torch.zeros_like(out)
        for expert in sorted(set(ids[:, slot].tolist())):
            tokens = (ids[:, slot] == expert).nonzero().flatten()
            gate, up = _linear(x[tokens], gate_up.values[expert], gate_up.scales[expert]).chunk(2, dim=-1)
            of_slot[tokens] = _linear(silu(gate) * up, down.values[expert], down.scales[expert])
        out += of_slot * weights[:, slot, None].float()
    return out.to(x.dtype)


def check_rows(x: Tensor, columns: int) -> None:
    """Raises InputError unless x is [M, columns]: the kernels read what they are told is there."""
    if x.dim() != 2 or x.shape[1] != columns:
        raise InputError(f"x is {tuple(x.shape)}, expected rows of {columns} values, as the weights have")


def check_routing(ids: Tensor, weights: Tensor, tokens: int, experts: int) -> None:
    """Raises InputError unless ids and weights are [tokens, k] and each row of ids has k different numbers in [0, experts)."""
    check_routing_shape(ids, weights, tokens)
    ordered = ids.sort(-1).values
    bad = (ids < 0).any(-1) | (ids >= experts).any(-1) | (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        raise InputError(
            f"token {token} is routed to experts {ids[token].tolist()}, expected different ids in [0, {experts}): "
            "look at the router"
        )


def check_routing_shape(ids: Tensor, weights: Tensor, tokens: int) -> None:
    """The part of `check_routing` that needs no value, so that nothing waits for a GPU."""
    if ids.dim() != 2 or ids.shape != weights.shape or len(ids) != tokens or ids.is_floating_point():
        raise InputError(
            f"expert ids {ids.dtype} {tuple(ids.shape)} and routing weights {tuple(weights.shape)} for {tokens} tokens: "
            f"expected whole numbers [{tokens}, k] and weights of the same shape"
        )
