"""What a decoder is made of, taken from a loaded model: DeepSeek-MoE V1 (its own code) and Llama, known by their parts.

No weight is copied for good: matrices that are multiplied together are laid one behind the other, and the model's own modules
become views of that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dispatch.errors import EngineError
from dispatch.moe import PROJECTIONS, Int8Experts, Int8Linear
from dispatch.quantization import Int8Weight, SplitWeight, quantize_split

Weight = Int8Weight | Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """SwiGLU blocks: gate_up [E, 2 * I, H], the gate's channels before those of up, and down [E, H, I]. E = 1 if dense."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One decoder layer. `dense` is the whole feed-forward block, the shared experts of a MoE layer, or None."""

    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm: Tensor
    dense: Experts | None
    router: SplitWeight | Tensor | None
    experts: Experts | None
    top_k: int
    normalize: bool
    """Whether the weights of the chosen experts are made to add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    """A whole decoder. cos and sin are [positions, D / 2] in fp32."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    eps: float
    head: Weight
    heads: int
    kv_heads: int
    head_size: int
    cos: Tensor
    sin: Tensor

    @property
    def vocab_size(self) -> int:
        return len(self.head.values if isinstance(self.head, Int8Weight) else self.head)

    def nbytes_per_token(self) -> int:
        """Bytes of weights that a forward over one token has to read, each once; of the experts those it is sent to."""
        total = sum(_nbytes(weight) for weight in (self.norm, self.head, self.embedding[:1]))
        for layer in self.layers:
            parts = [layer.attention_norm, layer.qkv, layer.out, layer.mlp_norm, layer.router]
            parts += [layer.dense.gate_up, layer.dense.down] if layer.dense else []
            total += sum(_nbytes(weight) for weight in parts if weight is not None)
            if layer.experts:
                stacks = (layer.experts.gate_up, layer.experts.down)
                total += sum(_nbytes(stack) * layer.top_k // _count(stack) for stack in stacks)
        return total


def decoder_weights(model: Any, *, context_limit: int) -> DecoderWeights:
    """The weights of a loaded causal model, with rotary tables for positions below context_limit.

    Raises EngineError, naming it, for any parameter, activation, norm or router that is not part of the decoder described here.
    """
    config, body = model.config, getattr(model, "model", None)
    wanted = ("embed_tokens", "layers", "norm")
    if body is None or not all(hasattr(body, name) for name in wanted) or not hasattr(model, "lm_head"):
        raise EngineError(
            f"{type(model).__name__} has no model.{', model.'.join(wanted)} and lm_head: not a decoder known here"
        )
    _check_config(config)
    taken: set[str] = set()
    parts = _Parts(model, taken)
    layers = tuple(_layer(parts, index, layer, config) for index, layer in enumerate(body.layers))
    heads, kv_heads, head_size = _heads(config)
    eps = {_eps(name, module) for name, module in model.named_modules() if _is_norm(module)}
    if len(eps) != 1:
        raise EngineError(f"{type(model).__name__} has norms with eps {sorted(eps)}, expected one value for all")
    cos, sin = _rotary(model, head_size, context_limit)
    found = DecoderWeights(
        embedding=parts.vector("model.embed_tokens"),
        layers=layers,
        norm=parts.vector("model.norm"),
        eps=eps.pop(),
        head=parts.matrix(["lm_head"])[0],
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        cos=cos,
        sin=sin,
    )
    left = sorted(name for name, _ in _tensors(model) if name not in taken)
    if left:
        raise EngineError(f"{type(model).__name__} has {len(left)} tensors that are no part of a decoder known here: {left[0]}")
    return found


class _Parts:
    """Takes weights out of a model by the names of their modules, and remembers which."""

    def __init__(self, model: Any, taken: set[str]) -> None:
        self.model, self._taken = model, taken

    def vector(self, name: str) -> Tensor:
        """The one weight of an embedding or a norm."""
        self._taken.add(f"{name}.weight")
        weight: Tensor = self.model.get_submodule(name).weight
        return weight.detach()

    def matrix(self, names: list[str]) -> tuple[Weight, Tensor | None]:
        """Linear layers as one, their channels one after the other, and their biases."""
        modules = [self.model.get_submodule(name) for name in names]
        kinds = {type(module) for module in modules}
        if len(kinds) > 1 or not kinds <= {nn.Linear, Int8Linear}:
            raise EngineError(
                f"{names[0]} is a {', '.join(kind.__name__ for kind in kinds)}, expected linear layers of one kind"
            )
        bias = [module.bias.detach() for module in modules if module.bias is not None]
        if len(bias) not in (0, len(modules)):
            raise EngineError(f"of {', '.join(names)} only {len(bias)} have a bias, expected all or none")
        stored = ("values", "scales") if kinds == {Int8Linear} else ("weight",)
        self._taken.update(f"{name}.{part}" for name in names for part in (*stored, *(["bias"] if bias else [])))
        joined = [_joined(modules, part) for part in stored]
        weight = joined[0] if len(joined) == 1 else Int8Weight(values=joined[0], scales=joined[1])
        return weight, torch.cat(bias).float() if bias else None

    def block(self, name: str) -> Experts:
        """A dense SwiGLU block as experts, of which there is one."""
        module = self.model.get_submodule(name)
        self._check_activation(name, module)
        gate_up, first = self.matrix([f"{name}.gate_proj", f"{name}.up_proj"])
        down, second = self.matrix([f"{name}.down_proj"])
        if first is not None or second is not None:
            raise EngineError(f"{name} has a bias, which the kernels of feed-forward blocks do not carry")
        if isinstance(gate_up, Int8Weight) and isinstance(down, Int8Weight):
            gate_up, down = (Int8Weight(values=w.values[None], scales=w.scales[None]) for w in (gate_up, down))
            return Experts(gate_up=gate_up, down=down)
        if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
            return Experts(gate_up=gate_up[None], down=down[None])
        raise EngineError(f"{name} is partly in int8, expected all of it or nothing")

    def experts(self, name: str) -> Experts:
        """The routed experts of a layer."""
        module = self.model.get_submodule(name).experts
        if isinstance(module, Int8Experts):
            self._taken.update(
                f"{name}.experts.{stack}_{part}" for stack in ("gate_up", "down") for part in ("values", "scales")
            )
            stacks = (
                Int8Weight(values=module.gate_up_values, scales=module.gate_up_scales),
                Int8Weight(values=module.down_values, scales=module.down_scales),
            )
            return Experts(gate_up=stacks[0], down=stacks[1])
        for index, expert in enumerate(module):
            self._check_activation(f"{name}.experts.{index}", expert)
            linears = {p: getattr(expert, p, None) for p in PROJECTIONS}
            if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears.values()):
                raise EngineError(f"{name}.experts.{index} is no block of {', '.join(PROJECTIONS)} without biases")
            self._taken.update(f"{name}.experts.{index}.{projection}.weight" for projection in PROJECTIONS)
        gates = [linear for expert in module for linear in (expert.gate_proj, expert.up_proj)]
        gate_up, down = _joined(gates, "weight"), _joined([expert.down_proj for expert in module], "weight")
        return Experts(gate_up=gate_up.view(len(module), -1, gate_up.shape[1]), down=down.view(len(module), -1, down.shape[1]))

    def router(self, name: str, exact: bool) -> SplitWeight | Tensor:
        """The router's matrix, in int16 where the rest of the model is in int8."""
        weight = self.vector(name)
        return quantize_split(weight, name=f"{name}.weight") if exact else weight.contiguous()

    def _check_activation(self, name: str, module: Any) -> None:
        probe = torch.linspace(-4, 4, 9)
        if not torch.allclose(module.act_fn(probe), nn.functional.silu(probe)):
            raise EngineError(f"{name} has the activation {module.act_fn}, expected SiLU")


