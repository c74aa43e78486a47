"""Rotary tables against transformers' and against the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.hf_config import model_config_from_hf
from sarathi_jax.models.rope import inverse_frequencies, rotary_tables, rotate

FILE = np.load(Path(__file__).parent.parent / "golden" / "rope.npz")
CASES = json.loads(str(FILE["cases"]))


def config_of(case: dict) -> ModelConfig:
    """Through the parser of Hugging Face's config.json, so that its keys are tested as well."""
    head_dim = case["head_dim"]
    return model_config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": head_dim,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": head_dim,
            "max_position_embeddings": case["max_position_embeddings"],
            "rope_parameters": case["rope_parameters"],
        }
    )


def test_every_kind_has_a_case():
    kinds = {case["rope_parameters"]["rope_type"] for case in CASES.values()}
    assert kinds == {"default", "linear", "dynamic", "llama3", "yarn"}


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c["rope_parameters"]["rope_type"] != "dynamic"])
def test_inverse_frequencies_are_those_of_transformers(name):
    inv_freq, factor = inverse_frequencies(config_of(CASES[name]))
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, FILE[f"{name}/inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(factor, FILE[f"{name}/attention_factor"], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_cos_and_sin_of_the_golden_frequencies(name):
    """ "dynamic" has its base from the length of the prompt, whichever of its tokens are in the batch."""
    case = CASES[name]
    length = case["seq_len"] or 1000
    positions = np.array([0, 1, 2, 17, 100, length - 1], np.int32)
    cos, sin = rotary_tables(config_of(case), jnp.asarray(positions), jnp.full(len(positions), length, jnp.int32))
    angles = positions[:, None].astype(np.float64) * FILE[f"{name}/inv_freq"][None].astype(np.float64)
    factor = float(FILE[f"{name}/attention_factor"])
    noise = 1e-6 + 3e-7 * length  # an angle rounded to float32
    np.testing.assert_allclose(np.asarray(cos), factor * np.cos(angles), atol=noise)
    np.testing.assert_allclose(np.asarray(sin), factor * np.sin(angles), atol=noise)
    assert cos.dtype == sin.dtype == jnp.float32


def test_a_dynamic_base_grows_with_what_is_generated_but_not_below_the_original_length():
    config = config_of(CASES["dynamic_5000"])
    original = config.rope_scaling.original_max_position
    assert original is not None
    probe = lambda position, prompt: np.asarray(
        rotary_tables(config, jnp.asarray([position], jnp.int32), jnp.asarray([prompt], jnp.int32))[0]
    )
    np.testing.assert_array_equal(probe(10, 20), probe(10, original))
    assert (probe(10, original) != probe(10, 2 * original)).any()
    np.testing.assert_array_equal(probe(original + 50, 5), probe(original + 50, original + 51))
    assert (probe(original + 50, 5) != probe(original + 50, 2 * original)).any()


def test_rotation_turns_pairs_half_a_head_apart():
    """(x_i, x_{i + D/2}) by the angle of i: complex multiplication, in float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 8)).astype(np.float32)
    angles = rng.uniform(-3, 3, size=(5, 4)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles)))
    wanted = (x[..., :4] + 1j * x[..., 4:].astype(np.complex128)) * np.exp(1j * angles.astype(np.float64))[:, None]
    np.testing.assert_allclose(turned, np.concatenate([wanted.real, wanted.imag], -1), atol=1e-5)


def test_scores_depend_on_the_distance_only():
    config = config_of(CASES["default"])
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(1, 1, config.head_dim)).astype(np.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = []
        for x, position in ((q, query_position), (k, key_position)):
            cos, sin = rotary_tables(config, jnp.asarray([position], jnp.int32), jnp.asarray([1], jnp.int32))
            turned.append(np.asarray(rotate(jnp.asarray(x), cos, sin)).ravel())
        return float(np.dot(*turned))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)
    assert abs(score(7, 3) - score(7, 2)) > 1e-2
