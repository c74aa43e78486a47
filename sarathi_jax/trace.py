"""A run as a timeline: trace-event JSON, for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" (Google), the events X (complete), C (counter) and M (metadata), times in microseconds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sarathi_jax.metrics import Report
from sarathi_jax.outputs import ChunkStats
from sarathi_jax.stages import bubbles

_ITERATIONS, _HOST, _PREFILLS, _DECODES, _COUNTERS, _STAGES = range(1, 7)
_PROCESSES = {
    _ITERATIONS: "iterations",
    _HOST: "host",
    _PREFILLS: "prefill chunks",
    _DECODES: "decodes",
    _COUNTERS: "counters",
    _STAGES: "pipeline stages",
}


def write_trace(report: Report, path: str | Path) -> int:
    """Write the timeline of a run, event by event, and return their number. Time 0 is `report.start_s`.

    Lanes: iterations; the host's time in each (all of it at the iteration's start: only its sum is known); prefill
    chunks, as many lanes as run side by side; decodes, a lane for a request from its first to its last. With lookahead
    an iteration begins before the one before it is read: iterations then take turns in two lanes, and chunks are drawn
    from when the one before was read, as the device runs them one after another; a server that tells its stages' times
    has them drawn from its first stage on, and a lane for each stage of each replica, bubbles in it. Counters: tokens
    of an iteration and pages held, of each replica, requests running and waiting.
    """
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in _events(report):
            file.write(",\n" if count else "")
            file.write(json.dumps(event, allow_nan=False, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count


class _Lanes:
    """Lanes of one process: each span goes to the lowest lane (from 1) that is free at its start."""

    def __init__(self, pid: int):
        self.pid = pid
        self._ends: list[int] = []

    def place(self, start: int, end: int) -> int:
        for i, free_from in enumerate(self._ends):
            if free_from <= start:
                self._ends[i] = end
                return i + 1
        self._ends.append(end)
        return len(self._ends)


class _Slots:
    """Lanes (from 1) that requests hold from their first `take` to `release`, the lowest free one each."""

    def __init__(self) -> None:
        self._num = 0
        self._free: list[int] = []
        self._held: dict[str, int] = {}

    def take(self, key: str) -> int:
        if key not in self._held:
            if not self._free:
                self._num += 1
                self._free.append(self._num)
            self._held[key] = heapq.heappop(self._free)
        return self._held[key]

    def release(self, key: str) -> None:
        heapq.heappush(self._free, self._held.pop(key))


def _events(report: Report) -> Iterator[dict[str, Any]]:
    ns = lambda time_s: round((time_s - report.start_s) * 1e9)  # whole numbers: neighbours touch and do not overlap
    for pid, title in _PROCESSES.items():
        yield _name("process_name", pid, 0, title)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    prompt_lens = {record.request_id: record.prompt_len for record in report.requests}
    last_decode = {
        _key(chunk): i
        for i, step in enumerate(report.iterations)
        for chunk in step.chunks
        if _is_decode(chunk, prompt_lens)
    }
    iterations, host, prefills, decodes = _Lanes(_ITERATIONS), _Lanes(_HOST), _Lanes(_PREFILLS), _Slots()
    named: set[tuple[int, int]] = set()

    def span(pid: int, lane: int, name: str, start: int, end: int, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if (pid, lane) not in named:
            named.add((pid, lane))
            yield _name("thread_name", pid, lane, f"{_PROCESSES[pid]} {lane}")
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        yield {"ph": "X", "name": name, "pid": pid, "tid": lane, **times, "args": args}

    num_stages = max((len(step.stages) for step in report.iterations), default=0)
    num_replicas = 1 + max((step.replica for step in report.iterations), default=0)

    def stage_span(
        replica: int, stage: int, name: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        lane = replica * num_stages + stage + 1
        if (_STAGES, lane) not in named:
            named.add((_STAGES, lane))
            yield _name("thread_name", _STAGES, lane, f"replica {replica}, stage {stage}")
        yield from span(_STAGES, lane, name, ns(start_s), ns(end_s), args)

    read_ns = 0
    for i, step in enumerate(report.iterations):
        start, end = ns(step.start_s), ns(step.start_s + step.wall_s)
        args = {
            "iteration": i,
            "prefill_tokens": step.num_prefill_tokens,
            "decode_tokens": step.num_decode_tokens,
            "padding": step.num_padding,
            "preempted": step.num_preempted,
            "collective_bytes": step.collective_bytes,
            "host_ms": step.host_s * 1e3,
        }
        name = f"{step.num_prefill_tokens} prefill + {step.num_decode_tokens} decode"
        yield from span(_ITERATIONS, iterations.place(start, end), name, start, end, args)
        host_end = min(ns(step.start_s + step.host_s), end)
        yield from span(_HOST, host.place(start, host_end), "host", start, host_end, {"iteration": i})
        start = min(max(start, read_ns), end)
        if step.stages:
            start = ns(step.stages[0][0])
        read_ns = max(end, read_ns)
        for stage, (begin_s, end_s) in enumerate(step.stages):
            yield from stage_span(step.replica, stage, name, begin_s, end_s, {"iteration": i})
        for chunk in step.chunks:
            key, args = _key(chunk), {"iteration": i, "start": chunk.start, "tokens": chunk.num_tokens}
            if _is_decode(chunk, prompt_lens):
                yield from span(_DECODES, decodes.take(key), key, start, end, args)
            else:
                yield from span(_PREFILLS, prefills.place(start, end), f"{key} +{chunk.num_tokens}", start, end, args)
        for key in map(_key, step.chunks):
            if last_decode.get(key) == i:
                decodes.release(key)
        at = ns(step.start_s)
        rows = {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens, "padding": step.num_padding}
        of_replica = f", replica {step.replica}" if num_replicas > 1 else ""
        yield _counter(f"rows{of_replica}", at, rows)
        yield _counter(f"pages held{of_replica}", at, {"held": step.num_pages_held})
    for bubble in bubbles(report.iterations):
        yield from stage_span(bubble.replica, bubble.stage, "bubble", bubble.start_s, bubble.end_s, {})
    yield from _queue_counters(report, ns)


def _queue_counters(report: Report, ns: Any) -> Iterator[dict[str, Any]]:
    """Requests waiting (arrived, never scheduled) and running (scheduled, not ended), at every change."""
    changes: list[tuple[int, int, int]] = []
    for record in report.requests:
        if record.status == "rejected":
            continue
        ended = record.token_s[-1] if record.status == "finished" and record.token_s else report.end_s
        scheduled = ended if record.first_scheduled_s is None else record.first_scheduled_s
        changes.append((ns(record.arrival_s), 1, 0))
        changes.append((ns(scheduled), -1, 1))
        changes.append((ns(ended), 0, -1))
    waiting = running = 0
    changes.sort()
    for i, (at, more_waiting, more_running) in enumerate(changes):
        waiting, running = waiting + more_waiting, running + more_running
        if i + 1 == len(changes) or changes[i + 1][0] != at:
            yield _counter("requests", at, {"running": running, "waiting": waiting})


def _is_decode(chunk: ChunkStats, prompt_lens: dict[str, int]) -> bool:
    """One token beyond the prompt: a prompt's last chunk may have one token as well."""
    return chunk.num_tokens == 1 and chunk.start >= prompt_lens.get(chunk.request_id, 0)


def _key(chunk: ChunkStats) -> str:
    return chunk.request_id if chunk.sample == 0 else f"{chunk.request_id}/{chunk.sample}"


def _counter(name: str, at: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _COUNTERS, "tid": 0, "ts": at / 1e3, "args": values}


def _name(kind: str, pid: int, tid: int, title: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": title}}
