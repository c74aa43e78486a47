"""Orca's iteration-level scheduling (OSDI'22): prompts join the decodes whole."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Unpack

from sarathi_jax.pages import PagePool
from sarathi_jax.request import StepPlan
from sarathi_jax.schedulers.base import Limits
from sarathi_jax.schedulers.draft import Draft
from sarathi_jax.schedulers.whole_prompts import WholePromptConfig, WholePromptScheduler


class OrcaScheduler(WholePromptScheduler):
    """Reserves max_model_len pages for each sequence, never preempts."""

    reserves = True

    def plan(self, now: float) -> StepPlan:
        draft = Draft(now=now)
        decodes, _ = self._by_kind()
        self._plan_decodes(draft, decodes)
        self._plan_admissions(draft)
        return draft.finish()


@dataclass(frozen=True, kw_only=True)
class Orca(WholePromptConfig):
    """All decodes, and as many whole prompts as slots and memory allow.

    The paper has no cap on an iteration's tokens. Here shapes are enumerated and something must bound them:
    `max_batched_tokens`, decodes included; None is max_num_seqs + 4 max_model_len (all decodes and four of the longest
    prompts), or max_num_seqs x max_model_len, which nothing exceeds, if that is less.
    """

    scheduler_class: ClassVar[type[WholePromptScheduler]] = OrcaScheduler

    def default_max_batched_tokens(self, max_model_len: int) -> int:
        return min(self.max_num_seqs + 4 * max_model_len, self.max_num_seqs * max_model_len)

    def build(
        self, pool: PagePool, *, tile: int, default_token_budget: int = 512, **limits: Unpack[Limits]
    ) -> WholePromptScheduler:
        scheduler = super().build(pool, tile=tile, default_token_budget=default_token_budget, **limits)
        if scheduler.max_batched_tokens < self.max_num_seqs + scheduler.max_model_len - 2:
            warnings.warn(
                f"max_batched_tokens={scheduler.max_batched_tokens} is below max_num_seqs={self.max_num_seqs} + "
                f"max_model_len={scheduler.max_model_len} - 2: a long prompt waits until fewer sequences decode; raise "
                f"max_batched_tokens or lower max_num_seqs",
                stacklevel=2,
            )
        return scheduler
