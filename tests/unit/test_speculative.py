"""The loop on a toy target: stops, clamps, contracts, and the state it leaves behind."""

import pytest
import torch
from toys import ScriptedDrafter, ToyTarget, toy_greedy

from dispatch.drafters import DraftModelDrafter, PromptLookupDrafter
from dispatch.errors import CacheError, DrafterError, InputError, NonFiniteLogitsError
from dispatch.results import Step
from dispatch.speculative import decode_speculative


class Countdown(ToyTarget):
    """Picks the id after the last one, modulo the vocabulary: the right continuation is known by heart."""

    def forward(self, tokens):
        super().forward(tokens)
        return torch.nn.functional.one_hot((torch.tensor(tokens) + 1) % self.vocab_size, self.vocab_size).float()


def right(vocab):
    return ScriptedDrafter(lambda sequence, count: [(sequence[-1] + 1 + i) % vocab for i in range(count)])


def test_hand_computed_rounds():
    target = Countdown(vocab=10)
    drafts = iter([[4, 5, 0], [8, 8], []])
    drafter = ScriptedDrafter(lambda sequence, count: next(drafts))
    result = decode_speculative(target, drafter, [1, 2], k=3, max_new_tokens=7)
    # prefill gives 3; [4 5 0] keeps 4 5, adds 6; [8 8] keeps none, adds 7; [] adds 8; then the budget leaves one token
    assert result.tokens == (3, 4, 5, 6, 7, 8, 9)
    assert result.steps == (
        Step(drafted=3, accepted=2),
        Step(drafted=2, accepted=0),
        Step(drafted=0, accepted=0),
        Step(drafted=0, accepted=0),
    )
    assert target.widths == [2, 4, 3, 1, 1]
    # after 3, 6, 7 and 8 there was room for 6, 3, 2 and 1 more; one of them is always the target's own
    assert drafter.asked == [3, 2, 1]
    assert result.finish_reason == "max_new_tokens"


def test_first_draft_is_verified_too():
    # lattice #243: prompt lookup proposes 1 at once, and the target does not want it
    target = Countdown(vocab=10)
    result = decode_speculative(target, PromptLookupDrafter(), [1, 1, 1], k=4, max_new_tokens=3)
    assert result.tokens == (2, 3, 4)


@pytest.mark.parametrize(("eos_ids", "last"), [({5}, 5), ({7, 5}, 5), ({4, 9}, 4), ({8}, 8)])
def test_end_of_sequence_inside_a_drafted_block(eos_ids, last):
    # transformers #47912: prefill gives 3, one block drafts 4 5 6 7
    result = decode_speculative(Countdown(vocab=10), right(10), [2], k=4, max_new_tokens=50, eos_ids=eos_ids)
    assert result.tokens == tuple(range(3, last + 1))
    assert result.finish_reason == "eos"
    drafted = min(last - 3, 4)
    assert result.steps == (Step(drafted=drafted, accepted=drafted),)
    assert result.acceptance_rate == 1.0


def test_end_of_sequence_as_the_targets_own_token_after_a_rejection():
    drafter = ScriptedDrafter(lambda sequence, count: [4, 0, 0, 0])
    result = decode_speculative(Countdown(vocab=10), drafter, [2], k=4, max_new_tokens=50, eos_ids={5})
    assert result.tokens == (3, 4, 5)
    # of the block, 4 was accepted, the first 0 rejected in favour of the end; the other two lie after it
    assert result.steps == (Step(drafted=2, accepted=1),)


def test_end_of_sequence_from_prefill():
    result = decode_speculative(Countdown(vocab=10), right(10), [2], k=4, max_new_tokens=50, eos_ids={3})
    assert (result.tokens, result.steps, result.finish_reason) == ((3,), (), "eos")
    assert result.tokens_per_forward is None
    assert result.acceptance_rate is None


@pytest.mark.parametrize(("limit", "prompt_length", "k"), [(100, 97, 8), (4096, 4092, 5), (100, 99, 8), (100, 90, 3)])
def test_context_limit_is_used_to_the_last_position_and_not_overrun(limit, prompt_length, k):
    # ArcticInference #60, exllamav2 #274
    target = Countdown(vocab=7, context_limit=limit)
    drafter = right(7)
    result = decode_speculative(target, drafter, [0] * prompt_length, k=k, max_new_tokens=1000)
    assert len(result.tokens) == limit - prompt_length
    assert result.finish_reason == "context_limit"
    assert all(asked <= k for asked in drafter.asked)


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 9, 10])
def test_budget_is_met_exactly(budget):
    result = decode_speculative(Countdown(vocab=7), right(7), [0], k=8, max_new_tokens=budget)
    assert result.tokens == tuple((1 + i) % 7 for i in range(budget))
    assert result.finish_reason == "max_new_tokens"


