"""Gate: speculative decoding gives, token for token, what plain greedy decoding gives."""

import pytest

from dispatch.prompts import PROMPTS


@pytest.mark.parametrize("k", [1, 2, 4, 8], ids="k{}".format)
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_token_match(target_name, prompt, drafter, k, baseline, decode_drafted, judge):
    baseline(prompt)
    judge(decode_drafted(prompt, drafter, k), prompt=prompt, drafter=drafter, k=k)
