"""Several engines behind one queue: each request goes to the one with the least to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from sarathi_jax.engine import Engine
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.parallel import Parallel
from sarathi_jax.request import SamplingParams
from sarathi_jax.schedulers import SchedulerConfig
from sarathi_jax.tokenizer import Tokenizer


class Replicas:
    """`parallel.data` engines with the use of one: add requests, call `step`. Arguments as `Engine`.

    A request goes, as it is added, to the replica with the fewest tokens left to run, outputs to come included. Every
    step sends off work on all replicas before it waits for one of them. All are in this process.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None, *, parallel: Parallel, **options: Any):
        self._start([Engine(model, tokenizer, parallel=each, **options) for each in _replicas(parallel)])

    @classmethod
    def load(cls, model: str | Path, *, parallel: Parallel, **options: Any) -> Replicas:
        """As `Engine.load`; every replica reads the checkpoint."""
        replicas = cls.__new__(cls)
        replicas._start([Engine.load(model, parallel=each, **options) for each in _replicas(parallel)])
        return replicas

    def _start(self, engines: list[Engine]) -> None:
        self.engines = engines
        for index, engine in enumerate(engines):
            engine.replica = index
        self.last_step: StepStats | None = None
        self._homes: dict[str, Engine] = {}
        self._undelivered: list[RequestOutput] = []

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engines[0].tokenizer

    @property
    def vocab_size(self) -> int:
        return self.engines[0].vocab_size

    @property
    def max_model_len(self) -> int:
        return self.engines[0].max_model_len

    @property
    def clock(self) -> Callable[[], float]:
        return self.engines[0].clock

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far, by all."""
        return sum(engine.runner.num_compiled for engine in self.engines)

    @property
    def num_unfinished(self) -> int:
        return sum(engine.num_unfinished for engine in self.engines)

    def has_unfinished(self) -> bool:
        return bool(self._undelivered) or any(engine.has_unfinished() for engine in self.engines)

    def warm_up(self, **options: Any) -> float:
        """As `Engine.warm_up`, one after the other."""
        return sum([engine.warm_up(**options) for engine in self.engines])

    def set_scheduler(self, config: SchedulerConfig) -> None:
        for engine in self.engines:
            engine.set_scheduler(config)

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """As `Engine.add_request`."""
        if request_id in self._homes:
            raise ValueError(f"request_id={request_id!r} is in use by a request that has not ended; choose another")
        engine = min(self.engines, key=lambda engine: engine.scheduler.num_tokens_left)
        engine.add_request(
            request_id, prompt, prompt_token_ids=prompt_token_ids, params=params, arrival_time=arrival_time,
            priority=priority,
        )  # fmt: skip
        self._homes[request_id] = engine

    def step(self) -> list[RequestOutput]:
        """Send off an iteration on every replica that has room in flight, then take the results of one."""
        outputs, self._undelivered = self._undelivered, []
        try:
            for engine in self.engines:
                while engine.dispatch():
                    pass
            flights = [(engine.oldest, engine) for engine in self.engines if engine.oldest is not None]
            ready = [(flight, engine) for flight, engine in flights if flight.step.is_ready()]
            if flights:
                _, engine = min(ready or flights, key=lambda each: each[0].start_s)
                outputs += engine.collect()
                self.last_step = engine.last_step
        except BaseException:
            self._undelivered = outputs
            raise
        for output in outputs:
            if output.finished:
                self._homes.pop(output.request_id, None)
        return outputs

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """As `Engine.put_back`."""
        self._undelivered += outputs

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`."""
        engine = self._homes.pop(request_id, None)
        return engine is not None and engine.abort(request_id)

    def drain(self) -> None:
        """As `Engine.drain`."""
        for engine in self.engines:
            engine.drain()

    def check_integrity(self) -> None:
        """As `Engine.check_integrity`, of every replica."""
        for engine in self.engines:
            engine.check_integrity()


def _replicas(parallel: Parallel) -> list[Parallel]:
    each = parallel.replicas()
    if any(device.process_index != jax.process_index() for one in each for device in one.devices or ()):
        raise ValueError(
            f"data={parallel.data} takes devices of other processes, and the replicas behind a queue are in one: make "
            f"an engine, or replicas, in each process on its own devices (devices=jax.local_devices()), and share "
            f"requests out among the processes"
        )
    return each
