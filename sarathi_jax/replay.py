"""A measured run as the time of a simulated one: the same plans at the same moments, or word of where they part."""

from __future__ import annotations

import math
from typing import Any

from sarathi_jax.config import check_instance
from sarathi_jax.metrics import Report
from sarathi_jax.outputs import ChunkStats
from sarathi_jax.request import StepPlan


class ReplayDeparted(RuntimeError):
    """The simulation planned something else than what was measured."""


class Replay:
    """The iterations of a report as a simulator's cost: `Simulator(config, Replay(report), ...)`.

    Iteration k is planned when the measured one was, and read when that was read; a request is sent before it if it was
    then. With the engine's configuration, pool, window, `lookahead` and workload a simulator makes the same plans; the
    first that differs raises `ReplayDeparted`. Requests that ended early (EOS, a stop string) do so again. The run must
    be whole, and of one engine: nothing stopped or aborted.
    """

    def __init__(self, report: Report):
        check_instance("report", report, Report)
        if not report.iterations or report.stopped is not None or report.num_aborted or report.num_failed:
            raise ValueError(
                f"a replay needs a whole run: this one has {len(report.iterations)} iterations, "
                f"{report.num_aborted} aborted and {report.num_failed} failed requests, stopped={report.stopped!r}"
            )
        if any(step.replica or len(step.stages) > 1 for step in report.iterations):
            raise ValueError("a replay needs a run of one engine of one stage: this one has replicas or stages")
        self.iterations = report.iterations
        self.start_s = report.start_s
        self._output_lens = {record.request_id: record.output_len for record in report.finished}
        self._seen_s: list[float] = []
        sent = sorted((record.sent_s, record.arrival_s) for record in report.requests)
        num_sent, latest_s = 0, -math.inf
        for step in report.iterations:
            while num_sent < len(sent) and sent[num_sent][0] <= step.start_s:
                latest_s = max(latest_s, sent[num_sent][1])
                num_sent += 1
            self._seen_s.append(latest_s)

    def output_len(self, request_id: str, asked: int) -> int:
        """Output tokens that a request ends after."""
        return min(self._output_lens.get(request_id, asked), asked)

    def plan_s(self, k: int) -> float:
        """When iteration k was planned; infinity behind the last one."""
        return self.iterations[k].start_s if k < len(self.iterations) else math.inf

    def times(self, k: int, max_in_flight: int) -> tuple[float, float, float]:
        """When iteration k was read, and how long it and its host took.

        Before the iteration was planned that had to wait for it, whatever the last digit of a sum.
        """
        step = self.iterations[k]
        return min(step.start_s + step.wall_s, self.plan_s(k + max_in_flight)), step.wall_s, step.host_s

    def seen_s(self, k: int) -> float:
        """The latest arrival among the requests that were sent before iteration k was planned."""
        return self._seen_s[k] if k < len(self.iterations) else -math.inf

    def check(self, k: int, plan: StepPlan) -> None:
        """ReplayDeparted unless `plan` is the measured iteration k."""
        measured = self.iterations[k].chunks
        planned = [
            ChunkStats(c.sequence.request.request_id, c.sequence.index, c.start, c.num_tokens) for c in plan.chunks
        ]
        if sorted(planned) != sorted(measured):  # an engine may lay the chunks out in another order
            show: Any = lambda chunks: ", ".join(f"{c.request_id}[{c.start}:{c.start + c.num_tokens}]" for c in chunks)
            raise ReplayDeparted(
                f"the replay departs at iteration {k}, {self.iterations[k].start_s:.6f} s: measured "
                f"{show(c for c in measured if c not in planned) or 'nothing else'}, planned "
                f"{show(c for c in planned if c not in measured) or 'nothing else'}, of {len(measured)} and "
                f"{len(planned)} chunks; are policy, pool, window, lookahead and workload those of the run?"
            )
