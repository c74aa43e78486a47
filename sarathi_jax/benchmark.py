"""An engine as a server of the open-loop driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sarathi_jax.engine import Engine
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.replicas import Replicas
from sarathi_jax.request import SamplingParams


class EngineServer:
    """An engine, or replicas, as the driver's `Server`: `run_open_loop(EngineServer(engine), workload)`.

    Waiting is sleeping.
    """

    def __init__(self, engine: Engine | Replicas, *, sleep: Callable[[float], None] = time.sleep):
        self.engine = engine
        self._sleep = sleep

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished()

    @property
    def last_step(self) -> StepStats | None:
        return self.engine.last_step

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def num_compiled(self) -> int:
        return self.engine.num_compiled

    def add_request(
        self, request_id: str, *, prompt_token_ids: Iterable[int], params: SamplingParams, arrival_time: float
    ) -> None:
        self.engine.add_request(
            request_id, prompt_token_ids=prompt_token_ids, params=params, arrival_time=arrival_time
        )  # fmt: skip

    def step(self) -> list[RequestOutput]:
        return self.engine.step()

    def abort(self, request_id: str) -> bool:
        found = self.engine.abort(request_id)
        if not self.engine.has_unfinished():
            self.engine.drain()  # what is still on the device would run in the next measurement
        return found

    def now(self) -> float:
        return self.engine.clock()

    def wait_until(self, time_s: float) -> None:
        while (left := time_s - self.now()) > 0:
            self._sleep(left)
