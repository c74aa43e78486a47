"""What all policies share: the queues, the slots, pages given and taken back, and the parts that plans are made of.

A policy of your own needs no registry and no change here: a frozen dataclass on top of `SchedulerConfig` whose `build`
returns your subclass of `Scheduler`, and an instance of it passed as `LLM(..., scheduler=Mine(...))`. To override:
`plan` (which parts, in which order), `chunk_size` (how much of a prompt), `order` (who comes first), `reserves`.
`orca.py` is the shortest to copy, examples/custom_policy.py one to run.
"""

from __future__ import annotations

import abc
import bisect
import heapq
import math
import numbers
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Required, TypedDict, Unpack

from sarathi_jax.config import check_positive
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Chunk, Sequence, Status, StepPlan
from sarathi_jax.schedulers.draft import Draft


class Limits(TypedDict, total=False):
    """What the engine tells every scheduler, whatever its policy; see `Scheduler`."""

    max_model_len: Required[int]
    lookahead: int
    num_stages: int


class IterationCost(Protocol):
    """Predicts how long an iteration takes, in seconds; plain host code, called several times a plan.

    `decodes` holds, for each, the tokens it attends to, itself included; each of `chunks` computes `tokens` positions
    of a prompt from `start` on, which attend to all before them too. May not fall as a chunk grows. A
    `budget.TimeModel` is one.
    """

    def __call__(self, decodes: Seq[int], chunks: Seq[tuple[int, int]]) -> float: ...


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(abc.ABC):
    """Settings of every policy; a policy subclasses it, adds its own and says in `build` which scheduler runs them.

    `max_num_seqs`: most sequences that run at once. `watermark`: share of the pages that stays free when a sequence is
    admitted, so that those already running can grow.
    """

    max_num_seqs: int = 16
    watermark: float = 0.01

    def __post_init__(self) -> None:
        check_positive("max_num_seqs", self.max_num_seqs)
        value = self.watermark
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= value < 1.0:
            raise ValueError(f"watermark={value!r} must be a number with 0 <= watermark < 1 (a share of the pages)")

    @abc.abstractmethod
    def build(
        self, pool: PagePool, *, tile: int, default_token_budget: int = 512, **limits: Unpack[Limits]
    ) -> Scheduler:
        """The scheduler. `tile`: tokens of a matmul tile; `default_token_budget`: the platform's, for a policy whose
        token budget was left None; `limits` go to the scheduler."""


def arrival_order(seq: Sequence) -> tuple[int, float, int]:
    """First come, first served within a priority: the order of all policies here."""
    return (seq.request.priority, seq.request.arrival_time_s, seq.seq_id)


