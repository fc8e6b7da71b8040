"""Each gate on both sides of its threshold, and what it says when it is red."""

import re

import pytest

from dispatch.gates import first_difference, implausibility
from dispatch.results import Result, TopTwo


def result(tokens, top_two=()):
    return Result(
        tokens=tuple(tokens),
        text="",
        finish_reason="max_new_tokens",
        prefill_seconds=1.0,
        decode_seconds=1.0,
        forwards=len(tokens) - 1,
        top_two=top_two,
    )


VARIED = [7, 3, 9, 3, 7, 1, 2, 9, 4, 4, 8, 3, 5, 6, 1, 0]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (VARIED, None),
        ([5] * 64, r"one repeated token \[5\] from position 0 to the end"),
        ([9, 8, *[5] * 62], r"one repeated token \[5\] from position 2 to the end"),
        ([1, 2, 3] * 20, r"a cycle of 3 tokens \[1, 2, 3\] from position 0"),
        (list(range(8)) * 8, r"a cycle of 8 tokens"),
        (list(range(11, 20)) * 7, r"9 distinct tokens of 63, expected at least 17%"),
        # a cycle of nine is text that repeats itself, if there is enough else
        ([*range(30), *list(range(40, 49)) * 4], None),
        # 8 tokens before a cycle are still the start, 9 are not
        ([*range(20, 28), *[1, 2] * 14], r"a cycle of 2 tokens \[1, 2\] from position 8"),
        ([*range(20, 29), *[1, 2] * 14], None),
        # the last token breaks the cycle
        ([1, 2, 3, 4, 5, 6] * 2 + [1, 2, 3, 4, 5, 7], None),
        # 11 distinct of 64 pass, 10 do not
        ([*range(11), *[0, 1, 2, 3, 4, 5, 6, 7, 8] * 5, *range(8)], None),
        ([*range(10), *[0, 1, 2, 3, 4, 5, 6, 7, 8] * 5, *range(9)], "10 distinct tokens of 64"),
        (VARIED[:8], None),
        (VARIED[:7], "only 7 tokens"),
    ],
)
def test_plausibility(tokens, reason):
    found = implausibility(result(tokens))
    if reason is None:
        assert found is None
    else:
        assert re.search(reason, found)


def test_no_difference():
    assert first_difference(result(VARIED), result(VARIED), str) is None


@pytest.mark.parametrize(
    ("candidate", "position", "expected", "found"),
    [
        ([*VARIED[:5], 8, *VARIED[6:]], 5, 1, 8),
        ([8, *VARIED[1:]], 0, 7, 8),
        ([*VARIED[:-1], 9], 15, 0, 9),
        (VARIED[:-1], 15, 0, None),
        ([*VARIED, 6], 16, None, 6),
    ],
)
def test_first_difference(candidate, position, expected, found):
    pairs = tuple(TopTwo(ids=(token, token + 1), logits=(2.5, 2.25)) for token in VARIED)
    difference = first_difference(result(VARIED, pairs), result(candidate), lambda ids: f"<{len(ids)}>")
    assert (difference.position, difference.expected, difference.found) == (position, expected, found)
    assert difference.expected_text == f"<{len(VARIED) - position}>"
    assert difference.found_text == f"<{len(candidate) - position}>"
    assert difference.top_two == (pairs[position] if position < len(pairs) else None)


def test_message_tells_a_near_tie_from_another_context():
    pairs = tuple(TopTwo(ids=(token, token + 1), logits=(14.5, 14.25)) for token in VARIED)
    runner_up = str(first_difference(result(VARIED, pairs), result([7, 4, *VARIED[2:]]), str))
    assert runner_up.splitlines()[:4] == [
        "tokens differ first at position 1 of 16",
        "  plain greedy: 3 -> '(3, 9, 3, 7, 1, 2, 9, 4, 4, 8, 3, 5, 6, 1, 0)'",
        "  speculative:  4 -> '(4, 9, 3, 7, 1, 2, 9, 4, 4, 8, 3, 5, 6, 1, 0)'",
        "  the target's top two there: 3 at 14.5, 4 at 14.25, gap 0.25",
    ]
    assert "took the runner-up" in runner_up
    assert "not even the runner-up" in str(first_difference(result(VARIED, pairs), result([7, 8, *VARIED[2:]]), str))
