"""Workloads: right rates, lengths and ids, the same for the same seed, and files that say what is wrong with them."""

import dataclasses
import gzip
import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_jax.request import SamplingParams
from sarathi_jax.workload import (
    MAX_TOKENS,
    AllAtOnce,
    CappedPoisson,
    Gamma,
    Poisson,
    Static,
    WorkItem,
    Workload,
    make_workload,
)
from sarathi_jax.workload_files import BadRow, load_csv, load_mooncake, load_sharegpt
from sarathi_jax.workload_lengths import (
    ARXIV_SUMMARIZATION,
    OPENCHAT_SHAREGPT4,
    FittedLengths,
    Fixed,
    GeneralizedWeibull,
    TraceLengths,
    Uniform,
    Zipf,
)

MANY = 100_000
TRACES = pathlib.Path(__file__).parents[3] / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not at {TRACES}")
HEADER = "num_prefill_tokens,num_decode_tokens"


def rng():
    return np.random.default_rng(7)


def lengths_of(workload):
    return [(item.num_prefill_tokens, item.num_decode_tokens) for item in workload]


def times_of(workload):
    return [item.arrived_at_s for item in workload]


def make(times=(0.0, 1.0, 3.0), prefill=(10, 20, 30), decode=(1, 2, 3), **kwargs):
    items = tuple(
        WorkItem(arrived_at_s=t, num_prefill_tokens=p, num_decode_tokens=d)
        for t, p, d in zip(times, prefill, decode, strict=True)
    )
    return Workload(items=items, **kwargs)


# Arrivals


@pytest.mark.parametrize(
    ("arrivals", "mean_gap", "cv"),
    [
        (Poisson(rate=5.0), 0.2, 1.0),
        (Gamma(rate=5.0, burstiness=0.2), 0.2, 0.2**-0.5),
        (Gamma(rate=5.0, burstiness=1.0), 0.2, 1.0),
        (Gamma(rate=5.0, burstiness=5.0), 0.2, 5**-0.5),
        (CappedPoisson(rate=5.0), 0.2 / 1.0524, 0.880),
        (Static(rate=5), 0.2, 0.0),
    ],
)
def test_gaps_have_the_mean_and_the_spread_that_was_asked_for(arrivals, mean_gap, cv):
    times = arrivals.times(MANY, rng())
    gaps = np.diff(times)
    assert times.shape == (MANY,) and times[0] == 0.0
    assert gaps.min() >= 0.0
    assert gaps.mean() == pytest.approx(mean_gap, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-6)


def test_poisson_gaps_are_exponential_and_only_the_capped_ones_are_cut():
    """The public code's gaps end at 3 / rate: a server tested with them never sees a long pause or the true rate."""
    gaps = np.sort(np.diff(Poisson(rate=2.0).times(MANY, rng())))
    expected = 1.0 - np.exp(-2.0 * gaps)
    assert np.abs(expected - np.arange(gaps.size) / gaps.size).max() < 0.01
    assert np.mean(gaps > 1.5) == pytest.approx(math.exp(-3), rel=0.05)
    assert np.diff(CappedPoisson(rate=2.0).times(MANY, rng())).max() == pytest.approx(1.5)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, "5", True, None])
@pytest.mark.parametrize("process", [Poisson, CappedPoisson, Static, lambda rate: Gamma(rate=rate, burstiness=1.0)])
def test_a_rate_must_be_positive_and_finite(process, rate):
    with pytest.raises(ValueError, match=r"rate=.*requests per second"):
        process(rate=rate)


@pytest.mark.parametrize("burstiness", [0, -1, math.nan, math.inf])
def test_burstiness_must_be_positive_and_finite(burstiness):
    with pytest.raises(ValueError, match="burstiness"):
        Gamma(rate=5.0, burstiness=burstiness)


def test_all_at_once_has_no_gap_to_scale():
    workload = make_workload(num_requests=3, arrivals=AllAtOnce(), lengths=UNIFORM, seed=0)
    assert times_of(workload) == [0.0, 0.0, 0.0]
    assert workload.requests_per_s is None
    with pytest.raises(ValueError, match="with_arrivals"):
        workload.with_rate(2.0)


# Lengths

UNIFORM = Uniform(min_prefill_tokens=3, max_prefill_tokens=6, min_decode_tokens=1, max_decode_tokens=2)


def test_uniform_reaches_every_length_and_both_ends_alike():
    prefill, decode = UNIFORM.sample(MANY, rng())
    for lengths, low, high in ((prefill, 3, 6), (decode, 1, 2)):
        values, counts = np.unique(lengths, return_counts=True)
        assert values.tolist() == list(range(low, high + 1))
        assert counts / MANY == pytest.approx(1.0 / len(values), rel=0.03)
    assert abs(np.corrcoef(prefill, decode)[0, 1]) < 0.02


