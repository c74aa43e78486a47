"""FasterTransformer's request-level batching: a batch runs until all of it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_jax.request import StepPlan
from sarathi_jax.schedulers.draft import Draft
from sarathi_jax.schedulers.whole_prompts import WholePromptConfig, WholePromptScheduler


class FasterTransformerScheduler(WholePromptScheduler):
    """Reserves max_model_len pages for each sequence, never preempts."""

    reserves = True

    def plan(self, now: float) -> StepPlan:
        draft = Draft(now=now)
        if not self.running:
            while self.waiting and self._can_admit(self.waiting[0], self.waiting[0].num_tokens):
                self._admit(draft, self.waiting[0])
        decodes, prefills = self._by_kind()
        self._plan_prefills(draft, prefills)
        if not prefills:
            self._plan_decodes(draft, decodes)
        return draft.finish()


@dataclass(frozen=True, kw_only=True)
class FasterTransformer(WholePromptConfig):
    """Admits a batch only when nothing runs: all that wait, as slots and memory allow. The slots of those that end
    early stay empty until the last has ended.

    The batch's prompts run first, then decodes only. `max_batched_tokens` bounds an iteration of prompts, the rest
    follow in further ones; None is max_num_seqs + 4 max_model_len, or max_num_seqs x max_model_len if that is less.
    """

    scheduler_class: ClassVar[type[WholePromptScheduler]] = FasterTransformerScheduler

    def default_max_batched_tokens(self, max_model_len: int) -> int:
        return min(self.max_num_seqs + 4 * max_model_len, self.max_num_seqs * max_model_len)