def _layer(parts: _Parts, index: int, layer: Any, config: Any) -> Layer:
    name = f"model.layers.{index}"
    qkv, qkv_bias = parts.matrix([f"{name}.self_attn.{which}_proj" for which in "qkv"])
    out, out_bias = parts.matrix([f"{name}.self_attn.o_proj"])
    routed = hasattr(layer.mlp, "experts")
    shared = getattr(layer.mlp, "shared_experts", None) is not None
    dense = parts.block(f"{name}.mlp.shared_experts" if routed else f"{name}.mlp") if shared or not routed else None
    return Layer(
        attention_norm=parts.vector(f"{name}.input_layernorm"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        mlp_norm=parts.vector(f"{name}.post_attention_layernorm"),
        dense=dense,
        router=parts.router(f"{name}.mlp.gate", isinstance(qkv, Int8Weight)) if routed else None,
        experts=parts.experts(f"{name}.mlp") if routed else None,
        top_k=config.num_experts_per_tok if routed else 0,
        normalize=bool(getattr(config, "norm_topk_prob", False)) if routed else False,
    )


def _joined(modules: list[Any], name: str) -> Tensor:
    """Tensors of this name of all modules, one behind the other; the modules are left with views of it."""
    parts = [getattr(module, name) for module in modules]
    if len(parts) == 1:
        only: Tensor = parts[0].detach()
        return only.contiguous()
    joined = torch.cat([part.detach() for part in parts])
    for module, part in zip(modules, torch.split(joined, [len(part) for part in parts]), strict=True):
        if isinstance(getattr(module, name), nn.Parameter):
            getattr(module, name).data = part
        else:
            setattr(module, name, part)
    return joined


def _check_config(config: Any) -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "scoring_func": (None, "softmax"),
        "topk_method": (None, "greedy"),
        "routed_scaling_factor": (None, 1.0),
        "sliding_window": (None,),
        "pretraining_tp": (None, 1),
    }
    for name, values in expected.items():
        if getattr(config, name, None) not in values:
            raise EngineError(f"config.{name} is {getattr(config, name)!r}, and only {values[-1]!r} is known here")


