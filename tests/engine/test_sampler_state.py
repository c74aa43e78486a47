"""The sampler's state: bias, penalties and min_tokens token by token; log probabilities; its helpers on the host."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sarathi_jax import sampler
from sarathi_jax.request import SamplingParams

from .test_sampler import NUM_SLOTS, V, filled_state, jitted, make_rows, random_logits, run


def reference_logits(logits, row: dict, prompt, output, bias: dict, stop) -> np.ndarray:
    """Token by token, from the token lists."""
    x = np.asarray(logits, np.float64).copy()
    for token, value in bias.items():
        x[token] += value
    if row.get("suppress_stop"):
        x[list(stop)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / row["repetition"] if x[token] > 0 else x[token] * row["repetition"]
    for token in output:
        x[token] -= row["frequency"]
    for token in set(output):
        x[token] -= row["presence"]
    return x


def test_penalties_follow_the_whole_prompt_and_output():
    """A hundred greedy steps of six slots: every token is the argmax of the reference's logits."""
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=0.4),
        SamplingParams(frequency_penalty=-0.1, presence_penalty=-1.0, repetition_penalty=1.9),
        SamplingParams(repetition_penalty=0.8, logit_bias={5: 3.0, 6: -100.0}),
        SamplingParams(),
    ]
    prompts = [[7, 7, 7, i] for i in range(6)]
    write = jax.jit(sampler.write_slot)
    state = sampler.init_slot_state(NUM_SLOTS, V)
    for slot, (p, prompt) in enumerate(zip(params, prompts, strict=True)):
        if sampler.needs_state(p):
            state = write(state, np.int32(slot), *sampler.slot_rows(p, prompt, [], [], V))
    outputs: list[list[int]] = [[] for _ in params]
    for step in range(100):
        logits = random_logits(1000 + step, (6, V))
        logits[:, 7] += 4
        rows = [
            {
                "temperature": 0.0,
                "repetition": p.repetition_penalty,
                "presence": p.presence_penalty,
                "frequency": p.frequency_penalty,
                "use_state": sampler.needs_state(p),
                "slot": slot,
            }
            for slot, p in enumerate(params)
        ]
        tokens, *_, state = jitted(logits, make_rows(rows), state)
        for r, token in enumerate(np.asarray(tokens)):
            expected = reference_logits(logits[r], rows[r], prompts[r], outputs[r], params[r].logit_bias or {}, ())
            assert expected.max() - expected[token] < 1e-4, (step, r)
            outputs[r].append(int(token))
    assert outputs[1].count(7) < outputs[5].count(7)
    np.testing.assert_array_equal(np.asarray(state.counts)[5], 0)  # a slot that asked for nothing is not counted
    np.testing.assert_array_equal(np.asarray(state.counts)[0], np.bincount(outputs[0], minlength=V))
    np.testing.assert_array_equal(np.asarray(state.last_token)[:6], [o[-1] for o in outputs])


def test_a_resumed_slot_continues_as_if_never_left():
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={2: 1.0})
    rows = [{"temperature": 0.0, "repetition": 1.4, "frequency": 0.3, "use_state": True, "slot": 4}]
    state = sampler.write_slot(
        sampler.init_slot_state(NUM_SLOTS, V), np.int32(4), *sampler.slot_rows(params, [1, 2], [], [], V)
    )
    output = []
    for step in range(10):
        tokens, *_, state = run(random_logits(step, (1, V)), rows, state)
        output.append(int(tokens[0]))
    fresh = sampler.write_slot(
        sampler.init_slot_state(NUM_SLOTS, V), np.int32(4), *sampler.slot_rows(params, [1, 2], output, [], V)
    )
    for name in ("counts", "in_prompt", "is_stop", "bias"):
        np.testing.assert_array_equal(np.asarray(getattr(state, name))[4], np.asarray(getattr(fresh, name))[4])


def test_penalties_come_before_temperature_and_filters():
    logits = np.zeros(V, np.float32)
    logits[:3] = [4.0, 3.0, 2.0]
    params = SamplingParams(logit_bias={0: -100.0}, repetition_penalty=4.0)
    state = sampler.write_slot(
        sampler.init_slot_state(NUM_SLOTS, V), np.int32(0), *sampler.slot_rows(params, [1], [], [], V)
    )
    row = {"use_state": True, "slot": 0, "repetition": 4.0, "top_k": 2}
    tokens = run(np.tile(logits, (256, 1)), [{**row, "position": i} for i in range(256)], state)[0]
    assert set(tokens) == {1, 2}  # 0 is biased away, 1 is at 0.75, 2 at 2
    assert (tokens == 2).mean() > 0.65


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_every_stop_id_and_no_longer(temperature):
    logits = np.zeros((64, V), np.float32)
    logits[:, [2, 5, 9]] = [30.0, 29.0, 28.0]
    params = SamplingParams(min_tokens=3, stop_token_ids=(9,))
    assert sampler.needs_state(params)
    state = sampler.write_slot(
        sampler.init_slot_state(NUM_SLOTS, V), np.int32(1), *sampler.slot_rows(params, [1], [], [2, 5, 9], V)
    )
    row = {"temperature": temperature, "slot": 1, "use_state": True}
    held = run(logits, [{**row, "suppress_stop": True, "position": i} for i in range(64)], state)[0]
    assert not {2, 5, 9} & set(held.tolist())
    free = run(logits, [{**row, "position": i} for i in range(64)], state)[0]
    assert set(free.tolist()) <= {2, 5, 9}


