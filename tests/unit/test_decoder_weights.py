"""The weights of a decoder: all of them, in no second copy, and refused where a model has something that is not known here."""

import copy

import pytest
import torch
from engines import loaded
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from dispatch.decoder_weights import decoder_weights
from dispatch.engine import Engine
from dispatch.errors import EngineError
from dispatch.quantization import Int8Weight


def take(model):
    return decoder_weights(model, context_limit=64)


@pytest.fixture
def tiny():
    return copy.deepcopy(loaded("tiny").model)


def small(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def llama(**changes):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **changes})


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 32}], ids=str)
@torch.inference_mode()
def test_llamas_of_several_kinds(changes):
    model = small(llama(**changes))
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias)
    tokens = torch.arange(40)
    expected = model(input_ids=tokens[None], use_cache=False).logits[0]
    found = Engine(take(model)).forward(tokens.tolist())
    # logits of at most 2 after some ten fp32 products in another order
    assert float(expected.abs().max()) < 2
    assert torch.allclose(found, expected, rtol=0, atol=40 * 2**-24)


@torch.inference_mode()
def test_scaled_rotary_positions_are_the_models():
    model = small(llama(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    expected = model(input_ids=torch.arange(40)[None], use_cache=False).logits[0]
    assert torch.allclose(Engine(take(model)).forward(list(range(40))), expected, rtol=0, atol=40 * 2**-24)


@pytest.mark.parametrize("name", ["tiny", "tiny-int8-experts", "tiny-int8-all"])
@torch.inference_mode()
def test_the_model_keeps_its_weights_in_the_same_memory(name):
    model = copy.deepcopy(loaded(name).model)
    expected = model(input_ids=torch.arange(9)[None], use_cache=False).logits
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = take(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(model(input_ids=torch.arange(9)[None], use_cache=False).logits, expected)
    kept = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    for layer in found.layers:
        stacks = [layer.qkv, layer.out, *((block.gate_up, block.down) for block in (layer.dense, layer.experts) if block)]
        for stack in stacks:
            for weight in stack if isinstance(stack, tuple) else [stack]:
                values = weight.values if isinstance(weight, Int8Weight) else weight
                assert values.untyped_storage().data_ptr() in kept
    # and the engine computes what the model's code does after its weights have moved
    assert float((Engine(found).forward(list(range(9))) - expected[0]).abs().max()) < 0.02


def test_bytes_read_for_a_token():
    # of the 16 experts 4 are read; counted by hand from config.json of tiny, in int8 with an fp32 scale a channel
    def matrix(rows, columns, size=1):
        return rows * (columns * size + 4)

    attention = matrix(4 * 192, 192) + 2 * 192 * 4
    dense = matrix(2 * 512, 192) + matrix(192, 512)
    expert = matrix(2 * 96, 192) + matrix(192, 96)
    shared = matrix(2 * 192, 192) + matrix(192, 192)
    moe = 4 * expert + shared + matrix(16, 192, size=2)
    total = 4 * attention + dense + 3 * moe + matrix(2048, 192) + 192 * 4 + 192 * 4
    assert take(loaded("tiny-int8-all").model).nbytes_per_token() == total


def poke(path, value):
    """A change of the model: an attribute at a dotted path, of a module or of the config."""

    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.config if parent == "config" else model.get_submodule(parent), name, value)

    return change


REFUSALS = {
    "another module": (poke("model.layers.1.self_attn.q_norm", nn.LayerNorm(8)), "has 2 tensors that are no part of a decoder"),
    "a hidden parameter": (
        poke("model.layers.2.mlp.gate.bias", nn.Parameter(torch.zeros(16))),
        "1 tensors .* no part of a decoder known here: model.layers.2.mlp.gate.bias",
    ),
    "a correction of scores": (lambda m: m.model.layers[2].mlp.gate.register_buffer("bias", torch.zeros(16)), "mlp.gate.bias"),
    "GELU": (poke("model.layers.0.mlp.act_fn", nn.GELU()), "model.layers.0.mlp has the activation .*, expected SiLU"),
    "GELU in one expert": (
        poke("model.layers.3.mlp.experts.5.act_fn", nn.GELU()),
        "layers.3.mlp.experts.5 has the act",
    ),
    "a bias in the feed-forward block": (
        lambda m: [poke(f"model.layers.0.mlp.{p}_proj.bias", nn.Parameter(torch.zeros(512)))(m) for p in ("gate", "up")],
        "model.layers.0.mlp has a bias",
    ),
    "one bias of three": (poke("model.layers.0.self_attn.k_proj.bias", nn.Parameter(torch.zeros(192))), "only 1 have a bias"),
    "another linear layer": (poke("model.layers.0.self_attn.o_proj", nn.Bilinear(1, 1, 1)), "is a Bilinear, expected linear"),
    "another eps": (poke("model.norm.variance_epsilon", 1e-5), r"norms with eps \[1e-06, 1e-05\], expected one"),
    "no eps": (poke("model.norm.variance_epsilon", None), "model.norm is a TinyMoeRMSNorm without variance_epsilon"),
    "other angles": (
        poke("model.layers.0.self_attn.rotary_emb.forward", lambda x, seq_len: 2 * (torch.ones(seq_len, 32),)),
        "turns position .* otherwise than by its inv_freq",
    ),
    "other angles in one layer": (
        lambda m: m.model.layers[2].self_attn.rotary_emb.inv_freq.mul_(1.001),
        "model.layers.2.self_attn.rotary_emb has another inv_freq than model.layers.0.self_attn.rotary_emb",
    ),
    "sigmoid scores": (poke("config.scoring_func", "sigmoid"), "config.scoring_func is 'sigmoid'"),
    "groups of experts": (poke("config.topk_method", "group_limited_greedy"), "config.topk_method is 'group_limited_greedy'"),
    "a factor": (poke("config.routed_scaling_factor", 2.5), "config.routed_scaling_factor is 2.5"),
    "a window": (poke("config.sliding_window", 128), "config.sliding_window is 128"),
    "small heads": (poke("config.head_dim", 8), "heads have 8 dimensions, expected a multiple of 16"),
    "no head": (lambda m: delattr(m, "lm_head"), "has no model.embed_tokens, .* and lm_head: not a decoder known here"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_not_known_is_refused(tiny, refusal):
    change, message = REFUSALS[refusal]
    change(tiny)
    with pytest.raises(EngineError, match=message):
        take(tiny)


def test_another_architecture_is_refused():
    model = small(
        Qwen2Config(**{k: v for k, v in llama().to_dict().items() if k.startswith(("hidden_s", "inter", "num", "vocab"))})
    )
    # Qwen2 has biases in q, k and v only, which is fine; what it does with a window is not
    model.config.sliding_window = 32
    with pytest.raises(EngineError, match="config.sliding_window is 32, and only None is known here"):
        take(model)
