"""A target that is a plain function of its context, with ties, and greedy decoding of it by that function alone."""

import hashlib
from collections.abc import Sequence

import torch

from dispatch.errors import CacheError


def toy_row(context: Sequence[int], *, seed: int, vocab: int) -> list[float]:
    """Logits after a context: small whole numbers from a hash of seed and the whole context, so equal maxima are common."""
    digest = hashlib.blake2b(repr((seed, *context)).encode(), digest_size=vocab).digest()
    return [float(byte % 4) for byte in digest]


def toy_greedy(prompt, count, *, seed, vocab, eos_ids=(), context_limit=10**9):
    """The tokens greedy decoding gives, written from its definition: no cache, no tensor, lowest id among equal maxima."""
    sequence = list(prompt)
    while len(sequence) - len(prompt) < count and len(sequence) < context_limit:
        row = toy_row(sequence, seed=seed, vocab=vocab)
        sequence.append(row.index(max(row)))
        if sequence[-1] in eos_ids:
            break
    return tuple(sequence[len(prompt) :])


class ToyTarget:
    """The Target protocol over toy_row; its cache is the list of tokens it was given."""

    def __init__(self, *, seed: int = 0, vocab: int = 5, context_limit: int = 10**6):
        self.seed, self.vocab_size, self.context_limit = seed, vocab, context_limit
        self.tokens: list[int] = []
        self.widths: list[int] = []

    @property
    def length(self):
        return len(self.tokens)

    def reset(self):
        self.tokens = []

    def forward(self, tokens):
        if len(self.tokens) + len(tokens) > self.context_limit:
            raise CacheError("the toy's context overran")
        self.widths.append(len(tokens))
        rows = []
        for token in tokens:
            self.tokens.append(token)
            rows.append(toy_row(self.tokens, seed=self.seed, vocab=self.vocab_size))
        return torch.tensor(rows)

    def rollback(self, count):
        if not 0 <= count <= len(self.tokens):
            raise CacheError(f"toy rollback of {count} from {len(self.tokens)}")
        del self.tokens[len(self.tokens) - count :]


class ScriptedDrafter:
    """Proposes what a function of (sequence, count) returns, and keeps what the loop told it."""

    def __init__(self, script):
        self.script = script
        self.resets = 0
        self.seen: list[list[int]] = []
        self.asked: list[int] = []

    @property
    def length(self):
        return len(self.seen[-1]) if self.seen else 0

    def reset(self):
        self.resets += 1
        self.seen = []

    def propose(self, sequence, count):
        self.asked.append(count)
        return self.script(list(sequence), count)

    def observe(self, sequence):
        self.seen.append(list(sequence))
