"""config.json means here what it means to transformers, and what is not supported is said, not skipped."""

import pytest

from sarathi_jax.config import RopeScaling
from sarathi_jax.models.hf_config import model_config_from_hf

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MIXTRAL = SIZES | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
QWEN2 = SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def without(config, key):
    return {k: v for k, v in config.items() if k != key}


def test_the_plain_fields():
    config = model_config_from_hf(LLAMA | {"rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": True})
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (100, 64, 96, 4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 32768)
    assert (config.norm_eps, config.rope_theta, config.tie_embeddings) == (1e-5, 500000.0, True)
    assert config.rope_scaling == RopeScaling()
    assert config.hidden_act == "silu"
    assert model_config_from_hf(LLAMA).norm_eps == 1e-6
    assert not model_config_from_hf(LLAMA).tie_embeddings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (False, False, False, False)),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        (MISTRAL, (False, False, False, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(config, expected):
    c = model_config_from_hf(config)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 16),
        (LLAMA | {"head_dim": 32}, 32),
        (LLAMA | {"head_dim": None}, 16),
        (QWEN3 | {"head_dim": 32}, 32),
        (QWEN3 | {"head_dim": None}, 16),
        (QWEN3, 128),
    ],
)
def test_head_dim_is_explicit_or_hidden_over_heads(config, expected):
    assert model_config_from_hf(config).head_dim == expected


def test_kv_heads_absent_or_null_are_the_heads():
    assert model_config_from_hf(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4
    assert model_config_from_hf(QWEN2 | {"num_key_value_heads": None}).num_kv_heads == 4


FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, None),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 4096}, 4096),
        (LLAMA | {"sliding_window": None}, None),
        (QWEN2, None),
        (QWEN2 | {"sliding_window": 4096}, None),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2}, None),
        (QWEN2 | {"sliding_window": None, "use_sliding_window": True}, None),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4}, None),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, 4096),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "layer_types": [WINDOW] * 4}, 4096),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "layer_types": [FULL] * 4}, None),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": False, "layer_types": [WINDOW] * 4}, None),
        (QWEN3 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, 4096),
    ],
)
def test_sliding_window_is_on_only_where_it_is_asked_for(config, expected):
    parsed = model_config_from_hf(config)
    assert parsed.sliding_window == expected
    assert parsed.max_position == 32768


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL | {"sliding_window": 4096, "layer_types": [FULL, WINDOW] * 2},
        MIXTRAL | {"sliding_window": 4096, "layer_types": [FULL, WINDOW] * 2},
    ],
)
def test_a_window_in_some_layers_is_refused_where_transformers_has_it_in_all(config):
    with pytest.raises(ValueError, match="for some layers only"):
        model_config_from_hf(config)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("default", {}, RopeScaling()),
        ("linear", {"factor": 4.0}, RopeScaling(kind="linear", factor=4.0)),
        ("dynamic", {"factor": 2}, RopeScaling(kind="dynamic", factor=2.0, original_max_position=32768)),
        (
            "llama3",
            LLAMA3,
            RopeScaling(
                kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
            ),
        ),
        ("yarn", {"factor": 4.0}, RopeScaling(kind="yarn", factor=4.0, original_max_position=32768)),
        (
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 8192},
            RopeScaling(kind="yarn", factor=4.0, original_max_position=8192),
        ),
        (
            "yarn",
            {"factor": None, "original_max_position_embeddings": 8192},
            RopeScaling(kind="yarn", factor=4.0, original_max_position=8192),
        ),
        (
            "yarn",
            {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max_position=32768,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.7,
                mscale_all_dim=1.0,
                truncate=False,
            ),
        ),
        (
            "yarn",
            {"factor": 4.0, "attention_factor": 1.25, "beta_fast": None, "finetuned": True},
            RopeScaling(kind="yarn", factor=4.0, original_max_position=32768, attention_factor=1.25),
        ),
    ],
)
def test_rope_in_every_spelling(spelling, field, kind, fields, expected):
    config = model_config_from_hf(LLAMA | {field: {spelling: kind, **fields}})
    assert config.rope_scaling == expected
    assert config.max_position == 32768


def test_a_yarn_mscale_of_zero_is_none_as_in_transformers():
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 0, "mscale_all_dim": 0.0}
    scaling = model_config_from_hf(LLAMA | {"rope_scaling": rope}).rope_scaling
    assert (scaling.mscale, scaling.mscale_all_dim) == (None, None)


