"""Capacity: the highest request rate that holds a service level objective (Sarathi-Serve, OSDI'24, section 5.1)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sarathi_jax.config import check_number, check_positive
from sarathi_jax.driver import Items, Progress, Server, run_open_loop
from sarathi_jax.metrics import Report
from sarathi_jax.outputs import StepStats

_HALVINGS = 6


@dataclass(frozen=True, kw_only=True)
class Slo:
    """P99 of the time between tokens and median scheduling delay, each at most this (s)."""

    tbt_p99_s: float
    scheduling_delay_p50_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("tbt_p99_s", "scheduling_delay_p50_s"):
            check_number(name, getattr(self, name), 1e-12, 1e12, "seconds > 0")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial measured. None is not measured: no gap between tokens, no span of arrivals."""

    num_finished: int
    num_failed: int = 0
    num_rejected: int = 0
    offered_rate: float | None = None
    reached_rate: float | None = None
    tbt_p99_s: float | None
    scheduling_delay_p50_s: float | None
    output_tokens_per_s: float | None = None
    stopped: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, report: Report) -> TrialResult:
        errors = [record.error for record in report.requests if record.error is not None]
        return cls(
            num_finished=report.num_finished,
            num_failed=report.num_failed,
            num_rejected=report.num_rejected,
            offered_rate=report.offered_rate,
            reached_rate=report.reached_rate,
            tbt_p99_s=report.tbt.p99 if report.tbt else None,
            scheduling_delay_p50_s=report.scheduling_delay.p50 if report.scheduling_delay else None,
            output_tokens_per_s=report.output_tokens_per_s,
            stopped=report.stopped,
            error=errors[0] if errors else None,
        )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run at a rate, and why it does not hold the SLO (empty: it does). `reused`: read from a results file."""

    rate: float
    result: TrialResult
    failures: tuple[str, ...]
    reused: bool = False

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Answer of a search: `rate` (requests/s) is the highest that passed with no lower one that failed, None if none
    did; `upper` the lowest that failed, None if none did. `converged`: they are as near as was asked. `note` says what
    there is to say if not. `trials` in the order they ran. Rates are those asked for: a few hundred random gaps may
    offer some percent more or less, which each trial's result tells.
    """

    rate: float | None
    upper: float | None
    converged: bool
    note: str
    slo: Slo
    trials: tuple[Trial, ...]

    def to_table(self) -> str:
        """For a terminal: every trial, then the answer."""
        ms = lambda value: "-" if value is None else f"{value * 1e3:,.4g}"
        number = lambda value: "-" if value is None else f"{value:,.4g}"
        titles = f"{'rate /s':>10}{'offered':>10}{'reached':>10}{'TBT p99 ms':>12}{'delay p50 ms':>14}{'tokens/s':>10}"
        lines = [f"{titles}  verdict"]
        for trial in self.trials:
            r = trial.result
            lines.append(
                f"{trial.rate:>10.4g}{number(r.offered_rate):>10}{number(r.reached_rate):>10}{ms(r.tbt_p99_s):>12}"
                f"{ms(r.scheduling_delay_p50_s):>14}{number(r.output_tokens_per_s):>10}  "
                f"{'; '.join(trial.failures) or 'holds'}{' (from file)' if trial.reused else ''}"
            )
        bound = f"P99 TBT <= {self.slo.tbt_p99_s:g} s, median delay <= {self.slo.scheduling_delay_p50_s:g} s"
        lines.append(f"capacity {'none' if self.rate is None else f'{self.rate:.4g} requests/s'} ({bound})")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def judge(result: TrialResult, slo: Slo, *, min_reached: float = 0.95) -> tuple[str, ...]:
    """Why a trial does not hold the SLO; empty if it does.

    The reached rate counts too, `min_reached` of the offered one: a short trial can end before its queue is long.
    """
    failures = []
    if result.stopped is not None:
        failures.append(f"stopped early, {result.stopped}")
    if result.num_failed:
        failures.append(f"{result.num_failed} requests failed: {result.error}")
    if result.num_rejected:
        failures.append(f"{result.num_rejected} requests rejected: {result.error}")
    if not result.num_finished:
        failures.append("no request finished")
    if result.tbt_p99_s is not None and not result.tbt_p99_s <= slo.tbt_p99_s:
        failures.append(f"P99 TBT {result.tbt_p99_s:.4g} s > {slo.tbt_p99_s:g}")
    delay = result.scheduling_delay_p50_s
    if delay is not None and not delay <= slo.scheduling_delay_p50_s:
        failures.append(f"median delay {delay:.4g} s > {slo.scheduling_delay_p50_s:g}")
    offered, reached = result.offered_rate, result.reached_rate
    if offered is not None and reached is not None and not reached >= min_reached * offered:
        failures.append(f"reached {reached:.4g} of {offered:.4g} requests/s")
    return tuple(failures)


