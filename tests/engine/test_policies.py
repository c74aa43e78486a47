"""Every policy on the real step: the same tokens for the same requests, and nothing compiled or left behind."""

from __future__ import annotations

import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax.engine import Engine

POLICIES = {
    "sarathi": lambda: sj.Sarathi(token_budget=32, max_num_seqs=4),
    "one prompt no more than 8": lambda: sj.Sarathi(token_budget=32, max_num_seqs=4, long_prefill_token_threshold=8),
    "time budget": lambda: sj.Sarathi(
        token_budget=32, max_num_seqs=4, time_budget_s=0.03, cost=lambda d, c: 1e-3 * (len(d) + sum(n for _, n in c))
    ),
    "priorities": lambda: sj.Sarathi(token_budget=32, max_num_seqs=4, priority_preemption=True),
    "vllm": lambda: sj.VLLM(max_num_seqs=4, max_batched_tokens=96),
    "orca": lambda: sj.Orca(max_num_seqs=4, max_batched_tokens=128),
    "faster_transformer": lambda: sj.FasterTransformer(max_num_seqs=4, max_batched_tokens=128),
    "chunked_only": lambda: sj.ChunkedOnly(token_budget=32, max_num_seqs=4),
    "hybrid_only": lambda: sj.HybridOnly(token_budget=32, max_num_seqs=4),
}


def requests() -> list[tuple[list[int], sj.SamplingParams]]:
    rng = np.random.default_rng(7)
    return [
        (
            rng.integers(1, 260, size=int(rng.integers(1, 60))).tolist(),
            sj.SamplingParams(temperature=float(i % 2), seed=i, max_tokens=int(rng.integers(1, 20))),
        )
        for i in range(14)
    ]


@pytest.fixture(scope="module", params=[0, 1], ids=["read first", "lookahead"])
def engine(tiny_model, request) -> Engine:
    engine = Engine(
        tiny_model, None, scheduler=POLICIES["orca"](), max_model_len=96, lookahead=request.param,
        cache=sj.CacheConfig(num_pages=30, page_size=8),
    )  # fmt: skip
    engine.warm_up(compile_cache=False)
    return engine


@pytest.fixture(scope="module")
def expected(engine) -> list[list[int]]:
    """One at a time: no batch mates."""
    return [run(engine, [one])[0] for one in requests()]


def run(engine: Engine, asked) -> list[list[int]]:
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), prompt_token_ids=prompt, params=params, priority=i % 3)
    tokens = {}
    while engine.has_unfinished():
        tokens.update({output.request_id: output.token_ids for output in engine.step()})
        engine.check_integrity()
    engine.drain()
    assert engine.pool.num_held == 0
    return [tokens[str(i)] for i in range(len(asked))]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_same_tokens(engine, expected, name):
    before = engine.runner.num_compiled
    engine.set_scheduler(POLICIES[name]())
    assert run(engine, requests()) == expected
    assert engine.runner.num_compiled == before
