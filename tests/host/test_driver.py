"""Open loop on a fake clock: what is sent when, what is counted, and what is left when a run goes wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sarathi_jax.driver import RunFailed, run_open_loop
from sarathi_jax.metrics import WarmUp
from sarathi_jax.request import SamplingParams

from .fake_server import FakeServer, Item, Items

TICK = 2.0**-7  # s; powers of two add up exactly


def steps(*seconds):
    """Step times in this order, the last for ever."""
    times = itertools.chain(seconds, itertools.repeat(seconds[-1]))
    return lambda server: next(times)


# ---------------------------------------------------------------------------------------------------------- counting


def test_the_first_token_ends_no_gap():
    """First token after 1 s, then nine: TTFT is 1 s and there are nine gaps (B01)."""
    report = run_open_loop(FakeServer(steps(1.0, TICK)), Items([Item(0.0, num_decode_tokens=10)]))
    [record] = report.requests
    assert (record.ttft_s, record.tbts_s) == (1.0, [TICK] * 9)
    assert report.ttft is not None and (report.ttft.count, report.ttft.max) == (1, 1.0)
    assert report.tbt is not None and (report.tbt.count, report.tbt.mean, report.tbt.max) == (9, TICK, TICK)
    assert (record.e2e_s, record.e2e_per_token_s) == (1 + 9 * TICK, (1 + 9 * TICK) / 10)


def test_tokens_that_come_together_are_counted_each():
    """Three tokens an event: eight tokens, not three events; no gap inside an event (B02)."""
    report = run_open_loop(FakeServer(1.0, tokens_a_step=3), Items([Item(0.0, num_decode_tokens=8)]))
    [record] = report.requests
    assert (record.output_len, record.token_s) == (8, (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0))
    assert record.tbts_s == [0, 0, 1, 0, 0, 1, 0]
    assert report.output_tokens_per_s == 8 / 3


def test_an_event_without_a_token_is_none():
    """A server that answers before it has a token (B02): nothing is timed, and no time is made up."""

    class Early(FakeServer):
        def step(self):
            if self.num_steps:
                return super().step()
            self.num_steps, self.clock = 1, self.clock + 1
            return [self._output(name, asked, None) for name, asked in self.asked.items()]

    [record] = run_open_loop(Early(1.0), Items([Item(0.0, num_decode_tokens=2)])).requests
    assert (record.first_scheduled_s, record.token_s) == (1.0, (2.0, 3.0))


def test_as_many_tokens_as_the_workload_says():
    """Not the default of 16, not stopped by EOS (B09); reproducible (greedy)."""
    server, seen = FakeServer(1.0, num_at_once=9), {}
    add = server.add_request
    server.add_request = lambda name, **options: (seen.update({name: options}), add(name, **options))[1]
    report = run_open_loop(server, Items([Item(0.0, 5, 20), Item(0.0, 3, 1)]), seed=50)
    assert [(r.prompt_len, r.asked_len, r.output_len) for r in report.requests] == [(5, 20, 20), (3, 1, 1)]
    assert seen["r0"]["params"] == SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert seen["r0"]["prompt_token_ids"] == [50, 51, 52, 53, 54]
    assert report.num_cut == 0


def test_own_parameters():
    server = FakeServer(1.0, num_at_once=9)
    items = Items([Item(0.0, 4, 20), Item(0.0, 4, 2)])
    report = run_open_loop(server, items, params=lambda item: SamplingParams(max_tokens=min(item.num_decode_tokens, 4)))
    assert [record.output_len for record in report.requests] == [4, 2]
    assert report.num_cut == 1 and any("fewer output tokens" in text for text in report.warnings)


# -------------------------------------------------------------------------------------------------------- open loop


def test_latency_counts_from_the_schedule():
    """8 requests/s into a server of two a second: sent late, counted from when they were due, and said (B05)."""
    server = FakeServer(1.0, num_at_once=2)
    report = run_open_loop(server, Items(Item(k / 8) for k in range(10)))
    records = report.requests
    assert server.arrivals == {f"r{k}": k / 8 for k in range(10)}, "the server schedules by these"
    assert [r.request_id for r in records] == [f"r{k}" for k in range(10)]
    assert [r.arrival_s for r in records] == [k / 8 for k in range(10)]
    assert [r.sent_s for r in records] == [0.0] + [1.0] * 8 + [2.0]  # a step holds the driver for 1 s
    started = [0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0]
    assert [r.first_scheduled_s for r in records] == started
    assert [r.ttft_s for r in records] == [start + 1 - k / 8 for k, start in enumerate(started)]
    assert report.scheduling_delay is not None and report.prefill is not None and report.ttft is not None
    assert report.scheduling_delay.max == 5 - 9 / 8 and report.prefill.max == report.prefill.p50 == 1.0
    assert report.ttft.mean == report.scheduling_delay.mean + report.prefill.mean
    assert report.offered_rate == 8.0
    assert report.reached_rate == pytest.approx(2.0, rel=0.05)
    assert any("did not keep up" in text for text in report.warnings)


def test_nothing_is_sent_early_and_idle_time_is_waited_out():
    server = FakeServer(1.0, now=50.0)
    report = run_open_loop(server, Items([Item(4.0), Item(0.5), Item(9.0)]))  # any order
    assert server.log == [
        ("wait", 50.5), ("add", "r1", 50.5), ("wait", 54.0), ("add", "r0", 54.0), ("wait", 59.0), ("add", "r2", 59.0),
    ]  # fmt: skip
    assert [r.request_id for r in report.requests] == ["r1", "r0", "r2"]
    assert (report.start_s, report.end_s, len(report.iterations)) == (50.0, 60.0, 3)
    assert report.send_lag is not None and report.send_lag.max == 0.0


@pytest.mark.parametrize(("load", "count", "noise"), [(0.5, 12_000, 0.06), (0.8, 24_000, 0.15)])
def test_queueing_as_theory_has_it(load, count, noise):
    """M/D/1: waits of mean load / (2 (1 - load)) services, computing of exactly one; TTFT is their sum (B13)."""
    gaps = np.random.default_rng(5).exponential(1 / load, size=count)
    report = run_open_loop(FakeServer(1.0), Items(Item(t) for t in np.cumsum(gaps).tolist()))
    wait, compute = report.scheduling_delay, report.prefill
    assert wait is not None and compute is not None and report.ttft is not None
    own_wait, waits = 0.0, []
    for gap in gaps.tolist()[1:]:
        waits.append(own_wait)
        own_wait = max(own_wait + 1.0 - gap, 0.0)  # Lindley
    assert wait.mean == pytest.approx(np.mean([*waits, own_wait]), rel=1e-6)
    assert wait.mean == pytest.approx(load / (2 * (1 - load)), rel=noise)
    assert compute.mean == pytest.approx(1.0, abs=1e-6)
    assert report.ttft.mean == pytest.approx(wait.mean + compute.mean)
    assert report.reached_rate == pytest.approx(load, rel=0.03)
    assert report.offered_rate == pytest.approx(load, rel=0.03)


def test_wait_grows_with_load_though_few_cold_requests_dominate_the_mean():
    """Six slow first steps; then loads of 1 to 8 of at most 10 requests/s (B13)."""
    medians = []
    for rate in (1, 2, 4, 8, 9.5):
        gaps = np.random.default_rng(1).exponential(1 / rate, size=500)
        report = run_open_loop(FakeServer(steps(*[3.0] * 6, 0.1)), Items(Item(t) for t in np.cumsum(gaps).tolist()))
        assert report.scheduling_delay is not None
        medians.append(report.scheduling_delay.p50)
    assert medians == sorted(medians) and medians[-1] > medians[0]


# ---------------------------------------------------------------------------------------------------------- warm-up


def test_warm_up_is_apart():
    """A server that is slow at first: with a warm-up two runs are alike, and the slow part is reported (B12)."""
    cold, items = steps(8.0, 8.0, TICK), Items(Item(k / 4, num_decode_tokens=2) for k in range(8))
    server = FakeServer(cold)
    first = run_open_loop(server, items, num_warm_up=1)
    second = run_open_loop(server, items, num_warm_up=1)
    assert first.warm_up == WarmUp(num_requests=1, num_iterations=2, wall_s=16.0)
    assert first.start_s == 16.0 and first.requests[0].arrival_s == 16.0
    assert len(first.requests) == 8 and len(first.iterations) == 16
    for name in ("ttft", "tbt", "e2e", "iteration_wall"):
        assert getattr(first, name) == getattr(second, name)
    without = run_open_loop(FakeServer(steps(8.0, 8.0, TICK)), items)
    assert without.ttft is not None and first.ttft is not None and without.ttft.max > 100 * first.ttft.max


def test_warm_up_prompts_are_not_the_measured_ones():
    server, prompts = FakeServer(1.0), {}
    add = server.add_request
    server.add_request = lambda name, **o: (prompts.update({name: o["prompt_token_ids"]}), add(name, **o))[1]
    run_open_loop(server, Items([Item(0.0, 12), Item(1.0, 3)]), num_warm_up=2)
    assert {name: len(prompt) for name, prompt in prompts.items()} == {
        "warm-up-0": 12, "warm-up-1": 3, "r0": 12, "r1": 3,
    }  # fmt: skip
    assert prompts["warm-up-0"] != prompts["r0"]


def test_compiling_while_measuring_is_told():
    class Compiling(FakeServer):
        num_compiled = 5

    server = Compiling(1.0, on_step=lambda s: setattr(s, "num_compiled", min(s.num_compiled + 1, 8)))
    report = run_open_loop(server, Items(Item(k) for k in range(9)))
    assert report.num_compiled == 3 and any("3 programs were compiled" in text for text in report.warnings)
    assert run_open_loop(server, Items([Item(0)])).num_compiled == 0


# ------------------------------------------------------------------------------------------------------- going wrong


def test_a_refused_request_harms_nobody():
    server = FakeServer(1.0, max_len=10)
    seen = []
    report = run_open_loop(server, Items([Item(0.0), Item(0.0, 11), Item(0.0)]), on_request=seen.append)
    assert [(r.status, r.error) for r in report.requests] == [
        ("finished", None), ("rejected", "11 tokens are more than 10"), ("finished", None),
    ]  # fmt: skip
    assert report.ttft is not None and report.ttft.count == 2
    assert sorted(seen, key=lambda r: r.request_id) == list(report.requests)


def test_a_request_that_the_server_gives_up():
    """Aborted, in no percentile, and no longer waiting."""

    class GivesUp(FakeServer):
        def step(self):
            outputs = super().step()
            return outputs + [self._output(name, self.asked.pop(name), "abort") for name in list(self.asked)]

    waiting = []
    stop = lambda progress: waiting.append(progress.num_delays_over(0.5))
    report = run_open_loop(GivesUp(1.0), Items([Item(0.0), Item(0.0), Item(3.0)]), stop_when=stop)
    assert [r.status for r in report.requests] == ["finished", "aborted", "finished"]
    assert report.ttft is not None and report.ttft.count == 2
    assert waiting == [0, 0]


def crash(after, error):
    def on_step(server):
        if server.num_steps == after:
            raise error

    return on_step


def test_a_step_that_raises_leaves_a_report():
    server = FakeServer(1.0, num_at_once=2, on_step=crash(3, MemoryError("no more pages")))
    items = Items([Item(0.0, num_decode_tokens=2), Item(0.0, num_decode_tokens=9), Item(0.0), Item(90.0)])
    with pytest.raises(RunFailed, match="MemoryError: no more pages") as raised:
        run_open_loop(server, items)
    report = raised.value.report
    assert isinstance(raised.value.__cause__, MemoryError)
    assert [(r.status, r.output_len) for r in report.requests] == [("finished", 2), ("failed", 3), ("finished", 1)]
    assert report.requests[1].error == "MemoryError: no more pages"
    assert report.num_unsent == 1 and report.stopped == "step raised MemoryError: no more pages"
    assert report.tbt is not None and report.tbt.count == 1, "gaps of a failed request are in no percentile"
    assert not server.has_unfinished
    assert type(report).from_json(report.to_json()) == report


def test_an_interrupt_keeps_what_came():
    server = FakeServer(1.0, num_at_once=2, on_step=crash(2, KeyboardInterrupt()))
    report = run_open_loop(server, Items([Item(0.0, num_decode_tokens=9), Item(0.0), Item(0.0, num_decode_tokens=9)]))
    assert [(r.status, r.output_len) for r in report.requests] == [("aborted", 2), ("finished", 1), ("aborted", 1)]
    assert report.stopped == "interrupted"
    assert not server.has_unfinished


def test_a_time_limit():
    server = FakeServer(1.0)
    report = run_open_loop(server, Items([Item(0.0, num_decode_tokens=3), Item(1.0, num_decode_tokens=9), Item(7.0)]),
                           max_wall_s=6.0)  # fmt: skip
    assert [(r.status, r.output_len) for r in report.requests] == [("finished", 3), ("aborted", 3)]
    assert report.end_s == 6.0 and report.num_unsent == 1 and "max_wall_s=6.0" in (report.stopped or "")
    report = run_open_loop(FakeServer(1.0), Items([Item(0.0), Item(500.0)]), max_wall_s=6.0)
    assert report.end_s == 6.0, "an idle server is not waited for beyond the limit"


def test_stop_when_sees_how_far_it_came():
    seen = []

    def stop(progress):
        seen.append((progress.now_s, progress.num_sent, progress.num_ended, progress.num_delays_over(1.5)))
        return "enough" if len(seen) == 4 else None

    report = run_open_loop(FakeServer(1.0), Items(Item(0.0) for _ in range(6)), stop_when=stop)
    # At 3 s three waits are known (0, 1, 2 s), and three requests have waited 3 s.
    assert seen == [(1.0, 6, 1, 0), (2.0, 6, 2, 4), (3.0, 6, 3, 4), (4.0, 6, 4, 4)]
    assert report.num_finished == 4 and report.num_aborted == 2 and report.stopped == "enough"


def test_gaps_are_counted_once():
    counts = []
    server = FakeServer(steps(1.0, 3.0, 1.0, 3.0), num_at_once=2)
    stop = lambda p: counts.append((p.num_gaps_over(2.0), p.num_gaps_over(0.5), p.num_gaps))
    run_open_loop(server, Items(Item(0.0, num_decode_tokens=n) for n in (4, 2)), stop_when=stop)
    assert counts == [(0, 0, 4), (2, 2, 4), (2, 3, 4), (3, 4, 4)]


@pytest.mark.parametrize("hook", ["on_request", "on_iteration", "stop_when"])
def test_a_hook_that_raises_leaves_the_server_idle(hook):
    def raises(_):
        raise ZeroDivisionError

    server = FakeServer(1.0, num_at_once=3)
    with pytest.raises(ZeroDivisionError):
        run_open_loop(server, Items(Item(0.0, num_decode_tokens=n) for n in (1, 5, 5)), **{hook: raises})
    assert not server.has_unfinished


def test_an_iteration_from_before_the_run_is_not_in_it():
    """A step that was dispatched for an aborted request is read by the next run's first step."""

    class Late(FakeServer):
        def step(self):
            outputs = super().step()
            if self.num_steps == 1:
                self.last_step = type(self.last_step)(**{**vars(self.last_step), "start_s": -9.0, "wall_s": 10.0})
            return outputs

    report = run_open_loop(Late(1.0), Items([Item(0.0, num_decode_tokens=3)]))
    assert [step.start_s for step in report.iterations] == [1.0, 2.0]
    assert report.requests[0].first_scheduled_s == 0.0


