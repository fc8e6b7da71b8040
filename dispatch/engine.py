"""The exact form of Target: a functional forward in which a row's bits do not depend on how many rows go with it.

Row i of a forward over n tokens is, bit for bit, the row that a forward over that token alone computes at the same place, for
any n, at any cache length, for a prompt in chunks too. Every step is either a sum of exact integers or one fixed sequence of
fp32 operations a row (`kernels.reference`, `kernels.decoder_reference`); embeddings, residual sums and biases are elementwise.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from dispatch.decoder_weights import DecoderWeights, Experts, Layer, Weight
from dispatch.errors import CacheError
from dispatch.graphs import Graphs
from dispatch.kernels import cpu, decoder_cpu, decoder_reference, reference
from dispatch.moe import kernels
from dispatch.quantization import Int8Weight, SplitWeight

KEYS = decoder_reference.KEYS
GRAPH_ROWS = 32
"""On a GPU, forwards over up to so many tokens are captured as graphs, one for each width that occurs; prompts are longer."""
CHUNK = 512
"""Tokens of a prompt that go through the layers at once, so that what they need does not grow with the prompt."""


class Engine:
    """Target over a decoder's weights with a static key/value cache; a rollback only changes a length."""

    def __init__(self, weights: DecoderWeights, *, backend: str = "auto", context_limit: int | None = None) -> None:
        self._weights = weights
        self.vocab_size = weights.vocab_size
        self.context_limit = len(weights.cos) if context_limit is None else min(context_limit, len(weights.cos))
        device, self._dtype = weights.embedding.device, weights.embedding.dtype
        self._int8 = kernels(backend, device.type)
        self._rows = _row_kernels(self._int8)
        blocks, size = -(-self.context_limit // KEYS), weights.head_size
        # zeros, so that no program of a kernel can meet NaN in a place that it multiplies by nothing
        self._keys, self._values = (
            torch.zeros(len(weights.layers), weights.kv_heads, blocks, *shape, dtype=self._dtype, device=device)
            for shape in ((size, KEYS), (KEYS, size))
        )
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        # the routing of a dense block: every row to expert 0, with weight 1
        self._all_to_one = torch.zeros(self.context_limit, 1, dtype=torch.int64, device=device)
        self._by_one = torch.ones(self.context_limit, 1, device=device)
        # the reference waits for the device, which a capture does not allow
        self._graphs = Graphs() if device.type == "cuda" and self._rows is not decoder_reference else None
        self.reset()

    @property
    def length(self) -> int:
        return self._length

    def reset(self) -> None:
        self._length = 0

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._length:
            raise CacheError(f"rollback of {count} tokens from a cache of {self._length}: expected 0 to {self._length}")
        self._length -= count

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Logits float32 [len(tokens), vocab]; see Target. Raises CacheError for no tokens, or more than the context holds."""
        count = len(tokens)
        if not 1 <= count <= self.context_limit - self._length:
            raise CacheError(
                f"forward of {count} tokens over {self._length} cached: expected 1 or more, {self.context_limit} in all"
            )
        ids = torch.tensor(tokens, device=self._start.device)
        parts = []
        for chunk in torch.split(ids, CHUNK):
            self._start.fill_(self._length)
            if self._graphs is not None and len(chunk) <= GRAPH_ROWS:
                parts.append(self._graphs(self._forward, chunk))
            else:
                parts.append(self._forward(chunk))
            self._length += len(chunk)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def cached(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens in the cache, each [layers, kv_heads, length, head_size]."""
        keys = self._keys.transpose(-1, -2)
        return tuple(cache.flatten(2, 3)[:, :, : self._length].clone() for cache in (keys, self._values))  # type: ignore[return-value]

    def _forward(self, ids: Tensor) -> Tensor:
        weights, rows = self._weights, self._rows
        x = weights.embedding[ids]
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(layer, rows.rms_norm(x, layer.attention_norm, weights.eps), index)
            x = x + self._mlp(layer, rows.rms_norm(x, layer.mlp_norm, weights.eps))
        return self._linear(rows.rms_norm(x, weights.norm, weights.eps), weights.head).float()

    def _attention(self, layer: Layer, x: Tensor, index: int) -> Tensor:
        weights, keys, values = self._weights, self._keys[index], self._values[index]
        qkv = self._linear(x, layer.qkv, layer.qkv_bias)
        q = self._rows.rotate_and_store(qkv, weights.cos, weights.sin, self._start, keys, values)
        mixed = self._rows.attention(q, keys, values, self._start, weights.head_size**-0.5)
        return self._linear(mixed, layer.out, layer.out_bias)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        parts = []
        if layer.router is not None and layer.experts is not None:
            ids, routing = self._rows.route(self._scores(x, layer.router), layer.top_k, normalize=layer.normalize)
            parts.append(self._experts(x, layer.experts, ids, routing))
        if layer.dense is not None:
            parts.append(self._experts(x, layer.dense, self._all_to_one[: len(x)], self._by_one[: len(x)]))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _scores(self, x: Tensor, router: SplitWeight | Tensor) -> Tensor:
        if isinstance(router, SplitWeight):
            scores: Tensor = self._rows.linear16(x, router)
        else:
            scores = self._rows.float_linear(x.float(), router)
        return scores

    def _experts(self, x: Tensor, experts: Experts, ids: Tensor, routing: Tensor) -> Tensor:
        run = self._int8.experts if isinstance(experts.down, Int8Weight) else self._rows.float_experts
        out: Tensor = run(x, experts.gate_up, experts.down, ids, routing)
        return out

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        y: Tensor = (self._int8.linear if isinstance(weight, Int8Weight) else self._rows.float_linear)(x, weight)
        return y if bias is None else (y.float() + bias).to(y.dtype)


def _row_kernels(int8: ModuleType) -> ModuleType:
    """What goes with a backend of int8 products."""
    if int8 in (cpu, reference):
        return decoder_cpu if int8 is cpu else decoder_reference
    return importlib.import_module("dispatch.kernels.decoder_triton")
