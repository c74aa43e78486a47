"""vLLM's first scheduler (SOSP'23): prefills first, decodes stall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_jax.request import StepPlan
from sarathi_jax.schedulers.draft import Draft
from sarathi_jax.schedulers.whole_prompts import WholePromptConfig, WholePromptScheduler


class VLLMScheduler(WholePromptScheduler):
    """Paged, preempts the latest arrival, which is then computed again in one piece."""

    def plan(self, now: float) -> StepPlan:
        draft = Draft(now=now)
        decodes, _ = self._by_kind()
        self._plan_admissions(draft)
        if not draft.chunks:
            self._plan_decodes(draft, decodes)
        return draft.finish()


@dataclass(frozen=True, kw_only=True)
class VLLM(WholePromptConfig):
    """If any prompt that waits fits: whole prompts only, and decodes wait. Else: all decodes.

    `max_batched_tokens`: most tokens of the prompts of one iteration; None is vLLM's max(max_model_len, 2048).
    """

    scheduler_class: ClassVar[type[WholePromptScheduler]] = VLLMScheduler

    def default_max_batched_tokens(self, max_model_len: int) -> int:
        return max(max_model_len, 2048)
