"""An ablation of Sarathi-Serve: prompts and decodes in one iteration, but no prompt in chunks (OSDI'24, table 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack

from sarathi_jax.pages import PagePool
from sarathi_jax.request import Sequence
from sarathi_jax.schedulers.base import Limits, SchedulerConfig
from sarathi_jax.schedulers.draft import Draft
from sarathi_jax.schedulers.sarathi import AblationConfig, SarathiScheduler


class HybridOnlyScheduler(SarathiScheduler):
    """Sarathi's order, whole prompts. Paged, preempts the latest arrival, which is then computed again in one piece."""

    def __init__(
        self, config: SchedulerConfig, pool: PagePool, *, token_budget: int, tile: int, **limits: Unpack[Limits]
    ):
        super().__init__(config, pool, token_budget=token_budget, tile=tile, **limits)
        # A sequence runs at most max_model_len - 1 tokens at once: the last there can be is only sampled.
        self.max_step_tokens = max(token_budget, config.max_num_seqs, config.max_num_seqs - 1 + self.max_model_len - 1)

    def chunk_size(self, draft: Draft, seq: Sequence) -> int:
        fits = draft.num_tokens + seq.num_uncomputed <= self.token_budget
        return seq.num_uncomputed if fits or not draft.has_prompts else 0


@dataclass(frozen=True, kw_only=True)
class HybridOnly(AblationConfig):
    """Every decode in every iteration, and one whole prompt, however long; further ones while all fit `token_budget`.

    The largest iteration is a prompt of max_model_len beside all decodes. `token_budget` as in `Sarathi`.
    """

    scheduler_class: ClassVar[type[SarathiScheduler]] = HybridOnlyScheduler
