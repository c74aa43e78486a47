"""The search for the highest rate that holds an SLO, against servers whose capacity is known."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from sarathi_jax.capacity import (
    Slo,
    TrialResult,
    config_key,
    find_capacity,
    hopeless,
    judge,
    open_loop_trial,
    undisturbed,
)
from sarathi_jax.driver import Progress, run_open_loop
from sarathi_jax.metrics import Report

from .fake_server import FakeServer, Item, Items

SLO = Slo(tbt_p99_s=0.1)


def result(tbt=0.05, delay=0.5, **options):
    return TrialResult(**{"num_finished": 9, "tbt_p99_s": tbt, "scheduling_delay_p50_s": delay, **options})


class Limit:
    """A server that can do `capacity` requests/s. Rates in `unlucky` fail so many times first."""

    def __init__(self, capacity, unlucky=()):
        self.capacity, self.unlucky, self.rates = capacity, dict(unlucky), []

    def __call__(self, rate):
        self.rates.append(rate)
        if self.unlucky.get(rate, 0):
            self.unlucky[rate] -= 1
            return result(tbt=0.2, offered_rate=rate, reached_rate=min(rate, self.capacity))
        return result(offered_rate=rate, reached_rate=min(rate, self.capacity), delay=0.1 if rate < 9 else 1.0)


# ------------------------------------------------------------------------------------------------------------ search


@pytest.mark.parametrize("capacity", [0.9, 3.3, 8.0, 10.0, 777.0])
@pytest.mark.parametrize("start", [0.5, 3.0, 50.0])
def test_a_known_limit(capacity, start):
    """Judged by the reached rate alone (B14): delays and gaps look well at any rate."""
    trial = Limit(capacity)
    found = find_capacity(trial, SLO, start_rate=start, min_reached=1.0)
    assert found.converged and found.note == ""
    assert found.rate is not None and found.upper is not None
    assert found.rate <= capacity < found.upper <= 1.025001 * found.rate
    assert [t.rate for t in found.trials] == trial.rates, "every trial is reported, in order"
    assert len(trial.rates) == len(set(trial.rates)) < 25
    assert max(t.rate for t in found.trials if t.passed) == found.rate
    assert min(t.rate for t in found.trials if not t.passed) == found.upper


def test_asked_is_not_reached():
    """A limit of 10/s, asked for 8, 9.5, 10.5 and 12 (B14)."""
    verdicts = {rate: judge(Limit(10.0)(rate), SLO) for rate in (8.0, 9.5, 10.5, 12.0)}
    assert not verdicts[8.0] and not verdicts[9.5]
    assert verdicts[12.0] == ("reached 10 of 12 requests/s",)
    assert judge(Limit(10.0)(10.5), SLO, min_reached=0.975) == ("reached 10 of 10.5 requests/s",)


def test_one_unlucky_trial():
    """A rate that fails once though it can be held: tested again where asked for, else the answer stays below it."""
    once = find_capacity(Limit(10.0, {4.0: 1}), SLO, start_rate=1.0, min_reached=1.0)
    assert once.rate is not None and once.rate < 4.0
    trial = Limit(10.0, {4.0: 1})
    again = find_capacity(trial, SLO, start_rate=1.0, min_reached=1.0, repeats=3)
    assert again.rate is not None and again.rate <= 10.0 < 1.025 * again.rate
    assert trial.rates[:7] == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0], "two of three decide"


def lindley(gaps, service):
    waits = [0.0]
    for gap in gaps:
        waits.append(max(waits[-1] + service - gap, 0.0))
    return np.array(waits)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_queue(seed):
    """Poisson arrivals at one server of 0.1 s each, through the driver; the bound by a scan of the recursion."""
    gaps = np.random.default_rng(seed).exponential(size=400)
    items = Items(Item(t) for t in np.cumsum([0.0, *gaps]).tolist())
    unit = gaps * 400 / gaps.sum()  # mean 1 exactly: with_rate scales to the measured rate
    slo = Slo(tbt_p99_s=1.0, scheduling_delay_p50_s=0.5)
    rates = np.arange(4.0, 16.0, 0.01)
    fails = [np.median(lindley(unit / rate, 0.1)) > 0.5 for rate in rates]
    limit = rates[fails.index(True)]
    found = find_capacity(open_loop_trial(FakeServer(0.1), items, slo), slo, start_rate=1.0, min_reached=0.5)
    assert found.converged and found.rate is not None
    assert found.rate == pytest.approx(limit, rel=0.026)
    stopped = [t.rate for t in found.trials if any("of 401 requests waited" in f for f in t.failures)]
    assert 16.0 in stopped, "it cannot come back under the bound, and ends soon"


def test_slow_decodes():
    """Side by side a step takes longer: the bound on gaps is what limits."""
    server = FakeServer(lambda s: 0.01 + 0.01 * min(len(s.asked), 64), num_at_once=64)
    items = Items(Item(float(k), num_decode_tokens=20) for k in range(200))
    found = find_capacity(open_loop_trial(server, items, Slo(tbt_p99_s=0.1)), Slo(tbt_p99_s=0.1), start_rate=1.0)
    assert found.rate is not None and found.upper is not None and found.upper <= 1.025 * found.rate
    at = {t.rate: t.result for t in found.trials}
    assert (at[found.rate].tbt_p99_s or 9) <= 0.1
    full = run_open_loop(server, items.with_rate(found.upper))
    assert full.tbt is not None and full.tbt.p99 > 0.1, "the trial that was stopped early would have failed"


# ----------------------------------------------------------------------------------------------------- without answer


def test_an_slo_that_no_load_meets():
    """Says what the server can do at best."""
    found = find_capacity(lambda rate: result(tbt=0.3 + rate / 100), SLO, start_rate=4.0)
    assert found.rate is None and found.upper == 4.0 / 64 and found.converged
    assert len(found.trials) == 7
    assert "no rate passed, down to 0.0625 requests/s" in found.note
    assert "The lowest P99 TBT at any rate was 0.3006 s: no load meets 0.1 s" in found.note
    assert "capacity none" in found.to_table()
    assert len(find_capacity(lambda rate: result(tbt=1.0), SLO, start_rate=4.0, min_rate=1.5).trials) == 3


def test_out_of_trials():
    no_upper = find_capacity(Limit(1e12), SLO, start_rate=1.0, max_trials=5)
    assert (no_upper.rate, no_upper.upper, no_upper.converged) == (16.0, None, False) and "higher" in no_upper.note
    between = find_capacity(Limit(10.0), SLO, start_rate=1.0, max_trials=6, min_reached=1.0)
    assert (between.rate, between.upper, between.converged) == (8.0, 12.0, False)
    assert "between 8 and 12" in between.note
    none = find_capacity(Limit(0.01), SLO, start_rate=1.0, max_trials=2)
    assert (none.rate, none.converged) == (None, False) and "used up" in none.note


def test_requests_that_are_refused_end_the_search(tmp_path):
    server = FakeServer(0.1, max_len=8)
    items = Items([Item(0.0, 4), Item(1.0, 9), Item(2.0, 4)])
    with pytest.raises(ValueError, match=r"1 requests were refused at 1 .*leave them out.*9 tokens are more than 8"):
        find_capacity(open_loop_trial(server, items, SLO), SLO, start_rate=1.0)


def test_an_interrupt_ends_the_search(tmp_path):
    path, report = tmp_path / "trials.jsonl", Report(requests=(), iterations=(), start_s=0, end_s=1)
    interrupted = dataclasses.replace(report, stopped="interrupted")
    trial = lambda rate: result() if rate < 4 else interrupted
    with pytest.raises(KeyboardInterrupt):
        find_capacity(trial, SLO, start_rate=1.0, results_path=path, key="k")
    assert [json.loads(line)["rate"] for line in path.read_text().splitlines()] == [1.0, 2.0]


@pytest.mark.parametrize(
    "bad",
    [{"start_rate": 0.0}, {"start_rate": -1.0}, {"start_rate": float("nan")}, {"start_rate": float("inf")},
     {"tolerance": 0.0}, {"max_trials": 0}, {"repeats": 2}, {"repeats": 0}, {"min_rate": 2.0}, {"min_rate": 0.0},
     {"min_reached": 1.5}, {"key": "k"}, {"results_path": "x.jsonl"}, {"slo": 0.1}],
)  # fmt: skip
def test_bad_arguments(bad):
    name = next(iter(bad))
    with pytest.raises(ValueError, match=name):
        find_capacity(Limit(10.0), **{"slo": SLO, "start_rate": 1.0, **bad})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_bad_slo(value):
    with pytest.raises(ValueError, match="tbt_p99_s"):
        Slo(tbt_p99_s=value)
    with pytest.raises(ValueError, match="scheduling_delay_p50_s"):
        Slo(tbt_p99_s=1.0, scheduling_delay_p50_s=value)


# ------------------------------------------------------------------------------------------------------------- judge


@pytest.mark.parametrize(
    ("options", "word"),
    [({}, None), ({"tbt": 0.1}, None), ({"tbt": 0.1001}, "P99 TBT"), ({"delay": 2.0}, None), ({"delay": 2.1}, "delay"),
     ({"num_failed": 1, "error": "x"}, "1 requests failed: x"), ({"stopped": "why"}, "stopped early, why"),
     ({"num_rejected": 2}, "2 requests rejected"), ({"num_finished": 0}, "no request finished"),
     ({"tbt": None}, None), ({"offered_rate": 10.0, "reached_rate": 9.5}, None),
     ({"offered_rate": 10.0, "reached_rate": 9.4}, "reached 9.4 of 10")],
)  # fmt: skip
def test_verdicts(options, word):
    failures = judge(result(**options), SLO)
    assert (len(failures) == 1 and word in failures[0]) if word else failures == ()


def test_all_that_is_wrong_is_said():
    assert len(judge(result(tbt=9.0, delay=9.0, num_failed=1, offered_rate=2.0, reached_rate=1.0), SLO)) == 4


# ---------------------------------------------------------------------------------------------------------- hopeless


def progress(delays=(), gaps=(), num_requests=1000, num_gaps: int | None = 100_000):
    p = Progress(num_requests=num_requests, num_gaps=num_gaps)
    p.delays += delays
    p.gaps += gaps
    return p


@pytest.mark.parametrize(("n", "enough"), [(1, 1), (2, 2), (3, 2), (4, 3), (100, 51), (101, 51)])
def test_hopeless_by_delay_is_more_than_half(n, enough):
    assert not hopeless(progress(delays=[2.1] * (enough - 1) + [2.0] * 9, num_requests=n), SLO)
    assert hopeless(progress(delays=[2.1] * enough, num_requests=n), SLO)


@pytest.mark.parametrize(("n", "enough"), [(1, 1), (2, 2), (100, 2), (101, 2), (102, 3), (1000, 11), (100_000, 1001)])
def test_hopeless_by_gaps_is_more_than_one_in_a_hundred(n, enough):
    assert not hopeless(progress(gaps=[0.11] * (enough - 1) + [0.1] * 9, num_gaps=n), SLO)
    assert hopeless(progress(gaps=[0.11] * enough, num_gaps=n), SLO)
    assert not hopeless(progress(gaps=[0.11] * n, num_gaps=None), SLO), "no end of gaps is known"


def test_hopeless_is_never_wrong():
    """Whatever comes after it, the percentile is over the bound."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, share = int(rng.integers(1, 400)), rng.choice([0.005, 0.02, 0.4, 0.6])
        slow = int(rng.binomial(n, share))
        samples = np.array([0.1 + 1e-9] * slow + [0.0] * (n - slow))
        if hopeless(progress(gaps=samples[:slow].tolist(), num_gaps=n), SLO):
            assert np.percentile(samples, 99) > 0.1
        if hopeless(progress(delays=(samples[:slow] + 2).tolist(), num_requests=n), SLO):
            assert np.median(samples + 2 * (samples > 0)) > 2.0


