"""Log-probabilities of outputs and prompts, and what min_tokens holds back: on the tiny model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sarathi_jax.request import SamplingParams


def ask(engine, name, prompt, **params):
    engine.add_request(name, prompt_token_ids=prompt, params=SamplingParams(**params))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(3).integers(0, 256, 50).tolist()


def test_logprobs_list_the_chosen_token_and_sum_to_at_most_one(make_engine, drain, prompt):
    """Raw mode: independent of temperature, filters and penalties (P17)."""
    engine = make_engine()
    ask(engine, "cold", prompt, temperature=0.2, seed=1, max_tokens=6, logprobs=5)
    ask(engine, "hot", prompt, temperature=2.0, seed=2, top_p=0.9, max_tokens=6, logprobs=20, logit_bias={3: 50.0})
    ask(engine, "none", prompt, temperature=1.0, seed=3, max_tokens=6, logprobs=0)
    ask(engine, "off", prompt, temperature=1.0, seed=3, max_tokens=6)
    final = drain(engine).final
    assert final["off"].logprobs is None
    for name, k in (("cold", 5), ("hot", 20), ("none", 0)):
        output = final[name]
        for token, candidates in zip(output.token_ids, output.logprobs, strict=True):
            assert token in candidates
            assert len(candidates) in (k, k + 1)
            ranked = [c for c in candidates.values() if c.rank is not None]
            assert [c.rank for c in ranked] == list(range(1, k + 1))
            assert [c.logprob for c in ranked] == sorted((c.logprob for c in ranked), reverse=True)
            assert all(math.isfinite(c.logprob) and c.logprob <= 1e-5 for c in candidates.values())
            assert sum(math.exp(c.logprob) for c in candidates.values()) <= 1 + 1e-5
            for other, c in candidates.items():
                assert c.decoded_token == engine.tokenizer.decode([other], skip_special_tokens=False)
    cold, hot = final["cold"].logprobs[0], final["hot"].logprobs[0]
    assert final["hot"].token_ids[0] == 3, "the bias decides"
    assert [hot[t].logprob for t in list(cold)[:5]] == pytest.approx(
        [c.logprob for c in list(cold.values())[:5]], abs=1e-4
    )
    assert final["none"].token_ids == final["off"].token_ids


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prompt_logprobs_are_the_same_in_chunks_and_whole(make_engine, drain, prompt, lookahead):
    """An entry for each prompt token, only the first empty (C08), though a rival takes part of some steps."""

    def run(budget, rivals=0, num_pages=192):
        engine = make_engine(budget=budget, lookahead=lookahead, num_pages=num_pages)
        for i in range(rivals):
            ask(engine, f"rival{i}", [i, 5, 9], max_tokens=30, seed=i)
        add = lambda: ask(engine, "r", prompt, temperature=0.0, max_tokens=4, prompt_logprobs=3)
        if not rivals:
            add()
        log = drain(engine, before_step=lambda i: add() if rivals and i == 3 else None)
        assert all(event.prompt_logprobs[1] is not None for event in log.events["r"]), (
            "it is there with the first token"
        )
        return log

    whole = run(64).final["r"].prompt_logprobs
    assert whole[0] is None
    assert len(whole) == len(prompt)
    for token, candidates in zip(prompt[1:], whole[1:], strict=True):
        assert token in candidates
        assert sum(math.exp(c.logprob) for c in candidates.values()) <= 1 + 1e-5
    for log in (run(16), run(16, rivals=5), run(64, rivals=5)):
        chunked = log.final["r"].prompt_logprobs
        assert chunked[0] is None
        for a, b in zip(whole[1:], chunked[1:], strict=True):
            assert list(a) == list(b)
            assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


def test_a_prompt_of_one_token_has_one_empty_entry(make_engine, drain):
    engine = make_engine()
    ask(engine, "r", [5], max_tokens=2, prompt_logprobs=2, temperature=0.0)
    assert drain(engine).final["r"].prompt_logprobs == [None]


def test_prompt_logprobs_agree_with_logprobs(make_engine, drain, prompt):
    """What a token was given when it was generated, it is given as part of a prompt."""
    engine = make_engine()
    ask(engine, "first", prompt, temperature=0.0, max_tokens=8, logprobs=4)
    first = drain(engine).final["first"]
    ask(engine, "again", [*prompt, *first.token_ids], temperature=0.0, max_tokens=1, prompt_logprobs=4)
    again = drain(engine).final["again"].prompt_logprobs[len(prompt) :]
    for a, b in zip(first.logprobs, again, strict=True):
        assert list(a) == list(b)
        assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


def test_min_tokens_holds_back_every_eos_and_stop_id(make_engine, drain, prompt):
    """Two EOS ids and an own stop id, all pushed by a bias: none of them before the fourth token (P12)."""
    bias = {256: 60.0, 257: 50.0, 33: 40.0}
    engine = make_engine(eos_token_ids=(256, 257))
    ask(engine, "held", prompt, temperature=0.0, max_tokens=9, min_tokens=3, stop_token_ids=[33], logit_bias=bias)
    ask(engine, "free", prompt, temperature=0.0, max_tokens=9, stop_token_ids=[33], logit_bias=bias)
    final = drain(engine).final
    assert final["free"].token_ids == [256]
    assert len(final["held"].token_ids) == 4
    assert not {256, 257, 33} & {*final["held"].token_ids[:3]}
    assert final["held"].token_ids[3] == 256
