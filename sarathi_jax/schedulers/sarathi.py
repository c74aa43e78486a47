"""Sarathi-Serve's policy: stall-free hybrid batches of chunked prefills (OSDI'24, Algorithm 3)."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, Unpack

from sarathi_jax.config import check_number, check_positive
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Sequence, StepPlan
from sarathi_jax.schedulers.base import IterationCost, Limits, Scheduler, SchedulerConfig
from sarathi_jax.schedulers.draft import Draft


class SarathiScheduler(Scheduler):
    """The order is the point: a decode is never displaced by a prefill, neither from the budget nor from its pages.

    1. Every running sequence that is decoding: one token.
    2. Every partly prefilled sequence, oldest first: as much as the budget leaves.
    3. The queue, strictly in order, as budget, slots and memory allow.

    Pages are taken for each chunk, not for the whole prompt. A chunk that leaves some of its prompt fills up the
    budget, which is a multiple of the tile, so that such an iteration ends on a tile; the exceptions are a chunk cut
    for pages or by `long_prefill_token_threshold`, and decodes beyond the budget.

    Something advances in every plan: the oldest decode gets its page from any later arrival; without decodes the oldest
    prefill does; with nothing held the head of the queue is admitted, and one alone always fits (see `add`).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        *,
        token_budget: int,
        tile: int = 1,
        long_prefill_token_threshold: int | None = None,
        time_budget_s: float | None = None,
        cost: IterationCost | None = None,
        max_prefill_wait: int = 32,
        priority_preemption: bool = False,
        **limits: Unpack[Limits],
    ):
        super().__init__(config, pool, **limits)
        self.token_budget = token_budget
        self.max_step_tokens = max(token_budget, config.max_num_seqs)
        self.tile = tile
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.time_budget_s = time_budget_s
        self.cost = cost
        self.max_prefill_wait = max_prefill_wait
        self.priority_preemption = priority_preemption
        self._num_waited = 0  # iterations in a row in which prompts were due and none advanced

    def plan(self, now: float) -> StepPlan:
        draft = Draft(now=now)
        if self.priority_preemption:
            self._admit_urgent(draft)
        decodes, prefills = self._by_kind()
        self._plan_decodes(draft, decodes)
        self._plan_prompts(draft, prefills)
        is_due = bool(prefills or self.waiting) and not draft.has_prompts
        self._num_waited = self._num_waited + 1 if is_due else 0
        return draft.finish()

    def chunk_size(self, draft: Draft, seq: Sequence) -> int:
        num_tokens = min(seq.num_uncomputed, max(self.token_budget - draft.num_tokens, 0))
        if self.long_prefill_token_threshold is not None:
            num_tokens = min(num_tokens, self.long_prefill_token_threshold)
        if self.cost is None or self.time_budget_s is None or num_tokens == 0:
            return num_tokens
        # From the shortest to the longest, those that end the iteration on a tile between them.
        sizes = [*range(self.tile - draft.num_tokens % self.tile, num_tokens, self.tile), num_tokens]
        num_in_time = bisect_right(sizes, self.time_budget_s, key=lambda size: self._predict(draft, seq, size))
        if num_in_time:
            return sizes[num_in_time - 1]
        is_due = not draft.num_decodes or self._num_waited >= self.max_prefill_wait - 1
        return sizes[0] if is_due and not draft.has_prompts else 0

    def _predict(self, draft: Draft, seq: Sequence, num_tokens: int) -> float:
        """Seconds of the draft with one more chunk."""
        assert self.cost is not None
        decodes, prompts = draft.chunks[: draft.num_decodes], draft.chunks[draft.num_decodes :]
        chunks = [*((c.start, c.num_tokens) for c in prompts), (seq.num_computed, num_tokens)]
        seconds = self.cost([c.end for c in decodes], chunks)
        if not seconds >= 0:
            raise ValueError(f"cost gave {seconds!r} s for {len(decodes)} decodes and {chunks=}; it must be >= 0")
        return seconds

    def _admit_urgent(self, draft: Draft) -> None:
        """The head of the queue displaces running sequences of a strictly worse priority, the worst first.

        It takes pages for all its tokens at once (as many as a window leaves), so that those it goes before cannot stop
        it half-way. Nobody is preempted if all of them would not be enough.
        """
        self._by_kind()  # pages that nobody will read are free
        while self.waiting:
            seq = self.waiting[0]
            num_pages = self._most_pages(seq.num_tokens)
            worse = [s for s in self.running if s.request.priority > seq.request.priority and not s.at_limit]
            obtainable = self.pool.num_available + sum(len(s.page_ids) for s in worse)
            if not worse or seq.num_pending or num_pages > obtainable:
                return
            worse.sort(key=lambda s: s.request.priority)
            while not self._free_slots or num_pages > self.pool.num_available:
                self._preempt(draft, worse.pop())
            self._admit(draft, seq)
            self._ensure_pages(seq, num_pages * self.pool.page_size)


