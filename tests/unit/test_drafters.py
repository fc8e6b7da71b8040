"""Prompt lookup by hand-computed examples; the draft model's cache after each kind of round."""

import pytest
import torch
from toys import ToyTarget, toy_greedy

from dispatch.drafters import DraftModelDrafter, PromptLookupDrafter
from dispatch.errors import CacheError, InputError


@pytest.mark.parametrize(
    ("sequence", "count", "expected"),
    [
        # transformers #46790; no end-of-sequence id is involved
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 8, [9, 10, 11, 7, 8]),
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 2, [9, 10]),
        # the longest n-gram wins over a more recent shorter one
        ([1, 2, 3, 9, 3, 8, 1, 2, 3], 1, [9]),
        # the most recent of two occurrences
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),
        ([1, 1, 1], 4, [1]),
        ([1, 2, 3], 4, []),
        ([4], 4, []),
    ],
)
def test_prompt_lookup(sequence, count, expected):
    drafter = PromptLookupDrafter(max_ngram=3, min_ngram=1)
    drafter.observe(sequence)
    assert drafter.propose(sequence, count) == expected
    assert drafter.length == len(sequence)


def test_prompt_lookup_below_its_smallest_ngram_proposes_nothing():
    drafter = PromptLookupDrafter(max_ngram=3, min_ngram=2)
    drafter.observe([9, 9])
    assert drafter.propose([9, 9], 3) == []
    drafter.observe([9, 9, 9])
    assert drafter.propose([9, 9, 9], 3) == [9]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2), (-1, 0)])
def test_prompt_lookup_sizes(low, high):
    with pytest.raises(InputError, match=f"min_ngram {low} and max_ngram {high}"):
        PromptLookupDrafter(max_ngram=high, min_ngram=low)


def test_prompt_lookup_reads_each_committed_token_once():
    class Counting(list):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    drafter = PromptLookupDrafter()
    sequence = Counting([7, 8] * 2000)
    drafter.observe(sequence)
    Counting.reads = 0
    for token in (7, 8, 7, 8):
        sequence.append(token)
        drafter.observe(sequence)
        drafter.propose(sequence, 4)
    # three n-grams entered and up to three looked up a token, whatever the length
    assert Counting.reads <= 4 * (3 + 3 + 1)


def test_draft_model_after_rejection_acceptance_and_nothing():
    # mlxcel #994
    model = ToyTarget(seed=2)
    drafter = DraftModelDrafter(model, vocab_size=5)
    sequence = [1, 2]
    drafter.observe(sequence)
    draft = drafter.propose(sequence, 3)
    assert tuple(draft) == toy_greedy(sequence, 3, seed=2, vocab=5)
    assert model.tokens == [1, 2, *draft[:2]]  # the last proposal is not fed back

    wrong = (draft[1] + 1) % 5
    sequence = [1, 2, draft[0], wrong]
    drafter.observe(sequence)
    assert model.tokens == [1, 2, draft[0]]

    draft = drafter.propose(sequence, 2)
    assert tuple(draft) == toy_greedy(sequence, 2, seed=2, vocab=5)
    before = len(sequence)
    sequence = [*sequence, *draft, 4]
    drafter.observe(sequence)
    assert model.tokens == sequence[: before + 1]  # all accepted: the last draft is caught up on with the next proposal

    drafter.propose(sequence, 1)
    assert model.tokens == sequence


def test_draft_model_refuses_a_sequence_it_did_not_see():
    drafter = DraftModelDrafter(ToyTarget(), vocab_size=5)
    drafter.propose([1, 2, 3], 2)
    with pytest.raises(CacheError, match="expected the same tokens, fewer than committed"):
        drafter.propose([1, 2, 3, 9], 2)


def test_draft_model_with_a_shorter_context_stops_proposing():
    drafter = DraftModelDrafter(ToyTarget(context_limit=4), vocab_size=5)
    assert len(drafter.propose([1, 2, 3], 5)) == 2
    drafter.reset()
    assert len(drafter.propose([1, 2, 3, 4], 5)) == 1
    drafter.reset()
    assert drafter.propose([1, 2, 3, 4, 0], 5) == []


def test_padded_rows_are_never_proposed():
    # transformers #45307, TensorRT-LLM #3615: the draft's head has rows above the shared vocabulary, here with the best logits
    class Padded(ToyTarget):
        def forward(self, tokens):
            self.vocab_size = 5
            rows = super().forward(tokens)
            self.vocab_size = 8
            return torch.cat([rows, torch.full((len(rows), 3), 99.0)], dim=-1)

    model = Padded(seed=4, vocab=8)
    drafter = DraftModelDrafter(model, vocab_size=5)
    assert tuple(drafter.propose([1], 6)) == toy_greedy([1], 6, seed=4, vocab=5)


@pytest.mark.parametrize("size", [0, 6])
def test_vocabulary_outside_the_draft(size):
    with pytest.raises(InputError, match=f"vocab_size is {size}, expected 1 to the draft model's 5 rows"):
        DraftModelDrafter(ToyTarget(), vocab_size=size)
