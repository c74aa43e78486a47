"""From a plan to arrays: one hybrid batch in the smallest shape that fits, laid out on the host with NumPy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from sarathi_jax.arrays import AnyArray, AnyScalar
from sarathi_jax.models.decoder import TokenRows
from sarathi_jax.request import Chunk, Sequence, StepPlan
from sarathi_jax.sampler import SamplingRows, needs_state, seed_key
from sarathi_jax.shapes import Shapes

_BY_SLOT = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "use_state", "key")
"""Sampling settings that a slot keeps from admission on."""


class HybridBatch(NamedTuple):
    """One step's input: a pytree whose structure never changes. Rows past the last token are padding.

    A token row with `from_device` takes the last token of slot `token_slots`: it may not have been read yet.
    `last_rows` is the row of each sequence's last token. `targets` are the prompt tokens that come next, scored where
    `wants_target`.
    """

    tokens: TokenRows
    token_slots: Int32[AnyArray, " T"]
    from_device: Bool[AnyArray, " T"]
    last_rows: Int32[AnyArray, " S"]
    sampling: SamplingRows
    targets: Int32[AnyArray, " T"]
    wants_target: Bool[AnyArray, " T"]
    any_targets: Bool[AnyScalar, ""]


class BuiltBatch(NamedTuple):
    """`chunks[i]` is in sequence row i and starts at token row `first_rows[i]`."""

    batch: HybridBatch
    chunks: tuple[Chunk, ...]
    first_rows: tuple[int, ...]
    num_tokens: int
    num_padding: int


class BatchBuilder:
    """Lays plans out. Keeps a row of settings and pages for each slot, so that a step costs a few array operations."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        n = shapes.num_slots + 1
        self._page_table = np.full((n, shapes.max_pages), shapes.num_pages, np.int32)
        self._num_pages, self._num_released = [0] * n, [0] * n
        self._settings = _neutral_rows(n)

    def build(self, plan: StepPlan) -> BuiltBatch:
        """The batch of a plan that is not empty. Must run before the scheduler is called again: pages may move."""
        for seq in plan.admitted:
            self._admit(seq)
        # Decodes of like length next to each other: they share a loop over their pages.
        chunks = sorted(plan.chunks, key=lambda c: -c.end if c.num_tokens == 1 else 1)
        sizes = [c.num_tokens for c in chunks]
        num_tokens, num_seqs = sum(sizes), len(chunks)
        rows = self.shapes.fit(num_tokens)
        first_rows = [0]
        for size in sizes:
            first_rows.append(first_rows[-1] + size)
        slots = np.fromiter((self._update_pages(c.sequence) for c in chunks), np.int32, num_seqs)
        tokens = self._token_rows(chunks, first_rows, slots, rows)
        known = np.fromiter(
            (c.sequence.prompt_len + len(c.sequence.output_token_ids) for c in chunks), np.int32, num_seqs
        )
        starts = np.fromiter((c.start for c in chunks), np.int32, num_seqs)
        from_device = _padded((starts >= known).repeat(sizes), rows, False)
        token_slots = _padded(
            np.where(starts >= known, slots, self.shapes.num_slots).repeat(sizes), rows, self.shapes.num_slots
        )
        targets, wants_target = self._targets(chunks, first_rows, rows)
        batch = HybridBatch(
            tokens=tokens,
            token_slots=token_slots.astype(np.int32),
            from_device=from_device,
            last_rows=_padded(np.asarray(first_rows[1:], np.int32) - 1, self.shapes.num_rows, 0),
            sampling=self._sampling_rows(chunks, slots),
            targets=targets,
            wants_target=wants_target,
            any_targets=np.bool_(wants_target.any()),
        )
        return BuiltBatch(batch, tuple(chunks), tuple(first_rows[:-1]), num_tokens, rows - num_tokens)

    def empty(self, num_tokens: int) -> HybridBatch:
        """A batch of padding only in the shape of `num_tokens` rows: what warm-up compiles for."""
        sink, rows, seqs = self.shapes.num_pages, num_tokens, self.shapes.num_rows
        zeros = lambda n: np.zeros(n, np.int32)
        tokens = TokenRows(
            token_ids=zeros(rows), positions=zeros(rows), prompt_lens=zeros(rows), offsets=zeros(rows),
            page_ids=np.full(rows, sink, np.int32),
            page_table=np.full((seqs, self.shapes.max_pages), sink, np.int32),
            kv_lens=zeros(seqs), cu_q_lens=zeros(seqs + 1), num_seqs=np.int32(0), num_decodes=np.int32(0),
        )  # fmt: skip
        return HybridBatch(
            tokens=tokens, token_slots=np.full(rows, self.shapes.num_slots, np.int32), from_device=np.zeros(rows, bool),
            last_rows=zeros(seqs), sampling=self._sampling_rows([], zeros(0)), targets=zeros(rows),
            wants_target=np.zeros(rows, bool), any_targets=np.bool_(False),
        )  # fmt: skip

    def _admit(self, seq: Sequence) -> None:
        """Write a sequence's settings to its slot; its pages are listed anew."""
        slot, p, s = seq.slot, seq.params, self._settings
        assert slot is not None and 0 <= slot < self.shapes.num_slots, f"no slot: {seq}"
        self._num_pages[slot] = self._num_released[slot] = 0
        s.temperature[slot] = p.temperature
        s.top_k[slot] = max(p.top_k, 0)
        s.top_p[slot], s.min_p[slot] = p.top_p, p.min_p
        s.repetition[slot], s.presence[slot], s.frequency[slot] = (
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
        )
        s.use_state[slot] = needs_state(p)
        s.key[slot] = seed_key(seq.seed, seq.index)

    def _update_pages(self, seq: Sequence) -> int:
        """Bring the slot's row of the page table up to date; returns the slot. Pages given back become the sink."""
        slot = seq.slot
        assert slot is not None, f"in a plan without a slot: {seq}"
        have, now, gone = self._num_pages[slot], seq.num_pages, seq.num_released
        if have < now:
            new = np.asarray(seq.page_ids[have - now :], np.int32)
            assert new.min() >= 0 and new.max() < self.shapes.num_pages, f"page ids {new} outside the pool: {seq}"
            self._page_table[slot, have:now] = new
            self._num_pages[slot] = now
        if self._num_released[slot] < gone:
            self._page_table[slot, self._num_released[slot] : gone] = self.shapes.num_pages
            self._num_released[slot] = gone
        return slot

    def _token_rows(self, chunks: Seq[Chunk], first_rows: list[int], slots: np.ndarray, rows: int) -> TokenRows:
        num_seqs, sizes = len(chunks), [c.num_tokens for c in chunks]
        token_ids: list[int] = []
        for c in chunks:
            ids = c.sequence.token_ids(c.start, c.end)
            token_ids += ids if len(ids) == c.num_tokens else [0]  # not read yet: the device has it
        starts = np.fromiter((c.start for c in chunks), np.int32, num_seqs)
        row_starts = np.asarray(first_rows[:-1], np.int32)
        positions = (starts - row_starts).repeat(sizes) + np.arange(first_rows[-1], dtype=np.int32)
        pages = self._page_table[slots.repeat(sizes), positions // self.shapes.page_size]
        assert pages.max() < self.shapes.num_pages, f"a token without a page in {chunks}"
        prompt_lens = np.fromiter((c.sequence.prompt_len for c in chunks), np.int32, num_seqs).repeat(sizes)
        seqs, sink = self.shapes.num_rows, self.shapes.num_pages
        page_table = np.full((seqs, self.shapes.max_pages), sink, np.int32)
        page_table[:num_seqs] = self._page_table[slots]
        cu_q_lens = np.full(seqs + 1, first_rows[-1], np.int32)
        cu_q_lens[: num_seqs + 1] = first_rows
        return TokenRows(
            token_ids=_padded(np.asarray(token_ids, np.int32), rows, 0),
            positions=_padded(positions, rows, 0),
            prompt_lens=_padded(prompt_lens, rows, 0),
            page_ids=_padded(pages, rows, sink),
            offsets=_padded(positions % self.shapes.page_size, rows, 0),
            page_table=page_table,
            kv_lens=_padded(np.fromiter((c.end for c in chunks), np.int32, num_seqs), seqs, 0),
            cu_q_lens=cu_q_lens,
            num_seqs=np.int32(num_seqs),
            num_decodes=np.int32(sum(size == 1 for size in sizes)),
        )

    def _sampling_rows(self, chunks: Seq[Chunk], slots: np.ndarray) -> SamplingRows:
        """Settings of the rows that sample; the others, and padding, are greedy rows of the sink slot."""
        samples = np.fromiter((c.samples for c in chunks), np.bool_, len(chunks))
        sink = self.shapes.num_slots
        slot = _padded(np.where(samples, slots, sink).astype(np.int32), self.shapes.num_rows, sink)
        suppress = [c.samples and c.end - c.sequence.prompt_len < c.sequence.params.min_tokens for c in chunks]
        rows = self._settings._replace(
            slot=slot,
            suppress_stop=_padded(np.asarray(suppress, np.bool_), self.shapes.num_rows, False),
            position=_padded(np.fromiter((c.end for c in chunks), np.int32, len(chunks)), self.shapes.num_rows, 0),
            **{name: getattr(self._settings, name)[slot] for name in _BY_SLOT},
        )
        return rows._replace(
            any_state=np.bool_(rows.use_state.any()),
            any_random=np.bool_((rows.temperature > 0).any()),
            any_logprobs=np.bool_(any(c.samples and c.sequence.params.logprobs is not None for c in chunks)),
        )

    def _targets(self, chunks: Seq[Chunk], first_rows: list[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
        targets, wants = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
        for c, row in zip(chunks, first_rows, strict=False):
            seq = c.sequence
            if seq.params.prompt_logprobs is not None and seq.index == 0:  # once for all samples
                following = seq.prompt_token_ids[c.start + 1 : c.end + 1]
                targets[row : row + len(following)] = following
                wants[row : row + len(following)] = True
        return targets, wants


def _neutral_rows(n: int) -> SamplingRows:
    """Greedy rows that touch nothing; row n - 1 is the sink's."""
    f, i, b = (
        (lambda x: np.full(n, x, np.float32)),
        (lambda x: np.full(n, x, np.int32)),
        (lambda: np.zeros(n, np.bool_)),
    )
    return SamplingRows(
        temperature=f(0), top_k=i(0), top_p=f(1), min_p=f(0), repetition=f(1), presence=f(0), frequency=f(0),
        use_state=b(), suppress_stop=b(), key=np.zeros((n, 2), np.uint32), position=i(0), slot=i(n - 1),
        any_state=np.bool_(False), any_random=np.bool_(False), any_logprobs=np.bool_(False),
    )  # fmt: skip


def _padded(array: np.ndarray, size: int, fill: int | bool) -> np.ndarray:
    out = np.full(size, fill, array.dtype)
    out[: len(array)] = array
    return out
