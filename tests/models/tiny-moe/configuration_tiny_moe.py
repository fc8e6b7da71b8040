"""Configuration of tiny-moe: the field names of DeepSeek-MoE V1, at a size that trains on a laptop CPU."""

from transformers.configuration_utils import PretrainedConfig


class TinyMoeConfig(PretrainedConfig):
    """Sizes of the decoder. The comment beside a value is what DeepSeek-MoE-16B has there."""

    model_type = "tiny_moe"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size=2048,  # 102400
        hidden_size=192,  # 2048
        intermediate_size=512,  # 10944, the first layer's dense feed-forward
        moe_intermediate_size=96,  # 1408, one routed expert
        num_hidden_layers=4,  # 28
        num_attention_heads=6,  # 16
        num_key_value_heads=6,  # 16
        n_shared_experts=2,
        n_routed_experts=16,  # 64
        num_experts_per_tok=4,  # 6
        moe_layer_freq=1,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        scoring_func="softmax",
        aux_loss_alpha=0.01,  # 0.001
        hidden_act="silu",
        max_position_embeddings=256,  # 4096
        initializer_range=0.02,
        rms_norm_eps=1e-6,
        use_cache=True,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.n_shared_experts = n_shared_experts
        self.n_routed_experts = n_routed_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_layer_freq = moe_layer_freq
        self.first_k_dense_replace = first_k_dense_replace
        self.norm_topk_prob = norm_topk_prob
        self.scoring_func = scoring_func
        self.aux_loss_alpha = aux_loss_alpha
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.attention_bias = attention_bias
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
