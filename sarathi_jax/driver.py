"""The open-loop driver: requests go out at their scheduled times, whatever the server does.

An engine (a real clock that sleeps) and a simulator (a virtual one that jumps) are driven alike, through `Server`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sarathi_jax.config import check_number
from sarathi_jax.metrics import Report, RequestRecord, RequestStatus, WarmUp
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.progress import progress_bar
from sarathi_jax.request import SamplingParams

_MAX_IDLE_STEPS = 1000


class Server(Protocol):
    """What is driven. `last_step` is the iteration read last, a new object each; all times are those of `now`.

    A server may also have `num_compiled`, the programs compiled so far: a report then tells those of its window; and
    `expect(time_s)`, called before each step with the time of the next request (None: there is no more), for a clock
    that would jump past it.
    """

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def last_step(self) -> StepStats | None: ...

    @property
    def vocab_size(self) -> int | None:
        """Prompts are made of ids below it; None: no id is ever looked at, and a prompt is any of the right length."""
        ...

    def add_request(
        self, request_id: str, *, prompt_token_ids: Iterable[int], params: SamplingParams, arrival_time: float
    ) -> None:
        """Queue a request; ValueError, with nothing changed, refuses it."""
        ...

    def step(self) -> list[RequestOutput]:
        """What changed. Between a request's first token and its end outputs may be left out; its times are complete."""
        ...

    def abort(self, request_id: str) -> Any: ...

    def now(self) -> float:
        """Seconds on the server's clock."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return when `now()` is `time_s` or later. Only called when nothing is unfinished."""
        ...


class Item(Protocol):
    """A request of a workload. `arrived_at_s` counts from the start of the schedule."""

    @property
    def arrived_at_s(self) -> float: ...

    @property
    def num_prefill_tokens(self) -> int: ...

    @property
    def num_decode_tokens(self) -> int: ...


class Items(Protocol):
    """A workload: its items, and the prompt of the i-th."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...

    def token_ids(self, i: int, /, *, vocab_size: int, seed: int) -> Iterable[int]: ...


class RunFailed(RuntimeError):
    """The server's `step` raised (`__cause__`). `report` has all that came before; what was alive is "failed"."""

    def __init__(self, message: str, report: Report):
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, slots=True)
class _Planned:
    """A request before it is sent."""

    request_id: str
    item: Any
    arrival_s: float
    prompt: np.ndarray | range
    params: SamplingParams


@dataclass(eq=False, slots=True)
class _Live:
    """A request between being sent and its end."""

    planned: _Planned
    sent_s: float
    output: RequestOutput | None = None
    first_scheduled_s: float | None = None
    num_seen: int = 0


class Progress:
    """How far a run has come: what `stop_when` decides on.

    `num_requests` and `num_gaps` are those of the whole run: no more gaps between tokens can come (None: not known).
    """

    def __init__(self, *, num_requests: int, num_gaps: int | None):
        self.num_requests = num_requests
        self.num_gaps = num_gaps
        self.num_sent = 0
        self.num_ended = 0
        self.now_s = 0.0
        self.delays: list[float] = []
        """Scheduling delays of the requests scheduled so far (s)."""
        self.gaps: list[float] = []
        """Times between tokens so far (s)."""
        self._waiting: dict[str, float] = {}  # arrival of those never scheduled, oldest first
        self._counts: dict[tuple[int, float], tuple[int, int]] = {}

    def num_delays_over(self, bound_s: float) -> int:
        """Requests whose scheduling delay is over the bound for certain: those still waiting included."""
        over = self._num_over(self.delays, bound_s)
        for arrival_s in self._waiting.values():
            if self.now_s - arrival_s <= bound_s:
                break
            over += 1
        return over

    def num_gaps_over(self, bound_s: float) -> int:
        return self._num_over(self.gaps, bound_s)

    def _num_over(self, samples: list[float], bound_s: float) -> int:
        """Counts each sample once, however often it is asked."""
        key = id(samples), bound_s
        seen, over = self._counts.get(key, (0, 0))
        over += sum(samples[i] > bound_s for i in range(seen, len(samples)))
        self._counts[key] = len(samples), over
        return over


