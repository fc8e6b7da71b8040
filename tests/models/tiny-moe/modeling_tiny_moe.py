"""tiny-moe: the DeepSeekMoE decoder (arXiv:2401.06066) at toy size, as remote code written for transformers 4.3x.

Do not modernise this file. It calls transformers the way DeepSeek-MoE-16B's remote code does, so that what transformers 5.x
removed or changed breaks here for the same reasons, and the repairs in `dispatch/repairs.py` are exercised for real.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_attn_mask_utils import (
    AttentionMaskConverter,  # noqa: F401  (imported and unused, as in the original)
    _prepare_4d_attention_mask,  # noqa: F401
    _prepare_4d_causal_attention_mask,
    _prepare_4d_causal_attention_mask_for_sdpa,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,  # noqa: F401
)
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS, is_torch_greater_or_equal_than_1_13  # noqa: F401
from transformers.utils import (  # noqa: F401
    add_start_docstrings,
    add_start_docstrings_to_model_forward,
    is_flash_attn_2_available,
    is_flash_attn_greater_or_equal_2_10,
    replace_return_docstrings,
)
from transformers.utils.import_utils import is_torch_fx_available

from .configuration_tiny_moe import TinyMoeConfig

if is_torch_fx_available():
    _prepare_4d_causal_attention_mask = torch.fx.wrap("_prepare_4d_causal_attention_mask")


class TinyMoeRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class TinyMoeRotaryEmbedding(nn.Module):
    """Rotary angles (arXiv:2104.09864); cos and sin are tables [positions, dim], made at first use and when they run out."""

    def __init__(self, dim, max_position_embeddings=2048, base=10000, device=None):
        super().__init__()
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).float().to(device) / self.dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._set_cos_sin_cache(max_position_embeddings, self.inv_freq.device, torch.get_default_dtype())
        self.max_seq_len_cached = None

    def _positions(self, device):
        return torch.arange(self.max_seq_len_cached, device=device, dtype=self.inv_freq.dtype)

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        self.max_seq_len_cached = seq_len
        freqs = torch.outer(self._positions(device), self.inv_freq.to(device))
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", emb.sin().to(dtype), persistent=False)

    def forward(self, x, seq_len=None):
        if self.max_seq_len_cached is None or seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len, x.device, x.dtype)
        return self.cos_cached[:seq_len].to(x.dtype), self.sin_cached[:seq_len].to(x.dtype)


class TinyMoeLinearScalingRotaryEmbedding(TinyMoeRotaryEmbedding):
    """Position interpolation: positions divided by scaling_factor."""

    def __init__(self, dim, max_position_embeddings=2048, base=10000, device=None, scaling_factor=1.0):
        self.scaling_factor = scaling_factor
        super().__init__(dim, max_position_embeddings, base, device)

    def _positions(self, device):
        return super()._positions(device) / self.scaling_factor


class TinyMoeDynamicNTKScalingRotaryEmbedding(TinyMoeRotaryEmbedding):
    """Dynamic NTK: the base grows once the sequence is longer than the trained context."""

    def __init__(self, dim, max_position_embeddings=2048, base=10000, device=None, scaling_factor=1.0):
        self.scaling_factor = scaling_factor
        super().__init__(dim, max_position_embeddings, base, device)

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        if seq_len > self.max_position_embeddings:
            growth = self.scaling_factor * seq_len / self.max_position_embeddings - (self.scaling_factor - 1)
            base = self.base * growth ** (self.dim / (self.dim - 2))
            inv_freq = 1.0 / (base ** (torch.arange(0, self.dim, 2).float().to(device) / self.dim))
            self.register_buffer("inv_freq", inv_freq, persistent=False)
        super()._set_cos_sin_cache(seq_len, device, dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids):
    cos = cos[position_ids].unsqueeze(1)
    sin = sin[position_ids].unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class TinyMoeMLP(nn.Module):
    """SwiGLU feed-forward; one expert, the shared experts together, or the first layer's dense block."""

    def __init__(self, config, hidden_size=None, intermediate_size=None):
        super().__init__()
        self.hidden_size = config.hidden_size if hidden_size is None else hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MoEGate(nn.Module):
    """Softmax over the routed experts, top-k of it, and in training the expert-level balance loss (section 3.3)."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.n_routed_experts = config.n_routed_experts
        self.alpha = config.aux_loss_alpha
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(self.n_routed_experts, config.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, hidden_states):
        scores = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight).softmax(dim=-1)
        topk_weight, topk_idx = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        if self.norm_topk_prob:
            topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
        aux_loss = None
        if self.training and self.alpha > 0.0:
            load = F.one_hot(topk_idx.reshape(-1), self.n_routed_experts).float().mean(0) * self.n_routed_experts
            aux_loss = (scores.mean(0) * load).sum() * self.alpha
        return topk_idx, topk_weight, aux_loss


class TinyMoeMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.num_experts_per_tok = config.num_experts_per_tok
        self.experts = nn.ModuleList(
            [TinyMoeMLP(config, intermediate_size=config.moe_intermediate_size) for _ in range(config.n_routed_experts)]
        )
        self.gate = MoEGate(config)
        self.aux_loss = None
        if config.n_shared_experts is not None:
            self.shared_experts = TinyMoeMLP(
                config, intermediate_size=config.moe_intermediate_size * config.n_shared_experts
            )

    def forward(self, hidden_states):
        identity = hidden_states
        shape = hidden_states.shape
        topk_idx, topk_weight, aux_loss = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, shape[-1])
        flat_topk_idx = topk_idx.view(-1)
        if self.training:
            self.aux_loss = aux_loss  # the training script adds it to the loss
            order = flat_topk_idx.argsort()
            counts = torch.bincount(flat_topk_idx, minlength=len(self.experts)).tolist()
            rows = order // self.num_experts_per_tok
            pieces = hidden_states[rows].split(counts)
            outputs = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces)])
            y = torch.zeros_like(hidden_states).index_add(0, rows, outputs * topk_weight.view(-1, 1)[order])
            y = y.view(*shape)
        else:
            y = self.moe_infer(hidden_states, flat_topk_idx, topk_weight.view(-1, 1)).view(*shape)
        if self.config.n_shared_experts is not None:
            y = y + self.shared_experts(identity)
        return y

    @torch.no_grad()
    def moe_infer(self, x, flat_expert_indices, flat_expert_weights):
        expert_cache = torch.zeros_like(x)
        order = flat_expert_indices.argsort()
        ends = flat_expert_indices.bincount().cpu().numpy().cumsum(0)
        token_idxs = order // self.num_experts_per_tok
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            rows = token_idxs[start:end]
            expert_out = self.experts[i](x[rows]) * flat_expert_weights[order[start:end]]
            expert_cache.index_add_(0, rows, expert_out)
        return expert_cache


class TinyMoeAttention(nn.Module):
    """Causal multi-head attention; scores in the open ("eager") or through scaled_dot_product_attention ("sdpa")."""

    def __init__(self, config, layer_idx=None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(self.hidden_size, self.hidden_size, bias=config.attention_bias))
        self._init_rope()

    def _init_rope(self):
        kwargs = dict(max_position_embeddings=self.config.max_position_embeddings, base=self.config.rope_theta)
        if self.config.rope_scaling is None:
            self.rotary_emb = TinyMoeRotaryEmbedding(self.head_dim, **kwargs)
            return
        scaling_type = self.config.rope_scaling["type"]
        kwargs["scaling_factor"] = self.config.rope_scaling["factor"]
        if scaling_type == "linear":
            self.rotary_emb = TinyMoeLinearScalingRotaryEmbedding(self.head_dim, **kwargs)
        elif scaling_type == "dynamic":
            self.rotary_emb = TinyMoeDynamicNTKScalingRotaryEmbedding(self.head_dim, **kwargs)
        else:
            raise ValueError(f"Unknown RoPE scaling type {scaling_type}")

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None):
        batch, q_len, _ = hidden_states.shape
        q, k, v = (
            proj(hidden_states).view(batch, q_len, self.num_heads, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        kv_seq_len = k.shape[-2]
        if past_key_value is not None:
            kv_seq_len += past_key_value.get_usable_length(kv_seq_len, self.layer_idx)
        cos, sin = self.rotary_emb(v, seq_len=kv_seq_len)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, position_ids)
        if past_key_value is not None:
            k, v = past_key_value.update(k, v, self.layer_idx, {"sin": sin, "cos": cos})
        if self.config._attn_implementation == "sdpa":
            attn_output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None and q_len > 1
            )
        else:
            attn_weights = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
            if attention_mask is not None:
                attn_weights = attn_weights + attention_mask
            attn_output = attn_weights.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
        return self.o_proj(attn_output.transpose(1, 2).reshape(batch, q_len, self.hidden_size))


class TinyMoeDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = TinyMoeAttention(config, layer_idx)
        is_moe = layer_idx >= config.first_k_dense_replace and layer_idx % config.moe_layer_freq == 0
        self.mlp = TinyMoeMoE(config) if is_moe else TinyMoeMLP(config)
        self.input_layernorm = TinyMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = TinyMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), attention_mask, position_ids, past_key_value
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TinyMoePreTrainedModel(PreTrainedModel):
    config_class = TinyMoeConfig
    base_model_prefix = "model"
    _no_split_modules = ["TinyMoeDecoderLayer"]
    _supports_sdpa = True
    _supports_cache_class = True

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)


class TinyMoeModel(TinyMoePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyMoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = TinyMoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None
    ):
        use_cache = self.config.use_cache if use_cache is None else use_cache
        batch, seq_length = input_ids.shape
        past_key_values_length = 0
        if use_cache:
            use_legacy_cache = not isinstance(past_key_values, Cache)
            if use_legacy_cache:
                past_key_values = DynamicCache.from_legacy_cache(past_key_values)
            past_key_values_length = past_key_values.get_usable_length(seq_length)
        if position_ids is None:
            position_ids = torch.arange(
                past_key_values_length, seq_length + past_key_values_length, device=input_ids.device
            ).unsqueeze(0)
        hidden_states = self.embed_tokens(input_ids)
        prepare_mask = (
            _prepare_4d_causal_attention_mask_for_sdpa
            if self.config._attn_implementation == "sdpa"
            else _prepare_4d_causal_attention_mask
        )
        attention_mask = prepare_mask(attention_mask, (batch, seq_length), hidden_states, past_key_values_length)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states, attention_mask, position_ids, past_key_values if use_cache else None
            )
        hidden_states = self.norm(hidden_states)
        next_cache = None
        if use_cache:
            next_cache = past_key_values.to_legacy_cache() if use_legacy_cache else past_key_values
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=next_cache)


class TinyMoeForCausalLM(TinyMoePreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = new_embeddings

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None
    ):
        outputs = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        logits = self.lm_head(outputs.last_hidden_state).float()
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        if past_key_values is not None:
            past_length = past_key_values.seen_tokens
            if past_length < input_ids.shape[1]:
                input_ids = input_ids[:, past_length:]
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
            "attention_mask": attention_mask,
        }
