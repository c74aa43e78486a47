"""The mixture of experts against one token at a time in NumPy, whichever way rows are grouped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.config import ModelConfig
from sarathi_jax.models import experts as module
from sarathi_jax.models.blocks import LayerWeights
from sarathi_jax.models.experts import experts

D, WIDTH = 16, 12


def make_config(num_experts: int, chosen: int, norm: bool) -> ModelConfig:
    return ModelConfig(
        architecture="x", vocab_size=8, hidden_size=D, intermediate_size=4, num_layers=1, num_heads=2, num_kv_heads=2,
        head_dim=8, max_position=8, num_experts=num_experts, experts_per_token=chosen, expert_size=WIDTH,
        norm_topk_prob=norm,
    )  # fmt: skip


def make_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng, e = np.random.default_rng(seed), config.num_experts
    shapes = {"attn_norm": (D,), "router": (D, e), "experts_gate_up": (e, D, 2, WIDTH), "experts_down": (e, WIDTH, D)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def one_by_one(x: np.ndarray, w: dict[str, np.ndarray], config: ModelConfig) -> np.ndarray:
    """In float64, from the definition."""
    out = np.zeros_like(x, dtype=np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        scores = np.exp(row @ w["router"] - (row @ w["router"]).max())
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: config.experts_per_token]
        total = scores[chosen].sum() if config.norm_topk_prob else 1.0
        for e in chosen:
            gate, up = (row @ w["experts_gate_up"][e, :, i] for i in range(2))
            out[t] += scores[e] / total * ((gate / (1 + np.exp(-gate)) * up) @ w["experts_down"][e])
    return out


def run(x, w, config, num_tokens):
    stacks = {name: jnp.asarray(np.stack([np.full_like(value, np.nan), value])) for name, value in w.items()}
    layer = lambda x, n: experts(x, LayerWeights(stacks, jnp.int32(1)), config, n)
    return np.asarray(jax.jit(layer)(jnp.asarray(x), jnp.int32(num_tokens)))


@pytest.mark.parametrize("way", ["tiles", "ragged"])
@pytest.mark.parametrize(
    ("num_experts", "chosen", "norm", "rows"), [(5, 2, True, 40), (3, 3, False, 17), (16, 1, True, 3), (1, 1, True, 9)]
)
def test_a_row_has_what_its_own_experts_give(monkeypatch, way, num_experts, chosen, norm, rows):
    if way == "ragged":  # what accelerators run
        monkeypatch.setattr(module, "_tiles", module._ragged)
    config = make_config(num_experts, chosen, norm)
    w, x = make_weights(config), np.random.default_rng(1).normal(size=(rows, D)).astype(np.float32)
    np.testing.assert_allclose(run(x, w, config, rows), one_by_one(x, w, config), rtol=1e-4, atol=1e-4)


def test_all_rows_to_one_expert():
    """More rows than a tile, for one expert alone."""
    config = make_config(4, 1, True)
    w = make_weights(config)
    w["router"] = np.zeros((D, 4), np.float32)
    w["router"][0, 2] = 50.0
    x = np.random.default_rng(1).normal(size=(50, D)).astype(np.float32)
    x[:, 0] = 1.0
    np.testing.assert_allclose(run(x, w, config, 50), one_by_one(x, w, config), rtol=1e-4, atol=1e-4)


def test_padding_rows_do_not_matter_whatever_they_hold():
    config = make_config(5, 2, True)
    w, x = make_weights(config), np.random.default_rng(2).normal(size=(32, D)).astype(np.float32)
    alone = run(x, w, config, 20)
    x[20:] = np.nan
    np.testing.assert_array_equal(run(x, w, config, 20)[:20], alone[:20])
    np.testing.assert_allclose(alone[:20], one_by_one(x[:20], w, config), rtol=1e-4, atol=1e-4)
