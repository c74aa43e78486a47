"""Layers of different kinds loop: few slots, each layer in one of them, and a program that does not grow with depth."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.batch import BatchBuilder
from sarathi_jax.config import LayerKind, ModelConfig
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.groups import layer_groups
from sarathi_jax.models.weight_specs import weight_specs
from sarathi_jax.runner import make_pool
from sarathi_jax.shapes import Shapes

FULL = LayerKind(window=None, rope="main", moe=False)
WINDOW = LayerKind(window=8, rope="main", moe=False)
MOE = LayerKind(window=None, rope="main", moe=True)
KINDS = {"F": FULL, "W": WINDOW, "M": MOE}

BASE = ModelConfig(
    architecture="x", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=8, num_heads=2, num_kv_heads=1,
    head_dim=8, max_position=64,
)  # fmt: skip
ALTERNATING = replace(BASE, sliding_window=8, window_pattern=(True, False))
FIVE_TO_ONE = replace(
    BASE, sliding_window=8, window_pattern=(True, True, True, True, True, False), local_rope_theta=100.0
)
EXPERTS = replace(BASE, num_experts=4, experts_per_token=2, expert_size=8, moe_pattern=(True, False))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("FFFFFF", [("F", 6)]),
        ("WFWFWF", [("WF", 3)]),
        ("WFWFW", [("WF", 2), ("W", 1)]),
        ("WWWWWF" * 4 + "WW", [("WWWWWF", 4), ("W", 2)]),
        ("FFFWWWW", [("F", 3), ("W", 4)]),
        ("FMMMM", [("F", 1), ("M", 4)]),
        ("MFMM", [("MF", 1), ("M", 2)]),
        ("F", [("F", 1)]),
    ],
)
def test_the_fewest_slots_that_hold_all_layers(kinds, expected):
    groups = layer_groups(tuple(KINDS[k] for k in kinds))
    assert [(g.kinds, g.num_repeats) for g in groups] == [(tuple(KINDS[k] for k in p), n) for p, n in expected]


def test_every_layer_is_in_one_slot_in_its_own_kind():
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = tuple(rng.choice([FULL, WINDOW, MOE], p=[0.6, 0.3, 0.1]) for _ in range(rng.integers(1, 40)))
        placed, slots = {}, 0
        for group in layer_groups(kinds):
            assert (group.first_layer, group.first_slot) == (len(placed), slots)
            for place, kind in enumerate(group.kinds):
                placed |= dict.fromkeys(group.slot_layers(place), kind)
            slots += len(group.kinds)
        assert tuple(placed[layer] for layer in range(len(kinds))) == kinds


def num_operations(config: ModelConfig) -> int:
    """Lines of the lowered step, loop bodies included: compile time goes by them."""
    shapes = Shapes(num_tokens=(16,), num_rows=4, num_slots=4, page_size=4, max_pages=8, num_pages=16)
    weights = {n: jax.ShapeDtypeStruct(s.shape, jnp.float32) for n, s in weight_specs(config).items()}
    pool = jax.eval_shape(lambda: make_pool(config, shapes, jnp.float32))
    rows = BatchBuilder(shapes).empty(16).tokens
    lowered = jax.jit(lambda w, rows, kv: Decoder(config, w)(rows, kv)).lower(weights, rows, pool)
    return lowered.as_text().count("\n")


@pytest.mark.parametrize("config", [BASE, ALTERNATING, EXPERTS], ids=["one kind", "alternating windows", "experts"])
def test_the_program_of_eighty_layers_is_that_of_eight(config):
    assert num_operations(replace(config, num_layers=80)) == num_operations(config)


def test_a_tail_that_does_not_fill_the_pattern_costs_one_layer_more():
    body = num_operations(replace(FIVE_TO_ONE, num_layers=60)) / 6
    assert num_operations(replace(FIVE_TO_ONE, num_layers=62)) < 7.5 * body
