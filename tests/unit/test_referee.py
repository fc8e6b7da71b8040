"""The referee: near ties pass and are counted, defects fail wherever they stand, a band that excuses anything is refused."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from engines import loaded, near_tied, prompts, text, weights

from dispatch.decoding import Target
from dispatch.drafters import DraftModelDrafter
from dispatch.errors import EngineError
from dispatch.gates import first_difference
from dispatch.oracle import StockModel, decode_greedy
from dispatch.precise import precise_logits
from dispatch.referee import rule
from dispatch.results import Result
from dispatch.runner import make_runner
from dispatch.speculative import decode_speculative

VOCAB, PROMPT = 6, [5] * 40


def result(*tokens, finish_reason="max_new_tokens"):
    return Result(
        tokens=tokens, text="", finish_reason=finish_reason, prefill_seconds=1, decode_seconds=1, forwards=len(tokens) - 1
    )


def scored(rows):
    """The referee's logits where all positions of the prompt are sure of token 0, and these rows are of what follows."""
    sure = torch.tensor([[9.0, 1, 0, 0, 0, 0]] * (len(PROMPT) - 1))
    return torch.cat([sure, torch.tensor(rows)]).double()


def ruling(rows, baseline, candidate, noise=0.05, **changes):
    """noise: one forward is off by it at one position of the prompt, in one of the two best tokens."""
    scores = scored(rows)
    off = scores.clone()
    off[7, 1] += noise
    difference = first_difference(baseline, candidate, str)
    prompt = changes.pop("prompt", PROMPT)
    return rule(
        difference,
        prompt,
        baseline,
        candidate,
        precise=lambda tokens: scores[-len(tokens) :] if len(tokens) < len(scores) else scores,
        forwards=(lambda tokens: scores[-len(tokens) :], lambda tokens: off[-len(tokens) :].float()),
        to_text="<{}>".format,
    )


# after the prompt: sure of 1; 2 and 3 nearly tie; sure of 4
ROWS = [[0.0, 8, 0, 0, 0, 0], [0, 0, 7.09, 7.0, 0, 0], [0, 0, 0, 0, 8, 3]]


def test_a_near_tie_is_counted_and_passes():
    found = ruling(ROWS, result(1, 2, 4), result(1, 3, 4))
    assert not found.is_defect
    assert found.gap == pytest.approx(0.09, rel=1e-4)
    # twice the largest error of the two forwards, measured at 42 positions
    assert (found.noise, found.rows) == (pytest.approx(0.1, rel=1e-4), 42)
    assert [(miss.position, miss.token, miss.best) for miss in found.near_ties] == [(1, 3, 2)]
    assert "referee: gap 0.09 there at higher precision; noise band 0.1, 2 times the largest of two forwards at 42" in str(
        found
    )
    assert "NEAR TIE, and all that follows is within the band too: 1 near ties in all" in str(found)


def test_the_baseline_may_be_the_one_that_is_off():
    found = ruling(ROWS, result(1, 3, 4), result(1, 2, 4))
    assert (found.is_defect, found.gap, len(found.near_ties)) == (False, pytest.approx(-0.09, rel=1e-4), 1)


def test_outside_the_band_is_a_defect():
    found = ruling(ROWS, result(1, 2, 4), result(1, 3, 4), noise=0.04)
    assert found.is_defect
    for words in (
        "position 1 of 3",
        "3 -> '<[3]>' is 0.09 below 2 -> '<[2]>', outside the noise band",
        "noise band 0.08",
        "accept",
    ):
        assert words in str(found)


def test_a_near_tie_hides_nothing_behind_it():
    found = ruling(ROWS, result(1, 2, 4), result(1, 3, 5))
    assert found.is_defect
    assert [(miss.position, miss.gap) for miss in found.defects] == [(2, 5)]
    assert len(found.near_ties) == 1
    assert "DEFECT at position 2: 5 -> '<[5]>' is 5 below 4 -> '<[4]>'" in str(found)


@pytest.mark.parametrize(
    ("baseline", "candidate", "changes", "words"),
    [
        (result(1, 2, 4), result(1, 2), {}, "one of the two ended: plain greedy with 3 tokens .* speculative with 2"),
        (result(1, 2), result(1, 2, 4), {}, "one of the two ended: plain greedy with 2 tokens"),
        (result(1, 2, 4, 4), result(1, 3, 4), {}, "3 tokens where plain greedy gave 4, and no end of sequence"),
        (result(1, 5, 4), result(1, 2, 4), {}, "plain greedy's own token 5 is outside the noise band there"),
        (result(1, 2, 4), result(1, 3, 4), {"noise": 5.0}, "the noise band reaches the usual gap of 8 between the two best"),
        (result(1, 2, 4), result(1, 3, 4), {"noise": float("nan")}, "it would excuse anything"),
        (result(1, 2, 4), result(1, 3, 4), {"prompt": [5] * 20}, "only 22 positions to measure noise at, expected at least 32"),
    ],
)
def test_what_no_near_tie_explains(baseline, candidate, changes, words):
    found = ruling(ROWS, baseline, candidate, **changes)
    assert found.is_defect
    assert any(re.search(words, line) for line in str(found).splitlines() if "DEFECT" in line), str(found)