@pytest.mark.parametrize(
    "lengths",
    [
        Fixed(num_prefill_tokens=1, num_decode_tokens=1),
        Uniform(min_prefill_tokens=1, max_prefill_tokens=1, min_decode_tokens=1, max_decode_tokens=1),
        Zipf(min_total_tokens=2, max_total_tokens=2),
    ],
)
def test_the_shortest_request_is_one_token_in_and_one_out(lengths):
    workload = make_workload(num_requests=5, arrivals=AllAtOnce(), lengths=lengths, seed=0)
    assert lengths_of(workload) == [(1, 1)] * 5
    assert len(workload.token_ids(0, vocab_size=8, seed=0, exclude=(0, 1))) == 1


def test_zipf_follows_its_law():
    prefill, decode = Zipf(min_total_tokens=22, max_total_tokens=31, theta=1.0, prefill_to_decode_ratio=10).sample(
        MANY, rng()
    )
    values, counts = np.unique(prefill + decode, return_counts=True)
    assert values.tolist() == list(range(22, 32))
    weights = 1.0 / np.arange(1, 11)
    assert counts / MANY == pytest.approx(weights / weights.sum(), rel=0.06)
    assert {*zip(prefill.tolist(), decode.tolist(), strict=True)} == {
        (20, 2),
        *((total - 3, 3) for total in range(23, 32)),
    }


BAD_LENGTHS = [
    lambda: Fixed(num_prefill_tokens=0, num_decode_tokens=1),
    lambda: Fixed(num_prefill_tokens=1, num_decode_tokens=2.0),  # type: ignore[arg-type]
    lambda: Uniform(min_prefill_tokens=5, max_prefill_tokens=4, min_decode_tokens=1, max_decode_tokens=1),
    lambda: Uniform(min_prefill_tokens=1, max_prefill_tokens=4, min_decode_tokens=0, max_decode_tokens=1),
    lambda: Zipf(min_total_tokens=1, max_total_tokens=4),
    lambda: Zipf(min_total_tokens=4, max_total_tokens=3),
    lambda: Zipf(min_total_tokens=4, max_total_tokens=8, theta=math.nan),
    lambda: Zipf(min_total_tokens=4, max_total_tokens=8, prefill_to_decode_ratio=0),
    lambda: GeneralizedWeibull(scale=100.0, shape=1.0, tail=0.0, max_tokens=100, long_share=0.1),
    lambda: GeneralizedWeibull(scale=100.0, shape=0.0, tail=0.0, max_tokens=100),
    lambda: dataclasses.replace(OPENCHAT_SHAREGPT4, max_total_tokens=2),  # would draw again for ever
]


@pytest.mark.parametrize("build", BAD_LENGTHS)
def test_impossible_lengths_are_refused_when_they_are_described(build):
    with pytest.raises(ValueError, match=r"(tokens|theta|ratio|long_max|shape)\S*=|range"):
        build()


FITTED = [
    (OPENCHAT_SHAREGPT4, 8192, (1730, 5696, 2088), (415, 834, 266)),
    (ARXIV_SUMMARIZATION, 16384, (7059, 12985, 3638), (208, 371, 265)),
]


@pytest.mark.parametrize(("lengths", "limit", "prompt", "output"), FITTED)
def test_the_papers_workloads_have_the_published_median_p90_and_spread(lengths, limit, prompt, output):
    prefill, decode = lengths.sample(10 * MANY, rng())  # the spread of the arXiv outputs is that of 1 % of them
    assert prefill.min() >= 1 and decode.min() >= 1
    assert (prefill + decode).max() <= limit
    for drawn, (median, p90, std) in ((prefill, prompt), (decode, output)):
        assert np.percentile(drawn, [50, 90]) == pytest.approx([median, p90], rel=0.01)
        assert drawn.std() == pytest.approx(std, rel=0.02)


@needs_traces
def test_the_fit_to_published_figures_meets_the_released_lengths():
    """Of the fit's inputs only three figures a side come from these lengths: the rest of the curve must follow."""
    trace, _ = load_csv(TRACES / "sharegpt_8k.csv")
    for real, drawn, furthest in zip(
        trace.lengths(), OPENCHAT_SHAREGPT4.sample(MANY, rng()), (0.06, 0.035), strict=True
    ):
        both = np.concatenate([real, drawn])
        share = [np.searchsorted(np.sort(x), both, "right") / x.size for x in (real, drawn)]
        assert np.abs(share[0] - share[1]).max() < furthest
        assert np.percentile(drawn, [25, 75, 99]) == pytest.approx(np.percentile(real, [25, 75, 99]), rel=0.05)
        assert drawn.mean() == pytest.approx(real.mean(), rel=0.02)


