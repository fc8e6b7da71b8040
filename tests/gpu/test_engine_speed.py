"""How fast the exact engine is: beside the model's own code and transformers' generate, by width, and by the bytes it reads.

What is compared takes turns in this very run; figures are medians of its rounds.
"""

import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from dispatch.decoder_weights import DecoderWeights, Experts, Layer
from dispatch.engine import Engine
from dispatch.kernels import cpu
from dispatch.prompts import PROMPTS
from dispatch.quantization import Int8Weight, quantize_split

WIDTHS = (1, 2, 3, 5, 9, 17)
LENGTH = 100
"""Tokens in the cache where forwards of different width are timed."""


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function, *arguments):
    wait()
    started = time.perf_counter()
    function(*arguments)
    wait()
    return time.perf_counter() - started


def native(config, dtype):
    """A model that transformers has by itself, of the same sizes, with random float weights; it knows no DeepSeek-MoE V1.

    The difference: one gate value a token on the shared experts, and biases in attention.
    """
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    made = Qwen2MoeConfig(
        **{name: getattr(config, name) for name in sizes},
        num_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_expert_intermediate_size=config.n_shared_experts * config.moe_intermediate_size,
        mlp_only_layers=list(range(config.first_k_dense_replace)),
        decoder_sparse_step=1,
        dtype=dtype,
    )
    torch.manual_seed(0)
    return Qwen2MoeForCausalLM(made).to(dtype).eval()


@pytest.mark.benchmark(group="engine: plain greedy decoding of all prompts")
def test_engine_decode(target_name, target, runner, baseline, decode_baseline, evidence, benchmark, record_property, request):
    if not runner.exact:
        pytest.skip(f"{target_name} runs by its {runner}: there is no engine to time")
    rounds = request.config.getoption("--rounds")
    others = {"its own code": lambda: {prompt: decode_baseline(prompt, timed=True, by=own) for prompt in PROMPTS}}
    own = runner.stock()
    if target.model.device.type == "cpu":
        # a second model of this size is too much beside a large one
        generating = native(target.model.config, target.spec.dtype)

        def generate():
            for prompt in PROMPTS:
                ids, count = torch.tensor([target.encode(PROMPTS[prompt])]), len(baseline(prompt).tokens)
                settings = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
                made = generating.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                assert made.shape[1] - ids.shape[1] == count

        others["generate of an equivalent native model"] = generate
    taken = {name: [] for name in others}

    def others_first():
        for name, run in others.items():
            taken[name].append(seconds(run))

    def decode():
        return {prompt: decode_baseline(prompt, timed=True) for prompt in PROMPTS}

    found = benchmark.pedantic(decode, setup=others_first, rounds=rounds, warmup_rounds=1)
    for prompt in PROMPTS:
        assert found[prompt].tokens == baseline(prompt).tokens, f"{prompt}: other tokens the second time"
    if benchmark.stats is None:
        return
    ours = benchmark.stats.stats.median
    # the first alternation is the warm-up's
    times = {name: statistics.median(values[1:]) / ours for name, values in taken.items()}
    rate = sum(len(result.tokens) for result in found.values()) / ours
    finding = {"target": target_name, "tokens_per_second": rate, "times": times}
    benchmark.extra_info.update(finding)
    evidence.write("engine-decode", finding)
    beside = ", ".join(f"{name} {value:.2f}x" for name, value in times.items())
    record_property("dispatch_line", f"{target_name} by the exact engine: {rate:.1f} tok/s; {beside} the time")


@pytest.mark.benchmark(group="engine: one forward over 5 rows")
def test_engine_widths(target_name, target, runner, evidence, benchmark, record_property):
    if not runner.exact:
        pytest.skip(f"{target_name} runs by its {runner}: there is no engine to time")
    tokens = [token for prompt in PROMPTS.values() for token in target.encode(prompt)]
    assert len(tokens) >= LENGTH + max(WIDTHS)
    by_width(runner.target(), tokens, target_name, evidence, benchmark, record_property, rounds=60)