def test_an_early_end_behind_a_near_tie_is_none_of_its_own():
    assert not ruling(ROWS, result(1, 2, 4, 4), result(1, 3, 4, finish_reason="eos")).is_defect


@pytest.mark.parametrize("name", ["tiny", "tiny-draft", "tiny-int8-experts", "tiny-int8-all"])
@torch.inference_mode()
def test_its_logits_are_the_models(name):
    tokens = text(150)
    found = precise_logits(weights(name), tokens)
    assert found.dtype == torch.float64
    expected = loaded(name).model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    # of logits up to 18: some 40 fp32 sums, or rows in int16 steps in up to 20 layers, as in test_engine.py
    tolerance = 18 * 20 / 32639 if "int8" in name else 18 * 40 * 2**-24
    assert float((found - expected).abs().max()) < tolerance


class Stale(Target):
    """A target whose rollback keeps one token too many in the cache of keys and values, and says otherwise."""

    def __init__(self, stock):
        self.stock, self.length_told = stock, 0
        self.vocab_size, self.context_limit = stock.vocab_size, stock.context_limit

    @property
    def length(self):
        return self.length_told

    def reset(self):
        self.stock.reset()
        self.length_told = 0

    def forward(self, tokens):
        self.length_told += len(tokens)
        return self.stock.forward(tokens)

    def rollback(self, count):
        self.stock.rollback(max(count - 1, 0))
        self.length_told -= count


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "stale cache"])
def test_on_a_model_full_of_near_ties(fault):
    # what the exact engine never needs: the model's own code differs there, and every difference is rightly explained
    runner = near_tied("tiny", "original", torch.bfloat16, "fast")
    draft = near_tied("tiny-draft", "int8-all", torch.bfloat16, "exact").target()
    drafter = DraftModelDrafter(draft, vocab_size=draft.vocab_size)
    ruled = []
    for prompt in prompts(20, length=40):
        expected = decode_greedy(runner.baseline(), prompt, max_new_tokens=12)
        target = Stale(runner.target()) if fault else runner.target()
        found = decode_speculative(target, drafter, prompt, k=4, max_new_tokens=12)
        difference = first_difference(expected, found, str)
        if difference:
            forwards = (runner.whole, runner.one_by_one)
            ruled.append(rule(difference, prompt, expected, found, precise=runner.precise, forwards=forwards, to_text=str))
    assert ruled
    wide = [miss for one in ruled for miss in one.defects]
    assert bool(wide) == fault
    assert fault or all(one.near_ties for one in ruled)


def test_models_it_does_not_know_run_by_their_own_code(monkeypatch):
    made = loaded("tiny")
    monkeypatch.setattr(made.model.config, "scoring_func", "sigmoid")
    runner = make_runner(made, "exact")
    assert (runner.exact, runner.weights) == (False, None)
    assert str(runner) == (
        "own code (not known to the exact engine: config.scoring_func is 'sigmoid', and only 'softmax' is known here)"
    )
    assert type(runner.target()).__name__ == "CachedModel"
    assert isinstance(runner.baseline(), StockModel)
    with pytest.raises(EngineError, match="tiny is not known to the exact engine, and so not to the referee"):
        runner.precise([1, 2])


def test_models_that_the_engine_reads_otherwise_are_refused(monkeypatch):
    made = loaded("tiny-draft")
    forward = made.model.forward

    def scaled(**arguments):
        output = forward(**arguments)
        output.logits = output.logits.flip(-1)
        return output

    scaled.__wrapped__ = forward
    monkeypatch.setattr(made.model, "forward", scaled)
    with pytest.raises(EngineError, match="tiny-draft: the engine's logits are off those of the model's own code by .*fast"):
        make_runner(made, "exact")
    runner = make_runner(made, "fast")
    assert (runner.exact, runner.weights) == (False, None)
    assert "the engine's logits are off" in str(runner)


def test_precisions_it_does_not_know(monkeypatch):
    made = loaded("tiny-draft")
    half = replace(made, model=copy.deepcopy(made.model).half())
    assert "its activations are torch.float16, expected float32 or bfloat16" in str(make_runner(half, "exact"))


def test_asked_for_fast_it_has_a_referee_and_says_nothing():
    runner = make_runner(loaded("tiny"), "fast")
    assert (runner.exact, str(runner)) == (False, "own code")
    assert runner.precise([5, 6]).shape == (2, 2048)