def test_a_distribution_with_no_tail_is_weibulls():
    lengths = GeneralizedWeibull(scale=1000.0, shape=2.0, tail=0.0, max_tokens=MAX_TOKENS)
    u = np.array([0.0, 0.25, 0.5, 0.9])
    assert lengths.quantile(u).tolist() == [1, *np.ceil(1000 * np.sqrt(-np.log(1 - u[1:]))).tolist()]
    nearly = dataclasses.replace(lengths, tail=1e-9)
    assert nearly.quantile(u).tolist() == lengths.quantile(u).tolist()


def test_draws_above_a_limit_are_drawn_again_and_not_cut():
    """Cut ones would pile up at the limit."""
    side = GeneralizedWeibull(scale=100.0, shape=1.0, tail=3.0, max_tokens=200)
    prefill, decode = FittedLengths(prefill=side, decode=side, max_total_tokens=300).sample(MANY, rng())
    assert prefill.max() == 200 and decode.max() == 200 and (prefill + decode).max() == 300
    assert max(np.mean(prefill == 200), np.mean(prefill + decode == 300)) < 0.01


def test_trace_lengths_keep_prompt_and_output_together():
    workload = make()
    prefill, decode = TraceLengths(workload=workload).sample(3000, rng())
    pairs, counts = np.unique(np.stack([prefill, decode], 1), axis=0, return_counts=True)
    assert [tuple(pair) for pair in pairs.tolist()] == lengths_of(workload)
    assert counts.min() > 800


# Making and changing workloads


def test_same_arguments_same_workload_and_each_stream_is_its_own():
    """Comparing two arrival processes, or two rates, must not compare two sets of requests."""
    kwargs = {"num_requests": 50, "lengths": OPENCHAT_SHAREGPT4, "seed": 3}
    workload = make_workload(arrivals=Poisson(rate=2.0), **kwargs)
    assert workload == make_workload(arrivals=Poisson(rate=2.0), **kwargs)
    bursty = make_workload(arrivals=Gamma(rate=2.0, burstiness=0.5), **kwargs)
    assert lengths_of(bursty) == lengths_of(workload)
    assert times_of(bursty) != times_of(workload)
    other_lengths = make_workload(arrivals=Poisson(rate=2.0), **{**kwargs, "lengths": UNIFORM})
    assert times_of(other_lengths) == times_of(workload)
    other_seed = make_workload(arrivals=Poisson(rate=2.0), **{**kwargs, "seed": 4})
    assert times_of(other_seed) != times_of(workload) and lengths_of(other_seed) != lengths_of(workload)
    assert bursty.with_arrivals(Poisson(rate=2.0), seed=3) == workload


def test_what_a_seed_draws_stays_what_it_was():
    """Published results name a seed: a change here is a change of everybody's workloads."""
    workload = make_workload(num_requests=3, arrivals=Poisson(rate=1.0), lengths=ARXIV_SUMMARIZATION, seed=0)
    assert lengths_of(workload) == [(2314, 447), (937, 168), (2309, 209)]
    assert times_of(workload) == pytest.approx([0.0, 0.7679765559, 0.7938876983])
    assert workload.token_ids(0, vocab_size=1000, seed=0)[:4] == (71, 385, 169, 564)


@given(
    st.sampled_from([Poisson, CappedPoisson, Static]), st.floats(0.01, 1000), st.floats(0.01, 1000), st.integers(1, 40)
)
def test_with_rate_scales_the_gaps_alone(process, rate, new_rate, num_requests):
    kwargs = {"num_requests": num_requests, "lengths": UNIFORM, "seed": 1}
    scaled = make_workload(arrivals=process(rate=rate), **kwargs).with_rate(new_rate)
    direct = make_workload(arrivals=process(rate=new_rate), **kwargs)
    assert lengths_of(scaled) == lengths_of(direct)
    assert times_of(scaled) == pytest.approx(times_of(direct), rel=1e-12)
    assert scaled.requests_per_s == direct.requests_per_s == new_rate


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_with_rate_refuses_what_is_no_rate(rate):
    with pytest.raises(ValueError, match="requests_per_s"):
        make(requests_per_s=1.0).with_rate(rate)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 64))
def test_scaling_lengths_rounds_up_and_never_to_zero(prefill, decode, divisor):
    item = WorkItem(arrived_at_s=1.5, num_prefill_tokens=prefill, num_decode_tokens=decode).scaled(1 / divisor)
    assert (item.num_prefill_tokens, item.num_decode_tokens) == (-(-prefill // divisor), -(-decode // divisor))
    assert item.arrived_at_s == 1.5
    assert item.scaled(1.0) == item


def test_scaling_is_exact_where_floats_are_not():
    item = WorkItem(arrived_at_s=0, num_prefill_tokens=100, num_decode_tokens=1)
    assert item.scaled(0.07).num_prefill_tokens == 7  # 100 * 0.07 = 7.000000000000001
    assert item.scaled(3).num_prefill_tokens == 300


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf])
def test_a_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match="lengths"):
        make().scaled(scale)


