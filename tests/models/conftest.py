"""A driver that feeds known tokens to a decoder the way an engine does, to compare logits with an oracle's."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.batch import BatchBuilder
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan
from sarathi_jax.shapes import Shapes

LOGIT_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Forced:
    """`token_ids` are given: the first `prompt_len` in chunks of `chunk`, the others in chunks of `step`: decodes."""

    token_ids: Seq[int]
    prompt_len: int
    chunk: int
    step: int = 1

    def sizes(self) -> list[int]:
        cut = lambda n, size: [size] * (n // size) + [n % size] * (n % size > 0)
        return cut(self.prompt_len, self.chunk) + cut(len(self.token_ids) - self.prompt_len, self.step)


class TeacherForcing:
    """Runs sequences side by side, a chunk of each in every step, through scattered pages of a pool full of NaN.

    `optimise` False compiles faster: for small models.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        row_counts: tuple[int, ...],
        max_len: int,
        num_seqs: int = 4,
        page_size: int = 8,
        optimise: bool = True,
    ):
        max_pages = -(-max_len // page_size)
        self.model = model
        self.shapes = Shapes(
            num_tokens=row_counts, num_rows=8, num_slots=num_seqs, page_size=page_size, max_pages=max_pages,
            num_pages=max_pages * num_seqs,
        )  # fmt: skip
        weights = {name: param[...] for name, param in model.weights.items()}
        rebuild = lambda weights: Decoder(model.config, weights, attention=model.attention)
        options = None if optimise else {"xla_backend_optimization_level": 0}
        run = jax.jit(lambda weights, rows, kv: rebuild(weights)(rows, kv), donate_argnums=2, compiler_options=options)
        logits = jax.jit(lambda weights, hidden: rebuild(weights).logits(hidden), compiler_options=options)
        self._run = lambda rows, kv: run(weights, rows, kv)
        self._logits = lambda hidden: logits(weights, hidden)

    def logits(self, sequences: Seq[Forced], positions: Seq[Seq[int]] | None = None) -> list[np.ndarray]:
        """f32[positions, V] for each sequence; None is every position."""
        shapes, config = self.shapes, self.model.config
        assert len(sequences) <= shapes.num_slots
        builder = BatchBuilder(shapes)
        free_pages = np.random.default_rng(0).permutation(shapes.num_pages).tolist()
        pool = (config.num_layers * (shapes.num_pages + 1), config.num_kv_heads, shapes.page_size, config.head_dim)
        kv = KVPool(*(jnp.full(pool, jnp.nan, self.model.dtype) for _ in range(2)))
        alive, sizes, hidden = [], [], []
        for slot, forced in enumerate(sequences):
            ids = tuple(map(int, forced.token_ids))
            request = Request(
                request_id=str(slot),
                prompt_token_ids=ids[: forced.prompt_len],
                params=SamplingParams(),
                arrival_time_s=0.0,
            )
            alive.append(Sequence(request, slot, slot=slot, output_token_ids=list(ids[forced.prompt_len :])))
            sizes.append(forced.sizes())
            hidden.append(np.zeros((len(ids), config.hidden_size), np.float32))
        admitted = tuple(alive)
        while any(sizes):
            chunks = []
            for seq, left in zip(alive, sizes, strict=True):
                if left:
                    size, start = left.pop(0), seq.num_computed
                    seq.num_computed += size
                    while len(seq.page_ids) * shapes.page_size < seq.num_computed:
                        seq.page_ids.append(free_pages.pop())
                    chunks.append(Chunk(seq, start, size, False))
            built = builder.build(StepPlan(chunks=tuple(chunks), admitted=admitted))
            admitted = ()
            x, kv = self._run(built.batch.tokens, kv)
            x = np.asarray(x)
            for chunk, row in zip(built.chunks, built.first_rows, strict=True):
                hidden[chunk.sequence.seq_id][chunk.start : chunk.end] = x[row : row + chunk.num_tokens]
        if positions is not None:
            hidden = [h[np.asarray(rows)] for h, rows in zip(hidden, positions, strict=True)]
        return [self._head(h) for h in hidden]

    def _head(self, hidden: np.ndarray) -> np.ndarray:
        num_rows = len(hidden)
        padded = np.pad(hidden, ((0, -num_rows % LOGIT_ROWS), (0, 0)))
        blocks = [np.asarray(self._logits(block)) for block in padded.reshape(-1, LOGIT_ROWS, hidden.shape[1])]
        return np.concatenate(blocks)[:num_rows]


@pytest.fixture(scope="session")
def teacher_forcing() -> Callable[..., TeacherForcing]:
    return TeacherForcing


@pytest.fixture(scope="session")
def forced() -> type[Forced]:
    return Forced
