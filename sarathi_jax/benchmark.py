"""Measuring an engine: as a server of the open-loop driver, and single iterations made to order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from sarathi_jax.engine import Engine
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan


class EngineServer:
    """An engine as the driver's `Server`: `run_open_loop(EngineServer(engine), workload)`. Waiting is sleeping."""

    def __init__(self, engine: Engine, *, sleep: Callable[[float], None] = time.sleep):
        self.engine = engine
        self._sleep = sleep

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    @property
    def last_step(self) -> StepStats | None:
        return self.engine.last_step

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def num_compiled(self) -> int:
        return self.engine.runner.num_compiled

    def add_request(
        self, request_id: str, *, prompt_token_ids: Iterable[int], params: SamplingParams, arrival_time: float
    ) -> None:
        self.engine.add_request(
            request_id, prompt_token_ids=prompt_token_ids, params=params, arrival_time=arrival_time
        )  # fmt: skip

    def step(self) -> list[RequestOutput]:
        return self.engine.step()

    def abort(self, request_id: str) -> bool:
        return self.engine.abort(request_id)

    def now(self) -> float:
        return self.engine._clock()

    def wait_until(self, time_s: float) -> None:
        while (left := time_s - self.now()) > 0:
            self._sleep(left)


class IterationTime(NamedTuple):
    """One run of an iteration (s): until its tokens are on the host, and the host's part before the device begins."""

    wall_s: float
    host_s: float


def make_plan(engine: Engine, *, decodes: Iterable[int] = (), chunks: Iterable[tuple[int, int]] = ()) -> StepPlan:
    """An iteration of decodes, given by their context lengths (the new token included), and chunks (start, tokens).

    Its sequences are greedy, of random tokens, on pages of the pool that nobody is asked for: use it on an idle engine.

    Raises:
      ValueError: more sequences, pages or positions than the engine has, or an engine that is not idle.
    """
    if engine.has_unfinished:
        raise ValueError(f"the engine has {engine.num_unfinished} unfinished requests; measure on an idle one")
    spans = [(length - 1, 1) for length in decodes] + list(chunks)
    num_pages = sum(engine.pool.num_pages_for(start + n) for start, n in spans)
    if len(spans) > engine.runner.shapes.num_slots or num_pages > engine.pool.num_pages:
        raise ValueError(
            f"{len(spans)} sequences on {num_pages} pages are too many for an engine of "
            f"max_num_seqs={engine.runner.shapes.num_slots} and num_pages={engine.pool.num_pages}"
        )
    if any(start < 0 or n < 1 or start + n > engine.max_model_len for start, n in spans):
        raise ValueError(f"{spans=} (start, tokens) must lie within max_model_len={engine.max_model_len}")
    rng, free = np.random.default_rng(0), iter(range(num_pages))
    plan = []
    for slot, (start, n) in enumerate(spans):
        ids = tuple(rng.integers(engine.vocab_size, size=start + n).tolist())
        params = SamplingParams(temperature=0)
        request = Request(request_id=f"{slot}", prompt_token_ids=ids, params=params, arrival_time_s=0.0)
        seq = Sequence(request, slot, slot=slot)
        seq.page_ids = [next(free) for _ in range(engine.pool.num_pages_for(start + n))]
        plan.append(Chunk(seq, start, n, samples=True))
    return StepPlan(chunks=tuple(plan), admitted=tuple(chunk.sequence for chunk in plan))


def time_iteration(engine: Engine, plan: StepPlan) -> IterationTime:
    """Run a plan of `make_plan` once. Its keys and values are written again, so it may be repeated."""
    start = time.perf_counter()
    engine.runner.execute(plan).read()
    return IterationTime(time.perf_counter() - start, engine.runner.host_s)
