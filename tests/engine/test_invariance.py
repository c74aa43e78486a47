"""Tokens do not depend on budget, chunking, company, preemption, look-ahead, or the order of arrival."""

from __future__ import annotations

import numpy as np
import pytest

from sarathi_jax.request import SamplingParams

NUM_REQUESTS = 16


def workload() -> dict[str, tuple[list[int], SamplingParams]]:
    """Sixteen requests, lengths around the page size, the tile and beyond the smaller budgets."""
    rng = np.random.default_rng(5)
    lengths = [1, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 48, 55, 63, 65, 70]
    requests = {}
    for i, length in enumerate(lengths):
        prompt = rng.integers(0, 256, length).tolist()
        shared = {"max_tokens": 10 + i, "logprobs": 2}
        kinds = [
            SamplingParams(temperature=0.0, **shared),
            SamplingParams(temperature=1.0, seed=100 + i, **shared),
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=i, **shared),
            SamplingParams(
                temperature=0.9, seed=-i, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2,
                logit_bias={5: 2.0}, min_tokens=3, stop_token_ids=[200], **shared
            ),
        ]  # fmt: skip
        requests[f"r{i}"] = prompt, kinds[i % len(kinds)]
    return requests


REQUESTS = workload()


def submit(engine, names):
    for name in names:
        prompt, params = REQUESTS[name]
        engine.add_request(name, prompt_token_ids=prompt, params=params)


@pytest.fixture(scope="module")
def alone(make_engine, drain):
    """Each request by itself, its prompt in one chunk: what all others are judged by."""
    engine = make_engine(budget=256)
    tokens = {}
    for name in REQUESTS:
        submit(engine, [name])
        final = drain(engine).final[name]
        tokens[name] = [final.token_ids]
        if REQUESTS[name][1].is_greedy:
            gaps = [first.logprob - second.logprob for first, second in (list(t.values())[:2] for t in final.logprobs)]
            assert min(gaps) > 1e-3, f"{name}: two tokens too close for a fair comparison; choose another prompt"
    lengths = [len(ids) for (ids,) in tokens.values()]
    assert sum(lengths) > 200
    assert len({tuple(ids) for (ids,) in tokens.values()}) == NUM_REQUESTS
    return tokens


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [16, 64, 256])
def test_tokens_do_not_depend_on_budget_company_or_lookahead(make_engine, drain, alone, budget, lookahead):
    engine = make_engine(budget=budget, lookahead=lookahead)
    submit(engine, REQUESTS)
    log = drain(engine)
    assert log.num_preempted == 0
    assert log.token_ids() == alone


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [16, 64])
def test_tokens_survive_preemption(make_engine, drain, alone, budget, lookahead):
    """Recomputed prompts and outputs give the same next token, and penalties still count what was output before."""
    engine = make_engine(budget=budget, lookahead=lookahead, num_pages=20)
    submit(engine, REQUESTS)
    log = drain(engine)
    preempted = {name for name, output in log.final.items() if output.metrics.num_preemptions}
    kinds = {REQUESTS[name][1].has_penalties for name in preempted}
    assert log.num_preempted >= 5, "the pool is not small enough to test anything"
    assert kinds == {False, True}, f"preempt a request with penalties and one without, not {preempted}"
    assert any(REQUESTS[name][1].is_greedy for name in preempted)
    assert log.token_ids() == alone


@pytest.mark.parametrize("order", ["reversed", "shuffled", "staggered"])
def test_tokens_do_not_depend_on_the_order_of_arrival(make_engine, drain, alone, order):
    engine = make_engine(budget=64, lookahead=1)
    names = list(REQUESTS)
    if order == "staggered":  # every second step another one: prefills run beside decodes all the time
        late = names[1:]
        submit(engine, names[:1])
        log = drain(engine, before_step=lambda i: submit(engine, [late.pop(0)]) if late and i % 2 else None)
        assert not late
    else:
        names = names[::-1] if order == "reversed" else np.random.default_rng(0).permutation(names).tolist()
        submit(engine, names)
        log = drain(engine)
    assert log.token_ids() == alone


def test_greedy_text_is_the_same_from_a_seeded_neighbour_or_an_unseeded_one(make_engine, drain, alone):
    """An unseeded, random batch mate must not shift a seeded request's draws."""
    engine = make_engine(budget=64)
    for i in range(5):
        engine.add_request(f"noise{i}", prompt_token_ids=[i, 9], params=SamplingParams(max_tokens=40))
        submit(engine, [f"r{i}"])
    tokens = drain(engine).token_ids()
    assert {name: tokens[name] for name in REQUESTS if name in tokens} == {f"r{i}": alone[f"r{i}"] for i in range(5)}


def test_samples_of_one_request(make_engine, drain):
    """n samples are distinct, reproducible, and the first is the request with n=1."""
    prompt = REQUESTS["r9"][0]

    def run(n, **options):
        engine = make_engine(**options)
        params = SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=12)
        engine.add_request("x", prompt_token_ids=prompt, params=params)
        return drain(engine).token_ids()["x"]

    (single,) = run(1)
    four = run(4)
    assert four[0] == single
    assert len(set(map(tuple, four))) == 4
    assert run(4, budget=16, lookahead=1, num_pages=20) == four
    assert run(2) == four[:2]


def test_unseeded_requests_differ(make_engine, drain):
    engine = make_engine()
    for name in "abc":
        engine.add_request(name, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=12))
    tokens = drain(engine).token_ids()
    assert len({tuple(ids) for (ids,) in tokens.values()}) == 3


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_run_repeats_bit_for_bit(make_engine, drain, lookahead):
    def run():
        engine = make_engine(budget=16, lookahead=lookahead, num_pages=20, seed=7)
        submit(engine, list(REQUESTS)[:8])
        engine.add_request("unseeded", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=12, logprobs=3))
        return {name: (o.token_ids, o.logprobs) for name, o in drain(engine).final.items()}

    assert run() == run()