def by_width(engine, tokens, name, evidence, benchmark, record_property, rounds):
    """Times forwards of every width in turns; the gate is that their rows are the ones of one token at a time."""
    engine.reset()
    engine.forward(tokens[:LENGTH])
    new = tokens[LENGTH : LENGTH + max(WIDTHS)]
    alone = torch.cat([engine.forward([token]) for token in new])
    engine.rollback(len(new))
    taken = {width: [] for width in WIDTHS}

    def forward(width):
        logits = engine.forward(new[:width])
        engine.rollback(width)
        wait()
        return logits

    def others_first():
        for width in WIDTHS:
            if width != 5:
                taken[width].append(seconds(forward, width))

    for width in WIDTHS:
        assert torch.equal(forward(width), alone[:width]), f"a row changes in a forward over {width}"
    benchmark.pedantic(forward, setup=lambda: (others_first(), ((5,), {}))[1], rounds=rounds, warmup_rounds=1)
    if benchmark.stats is None:
        return
    taken[5] = benchmark.stats.stats.data
    medians = {width: statistics.median(values) for width, values in taken.items()}
    finding = {"target": name, "seconds": medians, "times": {width: medians[width] / medians[1] for width in WIDTHS}}
    benchmark.extra_info.update(finding)
    evidence.write("engine-widths", finding)
    several = ", ".join(f"{width} rows {times:.2f}x" for width, times in finding["times"].items() if width > 1)
    record_property(
        "dispatch_line", f"{name} by the exact engine at {LENGTH} tokens: 1 row {medians[1] * 1e3:.3g} ms, {several}"
    )


SIZES = {"hidden": 2048, "inner": 1408, "experts": 64, "top_k": 6, "shared": 2, "heads": 16, "vocabulary": 102400}
CONTEXT = 512


def stack_of_the_16b(layers, device, dtype=torch.bfloat16):
    """MoE layers of DeepSeek-MoE-16B's shape in int8 with random weights, and its embeddings and head."""
    s = SimpleNamespace(**SIZES)
    torch.manual_seed(0)

    def weight(*shape):
        # 73 is the deviation of values from -127 to 127
        values = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        return Int8Weight(values=values, scales=torch.full(shape[:-1], shape[-1] ** -0.5 / 73, device=device))

    def layer():
        return Layer(
            attention_norm=torch.ones(s.hidden, dtype=dtype, device=device),
            qkv=weight(3 * s.hidden, s.hidden),
            qkv_bias=None,
            out=weight(s.hidden, s.hidden),
            out_bias=None,
            mlp_norm=torch.ones(s.hidden, dtype=dtype, device=device),
            dense=Experts(gate_up=weight(1, 2 * s.shared * s.inner, s.hidden), down=weight(1, s.hidden, s.shared * s.inner)),
            router=quantize_split(torch.randn(s.experts, s.hidden, device=device) * s.hidden**-0.5),
            experts=Experts(gate_up=weight(s.experts, 2 * s.inner, s.hidden), down=weight(s.experts, s.hidden, s.inner)),
            top_k=s.top_k,
            normalize=False,
        )

    size = s.hidden // s.heads
    angles = torch.outer(torch.arange(CONTEXT), 10000 ** (-torch.arange(size // 2) * 2 / size)).to(device)
    return DecoderWeights(
        embedding=torch.randn(s.vocabulary, s.hidden, dtype=dtype, device=device),
        layers=tuple(layer() for _ in range(layers)),
        norm=torch.ones(s.hidden, dtype=dtype, device=device),
        eps=1e-6,
        head=weight(s.vocabulary, s.hidden),
        heads=s.heads,
        kv_heads=s.heads,
        head_size=size,
        cos=angles.cos(),
        sin=angles.sin(),
    )


@pytest.mark.benchmark(group="engine: one forward over 5 rows")
@pytest.mark.nightly
def test_stack_of_the_16b(evidence, benchmark, record_property):
    available = int(re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    # half of what is free, for the engine leaves the rest to what makes it; DeepSeek-MoE-16B has 27
    layers = min(27, int(available * 0.5 / 600e6))
    if layers < 2:
        pytest.skip(f"{available / 1e9:.1f} GB are free, expected 2.4 for two layers")
    weights = stack_of_the_16b(layers, "cpu")
    engine, name = Engine(weights), f"{layers} layers of the 16B's shape"
    # each step's token takes other experts, and the probe leaves nothing of the last step in a cache
    tokens = torch.randint(SIZES["vocabulary"], (CONTEXT,)).tolist()
    by_width(engine, tokens, name, evidence, benchmark, record_property, rounds=10)
    probe, rates, steps = torch.ones(2**30, dtype=torch.int8), [], []
    engine.rollback(engine.length - LENGTH)
    for token in tokens[LENGTH : LENGTH + 40]:
        rates.append(probe.nbytes / seconds(cpu.read_once, probe))
        steps.append(seconds(engine.forward, [token]))
    rate, bandwidth = weights.nbytes_per_token() / statistics.median(steps), statistics.median(rates)
    finding = {"layers": layers, "gb_s": rate / 1e9, "bandwidth_gb_s": bandwidth / 1e9, "share": rate / bandwidth}
    benchmark.extra_info.update(finding)
    evidence.write("engine-stack", finding)
    record_property(
        "dispatch_line",
        f"{name}: one token {statistics.median(steps) * 1e3:.3g} ms, {rate / 1e9:.1f} GB/s, {rate / bandwidth:.0%} of "
        f"{bandwidth / 1e9:.1f} GB/s read bandwidth",
    )