def test_min_tokens_with_every_id_a_stop_id_still_draws_one():
    state = filled_state()._replace(is_stop=np.ones((NUM_SLOTS + 1, V), bool))
    rows = [{"suppress_stop": True, "slot": 0}, {"suppress_stop": True, "slot": 1, "temperature": 0.0}]
    tokens = run(random_logits(1, (2, V)), rows, state)[0]
    assert ((tokens >= 0) & (tokens < V)).all()


def test_padding_rows_touch_the_sink_only():
    state = filled_state()
    rows = [{"temperature": 0.0}] * 5 + [{"slot": 2, "use_state": True}]
    tokens, *_, new = run(random_logits(1, (6, V)), rows, state, flags=True)
    changed = np.arange(NUM_SLOTS) == 2
    for name in ("last_token", "counts", "in_prompt", "is_stop", "bias"):
        before, after = np.asarray(getattr(state, name))[:-1], np.asarray(getattr(new, name))[:-1]
        np.testing.assert_array_equal(before[~changed], after[~changed])
    assert new.last_token[2] == tokens[5]
    assert new.counts[2].sum() == state.counts[2].sum() + 1
    assert new.counts[2, tokens[5]] == state.counts[2, tokens[5]] + 1


# --- logprobs


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(9, (4, V))
    row = {"use_state": True, "repetition": 1.8, "presence": 2.0, "suppress_stop": True}
    rows = [
        {"temperature": 0.2, "slot": 0, **row},
        {"temperature": 2.0, "top_p": 0.1, "slot": 1, **row},
        {"temperature": 0.0},
        {"top_k": 1},
    ]
    tokens, chosen, ids, top, _ = run(logits, rows, filled_state(), logprobs=True, num_logprobs=V)
    x = logits.astype(np.float64)
    expected = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chosen, expected[np.arange(4), tokens], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=1, kind="stable"))
    np.testing.assert_allclose(top, -np.sort(-expected, axis=1), atol=1e-5)
    np.testing.assert_allclose(np.exp(top.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    assert np.isfinite(top).all()  # biased and held-back tokens included


def test_logprobs_nobody_asked_for_are_zeros_and_small_vocabularies_give_all_they_have():
    logits = random_logits(9, (2, 6))
    tokens, chosen, ids, top, _ = run(logits, [{}, {}])
    assert ids.shape == top.shape == (2, 6)
    assert not chosen.any()
    assert not ids.any()
    assert not top.any()
    with_them = run(logits, [{}, {}], logprobs=True)
    np.testing.assert_array_equal(tokens, with_them[0])
    assert (with_them[3] < 0).all()


def test_prompt_logprobs():
    logits = random_logits(10, (7, V))
    targets = np.arange(7, dtype=np.int32) * 3
    chosen, ids, top = jax.tree.map(np.asarray, jax.jit(sampler.prompt_logprobs, static_argnums=2)(logits, targets, 5))
    x = logits.astype(np.float64)
    expected = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chosen, expected[np.arange(7), targets], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-x, axis=1)[:, :5])
    np.testing.assert_allclose(top, -np.sort(-expected, axis=1)[:, :5], atol=1e-5)


# --- host helpers


def test_slot_rows():
    params = SamplingParams(logit_bias={3: 1.5, 0: -2})
    counts, in_prompt, is_stop, bias = sampler.slot_rows(params, (1, 1, 4), [2, 2, 39], (0,), V)
    assert [a.dtype for a in (counts, in_prompt, is_stop, bias)] == [np.int32, np.bool_, np.bool_, np.float32]
    assert counts[2] == 2
    assert counts[39] == 1
    assert counts.sum() == 3
    assert set(np.flatnonzero(in_prompt)) == {1, 4}
    assert set(np.flatnonzero(is_stop)) == {0}
    assert bias[3] == 1.5
    assert bias[0] == -2
    assert np.count_nonzero(bias) == 2


@pytest.mark.parametrize(("prompt", "output", "stop"), [([V], [], []), ([], [-1], []), ([], [], [V + 5])])
def test_slot_rows_refuses_ids_outside_the_vocabulary(prompt, output, stop):
    with pytest.raises(ValueError, match=r"must be within \[0, 40\)"):
        sampler.slot_rows(SamplingParams(), prompt, output, stop, V)


def test_slot_rows_refuses_a_bias_outside_the_vocabulary():
    with pytest.raises(ValueError, match="logit_bias"):
        sampler.slot_rows(SamplingParams(logit_bias={V: 1.0}), [], [], [], V)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=1), False),
        (SamplingParams(logit_bias={}), False),
        (SamplingParams(logit_bias={1: 1.0}), True),
        (SamplingParams(min_tokens=1), True),
        (SamplingParams(presence_penalty=-1), True),
        (SamplingParams(repetition_penalty=1.1), True),
    ],
)
def test_needs_state(params, expected):
    assert sampler.needs_state(params) is expected


def test_seed_key():
    keys = [sampler.seed_key(s, i) for s in (0, 1, -1, 2**63 - 1, -(2**63)) for i in range(4)]
    assert all(k.shape == (2,) and k.dtype == np.uint32 for k in keys)
    assert len({k.tobytes() for k in keys}) == len(keys)
    np.testing.assert_array_equal(sampler.seed_key(-1, 0), sampler.seed_key(2**64 - 1, 0))
