"""Runs plans on the device: one compiled program per shape, compiled ahead, dispatched without waiting.

The model is split once into its static definition and its leaves. The KV pool and the slots' state live here, donated
to every step and replaced by its result. On a mesh the whole step runs under `jax.shard_map`, each device with its own
heads, MLP columns and rows of the vocabulary.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from sarathi_jax import parallel
from sarathi_jax.arrays import AnyArray
from sarathi_jax.attention import pool_head_size
from sarathi_jax.batch import BatchBuilder, BuiltBatch, HybridBatch
from sarathi_jax.config import ModelConfig
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.request import MAX_LOGPROBS, StepPlan
from sarathi_jax.sampler import SlotState, init_slot_state, needs_state, prompt_logprobs, sample, slot_rows, write_slot
from sarathi_jax.shapes import Shapes

_SCORE_ROWS = 16  # prompt tokens scored at a time: their logits are [_SCORE_ROWS, V]


class TokenScores(NamedTuple):
    """Logprobs of chosen tokens and of the likeliest ones, row by row, from raw logits."""

    chosen: Float[AnyArray, " N"]
    top_ids: Int32[AnyArray, "N K"]
    top: Float[AnyArray, "N K"]


class StepOutput(NamedTuple):
    """What a step leaves on the device: a token for each sequence row, its scores, and the prompt tokens' scores."""

    tokens: Int32[Array, " S"]
    scores: TokenScores
    prompt_scores: TokenScores


class ReadStep(NamedTuple):
    """A step's results on the host. `tokens[i]` belongs to `chunks[i]` if that samples; scores are None unless asked
    for; the prompt tokens of chunk i were scored in rows `first_rows[i]` on."""

    tokens: list[int]
    scores: TokenScores | None
    prompt_scores: TokenScores | None
    first_rows: tuple[int, ...]


class Runner(Protocol):
    """What runs plans: `ModelRunner`, or a pipeline of them."""

    config: ModelConfig
    shapes: Shapes
    host_s: float

    @property
    def kv(self) -> KVPool: ...

    @property
    def weights(self) -> tuple[Array, ...]:
        """All of the model's, on their devices."""
        ...

    @property
    def num_compiled(self) -> int: ...

    @property
    def meshes(self) -> list[Mesh]:
        """Of each stage; none is the default device."""
        ...

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None, num_threads: int = 2) -> float: ...

    def execute(self, plan: StepPlan) -> DeviceStep: ...

    def recover(self) -> None: ...