def run_open_loop(
    server: Server,
    workload: Items,
    *,
    params: Callable[[Any], SamplingParams] | None = None,
    seed: int = 0,
    num_warm_up: int = 0,
    max_wall_s: float | None = None,
    stop_when: Callable[[Progress], bool | str | None] | None = None,
    on_request: Callable[[RequestRecord], None] | None = None,
    on_iteration: Callable[[StepStats], None] | None = None,
    progress: bool | None = None,
) -> Report:
    """Send a workload's requests at their times, never earlier, and step the server until all have ended.

    Each is greedy and makes exactly `num_decode_tokens` tokens, EOS or not, unless `params(item)` gives parameters of
    its own (n = 1). Its arrival time is the schedule's, so that latencies count from there however late it is sent.
    Request i is named "r{i}"; `seed` goes to `workload.token_ids`. A request that the server refuses is recorded as
    rejected.

    `num_warm_up`: so many requests, of the first items' lengths and random prompts, run before the schedule starts and
    are not measured. The run ends early `max_wall_s` after its start, or when `stop_when` says so (asked after every
    step; a string is the reason), or by Ctrl-C, each with a report that says so and with what was alive aborted.
    `on_request` sees each request as it ends, `on_iteration` each iteration. `progress` None shows a bar on a terminal.

    Raises:
      ValueError: a server that is not idle, or a bad argument.
      RunFailed: the server's step raised; the report of what came before is in it.
    """
    if server.has_unfinished:
        raise ValueError("the server has unfinished requests; measure on an idle one")
    if max_wall_s is not None:
        check_number("max_wall_s", max_wall_s, 1e-9, 1e12, "seconds > 0, or None")
    if isinstance(num_warm_up, bool) or not isinstance(num_warm_up, int) or not 0 <= num_warm_up <= len(workload):
        raise ValueError(
            f"num_warm_up={num_warm_up!r} must be an integer from 0 to the {len(workload)} of the workload"
        )
    planned = [_plan(server, workload, i, params, seed) for i in range(len(workload))]
    planned.sort(key=lambda request: request.arrival_s)  # stable
    warm_up = _warm_up(server, planned[:num_warm_up], seed) if num_warm_up else None
    run = _Run(server, planned, on_request, on_iteration)
    with progress_bar("serving", "requests", show=progress, delay_s=1.0) as bar:
        try:
            stopped = run.loop(max_wall_s, stop_when, bar)
        except KeyboardInterrupt:
            stopped = "interrupted"
        except _StepError as error:
            cause = error.__cause__
            text = f"{type(cause).__name__}: {cause}"
            raise RunFailed(text, run.finish("failed", text, warm_up, f"step raised {text}")) from cause
        except BaseException:  # of a hook, say: nothing stays alive in the server
            run.on_request = None
            run.finish("aborted", None, warm_up, None)
            raise
    return run.finish("aborted", None, warm_up, stopped)


class _StepError(Exception):
    """Marks what `step` raised, apart from what hooks raise."""


class _Run:
    """One measurement, from `start_s` on."""

    def __init__(
        self,
        server: Server,
        planned: list[_Planned],
        on_request: Callable[[RequestRecord], None] | None,
        on_iteration: Callable[[StepStats], None] | None,
    ):
        self.server = server
        self.start_s = server.now()
        self.queue = deque(planned)
        self.live: dict[str, _Live] = {}
        self.records: dict[str, RequestRecord | None] = {}  # in the order they were sent
        self.iterations: list[StepStats] = []
        self.progress = Progress(
            num_requests=len(planned),
            num_gaps=_num_gaps(planned),
        )
        self.on_request, self._on_iteration = on_request, on_iteration
        self._last_step = server.last_step
        self._num_compiled: int | None = getattr(server, "num_compiled", None)
        self._expect: Callable[[float | None], None] = getattr(server, "expect", lambda time_s: None)

    def loop(
        self,
        max_wall_s: float | None,
        stop_when: Callable[[Progress], bool | str | None] | None,
        bar: Callable[[int, int], object],
    ) -> str | None:
        """Until all is done (None), or a reason to stop."""
        server, queue, num_idle, last = self.server, self.queue, 0, (-1.0, -1)
        deadline = None if max_wall_s is None else self.start_s + max_wall_s
        next_s = self._arrival(queue[0]) if queue else None
        while True:
            now = self.progress.now_s = server.now()
            while next_s is not None and next_s <= now:
                self._send(queue.popleft())
                next_s = self._arrival(queue[0]) if queue else None
            bar(self.progress.num_ended, self.progress.num_requests)
            is_idle = not server.has_unfinished
            if is_idle and next_s is None:
                return None
            if deadline is not None and now >= deadline:
                return f"max_wall_s={max_wall_s} had passed"
            if is_idle:
                server.wait_until(min(time_s for time_s in (next_s, deadline) if time_s is not None))
            else:
                self._expect(next_s)
                self._step()
                if stop_when is not None and (why := stop_when(self.progress)):
                    return why if isinstance(why, str) else "stop_when said so"
            state = (now, len(self.iterations) + len(self.records) + len(self.progress.gaps))
            num_idle = num_idle + 1 if state == last else 0
            last = state
            if num_idle >= _MAX_IDLE_STEPS:  # a clock that stands still and nothing done: it would be so for ever
                raise RuntimeError(f"the server does nothing at {now} s, with {len(self.live)} requests unfinished")

    def finish(self, status: RequestStatus, error: str | None, warm_up: WarmUp | None, stopped: str | None) -> Report:
        """The report; whatever is alive ends here, with `status`."""
        end_s = self.server.now()
        for live in list(self.live.values()):
            with contextlib.suppress(Exception):  # a server whose step raised may be beyond aborting
                self.server.abort(live.planned.request_id)
            self._end(live, status, error)
        compiled = getattr(self.server, "num_compiled", None)
        return Report(
            requests=tuple(record for record in self.records.values() if record is not None),
            iterations=tuple(self.iterations),
            start_s=self.start_s,
            end_s=end_s,
            warm_up=warm_up,
            stopped=stopped,
            num_unsent=len(self.queue),
            num_compiled=None if compiled is None or self._num_compiled is None else compiled - self._num_compiled,
        )

    def _arrival(self, planned: _Planned) -> float:
        return self.start_s + planned.arrival_s

    def _send(self, planned: _Planned) -> None:
        live = _Live(planned, self.server.now())
        name, arrival_s = planned.request_id, self._arrival(planned)
        self.records[name] = None
        self.progress.num_sent += 1
        try:
            prompt = planned.prompt if isinstance(planned.prompt, range) else planned.prompt.tolist()
            self.server.add_request(name, prompt_token_ids=prompt, params=planned.params, arrival_time=arrival_s)
        except ValueError as error:
            self._end(live, "rejected", str(error))
            return
        self.live[name] = live
        self.progress._waiting[name] = arrival_s

    def _step(self) -> None:
        try:
            outputs = self.server.step()
        except Exception as error:
            raise _StepError from error
        self.progress.now_s = self.server.now()
        stats = self.server.last_step
        # One that began before this run is a leftover of a request aborted then, dispatched and not read.
        if stats is not None and stats is not self._last_step and stats.start_s >= self.start_s:
            self.iterations.append(stats)
            for chunk in stats.prompt_chunks if self.progress._waiting else ():
                self._scheduled(chunk.request_id, stats.start_s)
            if self._on_iteration is not None:
                self._on_iteration(stats)
        self._last_step = stats
        for output in outputs:
            live = self.live.get(output.request_id)
            if live is None:
                continue
            live.output = output
            metrics = output.metrics
            if metrics.first_scheduled_s is not None:
                self._scheduled(output.request_id, metrics.first_scheduled_s)
            times = metrics.token_s
            self.progress.gaps += [times[i] - times[i - 1] for i in range(max(live.num_seen, 1), len(times))]
            live.num_seen = len(times)
            if output.finished:
                self._end(live, "aborted" if output.finish_reason == "abort" else "finished", None)

    def _scheduled(self, request_id: str, time_s: float) -> None:
        arrival_s = self.progress._waiting.pop(request_id, None)
        if arrival_s is not None:
            self.live[request_id].first_scheduled_s = time_s
            self.progress.delays.append(time_s - arrival_s)

    def _end(self, live: _Live, status: RequestStatus, error: str | None) -> None:
        planned, output = live.planned, live.output
        record = RequestRecord(
            request_id=planned.request_id,
            arrival_s=self._arrival(planned),
            sent_s=live.sent_s,
            prompt_len=len(planned.prompt),
            asked_len=planned.item.num_decode_tokens,
            output_len=0 if output is None else len(output.token_ids),
            first_scheduled_s=live.first_scheduled_s,
            token_s=() if output is None else tuple(output.metrics.token_s),
            num_preemptions=0 if output is None else output.metrics.num_preemptions,
            status=status,
            error=error,
        )
        self.records[planned.request_id] = record
        self.live.pop(planned.request_id, None)
        self.progress._waiting.pop(planned.request_id, None)
        self.progress.num_ended += 1
        if self.on_request is not None:
            self.on_request(record)


