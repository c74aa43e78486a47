"""Timelines that a viewer can load and that say what happened."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest

from sarathi_jax.driver import run_open_loop
from sarathi_jax.metrics import Report, RequestRecord
from sarathi_jax.outputs import ChunkStats, StepStats
from sarathi_jax.trace import write_trace

from .fake_server import FakeServer, Item, Items


def load(report, path):
    """Events of a trace, after the checks that hold for every trace."""
    count = write_trace(report, path)
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(content) == {"displayTimeUnit", "traceEvents"} and content["displayTimeUnit"] == "ms"
    events = content["traceEvents"]
    assert len(events) == count
    lanes, named = defaultdict(list), set()
    for event in events:
        assert event["ph"] in ("X", "C", "M") and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), round(event["dur"] * 1e3)))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in named
            named.add((event["pid"], event["tid"]))
    assert named == set(lanes), "every lane has a name"
    for lane, spans in lanes.items():
        for (start, dur), (later, _) in itertools.pairwise(sorted(spans)):
            assert start + dur <= later, f"spans of lane {lane} overlap"
    return events


def spans(events, process):
    [pid] = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process]
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid]


def counter(events, name):
    return [(e["ts"] / 1e6, e["args"]) for e in events if e["ph"] == "C" and e["name"] == name]


def test_a_run(tmp_path):
    """Two at once of three requests, 0.5 s a step, from 100 s on."""
    items = Items([Item(0.0, 4, 3), Item(0.0, 1, 1), Item(1.0, 8, 1)])
    report = run_open_loop(FakeServer(0.5, num_at_once=2, now=100.0), items)
    events = load(report, tmp_path / "trace.json")
    iterations = spans(events, "iterations")
    assert [(e["ts"], e["dur"]) for e in iterations] == [(0.0, 5e5), (5e5, 5e5), (1e6, 5e5)]
    assert [e["args"]["prefill_tokens"] for e in iterations] == [4, 0, 8]
    assert [(e["ts"], e["dur"]) for e in spans(events, "host")] == [(0.0, 125e3), (5e5, 125e3), (1e6, 125e3)]
    prefills = [(e["name"], e["ts"], e["args"]["start"], e["tid"]) for e in spans(events, "prefill chunks")]
    # A prompt of one token is no decode. Two side by side have a lane each.
    assert prefills == [("r0 +4", 0.0, 0, 1), ("r1 +1", 0.0, 0, 2), ("r2 +8", 1e6, 0, 1)]
    assert [(e["name"], e["ts"]) for e in spans(events, "decodes")] == [("r0", 5e5), ("r0", 1e6)]
    assert counter(events, "pages held") == [(0.0, {"held": 2}), (0.5, {"held": 1}), (1.0, {"held": 2})]
    assert counter(events, "requests") == [
        (0.0, {"running": 2, "waiting": 0}),
        (0.5, {"running": 1, "waiting": 0}),
        (1.0, {"running": 2, "waiting": 0}),
        (1.5, {"running": 0, "waiting": 0}),
    ]


def test_waiting_requests_are_counted(tmp_path):
    report = run_open_loop(FakeServer(1.0), Items([Item(0.0), Item(0.0), Item(0.5)]))
    waiting = [(at, args["waiting"]) for at, args in counter(load(report, tmp_path / "t.json"), "requests")]
    assert waiting == [(0.0, 1), (0.5, 2), (1.0, 1), (2.0, 0), (3.0, 0)]


def test_lanes_of_decodes_are_kept_and_used_again(tmp_path):
    """A request stays in its lane; as many lanes as decode at once."""
    rng = np.random.default_rng(0)
    items = Items(Item(float(rng.integers(40)), 3, int(rng.integers(1, 9))) for _ in range(60))
    report = run_open_loop(FakeServer(0.3, num_at_once=4), items)
    decodes = spans(load(report, tmp_path / "t.json"), "decodes")
    lanes = defaultdict(set)
    for event in decodes:
        lanes[event["name"]].add(event["tid"])
    assert all(len(tids) == 1 for tids in lanes.values())
    assert set().union(*lanes.values()) == {1, 2, 3, 4}
    assert len(decodes) == sum(item.num_decode_tokens - 1 for item in items)


def test_lookahead(tmp_path):
    """Iterations that begin before the one before is read: two lanes, and chunks drawn one after another."""
    steps = [
        StepStats(
            chunks=(ChunkStats("a", 0, 9 + i, 1),), start_s=0.1 * i, wall_s=0.19, host_s=0.01, num_prefill_tokens=0,
            num_decode_tokens=1, num_padding=0, num_preempted=0, num_pages_held=1, num_pages=4,
        )
        for i in range(20)
    ]  # fmt: skip
    request = RequestRecord(request_id="a", arrival_s=0, sent_s=0, prompt_len=9, asked_len=21, status="failed")
    events = load(Report(requests=(request,), iterations=tuple(steps), start_s=0.0, end_s=9.0), tmp_path / "t.json")
    iterations = spans(events, "iterations")
    assert [e["tid"] for e in iterations] == [1, 2] * 10
    assert [(e["ts"], e["dur"]) for e in iterations] == [
        (pytest.approx(1e5 * i), pytest.approx(19e4)) for i in range(20)
    ]
    decodes = spans(events, "decodes")
    assert {e["tid"] for e in decodes} == {1} and len(decodes) == 20
    assert [e["dur"] for e in decodes] == pytest.approx([19e4] + [1e5] * 19)


def test_names_are_escaped_and_an_empty_run_is_a_trace(tmp_path):
    step = StepStats(
        chunks=(ChunkStats('a"\n\\', 2, 0, 5),), start_s=0.0, wall_s=1.0, host_s=2.0, num_prefill_tokens=5,
        num_decode_tokens=0, num_padding=0, num_preempted=0, num_pages_held=1, num_pages=4,
    )  # fmt: skip
    events = load(Report(requests=(), iterations=(step,), start_s=0.0, end_s=1.0), tmp_path / "a.json")
    assert [e["name"] for e in spans(events, "prefill chunks")] == ['a"\n\\/2 +5']
    assert [e["dur"] for e in spans(events, "host")] == [1e6], "host time ends with its iteration"
    assert load(Report(requests=(), iterations=(), start_s=0.0, end_s=0.0), tmp_path / "b.json")


def test_a_long_run_is_written_as_it_goes(tmp_path):
    step = StepStats(
        chunks=tuple(ChunkStats(f"r{k}", 0, 5, 1) for k in range(16)), start_s=0.0, wall_s=1.0, host_s=0.1,
        num_prefill_tokens=0, num_decode_tokens=16, num_padding=0, num_preempted=0, num_pages_held=1, num_pages=4,
    )  # fmt: skip
    iterations = tuple(StepStats(**{**vars(step), "start_s": float(i)}) for i in range(500))
    report = Report(requests=(), iterations=iterations, start_s=0.0, end_s=500.0)
    tracemalloc.start()
    try:
        write_trace(report, tmp_path / "t.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (tmp_path / "t.json").stat().st_size / 10