class ModelRunner:
    """A model, its KV pool and its compiled steps, on one device or on a mesh of one axis, "tensor".

    `stop_ids`: the model's EOS ids (what `min_tokens` holds back, with a request's own). On a `mesh` the model is one
    device's share (`parts.ModelPart.local_config`) with all devices' weights. A stage of a pipeline that is not the
    first takes hidden states in place of tokens, one that is not the last gives them (see `pipeline.PipelineRunner`).
    """

    def __init__(
        self,
        model: Decoder,
        shapes: Shapes,
        *,
        stop_ids: tuple[int, ...] = (),
        kv_dtype=None,
        mesh: Mesh | None = None,
        is_first: bool = True,
        is_last: bool = True,
    ):
        self.config = model.config
        self.mesh = mesh
        self.is_first, self.is_last = is_first, is_last
        self.shapes = shapes
        self.stop_ids = stop_ids
        self.builder = BatchBuilder(shapes)
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        self._leaves: tuple[Array, ...] = tuple(leaves)
        self._merge = lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        self._dtype = model.dtype
        self._kv_dtype = model.dtype if kv_dtype is None else kv_dtype
        self._num_logits = model.num_logits if is_last else 0
        self._kv = make_pool(self.config, shapes, self._kv_dtype, mesh)
        self._state = self._make_state()
        self._compiled: dict[int, Callable] = {}
        self._write_slot: Callable | None = None
        self.host_s = 0.0
        """Seconds the last `execute` took before the device could begin (with compilation, if it had to)."""

    @property
    def kv(self) -> KVPool:
        return self._kv

    @property
    def weights(self) -> tuple[Array, ...]:
        return self._leaves

    @property
    def meshes(self) -> list[Mesh]:
        return [] if self.mesh is None else [self.mesh]

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; after `warm_up` it never changes."""
        return len(self._compiled) + (self._write_slot is not None)

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None, num_threads: int = 2) -> float:
        """Compile every shape, run each once on padding, and return the seconds it took.

        `progress(done, total)` is called as programs get ready.
        """
        start = time.perf_counter()
        todo = self.compile(progress=progress, num_threads=num_threads)
        for n in todo:
            output = self._run(n, self.builder.empty(n))
            jax.block_until_ready(output)
        return time.perf_counter() - start

    def compile(self, *, progress: Callable[[int, int], None] | None = None, num_threads: int = 2) -> list[int]:
        """Compile every shape that has not been compiled, and return them."""
        todo = [n for n in self.shapes.num_tokens if n not in self._compiled]
        needs_write_slot = self.is_last and self._write_slot is None
        total, done = len(todo) + needs_write_slot, 0
        if needs_write_slot:
            self._write_slot = self._compile_write_slot()
            done += 1
            if progress:
                progress(done, total)
        with ThreadPoolExecutor(num_threads) as threads:
            lowered = ((n, self.lower(n)) for n in reversed(todo))  # tracing holds the interpreter, compiling does not
            futures = {n: threads.submit(low.compile) for n, low in lowered}
            for n, future in futures.items():
                self._compiled[n] = future.result()
                done += 1
                if progress:
                    progress(done, total)
        return todo

    def lower(self, num_rows: int) -> jax.stages.Lowered:
        """The step of so many rows, traced: what `compile` compiles."""
        arguments: list[Any] = [self._leaves, self.kv, self._state, self.builder.empty(num_rows)]
        if not self.is_first:
            shape = num_rows, self.config.hidden_size
            arguments.append(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._everywhere))
        if self.mesh is None:
            return jax.jit(self._step, donate_argnums=(1, 2)).lower(*arguments)
        whole = PartitionSpec()
        pool = parallel.partition(parallel.POOL_AXES)
        leaves = tuple(leaf.sharding.spec for leaf in self._leaves)  # pyright: ignore[reportAttributeAccessIssue]
        step = jax.shard_map(
            self._step, mesh=self.mesh, in_specs=(leaves, pool, *[whole] * (len(arguments) - 2)),
            out_specs=(whole, pool, whole), check_vma=False,
        )  # fmt: skip
        mesh = self.mesh
        place = lambda specs: jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        in_shardings = place((leaves, pool, *[whole] * (len(arguments) - 2)))
        jitted = jax.jit(
            step, donate_argnums=(1, 2), in_shardings=in_shardings, out_shardings=place((whole, pool, whole))
        )
        return jitted.lower(*arguments)

    def execute(self, plan: StepPlan) -> DeviceStep:
        """Dispatch a plan and return at once. A shape that `warm_up` has not compiled is compiled now."""
        start = time.perf_counter()
        self.admit(plan)
        built = self.builder.build(plan)
        num_rows = built.num_tokens + built.num_padding
        output = self._run(num_rows, built.batch)
        self.host_s = time.perf_counter() - start
        return DeviceStep(built, output, collective_bytes=self.collective_bytes(num_rows))

    def collective_bytes(self, num_rows: int) -> int:
        """What a device of the mesh contributes to sums, and gets of gathered logits, in a step of so many rows."""
        if self.mesh is None or self.mesh.size == 1:
            return 0
        sums = self.config.num_layers * (2 if self.config.block == "sequential" else 1)
        num_bytes = sums * num_rows * self.config.hidden_size * 4
        if self.is_first:
            num_bytes += num_rows * self.config.hidden_size * self._dtype.itemsize
        return num_bytes + self.shapes.num_rows * self._num_logits * 4

    def admit(self, plan: StepPlan) -> None:
        """Write what the plan's new sequences need on the device to their slots."""
        for seq in plan.admitted:
            if needs_state(seq.params):
                self._init_slot(seq)

    def recover(self) -> None:
        """After an exception in the middle of a step: make anew what was given away to it. What it held is lost."""
        if self.kv.k.is_deleted() or self.kv.v.is_deleted():
            self._kv = make_pool(self.config, self.shapes, self._kv_dtype, self.mesh)
        if any(leaf.is_deleted() for leaf in self._state):
            self._state = self._make_state()

    def run_stage(self, num_rows: int, batch: HybridBatch, hidden: Float[Array, "T d"]) -> Any:
        """Dispatch a step of a stage that is not the first: its hidden states, of the last stage its output."""
        program = self._program(num_rows)
        output, self._kv, self._state = program(self._leaves, self._kv, self._state, batch, hidden)
        return output

    def _run(self, num_rows: int, batch: HybridBatch) -> Any:
        program = self._program(num_rows)
        output, self._kv, self._state = program(self._leaves, self._kv, self._state, batch)
        return output

    def _program(self, num_rows: int) -> Callable:
        if num_rows not in self._compiled:
            self._compiled[num_rows] = self.lower(num_rows).compile()
        return self._compiled[num_rows]

    def _make_state(self) -> SlotState | tuple[()]:
        if not self.is_last:
            return ()
        make = functools.partial(init_slot_state, self.shapes.num_slots, self._num_logits)
        return make() if self.mesh is None else jax.jit(make, out_shardings=self._everywhere)()

    @property
    def _everywhere(self) -> NamedSharding | None:
        """Where an array goes that every device of the mesh has whole."""
        return None if self.mesh is None else parallel.sharding(self.mesh)

    def _init_slot(self, seq) -> None:
        if self._write_slot is None:
            self._write_slot = self._compile_write_slot()
        stop_ids = (*self.stop_ids, *(seq.params.stop_token_ids or ()))
        rows = slot_rows(seq.params, seq.prompt_token_ids, seq.output_token_ids, stop_ids, self._num_logits)
        self._state = self._write_slot(self._state, np.int32(seq.slot), *rows)

    def _compile_write_slot(self) -> Callable:
        v = self._num_logits
        rows = (np.zeros(v, np.int32), np.zeros(v, np.bool_), np.zeros(v, np.bool_), np.zeros(v, np.float32))
        jitted = jax.jit(write_slot, donate_argnums=0, out_shardings=self._everywhere)
        return jitted.lower(self._state, np.int32(0), *rows).compile()

    def _step(
        self, leaves: tuple[Array, ...], kv: KVPool, state: Any, batch: HybridBatch, hidden: Array | None = None
    ) -> tuple[Any, KVPool, Any]:
        """The whole step, pure: rows through the model, the last row of each sequence to a token."""
        model: Decoder = self._merge(leaves)
        tokens = batch.tokens
        if self.is_first and self.is_last:  # a pipeline's first stage gets all its tokens from the host
            last_tokens = state.last_token[batch.token_slots]
            tokens = tokens._replace(token_ids=jnp.where(batch.from_device, last_tokens, tokens.token_ids))
        hidden, kv = model(tokens, kv, hidden)
        if not self.is_last:
            return hidden, kv, state
        logits = model.logits(hidden[batch.last_rows])
        num_logprobs = min(MAX_LOGPROBS, self.config.vocab_size)
        drawn, chosen, top_ids, top, state = sample(logits, batch.sampling, state, num_logprobs=num_logprobs)
        prompt_scores = _score_prompts(model, hidden, batch)
        return StepOutput(drawn, TokenScores(chosen, top_ids, top), prompt_scores), kv, state


