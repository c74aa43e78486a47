"""Iterations made to order, and the budget an engine measures for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

import sarathi_jax as sj
from sarathi_jax import budget, profiler
from sarathi_jax.budget import Iteration
from sarathi_jax.engine import Engine

pytestmark = pytest.mark.usefixtures("private_cache")


@pytest.fixture
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def engine(tiny_model):
    engine = Engine(
        tiny_model, None, scheduler=sj.Sarathi(token_budget=32, max_num_seqs=4), max_model_len=96,
        cache=sj.CacheConfig(num_pages=40, page_size=8),
    )  # fmt: skip
    engine.warm_up(compile_cache=False)
    return engine


def test_a_plan_holds_what_was_asked_for(engine):
    iteration = Iteration((17, 64), ((8, 20),))
    plan = profiler.make_plan(engine.runner, iteration)
    assert [(c.start, c.num_tokens) for c in plan.chunks] == [(16, 1), (63, 1), (8, 20)]
    pages = [page for c in plan.chunks for page in c.sequence.page_ids]
    assert len(set(pages)) == len(pages) == 3 + 8 + 4
    before = engine.runner.num_compiled
    wall_s, host_s = profiler.time_plan(engine.runner, plan)
    assert 0 < host_s < wall_s
    assert engine.runner.num_compiled == before
    engine.check_integrity()


@pytest.mark.parametrize(
    ("iteration", "message"),
    [
        (Iteration((), ()), "0 sequences"),
        (Iteration((97,), ()), "96 positions"),
        (Iteration((0,), ()), "96 positions"),
        (Iteration((), ((-1, 4),)), "96 positions"),
        (Iteration((1,) * 5, ()), "5 sequences.*4"),
        (Iteration((96,) * 4, ()), "48 pages.*40"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(engine, iteration, message):
    with pytest.raises(ValueError, match=message):
        profiler.make_plan(engine.runner, iteration)


def test_a_profile_fits_a_model_and_the_engine_keeps_it(engine, monkeypatch):
    model = engine.time_model()
    assert model.shapes == engine.runner.shapes.num_tokens
    assert model.median_error is not None
    assert model([10, 20], [(0, 16)]) > 0
    monkeypatch.setattr(profiler, "calibrate", lambda *_, **__: pytest.fail("measured again"))
    assert engine.time_model() == model
    engine.check_integrity()


def test_a_broken_file_is_measured_again(engine, tmp_path):
    engine.time_model()
    (path,) = (tmp_path / "sarathi_jax" / "time_models").glob("*.json")
    path.write_text("{")
    assert engine.time_model().shapes == engine.runner.shapes.num_tokens


def test_auto_takes_the_budget_that_the_measured_model_gives(tiny_model, monkeypatch):
    flat = budget.TimeModel(
        shapes=(512,), shape_s=(0.512,), per_decode_s=0, per_walked_key_s=0, per_chunk_s=0, per_pair_s=0,
        per_chunk_key_s=0,
    )  # fmt: skip

    def proportional(runner, **_):
        rows = runner.shapes.num_tokens
        return replace(flat, shapes=rows, shape_s=tuple(1e-3 * n for n in rows))

    monkeypatch.setattr(profiler, "calibrate", proportional)
    monkeypatch.setattr("sarathi_jax.device.max_token_budget", lambda: 64)
    auto = sj.Sarathi(token_budget="auto", tbt_slo_s=0.065, max_num_seqs=4)
    engine = Engine(tiny_model, None, scheduler=auto, max_model_len=96, cache=sj.CacheConfig(num_pages=60))
    engine.warm_up(compile_cache=False)
    assert engine.scheduler.token_budget == 48, "64 would leave nothing of the SLO free"
    engine.add_request("a", prompt_token_ids=[1, 2, 3], params=sj.SamplingParams(max_tokens=2))
    for call in (engine.time_model, lambda: engine.set_scheduler(sj.Sarathi(token_budget=16))):
        with pytest.raises(ValueError, match="idle engine; 1 requests have not ended"):
            call()
    while engine.has_unfinished():
        engine.step()
    with pytest.raises(ValueError, match=r"up to 128 tokens.*64"):
        engine.set_scheduler(sj.Sarathi(token_budget=128, max_num_seqs=4))
    hopeless = sj.Sarathi(token_budget="auto", tbt_slo_s=0.001, max_num_seqs=4)
    engine = Engine(tiny_model, None, scheduler=hopeless, max_model_len=96, cache=sj.CacheConfig(num_pages=60))
    with pytest.raises(ValueError, match="no token budget holds"):
        engine.warm_up(compile_cache=False)