def hopeless(progress: Progress, slo: Slo) -> str | None:
    """Why a trial can no longer hold the SLO, whatever comes, or None: `stop_when` of its run.

    So many delays or gaps are over their bound already that the percentile (linear, over all requests and all gaps
    that the run can have) lies among them: more than half of the requests, more than 1 % of the gaps.
    """
    n, gaps = progress.num_requests, progress.num_gaps
    late = progress.num_delays_over(slo.scheduling_delay_p50_s)
    if late and late >= n - (n - 1) // 2:
        return f"hopeless: {late} of {n} requests waited more than {slo.scheduling_delay_p50_s:g} s"
    slow = progress.num_gaps_over(slo.tbt_p99_s)
    if slow and gaps is not None and slow >= gaps - 99 * (gaps - 1) // 100:
        return f"hopeless: {slow} of at most {gaps} gaps took more than {slo.tbt_p99_s:g} s"
    return None


class ScalableItems(Items, Protocol):
    """A workload that can come faster or slower: the same requests, only the gaps scaled."""

    def with_rate(self, requests_per_s: float, /) -> Items: ...


def open_loop_trial(server: Server, workload: ScalableItems, slo: Slo, **options: Any) -> Callable[[float], Report]:
    """A `run_trial` for `find_capacity`: the workload at a rate, ended once it is hopeless.

    `options` go to `run_open_loop`.
    """
    stop = lambda progress: hopeless(progress, slo)
    return lambda rate: run_open_loop(server, workload.with_rate(rate), stop_when=stop, **options)


def undisturbed(
    run_trial: Callable[[float], Report],
    model: Callable[[list[int], list[tuple[int, int]]], float],
    *,
    slow: float = 1.5,
    max_share: float = 0.05,
    attempts: int = 4,
) -> Callable[[float], Report]:
    """Trials on a machine that others use too: a disturbed one runs again.

    Disturbed: more than `max_share` of its iterations took over `slow` times what the machine's time model (of
    `budget`) says. That looks at iterations, not at the verdict, so that it favours none. After `attempts` the least
    disturbed counts.
    """
    check_positive("attempts", attempts)

    def is_slow(step: StepStats) -> bool:
        decodes = [chunk.start + 1 for chunk in step.chunks if chunk.num_tokens == 1]
        chunks = [(chunk.start, chunk.num_tokens) for chunk in step.chunks if chunk.num_tokens > 1]
        return step.wall_s > slow * model(decodes, chunks)

    def run(rate: float) -> Report:
        trials: list[tuple[float, Report]] = []
        while not trials or (trials[-1][0] > max_share and len(trials) < attempts):
            report = run_trial(rate)
            trials.append((sum(map(is_slow, report.iterations)) / max(len(report.iterations), 1), report))
        return min(trials, key=lambda trial: trial[0])[1]

    return run


def config_key(**parts: Any) -> str:
    """A short name for what trials depend on, alike for equal parts: configurations (dataclasses) and plain values.

    >>> config_key(scheduler=Sarathi(token_budget=512), model="...", workload="openchat, seed 1, 500 requests")
    """
    return hashlib.sha256(json.dumps(_content(parts), sort_keys=True).encode()).hexdigest()[:16]


