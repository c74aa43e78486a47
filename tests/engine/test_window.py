"""A model whose layers all have a window, in pools smaller than its sequences: the tokens of one that keeps every key.

Before each step whatever nobody holds is NaN on the device, the sink page too: a page that was given back too early, or
that is read after it was, cannot go unseen.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax import device
from sarathi_jax.benchmark import EngineServer
from sarathi_jax.config import ModelConfig
from sarathi_jax.driver import run_open_loop
from sarathi_jax.engine import Engine
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.models.weights import init_weights
from sarathi_jax.pages import PagePool
from sarathi_jax.replay import Replay
from sarathi_jax.simulator import Simulator
from sarathi_jax.workload import WorkItem, Workload

from .test_soak import compilations

WINDOW, PAGE_SIZE, NUM_PAGES, MAX_LEN = 20, 8, 40, 96
CONFIG = ModelConfig(
    architecture="mistral", vocab_size=264, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position=MAX_LEN, sliding_window=WINDOW,
)  # fmt: skip
SARATHI = sj.Sarathi(token_budget=32, max_num_seqs=4, watermark=0.0)
POLICIES = {
    "sarathi": SARATHI,
    "priorities": sj.Sarathi(token_budget=32, max_num_seqs=4, priority_preemption=True),
    "chunked_only": sj.ChunkedOnly(token_budget=32, max_num_seqs=4),
    "hybrid_only": sj.HybridOnly(token_budget=32, max_num_seqs=4),
    "vllm": sj.VLLM(max_num_seqs=4, max_batched_tokens=112),
    "orca": sj.Orca(max_num_seqs=4, max_batched_tokens=112),
}
Asked = list[tuple[list[int], sj.SamplingParams]]


def requests() -> Asked:
    rng = np.random.default_rng(3)
    lengths = [70, 3, 41, 19, 60, 24, 8, 33]
    return [
        (
            rng.integers(1, 260, size=length).tolist(),
            sj.SamplingParams(temperature=float(i % 2), seed=i, max_tokens=8 + 2 * i, n=1 + (i == 3)),
        )
        for i, length in enumerate(lengths)
    ]


@jax.jit
def poisoned(kv: KVPool, is_free: jax.Array) -> KVPool:
    """The pool with NaN in these pages of every layer."""
    rows = jnp.tile(is_free, kv.k.shape[0] // len(is_free))[:, None, None, None]
    return KVPool(*(jnp.where(rows, jnp.nan, pages) for pages in kv))


def poison_before_each_step(engine: Engine) -> None:
    runner, execute = engine.runner, engine.runner.execute

    def execute_poisoned(plan):
        is_free = np.ones(NUM_PAGES + 1, bool)
        for _, generation in engine._by_sequence.values():
            is_free[generation.seq.page_ids] = False
        for stage in getattr(runner, "stages", [runner]):
            stage._kv = poisoned(stage._kv, is_free)
        return execute(plan)

    runner.execute = execute_poisoned


@functools.cache
def model() -> Decoder:
    return Decoder(CONFIG, init_weights(CONFIG, jnp.dtype(jnp.float32), seed=1, scale=0.2))


def new_engine(**options) -> Engine:
    """With programs of one shape."""
    engine = Engine(
        model(), None, scheduler=POLICIES["orca"], cache=sj.CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE),
        **options,
    )  # fmt: skip
    object.__setattr__(engine.runner.shapes, "num_tokens", (112,))
    return engine


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """One that reads first and one that looks ahead, with the same programs."""
    engines = [new_engine(lookahead=lookahead) for lookahead in (0, 1)]
    engines[0].warm_up(compile_cache=False)
    for name in ("_compiled", "_write_slot"):
        setattr(engines[1].runner, name, getattr(engines[0].runner, name))
    return engines


@pytest.fixture(params=[0, 1], ids=["read first", "lookahead"])
def engine(engines, request):
    assert engines[request.param].scheduler.lookahead == request.param
    yield engines[request.param]
    engines[request.param].runner.__dict__.pop("execute", None)  # unpoisoned again


@pytest.fixture(scope="module")
def expected(engines) -> list[list[list[int]]]:
    """One at a time, all keys kept."""
    assert engines[0].pool.window == WINDOW
    return [answer(engines[0], [one], window=None)[0][0] for one in requests()]


def answer(
    engine: Engine, asked: Asked, config: sj.SchedulerConfig = SARATHI, *, num_pages=NUM_PAGES, window=WINDOW,
    on_step=lambda i: None,
) -> tuple[list[list[list[int]]], int]:  # fmt: skip
    """Tokens of every sample of each request, with `num_pages` of the pages there are; how often one was preempted."""
    engine.pool = PagePool(num_pages, PAGE_SIZE, window)
    engine.set_scheduler(config)
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), prompt_token_ids=prompt, params=params, priority=i % 3)
    tokens, num_preempted, i = {}, 0, 0
    while engine.has_unfinished():
        on_step(i)
        try:
            outputs = engine.step()
        except ZeroDivisionError:
            outputs = []
        i += 1
        assert i < 3000
        tokens |= {output.request_id: [o.token_ids for o in output.outputs] for output in outputs}
        engine.check_integrity()
        engine.scheduler.check_integrity()
        if engine.last_step is not None:
            num_preempted, engine.last_step = num_preempted + engine.last_step.num_preempted, None
    engine.drain()
    assert engine.pool.num_held == 0
    return [tokens.get(str(i), []) for i in range(len(asked))], num_preempted


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_tokens_of_one_that_keeps_all_keys(engine, expected, name):
    num_compiled = engine.num_compiled
    poison_before_each_step(engine)
    got, num_preempted = answer(engine, requests(), POLICIES[name], num_pages=12)
    assert got == expected
    assert engine.num_compiled == num_compiled
    assert num_preempted > 0 or name in ("hybrid_only", "orca")


@pytest.mark.parametrize("early", [1, PAGE_SIZE])
def test_a_page_given_back_too_early_would_be_seen(engine, expected, monkeypatch, early):
    """By a key of it that one more query sees, or by a whole page."""
    right = PagePool.num_behind
    monkeypatch.setattr(PagePool, "num_behind", lambda self, position: right(self, position + early))
    poison_before_each_step(engine)
    assert answer(engine, requests())[0] != expected


def test_prompts_longer_than_the_pool(engine):
    """Eight pages of 8 hold 64 tokens, and a window of 20 beside a chunk of 32 needs 8. Nothing compiles."""
    asked = [(prompt, sj.SamplingParams(temperature=0, max_tokens=None)) for prompt, _ in requests()[:5:2]]
    long = np.random.default_rng(1).integers(1, 260, 88).tolist()
    asked.append((long, sj.SamplingParams(temperature=1.0, seed=5, max_tokens=8)))
    wanted = [answer(engine, [one], window=None)[0][0] for one in asked]
    with compilations() as events:
        got, _ = answer(engine, asked, num_pages=8)
    assert events == []
    assert got == wanted
    assert [len(tokens) + len(prompt) for (tokens,), (prompt, _) in zip(got, asked, strict=True)] == [MAX_LEN] * 4
    with pytest.raises(ValueError, match="12 pages of 8 and the pool has 8"):
        answer(engine, asked[-1:], num_pages=8, window=None)
    poison_before_each_step(engine)
    assert answer(engine, asked, num_pages=8)[0] == wanted


@pytest.mark.parametrize("where", ["plan", "build", "read"])
def test_a_step_that_fails_is_planned_again(engine, expected, monkeypatch, where):
    """From the first token on: what was given back is computed again."""
    failed = []

    def fail(*_, **__):
        failed.append(where)
        raise ZeroDivisionError

    def on_step(i):
        monkeypatch.undo()
        if i % 7 != 6 or i > 40:
            return
        if where == "plan":  # after it gave back and took pages
            plan_prompts = engine.scheduler._plan_prompts
            monkeypatch.setattr(engine.scheduler, "_plan_prompts", lambda *args: (plan_prompts(*args), fail()))
        elif where == "build":
            monkeypatch.setattr(engine.runner.builder, "build", fail)
        else:
            monkeypatch.setattr("sarathi_jax.runner.DeviceStep.read", fail)

    poison_before_each_step(engine)
    assert answer(engine, requests()[1::2], num_pages=12, on_step=on_step)[0] == expected[1::2]
    assert len(failed) >= 4


def test_aborts_leave_the_others_alone(engine, expected):
    rng = np.random.default_rng(0)
    aborted = set()

    def on_step(i):
        if i % 5 == 4 and len(aborted) < 4 and len(engine._live) > 1:
            name = str(rng.choice(sorted(engine._live)))
            assert engine.abort(name)
            aborted.add(int(name))

    poison_before_each_step(engine)
    got, _ = answer(engine, requests(), num_pages=12, on_step=on_step)
    assert len(aborted) == 4
    for i in set(range(len(got))) - aborted:
        assert got[i] == expected[i], i


def test_a_replay_has_the_same_plans_and_pages(engine):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.008, size=20)).tolist()
    items = Workload(
        items=tuple(
            WorkItem(
                arrived_at_s=t, num_prefill_tokens=int(rng.integers(1, 70)), num_decode_tokens=int(rng.integers(1, 25))
            )
            for t in times
        )
    )
    engine.pool = PagePool(8, PAGE_SIZE, WINDOW)
    engine.set_scheduler(SARATHI)
    report = run_open_loop(EngineServer(engine), items)
    simulator = Simulator(
        SARATHI, Replay(report), num_pages=8, page_size=PAGE_SIZE, kv_window=WINDOW, max_model_len=MAX_LEN,
        lookahead=engine.scheduler.lookahead, tile=device.tile(),
    )  # fmt: skip
    replayed = run_open_loop(simulator, items)
    assert sum(step.num_preempted for step in report.iterations) > 0
    assert len(replayed.iterations) == len(report.iterations)
    for mine, measured in zip(replayed.iterations, report.iterations, strict=True):
        assert sorted(mine.chunks) == sorted(measured.chunks)
        assert (mine.num_pages_held, mine.num_preempted) == (measured.num_pages_held, measured.num_preempted)


def test_micro_batches_in_flight(expected):
    """A stage may still read what the next plan gave away: its new holder writes there later."""
    engine = new_engine(parallel=sj.Parallel(pipeline=2))
    poison_before_each_step(engine)
    got, num_preempted = answer(engine, requests(), num_pages=12)
    assert got == expected
    assert num_preempted > 0
