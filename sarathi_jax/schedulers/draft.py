"""A plan in the making."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sarathi_jax.request import Chunk, Sequence, StepPlan


@dataclass(kw_only=True, slots=True)
class Draft:
    """A plan in the making; `now` is the time it is made for. The first `num_decodes` chunks are decodes."""

    now: float
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_decodes: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    """Of its own: sequences in it bear it."""

    def __contains__(self, seq: Sequence) -> bool:
        return seq.draft_number == self.number

    @property
    def has_prompts(self) -> bool:
        """Does any of its chunks belong to a prompt?"""
        return len(self.chunks) > self.num_decodes

    def append(self, chunk: Chunk) -> None:
        assert chunk.num_tokens >= 1, f"an empty chunk of {chunk.sequence}"
        assert chunk.sequence not in self, f"two chunks of {chunk.sequence} in one plan"
        self.chunks.append(chunk)
        chunk.sequence.draft_number = self.number
        self.num_tokens += chunk.num_tokens

    def finish(self) -> StepPlan:
        return StepPlan(chunks=tuple(self.chunks), preempted=tuple(self.preempted), admitted=tuple(self.admitted))
