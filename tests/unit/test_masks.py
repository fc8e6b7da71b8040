"""The masks against tables written by hand."""

import pytest
import torch

from dispatch.errors import RepairError
from dispatch.masks import (
    AttentionMaskConverter,
    prepare_4d_attention_mask,
    prepare_4d_causal_attention_mask,
    prepare_4d_causal_attention_mask_for_sdpa,
)


def embeddings(batch, q_len, dtype=torch.float32):
    return torch.zeros(batch, q_len, 4, dtype=dtype)


def picture(mask):
    """One string a query: '.' may be looked at, 'x' may not; any other value is an error."""
    low = torch.finfo(mask.dtype).min
    assert set(mask.flatten().tolist()) <= {0.0, low}
    return [["".join("x" if value else "." for value in row) for row in head[0].tolist()] for head in mask]


@pytest.mark.parametrize(
    ("q_len", "past", "expected"),
    [
        (1, 0, ["."]),
        (1, 3, ["...."]),
        (3, 0, [".xx", "..x", "..."]),
        (3, 2, ["...xx", "....x", "....."]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal(q_len, past, expected, dtype):
    mask = prepare_4d_causal_attention_mask(None, (1, q_len), embeddings(1, q_len, dtype), past)
    assert mask.dtype == dtype
    assert mask.shape == (1, 1, q_len, past + q_len)
    assert picture(mask) == [expected]


def test_causal_with_padding_on_the_left_and_right():
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    mask = prepare_4d_causal_attention_mask(padding, (2, 2), embeddings(2, 2), 2)
    assert picture(mask) == [["x..x", "x..."], ["...x", "...x"]]
    # a row with nothing to look at must stay finite: softmax over it is uniform, not NaN
    padding = torch.tensor([[0, 0, 1]])
    mask = prepare_4d_causal_attention_mask(padding, (1, 3), embeddings(1, 3), 0)
    assert picture(mask) == [["xxx", "xxx", "xx."]]
    assert bool(torch.isfinite(mask.softmax(-1)).all())


@pytest.mark.parametrize(
    ("padding", "q_len", "past", "none"),
    [
        (None, 1, 5, True),
        (None, 4, 0, True),
        (torch.ones(1, 6), 1, 5, True),
        # is_causal over a cache would align the triangle to the wrong corner
        (None, 4, 2, False),
        (torch.ones(1, 6), 4, 2, False),
        (torch.tensor([[0, 1, 1, 1]]), 4, 0, False),
    ],
)
def test_sdpa_leaves_out_the_mask_only_where_its_flag_says_the_same(padding, q_len, past, none):
    mask = prepare_4d_causal_attention_mask_for_sdpa(padding, (1, q_len), embeddings(1, q_len), past)
    assert (mask is None) == none
    if mask is not None:
        torch.testing.assert_close(mask, prepare_4d_causal_attention_mask(padding, (1, q_len), embeddings(1, q_len), past))


def test_padding_alone():
    mask = prepare_4d_attention_mask(torch.tensor([[1, 0, 1]]), torch.float32, tgt_len=2)
    assert picture(mask) == [[".x.", ".x."]]
    assert prepare_4d_attention_mask(torch.tensor([[1, 0, 1]]), torch.float16).shape == (1, 1, 3, 3)


def test_what_is_not_supplied_is_refused():
    with pytest.raises(RepairError, match="sliding_window=4"):
        prepare_4d_causal_attention_mask(None, (1, 2), embeddings(1, 2), 0, sliding_window=4)
    with pytest.raises(RepairError, match=r"attention_mask has shape \(1, 2\), expected \(1, 3\)"):
        prepare_4d_causal_attention_mask(torch.ones(1, 2), (1, 2), embeddings(1, 2), 1)
    with pytest.raises(RepairError, match="AttentionMaskConverter is not supplied"):
        AttentionMaskConverter(True)


def test_equal_to_transformers_own_where_it_still_has_them():
    theirs = pytest.importorskip("transformers.modeling_attn_mask_utils", reason="this transformers no longer has the module")
    if theirs._prepare_4d_causal_attention_mask is prepare_4d_causal_attention_mask:
        pytest.skip("the module is the one the repair supplied")
    for padding in (None, torch.tensor([[0, 1, 1, 1, 1]]), torch.ones(1, 5, dtype=torch.int64)):
        expected = theirs._prepare_4d_causal_attention_mask(padding, (1, 3), embeddings(1, 3), 2)
        found = prepare_4d_causal_attention_mask(padding, (1, 3), embeddings(1, 3), 2)
        assert torch.equal(found < -1, expected < -1)
