"""Plain greedy decoding of the embedded model, against decoding without any cache and against its own stops."""

import pytest
import torch

from dispatch.errors import CacheError, InputError, NonFiniteLogitsError
from dispatch.loading import load_target
from dispatch.oracle import StockModel, decode_greedy
from dispatch.prompts import PROMPTS
from dispatch.targets import TARGETS


@pytest.fixture(scope="module")
def tiny():
    return load_target(TARGETS["tiny"])


def decode(tiny, prompt, **changes):
    of = {"context_limit": tiny.context_limit, **{k: changes.pop(k) for k in ("context_limit", "use_cache") if k in changes}}
    settings = {"max_new_tokens": 24, "eos_ids": tiny.eos_ids, **changes}
    return decode_greedy(StockModel(tiny.model, **of), prompt, **settings)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_equals_decoding_without_any_cache(tiny, prompt):
    ids = tiny.encode(prompt)
    cached, uncached = decode(tiny, ids), decode(tiny, ids, use_cache=False)
    assert cached.tokens == uncached.tokens
    assert cached.finish_reason == uncached.finish_reason
    # and both against the definition, position by position, in one forward over the whole text
    with torch.inference_mode():
        logits = tiny.model(input_ids=torch.tensor([[*ids, *cached.tokens]]), use_cache=False).logits[0]
    assert tuple(logits[len(ids) - 1 : -1].argmax(-1).tolist()) == cached.tokens
    for pair, row in zip(cached.top_two, logits[len(ids) - 1 : -1], strict=True):
        best = row.topk(2)
        assert pair.ids == tuple(best.indices.tolist())
        # fp32 rounding between forwards of different width; logits are about 10
        assert pair.logits == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_prompt_one_token_at_a_time(tiny):
    widths = []

    class Watched(StockModel):
        def forward(self, tokens):
            widths.append(len(tokens))
            return super().forward(tokens)

    model, ids = Watched(tiny.model, context_limit=tiny.context_limit), tiny.encode(PROMPTS["prose"])
    at_once = decode_greedy(model, ids, max_new_tokens=9)
    assert widths == [len(ids)] + [1] * 8
    widths.clear()
    assert decode_greedy(model, ids, max_new_tokens=9, prompt_at_once=False).tokens == at_once.tokens
    assert widths == [1] * (len(ids) + 8)


def test_stops(tiny):
    ids = tiny.encode(PROMPTS["prose"])
    whole = decode(tiny, ids, eos_ids=())
    assert (len(whole.tokens), whole.finish_reason, whole.forwards) == (24, "max_new_tokens", 23)
    assert whole.prefill_seconds > 0
    assert whole.decode_seconds > 0
    end = whole.tokens[5]
    stopped = decode(tiny, ids, eos_ids={end, 1})
    assert stopped.finish_reason == "eos"
    assert stopped.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    full = decode(tiny, ids, context_limit=len(ids) + 3)
    assert (len(full.tokens), full.finish_reason) == (3, "context_limit")
    assert decode(tiny, ids, max_new_tokens=1).tokens == whole.tokens[:1]


def test_bad_input(tiny):
    for prompt, message in (([], "the prompt has no tokens"), ([2048], "outside the vocabulary"), ([5] * 256, "no room")):
        with pytest.raises(InputError, match=message):
            decode(tiny, prompt)
    with pytest.raises(InputError, match="max_new_tokens is 0"):
        decode(tiny, [5], max_new_tokens=0)


def test_non_finite_logits(tiny, monkeypatch):
    forward = tiny.model.forward

    def broken(**arguments):
        output = forward(**arguments)
        output.logits[0, -1, 9] = float("nan")
        return output

    broken.__wrapped__ = forward
    monkeypatch.setattr(tiny.model, "forward", broken)
    with pytest.raises(NonFiniteLogitsError, match="the first at id 9: nan"):
        decode(tiny, [5, 6])


def test_model_that_ignores_its_cache(tiny, monkeypatch):
    forward = tiny.model.forward

    def forget(input_ids, use_cache, past_key_values=None):
        return forward(input_ids=input_ids, use_cache=False)

    monkeypatch.setattr(tiny.model, "forward", forget)
    with pytest.raises(CacheError, match="the model's cache holds 0 tokens, expected 2"):
        decode(tiny, [5, 6])