@dataclass(frozen=True, kw_only=True)
class Sarathi(SchedulerConfig):
    """Every decode in every iteration; prompts, cut into chunks, fill up what is left of `token_budget`.

    `token_budget`: tokens of one iteration, decodes included; a multiple of the matmul tile; None is the platform's
    default. All decodes run even if they are more than the budget. With token_budget >= max_num_seqs + tile at least
    one tile is left for prompts in every iteration, so that decodes cannot starve them; less than that is allowed and
    warned of. "auto", with `tbt_slo_s`: measured by the engine, the largest that holds this time between tokens with a
    tenth to spare.

    `long_prefill_token_threshold`: most tokens of one prompt in one iteration, so that a long prompt leaves some of the
    budget to the prompts behind it.

    `time_budget_s`, with `cost`: iterations of constant predicted time instead of constant size: prompts get as many
    tokens, in tiles, as `cost` says fit, fewer as the context they attend to grows; `token_budget` still bounds the
    iteration, so give it room. Without decodes at least a tile of prompt runs. When decodes leave no time for one,
    prompts wait, but never more than `max_prefill_wait` iterations for a tile: then that iteration runs over.

    `priority_preemption`: a waiting request takes slot and pages from running ones of a strictly worse priority (they
    are computed again later). Off, `priority` orders the queue and says who is preempted when pages run out.
    """

    scheduler_class: ClassVar[type[SarathiScheduler]] = SarathiScheduler
    """What `build` makes: for a policy that changes the scheduler and keeps these settings."""

    token_budget: int | Literal["auto"] | None = None
    tbt_slo_s: float | None = None
    long_prefill_token_threshold: int | None = None
    time_budget_s: float | None = None
    cost: IterationCost | None = None
    max_prefill_wait: int = 32
    priority_preemption: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.token_budget == "auto") != (self.tbt_slo_s is not None):
            raise ValueError(
                f'token_budget={self.token_budget!r} and tbt_slo_s={self.tbt_slo_s!r}: token_budget="auto" is found '
                f"from tbt_slo_s (s); set both or neither"
            )
        if (self.time_budget_s is None) != (self.cost is None):
            raise ValueError(
                f"time_budget_s={self.time_budget_s!r} and cost={self.cost!r}: the cost predicts what the time budget "
                f"bounds; set both or neither"
            )
        for name in ("tbt_slo_s", "time_budget_s"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1e-9, 1e9, f"{name} > 0 seconds")
        if self.cost is not None and not callable(self.cost):
            raise ValueError(f"cost={self.cost!r} must be callable: (decodes, chunks) -> s")
        check_positive("max_prefill_wait", self.max_prefill_wait)
        if self.long_prefill_token_threshold is not None:
            check_positive("long_prefill_token_threshold", self.long_prefill_token_threshold)
        if not isinstance(self.priority_preemption, bool):
            raise ValueError(f"priority_preemption={self.priority_preemption!r} must be True or False")
        if self.token_budget is not None and self.token_budget != "auto":
            check_positive("token_budget", self.token_budget)
            if self.token_budget < self.max_num_seqs:
                self._warn(self.token_budget, f"{self.max_num_seqs}", stacklevel=4)

    def resolved(self, token_budget: int) -> Self:
        """This policy with the budget that "auto" stands for."""
        return replace(self, token_budget=token_budget, tbt_slo_s=None)

    def build(
        self, pool: PagePool, *, tile: int, default_token_budget: int = 512, **limits: Unpack[Limits]
    ) -> SarathiScheduler:
        if self.token_budget == "auto":
            raise ValueError(
                f'token_budget="auto" (tbt_slo_s={self.tbt_slo_s}) has to be measured first: let the engine do it, or '
                f"build .resolved(token_budget)"
            )
        budget = _budget_in_force(self.token_budget, tile=tile, default=default_token_budget)
        warned = self.token_budget is not None and self.token_budget < self.max_num_seqs
        if budget < self.max_num_seqs + tile and not warned:
            self._warn(budget, f"{self.max_num_seqs} + tile={tile}", stacklevel=3)
        return self.scheduler_class(
            self,
            pool,
            token_budget=budget,
            tile=tile,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            time_budget_s=self.time_budget_s,
            cost=self.cost,
            max_prefill_wait=self.max_prefill_wait,
            priority_preemption=self.priority_preemption,
            **limits,
        )

    def _warn(self, budget: int, bound: str, *, stacklevel: int) -> None:
        warnings.warn(
            f"token_budget={budget} is below max_num_seqs={bound}: with all sequences decoding, nothing is left of the "
            f"budget for prompts and they wait; raise token_budget or lower max_num_seqs",
            stacklevel=stacklevel,
        )


def _budget_in_force(token_budget: int | None, *, tile: int, default: int) -> int:
    """The budget in force, `default` for None; ValueError unless it is a multiple of the tile."""
    check_positive("tile", tile)
    check_positive("default_token_budget", default)
    budget = default if token_budget is None else token_budget
    if budget % tile:
        below = budget // tile * tile
        nearest = f"{below} or {below + tile}" if below else f"{tile}"
        raise ValueError(f"token_budget={budget} must be a multiple of the matmul tile {tile}; nearest: {nearest}")
    return budget


@dataclass(frozen=True, kw_only=True)
class AblationConfig(SchedulerConfig):
    """Settings of a policy that takes something away from Sarathi: its `token_budget` and nothing else."""

    scheduler_class: ClassVar[type[SarathiScheduler]]

    token_budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            check_positive("token_budget", self.token_budget)

    def build(
        self, pool: PagePool, *, tile: int, default_token_budget: int = 512, **limits: Unpack[Limits]
    ) -> SarathiScheduler:
        budget = _budget_in_force(self.token_budget, tile=tile, default=default_token_budget)
        return self.scheduler_class(self, pool, token_budget=budget, tile=tile, **limits)
