"""Int8 weights and int16 rows: never more than half a step away."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatch.kernels.reference import ROW_LIMIT, quantize_rows
from dispatch.quantization import SMALLEST_SCALE, dequantize, quantize

# the fp32 division moves a quotient by up to 2**-24 of itself, so a tie may fall to the other side by that much
WEIGHT_SLACK, ROW_SLACK = 127 * 2**-24, ROW_LIMIT * 2**-24

numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-(2.0**-100), 2.0**-100, width=32) | st.just(0.0)


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).view(rows, columns)


@given(matrices())
def test_weights_are_within_half_a_step_of_their_channel(weight):
    made = quantize(weight)
    step = weight.double().abs().amax(-1, keepdim=True) / 127
    step = step.clamp_min(SMALLEST_SCALE) * (1 + 2**-23)  # the scale itself is rounded to fp32
    error = (made.values.double() * made.scales.double()[:, None] - weight.double()).abs()
    assert bool((error <= step * (0.5 + WEIGHT_SLACK)).all())
    assert int(made.values.min()) >= -127
    assert bool(torch.isfinite(dequantize(made)).all())


@given(matrices())
def test_rows_are_within_half_a_step_of_their_row(x):
    values, scales = quantize_rows(x)
    step = (x.double().abs().amax(-1, keepdim=True) / ROW_LIMIT).clamp_min(SMALLEST_SCALE) * (1 + 2**-23)
    error = (values.double() * scales.double()[:, None] - x.double()).abs()
    assert bool((error <= step * (0.5 + ROW_SLACK)).all())
    assert int(values.abs().max()) <= ROW_LIMIT


@given(matrices(), st.integers(-60, 60))
def test_powers_of_two_change_the_scale_alone(weight, power):
    weight = weight.where(weight.abs() > 1e-6, 0.0).clamp(-1e6, 1e6)
    one, other = quantize(weight), quantize(weight * 2.0**power)
    assert torch.equal(one.values, other.values)
    nonzero = weight.abs().amax(-1) > 0
    assert torch.equal(one.scales[nonzero] * 2.0**power, other.scales[nonzero])
