"""A step that raises: nobody hangs, nothing is lost, and the same tokens come."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax.engine import Engine

PARAMS = {
    "greedy": sj.SamplingParams(temperature=0, max_tokens=9, logprobs=1, prompt_logprobs=2),
    "seeded": sj.SamplingParams(seed=np.int64(2**62 + 1), max_tokens=12, n=2),
    "penalised": sj.SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.5, min_tokens=3),
}
PROMPTS = {"greedy": list(range(1, 41)), "seeded": [7, 8, 9], "penalised": list(range(50, 75))}


class Fault(BaseException):
    """As Ctrl-C: no handler of ordinary errors may swallow it."""


def new_engine(model, lookahead: int) -> Engine:
    return Engine(
        model, None, scheduler=sj.Sarathi(token_budget=32, max_num_seqs=4), max_model_len=96, lookahead=lookahead,
        cache=sj.CacheConfig(num_pages=24, page_size=8),
    )  # fmt: skip


def run(engine: Engine, on_step=lambda i: None) -> dict[str, list]:
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt_token_ids=prompt, params=PARAMS[name])
    final = {}
    for i in range(200):
        if not engine.has_unfinished():
            break
        on_step(i)
        try:
            outputs = engine.step()
        except Fault:
            outputs = []
        engine.check_integrity()
        final.update({output.request_id: output for output in outputs if output.finished})
    engine.drain()
    assert engine.pool.num_held == 0
    return {name: [(o.token_ids, o.finish_reason, o.logprobs) for o in final[name].outputs] for name in PROMPTS}


@pytest.fixture(scope="module", params=[0, 1], ids=["read first", "lookahead"])
def engine_and_answers(tiny_model, request):
    engine = new_engine(tiny_model, request.param)
    engine.warm_up(compile_cache=False)
    return engine, run(engine)


def same(answers: dict, expected: dict) -> None:
    for name, generations in expected.items():
        for got, wanted in zip(answers[name], generations, strict=True):
            assert got[:2] == wanted[:2], name
            assert (got[2] is None) == (wanted[2] is None)


@pytest.mark.parametrize("where", ["plan", "execute", "read", "update", "lost pool"])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9])
def test_the_same_tokens_come_after_a_fault(engine_and_answers, monkeypatch, where, step):
    engine, expected = engine_and_answers
    fired = []

    def fault(*_, **__):
        fired.append(where)
        raise Fault

    def on_step(i):
        if i == step + 1:
            monkeypatch.undo()
        if i != step:
            return
        if where == "plan":  # after it has committed pages and tokens
            plan_prompts = engine.scheduler._plan_prompts
            monkeypatch.setattr(engine.scheduler, "_plan_prompts", lambda *args: (plan_prompts(*args), fault()))
        elif where == "execute":
            monkeypatch.setattr(engine.runner.builder, "build", fault)
        elif where == "read":
            monkeypatch.setattr("sarathi_jax.runner.DeviceStep.read", fault)
        elif where == "update":
            monkeypatch.setattr("sarathi_jax.generation.Generation.add_token", fault)
        else:  # dispatched, and interrupted before the new pool was stored

            def lose(num_rows, batch):
                jax.block_until_ready(engine.runner._compiled[num_rows](
                    engine.runner._leaves, engine.runner.kv, engine.runner._state, batch
                ))  # fmt: skip
                fault()

            monkeypatch.setattr(engine.runner, "_run", lose)

    answers = run(engine, on_step)
    assert fired or where in ("read", "update"), "the fault did not happen"
    same(answers, expected)
    assert engine.runner.num_compiled == len(engine.runner.shapes.num_tokens) + 1


def test_a_fault_of_one_requests_text_ends_that_one_only(engine_and_answers, monkeypatch):
    engine, expected = engine_and_answers
    from sarathi_jax.generation import Generation

    add_token = Generation.add_token

    def fail_for_greedy(self, *args, **kwargs):
        if self.seq.request.request_id == "greedy":
            raise RuntimeError("no such character")
        add_token(self, *args, **kwargs)

    monkeypatch.setattr(Generation, "add_token", fail_for_greedy)
    for name in ("greedy", "seeded"):
        engine.add_request(name, prompt_token_ids=PROMPTS[name], params=PARAMS[name])
    final = {}
    while engine.has_unfinished():
        final.update({o.request_id: o for o in engine.step() if o.finished})
        engine.check_integrity()
    assert final["greedy"].finish_reason == "abort"
    assert final["greedy"].stop_reason == "RuntimeError: no such character"
    assert [o.token_ids for o in final["seeded"].outputs] == [tokens for tokens, *_ in expected["seeded"]]


def test_outputs_put_back_come_with_the_next_step(engine_and_answers):
    engine, _ = engine_and_answers
    engine.add_request("a", prompt_token_ids=[1, 2], params=sj.SamplingParams(temperature=0, max_tokens=1))
    outputs = []
    while not outputs:
        outputs = engine.step()
    assert not engine.has_unfinished()
    engine.put_back(outputs)
    assert engine.has_unfinished()
    assert engine.step() == outputs
    assert not engine.has_unfinished()


def test_an_output_does_not_change_after_it_was_given(engine_and_answers):
    engine, _ = engine_and_answers
    engine.add_request("a", prompt_token_ids=[1, 2, 3], params=PARAMS["greedy"])
    seen = []
    while engine.has_unfinished():
        seen += engine.step()
    for i, output in enumerate(seen):
        assert len(output.token_ids) == len(output.metrics.token_s) == len(output.logprobs or ()) == i + 1
    seen[0].metrics.token_s.clear()
    assert len(seen[-1].metrics.token_s) == 9


def test_a_bfloat16_cache_under_float32_weights(tiny_model):
    engine = Engine(
        tiny_model, None, scheduler=sj.Sarathi(token_budget=32, max_num_seqs=4), max_model_len=96,
        cache=sj.CacheConfig(num_pages=24, page_size=8, dtype="bfloat16"),
    )  # fmt: skip
    assert engine.runner.kv.k.dtype == "bfloat16"
    engine.add_request("a", prompt_token_ids=PROMPTS["greedy"], params=PARAMS["greedy"])
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert len(outputs[-1].token_ids) == 9
