"""One simulated engine: a scheduler and its pool, and the stages that its iterations pass."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from sarathi_jax.cost_model import StageCost
from sarathi_jax.outputs import CompletionOutput, FinishReason, PlannedChunks, RequestMetrics, RequestOutput, StepStats
from sarathi_jax.pages import PagePool
from sarathi_jax.replay import Replay
from sarathi_jax.request import Sequence, Status
from sarathi_jax.schedulers import Scheduler

Stages = tuple[tuple[float, float], ...]
"""When an iteration is in each stage: (start, end), s."""


@dataclass(eq=False)
class SimulatedSequence(Sequence):
    """A sequence with the times of its tokens; it ends after `num_outputs`."""

    replica: Replica = None  # pyright: ignore[reportAssignmentType]  # always given; what comes before has defaults
    num_outputs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metrics = RequestMetrics(arrival_s=self.request.arrival_time_s)
        self.token_s = self.metrics.token_s

    def output(self, finish_reason: FinishReason | None) -> RequestOutput:
        """The request as it stands and goes on: tokens and times are the growing lists themselves."""
        self.metrics.first_scheduled_s = self.first_scheduled_s
        completion = CompletionOutput(
            index=0, text="", delta="", token_ids=self.output_token_ids, finish_reason=finish_reason, stop_reason=None,
            logprobs=None, metrics=self.metrics,
        )  # fmt: skip
        return RequestOutput(
            request_id=self.request.request_id, prompt=None, prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None, outputs=(completion,),
        )  # fmt: skip


class Flight(NamedTuple):
    """An iteration that was planned and is read at `end_s`; `samples`: which of the sequences get a token."""

    sequences: tuple[Any, ...]
    samples: tuple[bool, ...]
    end_s: float
    stats: StepStats


class Replica:
    """Plans iterations and reads them, first in, first out.

    They take as long as `cost` says or as `replay` measured: one of the two. `overlap_chunks` as in `Simulator`.
    `shapes`: of batches, for the padding; None: there is none.
    """

    def __init__(
        self,
        index: int,
        scheduler: Scheduler,
        pool: PagePool,
        *,
        cost: StageCost | None,
        replay: Replay | None,
        overlap_chunks: bool,
        shapes: tuple[int, ...] | None,
    ):
        assert (cost is None) != (replay is None)
        self.index, self.scheduler, self.pool = index, scheduler, pool
        self.num_stages = scheduler.num_stages
        self.max_in_flight = max(scheduler.num_stages, 1 + scheduler.lookahead)
        self.in_flight: deque[Flight] = deque()
        self.num_planned = 0
        self.is_plan_due = False
        """Somebody is to call `plan` at a later time."""
        self._cost, self._replay, self._shapes = cost, replay, shapes
        self._is_apart = self.num_stages > 1 and not overlap_chunks
        self._free_s = [-math.inf] * self.num_stages  # when each stage will be
        self._host_free_s = -math.inf

    def next_plan_s(self, now_s: float) -> float:
        """When it plans next, `now_s` at the earliest: once its host is free, in a pipeline once a stage will be."""
        if self._cost is None:
            assert self._replay is not None
            return self._replay.plan_s(self.num_planned)
        if len(self.in_flight) >= self.max_in_flight:
            return math.inf
        if self.num_stages > 1:
            now_s = max(now_s, self._free_s[0] - self._cost.host_s)
        return max(now_s, self._host_free_s)

    def plan(self, now_s: float) -> Flight | None:
        """The next iteration, on its way; None if there is nothing to run."""
        plan = self.scheduler.plan(now_s)
        for seq in plan.preempted:
            assert isinstance(seq, SimulatedSequence)
            seq.metrics.num_preemptions = seq.num_preemptions
        if self._replay is not None:
            self._replay.check(self.num_planned, plan)
        if not plan:
            return None
        sequences, starts, sizes, samples = zip(*plan.chunks, strict=True)
        num_decodes, num_prefill, prompts = sizes.count(1), 0, []
        if num_decodes == len(sizes):
            decodes = [start + 1 for start in starts]
        else:
            decodes = [start + 1 for start, size in zip(starts, sizes, strict=True) if size == 1]
            prompts = [(start, size) for start, size in zip(starts, sizes, strict=True) if size > 1]
            num_prefill = sum(sizes) - num_decodes
        if self._replay is not None:
            end_s, wall_s, host_s = self._replay.times(self.num_planned, self.max_in_flight)
            stages = ()
        else:
            assert self._cost is not None
            stages, host_s = self._run(now_s, decodes, prompts), self._cost.host_s
            end_s = stages[-1][1]
            wall_s = end_s - now_s
        num_tokens, shapes = num_prefill + num_decodes, self._shapes
        stats = StepStats.make(
            chunks=PlannedChunks(sequences, starts, sizes),
            start_s=now_s,
            wall_s=wall_s,
            host_s=host_s,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decodes,
            num_padding=0 if shapes is None else shapes[bisect_left(shapes, num_tokens)] - num_tokens,
            num_preempted=len(plan.preempted),
            num_pages_held=self.pool.num_held,
            num_pages=self.pool.num_pages,
            replica=self.index,
            stages=stages,
        )
        if self._is_apart:
            for seq in sequences:
                seq.num_in_flight += 1
        flight = Flight(sequences, samples, end_s, stats)
        self.in_flight.append(flight)
        self.num_planned += 1
        return flight

    def read(self) -> tuple[StepStats, list[RequestOutput]]:
        """The oldest iteration has ended: tokens to their sequences, ends found, pages released."""
        sequences, flags, end_s, stats = self.in_flight.popleft()
        if self._is_apart:
            for seq in sequences:
                seq.num_in_flight -= 1
        outputs, finished = [], Status.FINISHED
        for seq, samples in zip(sequences, flags, strict=True):
            if not samples or seq.status is finished:
                continue
            seq.num_pending -= 1
            seq.output_token_ids.append(0)
            token_s = seq.token_s
            token_s.append(end_s)
            num_outputs = len(token_s)
            if num_outputs == seq.num_outputs:
                self.scheduler.finish(seq)
                outputs.append(seq.output("length"))
            elif num_outputs == 1:
                outputs.append(seq.output(None))
        return stats, outputs

    def clear(self) -> float:
        """Forget what is in flight, of sequences that were all aborted; when that would have ended."""
        end_s = max((flight.end_s for flight in self.in_flight), default=-math.inf)
        self.in_flight.clear()
        self.is_plan_due = False
        return end_s

    def _run(self, now_s: float, decodes: list[int], prompts: list[tuple[int, int]]) -> Stages:
        """An iteration planned now, through every stage: the host first, and each stage when it is free."""
        cost, stages, free_s = self._cost, [], self._free_s
        assert cost is not None
        times = cost.stage_s(decodes, prompts)
        hop_s = 0.0
        if self.num_stages > 1:
            hop_s = cost.hop_s(len(decodes) + sum(size for _, size in prompts))
        at = self._host_free_s = now_s + cost.host_s
        for stage, stage_s in enumerate(times):
            if not 0.0 < stage_s < math.inf:
                raise ValueError(
                    f"cost gave {stage_s!r} s for stage {stage} of {len(decodes)} decodes (contexts {decodes}) and the "
                    f"chunks (start, tokens) {prompts}; every iteration must take a positive, finite time"
                )
            at = max(at, free_s[stage])
            end_s = free_s[stage] = at + stage_s
            stages.append((at, end_s))
            at = end_s + hop_s
        return tuple(stages)
