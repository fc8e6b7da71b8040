"""The rates, against figures worked out by hand."""

import pytest

from dispatch.results import Result, Step, TopTwo


def result(steps=(), tokens=10, forwards=None, **times):
    return Result(
        tokens=tuple(range(tokens)),
        text="",
        finish_reason="max_new_tokens",
        prefill_seconds=times.get("prefill", 1.0),
        decode_seconds=times.get("decode", 4.0),
        forwards=len(steps) if forwards is None else forwards,
        steps=tuple(Step(drafted=drafted, accepted=accepted) for drafted, accepted in steps),
    )


def test_rates():
    # four rounds: 4+4+2+0 drafted, 3+0+2+0 accepted; prefill's token, 5 accepted and 4 of the target's own make 10
    found = result([(4, 3), (4, 0), (2, 2), (0, 0)])
    assert (found.drafted, found.accepted) == (10, 5)
    assert found.acceptance_rate == 0.5
    assert found.mean_acceptance_length == pytest.approx(1 + 5 / 3)  # three rounds drafted
    assert found.acceptance_by_position == pytest.approx((2 / 3, 2 / 3, 1 / 2, 0))
    assert found.tokens_per_forward == pytest.approx(9 / 4)
    assert found.tokens_per_second == 2.0


def test_rates_of_plain_decoding():
    found = result(forwards=9)
    assert found.tokens_per_forward == 1.0
    assert found.acceptance_rate is None
    assert found.mean_acceptance_length is None
    assert found.acceptance_by_position == ()


def test_rates_of_a_single_token():
    assert result(tokens=1, forwards=0).tokens_per_forward is None


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1), (-1, -1)])
def test_impossible_steps(drafted, accepted):
    with pytest.raises(ValueError, match=f"accepted {accepted} of {drafted} drafted tokens"):
        Step(drafted=drafted, accepted=accepted)


def test_impossible_results():
    with pytest.raises(ValueError, match="at least one token"):
        result(tokens=0)
    with pytest.raises(ValueError, match="1 top-two records for 2 tokens"):
        Result(
            tokens=(1, 2),
            text="",
            finish_reason="eos",
            prefill_seconds=0,
            decode_seconds=0,
            forwards=1,
            top_two=(TopTwo(ids=(1, 2), logits=(3.0, 1.0)),),
        )
