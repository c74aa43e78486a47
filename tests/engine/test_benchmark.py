"""The engine under the open-loop driver: a scripted model on a fake clock."""

from __future__ import annotations

import pytest

from sarathi_jax.benchmark import EngineServer
from sarathi_jax.driver import run_open_loop
from sarathi_jax.trace import write_trace
from sarathi_jax.workload import WorkItem, Workload

STEP_S = 2.0**-4


@pytest.fixture
def serve(scripted, clock):
    """An engine whose every read takes STEP_S, and whose sleeps move the clock."""

    def make(**options):
        advance = lambda: setattr(clock, "now", clock.now + STEP_S)
        engine = scripted(on_read=advance, clock=clock, **options)
        engine.runner.num_compiled = 7
        return EngineServer(engine, sleep=lambda seconds: setattr(clock, "now", clock.now + seconds))

    return make


def workload(*lengths, rate=4.0):
    items = [
        WorkItem(arrived_at_s=i / rate, num_prefill_tokens=p, num_decode_tokens=d) for i, (p, d) in enumerate(lengths)
    ]
    return Workload(items=tuple(items), requests_per_s=rate)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_requests_come_and_end_as_scheduled(serve, tmp_path, lookahead):
    """Exact lengths (B09), times from the schedule, one too long for the model refused; nothing compiles."""
    server = serve(budget=16, lookahead=lookahead)
    report = run_open_loop(server, workload((3, 5), (40, 2), (96, 4), (7, 1)))
    assert [(r.status, r.prompt_len, r.output_len) for r in report.requests] == [
        ("finished", 3, 5), ("finished", 40, 2), ("rejected", 96, 0), ("finished", 7, 1),
    ]  # fmt: skip
    assert "max_model_len=96" in (report.requests[2].error or "")
    assert [r.arrival_s for r in report.requests] == [100.0, 100.25, 100.5, 100.75]
    first = report.requests[0]
    assert first.ttft_s == STEP_S
    assert first.tbts_s == [STEP_S] * 4
    assert report.num_compiled == 0 and report.stopped is None
    assert report.iteration_prefill_tokens is not None
    assert sum(step.num_prefill_tokens for step in report.iterations) == 3 + 40 + 7
    assert type(report).from_json(report.to_json()) == report
    assert write_trace(report, tmp_path / "trace.json") > 20
    assert not server.has_unfinished


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_run_after_one_that_was_stopped_is_like_the_first(serve, lookahead):
    """With lookahead a step of the aborted requests is still on its way: it is not the next run's (B12)."""
    server, items = serve(budget=16, lookahead=lookahead), workload((30, 9), (20, 9), rate=64.0)
    stopped = run_open_loop(server, items, stop_when=lambda progress: progress.now_s > 100.3)
    assert stopped.num_aborted == 2
    again = run_open_loop(server, items)
    whole = run_open_loop(server, items, num_warm_up=1)
    assert all(step.wall_s <= 3 * STEP_S for step in again.iterations)
    assert [step.num_prefill_tokens for step in again.iterations] == [s.num_prefill_tokens for s in whole.iterations]
    assert again.ttft == whole.ttft and again.tbt == whole.tbt
    assert server.engine.pool.num_free == server.engine.pool.num_pages
