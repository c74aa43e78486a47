"""A dispatched step until it is read, and what is told of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from sarathi_jax.outputs import ChunkStats, StepStats
from sarathi_jax.pipeline import StageClock
from sarathi_jax.runner import DeviceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step of replica `replica`. `host_s`: what planning and dispatch took; `ends`: when its stages are done."""

    step: DeviceStep
    start_s: float
    host_s: float
    num_preempted: int
    num_pages_held: int
    replica: int
    ends: list[Future[float]]

    def stats(self, stage_clock: StageClock | None, *, end_s: float, host_s: float, num_pages: int) -> StepStats:
        """To be asked in the order of the steps, when they have been read."""
        chunks = tuple(
            ChunkStats(chunk.sequence.request.request_id, chunk.sequence.index, chunk.start, chunk.num_tokens)
            for chunk in self.step.chunks
        )
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        return StepStats(
            chunks=chunks,
            start_s=self.start_s,
            wall_s=end_s - self.start_s,
            host_s=host_s,
            num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks) - num_decodes,
            num_decode_tokens=num_decodes,
            num_padding=self.step.num_padding,
            num_preempted=self.num_preempted,
            num_pages_held=self.num_pages_held,
            num_pages=num_pages,
            replica=self.replica,
            stages=() if stage_clock is None else stage_clock.spans(self.start_s + self.host_s, self.ends),
            collective_bytes=self.step.collective_bytes,
        )
