"""What a run measured: a record for each request, the iterations, and summaries over them. Exact, nothing sampled.

Percentiles are over all samples, interpolated linearly between neighbours (numpy's "linear"). Failed, rejected and
aborted requests are counted and are in no percentile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sarathi_jax.outputs import ChunkStats, Latencies, PlannedChunks, StepStats
from sarathi_jax.stages import StageUse, stage_use

RequestStatus = Literal["finished", "failed", "rejected", "aborted"]

_FORMAT = "sarathi_jax.report/1"
_PERCENTILES = (50, 90, 95, 99)
_REACHED = 0.95  # below this share of the offered rate a report says so


@dataclass(frozen=True, kw_only=True)
class RequestRecord(Latencies):
    """One request of a run; times on the server's clock (s).

    `arrival_s` is when the schedule had it come, `sent_s` when the server got it: latencies count from the schedule.
    `token_s` is when each token was there for the caller; tokens that came together have the same time, so gaps of 0.
    `asked_len` output tokens were asked for. `error` says why it failed or was rejected.
    """

    request_id: str
    arrival_s: float
    sent_s: float
    prompt_len: int
    asked_len: int
    output_len: int = 0
    first_scheduled_s: float | None = None
    token_s: tuple[float, ...] = ()
    num_preemptions: int = 0
    status: RequestStatus
    error: str | None = None

    @property
    def prefill_s(self) -> float | None:
        """The compute part of TTFT: from the first batch that it was in to its first token."""
        return self.token_s[0] - self.first_scheduled_s if self.token_s and self.first_scheduled_s is not None else None

    @property
    def e2e_per_token_s(self) -> float | None:
        """`e2e_s` over output tokens ("normalised latency")."""
        return (self.token_s[-1] - self.arrival_s) / self.output_len if self.token_s and self.output_len else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Samples in seven numbers."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Iterable[float | None] | np.ndarray) -> Summary | None:
        """Summary of the samples that are not None; None if there is none. ValueError for NaN and infinities."""
        if not isinstance(samples, np.ndarray):
            samples = [sample for sample in samples if sample is not None]
        values = np.asarray(samples, dtype=np.float64)
        if not values.size:
            return None
        if not np.isfinite(values).all():
            raise ValueError(f"sample {int(np.argmin(np.isfinite(values)))} is not finite: not a measurement")
        p50, p90, p95, p99 = np.percentile(values, _PERCENTILES, method="linear").tolist()
        return cls(
            count=values.size, mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(values.max())
        )

    @property
    def few(self) -> tuple[str, ...]:
        """Percentiles that say little more than the maximum: fewer samples than 1 / (1 - q)."""
        return tuple(f"p{q}" for q in _PERCENTILES if self.count * (100 - q) < 100)


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What ran before a measurement began and is not in it."""

    num_requests: int
    num_iterations: int
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run, from `start_s` (time 0 of its schedule) to `end_s` on the server's clock.

    `requests` in order of arrival. `stopped` says why a run ended before all was done (None: all was), and `num_unsent`
    how many requests it had not sent by then. `num_compiled`: programs that were compiled while it ran, None if the
    server does not tell.
    """

    requests: tuple[RequestRecord, ...]
    iterations: tuple[StepStats, ...]
    start_s: float
    end_s: float
    warm_up: WarmUp | None = None
    stopped: str | None = None
    num_unsent: int = 0
    num_compiled: int | None = None

    # Requests.

    @cached_property
    def finished(self) -> tuple[RequestRecord, ...]:
        return self.with_status("finished")

    def with_status(self, status: RequestStatus) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.requests if record.status == status)

    @property
    def num_finished(self) -> int:
        return len(self.finished)

    @property
    def num_failed(self) -> int:
        return len(self.with_status("failed"))

    @property
    def num_rejected(self) -> int:
        return len(self.with_status("rejected"))

    @property
    def num_aborted(self) -> int:
        return len(self.with_status("aborted"))

    @property
    def num_cut(self) -> int:
        """Finished requests with fewer output tokens than asked for (max_model_len, or a stop condition)."""
        return sum(record.output_len < record.asked_len for record in self.finished)

    @cached_property
    def ttft(self) -> Summary | None:
        """Time to first token (s)."""
        return Summary.of(record.ttft_s for record in self.finished)

    @cached_property
    def scheduling_delay(self) -> Summary | None:
        """The part of TTFT that was waiting (s)."""
        return Summary.of(record.scheduling_delay_s for record in self.finished)

    @cached_property
    def prefill(self) -> Summary | None:
        """The part of TTFT that was computing (s)."""
        return Summary.of(record.prefill_s for record in self.finished)

    @cached_property
    def tbt(self) -> Summary | None:
        """Time between tokens (s): all gaps of all finished requests."""
        gaps = [np.diff(record.token_s) for record in self.finished]
        return Summary.of(np.concatenate(gaps)) if gaps else None

    @cached_property
    def e2e(self) -> Summary | None:
        """Arrival to last token (s)."""
        return Summary.of(record.e2e_s for record in self.finished)

    @cached_property
    def e2e_per_token(self) -> Summary | None:
        """Arrival to last token, for each output token (s)."""
        return Summary.of(record.e2e_per_token_s for record in self.finished)

    @cached_property
    def preemptions(self) -> Summary | None:
        return Summary.of(record.num_preemptions for record in self.finished)

    @cached_property
    def send_lag(self) -> Summary | None:
        """How much later than scheduled the server got each request (s), whatever became of it."""
        return Summary.of(record.sent_s - record.arrival_s for record in self.requests)

    # Rates over the whole window.

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def num_output_tokens(self) -> int:
        """Of finished requests."""
        return sum(record.output_len for record in self.finished)

    @property
    def num_total_tokens(self) -> int:
        """Prompt and output tokens of finished requests."""
        return sum(record.prompt_len + record.output_len for record in self.finished)

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.num_output_tokens / self.wall_s if self.wall_s > 0 else None

    @property
    def total_tokens_per_s(self) -> float | None:
        return self.num_total_tokens / self.wall_s if self.wall_s > 0 else None

    @property
    def requests_per_s(self) -> float | None:
        """Finished requests over the window, its tail included."""
        return self.num_finished / self.wall_s if self.wall_s > 0 else None

    @cached_property
    def offered_rate(self) -> float | None:
        """Requests per second of the schedule: gaps over their sum. None for fewer than two arrival times."""
        times = [record.arrival_s for record in self.requests]
        span = max(times) - min(times) if times else 0.0
        return (len(times) - 1) / span if span > 0 else None

    @cached_property
    def reached_rate(self) -> float | None:
        """Requests per second that the server kept up with.

        The offered rate over the slope of the least-squares line of first-token time against arrival: 1 for a server
        that keeps up, however long its answers take, and more when its queue grows. Unlike finished / wall it does not
        depend on the tail. None for fewer than two arrival times.
        """
        times = np.asarray([(record.arrival_s, record.token_s[0]) for record in self.finished if record.token_s])
        if self.offered_rate is None or times.size == 0 or np.ptp(times[:, 0]) == 0:
            return None
        arrival, first = (times - times.mean(axis=0)).T
        slope = float(arrival @ first / (arrival @ arrival))
        return self.offered_rate / slope if slope > 0 else None

    # Iterations.

    @cached_property
    def iteration_wall(self) -> Summary | None:
        """Wall time of an iteration (s)."""
        return Summary.of(step.wall_s for step in self.iterations)

    @cached_property
    def iteration_host(self) -> Summary | None:
        """Host time of an iteration (s)."""
        return Summary.of(step.host_s for step in self.iterations)

    @cached_property
    def iteration_prefill_tokens(self) -> Summary | None:
        return Summary.of(step.num_prefill_tokens for step in self.iterations)

    @cached_property
    def iteration_decode_tokens(self) -> Summary | None:
        return Summary.of(step.num_decode_tokens for step in self.iterations)

    @cached_property
    def iteration_padding(self) -> Summary | None:
        """Padding rows of an iteration."""
        return Summary.of(step.num_padding for step in self.iterations)

    @cached_property
    def iteration_seqs(self) -> Summary | None:
        """Sequences of an iteration."""
        return Summary.of(step.num_seqs for step in self.iterations)

    @cached_property
    def iteration_pages_held(self) -> Summary | None:
        return Summary.of(step.num_pages_held for step in self.iterations)

    @property
    def padding_share(self) -> float | None:
        """Padding rows among all rows of all iterations."""
        padding = sum(step.num_padding for step in self.iterations)
        total = padding + sum(step.num_prefill_tokens + step.num_decode_tokens for step in self.iterations)
        return padding / total if total else None

    @cached_property
    def stage_use(self) -> tuple[StageUse, ...]:
        """Of each replica and pipeline stage, where the server tells."""
        return stage_use(self.iterations)

    # Out and in.

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the numbers must know."""
        found = []
        if self.stopped is not None:
            found.append(f"stopped before all was done: {self.stopped}; {self.num_unsent} requests were not sent")
        for status in ("failed", "rejected"):
            if records := self.with_status(status):
                found.append(f"{len(records)} requests {status}, the first: {records[0].error}")
        if self.num_cut:
            found.append(f"{self.num_cut} requests ended with fewer output tokens than were asked for")
        offered, reached = self.offered_rate, self.reached_rate
        if offered is not None and reached is not None and reached < _REACHED * offered:
            found.append(f"the server did not keep up: offered {offered:.4g} requests/s, reached {reached:.4g}")
        if self.num_compiled:
            found.append(f"{self.num_compiled} programs were compiled while measuring; warm up first")
        return tuple(found)

    def to_table(self) -> str:
        """For a terminal."""
        show = lambda value, unit: "-" if value is None else f"{value:,.4g} {unit}"
        lines = [
            f"requests    {self.num_finished} finished, {self.num_failed} failed, {self.num_rejected} rejected, "
            f"{self.num_aborted} aborted, {self.num_unsent} not sent",
            f"rate        offered {show(self.offered_rate, '/s')}, reached {show(self.reached_rate, '/s')}",
            f"throughput  {show(self.output_tokens_per_s, 'output tokens/s')}, "
            f"{show(self.total_tokens_per_s, 'tokens/s with prompts')}, over {self.wall_s:.4g} s",
            f"iterations  {len(self.iterations)}, "
            f"padding {'-' if self.padding_share is None else f'{self.padding_share:.1%}'} of rows",
        ]
        if any(len(step.stages) > 1 for step in self.iterations):
            stages: dict[int, list[StageUse]] = {}
            for use in self.stage_use:
                stages.setdefault(use.stage, []).append(use)
            share = lambda uses: sum(u.bubble_s for u in uses) / sum(u.busy_s + u.bubble_s for u in uses)
            shares = ", ".join(f"{share(uses):.1%} of stage {stage}" for stage, uses in stages.items())
            lines.append(f"bubbles     {shares}, while anything was in flight")
        if self.warm_up is not None:
            warm_up = self.warm_up
            lines.append(
                f"warm-up     {warm_up.num_requests} requests, {warm_up.num_iterations} iterations, "
                f"{warm_up.wall_s:.4g} s: not counted below or above"
            )
        columns = ("mean", "p50", "p90", "p95", "p99", "max")
        lines += ["", f"{'':28}{'count':>9}" + "".join(f"{name:>11}" for name in columns)]
        any_few = False
        for title, name, scale in _ROWS:
            summary: Summary | None = getattr(self, name)
            if summary is None:
                lines.append(f"{title:28}{0:>9}" + f"{'-':>11}" * len(columns))
                continue
            few, row = summary.few, f"{title:28}{summary.count:>9}"
            for column in columns:
                row += f"{getattr(summary, column) * scale:>10,.5g}{'*' if column in few else ' '}"
            any_few |= bool(few)
            lines.append(row.rstrip())
        if any_few:
            lines.append("* too few samples: this percentile says little more than the maximum")
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Strict JSON (ValueError for NaN and infinities), with the summaries in it; `from_json` reads it back."""
        content: dict[str, Any] = {"format": _FORMAT}
        content |= {field.name: getattr(self, field.name) for field in fields(self)}
        content["requests"] = [vars(record) for record in self.requests]
        names = [field.name for field in fields(StepStats)]
        content["iterations"] = [{name: getattr(step, name) for name in names} for step in self.iterations]
        content["warm_up"] = None if self.warm_up is None else asdict(self.warm_up)
        rates = ("offered_rate", "reached_rate", "output_tokens_per_s", "total_tokens_per_s", "padding_share")
        content["summary"] = {name: getattr(self, name) for name in rates}
        for _, name, _ in _ROWS:
            summary = getattr(self, name)
            content["summary"][name] = None if summary is None else asdict(summary)
        content["summary"]["stages"] = [asdict(use) | {"bubble_share": use.bubble_share} for use in self.stage_use]
        return json.dumps(content, allow_nan=False, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """A report of `to_json`, equal to the one it came from. ValueError for anything else."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError(f"not a report: the text must be JSON of Report.to_json, with format {_FORMAT!r}")
        content.pop("summary", None)
        try:
            records = [RequestRecord(**{**r, "token_s": tuple(r["token_s"])}) for r in content.pop("requests")]
            steps = [
                StepStats(
                    **step
                    | {"chunks": tuple(ChunkStats(*chunk) for chunk in step["chunks"])}
                    | {"stages": tuple((start, end) for start, end in step.get("stages", ()))}
                )
                for step in content.pop("iterations")
            ]
            warm_up = content.pop("warm_up")
            return cls(
                requests=tuple(records),
                iterations=tuple(steps),
                warm_up=None if warm_up is None else WarmUp(**warm_up),
                **content,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a report with other fields than this version's: {error}") from error


# Title, Report's attribute, factor: the rows of a table.
_ROWS = (
    ("TTFT (ms)", "ttft", 1e3),
    ("  waiting (ms)", "scheduling_delay", 1e3),
    ("  computing (ms)", "prefill", 1e3),
    ("TBT (ms)", "tbt", 1e3),
    ("end to end (ms)", "e2e", 1e3),
    ("end to end / token (ms)", "e2e_per_token", 1e3),
    ("preemptions", "preemptions", 1),
    ("sent late by (ms)", "send_lag", 1e3),
    ("iteration (ms)", "iteration_wall", 1e3),
    ("  host (ms)", "iteration_host", 1e3),
    ("  prefill tokens", "iteration_prefill_tokens", 1),
    ("  decode tokens", "iteration_decode_tokens", 1),
    ("  padding", "iteration_padding", 1),
    ("  sequences", "iteration_seqs", 1),
    ("  pages held", "iteration_pages_held", 1),
)


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's, chunks that nobody has looked at as chunks."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PlannedChunks):
        return tuple(value)
    raise TypeError(f"{value!r} has no place in a report")