def test_an_early_end_does_not_change_the_verdict():
    """Hopeless trials are those that fail when run to the end; they cost less."""
    gaps = np.random.default_rng(2).exponential(size=300)
    items, slo = Items(Item(t, num_decode_tokens=2) for t in np.cumsum(gaps).tolist()), Slo(tbt_p99_s=0.15)
    early = open_loop_trial(FakeServer(0.1, num_at_once=2), items, slo)
    for rate in (6.0, 9.0, 10.0, 11.0, 20.0, 40.0):
        stopped, whole = early(rate), run_open_loop(FakeServer(0.1, num_at_once=2), items.with_rate(rate))
        assert bool(judge(TrialResult.of(stopped), slo)) == bool(judge(TrialResult.of(whole), slo))
        if stopped.stopped:
            assert len(stopped.iterations) < len(whole.iterations)
    assert early(40.0).stopped


# -------------------------------------------------------------------------------------------------------- results file


def test_a_search_goes_on_where_it_was(tmp_path):
    path, whole = tmp_path / "deep" / "trials.jsonl", Limit(10.0)
    expected = find_capacity(whole, SLO, start_rate=1.0)

    def dies(rate):
        if len(whole.rates) == 4:
            raise OSError("power")
        return whole(rate)

    whole.rates = []
    with pytest.raises(OSError, match="power"):
        find_capacity(dies, SLO, start_rate=1.0, results_path=path, key="k")
    rest = Limit(10.0)
    found = find_capacity(rest, SLO, start_rate=1.0, results_path=path, key="k")
    assert (found.rate, found.upper) == (expected.rate, expected.upper)
    assert [t.rate for t in found.trials] == [t.rate for t in expected.trials]
    assert [t.reused for t in found.trials] == [True] * 4 + [False] * len(rest.rates)
    assert "(from file)" in found.to_table()
    none = Limit(0.0)
    again = find_capacity(none, SLO, start_rate=1.0, results_path=path, key="k")
    assert none.rates == [] and again.rate == expected.rate


