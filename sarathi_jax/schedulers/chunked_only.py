"""An ablation of Sarathi-Serve: prompts in chunks, but never in one iteration with decodes (OSDI'24, table 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from sarathi_jax.config import check_positive
from sarathi_jax.pages import PagePool
from sarathi_jax.request import StepPlan
from sarathi_jax.schedulers.base import Draft, Limits, SchedulerConfig, resolve_token_budget
from sarathi_jax.schedulers.sarathi import SarathiScheduler


@dataclass(frozen=True, kw_only=True)
class ChunkedOnly(SchedulerConfig):
    """Takes turns: an iteration of prompts, at most `token_budget` of their tokens, then one of all decodes.

    When one kind has nothing to run, or lacks the pages for it, it is the other's turn. `token_budget` as in `Sarathi`.
    """

    token_budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            check_positive("token_budget", self.token_budget)

    def build(
        self, pool: PagePool, *, tile: int, default_token_budget: int = 512, **limits: Unpack[Limits]
    ) -> ChunkedOnlyScheduler:
        budget = resolve_token_budget(self.token_budget, tile=tile, default=default_token_budget)
        return ChunkedOnlyScheduler(self, pool, token_budget=budget, tile=tile, **limits)


class ChunkedOnlyScheduler(SarathiScheduler):
    """Sarathi's chunks, alternating with decodes. Paged, preempts the latest arrival."""

    _is_decode_turn = False

    def plan(self, now: float) -> StepPlan:
        draft = Draft(now=now)
        decodes, prefills = self._by_kind()
        for is_decode_turn in (self._is_decode_turn, not self._is_decode_turn):
            if is_decode_turn:
                self._plan_decodes(draft, decodes)
            else:
                self._plan_prompts(draft, prefills)
            if draft.chunks:
                self._is_decode_turn = not is_decode_turn
                break
        return draft.finish()
