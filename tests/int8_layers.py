"""One MoE layer in int8, made up, and what its backends are held against."""

import torch

from dispatch.quantization import dequantize, quantize


def layer(hidden, intermediate, experts, top_k, tokens, seed=0):
    """Weights whose size differs a hundredfold between experts and between channels, so that a wrong scale shows."""
    torch.manual_seed(seed)

    def weight(rows, columns):
        uneven = 10 ** (2 * torch.rand(experts, 1, 1) - 1) * 10 ** (2 * torch.rand(experts, rows, 1) - 1)
        return quantize(torch.randn(experts, rows, columns) * uneven / columns**0.5)

    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return (
        torch.randn(tokens, hidden),
        weight(2 * intermediate, hidden),
        weight(hidden, intermediate),
        ids,
        torch.rand(ids.shape),
    )


def in_float64(x, gate_up, down, ids, weights):
    """The layer from its definition, with float weights or those that the int8 ones stand for."""
    first, second = (w.double() if isinstance(w, torch.Tensor) else dequantize(w).double() for w in (gate_up, down))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for slot, expert in enumerate(ids[token].tolist()):
            gate, up = (first[expert] @ row).chunk(2)
            out[token] += weights[token, slot].double() * (second[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def in_float32(x, gate_up, down, ids, weights):
    """The layer in float sums, whose results depend on the rows that go together."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up.values)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ dequantize(gate_up)[expert].T).chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up @ dequantize(down)[expert].T
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def rows_differ_with_company(experts, shape=(96, 80, 8, 3), sizes=range(2, 64, 7), alone=range(64)):
    """Whether any of 64 rows changes with the rows around it, or with their order; `sizes`: rows together, `alone`: rows."""
    x, gate_up, down, ids, weights = layer(*shape, tokens=64)

    def of(rows):
        return experts(x[rows], gate_up, down, ids[rows], weights[rows])

    together = of(slice(None))
    order = torch.randperm(64)
    return not (
        all(torch.equal(of([row]), together[[row]]) for row in alone)
        and all(torch.equal(of(slice(size)), together[:size]) for size in sizes)
        and torch.equal(of(order), together[order])
    )


def poison(monkeypatch):
    """Memory that is not written must show: torch.empty gives NaN, and bytes that are NaN as floats."""
    empty = torch.empty

    def full(*size, **options):
        made = empty(*size, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 255 if made.dtype == torch.uint8 else -77)

    monkeypatch.setattr(torch, "empty", full)
