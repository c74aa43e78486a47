"""The time model and the budget it chooses: on synthetic machines whose times are known exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sarathi_jax.budget import Iteration, Sample, TimeModel, choose_budget, fit, profile_plan

SHAPES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
TRUE = TimeModel(
    shapes=SHAPES,
    shape_s=(0.020, 0.020, 0.021, 0.022, 0.030, 0.045, 0.060, 0.090, 0.120),  # a plateau, a knee, then in proportion
    per_decode_s=1e-4,
    per_walked_key_s=3e-6,
    per_chunk_s=5e-4,
    per_pair_s=2e-7,
    per_chunk_key_s=1e-6,
)


def samples(model: TimeModel, iterations, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [Sample(it, model(*it) * max(float(1 + noise * rng.standard_normal()), 0.1)) for it in iterations]


def plan(**changes):
    return profile_plan(SHAPES, **{"max_num_seqs": 16, "max_model_len": 1024, **changes})


def test_a_machine_is_recovered_from_its_profile():
    to_fit, held_out = plan()
    model = fit(samples(TRUE, to_fit), SHAPES, held_out=samples(TRUE, held_out))
    assert model.median_error is not None
    assert model.median_error < 1e-6
    assert model.shape_s == pytest.approx(TRUE.shape_s, rel=1e-4)
    assert model.per_walked_key_s == pytest.approx(TRUE.per_walked_key_s, rel=1e-3)
    assert model.per_pair_s == pytest.approx(TRUE.per_pair_s, rel=1e-3)


def test_noise_of_five_percent_is_averaged_out():
    to_fit, held_out = plan()
    model = fit(samples(TRUE, to_fit, 0.05), SHAPES, held_out=samples(TRUE, held_out))
    assert model.median_error is not None
    assert model.median_error < 0.04


def test_decodes_of_unlike_length_wait_for_the_longest_of_their_group():
    grouped = replace(TRUE, decode_group=8)
    assert grouped([100] * 8, []) == pytest.approx(TRUE([100] * 8, []))
    assert grouped([800, *[100] * 7], []) - TRUE([800, *[100] * 7], []) == pytest.approx(3e-6 * 700 * 7)
    assert grouped([900], []) - grouped([1], []) == pytest.approx(3e-6 * 899 * 8), "empty rows walk along"
    by_length = grouped([900] * 8 + [1] * 8, [])
    assert grouped([900, 1] * 8, []) == pytest.approx(by_length), "the batch sorts them, so their order is free"
    to_fit, held_out = plan()
    model = fit(samples(grouped, to_fit), SHAPES, held_out=samples(grouped, held_out), decode_group=8)
    assert model.median_error is not None
    assert model.median_error < 1e-6


def test_no_term_is_negative_whatever_the_noise():
    to_fit, _ = plan()
    model = fit(samples(TRUE, to_fit, 0.5, seed=3), SHAPES)
    assert min(*model.shape_s, model.per_decode_s, model.per_walked_key_s, model.per_pair_s) >= 0
    assert list(model.shape_s) == sorted(model.shape_s)
    assert model.median_error is None


@pytest.mark.parametrize("slo", [0.06, 0.08, 0.1, 0.15])
@pytest.mark.parametrize("margin", [0.0, 0.1, 0.3])
def test_the_budget_is_the_largest_that_holds_the_slo_with_its_margin(slo, margin):
    ask = {"tbt_slo_s": slo, "max_num_seqs": 16, "context": 256, "tile": 16, "margin": margin}
    seconds = lambda b: TRUE([256] * 16, [(256, b - 16)])
    if seconds(32) > (1 - margin) * slo:
        with pytest.raises(ValueError, match=f"with a margin of {margin:.0%}"):
            choose_budget(TRUE, **ask)
        return
    budget = choose_budget(TRUE, **ask)
    assert budget % 16 == 0
    assert seconds(budget) <= (1 - margin) * slo
    assert budget == SHAPES[-1] or seconds(budget + 16) > (1 - margin) * slo
    assert choose_budget(TRUE, **ask, max_budget=48) <= 48


@pytest.mark.parametrize("margin", [-0.1, 0.95, float("nan"), "0.1"])
def test_a_bad_margin_is_refused(margin):
    with pytest.raises(ValueError, match="margin="):
        choose_budget(TRUE, tbt_slo_s=0.1, max_num_seqs=16, context=256, tile=16, margin=margin)


def test_an_slo_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(
        ValueError, match=r"no token budget holds tbt_slo_s=0\.01 with a margin of 10%: 16 decodes at 256.*take 0\.03"
    ):
        choose_budget(TRUE, tbt_slo_s=0.01, max_num_seqs=16, context=256, tile=16)


@pytest.mark.parametrize("slo", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_bad_slo_is_refused(slo):
    with pytest.raises(ValueError, match="tbt_slo_s="):
        choose_budget(TRUE, tbt_slo_s=slo, max_num_seqs=16, context=256, tile=16)


def test_saved_and_loaded_it_is_the_same(tmp_path):
    path = tmp_path / "deep" / "model.json"
    model = replace(TRUE, machine="cpu x", median_error=0.05, decode_group=8)
    model.save(path)
    assert TimeModel.load(path) == model


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"shapes": 3}'])
def test_a_broken_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"model\.json is not a saved time model.*calibrate again"):
        TimeModel.load(path)
    values = json.loads(json.dumps(TRUE.__dict__)) | {"per_pair_s": "fast"}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="not a saved time model"):
        TimeModel.load(path)


def test_too_few_or_impossible_samples_are_refused():
    to_fit, _ = plan()
    with pytest.raises(ValueError, match="too few"):
        fit(samples(TRUE, to_fit[:4]), SHAPES)
    with pytest.raises(ValueError, match="positive, finite"):
        fit([*samples(TRUE, to_fit), Sample(Iteration((), ((0, 8),)), 0.0)], SHAPES)


@pytest.mark.parametrize("max_num_seqs", [1, 5, 16, 200])
@pytest.mark.parametrize("max_model_len", [16, 300, 4096])
def test_a_profile_stays_within_the_engine(max_num_seqs, max_model_len):
    for iterations in plan(max_num_seqs=max_num_seqs, max_model_len=max_model_len):
        for decodes, chunks in iterations:
            assert 1 <= len(decodes) + len(chunks) <= max_num_seqs
            assert all(1 <= context <= max_model_len for context in decodes)
            assert all(start >= 0 and tokens >= 1 and start + tokens <= max_model_len for start, tokens in chunks)
