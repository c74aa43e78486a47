"""SamplingParams: every value outside its range is refused by name; nothing is rounded, clamped or lost on the way."""

import copy
import dataclasses
import math
import pickle
import re

import pytest

from sarathi_jax.request import MAX_LOGPROBS, Chunk, Request, SamplingParams, Sequence, StepPlan

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = (NAN, INF, -INF, True, "1", None, [1.0], 1j)
NOT_INTEGERS = (NAN, INF, True, False, "1", 1.0, 1.5, [1])

GOOD = {
    "n": (1, 2, 1024),
    "temperature": (0, 0.0, 1e-7, 1.0, 2, 1e4),
    "top_p": (1e-9, 0.5, 1, 1.0),
    "top_k": (-1, 0, 1, 49151, 49152, 49153, 10**7, 2**31 - 1),
    "min_p": (0, 0.0, 0.5, 1.0),
    "presence_penalty": (-2, 0.0, 2.0),
    "frequency_penalty": (-2.0, 0, 2),
    "repetition_penalty": (1e-3, 0.5, 1, 1e3),
    "seed": (None, 0, -1, 2**63 - 1, -(2**63)),
    "max_tokens": (None, 1, 2**31 - 1),
    "min_tokens": (0, 16),
    "logprobs": (None, 0, 1, MAX_LOGPROBS),
    "prompt_logprobs": (None, 0, MAX_LOGPROBS),
}
BAD = {
    "n": (0, -1, 1025, 10**9, None, *NOT_INTEGERS),
    "temperature": (-1, -1e-9, 999999, *NOT_NUMBERS),
    "top_p": (0, 0.0, -1, -0.1, 1.0001, 2, *NOT_NUMBERS),
    "top_k": (-2, 2**31, None, *NOT_INTEGERS),
    "min_p": (-0.1, 1.1, 2, *NOT_NUMBERS),
    "presence_penalty": (-2.1, 2.1, *NOT_NUMBERS),
    "frequency_penalty": (-2.1, 2.1, *NOT_NUMBERS),
    "repetition_penalty": (0, -1, 1e-4, 1001, *NOT_NUMBERS),
    "seed": (2**63, -(2**63) - 1, 2**70, *NOT_INTEGERS),
    "max_tokens": (0, -1, 10**12, *NOT_INTEGERS),
    "min_tokens": (-1, 17, 2**31, None, *NOT_INTEGERS),
    "logprobs": (-1, MAX_LOGPROBS + 1, 10**9, *NOT_INTEGERS),
    "prompt_logprobs": (-1, MAX_LOGPROBS + 1, *NOT_INTEGERS),
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r:.12}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_the_edges_of_each_range_are_in(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_what_is_outside_is_refused_with_name_and_value(name, value):
    shown = "0" if name == "top_p" and value == 0 else repr(value)
    with pytest.raises(ValueError, match=f"^{name}={re.escape(shown)} "):
        SamplingParams(**{name: value})


def test_the_tables_cover_every_number():
    numbers = {f.name for f in dataclasses.fields(SamplingParams)} - {
        *("logit_bias", "stop", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    }
    assert numbers == set(GOOD) == set(BAD)


def test_min_tokens_cannot_exceed_max_tokens():
    with pytest.raises(ValueError, match=r"min_tokens=5 .*max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_unknown_names_raise():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=0.5)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {"7": 1.0}, {"abc": 1.0}, {1.0: 1.0}, {True: 1.0}, {2**31: 1.0}])
def test_a_bias_on_what_is_no_token_id_is_refused(bias):
    with pytest.raises(ValueError, match="logit_bias key="):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("value", [100.1, -100.1, *NOT_NUMBERS])
def test_a_bias_out_of_range_names_its_token(value):
    with pytest.raises(ValueError, match=r"logit_bias\[7\]="):
        SamplingParams(logit_bias={7: value})


def test_bias_is_copied_as_floats():
    bias = {7: 100, 0: -100}
    params = SamplingParams(logit_bias=bias)
    bias[8] = 1
    assert params.logit_bias == {7: 100.0, 0: -100.0}
    assert all(type(value) is float for value in params.logit_bias.values())
    assert SamplingParams().logit_bias is None


@pytest.mark.parametrize(
    ("stop", "want"), [((), ()), ("end", ("end",)), (["a", "b"], ("a", "b")), (("é",), ("é",)), (" ", (" ",))]
)
def test_stop_strings_become_a_tuple(stop, want):
    assert SamplingParams(stop=stop).stop == want


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], [None], [b"a"]])
def test_stop_strings_must_say_something(stop):
    with pytest.raises(ValueError, match="stop="):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("token", [-1, 2**31, *NOT_INTEGERS, None])
