"""How fast: each drafter and k beside the baseline, decoded in turns in this very run. The token match is a gate here too."""

import statistics
import time

import pytest
import torch

from dispatch.prompts import PROMPTS


@pytest.mark.parametrize("prompt", PROMPTS)
def test_baseline_throughput(target_name, prompt, target, baseline, decode_baseline, benchmark, request):
    rounds = request.config.getoption("--rounds")
    result = benchmark.pedantic(decode_baseline, args=(prompt, True), rounds=rounds, warmup_rounds=1)
    benchmark.extra_info.update(prompt=prompt, drafter="none", tokens=len(result.tokens))
    assert result.tokens == baseline(prompt).tokens, "plain greedy decoding gave other tokens the second time"


@pytest.mark.parametrize("k", [1, 2, 4, 8], ids="k{}".format)
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_throughput(
    target_name, prompt, drafter, k, target, baseline, decode_baseline, decode_drafted, judge, benchmark, request
):
    rounds = request.config.getoption("--rounds")
    baseline(prompt)
    baseline_seconds = []
    on_gpu = target.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def decode_baseline_first():
        started = time.perf_counter()
        decode_baseline(prompt, True)
        baseline_seconds.append(time.perf_counter() - started)
        return (prompt, drafter, k), {}

    result = benchmark.pedantic(decode_drafted, setup=decode_baseline_first, rounds=rounds, warmup_rounds=1)
    timing = {}
    if benchmark.stats is not None:
        timing["seconds"] = benchmark.stats.stats.median
        # the first alternation is the warm-up's
        timing["baseline_seconds"] = statistics.median(baseline_seconds[1:])
    cell = judge(result, prompt=prompt, drafter=drafter, k=k, **timing)
    benchmark.extra_info.update(
        cell,
        acceptance_rate=result.acceptance_rate,
        mean_acceptance_length=result.mean_acceptance_length,
        tokens_per_forward=result.tokens_per_forward,
        acceptance_by_position=result.acceptance_by_position,
        **({"peak_gpu_bytes": torch.cuda.max_memory_allocated()} if on_gpu else {}),
    )
