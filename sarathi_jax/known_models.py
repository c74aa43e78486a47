"""Shapes of published models, as their config.json has them: to simulate, to plan memory for, to fill with noise.

Every value has been compared with copies of those files or with other projects' tables of them, but for three that none
was found for: the rotary base of yi-34b-200k, and Yi's norm epsilon and untied head.
"""

from __future__ import annotations

from dataclasses import replace

from sarathi_jax.config import ModelConfig

_MISTRAL = ModelConfig(
    architecture="MistralForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=32768,
    sliding_window=4096,
)
_LLAMA2_7B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position=4096,
)
_LLAMA2_70B = replace(
    _LLAMA2_7B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8
)
_LLAMA3_8B = replace(
    _LLAMA2_7B,
    vocab_size=128256,
    intermediate_size=14336,
    num_kv_heads=8,
    max_position=8192,
    rope_theta=500000.0,
)
_YI_34B = replace(
    _LLAMA2_7B,
    vocab_size=64000,
    hidden_size=7168,
    intermediate_size=20480,
    num_layers=60,
    num_heads=56,
    num_kv_heads=8,
    rope_theta=5e6,
)
_FALCON_7B = ModelConfig(
    architecture="FalconForCausalLM",
    vocab_size=65024,
    hidden_size=4544,
    intermediate_size=18176,
    num_layers=32,
    num_heads=71,
    num_kv_heads=1,
    head_dim=64,
    max_position=2048,
    block="parallel_shared_norm",
    norm="layer",
    hidden_act="gelu",
    gated_mlp=False,
    tie_embeddings=True,
)
_FALCON_40B = replace(
    _FALCON_7B,
    hidden_size=8192,
    intermediate_size=32768,
    num_layers=60,
    num_heads=128,
    num_kv_heads=8,
    block="parallel",
)
_QWEN2_5_7B = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_position=131072,
    norm_eps=1e-6,
    rope_theta=1e6,
    qkv_bias=True,
)
_QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
)

MODELS: dict[str, ModelConfig] = {
    # The four of the paper; it ran the 200K variant of Yi.
    "mistral-7b": _MISTRAL,
    "yi-34b": _YI_34B,
    "yi-34b-200k": replace(_YI_34B, max_position=200000, rope_theta=1e7),
    "llama2-70b": _LLAMA2_70B,
    "falcon-180b": replace(_FALCON_40B, hidden_size=14848, intermediate_size=59392, num_layers=80, num_heads=232),
    # Others.
    "codellama-34b": replace(_LLAMA2_70B, intermediate_size=22016, num_layers=48, max_position=16384, rope_theta=1e6),
    "falcon-7b": _FALCON_7B,
    "falcon-40b": _FALCON_40B,
    "gemma2-9b": ModelConfig(
        architecture="Gemma2ForCausalLM",
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_layers=42,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        max_position=8192,
        norm_eps=1e-6,
        norm_offset=1.0,
        post_norms=True,
        hidden_act="gelu_tanh",
        sliding_window=4096,
        window_pattern=(True, False),
        query_scale=256**-0.5,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        embed_scale=3584**0.5,
        tie_embeddings=True,
    ),
    "llama2-7b": _LLAMA2_7B,
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": replace(_LLAMA3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    "mixtral-8x7b": replace(
        _MISTRAL,
        architecture="MixtralForCausalLM",
        sliding_window=None,
        rope_theta=1e6,
        num_experts=8,
        experts_per_token=2,
        expert_size=14336,
    ),
    "opt-13b": ModelConfig(
        architecture="OPTForCausalLM",
        vocab_size=50272,
        hidden_size=5120,
        intermediate_size=20480,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        max_position=2048,
        norm="layer",
        hidden_act="relu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        positions="learned",
        tie_embeddings=True,
    ),
    "phi3-mini-4k": ModelConfig(
        architecture="Phi3ForCausalLM",
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=96,
        max_position=4096,
        sliding_window=2047,
    ),
    "qwen2.5-7b": _QWEN2_5_7B,
    "qwen2.5-32b": replace(
        _QWEN2_5_7B,
        hidden_size=5120,
        intermediate_size=27648,
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        norm_eps=1e-5,
    ),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-32b": replace(_QWEN3_8B, hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
    "qwen3-30b-a3b": replace(
        _QWEN3_8B,
        architecture="Qwen3MoeForCausalLM",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_kv_heads=4,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
    ),
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope_theta=100000.0,
        tie_embeddings=True,
    ),
}


def model_config(name: str) -> ModelConfig:
    """The shape of a model of `MODELS`; ValueError for any other name."""
    if name not in MODELS:
        raise ValueError(f"model {name!r} is not known; known: {', '.join(sorted(MODELS))}")
    return MODELS[name]
