"""Stages of a pipeline: a program each, on a mesh each; hidden states go from one to the next.

In several processes each runs the stages that it has devices of. All dispatch the same steps, and of each step its
parts in the same order, stage, hop, stage, ...: what devices do together comes in one order for all of them, so that
none waits for one that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from sarathi_jax import parallel
from sarathi_jax.axes import STAGE
from sarathi_jax.batch import BatchBuilder
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.models.placement import PlacedPart
from sarathi_jax.request import StepPlan
from sarathi_jax.runner import DeviceStep, ModelRunner, ReadStep
from sarathi_jax.shapes import Shapes


def make_runner(
    model: Decoder | Sequence[PlacedPart], shapes: Shapes, *, stop_ids: tuple[int, ...] = (), kv_dtype=None
) -> ModelRunner | PipelineRunner:
    """The runner of a model on the default device, or of one whose parts are on meshes."""
    if isinstance(model, Decoder):
        return ModelRunner(model, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype)
    if len(model) > 1:
        return PipelineRunner(model, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype)
    [(_, mesh, decoder)] = model
    assert decoder is not None, "a model that is all on devices of other processes"
    return ModelRunner(decoder, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype, mesh=mesh)


class PipelineRunner:
    """Runs plans through stages, each a `ModelRunner` with its layers' pool; all pools are under one page table.

    `execute` dispatches every stage of a step and waits for none: a stage begins when the one before is done with the
    step and it with the step before. Slots' state and sampling are the last stage's. Programs, pool and weights are
    those of this process's stages.
    """

    def __init__(self, parts: Sequence[PlacedPart], shapes: Shapes, *, stop_ids: tuple[int, ...] = (), kv_dtype=None):
        self.config = parts[0].part.config
        self.shapes = shapes
        self.builder = BatchBuilder(shapes)
        self.meshes = [placed.mesh for placed in parts]
        self._stages = [
            None if placed.decoder is None else ModelRunner(
                placed.decoder, shapes, stop_ids=stop_ids, kv_dtype=kv_dtype, mesh=placed.mesh,
                is_first=placed.part.is_first, is_last=placed.part.is_last,
            )
            for placed in parts
        ]  # fmt: skip
        self._hops = [Hop(*meshes, self.config.hidden_size) for meshes in pairwise(self.meshes)]
        self.relay: Callable[[ReadStep | None], ReadStep] | None = None
        """Brings results from processes with the last stage to those without it: see `distributed.Relay`."""
        self.host_s = 0.0
        """Seconds the last `execute` took before the last stage could begin."""

    @property
    def stages(self) -> list[ModelRunner]:
        """Those of this process."""
        return [stage for stage in self._stages if stage is not None]

    @property
    def kv(self) -> KVPool:
        """The pool of the first of them."""
        return self.stages[0].kv

    @property
    def weights(self) -> tuple[Array, ...]:
        return tuple(weight for stage in self.stages for weight in stage.weights)

    @property
    def num_compiled(self) -> int:
        return sum(part.num_compiled for part in (*self.stages, *self._hops))

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None, num_threads: int = 2) -> float:
        """As `ModelRunner.warm_up`."""
        start = time.perf_counter()
        each = len(self.shapes.num_tokens)
        done, total = 0, each * len(self.stages) + (self._stages[-1] is not None)
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
        if self._stages[-1] is not None:
            self._stages[-1].admit(plan)
        built = self.builder.build(plan)
        assert not built.batch.from_device.any(), "a token that the host has not read was planned in a pipeline"
        num_rows = built.num_tokens + built.num_padding
        outputs = self._run(num_rows, built.batch)
        self.host_s = time.perf_counter() - start
        hops = len(self._hops) * num_rows * self.config.hidden_size * 4
        num_bytes = hops + sum(stage.collective_bytes(num_rows) for stage in self.stages)
        return DeviceStep(built, outputs[-1], tuple(outputs), num_bytes, self.relay)

    def recover(self) -> None:
        for stage in self.stages:
            stage.recover()

    def _run(self, num_rows: int, batch) -> list:
        """What each stage leaves; None of another process's."""
        outputs, hidden = [], None
        for stage, hop in zip(self._stages, (None, *self._hops), strict=True):
            if hop is not None:
                hidden = hop(num_rows, outputs[-1])
            if stage is None:
                outputs.append(None)
            elif hop is None:
                outputs.append(stage._run(num_rows, batch))
            else:
                assert hidden is not None
                outputs.append(stage.run_stage(num_rows, batch, hidden))
        return outputs


class Hop:
    """Hidden states [T, d] from the devices of a stage to those of the next one.

    Within a process they are copied. Between processes it is a program on the devices of both, a permutation along an
    axis of stages: XLA's collectives are what every backend has between hosts. Each process that has one of the devices
    takes part, those of the next stage with zeros for what they send.
    """

    def __init__(self, source: Mesh, target: Mesh, width: int):
        self._width = width
        self._target = parallel.sharding(target)
        mesh = parallel.joined([source, target])
        self._both = NamedSharding(mesh, PartitionSpec(STAGE))
        self._is_local, self._is_elsewhere = not mesh.is_multi_process, not mesh.local_devices
        self._receivers = set(target.local_devices)
        self._programs: dict[int, tuple[Callable, Callable | None]] = {}

    @property
    def num_compiled(self) -> int:
        return sum(1 + (zeros is not None) for _, zeros in self._programs.values())

    def __call__(self, num_rows: int, hidden: Float[Array, "T d"] | None) -> Float[Array, "T d"] | None:
        """Dispatched; None where this process has none of the next stage's devices."""
        if self._is_elsewhere:
            return None
        if self._is_local:
            return jax.device_put(hidden, self._target)
        if num_rows not in self._programs:
            self._programs[num_rows] = self._compile(num_rows)
        permute, zeros = self._programs[num_rows]
        parts = [x for x in (hidden, zeros and zeros()) if x is not None]
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        moved = permute(jax.make_array_from_single_device_arrays((2 * num_rows, self._width), self._both, shards))
        if zeros is None:
            return None
        received = [shard.data for shard in moved.addressable_shards if shard.device in self._receivers]
        return jax.make_array_from_single_device_arrays((num_rows, self._width), self._target, received)

    def _compile(self, num_rows: int) -> tuple[Callable, Callable | None]:
        """The permutation, and what makes the zeros."""
        spec = self._both.spec
        permute = jax.shard_map(
            lambda x: lax.ppermute(x, STAGE, [(0, 1)]), mesh=self._both.mesh, in_specs=spec, out_specs=spec,
            check_vma=False,
        )  # fmt: skip
        shape = jax.ShapeDtypeStruct((2 * num_rows, self._width), jnp.float32, sharding=self._both)
        make_zeros = lambda: jnp.zeros((num_rows, self._width), jnp.float32)
        zeros = jax.jit(make_zeros, out_shardings=self._target).lower().compile() if self._receivers else None
        return jax.jit(permute).lower(shape).compile(), zeros


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
