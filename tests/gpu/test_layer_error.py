"""How far one int8 MoE layer at DeepSeek-MoE-16B's shape (8 of its 64 experts) is from float64."""

import pytest
import torch
from int8_layers import in_float64

from dispatch.moe import kernels
from dispatch.quantization import Int8Weight, dequantize, quantize

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 2048, 1408, 8, 6, 8


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("outliers", [1, 1000], ids=["plain", "outliers"])
def test_relative_error(outliers, device, record_property):
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    x = torch.randn(TOKENS, HIDDEN)
    x[:, torch.randperm(HIDDEN)[:4]] *= outliers
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K)
    int8 = [quantize(gate_up), quantize(down)]
    moved = [Int8Weight(values=w.values.to(device), scales=w.scales.to(device)) for w in int8]
    run = kernels("auto", device).experts
    found = run(x.to(device), *moved, ids.to(device), weights.to(device)).cpu()

    same_weights = in_float64(x, *map(dequantize, int8), ids, weights)
    arithmetic = relative(found, same_weights)
    whole = relative(found, in_float64(x, gate_up, down, ids, weights))
    name = "4 channels of 2048 a thousandfold" if outliers > 1 else "no outlier channels"
    record_property(
        "dispatch_line",
        f"int8 layer on {device}, {name}: relative error {arithmetic:.1e} against float64 with the same int8 weights, "
        f"{whole:.1e} with the float weights",
    )
    # rounding a row moves it by step / sqrt(12) a value; gate, up and their product hand on at most a few times that
    moved_by = float((x.abs().amax(1) / 32639 / 12**0.5 * HIDDEN**0.5 / x.norm(dim=1)).max())
    assert arithmetic < 10 * moved_by
    # a weight is off by step / sqrt(12), the step a 127th of the largest of a channel, 4.5 sigma at most on average; each
    # product of gate and up carries both errors, and `down` adds its own: three of them, as independent ones add
    assert whole < 1.3 * 3**0.5 * 4.5 / 127 / 12**0.5
    # the same check on weights one channel off is red
    rolled = in_float64(x, dequantize(int8[0]).roll(1, 1), dequantize(int8[1]), ids, weights)
    assert relative(found, rolled) > 0.5