def test_trials_of_other_keys_and_slos_are_not_used(tmp_path):
    path = tmp_path / "trials.jsonl"
    for key, slo in (("k", SLO), ("other", SLO), ("k", Slo(tbt_p99_s=0.2))):
        trial = Limit(10.0)
        find_capacity(trial, slo, start_rate=1.0, results_path=path, key=key)
        assert trial.rates


def test_repeats_are_kept_apart(tmp_path):
    path, first = tmp_path / "trials.jsonl", Limit(10.0, {4.0: 1})
    found = find_capacity(first, SLO, start_rate=1.0, repeats=3, results_path=path, key="k")
    again = find_capacity(Limit(0.0), SLO, start_rate=1.0, repeats=3, results_path=path, key="k")
    assert [(t.rate, t.passed) for t in again.trials] == [(t.rate, t.passed) for t in found.trials]


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_write_that_was_cut_short(tmp_path, cut):
    """The trial of the half line runs again; the line after it is whole."""
    path = tmp_path / "trials.jsonl"
    expected = find_capacity(Limit(10.0), SLO, start_rate=1.0, results_path=path, key="k")
    path.write_bytes(path.read_bytes()[:-cut])
    trial = Limit(10.0)
    if cut == 1:  # only the newline is missing
        find_capacity(trial, SLO, start_rate=1.0, results_path=path, key="k")
        assert trial.rates == []
        return
    with pytest.warns(UserWarning, match="is not JSON; its trial will be run again"):
        found = find_capacity(trial, SLO, start_rate=1.0, results_path=path, key="k")
    assert found.rate == expected.rate and trial.rates == [expected.trials[-1].rate]
    none = Limit(0.0)
    with pytest.warns(UserWarning, match="is not JSON"):
        find_capacity(none, SLO, start_rate=1.0, results_path=path, key="k")
    assert none.rates == []