def _content(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: _content(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [type(value).__name__, named]
    if isinstance(value, Mapping):
        return {str(key): _content(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_content(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} cannot be part of a key; give dataclasses, mappings, lists, numbers and strings")


def find_capacity(
    run_trial: Callable[[float], Report | TrialResult],
    slo: Slo,
    *,
    start_rate: float,
    tolerance: float = 0.025,
    max_trials: int = 40,
    min_rate: float | None = None,
    min_reached: float = 0.95,
    repeats: int = 1,
    results_path: str | Path | None = None,
    key: str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Capacity:
    """Search for the highest rate (requests/s) whose trial holds the SLO, to a relative `tolerance`.

    From `start_rate` the rate doubles until a trial fails, or if the first fails is halved until one passes (down to
    `min_rate`, by default `start_rate` / 64); then the interval is bisected. Trials must be alike but for the rate:
    the same requests, only their gaps scaled. `repeats` (odd) runs a rate until more than half of so many trials agree,
    against noise: one unlucky failure would otherwise keep all higher rates from being tried.

    Start below capacity. A short trial far above it can pass: all its requests are waiting before many of them decode,
    so that few gaps are long, and a delay that grows without bound has no time to grow.

    Every trial is appended to `results_path` (JSON lines) when it ends. Trials there of the same `key` (`config_key`),
    SLO and rate are not run again, so a search that was cut off goes on where it was. They count as `max_trials` do.

    Raises:
      ValueError: a bad argument; or requests that the server refuses, as it would at any rate.
      KeyboardInterrupt: a trial was interrupted. The trials before it are in the file.
    """
    check_number("start_rate", start_rate, 1e-9, 1e9, "requests/s > 0")
    check_number("tolerance", tolerance, 1e-6, 1.0, "1e-6 <= tolerance <= 1")
    check_number("min_reached", min_reached, 0.0, 1.0, "a share of the offered rate")
    check_positive("max_trials", max_trials)
    check_positive("repeats", repeats)
    if repeats % 2 == 0:
        raise ValueError(f"repeats={repeats} must be odd: the majority decides")
    floor = start_rate / 2**_HALVINGS if min_rate is None else min_rate
    check_number("min_rate", floor, 1e-12, start_rate, f"0 < min_rate <= start_rate={start_rate}")
    if not isinstance(slo, Slo):
        raise ValueError(f"slo={slo!r} must be an Slo")
    if (results_path is None) != (key is None):
        raise ValueError(
            "results_path and key go together: the key says which trials of the file belong to this search"
        )
    store = None if results_path is None or key is None else _Store(Path(results_path), key, slo)
    search = _Search(run_trial, slo, min_reached, repeats, max_trials, store, on_trial)
    low: float | None = None
    high: float | None = None
    rate = start_rate
    try:
        while low is None or high is None:
            if search.passes(rate):
                low = rate
                rate *= 2
            else:
                high = rate
                if low is None and rate <= floor:
                    return search.answer(None, high, converged=True, note=_no_rate(search.trials, slo))
                rate = max(rate / 2, floor)
        while high / low - 1 > tolerance:
            rate = (low + high) / 2
            if search.passes(rate):
                low = rate
            else:
                high = rate
    except _OutOfTrials:
        if low is None:
            note = f"max_trials={max_trials} used up; {_no_rate(search.trials, slo)}"
        elif high is None:
            note = f"max_trials={max_trials} used up and no rate failed: the capacity is higher; raise start_rate"
        else:
            note = f"max_trials={max_trials} used up: the capacity is between {low:.4g} and {high:.4g} requests/s"
        return search.answer(low, high, converged=False, note=note)
    return search.answer(low, high, converged=True, note="")


def _no_rate(trials: list[Trial], slo: Slo) -> str:
    """The sentence for a search that nothing passed."""
    if not trials:
        return "no trial was run"
    last = trials[-1]
    text = f"no rate passed, down to {last.rate:.4g} requests/s: {'; '.join(last.failures)}"
    tbts = [trial.result.tbt_p99_s for trial in trials if trial.result.tbt_p99_s is not None]
    if tbts and min(tbts) > slo.tbt_p99_s:
        text += f". The lowest P99 TBT at any rate was {min(tbts):.4g} s: no load meets {slo.tbt_p99_s:g} s"
    return text


class _OutOfTrials(Exception):
    pass


class _Search:
    """Runs, judges and keeps trials."""

    def __init__(
        self,
        run_trial: Callable[[float], Report | TrialResult],
        slo: Slo,
        min_reached: float,
        repeats: int,
        max_trials: int,
        store: _Store | None,
        on_trial: Callable[[Trial], None] | None,
    ):
        self.trials: list[Trial] = []
        self._run_trial, self._slo, self._min_reached, self._repeats = run_trial, slo, min_reached, repeats
        self._max_trials, self._store, self._on_trial = max_trials, store, on_trial

    def passes(self, rate: float) -> bool:
        passed = failed = 0
        while max(passed, failed) <= self._repeats // 2:
            if self._trial(rate).passed:
                passed += 1
            else:
                failed += 1
        return passed > failed

    def answer(self, low: float | None, high: float | None, *, converged: bool, note: str) -> Capacity:
        return Capacity(
            rate=low, upper=high, converged=converged, note=note, slo=self._slo, trials=tuple(self.trials)
        )  # fmt: skip

    def _trial(self, rate: float) -> Trial:
        if len(self.trials) >= self._max_trials:
            raise _OutOfTrials
        result = None if self._store is None else self._store.take(rate)
        reused = result is not None
        if result is None:
            measured = self._run_trial(rate)
            result = TrialResult.of(measured) if isinstance(measured, Report) else measured
            if result.stopped == "interrupted":
                raise KeyboardInterrupt
            if self._store is not None:
                self._store.append(rate, result)
        if result.num_rejected:
            raise ValueError(
                f"{result.num_rejected} requests were refused at {rate:.4g} requests/s, and would be at any rate; "
                f"leave them out of the workload. The first: {result.error}"
            )
        failures = judge(result, self._slo, min_reached=self._min_reached)
        trial = Trial(rate=rate, result=result, failures=failures, reused=reused)
        self.trials.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial


class _Store:
    """Trials in a file of JSON lines: {"key", "slo", "rate", "result"}. Only ever appended to."""

    def __init__(self, path: Path, key: str, slo: Slo):
        self._path, self._key, self._slo = path, key, asdict(slo)
        self._known: dict[float, list[TrialResult]] = {}
        self._needs_newline = False
        if path.exists():
            self._read()

    def take(self, rate: float) -> TrialResult | None:
        """The next trial at a rate that is in the file and was not taken yet."""
        results = self._known.get(rate)
        return results.pop(0) if results else None

    def append(self, rate: float, result: TrialResult) -> None:
        row = {"key": self._key, "slo": self._slo, "rate": rate, "result": asdict(result)}
        line = json.dumps(row, allow_nan=False) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("\n" + line if self._needs_newline else line)
        self._needs_newline = False

    def _read(self) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        self._needs_newline = bool(text) and not text.endswith("\n")
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:  # a write that was cut short
                warnings.warn(f"{self._path}, line {number} is not JSON; its trial will be run again", stacklevel=2)
                continue
            if not isinstance(row, dict) or "key" not in row:
                raise ValueError(f"{self._path}, line {number} is not a trial: results_path must be a file of trials")
            if row["key"] != self._key or row.get("slo") != self._slo:
                continue
            try:
                self._known.setdefault(float(row["rate"]), []).append(TrialResult(**row["result"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self._path}, line {number}: a trial with other fields than this version's ({error}); "
                    f"use another results_path"
                ) from error
