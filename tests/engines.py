"""Engines over the embedded models, and the check that a row does not depend on its company."""

import functools
from dataclasses import replace

import torch

from dispatch.decoder_weights import decoder_weights
from dispatch.engine import Engine
from dispatch.loading import load_target
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
