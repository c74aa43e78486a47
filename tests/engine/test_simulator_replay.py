"""The simulator in the engine's place: given the times that a real run took, the same plans step by step."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax import device
from sarathi_jax.benchmark import EngineServer
from sarathi_jax.driver import RunFailed, run_open_loop
from sarathi_jax.metrics import Report
from sarathi_jax.outputs import ChunkStats
from sarathi_jax.replay import Replay
from sarathi_jax.request import SamplingParams
from sarathi_jax.simulator import Simulator
from sarathi_jax.workload import WorkItem, Workload

from .conftest import MAX_MODEL_LEN, PAGE_SIZE

NUM_PAGES = 30  # less than the slots could hold: some are preempted

POLICIES = {
    "sarathi": sj.Sarathi(token_budget=32, max_num_seqs=4),
    "sarathi, short chunks": sj.Sarathi(token_budget=32, max_num_seqs=4, long_prefill_token_threshold=8),
    "vllm": sj.VLLM(max_num_seqs=4, max_batched_tokens=96),
    "orca": sj.Orca(max_num_seqs=2, max_batched_tokens=96),
    "chunked_only": sj.ChunkedOnly(token_budget=32, max_num_seqs=4),
    "hybrid_only": sj.HybridOnly(token_budget=32, max_num_seqs=4),
}


@pytest.fixture(scope="module", params=[0, 1], ids=["read first", "lookahead"])
def engine(tiny_model, request) -> sj.Engine:
    """On its own clock."""
    engine = sj.Engine(
        tiny_model, None, scheduler=sj.Sarathi(token_budget=32, max_num_seqs=4), max_model_len=MAX_MODEL_LEN,
        lookahead=request.param, cache=sj.CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE), max_step_tokens=128,
        eos_token_ids=(7,),
    )  # fmt: skip
    engine.warm_up(compile_cache=False)
    return engine


def workload(num_requests: int = 40, *, mean_gap_s: float = 0.008, seed: int = 0) -> Workload:
    """Arrivals all through the run: iterations of the tiny model take milliseconds."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(mean_gap_s, size=num_requests)).tolist()
    items = [
        WorkItem(
            arrived_at_s=t, num_prefill_tokens=int(rng.integers(1, 60)), num_decode_tokens=int(rng.integers(1, 30))
        )
        for t in times
    ]
    return Workload(items=tuple(items))


def simulate(engine: sj.Engine, report: Report, config: sj.SchedulerConfig, items: Workload, **options) -> Report:
    sim = Simulator(
        config, Replay(report), num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=MAX_MODEL_LEN,
        lookahead=engine.scheduler.lookahead, tile=device.tile(),
    )  # fmt: skip
    return run_open_loop(sim, items, **options)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_plans_step_by_step(engine, name):
    items, config = workload(), POLICIES[name]
    engine.set_scheduler(config)
    report = run_open_loop(EngineServer(engine), items)
    replayed = simulate(engine, report, config, items)
    assert len(replayed.iterations) == len(report.iterations) > 50
    for mine, measured in zip(replayed.iterations, report.iterations, strict=True):
        assert sorted(mine.chunks) == sorted(measured.chunks)
        for field in ("start_s", "wall_s", "num_prefill_tokens", "num_decode_tokens", "num_padding", "num_preempted",
                      "num_pages_held", "num_pages"):  # fmt: skip
            assert getattr(mine, field) == getattr(measured, field), field
    for mine, measured in zip(replayed.requests, report.requests, strict=True):
        for field in ("request_id", "arrival_s", "output_len", "first_scheduled_s", "num_preemptions", "status"):
            assert getattr(mine, field) == getattr(measured, field), field
        ends = [time for pair in zip(measured.token_s, mine.token_s, strict=True) for time in pair]
        assert all(a <= b + 1e-6 for a, b in itertools.pairwise(ends)), "read when its iteration was, and no later"
    late = sum(r.sent_s > report.iterations[5].start_s for r in report.requests)
    assert late > 10, "requests must arrive while it runs, or the order is no test"


def test_requests_that_stopped_early_do_so_again(engine):
    """At a token that the simulator cannot know; with lookahead one more of each is on its way."""
    items, config = workload(30, seed=1), POLICIES["sarathi"]
    params = lambda item: SamplingParams(temperature=2.0, max_tokens=30, seed=3, stop_token_ids=tuple(range(0, 264, 9)))
    engine.set_scheduler(config)
    report = run_open_loop(EngineServer(engine), items, params=params)
    assert report.num_finished == 30 and any(r.output_len < 30 for r in report.requests)
    replayed = simulate(engine, report, config, items, params=params)
    assert [sorted(s.chunks) for s in replayed.iterations] == [sorted(s.chunks) for s in report.iterations]
    assert [r.output_len for r in replayed.requests] == [r.output_len for r in report.requests]


def test_a_replay_that_does_not_match_says_where(engine):
    items, config = workload(12), POLICIES["sarathi"]
    engine.set_scheduler(config)
    report = run_open_loop(EngineServer(engine), items)
    [chunk, *others] = report.iterations[9].chunks
    wrong = dataclasses.replace(report.iterations[9], chunks=(*others, ChunkStats(chunk.request_id, 0, 77, 3)))
    changed = dataclasses.replace(report, iterations=(*report.iterations[:9], wrong, *report.iterations[10:]))
    with pytest.raises(
        RunFailed, match=rf"departs at iteration 9, .* s: measured {chunk.request_id}\[77:80\], planned"
    ):
        simulate(engine, changed, config, items)
    with pytest.raises(RunFailed, match=r"departs at iteration \d+.* are policy, pool, window, lookahead"):
        simulate(engine, report, sj.Sarathi(token_budget=48, max_num_seqs=4), items)
    short = dataclasses.replace(report, iterations=report.iterations[:-3])
    with pytest.raises(RunFailed, match=r"the measured run had no more, and \d requests are unfinished"):
        simulate(engine, short, config, items)


def test_what_cannot_be_replayed(engine):
    report = run_open_loop(EngineServer(engine), workload(3))
    for bad in ({"iterations": ()}, {"stopped": "why"}):
        with pytest.raises(ValueError, match="a replay needs a whole run"):
            Replay(dataclasses.replace(report, **bad))
    piped = dataclasses.replace(report.iterations[0], stages=((0.0, 1.0), (1.0, 2.0)))
    with pytest.raises(ValueError, match="one engine of one stage"):
        Replay(dataclasses.replace(report, iterations=(piped,)))
    with pytest.raises(ValueError, match="num_replicas=2: a replay is of one engine"):
        Simulator(POLICIES["sarathi"], Replay(report), num_pages=30, max_model_len=96, num_replicas=2)
