"""Runs plans on the device: one compiled program per shape, compiled ahead, dispatched without waiting.

The model is split once into its static definition and its leaves. The KV pool and the slots' state live here, donated
to every step and replaced by its result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from sarathi_jax.arrays import AnyArray
from sarathi_jax.batch import BatchBuilder, BuiltBatch, HybridBatch
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


class ModelRunner:
    """A model, its KV pool and its compiled steps on one device.

    `stop_ids`: the model's EOS ids (what `min_tokens` holds back, with a request's own).
    """

    def __init__(self, model: Decoder, shapes: Shapes, *, stop_ids: tuple[int, ...] = (), kv_dtype=None):
        self.config = model.config
        self.shapes = shapes
        self.stop_ids = stop_ids
        self.builder = BatchBuilder(shapes)
        graph, state = nnx.split(model)
        self._leaves, tree = jax.tree.flatten(state)
        self._leaves = tuple(self._leaves)
        self._merge = lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        self._kv_dtype = model.dtype if kv_dtype is None else kv_dtype
        self.kv = make_pool(self.config, shapes, self._kv_dtype)
        self._state = init_slot_state(shapes.num_slots, self.config.vocab_size)
        self._compiled: dict[int, Callable] = {}
        self._write_slot: Callable | None = None
        self.host_s = 0.0
        """Seconds the last `execute` took before the device could begin (with compilation, if it had to)."""

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; after `warm_up` it never changes."""
        return len(self._compiled) + (self._write_slot is not None)

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None, num_threads: int = 2) -> float:
        """Compile every shape, run each once on padding, and return the seconds it took.

        `progress(done, total)` is called as programs get ready.
        """
        start = time.perf_counter()
        todo = [n for n in self.shapes.num_tokens if n not in self._compiled]
        total = len(todo) + (self._write_slot is None)
        done = 0
        if self._write_slot is None:
            self._write_slot = self._compile_write_slot()
            done += 1
            if progress:
                progress(done, total)
        with ThreadPoolExecutor(num_threads) as threads:
            lowered = ((n, self._lower(n)) for n in reversed(todo))  # tracing holds the interpreter, compiling does not
            futures = {n: threads.submit(low.compile) for n, low in lowered}
            for n, future in futures.items():
                self._compiled[n] = future.result()
                done += 1
                if progress:
                    progress(done, total)
        for n in todo:
            output = self._run(n, self.builder.empty(n))
            jax.block_until_ready(output)
        return time.perf_counter() - start

    def execute(self, plan: StepPlan) -> DeviceStep:
        """Dispatch a plan and return at once. A shape that `warm_up` has not compiled is compiled now."""
        start = time.perf_counter()
        for seq in plan.admitted:
            if needs_state(seq.params):
                self._init_slot(seq)
        built = self.builder.build(plan)
        num_rows = built.num_tokens + built.num_padding
        if num_rows not in self._compiled:
            self._compiled[num_rows] = self._lower(num_rows).compile()
        output = self._run(num_rows, built.batch)
        self.host_s = time.perf_counter() - start
        return DeviceStep(built, output)

    def recover(self) -> None:
        """After an exception in the middle of a step: make anew what was given away to it. What it held is lost."""
        if self.kv.k.is_deleted() or self.kv.v.is_deleted():
            self.kv = make_pool(self.config, self.shapes, self._kv_dtype)
        if any(leaf.is_deleted() for leaf in self._state):
            self._state = init_slot_state(self.shapes.num_slots, self.config.vocab_size)

    def _run(self, num_rows: int, batch: HybridBatch) -> StepOutput:
        output, self.kv, self._state = self._compiled[num_rows](self._leaves, self.kv, self._state, batch)
        return output

    def _init_slot(self, seq) -> None:
        if self._write_slot is None:
            self._write_slot = self._compile_write_slot()
        stop_ids = (*self.stop_ids, *(seq.params.stop_token_ids or ()))
        rows = slot_rows(seq.params, seq.prompt_token_ids, seq.output_token_ids, stop_ids, self.config.vocab_size)
        self._state = self._write_slot(self._state, np.int32(seq.slot), *rows)

    def _lower(self, num_rows: int):
        return jax.jit(self._step, donate_argnums=(1, 2)).lower(
            self._leaves, self.kv, self._state, self.builder.empty(num_rows)
        )

    def _compile_write_slot(self) -> Callable:
        v = self.config.vocab_size
        rows = (np.zeros(v, np.int32), np.zeros(v, np.bool_), np.zeros(v, np.bool_), np.zeros(v, np.float32))
        return jax.jit(write_slot, donate_argnums=0).lower(self._state, np.int32(0), *rows).compile()

    def _step(
        self, leaves: tuple[Array, ...], kv: KVPool, state: SlotState, batch: HybridBatch
    ) -> tuple[StepOutput, KVPool, SlotState]:
        """The whole step, pure: rows through the model, the last row of each sequence to a token."""
        model: Decoder = self._merge(leaves)
        tokens = batch.tokens._replace(
            token_ids=jnp.where(batch.from_device, state.last_token[batch.token_slots], batch.tokens.token_ids)
        )
        hidden, kv = model(tokens, kv)
        logits = model.logits(hidden[batch.last_rows])
        drawn, chosen, top_ids, top, state = sample(logits, batch.sampling, state)
        prompt_scores = _score_prompts(model, hidden, batch)
        return StepOutput(drawn, TokenScores(chosen, top_ids, top), prompt_scores), kv, state


class DeviceStep:
    """A dispatched step of `ModelRunner`."""

    def __init__(self, built: BuiltBatch, output: StepOutput):
        self.chunks = built.chunks
        self.num_padding = built.num_padding
        self._built = built
        self._output = output

    def read(self) -> ReadStep:
        """Wait for the step and fetch its results."""
        batch = self._built.batch
        fetch = lambda scores: TokenScores(*map(np.asarray, scores))
        return ReadStep(
            tokens=np.asarray(self._output.tokens).tolist(),
            scores=fetch(self._output.scores) if batch.sampling.any_logprobs else None,
            prompt_scores=fetch(self._output.prompt_scores) if batch.any_targets else None,
            first_rows=self._built.first_rows,
        )


def make_pool(config, shapes: Shapes, dtype) -> KVPool:
    """Zeroed keys and values of all layers, a sink page for each; two buffers of their own, as both are donated."""
    shape = (
        config.num_layers * (shapes.num_pages + 1), config.num_kv_heads, shapes.page_size, config.head_dim,
    )  # fmt: skip
    return KVPool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


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
            new = TokenScores(*prompt_logprobs(model.logits(part(hidden)), part(batch.targets)))
            return TokenScores(
                *(lax.dynamic_update_slice_in_dim(a, b, i * tile, 0) for a, b in zip(scores, new, strict=True))
            )

        return lax.cond(part(batch.wants_target).any(), score, lambda: scores)

    return lax.cond(batch.any_targets, lambda: lax.fori_loop(0, num_rows // tile, score_tile, empty), lambda: empty)