def test_drafter_and_target_are_reset_at_every_call():
    target, drafter = ToyTarget(seed=3), DraftModelDrafter(ToyTarget(seed=3), vocab_size=5)
    for prompt in ([1, 2, 3], [4], [1, 2, 3]):
        result = decode_speculative(target, drafter, prompt, k=4, max_new_tokens=12)
        assert result.tokens == toy_greedy(prompt, 12, seed=3, vocab=5)
        assert target.length == len(prompt) + 11
        assert drafter.length <= len(prompt) + 12


def test_drafter_sees_committed_tokens_only():
    # vmlx-swift #357
    drafter = ScriptedDrafter(lambda sequence, count: [0, 0][:count])
    decode_speculative(Countdown(vocab=10), drafter, [1], k=2, max_new_tokens=5)
    assert drafter.seen == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one(k):
    with pytest.raises(InputError, match=f"k is {k}, expected at least 1"):
        decode_speculative(ToyTarget(), PromptLookupDrafter(), [1], k=k, max_new_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([], 3, "the prompt has no tokens"),
        ([1], 0, "max_new_tokens is 0"),
        ([1, 5], 3, r"prompt token 1 is 5, outside the vocabulary \[0, 5\)"),
        ([-1], 3, "prompt token 0 is -1"),
        ([1] * 8, 3, "the prompt has 8 tokens and the context limit is 8"),
        ([1] * 9, 3, "the prompt has 9 tokens and the context limit is 8"),
    ],
)
def test_bad_prompts(prompt, budget, message):
    with pytest.raises(InputError, match=message):
        decode_speculative(ToyTarget(context_limit=8), PromptLookupDrafter(), prompt, k=2, max_new_tokens=budget)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ([1, 2, 3], "returned 3 tokens, asked for at most 2"),
        ([1, 5], r"drafted token 1 is 5, outside the target's vocabulary \[0, 5\)"),
        ([-1], "drafted token 0 is -1"),
    ],
)
def test_drafter_that_breaks_its_contract(draft, message):
    with pytest.raises(DrafterError, match=message):
        decode_speculative(ToyTarget(), ScriptedDrafter(lambda *_: draft), [1], k=2, max_new_tokens=9)


def test_error_of_a_drafter_comes_through_and_the_next_call_is_clean():
    def fail(sequence, count):
        raise RuntimeError("no idea")

    target = ToyTarget(seed=1)
    with pytest.raises(RuntimeError, match="no idea"):
        decode_speculative(target, ScriptedDrafter(fail), [1, 2], k=2, max_new_tokens=9)
    result = decode_speculative(target, PromptLookupDrafter(), [1, 2], k=2, max_new_tokens=9)
    assert result.tokens == toy_greedy([1, 2], 9, seed=1, vocab=5)


def test_rollback_by_one_too_many_is_caught():
    class OneTooMany(ToyTarget):
        def rollback(self, count):
            super().rollback(count + 1 if count else 0)

    with pytest.raises(CacheError, match=r"the target's cache holds 1 tokens, expected 2 of 3 committed"):
        decode_speculative(
            OneTooMany(),
            ScriptedDrafter(lambda sequence, count: [(toy_greedy(sequence, 1, seed=0, vocab=5)[0] + 1) % 5]),
            [1],
            k=1,
            max_new_tokens=9,
        )


def test_drafter_that_counts_rejected_tokens_is_caught():
    class Greedy(ScriptedDrafter):
        length = 99

    with pytest.raises(CacheError, match="the drafter's state covers 99 tokens, and only 3 are committed"):
        decode_speculative(ToyTarget(), Greedy(lambda *_: []), [1], k=1, max_new_tokens=9)


def test_non_finite_row_in_a_verified_block():
    class Broken(ToyTarget):
        def forward(self, tokens):
            rows = super().forward(tokens)
            if len(tokens) == 3:
                rows[2, 4] = float("nan")
            return rows

    with pytest.raises(NonFiniteLogitsError, match="logits row 2 of 3 has 1 non-finite of 5 values, the first at id 4: nan"):
        decode_speculative(Broken(), ScriptedDrafter(lambda *_: [0, 0]), [1], k=2, max_new_tokens=9)
