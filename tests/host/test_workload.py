"""Workloads: right rates, lengths and ids, the same for the same seed, and files that say what is wrong with them."""

import dataclasses
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
from sarathi_jax.workload_files import load_csv
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
