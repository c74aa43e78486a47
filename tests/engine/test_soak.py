"""After warm-up nothing compiles, pages add up, the pool is updated in place: under hundreds of random requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from sarathi_jax.request import SamplingParams

NUM_REQUESTS = 500


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Every program that XLA compiles (or fetches from a cache) while this is open."""
    events: list[str] = []

    def listen(event: str, duration_s: float, **_) -> None:
        if "compile" in event or "trace" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_compilation_counter_counts():
    with compilations() as events:
        jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert any("backend_compile" in event for event in events)


@pytest.fixture(scope="module")
def warm_engines(new_engine):
    """One engine for each look-ahead, warmed up as a user's is: five sequences, three shapes (J06)."""
    engines = {}
    for lookahead in (0, 1):
        engine = new_engine(
            budget=32, max_num_seqs=5, num_pages=30, lookahead=lookahead, eos_token_ids=(256,), seed=lookahead
        )
        assert engine.runner.num_compiled == 0
        reports = []
        engine.runner.warm_up(progress=lambda done, total, reports=reports: reports.append((done, total)))
        assert engine.runner.shapes.num_tokens == (8, 16, 32)
        assert engine.runner.num_compiled == 4  # and one that writes a slot
        assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]
        engines[lookahead] = engine
    return engines


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any option, each on or off (J04)."""
    maybe = lambda value, chance=0.3: value if rng.random() < chance else None
    options = {
        "temperature": float(rng.choice([0.0, 0.0, 0.5, 1.0, 2.0])),
        "max_tokens": int(rng.integers(1, 24)),
        "n": maybe(int(rng.integers(2, 4)), 0.15),
        "top_k": maybe(int(rng.choice([-1, 1, 5, 264, 10**6]))),
        "top_p": maybe(float(rng.choice([0.05, 0.5, 0.99]))),
        "min_p": maybe(float(rng.choice([0.01, 0.5]))),
        "seed": maybe(int(rng.integers(-(2**60), 2**60))),
        "repetition_penalty": maybe(1.2),
        "presence_penalty": maybe(-0.5),
        "frequency_penalty": maybe(0.5),
        "logit_bias": maybe({int(rng.integers(0, 264)): float(rng.uniform(-100, 100))}),
        "logprobs": maybe(int(rng.integers(0, 21))),
        "prompt_logprobs": maybe(int(rng.integers(0, 21))),
        "stop": maybe([chr(97 + int(rng.integers(0, 26))), "zz"]),
        "stop_token_ids": maybe([int(rng.integers(0, 264))]),
        "ignore_eos": maybe(True),
        "include_stop_str_in_output": maybe(True),
    }
    params = {name: value for name, value in options.items() if value is not None}
    if rng.random() < 0.3:
        params["min_tokens"] = int(rng.integers(0, params["max_tokens"] + 1))
    return SamplingParams(**params)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_random_requests_compile_nothing_and_leave_nothing(warm_engines, drain, lookahead):
    """Added in bursts, some aborted; `drain` checks the pool after every step, the streams, and that all ends idle."""
    engine = warm_engines[lookahead]
    rng = np.random.default_rng(17 + lookahead)
    names = iter(range(NUM_REQUESTS))
    num_compiled, counts, aborted = engine.runner.num_compiled, set(), 0

    def add_one() -> bool:
        i = next(names, None)
        if i is None:
            return False
        prompt = rng.integers(0, 264, int(rng.integers(1, 60))).tolist()
        engine.add_request(f"r{i}", prompt_token_ids=prompt, params=random_params(rng))
        return True

    def before_step(step: int) -> None:
        nonlocal aborted
        if rng.random() < 0.25 or engine.num_unfinished < 2:
            for _ in range(int(rng.integers(1, 6))):
                add_one()
        if rng.random() < 0.04:
            aborted += engine.abort(str(rng.choice(list(engine._live))))
            if not engine.has_unfinished():
                add_one()
        counts.add(engine.scheduler.num_running)

    add_one()
    with compilations() as events:
        log = drain(engine, before_step=before_step, max_steps=20_000)
    assert next(names, None) is None, "not all requests were sent"
    assert engine.runner.num_compiled == num_compiled
    assert events == [], "something was traced or compiled while serving"
    assert len([o for o in log.final.values() if o.finished]) >= NUM_REQUESTS - aborted
    assert aborted > 5
    assert log.num_preempted > 5
    assert counts >= {1, 2, 3, 4, 5}, "every number of live sequences (J06)"
    assert {o.finish_reason for o in log.final.values()} >= {"stop", "length"}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_pool_is_updated_in_place(warm_engines, drain, lookahead):
    """Donated and aliased: the buffers stay where they are, so memory holds one pool and not two (J08)."""
    engine = warm_engines[lookahead]
    where = lambda: [x.unsafe_buffer_pointer() for x in (*engine.runner.kv, *engine.runner._state[1:])]
    engine.add_request("r", prompt_token_ids=list(range(40)), params=SamplingParams(max_tokens=6, presence_penalty=1.0))
    before, old = where(), engine.runner.kv
    assert len(set(before)) == len(before), "one buffer twice could not be donated (J09)"
    drain(engine)
    assert where() == before
    assert old.k.is_deleted()
    assert old.v.is_deleted()


def test_warming_up_again_compiles_nothing(warm_engines):
    engine = warm_engines[0]
    with compilations() as events:
        engine.warm_up(compile_cache=False, progress=False)
    assert not [event for event in events if "backend_compile" in event]


def test_host_state_does_not_grow(scripted, drain):
    """Maps are empty when idle, after ends, stops and aborts alike (R08)."""
    engine = scripted(eos_token_ids=(97,))
    for round_ in range(20):
        for i in range(20):
            engine.add_request(f"r{i}", prompt_token_ids=[round_, i], params=SamplingParams(max_tokens=5))
        drain(engine, before_step=lambda i: [engine.abort(f"r{j}") for j in range(0, 20, 3)] if i == 1 else None)
    assert len(engine._in_flight) == 0
