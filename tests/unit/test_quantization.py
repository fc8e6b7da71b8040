"""Int8 weights: literal values, and what is refused."""

import re

import pytest
import torch

from dispatch.errors import InputError
from dispatch.quantization import Int8Weight, dequantize, quantize


def test_literal_values():
    made = quantize(torch.tensor([[1.27, -0.635, 0.004], [-254.0, 254.0, 3.0]]))
    assert made.values.tolist() == [[127, -64, 0], [-127, 127, 2]]  # -63.5 and 1.5 go to the even neighbour
    torch.testing.assert_close(made.scales, torch.tensor([0.01, 2.0]), rtol=1e-7, atol=0)
    assert made.nbytes == 6 + 8


def test_a_channel_of_zeros_stays_exactly_zero():
    made = quantize(torch.tensor([[0.0, 0.0], [1.0, 2.0]]))
    assert made.values[0].tolist() == [0, 0]
    assert dequantize(made)[0].tolist() == [0.0, 0.0]
    assert float(made.scales[0]) > 0


@pytest.mark.parametrize("largest", [1e-8, 1e-20, 1e-30])
def test_tiny_channels_keep_their_relative_error(largest):
    weight = torch.tensor([[largest, -largest / 3, largest / 7]])
    error = (dequantize(quantize(weight)) - weight).abs().max()
    # half a step of a channel is 1 / 254 of its largest weight; fp32 adds less than a thousandth of that
    assert 0 < float(error) <= largest / 254 * 1.001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_type(dtype):
    made = quantize(torch.tensor([[[2.0, -4.0]], [[1.0, 0.5]]], dtype=dtype))
    assert made.values.tolist() == [[[64, -127]], [[127, 64]]]  # 63.5 goes to 64
    assert made.scales.shape == (2, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_named(bad):
    weight = torch.ones(3, 2, 4)
    weight[1, 0, 2] = bad
    with pytest.raises(InputError, match=re.escape(f"layers.3.up_proj[1, 0, 2] is {bad}, expected a finite weight")):
        quantize(weight, name="layers.3.up_proj")


@pytest.mark.parametrize("weight", [torch.ones(2, 2, dtype=torch.int32), torch.ones(3), torch.ones(2, 0)])
def test_what_is_no_weight(weight):
    with pytest.raises(InputError, match=r"expected a float weight \[\.\.\., N, K\] with K >= 1"):
        quantize(weight)


def test_int8_weights_that_do_not_fit_together():
    values, scales = torch.zeros(2, 3, dtype=torch.int8), torch.ones(2)
    with pytest.raises(InputError, match="expected int8 and float32"):
        Int8Weight(values=values.short(), scales=scales)
    with pytest.raises(InputError, match=re.escape("values (2, 3) and scales (3,): expected [..., N, K] and [..., N]")):
        Int8Weight(values=values, scales=torch.ones(3))
    with pytest.raises(InputError, match="not contiguous"):
        Int8Weight(values=values.T, scales=torch.ones(3))
