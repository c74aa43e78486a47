"""An ablation of Sarathi-Serve: prompts in chunks, but never in one iteration with decodes (OSDI'24, table 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sarathi_jax.request import StepPlan
from sarathi_jax.schedulers.draft import Draft
from sarathi_jax.schedulers.sarathi import AblationConfig, SarathiScheduler


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


@dataclass(frozen=True, kw_only=True)
class ChunkedOnly(AblationConfig):
    """Takes turns: an iteration of prompts, at most `token_budget` of their tokens, then one of all decodes.

    When one kind has nothing to run, or lacks the pages for it, it is the other's turn. `token_budget` as in `Sarathi`.
    """

    scheduler_class: ClassVar[type[SarathiScheduler]] = ChunkedOnlyScheduler
