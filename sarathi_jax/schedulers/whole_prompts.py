"""What the policies share that run a prompt in one piece: `VLLM`, `Orca`, `FasterTransformer`."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Unpack

from sarathi_jax.config import check_positive
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Sequence
from sarathi_jax.schedulers.base import Limits, Scheduler, SchedulerConfig
from sarathi_jax.schedulers.draft import Draft


class WholePromptScheduler(Scheduler):
    """A prompt runs whole, if the iteration then has at most `max_batched_tokens`, or waits."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, *, max_batched_tokens: int, **limits: Unpack[Limits]):
        super().__init__(config, pool, **limits)
        self.max_batched_tokens = max_batched_tokens
        self.max_step_tokens = max(max_batched_tokens, config.max_num_seqs)

    def chunk_size(self, draft: Draft, seq: Sequence) -> int:
        return seq.num_uncomputed if draft.num_tokens + seq.num_uncomputed <= self.max_batched_tokens else 0


@dataclass(frozen=True, kw_only=True)
class WholePromptConfig(SchedulerConfig):
    """`max_batched_tokens`: most tokens of an iteration with prompts in it, at least max_model_len. Every shape up to
    it is compiled, so a model with a long context wants a lower max_model_len."""

    scheduler_class: ClassVar[type[WholePromptScheduler]]

    max_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batched_tokens is not None:
            check_positive("max_batched_tokens", self.max_batched_tokens)

    @abc.abstractmethod
    def default_max_batched_tokens(self, max_model_len: int) -> int:
        """What None stands for."""

    def build(
        self, pool: PagePool, *, tile: int, default_token_budget: int = 512, **limits: Unpack[Limits]
    ) -> WholePromptScheduler:
        max_model_len = limits["max_model_len"]
        check_positive("max_model_len", max_model_len)
        max_tokens = self.max_batched_tokens
        if max_tokens is None:
            max_tokens = self.default_max_batched_tokens(max_model_len)
        if max_tokens < max_model_len:
            raise ValueError(
                f"max_batched_tokens={max_tokens} is below max_model_len={max_model_len}, and {type(self).__name__} "
                f"runs a prompt in one piece: raise max_batched_tokens or lower max_model_len"
            )
        return self.scheduler_class(self, pool, max_batched_tokens=max_tokens, **limits)
