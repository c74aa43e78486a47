"""The numbers of a report, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from sarathi_jax.metrics import Report, RequestRecord, Summary, WarmUp
from sarathi_jax.outputs import ChunkStats, StepStats


def record(name="r0", arrival=0.0, scheduled: float | None = 1.0, tokens=(2.0, 2.5), status="finished", **options):
    options = {"sent_s": arrival, "prompt_len": 10, "asked_len": len(tokens), "output_len": len(tokens), **options}
    return RequestRecord(
        request_id=name, arrival_s=arrival, first_scheduled_s=scheduled, token_s=tuple(tokens), status=status, **options
    )


def step(start=0.0, wall=1.0, prefill=10, decode=0, padding=6, chunks=(("r0", 0, 0, 10),), **options):
    return StepStats(
        chunks=tuple(ChunkStats(*chunk) for chunk in chunks), start_s=start, wall_s=wall, num_prefill_tokens=prefill,
        num_decode_tokens=decode, num_padding=padding,
        **{"host_s": wall / 4, "num_preempted": 0, "num_pages_held": 3, "num_pages": 9, **options},
    )  # fmt: skip


def make_report(requests=(), iterations=(), **options):
    return Report(
        requests=tuple(requests), iterations=tuple(iterations), **{"start_s": 0.0, "end_s": 10.0, **options}
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- summaries


def test_percentiles_interpolate_between_samples():
    """Of 1 to 10, as numpy's "linear" has it: rank 0.99 * 9 = 8.91 from 0, so 9 + 0.91 (B16)."""
    summary = Summary.of(range(10, 0, -1))
    assert summary is not None
    assert (summary.count, summary.mean, summary.max) == (10, 5.5, 10.0)
    assert (summary.p50, summary.p90) == (5.5, 9.1)
    assert (summary.p95, summary.p99) == pytest.approx((9.55, 9.91), rel=1e-12)


def test_all_samples_count():
    """No sampling, no buckets: one slow sample in 10^5 moves the mean and the maximum by exactly itself."""
    samples = np.full(100_000, 0.25)
    samples[777] = 1000.25
    summary = Summary.of(samples)
    assert summary is not None
    assert (summary.mean, summary.p99, summary.max) == (0.26, 0.25, 1000.25)


@pytest.mark.parametrize(
    ("count", "few"),
    [(1, ("p50", "p90", "p95", "p99")), (2, ("p90", "p95", "p99")), (10, ("p95", "p99")), (20, ("p99",)),
     (99, ("p99",)), (100, ())],
)  # fmt: skip
def test_few_samples_are_told(count, few):
    summary = Summary.of([1.0] * count)
    assert summary is not None and summary.few == few


def test_no_sample_is_no_summary():
    assert Summary.of([]) is None and Summary.of([None, None]) is None
    summary = Summary.of([None, 2.0])
    assert summary is not None and summary.count == 1


# ---------------------------------------------------------------------------------------------------------- requests


def test_times_of_a_request():
    r = record(arrival=1.0, scheduled=1.5, tokens=(3.0, 3.25, 5.0), sent_s=1.25)
    assert (r.ttft_s, r.scheduling_delay_s, r.prefill_s) == (2.0, 0.5, 1.5)
    assert (r.tbts_s, r.e2e_s, r.e2e_per_token_s) == ([0.25, 1.75], 4.0, 4.0 / 3)
    none = record(scheduled=None, tokens=(), status="rejected")
    assert [none.ttft_s, none.scheduling_delay_s, none.prefill_s, none.e2e_s, none.e2e_per_token_s] == [None] * 5
    assert none.tbts_s == record(tokens=(4.0,)).tbts_s == []


def test_only_finished_requests_are_in_percentiles():
    bad = {"tokens": (100.0, 900.0), "scheduled": 99.0}
    report = make_report(
        [
            record("a", tokens=(2.0, 3.0)),
            record("b", status="failed", error="x", **bad),
            record("c", status="rejected", error="y", **bad),
            record("d", status="aborted", **bad),
        ]
    )
    assert (report.num_finished, report.num_failed, report.num_rejected, report.num_aborted) == (1, 1, 1, 1)
    for name in ("ttft", "tbt", "scheduling_delay", "prefill", "e2e", "e2e_per_token", "preemptions"):
        summary = getattr(report, name)
        assert summary.count == 1 and summary.max <= 3.0, name
    assert (report.num_output_tokens, report.num_total_tokens) == (2, 12)
    assert [text[:18] for text in report.warnings] == ["1 requests failed,", "1 requests rejecte"]


def test_gaps_are_pooled_over_requests():
    """Not a mean of each request's mean: nine short gaps and a long one are ten samples."""
    report = make_report([record("a", tokens=range(10)), record("b", tokens=(0.0, 11.0))])
    assert report.tbt is not None
    assert (report.tbt.count, report.tbt.mean, report.tbt.p50) == (10, 2.0, 1.0)