def test_a_server_that_stands_still_is_not_waited_for():
    class Stuck(FakeServer):
        def step(self):
            return []

    server = Stuck(1.0)
    with pytest.raises(RuntimeError, match=r"does nothing at 0\.0 s, with 1 requests unfinished"):
        run_open_loop(server, Items([Item(0.0)]))
    assert not server.has_unfinished


def test_bad_arguments():
    items = Items([Item(0.0)])
    for bad in (0.0, -1.0, float("nan"), True):
        with pytest.raises(ValueError, match="max_wall_s"):
            run_open_loop(FakeServer(), items, max_wall_s=bad)
    for bad in (-1, 2, 1.0, True):
        with pytest.raises(ValueError, match="num_warm_up"):
            run_open_loop(FakeServer(), items, num_warm_up=bad)
    with pytest.raises(ValueError, match="n=2"):
        run_open_loop(FakeServer(), items, params=lambda item: SamplingParams(n=2))
    busy = FakeServer()
    busy.add_request("mine", prompt_token_ids=[1], params=SamplingParams(), arrival_time=0.0)
    with pytest.raises(ValueError, match="unfinished"):
        run_open_loop(busy, items)
    assert busy.has_unfinished, "someone else's request is not touched"


def test_a_bar_and_hooks_change_nothing(capsys):
    items = Items(Item(k / 2, num_decode_tokens=2) for k in range(5))
    seen = []
    quiet = run_open_loop(FakeServer(1.0), items, progress=False)
    report = run_open_loop(FakeServer(1.0), items, progress=True, on_iteration=seen.append, on_request=seen.append)
    assert report == quiet
    assert len(seen) == len(report.iterations) + len(report.requests)
    assert capsys.readouterr().out == ""