def _heads(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size % 16:
        raise EngineError(f"heads have {size} dimensions, expected a multiple of 16")
    return heads, getattr(config, "num_key_value_heads", None) or heads, size


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _eps(name: str, module: Any) -> float:
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(eps, float):
        raise EngineError(f"{name} is a {type(module).__name__} without variance_epsilon, expected an RMS norm as Llama's")
    return eps


def _rotary(model: nn.Module, head_size: int, context_limit: int) -> tuple[Tensor, Tensor]:
    """cos and sin [context_limit, D / 2] in fp32, checked against what the model's module gives in its own precision."""
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "inv_freq")}
    if not found:
        raise EngineError(f"no module of {type(model).__name__} has an inv_freq, expected rotary positions")
    first, module = next(iter(found.items()))
    for name, other in found.items():
        if not torch.equal(other.inv_freq, module.inv_freq):
            raise EngineError(f"{name} has another inv_freq than {first}, expected the same in every layer")
    frequencies = module.inv_freq.float()
    device, positions = frequencies.device, torch.arange(context_limit, device=frequencies.device)
    probe = torch.zeros(1, 1, 1, head_size, device=device)
    if hasattr(module, "cos_cached"):
        angles = torch.outer(positions.float() / getattr(module, "scaling_factor", 1.0), frequencies)
        cos, sin = angles.cos(), angles.sin()
        theirs = module(probe, seq_len=context_limit)
    else:
        theirs = module(probe, positions[None])
        cos, sin = (table.float().view(context_limit, head_size)[:, : head_size // 2].contiguous() for table in theirs)
    for ours, table in zip((cos, sin), theirs, strict=True):
        # bf16 keeps 8 bits; a module may hold its tables in it
        both = table.float().view(context_limit, 2, head_size // 2)
        if not torch.allclose(ours[:, None].expand_as(both), both, rtol=0, atol=2**-8):
            worst = int((ours[:, None] - both).abs().amax((1, 2)).argmax())
            raise EngineError(f"{type(module).__name__} turns position {worst} otherwise than by its inv_freq: not known here")
    return cos, sin


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        if not name.rpartition(".")[2].startswith(("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")):
            yield name, tensor


def _count(stack: Weight) -> int:
    return len(stack.values if isinstance(stack, Int8Weight) else stack)


def _nbytes(weight: Weight | SplitWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.values.nbytes + weight.scales.nbytes