def _plan(
    server: Server, workload: Items, i: int, params: Callable[[Any], SamplingParams] | None, seed: int
) -> _Planned:
    """Made before the clock starts: prompts cost time."""
    item = workload[i]
    if server.vocab_size is None:
        prompt = range(item.num_prefill_tokens)
    else:
        prompt = np.asarray(workload.token_ids(i, vocab_size=server.vocab_size, seed=seed), dtype=np.int32)
    if params is None:
        chosen = SamplingParams(temperature=0, max_tokens=item.num_decode_tokens, ignore_eos=True)
    else:
        chosen = params(item)
    if chosen.n != 1:
        raise ValueError(f"params gives n={chosen.n} for item {i}: a run measures requests of one generation each, n=1")
    return _Planned(f"r{i}", item, item.arrived_at_s, prompt, chosen)


def _num_gaps(planned: list[_Planned]) -> int | None:
    """Most gaps between tokens that there can be; None where a request has no limit."""
    limits = [request.params.max_tokens for request in planned]
    return None if None in limits else sum(limit - 1 for limit in limits if limit is not None)


def _warm_up(server: Server, planned: list[_Planned], seed: int) -> WarmUp:
    """All at once, to their ends. Random prompts, so that a prefix cache has nothing of the measured ones."""
    start_s, rng = server.now(), np.random.default_rng([seed, 1])
    seen, last = 0, server.last_step
    for i, request in enumerate(planned):
        ids = rng.integers(server.vocab_size or 1, size=len(request.prompt)).tolist()
        with contextlib.suppress(ValueError):  # refused: the run will say so
            server.add_request(f"warm-up-{i}", prompt_token_ids=ids, params=request.params, arrival_time=start_s)
    try:
        while server.has_unfinished:
            server.step()
            seen += server.last_step is not last
            last = server.last_step
    finally:
        for i in range(len(planned)):
            server.abort(f"warm-up-{i}")
    return WarmUp(num_requests=len(planned), num_iterations=seen, wall_s=server.now() - start_s)
