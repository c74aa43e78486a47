"""Model and cache configuration: refused where it makes no sense, and the parameter count is the model's."""

import dataclasses

import pytest

from sarathi_jax.config import CacheConfig, ModelConfig, RopeScaling, check_positive

SMOLLM2 = {
    "architecture": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "max_position": 8192,
    "tie_embeddings": True,
}


def model(**changes):
    return ModelConfig(**{**SMOLLM2, **changes})


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, float("nan")])
def test_check_positive(value):
    with pytest.raises(ValueError, match=r"x=.* must be an integer >= 1; turn y"):
        check_positive("x", value, knob="turn y")
    check_positive("x", 1)


def count(c):
    """Every weight on its own, from its shape."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    d, f, e = c.hidden_size, c.intermediate_size, c.expert_size
    norm = [d] if c.norm == "rms" else [d, d]
    total = sum(norm) + c.vocab_size * d + (0 if c.tie_embeddings else c.vocab_size * d)
    total += c.max_position * d if c.positions == "learned" else 0
    for layer in range(c.num_layers):
        parts = [d * q, d * kv, d * kv, q * d, *norm]
        parts += [] if c.block == "parallel_shared_norm" else norm
        parts += norm + norm if c.post_norms else []
        parts += [q, kv, kv] if c.qkv_bias else []
        parts += [d] if c.o_bias else []
        parts += [c.head_dim, c.head_dim] if c.qk_norm else []
        if c.num_experts and c.moe_pattern[layer % len(c.moe_pattern)]:
            parts += [d * c.num_experts] + [d * e, d * e, e * d] * c.num_experts
        else:
            parts += [d * f, f * d] + ([d * f] if c.gated_mlp else [])
            parts += ([f, d] + ([f] if c.gated_mlp else [])) if c.mlp_bias else []
        total += sum(parts)
    return total


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_size": 100}


@pytest.mark.parametrize(
    "changes",
    [
        *[{}, {"tie_embeddings": False}, {"head_dim": 32}],
        *[{name: True} for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "post_norms")],
        *[{"norm": "layer", "block": block} for block in ("sequential", "parallel", "parallel_shared_norm")],
        {"gated_mlp": False, "mlp_bias": True, "positions": "learned"},
        EXPERTS,
        EXPERTS | {"moe_pattern": (False, True, True)},
    ],
)
def test_num_params_is_the_sum_of_all_weights(changes):
    assert model(**changes).num_params == count(model(**changes))


def test_num_params_of_smollm2_135m():
    assert model().num_params == 134_515_008
    assert model().num_groups == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, 0) for name, value in SMOLLM2.items() if type(value) is int]
    + [
        ("num_layers", True),
        ("num_layers", 1001),
        ("hidden_size", 576.0),
        ("num_kv_heads", 2),
        ("head_dim", 63),
        ("sliding_window", 0),
    ]
    + [(name, value) for name in ("norm_eps", "rope_theta") for value in (0, -1.0, float("nan"), float("inf"), 10**400)]
    + [("rope_theta", 1), ("rope_theta", 0.5), ("rotary_dim", 7), ("rotary_dim", 66), ("rotary_dim", 0)]
    + [("norm_offset", -1.0), ("embed_scale", 0.0), ("query_scale", 0.0), ("qk_norm", 1), ("post_norms", None)]
    + [(name, "other") for name in ("block", "norm", "positions", "hidden_act")]
    + [(f"{name}_pattern", value) for name in ("rope", "window", "moe") for value in ((), [True], (1,))]
    + [("window_pattern", (True, False)), ("local_rope_theta", 100.0)]  # without a window
    + [(name, value) for name in ("attention_soft_cap", "logit_soft_cap") for value in (0.0, -1.0, float("nan"))],
)
def test_a_bad_model_is_refused_by_field(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        model(**{field: value})


def test_unknown_keys_raise():
    with pytest.raises(TypeError, match="num_banks"):
        model(num_banks=8)


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        model().num_layers = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().page_size = 1


@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, float("nan"), float("inf")])
def test_rope_factor(factor):
    with pytest.raises(ValueError, match="factor="):
        RopeScaling(kind="linear", factor=factor)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "dynamic"])
def test_rope_kinds_that_need_the_trained_context(kind):
    with pytest.raises(ValueError, match=f"{kind}.*original_max_position"):
        RopeScaling(kind=kind, factor=2.0)
    assert RopeScaling(kind=kind, factor=2.0, original_max_position=4096).factor == 2.0


@pytest.mark.parametrize("value", [0, -1, 4096.0, True])
def test_the_trained_context_is_a_length(value):
    with pytest.raises(ValueError, match=f"original_max_position={value}"):
        RopeScaling(kind="yarn", factor=2.0, original_max_position=value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama3", {"low_freq_factor": 4.0}, r"low_freq_factor=4\.0.*high_freq_factor=4\.0"),
        ("llama3", {"low_freq_factor": 8.0}, r"low_freq_factor=8\.0.*high_freq_factor=4\.0"),
        ("yarn", {"beta_fast": 1.0}, r"beta_slow=1\.0.*beta_fast=1\.0"),
        ("yarn", {"beta_slow": 64}, r"beta_slow=64.*beta_fast=32"),
        *[
            ("yarn", {name: value}, f"{name}=")
            for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
            for value in (0, -1.0, float("nan"), float("inf"), "1", 10**400)
        ],
        *[
            ("llama3", {name: value}, f"{name}=")
            for name in ("low_freq_factor", "high_freq_factor")
            for value in (0, -1.0, float("nan"), float("inf"))
        ],
    ],
)
def test_a_rope_that_would_divide_by_zero_is_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(kind=kind, factor=2.0, original_max_position=4096, **fields)


def test_a_dynamic_rope_needs_more_than_one_frequency():
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_position=64)
    with pytest.raises(ValueError, match="head_dim=2"):
        model(head_dim=2, rope_scaling=scaling)
    assert model(head_dim=4, rope_scaling=scaling).head_dim == 4
    assert model(head_dim=2).head_dim == 2


def test_unknown_rope_kind_lists_the_known():
    with pytest.raises(ValueError, match=r"'su' is not supported; known: default, linear"):
        RopeScaling(kind="su")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size=0"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"num_pages": True}, "num_pages=True"),
        ({"memory_fraction": 0.0}, "memory_fraction=0.0"),
        ({"memory_fraction": 1.0}, "memory_fraction=1.0"),
        ({"memory_fraction": float("nan")}, "memory_fraction=nan"),
        ({"num_pages": 8, "memory_fraction": 0.5}, "both set"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_a_bad_cache_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "experts_per_token"),
        (EXPERTS | {"experts_per_token": 5}, "experts_per_token <= num_experts"),
        (EXPERTS | {"expert_size": 0}, "expert_size"),
        (EXPERTS | {"mlp_bias": True}, "mlp_bias"),
        ({"experts_per_token": 2}, "num_experts=0"),
        ({"moe_pattern": (True, False)}, "num_experts=0"),
        ({"post_norms": True, "block": "parallel"}, "post_norms"),
        ({"positions": "learned", "rotary_dim": 8}, "positions='learned'"),
        ({"positions": "learned", "rope_pattern": (True, False)}, "positions='learned'"),
        ({"sliding_window": 8, "local_rope_theta": 1.0}, "local_rope_theta=1.0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_patterns_repeat_over_the_layers():
    c = model(num_layers=5, sliding_window=8, window_pattern=(True, False), rope_pattern=(True, True, False))
    assert c.layer_windows == (8, None, 8, None, 8)
    assert [kind.rope for kind in c.layer_kinds] == ["main", "main", None, "main", "main"]
    c = model(num_layers=3, sliding_window=8, window_pattern=(True, False), local_rope_theta=100.0)
    assert [kind.rope for kind in c.layer_kinds] == ["local", "main", "local"]
    assert {kind.rope for kind in model(positions="learned").layer_kinds} == {None}


def test_longrope_has_a_factor_for_each_frequency():
    fields = {"kind": "longrope", "factor": 4.0, "original_max_position": 64}
    factors = {"short_factors": (1.0,) * 32, "long_factors": (2.0,) * 32}
    assert model(rope_scaling=RopeScaling(**fields, **factors)).head_dim == 64
    with pytest.raises(ValueError, match="long_factors has 31 factors; 32"):
        model(rope_scaling=RopeScaling(**fields, **factors | {"long_factors": (2.0,) * 31}))
    with pytest.raises(ValueError, match="short_factors"):
        RopeScaling(**fields)
    with pytest.raises(ValueError, match="long_factors"):
        RopeScaling(kind="linear", factor=2.0, long_factors=(1.0,))
