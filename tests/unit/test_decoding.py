"""The tie rule, and the cache behind a real model on the transformers that is installed."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import Cache

from dispatch.decoding import CachedModel, pick
from dispatch.errors import CacheError, NonFiniteLogitsError

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def cached():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=12)).eval()
    return CachedModel(model, context_limit=12)


def test_lowest_id_among_equal_maxima():
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, -0.5, -0.5], [5.0, 1.0, 1.0, 5.0]])
    assert pick(rows) == [1, 0, 2, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows(value):
    rows = torch.zeros(3, 4)
    rows[1, 2] = value
    with pytest.raises(NonFiniteLogitsError, match=f"row 1 of 3 has 1 non-finite of 4 values, the first at id 2: {value}"):
        pick(rows)
    with pytest.raises(NonFiniteLogitsError, match="row 0 of 1 has 4 non-finite of 4"):
        pick(torch.full((1, 4), value))


def test_forward_in_pieces_with_rollbacks_equals_one_forward(cached):
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = cached.forward(tokens)
    cached.reset()
    assert cached.length == 0
    cached.forward(tokens[:3])
    cached.forward([40, 41])
    cached.rollback(2)
    cached.rollback(0)
    assert cached.length == 3
    pieces = [cached.forward(tokens[3:4]), cached.forward([*tokens[4:7], 49])]
    cached.rollback(1)
    pieces.append(cached.forward(tokens[7:]))
    rows = torch.cat([pieces[0], pieces[1][:3], pieces[2]])
    # fp32 rounding only: logits here are about 0.1, eps 1.2e-7, a few dozen operations deep
    torch.testing.assert_close(rows, whole[3:], atol=1e-6, rtol=0)


def test_rollback_means_drop_the_last_n(cached):
    # transformers #47433, #47720: what Cache.crop does with 0, beyond the length, and a positive number changed twice
    cached.forward([1, 2, 3])
    cached.rollback(0)
    assert cached.length == 3
    for count in (4, 5, -1, -5):
        with pytest.raises(CacheError, match=f"rollback of {count} tokens from a cache of 3: expected 0 to 3"):
            cached.rollback(count)
    assert cached.length == 3
    cached.rollback(2)
    assert cached.length == 1
    cached.rollback(1)
    assert cached.length == 0


def test_rollback_that_does_not_take_is_caught(cached, monkeypatch):
    cached.forward([1, 2, 3])
    monkeypatch.setattr(Cache, "crop", lambda self, count: None)
    with pytest.raises(CacheError, match="rollback of 2 tokens left 3 in the cache, expected 1"):
        cached.rollback(2)


def test_context_limit(cached):
    cached.forward(list(range(12)))
    with pytest.raises(CacheError, match="forward of 1 tokens over 12 cached: expected 1 or more, 12 in all"):
        cached.forward([1])
    with pytest.raises(CacheError, match="forward of 0 tokens"):
        cached.forward([])


def test_sliding_window_is_refused_before_decoding():
    # transformers #48280
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4, max_position_embeddings=32)).eval()
    with pytest.raises(CacheError, match="cache layer 0 is a DynamicSlidingWindowLayer, which forgets tokens"):
        CachedModel(model, context_limit=32)


def test_model_that_ignores_its_cache_is_caught(cached):
    forward = cached._model.forward

    def forget(input_ids, use_cache, cache=None, past_key_values=None):
        return forward(input_ids=input_ids, use_cache=False)

    cached._model.forward = forget
    with pytest.raises(CacheError, match="after a forward of 2 tokens the cache holds 0, expected 2"):
        cached.forward([1, 2])
