"""How fast an int8 model decodes beside its original's own code: plain greedy, all prompts, in turns in this very run."""

import statistics
import time

import pytest

from dispatch.gates import first_difference, implausibility
from dispatch.oracle import StockModel
from dispatch.prompts import PROMPTS


@pytest.mark.benchmark(group="int8: plain greedy decoding of all prompts")
def test_int8_decode(target_name, target, original, baseline, decode_baseline, evidence, benchmark, record_property, request):
    rounds = request.config.getoption("--rounds")
    expected, original_seconds = {}, []
    own_code = StockModel(original.model, context_limit=original.context_limit)

    def decode(**by):
        return {prompt: decode_baseline(prompt, timed=True, **by) for prompt in PROMPTS}

    def decode_original_first():
        started = time.perf_counter()
        expected.update(decode(by=own_code))
        original_seconds.append(time.perf_counter() - started)

    found = benchmark.pedantic(decode, setup=decode_original_first, rounds=rounds, warmup_rounds=1)
    different = {}
    for prompt in PROMPTS:
        assert found[prompt].tokens == baseline(prompt).tokens, f"{prompt}: other tokens the second time"
        assert not implausibility(expected[prompt]), f"the original on {prompt}: {implausibility(expected[prompt])}"
        ends = {found[prompt].finish_reason, expected[prompt].finish_reason}
        assert len(found[prompt].tokens) == len(expected[prompt].tokens) or "eos" in ends, f"{prompt}: decoding stopped early"
        difference = first_difference(expected[prompt], found[prompt], target.decode)
        if difference:
            different[prompt] = difference.position
    # int8 may choose another token where the original hardly prefers its own; test_int8_quality judges that
    tokens = f"tokens equal on {len(PROMPTS) - len(different)}/{len(PROMPTS)} prompts"
    if different:
        tokens += f", first difference {', '.join(f'in {prompt} at {position}' for prompt, position in different.items())}"
    finding = {"target": target_name, "differ_first_at": different}
    if benchmark.stats is None:
        line = f"{target_name} was not timed"
    else:
        seconds = benchmark.stats.stats.median
        # the first alternation is the warm-up's
        before = statistics.median(original_seconds[1:])
        rate, original_rate = (
            sum(len(result.tokens) for result in results.values()) / duration
            for results, duration in ((found, seconds), (expected, before))
        )
        finding |= {"tokens_per_second": rate, "original_tokens_per_second": original_rate, "speed_up": rate / original_rate}
        ratio = rate / original_rate
        line = f"{target_name} decodes {rate:.1f} tok/s, the original by its own code {original_rate:.1f} tok/s: {ratio:.2f}x"
    benchmark.extra_info.update(finding)
    evidence.write("int8-decode", finding)
    record_property("dispatch_line", f"{line}; {tokens}")
