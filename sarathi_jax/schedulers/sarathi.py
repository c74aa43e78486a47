"""Sarathi-Serve's policy: stall-free hybrid batches of chunked prefills (OSDI'24, Algorithm 3)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from sarathi_jax.config import check_positive
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Sequence, StepPlan
from sarathi_jax.schedulers.base import Draft, Scheduler, SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Sarathi(SchedulerConfig):
    """Every decode in every iteration; prompts, cut into chunks, fill up what is left of `token_budget`.

    `token_budget`: tokens of one iteration, decodes included; a multiple of the matmul tile; None is the platform's
    default. All decodes run even if they are more than the budget. With token_budget >= max_num_seqs + tile at least
    one tile is left for prompts in every iteration, so that decodes cannot starve them; less than that is allowed and
    warned of.
    """

    token_budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            check_positive("token_budget", self.token_budget)
            if self.token_budget < self.max_num_seqs:
                self._warn(self.token_budget, f"{self.max_num_seqs}", stacklevel=4)

    def build(
        self,
        pool: PagePool,
        *,
        max_model_len: int,
        tile: int,
        lookahead: int = 0,
        num_stages: int = 1,
        default_token_budget: int = 512,
    ) -> SarathiScheduler:
        check_positive("tile", tile)
        budget = self.token_budget
        if budget is None:
            check_positive("default_token_budget", default_token_budget)
            budget = default_token_budget
        if budget % tile:
            below = budget // tile * tile
            nearest = f"{below} or {below + tile}" if below else f"{tile}"
            raise ValueError(f"token_budget={budget} must be a multiple of the matmul tile {tile}; nearest: {nearest}")
        warned = self.token_budget is not None and self.token_budget < self.max_num_seqs
        if budget < self.max_num_seqs + tile and not warned:
            self._warn(budget, f"{self.max_num_seqs} + tile={tile}", stacklevel=3)
        return SarathiScheduler(
            self,
            pool,
            max_model_len=max_model_len,
            token_budget=budget,
            lookahead=lookahead,
            num_stages=num_stages,
        )

    def _warn(self, budget: int, bound: str, *, stacklevel: int) -> None:
        warnings.warn(
            f"token_budget={budget} is below max_num_seqs={bound}: with all sequences decoding, nothing is left of the "
            f"budget for prompts and they wait; raise token_budget or lower max_num_seqs",
            stacklevel=stacklevel,
        )


class SarathiScheduler(Scheduler):
    """The order is the point: a decode is never displaced by a prefill, neither from the budget nor from its pages.

    1. Every running sequence that is decoding: one token. Short of pages, the latest arrival is preempted. In a
       pipeline each plan takes at most its share of all decodes (a `num_stages`-th, rounded up), so that none is empty.
    2. Every partly prefilled sequence, oldest first: as much as the budget leaves. Short of pages, the chunk shrinks to
       what fits; if that is nothing, later arrivals that are prefilling too are preempted, or it waits for decodes.
    3. The queue, strictly first come, first served, as budget, slots and memory allow. The head is never overtaken. No
       one is admitted by a plan in which someone was short of pages.

    Pages are taken for each chunk, not for the whole prompt. A chunk that leaves some of its prompt fills up the
    budget, which is a multiple of the tile, so that such an iteration ends on a tile; the exceptions are a chunk cut
    for pages and decodes beyond the budget.

    Something advances in every plan: the oldest decode gets its page from any later arrival; without decodes the oldest
    prefill does; with nothing held the head of the queue is admitted, and one alone always fits (see `add`).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        *,
        max_model_len: int,
        token_budget: int,
        lookahead: int = 0,
        num_stages: int = 1,
    ):
        super().__init__(config, pool, max_model_len=max_model_len, lookahead=lookahead, num_stages=num_stages)
        self.token_budget = token_budget
        self.max_step_tokens = max(token_budget, config.max_num_seqs)

    def plan(self, now: float) -> StepPlan:
        draft = Draft(now=now)
        ready = self._ready()
        num_decoding = sum(seq.is_decoding and not seq.at_limit for seq in self.running)
        decodes = [seq for seq in ready if seq.is_decoding][: -(-num_decoding // self.num_stages)]
        prefills = [seq for seq in ready if not seq.is_decoding]
        self._plan_decodes(draft, decodes)
        short_of_pages = self._plan_prefills(draft, prefills)
        if not short_of_pages and not draft.preempted:
            self._plan_admissions(draft)
        return draft.finish()

    def _chunk_size(self, draft: Draft, seq: Sequence) -> int:
        """How many tokens of its prompt `seq` gets in this iteration, memory aside; 0 for none."""
        return min(seq.num_uncomputed, max(self.token_budget - draft.num_tokens, 0))

    def _plan_decodes(self, draft: Draft, decodes: list[Sequence]) -> None:
        for seq in decodes:  # one that lost its slot was preempted on the way
            if seq.slot is not None and self._make_room(draft, seq, seq.num_computed + 1):
                self._chunk(draft, seq, 1)

    def _plan_prefills(self, draft: Draft, prefills: list[Sequence]) -> bool:
        """True if one of them was short of pages; the later ones then get nothing."""
        for seq in prefills:
            wanted = self._chunk_size(draft, seq)
            if wanted == 0 or seq.slot is None:
                continue
            self._preempt_later_prefills(draft, seq)
            num_tokens = min(wanted, self._num_tokens_that_fit(seq))
            if num_tokens > 0:
                self._ensure_pages(seq, seq.num_computed + num_tokens)
                self._chunk(draft, seq, num_tokens)
            if num_tokens < wanted:
                return True
        return False

    def _preempt_later_prefills(self, draft: Draft, seq: Sequence) -> None:
        """Latest first, until one token of `seq` has a place or none is left."""
        while self._num_tokens_that_fit(seq) < 1:
            later = self.running[self.running.index(seq) + 1 :]
            victims = [s for s in later if s.page_ids and not s.is_decoding and s not in draft]
            if not victims:
                return
            self._preempt(draft, victims[-1])

    def _plan_admissions(self, draft: Draft) -> None:
        while self.waiting:
            seq = self.waiting[0]
            num_tokens = self._chunk_size(draft, seq)
            if num_tokens == 0 or not self._can_admit(seq, num_tokens):
                return
            self._admit(draft, seq)
            self._ensure_pages(seq, num_tokens)
            self._chunk(draft, seq, num_tokens)
