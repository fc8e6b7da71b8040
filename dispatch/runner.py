"""By what a loaded model is run: the exact engine, or its own code where that is asked for or the engine does not know it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.decoder_weights import DecoderWeights, decoder_weights
from dispatch.decoding import CachedModel, Target
from dispatch.engine import Engine
from dispatch.errors import EngineError
from dispatch.loading import LoadedModel
from dispatch.oracle import Forward, StockModel
from dispatch.precise import precise_logits

NUMERICS = ("exact", "fast")
PROBE = 72
"""Tokens over which a new engine must agree with the model's own code: more than a block of keys."""
MOST_APART = {torch.float32: 2**-7, torch.bfloat16: 2**-3}
"""Of a row of logits, in norm: some 30 layers of roundings and an int8 step here and there. Another architecture is at 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runner:
    """A loaded model and the forwards over it. Every forward that is asked for has a cache of its own."""

    loaded: LoadedModel
    exact: bool
    weights: DecoderWeights | None
    """None where the engine does not know the model, and then there is no referee either."""
    reason: str | None
    """Why the engine or the referee is not there."""

    def baseline(self) -> Forward:
        """For the oracle: never takes anything back."""
        return self.target() if self.exact else self.stock()

    def stock(self) -> StockModel:
        """By the model's own code, whatever was asked for."""
        return StockModel(self.loaded.model, context_limit=self.loaded.context_limit)

    def target(self) -> Target:
        """For speculative decoding."""
        if self.exact and self.weights is not None:
            return Engine(self.weights)
        return CachedModel(self.loaded.model, context_limit=self.loaded.context_limit)

    def whole(self, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocab] of the model's own code in one forward."""
        return self.stock().forward(tokens)

    def one_by_one(self, tokens: Sequence[int]) -> Tensor:
        """The same, a token at a time."""
        stock = self.stock()
        return torch.cat([stock.forward([token]) for token in tokens])

    def precise(self, tokens: Sequence[int]) -> Tensor:
        """The referee's logits [len(tokens), vocab]. Raises EngineError where the engine does not know the model."""
        if self.weights is None:
            raise EngineError(f"{self.loaded.spec.name} is not known to the exact engine, and so not to the referee")
        return precise_logits(self.weights, tokens)

    def __str__(self) -> str:
        return "exact engine" if self.exact else f"own code{f' ({self.reason})' if self.reason else ''}"


def make_runner(loaded: LoadedModel, numerics: str) -> Runner:
    """numerics: "exact" or "fast". A model that the engine does not know is run by its own code.

    Raises EngineError where the engine claims to know a model, is to run it, and its logits are others.
    """
    exact = numerics == "exact"
    try:
        weights = decoder_weights(loaded.model, context_limit=loaded.context_limit)
        if weights.embedding.dtype not in MOST_APART:
            raise EngineError(f"its activations are {weights.embedding.dtype}, expected float32 or bfloat16")
    except EngineError as error:
        return Runner(loaded=loaded, exact=False, weights=None, reason=f"not known to the exact engine: {error}")
    difference = _difference(loaded, weights)
    if difference and exact:
        raise EngineError(
            f"{loaded.spec.name}: {difference}. The engine is broken, or the model does what none of its parts shows: run "
            "tests/unit/test_engine.py, or run the model by its own code with --numerics=fast"
        )
    return Runner(loaded=loaded, exact=exact, weights=None if difference else weights, reason=difference)


def _difference(loaded: LoadedModel, weights: DecoderWeights) -> str | None:
    """How the engine's logits differ from the model's: the config may ask for what no part shows. None if they do not."""
    count = min(PROBE, loaded.context_limit)
    # spread over the vocabulary, none of its edges
    tokens = [(i * 7919 + 11) % weights.vocab_size for i in range(count)]
    found = Engine(weights, context_limit=count).forward(tokens)
    expected = StockModel(loaded.model, context_limit=count).forward(tokens)
    apart = (found - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    # the median: in low precision a router may send one row to another expert
    middle, most = float(apart.median()), MOST_APART[weights.embedding.dtype]
    if middle <= most:
        return None
    return (
        f"the engine's logits are off those of the model's own code by {middle:.2g} of their size, expected at most {most:.2g}"
    )