@pytest.mark.parametrize("line", ['["a"]', '{"a": 1}', '{"key": "k", "slo": SLO, "rate": 1.0, "result": {"new": 1}}'])
def test_a_file_of_something_else(tmp_path, line):
    path = tmp_path / "trials.jsonl"
    path.write_text(line.replace("SLO", json.dumps(dataclasses.asdict(SLO))) + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"trials.jsonl, line 1"):
        find_capacity(Limit(10.0), SLO, start_rate=1.0, results_path=path, key="k")
    assert path.read_bytes() == before


def test_keys():
    assert config_key(a=SLO, b=[1, 2.5, None]) == config_key(b=[1, 2.5, None], a=Slo(tbt_p99_s=0.1))
    keys = {config_key(a=SLO), config_key(a=Slo(tbt_p99_s=0.2)), config_key(b=SLO), config_key(a={"tbt_p99_s": 0.1})}
    assert len(keys) == 4
    with pytest.raises(ValueError, match="object at"):
        config_key(a=object())


def test_table():
    lines = find_capacity(Limit(10.0), SLO, start_rate=1.0, min_reached=1.0).to_table().splitlines()
    assert lines[1].split() == ["1", "1", "1", "50", "100", "-", "holds"]
    assert "reached 10 of 16 requests/s" in lines[5]
    assert lines[-1].startswith("capacity 10 requests/s (P99 TBT <= 0.1 s, median delay <= 2 s)")


# -------------------------------------------------------------------------------------------------------- disturbances


def disturbed_trial(*shares):
    """A trial whose n-th run takes twice as long in such a share of its iterations, and the rates it was run at."""
    rates = []

    def trial(rate):
        share = shares[min(len(rates), len(shares) - 1)]
        rates.append(rate)
        server = FakeServer(lambda server: 2.0 if server.num_steps < 100 * share else 1.0)
        return run_open_loop(server, Items([Item(0.0, num_decode_tokens=100)]), progress=False)

    return trial, rates


@pytest.mark.parametrize(
    ("shares", "num_runs", "counts"),
    [((0.0,), 1, 0.0), ((0.04, 0.0), 1, 0.04), ((0.5, 0.3, 0.02, 0.0), 3, 0.02), ((0.4, 0.2, 0.3, 0.6, 0.0), 4, 0.2)],
)
def test_a_disturbed_trial_runs_again_and_the_least_disturbed_counts(shares, num_runs, counts):
    trial, rates = disturbed_trial(*shares)
    report = undisturbed(trial, lambda decodes, chunks: 1.0)(3.0)
    assert rates == [3.0] * num_runs
    assert sum(step.wall_s == 2.0 for step in report.iterations) == round(100 * counts)


def test_what_an_iteration_should_take_is_asked_by_its_decodes_and_chunks():
    asked = []
    model = lambda decodes, chunks: asked.append((tuple(decodes), tuple(chunks))) or 9.0
    undisturbed(disturbed_trial(0.0)[0], model)(1.0)
    assert asked[:3] == [((), ((0, 4),)), ((5,), ()), ((6,), ())]