def test_stop_token_ids_are_ids(token):
    with pytest.raises(ValueError, match="stop_token_ids entry="):
        SamplingParams(stop_token_ids=[2, token])


def test_frozen_and_the_same_after_a_process_border():
    params = SamplingParams(
        min_tokens=3, stop_token_ids=[2, 5], stop="x", logit_bias={5: -1}, seed=7, temperature=0.3, max_tokens=None
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.min_tokens = 0
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert dataclasses.replace(params, seed=8).stop_token_ids == (2, 5)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 16)
    assert not params.is_greedy
    assert not params.has_penalties
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=math.ulp(0.0)).is_greedy


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": -0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}]
)
def test_each_penalty_counts(penalty):
    assert SamplingParams(**penalty).has_penalties


# What is planned with them


def make_sequence(prompt_len=5, max_total_tokens=8, **fields):
    request = Request(
        request_id="r", prompt_token_ids=tuple(range(prompt_len)), params=SamplingParams(), arrival_time_s=0.0
    )
    return Sequence(request=request, seq_id=0, max_total_tokens=max_total_tokens, **fields)


@pytest.mark.parametrize(
    ("start", "stop", "want"),
    [
        (0, 5, [0, 1, 2, 3, 4]),
        (2, 4, [2, 3]),
        (4, 6, [4, 50]),
        (5, 7, [50, 51]),
        (6, 7, [51]),
        (6, 9, [51]),
        (7, 8, []),
    ],
)
def test_token_ids_across_prompt_and_outputs(start, stop, want):
    seq = make_sequence(output_token_ids=[50, 51], num_pending=1)
    assert seq.token_ids(start, stop) == want


def test_counts_of_a_sequence():
    seq = make_sequence(num_computed=3)
    assert seq.prompt_len == 5
    assert (seq.num_tokens, seq.num_uncomputed, seq.is_decoding, seq.at_limit) == (5, 2, False, False)
    seq.num_computed = 4
    assert not seq.is_decoding, "the last token of a prompt is no decode"
    seq = make_sequence(num_computed=5, num_pending=1)
    assert (seq.num_tokens, seq.is_decoding, seq.at_limit) == (6, True, False)
    seq = make_sequence(num_computed=7, num_pending=1, output_token_ids=[9, 9])
    assert (seq.num_tokens, seq.is_decoding, seq.at_limit) == (8, True, True)
    seq.output_token_ids.append(9)
    seq.num_pending -= 1
    assert seq.num_tokens == 8, "reading a token adds none"
    seq = make_sequence(num_pending=2, output_token_ids=[9])
    seq.drop_pending()
    assert (seq.num_tokens, seq.num_pending) == (6, 0)


def test_sequences_are_told_apart_by_identity():
    a, b = make_sequence(), make_sequence()
    assert a != b
    assert len({a, b}) == 2


def test_counts_of_a_plan():
    seq = make_sequence()
    plan = StepPlan(chunks=(Chunk(seq, 7, 1, True), Chunk(seq, 2, 3, False)))
    assert plan
    assert (plan.num_tokens, plan.num_decode_tokens, plan.num_prefill_tokens) == (4, 1, 3)
    assert [c.end for c in plan.chunks] == [8, 5]
    assert not StepPlan()