def test_known_prompt_ids_are_cut_and_not_stretched():
    item = WorkItem(arrived_at_s=0, num_prefill_tokens=4, num_decode_tokens=4, prompt_token_ids=(5, 6, 7, 8))
    assert item.scaled(0.5).prompt_token_ids == (5, 6)
    with pytest.raises(ValueError, match="cannot stretch"):
        item.scaled(2.0)


def test_limited_refuses_or_leaves_out_what_is_too_long():
    workload = make(prefill=(10, 20, 30), decode=(1, 2, 3))
    assert workload.limited(33) is workload
    with pytest.raises(ValueError, match=r"items\[2\] has 33 tokens, above max_total_tokens=32, as have 1 of 3"):
        workload.limited(32)
    assert lengths_of(workload.limited(32, on_over_long="skip")) == [(10, 1), (20, 2)]
    with pytest.raises(ValueError, match="3 of 3"):
        workload.limited(10, on_over_long="skip")
    with pytest.raises(ValueError, match="on_over_long"):
        workload.limited(32, on_over_long="clip")


def test_a_workload_behaves_as_the_tuple_of_its_requests():
    workload = make()
    assert len(workload) == 3 and list(workload) == list(workload.items) and workload[-1] is workload.items[2]
    assert list(workload.head(2)) == list(workload.items[:2])
    assert repr(workload) == "<Workload of 3 requests, nominally None a second>", "not pages of requests"
    for num in (0, 4, 1.5):
        with pytest.raises(ValueError, match="num_requests"):
            workload.head(num)


def test_statistics_of_a_workload_known_by_hand():
    statistics = make(times=(5.0, 6.0, 8.0), prefill=(10, 20, 60), decode=(1, 2, 3)).statistics()
    assert (statistics.num_requests, statistics.requests_per_s) == (3, pytest.approx(2 / 3))
    assert statistics.gap_cv == pytest.approx(1 / 3)
    prefill = statistics.prefill
    assert (prefill.mean, prefill.median, prefill.p90, prefill.min, prefill.max) == (30, 20, pytest.approx(52), 10, 60)
    assert prefill.std == pytest.approx(math.sqrt((400 + 100 + 900) / 3))
    assert statistics.total.max == 63 and statistics.decode.median == 2
    alone = make().head(1).statistics()
    assert alone.requests_per_s is None and alone.gap_cv is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrived_at_s": -1.0}, "arrived_at_s=-1.0"),
        ({"arrived_at_s": math.nan}, "arrived_at_s=nan"),
        ({"arrived_at_s": math.inf}, "arrived_at_s=inf"),
        ({"num_prefill_tokens": 0}, "num_prefill_tokens=0"),
        ({"num_decode_tokens": -1}, "num_decode_tokens=-1"),
        ({"num_decode_tokens": True}, "num_decode_tokens=True"),
        ({"num_decode_tokens": 1.0}, "num_decode_tokens=1.0"),
        ({"num_prefill_tokens": 10**9}, "num_prefill_tokens=1000000000"),
        ({"prompt_token_ids": (1,)}, "1 prompt_token_ids"),
        ({"prompt_token_ids": (1, -2)}, "prompt_token_ids must be integers >= 0"),
        ({"hash_ids": (-1,)}, "hash_ids must be integers >= 0"),
    ],
)
def test_a_request_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        WorkItem(**{"arrived_at_s": 0.0, "num_prefill_tokens": 2, "num_decode_tokens": 1, **change})


def test_a_workload_is_in_order_and_never_empty():
    with pytest.raises(ValueError, match=r"items\[2\] arrives at 0\.5 s, before items\[1\]"):
        make(times=(0.0, 1.0, 0.5))
    with pytest.raises(ValueError, match="at least one"):
        Workload(items=())
    hashed = dataclasses.replace(make()[0], hash_ids=(1,))
    with pytest.raises(ValueError, match="hash_block_len"):
        Workload(items=(hashed,))


