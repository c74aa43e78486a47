"""Use of pipeline stages: when each worked, and its bubbles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sarathi_jax.outputs import StepStats


class Bubble(NamedTuple):
    """A time (s) in which a stage had nothing to do while a micro-batch was in another stage of its replica."""

    replica: int
    stage: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """How a stage spent the time from its first use to its last (s).

    `bubble_s`: idle while its replica had micro-batches in flight. `idle_s`: idle in all, without requests too.
    """

    replica: int
    stage: int
    busy_s: float
    bubble_s: float
    idle_s: float

    @property
    def bubble_share(self) -> float:
        """Of the time in which its replica had micro-batches in flight."""
        return self.bubble_s / (self.busy_s + self.bubble_s)


def stage_use(iterations: Iterable[StepStats]) -> tuple[StageUse, ...]:
    """Of every stage that was used, by replica and stage."""
    iterations = [step for step in iterations if step.stages]
    bubble_s: dict[tuple[int, int], float] = {}
    for bubble in bubbles(iterations):
        key = bubble.replica, bubble.stage
        bubble_s[key] = bubble_s.get(key, 0.0) + bubble.end_s - bubble.start_s
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for step in iterations:
        for stage, span in enumerate(step.stages):
            spans.setdefault((step.replica, stage), []).append(span)
    uses = []
    for (replica, stage), used in sorted(spans.items()):
        busy_s = sum(end - start for start, end in used)
        idle_s = used[-1][1] - used[0][0] - busy_s
        uses.append(
            StageUse(
                replica=replica,
                stage=stage,
                busy_s=busy_s,
                bubble_s=bubble_s.get((replica, stage), 0.0),
                idle_s=max(idle_s, 0.0),
            )
        )
    return tuple(uses)


def bubbles(iterations: Iterable[StepStats]) -> Iterator[Bubble]:
    """Every bubble of these iterations, which are in the order in which they were read.

    A micro-batch is in flight from its start in the first stage to its end in the last one. Each stage runs
    micro-batches one after another, in the same order.
    """
    in_flight: dict[int, tuple[float, list[float]]] = {}  # replica: the last end, and since when each stage is idle
    for step in iterations:
        if not step.stages:
            continue
        replica, stages = step.replica, step.stages
        until, idle_since = in_flight.get(replica, (-float("inf"), []))
        start = stages[0][0]
        if start > until:  # nothing was in flight: what came before has ended
            yield from _gaps(replica, idle_since, [until] * len(idle_since))
            idle_since = [start] * len(stages)
        yield from _gaps(replica, idle_since, [start for start, _ in stages])
        in_flight[replica] = max(until, stages[-1][1]), [end for _, end in stages]
    for replica, (until, idle_since) in in_flight.items():
        yield from _gaps(replica, idle_since, [until] * len(idle_since))


def _gaps(replica: int, starts: list[float], ends: list[float]) -> Iterator[Bubble]:
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > start:
            yield Bubble(replica, stage, start, end)
