"""Any schedule of widths and rollbacks gives, row by row, the bits of one token at a time."""

import functools

import pytest
import torch
from engines import engine, one_by_one, text
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTH = 140


@functools.cache
def case(name, dtype):
    found = engine(name, dtype)
    expected = one_by_one(found, text(LENGTH))
    return found, expected, tuple(tensor.clone() for tensor in found.cached())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-int8-experts", "tiny-int8-all", "tiny-draft"])
@settings(max_examples=25, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=12))
def test_any_schedule(name, dtype, moves):
    found, expected, cached = case(name, dtype)
    tokens = text(LENGTH)
    found.reset()
    for width, back in moves:
        start = found.length
        rows = found.forward(tokens[start : start + width]) if start < LENGTH else expected[LENGTH:]
        assert torch.equal(rows, expected[start : start + width])
        for mine, theirs in zip(found.cached(), cached, strict=True):
            assert torch.equal(mine, theirs[:, :, : found.length])
        found.rollback(min(back, found.length))