class DeviceStep:
    """A dispatched step.

    `stage_outputs`: what each stage of a pipeline leaves, the last one's is `output`; None of another process's stages.
    `relay` brings the results where they are not.
    """

    def __init__(
        self,
        built: BuiltBatch,
        output: StepOutput | None,
        stage_outputs: tuple[Any, ...] = (),
        collective_bytes: int = 0,
        relay: Callable[[ReadStep | None], ReadStep] | None = None,
    ):
        self.stage_outputs = stage_outputs
        self.collective_bytes = collective_bytes
        self.chunks = built.chunks
        self.num_padding = built.num_padding
        self._built = built
        self._output = output
        self._relay = relay

    def is_ready(self) -> bool:
        """Whether `read` would not wait; of a step whose last stage is in this process."""
        assert self._output is not None
        return self._output.tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def read(self) -> ReadStep:
        """Wait for the step and fetch its results."""
        step = None if self._output is None else self._fetch(self._output)
        if self._relay is not None:
            step = self._relay(step)._replace(first_rows=self._built.first_rows)
        if step is None:
            raise RuntimeError("the last stage is another process's: distributed.serve brings its results")
        return step

    def _fetch(self, output: StepOutput) -> ReadStep:
        batch = self._built.batch
        fetch = lambda scores: TokenScores(*map(np.asarray, scores))
        return ReadStep(
            tokens=np.asarray(output.tokens).tolist(),
            scores=fetch(output.scores) if batch.sampling.any_logprobs else None,
            prompt_scores=fetch(output.prompt_scores) if batch.any_targets else None,
            first_rows=self._built.first_rows,
        )


def make_pool(config: ModelConfig, shapes: Shapes, dtype, mesh: Mesh | None = None) -> KVPool:
    """Zeroed keys and values of all layers, a sink page for each; two buffers of their own, as both are donated.

    On a mesh `config` is one device's share, and each device has its own heads.
    """
    kv_heads = config.num_kv_heads * (1 if mesh is None else mesh.size)
    head_size = pool_head_size(config.head_dim)
    shape = config.num_layers * (shapes.num_pages + 1), kv_heads, shapes.page_size, head_size
    make = lambda: KVPool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    return make() if mesh is None else jax.jit(make, out_shardings=parallel.sharding(mesh, parallel.POOL_AXES))()


def _score_prompts(model: Decoder, hidden: Float[Array, "T d"], batch: HybridBatch) -> TokenScores:
    """Scores of the next prompt token at every row that wants it, a few rows at a time; zeros elsewhere."""
    num_rows = hidden.shape[0]
    k = min(MAX_LOGPROBS, model.config.vocab_size)
    tile = math.gcd(_SCORE_ROWS, num_rows)
    empty = TokenScores(
        jnp.zeros(num_rows, jnp.float32), jnp.zeros((num_rows, k), jnp.int32), jnp.zeros((num_rows, k), jnp.float32)
    )

    def score_tile(i, scores: TokenScores) -> TokenScores:
        part = lambda x: lax.dynamic_slice_in_dim(x, i * tile, tile)

        def score() -> TokenScores:
            new = TokenScores(*prompt_logprobs(model.logits(part(hidden)), part(batch.targets), k))
            return TokenScores(
                *(lax.dynamic_update_slice_in_dim(a, b, i * tile, 0) for a, b in zip(scores, new, strict=True))
            )

        return lax.cond(part(batch.wants_target).any(), score, lambda: scores)

    return lax.cond(batch.any_targets, lambda: lax.fori_loop(0, num_rows // tile, score_tile, empty), lambda: empty)
