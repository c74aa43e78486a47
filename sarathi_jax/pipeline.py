"""Stages of a pipeline: a program each, on a mesh each; hidden states go from one to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from sarathi_jax import parallel
from sarathi_jax.batch import BatchBuilder
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.models.placement import PlacedPart
from sarathi_jax.request import StepPlan
from sarathi_jax.runner import DeviceStep, ModelRunner
from sarathi_jax.shapes import Shapes


def make_runner(
    model: Decoder | Sequence[PlacedPart], shapes: Shapes, *, stop_ids: tuple[int, ...] = (), kv_dtype=None
) -> ModelRunner | PipelineRunner:
    """The runner of a model on the default device, or of one whose parts are on meshes."""
    if isinstance(model, Decoder):
        return ModelRunner(model, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype)
    if len(model) > 1:
        return PipelineRunner(model, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype)
    return ModelRunner(model[0].decoder, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype, mesh=model[0].mesh)


class PipelineRunner:
    """Runs plans through stages, each a `ModelRunner` with its layers' pool; all pools are under one page table.

    `execute` dispatches every stage of a step and waits for none: a stage begins when the one before is done with the
    step and it with the step before. Slots' state and sampling are the last stage's.
    """

    def __init__(self, parts: Sequence[PlacedPart], shapes: Shapes, *, stop_ids: tuple[int, ...] = (), kv_dtype=None):
        self.config = parts[0].part.config
        self.shapes = shapes
        self.builder = BatchBuilder(shapes)
        self.stages = [
            ModelRunner(
                placed.decoder, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype, mesh=placed.mesh,
                is_first=placed.part.is_first, is_last=placed.part.is_last,
            )
            for placed in parts
        ]  # fmt: skip
        self.host_s = 0.0
        """Seconds the last `execute` took before the last stage could begin."""

    @property
    def kv(self) -> KVPool:
        """The first stage's pool."""
        return self.stages[0].kv

    @property
    def weights(self) -> tuple[Array, ...]:
        return tuple(weight for stage in self.stages for weight in stage.weights)

    @property
    def meshes(self) -> list[Mesh]:
        return [mesh for stage in self.stages for mesh in stage.meshes]

    @property
    def num_compiled(self) -> int:
        return sum(stage.num_compiled for stage in self.stages)

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None, num_threads: int = 2) -> float:
        """As `ModelRunner.warm_up`."""
        start = time.perf_counter()
        each = len(self.shapes.num_tokens)
        done, total = 0, each * len(self.stages) + 1
        todo = []
        for stage in self.stages:
            report = None if progress is None else lambda i, _, done=done: progress(done + i, total)
            todo = stage.compile(progress=report, num_threads=num_threads)
            done += each
        for n in todo:
            jax.block_until_ready(self._run(n, self.builder.empty(n)))
        return time.perf_counter() - start

    def execute(self, plan: StepPlan) -> DeviceStep:
        """Dispatch a plan to all stages and return at once."""
        start = time.perf_counter()
        self.stages[-1].admit(plan)
        built = self.builder.build(plan)
        assert not built.batch.from_device.any(), "a token that the host has not read was planned in a pipeline"
        num_rows = built.num_tokens + built.num_padding
        outputs = self._run(num_rows, built.batch)
        self.host_s = time.perf_counter() - start
        hops = (len(self.stages) - 1) * num_rows * self.config.hidden_size * 4
        num_bytes = hops + sum(stage.collective_bytes(num_rows) for stage in self.stages)
        return DeviceStep(built, outputs[-1], tuple(outputs), num_bytes)

    def recover(self) -> None:
        for stage in self.stages:
            stage.recover()

    def _run(self, num_rows: int, batch) -> list:
        outputs = [self.stages[0]._run(num_rows, batch)]
        for stage in self.stages[1:]:
            [mesh] = stage.meshes
            hidden = jax.device_put(outputs[-1], parallel.sharding(mesh))
            outputs.append(stage.run_stage(num_rows, batch, hidden))
        return outputs


class StageClock:
    """Says when stages worked: for each a thread waits for its outputs and looks at the clock."""

    def __init__(self, num_stages: int, clock: Callable[[], float]):
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"stage-{i}") for i in range(num_stages)]
        self._clock = clock
        self._free_s = [-float("inf")] * num_stages

    def watch(self, outputs: Sequence[Array]) -> list[Future[float]]:
        """The time at which each stage's output will be there."""
        return [thread.submit(self._wait, output) for thread, output in zip(self._threads, outputs, strict=True)]

    def spans(self, start_s: float, ends: Sequence[Future[float]]) -> tuple[tuple[float, float], ...]:
        """From when to when each stage worked on a step; to be asked in the order of the steps."""
        spans, at = [], start_s
        for stage, end in enumerate(ends):
            begin = max(at, self._free_s[stage])
            at = self._free_s[stage] = max(end.result(), begin)
            spans.append((begin, at))
        return tuple(spans)

    def _wait(self, output) -> float:
        jax.block_until_ready(output)
        return self._clock()