def test_rates():
    """Throughput is tokens over wall time; the offered rate is of gaps, n - 1 of them (B16, B14)."""
    report = make_report([record(f"r{k}", arrival=k * 0.5, tokens=(k * 0.5 + 4.0,)) for k in range(9)], start_s=-2.0)
    assert (report.output_tokens_per_s, report.total_tokens_per_s, report.requests_per_s) == (9 / 12, 99 / 12, 9 / 12)
    assert report.offered_rate == 2.0
    assert report.reached_rate == pytest.approx(2.0), "every request took 4 s: the server kept up, tail or not"
    late = make_report([record(f"r{k}", arrival=k * 0.5, tokens=(k * 2.0 + 4.0,)) for k in range(9)])
    assert late.reached_rate == pytest.approx(0.5), "a first token every 2 s"
    assert any("offered 2 requests/s, reached 0.5" in text for text in late.warnings)


def test_rates_that_are_none():
    for requests in ([], [record()], [record("a"), record("b")]):
        report = make_report(requests)
        assert (report.offered_rate, report.reached_rate) == (None, None)
    empty = make_report(end_s=0.0)
    assert (empty.output_tokens_per_s, empty.padding_share, empty.tbt, empty.iteration_wall) == (None,) * 4
    assert "-" in empty.to_table()
    assert Report.from_json(empty.to_json()) == empty


def test_iterations():
    report = make_report([], [step(0.0, 1.0, 10, 0, 6), step(1.0, 3.0, 0, 2, 14, chunks=[("a", 0, 9, 1)] * 2)])
    assert report.padding_share == 20 / 32
    for name, mean, largest in [
        ("wall", 2.0, 3.0), ("host", 0.5, 0.75), ("prefill_tokens", 5, 10), ("decode_tokens", 1, 2),
        ("padding", 10, 14), ("seqs", 1.5, 2), ("pages_held", 3, 3),
    ]:  # fmt: skip
        summary = getattr(report, f"iteration_{name}")
        assert (summary.count, summary.mean, summary.max) == (2, mean, largest), name


# --------------------------------------------------------------------------------------------------------- in and out

FULL = make_report(
    [record("a"), record('quo"te\n', status="failed", error="näh", scheduled=None, tokens=())],
    [step(), step(1.1, 0.1 + 0.2)],
    warm_up=WarmUp(num_requests=1, num_iterations=2, wall_s=0.5),
    stopped="why",
    num_unsent=3,
    num_compiled=0,
)


def test_json_is_strict_and_comes_back_the_same():
    text = FULL.to_json()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Report.from_json(text) == FULL
    assert content["summary"]["tbt"]["p99"] == 0.5 and content["summary"]["tbt"]["count"] == 1
    assert Report.from_json(Report.from_json(text).to_json()).to_json() == text


def test_json_takes_numpy_scalars():
    report = make_report([record(arrival=np.float64(0.5))], [step(prefill=np.int64(7), wall=np.float32(0.5))])
    back = Report.from_json(report.to_json())
    assert back == report and type(back.iterations[0].num_prefill_tokens) is int


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_no_nan(value):
    with pytest.raises(ValueError, match="JSON compliant"):
        make_report(start_s=value).to_json()
    with pytest.raises(ValueError, match="sample 1 is not finite"):
        Summary.of([1.0, value])


def test_text_that_is_no_report():
    content = json.loads(FULL.to_json())
    for bad in ("[]", "{}", json.dumps({**content, "format": "other/1"}), json.dumps({**content, "extra": 1})):
        with pytest.raises(ValueError, match="report"):
            Report.from_json(bad)
    content["requests"][0].pop("arrival_s")
    with pytest.raises(ValueError, match="arrival_s"):
        Report.from_json(json.dumps(content))


def test_table():
    table = FULL.to_table()
    rows = {line[:27].strip(): line.split() for line in table.splitlines()}
    assert rows["TBT (ms)"][2:] == ["1", "500", "500*", "500*", "500*", "500*", "500"]
    assert rows["TTFT (ms)"][2:4] == ["1", "2,000"]
    assert "1 finished, 1 failed, 0 rejected, 0 aborted, 3 not sent" in table
    assert "warm-up     1 requests, 2 iterations" in table
    assert "too few samples" in table and "warning: stopped before all was done: why" in table
    assert max(map(len, table.splitlines())) <= 120
    many = make_report(
        [record(f"r{k}", arrival=float(k), tokens=(k + 2.0, k + 3.0)) for k in range(100)], [step()] * 100
    )
    assert "*" not in many.to_table() and "warning" not in many.to_table()


def test_a_report_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.end_s = 1.0  # pyright: ignore[reportAttributeAccessIssue]
