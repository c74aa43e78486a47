"""The models of tiny/, which `make_tiny.py` makes: small configurations of every family, with what sets it apart."""

from __future__ import annotations

VOCAB = 96
ORIGINAL = 100  # trained context of the models whose positions depend on the length of the sequence

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str = "default", theta: float = 10000.0, **fields) -> dict:
    """The `rope_parameters` of a configuration."""
    return {"rope_type": kind, "rope_theta": theta, **fields}


def longrope(size: int) -> dict:
    """Short and long factors for `size` frequencies, far from one and from each other."""
    short = [1.0 + 0.1 * i for i in range(size)]
    return rope(
        "longrope", short_factor=short, long_factor=[2.0 + 1.5 * i for i in range(size)],
        original_max_position_embeddings=ORIGINAL,
    )  # fmt: skip


# name: (configuration class, seed, what differs from SHAPE; None takes a field away). The models of one seed and shape
# have the same weights.
MODELS: dict[str, tuple[str, int, dict]] = {
    "llama_default": ("LlamaConfig", 10, {"rope_parameters": rope(), "rms_norm_eps": 1e-5}),
    "llama_tied": (
        "LlamaConfig",
        11,
        {"rope_parameters": rope(theta=500.0), "rms_norm_eps": 1e-2, "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama_linear": ("LlamaConfig", 10, {"rope_parameters": rope("linear", factor=4.0), "rms_norm_eps": 1e-5}),
    "llama_dynamic": (
        "LlamaConfig",
        10,
        {"rope_parameters": rope("dynamic", factor=2.0), "rms_norm_eps": 1e-5, "max_position_embeddings": ORIGINAL},
    ),
    "llama_llama3": ("LlamaConfig", 10, {"rope_parameters": rope("llama3", **LLAMA3), "rms_norm_eps": 1e-5}),
    "llama_yarn": (
        "LlamaConfig",
        10,
        {"rope_parameters": rope("yarn", **YARN), "rms_norm_eps": 1e-5, "max_position_embeddings": 256},
    ),
    "llama_bias": (
        "LlamaConfig",
        12,
        {"rope_parameters": rope(), "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    ),
    "yi": (
        "LlamaConfig",
        28,
        {
            "rope_parameters": rope(theta=5000000.0),
            "rms_norm_eps": 1e-5,
            "hidden_size": 84,
            "num_attention_heads": 14,
            "head_dim": None,
        },
    ),
    "mistral_window": ("MistralConfig", 13, {"rope_parameters": rope(), "rms_norm_eps": 1e-5, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", 14, {"rope_parameters": rope(theta=1000000.0), "rms_norm_eps": 1e-6, "head_dim": None}),
    "qwen3": (
        "Qwen3Config",
        15,
        {
            "rope_parameters": rope(theta=1000000.0),
            "rms_norm_eps": 1e-2,
            "head_dim": 32,
            "intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_window": (
        "Qwen2Config",
        16,
        {
            "rope_parameters": rope("yarn", **YARN),
            "head_dim": None,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 30,
            "max_window_layers": 2,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        17,
        {
            "rope_parameters": rope("linear", factor=2.0),
            "num_hidden_layers": 3,
            "sliding_window": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        18,
        {
            "rope_parameters": rope("yarn", **YARN),
            "head_dim": 24,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        19,
        {
            "rope_parameters": rope("linear", factor=2.0),
            "num_hidden_layers": 5,
            "sliding_window": 28,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        20,
        {
            "rope_parameters": {
                "full_attention": rope("linear", theta=1000000.0, factor=8.0),
                "sliding_attention": rope(theta=100.0),
            },
            "num_hidden_layers": 7,
            "sliding_window": 28,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
        },
    ),
    "phi3": (
        "Phi3Config",
        21,
        {
            "rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75},
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": None,
            "original_max_position_embeddings": ORIGINAL,
            "pad_token_id": 0,
            "sliding_window": 60,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        22,
        {
            "rope_parameters": rope("llama3", theta=2000000.0, **LLAMA3),
            "num_hidden_layers": 5,
            "head_dim": None,
            "no_rope_layer_interval": 3,
            "pad_token_id": 0,
        },
    ),
    "falcon_7b": (
        "FalconConfig",
        23,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "rope_parameters": rope("linear", factor=2.0),
            "ffn_hidden_size": 40,
        },
    ),
    "falcon_40b": (
        "FalconConfig",
        24,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "rope_parameters": rope(theta=500.0),
            "ffn_hidden_size": 40,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_11b": (
        "FalconConfig",
        29,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "rope_parameters": rope(theta=500042.0),
            "ffn_hidden_size": 40,
            "num_attention_heads": 8,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_sequential": (
        "FalconConfig",
        30,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "rope_parameters": rope(),
            "ffn_hidden_size": 40,
            "parallel_attn": False,
            "multi_query": False,
            "bias": True,
        },
    ),
    "opt": (
        "OPTConfig",
        25,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "ffn_dim": 40,
            "word_embed_proj_dim": 48,
            "num_hidden_layers": 3,
            "pad_token_id": 1,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        26,
        {
            **dict.fromkeys(("num_key_value_heads", "head_dim")),
            "rope_parameters": rope("linear", factor=2.0, partial_rotary_factor=0.5),
        },
    ),
    "gpt_neox_sequential": (
        "GPTNeoXConfig",
        27,
        {
            **dict.fromkeys(("num_key_value_heads", "head_dim")),
            "rope_parameters": rope(partial_rotary_factor=0.5),
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
        },
    ),
}
HALF = ("falcon_7b", "falcon_11b", "falcon_sequential", "mixtral", "qwen3_moe", "yi")
STORED_DTYPE = {**dict.fromkeys(HALF, "bfloat16"), "falcon_40b": "float16"}
SHARDED = {"gemma2": "60KB"}
HAS_SHORT = ("llama_dynamic", "phi3")