def test_a_request_generates_its_own_number_of_tokens_whatever_the_limits():
    """A replay that stops at the default of 16 tokens, or at an end-of-text token, measures another workload."""
    item = WorkItem(arrived_at_s=0.0, num_prefill_tokens=5, num_decode_tokens=20)
    params = item.sampling_params(
        SamplingParams(max_tokens=4, stop=("a",), stop_token_ids=(3,), temperature=0.7, seed=9)
    )
    assert (params.max_tokens, params.ignore_eos, params.stop, params.stop_token_ids) == (20, True, (), ())
    assert (params.temperature, params.seed) == (0.7, 9)
    assert item.sampling_params().max_tokens == 20 and item.sampling_params().is_greedy
    assert item.sampling_params(SamplingParams(max_tokens=64, min_tokens=32)).max_tokens == 20


# Prompts


@given(st.integers(1, 300), st.integers(2, 200), st.sets(st.integers(-3, 210)), st.integers(0, 2**63 - 1))
def test_prompts_have_exactly_their_length_and_no_excluded_id(num_tokens, vocab_size, exclude, seed):
    workload = make(prefill=(num_tokens, 1, num_tokens))
    allowed = set(range(vocab_size)) - exclude
    if not allowed:
        with pytest.raises(ValueError, match="exclude"):
            workload.token_ids(0, vocab_size=vocab_size, seed=seed, exclude=exclude)
        return
    ids = workload.token_ids(0, vocab_size=vocab_size, seed=seed, exclude=exclude)
    assert len(ids) == num_tokens and {*ids} <= allowed and all(type(i) is int for i in ids)
    assert ids == workload.with_arrivals(AllAtOnce(), seed=0).token_ids(
        0, vocab_size=vocab_size, seed=seed, exclude=exclude
    )


def test_prompts_of_different_requests_and_seeds_share_nothing():
    """A shared prefix nobody asked for is served from the cache and flatters every latency."""
    workload = make(prefill=(40, 40, 40))
    prompts = {workload.token_ids(i, vocab_size=50_000, seed=seed)[:2] for i in range(3) for seed in range(3)}
    assert len(prompts) == 9
    assert workload.token_ids(-1, vocab_size=50, seed=0) == workload.token_ids(2, vocab_size=50, seed=0)
    with pytest.raises(IndexError):
        workload.token_ids(3, vocab_size=50, seed=0)


def test_every_id_of_the_vocabulary_is_as_likely():
    ids = make(prefill=(MANY, 1, 1)).token_ids(0, vocab_size=12, seed=0, exclude=(0, 5))
    values, counts = np.unique(ids, return_counts=True)
    assert values.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert counts / MANY == pytest.approx(0.1, rel=0.05)


def test_known_prompts_are_used_as_they_are_or_refused():
    item = WorkItem(arrived_at_s=0.0, num_prefill_tokens=2, num_decode_tokens=1, prompt_token_ids=(7, 99))
    workload = Workload(items=(item,))
    assert workload.token_ids(0, vocab_size=100, seed=0, exclude=(7,)) == (7, 99)
    with pytest.raises(ValueError, match="token id 99, outside vocab_size=50"):
        workload.token_ids(0, vocab_size=50, seed=0)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3, 1 / 8, 3.0])
def test_equal_hash_ids_share_a_prefix_at_any_scale(scale):
    """The point of replaying such a trace is its prefix hits."""
    lengths, hashes = (24, 20, 17, 8), ((1, 2, 3), (1, 2, 4), (1, 5, 6), (9,))
    items = tuple(
        WorkItem(arrived_at_s=0.0, num_prefill_tokens=n, num_decode_tokens=1, hash_ids=h)
        for n, h in zip(lengths, hashes, strict=True)
    )
    workload = Workload(items=items, hash_block_len=8).scaled(scale)
    prompts = [workload.token_ids(i, vocab_size=10**6, seed=0) for i in range(4)]
    assert [len(p) for p in prompts] == [math.ceil(n * scale) for n in lengths]
    shared = [next((i for i, (a, b) in enumerate(zip(prompts[0], p, strict=False)) if a != b), None) for p in prompts]
    assert shared == [None, math.ceil(16 * scale), math.ceil(8 * scale), 0]


# Files


