"""Prompt lookup with its growing index, against a search that looks through the whole sequence each time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.drafters import PromptLookupDrafter


def search(sequence, count, sizes):
    for size in sizes:
        for start in reversed(range(len(sequence) - size)):
            if sequence[start : start + size] == sequence[-size:]:
                return sequence[start + size : start + size + count]
    return []


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_index_equals_search(prompt, commits, low, more, count):
    drafter = PromptLookupDrafter(max_ngram=low + more, min_ngram=low)
    sequence = list(prompt)
    for new in [[], *commits]:
        sequence += new
        drafter.observe(sequence)
        assert drafter.propose(sequence, count) == search(sequence, count, range(low + more, low - 1, -1))
