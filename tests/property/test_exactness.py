"""Whatever is drafted, the output is plain greedy decoding's: against brute force on a toy target with many ties."""

from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ScriptedDrafter, ToyTarget, toy_greedy

from dispatch.drafters import DraftModelDrafter, PromptLookupDrafter
from dispatch.speculative import accept, decode_speculative

VOCAB = 5
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
seeds = st.integers(0, 2**16)
eos = st.sets(st.integers(0, VOCAB - 1), max_size=2)


@st.composite
def drafters(draw, target_seed):
    """Prompt lookup, a draft model that is the target itself, one that is another model, or tokens at random."""
    kind = draw(st.sampled_from(["lookup", "same model", "other model", "right then wrong", "random"]))
    if kind == "lookup":
        low = draw(st.integers(1, 3))
        return PromptLookupDrafter(max_ngram=draw(st.integers(low, 4)), min_ngram=low)
    if kind in ("same model", "other model"):
        seed = target_seed if kind == "same model" else target_seed + 1
        limit = draw(st.integers(4, 60))
        return DraftModelDrafter(ToyTarget(seed=seed, vocab=VOCAB, context_limit=limit), vocab_size=VOCAB)
    random = draw(st.randoms(use_true_random=False))
    if kind == "random":
        return ScriptedDrafter(lambda _, count: [random.randrange(VOCAB) for _ in range(random.randint(0, count))])

    def script(sequence, count):
        right = list(toy_greedy(sequence, count, seed=target_seed, vocab=VOCAB))
        wrong = random.randint(0, count)
        return [*right[:wrong], *(random.randrange(VOCAB) for _ in right[wrong:])]

    return ScriptedDrafter(script)


@settings(max_examples=300, deadline=None)
@given(st.data(), prompts, seeds, st.integers(1, 9), st.integers(1, 30), eos, st.integers(2, 40))
def test_speculative_equals_brute_force(data, prompt, seed, k, budget, eos_ids, room):
    drafter = data.draw(drafters(seed))
    limit = len(prompt) + room
    target = ToyTarget(seed=seed, vocab=VOCAB, context_limit=limit)
    result = decode_speculative(target, drafter, prompt, k=k, max_new_tokens=budget, eos_ids=eos_ids)

    expected = toy_greedy(prompt, budget, seed=seed, vocab=VOCAB, eos_ids=eos_ids, context_limit=limit)
    assert result.tokens == expected
    if expected[-1] in eos_ids:
        assert result.finish_reason == "eos"
    elif len(expected) == budget:
        assert result.finish_reason == "max_new_tokens"
    else:
        assert result.finish_reason == "context_limit"
        assert len(prompt) + len(expected) == limit
    # the cache holds everything but the newest token, and every forward was no wider than k + 1
    assert target.tokens == [*prompt, *expected][:-1]
    assert all(width <= k + 1 for width in target.widths[1:])
    # each round gave what it accepted and one more, except that a drafted end-of-sequence has nothing after it
    rounds = sum(step.accepted + 1 for step in result.steps)
    assert rounds - (len(expected) - 1) in ({0, 1} if result.finish_reason == "eos" else {0})


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_accept_is_the_longest_agreeing_prefix(drafted, picked):
    longest = max(n for n in range(len(drafted) + 1) if drafted[:n] == picked[:n])
    assert accept(drafted, picked) == longest


@given(seeds, st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), st.integers(0, 5)), max_size=8))
def test_rolled_back_toy_is_a_fresh_toy(seed, moves):
    """The toy itself: after any forwards and rollbacks it answers as one that was given the remaining tokens at once."""
    target = ToyTarget(seed=seed, vocab=VOCAB)
    for tokens, count in moves:
        target.forward(tokens)
        target.rollback(min(count, target.length))
    fresh = ToyTarget(seed=seed, vocab=VOCAB)
    if target.tokens:
        fresh.forward(target.tokens)
    assert target.forward([1]).tolist() == fresh.forward([1]).tolist()
