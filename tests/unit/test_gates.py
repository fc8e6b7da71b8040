"""Each gate on both sides of its threshold, and what it says when it is red."""

import math
import re
from dataclasses import replace

import pytest
import torch

from dispatch.errors import InputError
from dispatch.gates import LogitComparison, compare_logits, first_difference, implausibility
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


def test_message_tells_where_and_what():
    pairs = tuple(TopTwo(ids=(token, token + 1), logits=(14.5, 14.25)) for token in VARIED)
    message = str(first_difference(result(VARIED, pairs), result([7, 4, *VARIED[2:]]), str))
    assert message.splitlines() == [
        "tokens differ first at position 1 of 16",
        "  plain greedy: 3 -> '(3, 9, 3, 7, 1, 2, 9, 4, 4, 8, 3, 5, 6, 1, 0)'",
        "  speculative:  4 -> '(4, 9, 3, 7, 1, 2, 9, 4, 4, 8, 3, 5, 6, 1, 0)'",
        "  the target's top two there: 3 at 14.5, 4 at 14.25, gap 0.25",
    ]


# Probabilities times 64, a row a position, and the token that follows. The logits are their logarithms.
ORIGINAL = [[32, 16, 8, 4, 3, 1], [40, 10, 6, 5, 2, 1], [20, 19, 16, 6, 2, 1], [20, 16, 14, 8, 4, 2]]
FOUND = [[16, 32, 8, 4, 3, 1], [40, 10, 6, 5, 1, 2], [20, 19, 8, 7, 6, 4], [16, 20, 14, 8, 2, 4]]
FOLLOWING = torch.tensor([0, 4, 2, 4])


def logits(rows):
    return torch.tensor(rows, dtype=torch.float32).log()


def test_comparison_of_logits():
    comparison = compare_logits(logits(ORIGINAL), logits(FOUND), FOLLOWING)
    assert comparison.positions == 4
    assert comparison.top_one == 0.5  # the second and the third
    assert comparison.top_five == 0.9  # in the second and the fourth, token 5 takes the place of token 4
    assert comparison.largest_difference == pytest.approx(math.log(4), rel=1e-6)  # token 5 in the third
    # the original's two best in ratios of 2, 4, 20 / 19 and 1.25: gaps of 0.69, 1.39, 0.05 and 0.22
    assert comparison.by_gap == ((0.0, 0.1, 1, 1), (0.1, 0.5, 1, 0), (0.5, 1.0, 1, 0), (1.0, math.inf, 1, 1))
    # the fourth root of 2 * 32 * 4 * 16, and of 4 * 64 * 8 * 32
    assert comparison.original_perplexity == pytest.approx(8, rel=1e-6)
    assert comparison.perplexity == pytest.approx(16, rel=1e-6)
    assert comparison.perplexity_rise == pytest.approx(1, rel=1e-6)
    assert str(comparison) == (
        "4 positions: same greedy token 50.00% (by the original's top-2 gap, 0 to 0.1: 1/1, 0.1 to 0.5: 0/1, 0.5 to 1: 0/1, "
        "1 to inf: 1/1), top-5 overlap 90.00%, largest logit difference 1.39, perplexity 8.0000 -> 16.0000 (+100.000%)"
    )
    assert comparison.problems() == [
        "4 positions were compared, expected at least 500",
        "perplexity rose by 100.00%, expected at most 0.5%",
        "the greedy token is the same at 50.00%, expected at least 97%",
        "the five best tokens overlap by 90.00%, expected at least 95%",
    ]


def test_a_gap_on_a_bound_belongs_to_the_wider_class():
    rows = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0], [2.0, 1.5, 0.0, -1.0, -2.0], [2.0, 2.0, 0.0, -1.0, -2.0]])
    comparison = compare_logits(rows, rows, torch.tensor([0, 0, 0]))
    assert comparison.by_gap == ((0.0, 0.1, 1, 1), (0.1, 0.5, 0, 0), (0.5, 1.0, 1, 1), (1.0, math.inf, 1, 1))
    changed = compare_logits(rows, rows[:, [1, 0, 2, 3, 4]], torch.tensor([0, 0, 0]))
    assert changed.problems()[-1] == "the greedy token changed at 1 positions where the original led by 1.0 or more"


JUST_GREEN = LogitComparison(
    positions=500,
    top_one=0.97,
    top_five=0.95,
    largest_difference=9.0,
    by_gap=((0.0, 0.1, 10, 0), (0.1, 0.5, 4, 0), (0.5, 1.0, 1, 0), (1.0, math.inf, 485, 485)),
    perplexity=2.01,
    original_perplexity=2.0,
)


def test_int8_just_within_its_limits():
    assert JUST_GREEN.problems() == []
    assert replace(JUST_GREEN, perplexity=1.5).problems() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"positions": 499}, "499 positions were compared, expected at least 500"),
        ({"perplexity": 2.0102}, "perplexity rose by 0.51%, expected at most 0.5%"),
        ({"perplexity": math.nan}, "perplexity rose by nan%, expected at most 0.5%"),
        ({"perplexity": math.inf}, "perplexity rose by inf%, expected at most 0.5%"),
        ({"top_one": 0.9695}, "the greedy token is the same at 96.95%, expected at least 97%"),
        ({"top_five": 0.949}, "the five best tokens overlap by 94.90%, expected at least 95%"),
        (
            {"by_gap": (*JUST_GREEN.by_gap[:3], (1.0, math.inf, 485, 484))},
            "the greedy token changed at 1 positions where the original led by 1.0 or more",
        ),
    ],
)
def test_int8_just_outside_its_limits(changes, problem):
    assert replace(JUST_GREEN, **changes).problems() == [problem]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_not_compared(bad):
    good, broken = logits(ORIGINAL), logits(ORIGINAL)
    broken[2, 3] = bad
    with pytest.raises(InputError, match="the compared model's logits hold inf or NaN"):
        compare_logits(good, broken, FOLLOWING)
    with pytest.raises(InputError, match="the original model's logits hold inf or NaN"):
        compare_logits(broken, good, FOLLOWING)


@pytest.mark.parametrize(("original", "found", "following"), [(4, 3, 4), (4, 4, 3), (0, 0, 0)])
def test_logits_that_do_not_fit_together(original, found, following):
    with pytest.raises(InputError, match=re.escape(f"logits ({original}, 6) and ({found}, 6) for {following} tokens")):
        compare_logits(logits(ORIGINAL)[:original], logits(FOUND)[:found], FOLLOWING[:following])