def test_the_base_inside_rope_parameters_wins():
    rope = {"rope_type": "default", "rope_theta": 1e6}
    assert model_config_from_hf(LLAMA | {"rope_parameters": rope}).rope_theta == 1e6
    assert model_config_from_hf(LLAMA | {"rope_parameters": rope, "rope_theta": 5.0}).rope_theta == 1e6
    assert model_config_from_hf(LLAMA | {"rope_parameters": {"rope_theta": 1e6}}).rope_theta == 1e6
    assert model_config_from_hf(LLAMA | {"rope_theta": 7, "rope_scaling": None}).rope_theta == 7.0
    assert model_config_from_hf(LLAMA).rope_theta == 10000.0


def test_the_original_length_beside_the_rope_fields_is_used():
    config = LLAMA | {"original_max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    assert model_config_from_hf(config).rope_scaling.original_max_position == 4096


def test_a_rope_field_that_its_kind_does_not_use_is_warned_about():
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}
    with pytest.warns(UserWarning, match="original_max_position_embeddings"):
        config = model_config_from_hf(LLAMA | {"rope_scaling": rope})
    assert config.rope_scaling.original_max_position == 32768


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' needs 'short_factor'"),
        ({"type": "mrope", "mrope_section": [1]}, "'mrope' is not supported"),
        ({"factor": 4.0}, "no 'rope_type'"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": "4"}, "finite number"),
        ({"rope_type": "linear", "factor": 0.5}, r"factor=0\.5"),
        ({"rope_type": "yarn", "factor": 4.0, "mystery": 1}, "mystery"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1.0}, r"beta_fast=-1\.0"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -5.0}, r"attention_factor=-5\.0"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "false"}, "truncate='false'"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position.*=0"),
        ({"rope_type": "yarn", "factor": 10**400}, "factor.*finite number"),
        ({"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}, r"rope_theta=1\.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({FULL: {"rope_type": "default"}, WINDOW: {"rope_type": "default"}}, "flat object"),
        ([1], "flat object"),
    ],
)
def test_a_rope_that_is_not_understood_is_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(LLAMA | {"rope_scaling": rope})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
    ],
)
def test_activations(name, expected):
    assert model_config_from_hf(LLAMA | {"hidden_act": name}).hidden_act == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "xielu"}, "hidden_act='xielu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_experts": 8}, "num_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": [WINDOW] * 4}, "sliding_attention"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": 66}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.*finite number"),
        ({"rope_theta": 10**400}, "rope_theta=1000.*finite number"),
        ({"rope_theta": -(10**400)}, "rope_theta=-1000.*finite number"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings=1000"),
        (
            {"max_position_embeddings": 10**400, "rope_scaling": {"rope_type": "yarn"}},
            "max_position_embeddings=1000.*32 bits",
        ),
        (
            {"hidden_size": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "head_dim=2 has no 'dynamic' rope",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(LLAMA | change)


@pytest.mark.parametrize("key", [k for k in SIZES if k != "num_key_value_heads"])
def test_a_missing_size_is_named(key):
    with pytest.raises(ValueError, match=key):
        model_config_from_hf(without(LLAMA, key))


def test_fields_that_ask_for_nothing_pass():
    harmless = {"num_experts": 0, "partial_rotary_factor": 1.0, "quantization_config": None, "pretraining_tp": 2}
    assert model_config_from_hf(LLAMA | harmless) == model_config_from_hf(LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, r"GemmaForCausalLM.*known: LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, "qwen2"),
        ({"architectures": None, "model_type": None}, "known"),
        ({"architectures": 5}, "known"),
    ],
)
def test_unknown_architectures_are_refused_with_the_known_ones(change, message):
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(LLAMA | change)


def test_either_architectures_or_model_type_is_enough():
    assert model_config_from_hf(without(QWEN2, "model_type")).architecture == "Qwen2ForCausalLM"
    assert model_config_from_hf(without(QWEN2, "architectures")).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("config", [MISTRAL | {"attention_bias": True}, QWEN2 | {"mlp_bias": True}])
def test_a_bias_the_family_does_not_have_is_refused(config):
    with pytest.raises(ValueError, match="bias=True is not supported for"):
        model_config_from_hf(config)