def write(tmp_path, content, name="trace.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_csv_of_lengths_alone(tmp_path):
    path = write(tmp_path, f" {HEADER},id\r\n10,1,0\r\n 20 ,2,1\r\n\r\n")
    workload, report = load_csv(path)
    assert lengths_of(workload) == [(10, 1), (20, 2)]
    assert times_of(workload) == [0.0, 0.0] and workload.requests_per_s is None
    assert (report.num_rows, report.num_used, report.skipped) == (2, 2, ())
    assert load_csv(write(tmp_path, gzip.compress(path.read_bytes()), "trace.csv.gz")).workload == workload
    assert load_csv(write(tmp_path, b"\xef\xbb\xbf" + path.read_bytes())).workload == workload


def test_csv_times_count_from_the_first_row(tmp_path):
    workload, _ = load_csv(write(tmp_path, f"arrived_at,{HEADER}\n100.5,10,1\n100.5,20,2\n104.5,30,3\n"))
    assert times_of(workload) == [0.0, 0.0, 4.0]
    assert workload.requests_per_s == 0.5
    assert times_of(workload.with_rate(1.0)) == [0.0, 0.0, 2.0]
    assert workload.with_rate(0.5) == workload


def test_scale_comes_before_the_limit(tmp_path):
    path = write(tmp_path, f"{HEADER}\n800,9\n")
    assert lengths_of(load_csv(path, scale=1 / 8, max_total_tokens=102).workload) == [(100, 2)]
    with pytest.raises(ValueError, match="102 tokens in all are above max_total_tokens=101"):
        load_csv(path, scale=1 / 8, max_total_tokens=101)


BAD_CSV_ROWS = [
    ("1.0,0,10", "num_prefill_tokens=0"),
    ("1.0,10,0", "num_decode_tokens=0"),
    ("1.0,-1,10", "num_prefill_tokens=-1"),
    ("1.0,5,", "num_decode_tokens=''"),
    ("1.0,1000000000,1", "num_prefill_tokens=1000000000"),
    ("1.0,1e9,1", "num_prefill_tokens='1e9'"),
    ("1.0,10.0,1", "num_prefill_tokens='10.0'"),
    ("1.0,ten,1", "num_prefill_tokens='ten'"),
    ("1.0,1_0,1", "num_prefill_tokens='1_0'"),
    (f"1.0,{'9' * 5000},1", "num_prefill_tokens='999"),
    ("1.0,990,11", "1001 tokens in all are above max_total_tokens=1000"),
    ("0.25,10,1", "arrives at 0.25 s, before the last row used, at 0.5 s"),
    ("nan,10,1", "arrived_at_s=nan"),
    ("inf,10,1", "arrived_at_s=inf"),
    ("-1,10,1", "arrived_at_s=-1.0"),
    (",10,1", "arrived_at=''"),
    ("noon,10,1", "arrived_at='noon'"),
    ("", "is blank"),
    ("  ", "is blank"),
    ("1.0,10", "2 fields but 3 columns"),
    ("1.0,10,1,7", "4 fields but 3 columns"),
    ("1.0," + "9" * 200_000 + ",1", "is not CSV"),
    ("1.0,1\r0,1", "is not CSV"),
    (b"1.0,1\xff,1", "not UTF-8 at byte 5"),
    ("1.0,\x00,1", "num_prefill_tokens='\\x00'"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_CSV_ROWS, ids=[reason for _, reason in BAD_CSV_ROWS])
def test_a_bad_row_is_refused_or_left_out_by_its_line_and_rule(tmp_path, row, reason):
    """A request without input or output passes every check downstream and yields latencies that mean nothing."""
    row = row if isinstance(row, bytes) else row.encode()
    path = write(tmp_path, f"arrived_at,{HEADER}\n0.5,10,1\n".encode() + row + b"\n2.5,30,3\n")
    with pytest.raises(ValueError, match="line 3") as error:
        load_csv(path, max_total_tokens=1000)
    assert reason in str(error.value) and str(path) in str(error.value) and len(str(error.value)) < 500
    workload, report = load_csv(path, max_total_tokens=1000, on_bad_row="skip")
    assert lengths_of(workload) == [(10, 1), (30, 3)] and times_of(workload) == [0.0, 2.0]
    assert (report.num_rows, report.num_used) == (3, 2)
    [bad] = report.skipped
    assert bad.line == 3 and reason in bad.reason
    assert str(report) == f"2 of 3 rows used\nline 3: {bad.reason}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (f"{HEADER}\n", "no usable row"),
        (f"{HEADER}\n0,1\n1,0\n", "no usable row: 0 of 2 rows used"),
        ("num_prefill_tokens,output\n1,1\n", "line 1: 0 columns are named 'num_decode_tokens'"),
        (f"{HEADER},num_decode_tokens\n1,1,1\n", "line 1: 2 columns are named 'num_decode_tokens'"),
        ("10,1\n20,2\n", "line 1: 0 columns are named 'num_prefill_tokens'"),
        (f"\n{HEADER}\n1,1\n", "line 1: is blank"),
        (f"{HEADER}\n1,1\n".encode("utf-16"), "line 1: not UTF-8"),
        (gzip.compress(f"{HEADER}\n1,1\n".encode() * 500)[:-9], "not a whole gzip file"),
        (gzip.compress(f"{HEADER}\n1,1\n".encode())[:-6] + b"\x00" * 6, "not a whole gzip file"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 40, "not a whole gzip file"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_trace_is_refused_even_when_rows_may_be_skipped(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as error:
        load_csv(path, on_bad_row="skip")
    assert str(path) in str(error.value)


def test_bad_arguments_to_a_loader(tmp_path):
    path = write(tmp_path, f"{HEADER}\n1,1\n")
    bad = [
        {"scale": 0},
        {"scale": math.nan},
        {"max_total_tokens": 1},
        {"max_total_tokens": 8.0},
        {"on_bad_row": "clip"},
    ]
    for kwargs in bad:
        with pytest.raises(ValueError, match=f"^{next(iter(kwargs))}="):
            load_csv(path, **kwargs)
    with pytest.raises(FileNotFoundError):
        load_csv(tmp_path / "none.csv")


@given(st.binary(max_size=200))
def test_no_bytes_crash_a_loader(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    for data in (content, HEADER.encode() + b"\n" + content, b"[" + content, b'{"timestamp":' + content):
        path = write(folder, data, "anything")
        for load in (load_csv, load_mooncake, lambda path, **kwargs: load_sharegpt(path, Words(), **kwargs)):
            message = ""
            try:
                workload, report = load(path, on_bad_row="skip")
                assert report.num_used == len(workload) >= 1
            except ValueError as error:
                message = str(error)
            assert not message or str(path) in message


@given(st.lists(st.tuples(st.integers(-2, 40), st.integers(-2, 40)), min_size=1, max_size=30))
def test_rows_are_used_or_reported_and_never_lost(tmp_path_factory, rows):
    path = write(tmp_path_factory.getbasetemp(), "\n".join([HEADER, *(f"{p},{d}" for p, d in rows)]))
    good = [(p, d) for p, d in rows if p >= 1 and d >= 1 and p + d <= 60]
    bad = [line for line, (p, d) in enumerate(rows, 2) if (p, d) not in good]
    if not good:
        with pytest.raises(ValueError, match="no usable row"):
            load_csv(path, max_total_tokens=60, on_bad_row="skip")
        return
    workload, report = load_csv(path, max_total_tokens=60, on_bad_row="skip")
    assert lengths_of(workload) == good
    assert [row.line for row in report.skipped] == bad
    assert (report.num_rows, report.num_used) == (len(rows), len(good))


def mooncake(**change):
    row = {"timestamp": 2000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1], **change}
    return json.dumps({key: value for key, value in row.items() if value is not ...})


def test_mooncake_rows(tmp_path):
    path = write(tmp_path, "\n".join([mooncake(), mooncake(timestamp=2500, hash_ids=...), ""]), "trace.jsonl")
    workload, report = load_mooncake(path, scale=0.5)
    assert lengths_of(workload) == [(300, 2), (300, 2)] and times_of(workload) == [0.0, 0.5]
    assert [item.hash_ids for item in workload] == [(0, 1), None]
    assert (workload.requests_per_s, workload.hash_block_len, report.num_used) == (2.0, 256, 2)
    assert len(workload.token_ids(0, vocab_size=99, seed=0)) == 300


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (mooncake(timestamp=1999), "before the last row used"),
        (mooncake(timestamp=-1), "timestamp=-1"),
        (mooncake(timestamp=math.nan), "timestamp=nan"),
        (mooncake(timestamp="2000"), "timestamp='2000'"),
        (mooncake(timestamp=...), "lacks ['timestamp']"),
        (mooncake(input_length=0, hash_ids=...), "input_length=0"),
        (mooncake(input_length=600.0), "input_length=600.0"),
        (mooncake(input_length=True), "input_length=True"),
        (mooncake(input_length=None), "input_length=None"),
        (mooncake(input_length=10**9), "input_length=1000000000"),
        (mooncake(output_length=0), "output_length=0"),
        (mooncake(output_length=500), "1100 tokens in all"),
        (mooncake(hash_ids=[0]), "hash_ids=[0] must be a list of 2"),
        (mooncake(hash_ids=[0, 1, 2]), "must be a list of 2"),
        (mooncake(hash_ids=[0, "1"]), "hash_ids must be integers"),
        (mooncake(hash_ids=7), "hash_ids=7"),
        ("[1, 2]", "is not a JSON object"),
        ("", "is blank"),
        ('{"timestamp": 2000', "is not JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "is not JSON"),
        ("[" * 100_000, "is JSON nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_bad_mooncake_rows(tmp_path, row, reason):
    path = write(tmp_path, "\n".join([mooncake(), row, mooncake()]), "trace.jsonl")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2: ") as error:
        load_mooncake(path, max_total_tokens=1000)
    assert reason in str(error.value)
    workload, report = load_mooncake(path, max_total_tokens=1000, on_bad_row="skip")
    assert len(workload) == 2
    assert [row.line for row in report.skipped] == [2] and reason in report.skipped[0].reason


class Words:
    """A token a word, behind a BOS."""

    def encode(self, text, /):
        text.encode()  # lone surrogates are no text
        return [1, *(len(word) for word in text.split())]


def turn(speaker, value):
    return {"from": speaker, "value": value}


def test_sharegpt_takes_the_first_exchange(tmp_path):
    conversations = [
        {"id": "a", "conversations": [turn("human", "how are you"), turn("gpt", "well thanks"), turn("human", "x")]},
        {"conversations": [turn("system", "be brief"), turn("user", "hi"), turn("assistant", "hello to you")]},
    ]
    workload, report = load_sharegpt(write(tmp_path, json.dumps(conversations), "chat.json"), Words())
    assert [item.prompt_token_ids for item in workload] == [(1, 3, 3, 3), (1, 2)]
    assert lengths_of(workload) == [(4, 2), (2, 3)], "the prompt has its BOS, an output has none"
    assert report.num_used == 2 and workload.requests_per_s is None
    assert workload.token_ids(0, vocab_size=10, seed=0) == (1, 3, 3, 3)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"conversations": [turn("human", "a"), turn("gpt", "")]}, "num_decode_tokens=0"),
        ({"conversations": [turn("human", "a"), turn("human", "b")]}, "right behind"),
        ({"conversations": [turn("gpt", "a")]}, "right behind"),
        ({"conversations": [turn("gpt", "a"), turn("human", "b")]}, "right behind"),
        ({"conversations": []}, "right behind"),
        ({"conversations": None}, 'a list "conversations"'),
        ({}, 'a list "conversations"'),
        ([], 'a list "conversations"'),
        ({"conversations": [turn("human", None), turn("gpt", "a")]}, 'a text "value"'),
        ({"conversations": [turn("human", "a \ud800"), turn("gpt", "a")]}, "surrogates"),
        ({"conversations": [turn("human", "a " * 20), turn("gpt", "a")]}, "22 tokens in all"),
    ],
)
def test_bad_conversations(tmp_path, entry, reason):
    good = {"conversations": [turn("human", "a"), turn("gpt", "b")]}
    path = write(tmp_path, json.dumps([good, entry, good], indent=0).replace("\n", ""), "chat.json")
    with pytest.raises(ValueError, match=r"chat\.json, line 1: ") as error:
        load_sharegpt(path, Words(), max_total_tokens=20)
    assert reason in str(error.value)
    workload, report = load_sharegpt(path, Words(), max_total_tokens=20, on_bad_row="skip")
    assert len(workload) == 2
    assert len(report.skipped) == 1 and reason in report.skipped[0].reason


def test_bad_conversations_are_named_by_line_and_number(tmp_path):
    good = json.dumps({"conversations": [turn("human", "a"), turn("gpt", "b")]})
    path = write(tmp_path, f"[\n{good},\n{good}\n,\n\n {{}}, {{}},\n{good}]\n\n", "chat.json")
    _, report = load_sharegpt(path, Words(), on_bad_row="skip")
    reason = 'must be an object with a list "conversations"'
    assert report.skipped == (
        BadRow(line=6, reason=f"conversation 3: {reason}"), BadRow(line=6, reason=f"conversation 4: {reason}"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("[]", "no usable row"),
        ("{}", "must hold a JSON list"),
        ('[\n{"conversations": [', "line 2: is not JSON"),
        ("[\n{}\n", "line 3: ',' or '\\]' expected; is the file cut off"),
        ("[\n{},\n]", "line 3: is not JSON"),
        ("[{}]\n[{}]", "more behind the end"),
        ("[" * 100_000, "nested too deeply"),
        (b'[\n\n"\xff"]', "line 3: not UTF-8"),
    ],
)
def test_files_that_hold_no_conversations(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        load_sharegpt(write(tmp_path, content, "chat.json"), Words(), on_bad_row="skip")


@needs_traces
@pytest.mark.parametrize(
    ("load", "name", "num_rows", "requests_per_s", "gap_cv"),
    [
        (load_csv, "sharegpt_8k.csv", 30731, None, None),
        (load_csv, "azure_code_2023.csv", 8819, 2.57, 13.2),
        (load_csv, "azure_conv_2023.csv", 19366, 5.53, 1.09),
        (load_mooncake, "mooncake_synthetic.jsonl.gz", 3993, 3.91, 1.01),
    ],
)
def test_public_traces_load_whole(load, name, num_rows, requests_per_s, gap_cv):
    workload, report = load(TRACES / name)
    statistics = workload.statistics()
    assert (report.num_rows, report.num_used, len(workload)) == (num_rows, num_rows, num_rows)
    for measured, expected in ((statistics.requests_per_s, requests_per_s), (statistics.gap_cv, gap_cv)):
        assert measured is None if expected is None else measured == pytest.approx(expected, rel=0.005)