class Scheduler(abc.ABC):
    """Plans one iteration after another over the sequences that were added.

    A plan is a commitment: when `plan` returns, its pages are held and its sequences' `num_computed` and `num_pending`
    have moved on. Its batch must be laid out before anything else is called here, as later calls may take the pages
    away; running it later is fine (steps run in order on the device). When the token of a chunk that samples is read,
    the engine does `seq.output_token_ids.append(token); seq.num_pending -= 1`, and calls `finish` if that was the end
    (by length: when no token is pending and `at_limit`; before that `at_limit` counts tokens that are not read).

    `lookahead`: tokens sampled and not read yet that a running sequence may have and still be planned. 0: each step is
    read before the next is planned (or its sequences sit out, as in a pipeline). 1: step n + 1 is planned before the
    tokens of step n are read. Sequences whose last token is sampled sit out until it is read.

    `num_stages`: iterations in flight at once, those of a pipeline; a policy spreads its decodes over that many plans.
    Chunks of a prompt may follow each other in plans that are not read; whoever runs the pipeline and does not want
    that counts in `Sequence.num_in_flight` the plans that a sequence is in until they are read.

    Preemption is by recompute: pages and slot are given back, outputs are kept, and the sequence waits at the place its
    arrival gives it, ahead of all later ones. It comes back when no token of it is unread, and runs prompt and outputs
    through the model again, in chunks like any prompt.
    Where the pool has a window, a running sequence gives back pages that none of its queries to come sees: what it
    holds does not grow with its length, and a prompt in chunks may be longer than the pool.
    """

    max_step_tokens: int
    """Most tokens that one plan can hold: what the largest shape must fit."""

    reserves: ClassVar[bool] = False
    """Each sequence is admitted with pages for max_model_len tokens: none is ever short of them, none is preempted. The
    watermark, which is there to grow into, then means nothing."""

    def __init__(
        self, config: SchedulerConfig, pool: PagePool, *, max_model_len: int, lookahead: int = 0, num_stages: int = 1
    ):
        check_positive("max_model_len", max_model_len)
        check_positive("num_stages", num_stages)
        if isinstance(lookahead, bool) or not isinstance(lookahead, int) or lookahead < 0:
            raise ValueError(f"lookahead={lookahead!r} must be an integer >= 0")
        self.config: SchedulerConfig = config
        self.pool = pool
        self.max_model_len = max_model_len
        self.lookahead = lookahead
        self.num_stages = num_stages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs))  # a heap: lowest slot first
        # rounded before ceil: 0.07 * 100 is a little more than 7
        self._num_spare = math.ceil(round(config.watermark * pool.num_pages, 6))
        num_pages = pool.num_pages_for(max_model_len)
        if self.reserves and num_pages > pool.num_pages:
            raise ValueError(
                f"{type(config).__name__} reserves pages for max_model_len={max_model_len} tokens at admission: "
                f"{num_pages} of {pool.page_size}, and the pool has {pool.num_pages}; "
                f"lower max_model_len, or raise num_pages of the cache"
            )

    @abc.abstractmethod
    def plan(self, now: float) -> StepPlan:
        """The next iteration, committed; empty when there is nothing to run at `now` (s)."""

    def order(self, seq: Sequence) -> tuple[Any, ...]:
        """Sorts both queues and says who is *older*: served first, preempted last. Total, and fixed for a sequence."""
        return arrival_order(seq)

    def chunk_size(self, draft: Draft, seq: Sequence) -> int:
        """How many tokens of its prompt `seq` gets in this iteration, memory aside; 0 for none. Here: all it has."""
        return seq.num_uncomputed

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that its sequences have still to run, those to come included."""
        return sum([seq.max_total_tokens - seq.num_computed for seq in (*self.running, *self.waiting)])

    def max_total_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        """Tokens of prompt and output that a sequence may have: what was asked for, or all that pool and model hold."""
        room = self.max_model_len
        if self._most_pages(room - 1) > self.pool.num_pages:
            room = self.pool.num_pages * self.pool.page_size + 1  # the last token needs no page
        asked = room if max_tokens is None else prompt_len + max_tokens
        return max(min(self.max_model_len, asked), prompt_len + 1)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence by its arrival. ValueError, with the numbers and the knob, for one that can never run.

        `max_total_tokens` is set by the caller; the last token is never run, so all but one need a place in the pool.
        """
        asked = f"prompt of {seq.prompt_len} tokens, max_tokens={seq.params.max_tokens}"
        if seq.prompt_len < 1:
            raise ValueError(f"request {seq.request.request_id!r} has an empty prompt; at least 1 token is needed")
        if not math.isfinite(seq.request.arrival_time_s):
            raise ValueError(f"arrival_time_s={seq.request.arrival_time_s!r} must be finite")
        if seq.prompt_len + 1 > self.max_model_len:
            raise ValueError(
                f"request {seq.request.request_id!r} is too long for the model: {asked}, "
                f"max_model_len={self.max_model_len}; the prompt may have at most max_model_len - 1 tokens"
            )
        num_tokens = max(seq.prompt_len + 1, seq.max_total_tokens)
        num_pages = self._most_pages(num_tokens - 1)
        if num_pages > self.pool.num_pages:
            raise ValueError(
                f"request {seq.request.request_id!r} is too long for the KV cache: {asked}, "
                f"max_model_len={self.max_model_len}; up to {num_tokens} tokens need {num_pages} pages of "
                f"{self.pool.page_size} and the pool has {self.pool.num_pages}; "
                f"raise num_pages of the cache, or lower max_tokens, max_model_len or, with a window, the token budget"
            )
        assert seq.prompt_len < seq.max_total_tokens <= self.max_model_len, f"{seq.max_total_tokens=} of {seq}"
        assert seq.status is Status.WAITING, f"added twice: {seq}"
        self._enqueue(seq)

    def finish(self, seq: Sequence) -> None:
        """The one way out, at any moment and as often as you like: gives back pages and slot, leaves the queues."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._release_pages(seq)
        self._release_slot(seq)
        seq.status = Status.FINISHED

    def check_integrity(self) -> None:
        """AssertionError with a sentence unless pool, queues and slots agree."""
        self.pool.check_integrity(self.running)
        for queue in (self.running, self.waiting):
            keys = [self.order(seq) for seq in queue]
            assert keys == sorted(keys), f"a queue is out of order: {list(queue)}"
        assert all(seq.status is Status.RUNNING for seq in self.running), f"not all running: {self.running}"
        for seq in self.waiting:
            assert seq.status is Status.WAITING, f"in the queue: {seq}"
            assert (seq.page_ids, seq.slot) == ([], None), f"waits and holds pages or slot {seq.slot}: {seq}"
        slots = [seq.slot for seq in self.running] + self._free_slots
        all_slots = list(range(self.config.max_num_seqs))
        assert sorted(slots, key=str) == sorted(all_slots, key=str), f"slots are lost or doubled: {slots}"
        for seq in self.running:
            num_pages = 0 if seq.at_limit else self.pool.num_pages_for(seq.num_computed)
            assert seq.num_pages >= num_pages, f"{seq} must have {num_pages} pages"
            assert seq.num_released <= self.pool.num_behind(seq.num_computed), f"pages that {seq} sees are released"
            assert 0 <= seq.num_computed <= seq.num_tokens <= seq.max_total_tokens, f"counts of {seq}"
            num_tokens = seq.prompt_len + len(seq.output_token_ids) + seq.num_pending
            assert seq.num_tokens == num_tokens, f"{seq} counts {seq.num_tokens} tokens and has {num_tokens}"

    # Parts of a plan.

    def _by_kind(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that can be planned now, oldest first: those decoding, and those with prompt left to run.

        In a pipeline a plan takes its share of all decodes (a `num_stages`-th, rounded up), so that none is empty.
        Pages that nothing will read are given back here: those behind a window, and all when the last token is sampled.
        """
        decodes, prefills, num_decoding, lookahead, has_window = [], [], 0, self.lookahead, self.pool.window is not None
        for seq in self.running:  # each of them in every iteration: written out for speed, as in `_plan_decodes`
            num_tokens = seq.num_tokens
            if num_tokens >= seq.max_total_tokens:
                self._release_pages(seq)
                continue
            if has_window:
                self._release_behind(seq)
            if num_tokens - seq.num_computed == 1 and num_tokens > seq.prompt_len:
                num_decoding += 1
                if seq.num_pending <= lookahead and not seq.num_in_flight:
                    decodes.append(seq)
            elif seq.num_pending <= lookahead and not seq.num_in_flight:
                prefills.append(seq)
        if self.num_stages > 1:
            del decodes[-(-num_decoding // self.num_stages) :]
        return decodes, prefills

    def _plan_decodes(self, draft: Draft, decodes: list[Sequence]) -> None:
        """One token each. Short of pages, the latest is preempted, whatever it does: the oldest always gets through."""
        page_size, chunks, number, num_before = self.pool.page_size, draft.chunks, draft.number, len(draft.chunks)
        new = tuple.__new__  # a NamedTuple's own is a call more
        for seq in decodes:
            start = seq.num_computed
            if draft.preempted and seq.slot is None:  # on the way here
                continue
            if start % page_size == 0 and not self._make_room(draft, seq, start + 1):
                continue
            seq.num_computed = start + 1
            seq.num_tokens += 1
            seq.num_pending += 1
            seq.draft_number = number
            chunks.append(new(Chunk, (seq, start, 1, True)))
        draft.num_decodes += len(chunks) - num_before
        draft.num_tokens += len(chunks) - num_before

    def _plan_prompts(self, draft: Draft, prefills: list[Sequence]) -> None:
        """Prompts in progress, then the queue; nobody is admitted by a plan in which someone was short of pages."""
        if self._plan_prefills(draft, prefills) and not draft.preempted:
            self._plan_admissions(draft)

    def _plan_prefills(self, draft: Draft, prefills: list[Sequence]) -> bool:
        """Oldest first, `chunk_size` tokens each. False if one was short of pages; the later ones then get nothing.

        That one gets what fits; if that is nothing, later ones that are prefilling too are preempted, or it waits.
        """
        for seq in prefills:
            wanted = self.chunk_size(draft, seq)
            if wanted == 0 or seq.slot is None:
                continue
            self._preempt_later_prefills(draft, seq)
            num_tokens = min(wanted, self._num_tokens_that_fit(seq))
            if num_tokens > 0:
                self._ensure_pages(seq, seq.num_computed + num_tokens)
                self._chunk(draft, seq, num_tokens)
            if num_tokens < wanted:
                return False
        return True

    def _plan_admissions(self, draft: Draft) -> None:
        """From the queue, strictly in order, as `chunk_size`, slots and memory allow. The head is never overtaken."""
        while self.waiting:
            seq = self.waiting[0]
            num_tokens = self.chunk_size(draft, seq)
            if num_tokens == 0 or not self._can_admit(seq, num_tokens):
                return
            self._admit(draft, seq)
            self._ensure_pages(seq, num_tokens)
            self._chunk(draft, seq, num_tokens)

    # What they are written with.

    def _preempt_later_prefills(self, draft: Draft, seq: Sequence) -> None:
        """Latest first, until one token of `seq` has a place or none is left."""
        while self._num_tokens_that_fit(seq) < 1:
            later = self.running[self.running.index(seq) + 1 :]
            victims = [s for s in later if s.page_ids and not s.is_decoding and s not in draft]
            if not victims:
                return
            self._preempt(draft, victims[-1])

    def _num_tokens_that_fit(self, seq: Sequence) -> int:
        """How many more tokens of `seq` have a place in its own pages and the available ones."""
        return (seq.num_pages + self.pool.num_available) * self.pool.page_size - seq.num_computed

    def _most_pages(self, num_tokens: int) -> int:
        """The most that a sequence holds on its way to so many tokens, in whatever chunks the policy cuts."""
        return self.pool.most_pages(num_tokens, self.max_step_tokens)

    def _ensure_pages(self, seq: Sequence, end: int) -> bool:
        """Have `seq` hold pages for positions up to `end`; False, with nothing taken, if the pool cannot give them."""
        num_missing = self.pool.num_pages_for(end) - seq.num_pages
        if num_missing > self.pool.num_available:
            return False
        if num_missing > 0:
            seq.page_ids += self.pool.allocate(num_missing)
        return True

    def _make_room(self, draft: Draft, seq: Sequence, end: int) -> bool:
        """Pages for positions up to `end`, by preempting the latest arrivals that are not in the draft.

        `seq` itself goes if it is the last: False. Never one that is older.
        """
        while not self._ensure_pages(seq, end):
            victim = next(s for s in reversed(self.running) if s is seq or (s.page_ids and s not in draft))
            self._preempt(draft, victim)
            if victim is seq:
                return False
        return True

    def restart(self) -> None:
        """Everybody back to the queue with the outputs that were read, to be computed again: for after a failed step.

        Whatever was planned and not read counts as never planned. Draws depend on seed and position, so the same tokens
        come again.
        """
        for seq in list(self.running):
            self._requeue(seq)
        for seq in self.waiting:
            seq.drop_pending()
            seq.num_in_flight = 0

    def _preempt(self, draft: Draft, victim: Sequence) -> None:
        """Back to the queue, outputs kept, everything to be computed again. Unread tokens stay pending."""
        assert victim not in draft, f"preempting {victim}, which is in the plan already"
        assert not self.reserves, f"preempting {victim}, which has all the pages it can need"
        if victim in draft.admitted:
            draft.admitted.remove(victim)
        self._requeue(victim)
        draft.preempted.append(victim)

    def _requeue(self, seq: Sequence) -> None:
        """From running to the queue, without pages and slot, nothing computed."""
        self.running.remove(seq)
        self._release_pages(seq)
        self._release_slot(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self._enqueue(seq)

    def _can_admit(self, seq: Sequence, num_tokens: int) -> bool:
        """Is there a slot, and room for a first chunk of `num_tokens` that leaves the watermark free?

        The watermark is waived while nothing is held. A preempted sequence comes back only when all its tokens fit (as
        many as a window leaves) and are known to the host, so that it does not lose its pages again half-way.
        """
        if not self._free_slots or seq.num_pending or seq.num_in_flight:
            return False
        if self.reserves:
            return self.pool.num_pages_for(self.max_model_len) <= self.pool.num_available
        num_pages = self._most_pages(seq.num_tokens) if seq.num_preemptions else self.pool.num_pages_for(num_tokens)
        return num_pages + (self._num_spare if self.pool.num_held else 0) <= self.pool.num_available

    def _admit(self, draft: Draft, seq: Sequence) -> None:
        """From the queue to a slot; no pages yet, unless the policy reserves them."""
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        seq.slot = heapq.heappop(self._free_slots)
        bisect.insort(self.running, seq, key=self.order)
        draft.admitted.append(seq)
        if self.reserves:
            self._ensure_pages(seq, self.max_model_len)

    def _chunk(self, draft: Draft, seq: Sequence, num_tokens: int) -> Chunk:
        """Commit the next `num_tokens` of `seq`, whose pages are held, to the draft."""
        start = seq.num_computed
        seq.num_computed += num_tokens
        assert seq.num_computed <= seq.num_pages * self.pool.page_size, f"no pages for a chunk of {seq}"
        assert seq.num_uncomputed >= 0, f"a chunk beyond the tokens of {seq}"
        samples = seq.num_uncomputed == 0
        if samples:
            seq.num_tokens += 1
            seq.num_pending += 1
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = draft.now
        chunk = Chunk(seq, start, num_tokens, samples)
        draft.append(chunk)
        return chunk

    def _enqueue(self, seq: Sequence) -> None:
        if not self.waiting or self.order(self.waiting[-1]) <= self.order(seq):
            self.waiting.append(seq)
        else:
            self.waiting.insert(bisect.bisect(self.waiting, self.order(seq), key=self.order), seq)

    def _release_pages(self, seq: Sequence) -> None:
        if seq.page_ids:
            self.pool.free(seq.page_ids)
            seq.page_ids = []
        seq.num_released = 0

    def _release_behind(self, seq: Sequence) -> None:
        """Pages that no query from the next one on sees."""
        num_pages = self.pool.num_behind(seq.num_computed) - seq.num_released
        if num_pages > 0:
            self.pool.free(seq.page_ids[:num_pages])
            seq.page_ids, seq.num_released = seq.page_ids[num_pages:], seq.num_released + num_pages

    def _release_slot(self, seq: Sequence) -> None:
        if seq.slot is not None:
            heapq.heappush(self._free_slots, seq.slot)
            seq.slot = None
