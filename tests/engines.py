"""Engines over the embedded models, one of them made to have near ties everywhere."""

import argparse
import functools
import inspect
from dataclasses import replace

import torch

from dispatch.decoder_weights import decoder_weights
from dispatch.engine import Engine
from dispatch.loading import load_target
from dispatch.moe import quantize_experts
from dispatch.runner import make_runner
from dispatch.targets import TARGETS

SPECS = {
    **{name: TARGETS[name] for name in ("tiny", "tiny-int8-experts", "tiny-int8-all")},
    "tiny-draft": TARGETS["tiny"].draft,
}
TEXT = '''def read(self, size=-1):
    """Reads size bytes, or all that is left, from the file; an OSError is raised when the file has been closed before."""
    for name, value in sorted(self.items()):
        if value is None or not isinstance(value, (int, float)):
            raise ValueError("expected a number, got %r" % value)
    return self.fp.read(size) if size >= 0 else b"".join(iter(self.fp.read, b""))
'''


@functools.cache
def loaded(name, dtype=torch.float32):
    """tiny in one of its precisions, or its draft, with activations of this dtype."""
    return load_target(replace(SPECS[name], dtype=dtype))


@functools.cache
def weights(name, dtype=torch.float32):
    model = loaded(name, dtype)
    return decoder_weights(model.model, context_limit=model.context_limit)


def engine(name, dtype=torch.float32, **options):
    return Engine(weights(name, dtype), **options)


def text(count):
    ids = loaded("tiny").encode(TEXT)
    return (ids * (count // len(ids) + 1))[:count]


def one_by_one(target, tokens):
    """Logits [tokens, vocab] of a target that is given one token at a time."""
    target.reset()
    return torch.cat([target.forward([token]) for token in tokens])


GAPS = (0.0, 2.0**-22, 2.0**-16, 2.0**-10)
"""Of a token's logit to its twin's, relative: an exact tie, a step of fp32, and two that are less than one step of bf16."""


def near_tied(name, weights, dtype, numerics):
    """A runner of tiny or its draft, in which every token has a twin: the same row of lm_head but for a factor of GAPS.

    In one layer of tiny every expert has such a twin for the router as well.
    """
    made = load_target(replace(SPECS[name], dtype=dtype))
    factors = 1 + torch.tensor(GAPS).repeat_interleave(2).repeat(made.model.lm_head.out_features // 16)
    stacks = [made.model.lm_head, *([made.model.model.layers[2].mlp.gate] if name == "tiny" else [])]
    with torch.no_grad():
        for rows in (module.weight for module in stacks):
            _twins(rows, factors[: len(rows) // 2, None].to(dtype))
        if weights != "original":
            quantize_experts(made.model, layers=weights.removeprefix("int8-"))
        if weights == "int8-all":
            _twins(made.model.lm_head.values, torch.ones(len(factors), 1, dtype=torch.int8))
            _twins(made.model.lm_head.scales, factors)
    return make_runner(made, numerics)


def _twins(rows, factors):
    """Of each pair of rows one becomes the other times its factor: the second of one pair, the first of the next."""
    pairs = rows.view(-1, 2, *rows.shape[1:])
    pairs[0::2, 1] = pairs[0::2, 0] * factors[0::2]
    pairs[1::2, 0] = pairs[1::2, 1] * factors[1::2]


def prompts(count, length=8):
    """Different windows of real text."""
    ids = loaded("tiny").encode(inspect.getsource(argparse))
    step = (len(ids) - length) // count
    return [ids[i * step : i * step + length] for i in range(count)]
