"""The sampler against a NumPy reference that sorts: filters, penalties, seeds, logprobs, state, compilation."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_jax import sampler

V = 40
NUM_SLOTS = 8
DEFAULTS = {
    "temperature": np.float32(1),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "repetition": np.float32(1),
    "presence": np.float32(0),
    "frequency": np.float32(0),
    "use_state": np.bool_(False),
    "suppress_stop": np.bool_(False),
    "position": np.int32(0),
    "slot": np.int32(NUM_SLOTS),
}


jitted = jax.jit(sampler.sample, static_argnames="num_logprobs")
seed_key = functools.cache(sampler.seed_key)


def make_rows(settings_: list[dict], *, flags: bool | None = None, logprobs: bool = False) -> sampler.SamplingRows:
    """Rows from one dictionary each; `seed` makes the key. `flags` sets all three, None what the rows need."""
    columns = {
        name: np.array([row.get(name, default) for row in settings_], default.dtype)
        for name, default in DEFAULTS.items()
    }
    columns["key"] = np.stack([seed_key(row.get("seed", 0), row.get("index", 0)) for row in settings_])
    state = bool((columns["use_state"] | columns["suppress_stop"]).any())
    random = bool((columns["temperature"] > 0).any())
    values = (state, random, logprobs) if flags is None else (flags,) * 3
    names = ("any_state", "any_random", "any_logprobs")
    return sampler.SamplingRows(**columns, **{n: np.bool_(v) for n, v in zip(names, values, strict=True)})


def run(logits, settings_, state=None, *, flags=None, logprobs=False, pad=True, **kwargs):
    """One step; unless `pad` is false, in a batch padded to 8 or 512 rows, so that few shapes compile."""
    num_rows, vocab_size = np.shape(logits)
    size = (8 if num_rows <= 8 else 512) if pad else num_rows
    padded = np.zeros((size, vocab_size), np.float32)
    padded[:num_rows] = logits
    state = sampler.init_slot_state(NUM_SLOTS, vocab_size) if state is None else state
    rows = make_rows([*settings_, *[{"temperature": 0.0}] * (size - num_rows)], flags=flags, logprobs=logprobs)
    *outputs, state = jax.tree.map(np.asarray, jitted(padded, rows, state, **kwargs))
    return *(x[:num_rows] for x in outputs), state


def draws(logits_row, row: dict, num: int = 4096) -> np.ndarray:
    """`num` tokens of one row's settings, at positions 0, 1, ..., in batches of one shape."""
    size = 512
    logits = np.broadcast_to(np.asarray(logits_row, np.float32), (size, len(logits_row)))
    parts = [run(logits, [{**row, "position": i + j} for j in range(size)])[0] for i in range(0, num, size)]
    return np.concatenate(parts)


def reference_probs(
    logits_row, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **_
) -> tuple[np.ndarray, np.ndarray]:
    """(float64 probabilities, whether a token is too near the top-p or min-p cut to tell in float32), by sorting."""
    x = np.asarray(logits_row, np.float64)
    probs = np.exp((x - x.max()) / temperature)
    probs[probs < np.finfo(np.float32).tiny] = 0
    unsure = (np.abs(probs - min_p) < 1e-5 * min_p) & (x < x.max())
    probs[probs < min_p] = 0
    descending = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        probs[x < x[descending[top_k - 1]]] = 0
    if top_p < 1:
        mass = np.cumsum(probs[descending]) / probs.sum()
        last = [x[descending[min(np.searchsorted(mass, p), len(x) - 1)]] for p in (top_p, top_p - 1e-5, top_p + 1e-5)]
        unsure |= (probs > 0) & ((x >= last[1]) != (x >= last[2]))
        probs[x < last[0]] = 0
    return probs / probs.sum(), unsure


def assert_support(logits_row, row: dict, tokens: np.ndarray) -> None:
    """Nothing outside the reference's support; everything in it that is due at least 20 times."""
    probs, unsure = reference_probs(logits_row, **row)
    drawn = np.bincount(tokens, minlength=len(probs)) > 0
    assert not (drawn & (probs == 0) & ~unsure).any(), (row, np.flatnonzero(drawn & (probs == 0)))
    assert not (~drawn & (probs * len(tokens) > 20) & ~unsure).any(), row


def random_logits(seed: int, shape, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def filled_state() -> sampler.SlotState:
    rng = np.random.default_rng(3)
    shape = (NUM_SLOTS + 1, V)
    return sampler.SlotState(
        last_token=np.arange(NUM_SLOTS + 1, dtype=np.int32),
        counts=rng.integers(0, 4, shape).astype(np.int32) * (rng.random(shape) < 0.4),
        in_prompt=rng.random(shape) < 0.3,
        is_stop=rng.random(shape) < 0.2,
        bias=rng.normal(0, 3, shape).astype(np.float32),
    )


# --- filters


def test_rows_of_mixed_settings_keep_their_own_filters():
    mix = [
        {"top_k": 1},
        {},
        {"top_k": 5},
        {"top_p": 0.1},
        {"top_p": 0.8},
        {"min_p": 0.5},
        {"top_k": 7, "top_p": 0.6, "min_p": 0.05, "temperature": 1.7},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    ]
    repeat = 64  # 8 x 64 rows a batch
    logits = random_logits(1, (len(mix), V))
    tokens = np.concatenate(
        [
            run(
                np.repeat(logits, repeat, axis=0),
                [{**row, "seed": r, "position": start + i} for r, row in enumerate(mix) for i in range(repeat)],
            )[0].reshape(len(mix), repeat)
            for start in range(0, 5000, repeat)
        ],
        axis=1,
    )
    for r, row in enumerate(mix[:-1]):
        assert_support(logits[r], row, tokens[r])
    assert (tokens[0] == logits[0].argmax()).all()
    assert (tokens[-1] == logits[-1].argmax()).all()


@pytest.mark.parametrize("top_k", [0, 1, 2, V - 1, V, V + 1, 10**7])
def test_top_k_of_any_size_is_valid(top_k):
    logits = random_logits(2, V, 0.5)
    tokens = draws(logits, {"top_k": top_k}, 2048)
    assert_support(logits, {"top_k": top_k}, tokens)
    least = int(logits.argmin())
    assert (least in draws(logits, {"top_k": top_k, "temperature": 1e4}, 2048)) == (top_k in (0, V, V + 1, 10**7))


@pytest.mark.parametrize("vocab_size", [3, 1025])
def test_vocabulary_that_is_no_multiple_of_the_lanes(vocab_size):
    flat = np.zeros(vocab_size, np.float32)
    tokens = draws(flat, {}, 8192)
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert len(np.unique(tokens)) > 0.98 * vocab_size * (1 - math.exp(-8192 / vocab_size))
    only = np.full(vocab_size, -np.inf, np.float32)
    only[-1] = 3.0
    assert (draws(only, {}, 512) == vocab_size - 1).all()


def test_ties_at_the_cut_are_all_kept():
    logits = np.full(V, -1.0, np.float32)
    logits[[3, 9, 30]] = 2.0
    logits[[4, 5]] = 1.0
    assert set(draws(logits, {"top_k": 2}, 1024)) == {3, 9, 30}
    assert set(draws(logits, {"top_k": 4}, 1024)) == {3, 9, 30, 4, 5}
    assert set(draws(logits, {"top_p": 0.01}, 1024)) == {3, 9, 30}
    assert set(draws(logits, {"min_p": 1.0}, 1024)) == {3, 9, 30}
    assert set(draws(np.zeros(V), {"top_k": 1}, 1024)) == set(range(V))


def test_top_k_separates_neighbouring_floats_and_signs():
    values = np.array([0.0, 1e-3, -1e-3, 1.0, np.nextafter(np.float32(1), np.float32(2)), -5.0], np.float32)
    values = np.append(values, np.full(V - 6, -9.0, np.float32))
    for k in range(1, 7):
        tokens = draws(values, {"top_k": k, "temperature": 1e4}, 1024)
        assert set(tokens) == set(np.argsort(-values)[:k]), k


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    probs = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32)
    logits = np.full(V, -np.inf, np.float32)
    logits[:5] = np.log(probs)[[4, 2, 0, 1, 3]]  # tokens 2 3 1 then 0 and 4, which tie
    for top_p, kept in [
        (1e-6, {2}),
        (0.49, {2}),
        (0.51, {2, 3}),
        (0.74, {2, 3}),
        (0.76, {1, 2, 3}),
        (0.9, set(range(5))),
    ]:
        assert set(draws(logits, {"top_p": top_p}, 1024)) == kept, top_p
    # of what top_k leaves, renormalised: 0.5 and 0.25 become 2/3 and 1/3
    assert set(draws(logits, {"top_p": 0.65, "top_k": 2}, 1024)) == {2}
    assert set(draws(logits, {"top_p": 0.70, "top_k": 2}, 1024)) == {2, 3}
    # of the scaled probabilities
    assert set(draws(logits, {"top_p": 0.51, "temperature": 0.1}, 1024)) == {2}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_rows_stay_within_the_reference(data):
    """Tokens of random rows, from random logits with ties and -inf, are ones the reference could have drawn."""
    num_rows, vocab_size = 8, V
    quantum = data.draw(st.sampled_from([0.5, 1e-3]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = data.draw(st.sampled_from([0.1, 2.0, 50.0, 3e3]))
    logits = (np.round(rng.normal(0, scale, (num_rows, vocab_size)) / quantum) * quantum).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = np.where(np.isinf(logits).all(axis=1), 0, logits[:, 0])
    row = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-7, 0.3, 1.0, 2.5, 1e4]),
            "top_k": st.sampled_from([0, 1, 3, 10, vocab_size - 1, vocab_size, 1000]),
            "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "position": st.integers(0, 10**6),
        }
    )
    rows = [data.draw(row) for _ in range(num_rows)]
    tokens = run(logits, rows)[0]
    for r, (token, settings_) in enumerate(zip(tokens, rows, strict=True)):
        if settings_["temperature"] == 0:
            assert token == logits[r].argmax()
        else:
            probs, unsure = reference_probs(logits[r], **settings_)
            assert probs[token] > 0 or unsure[token], (settings_, logits[r])


# --- distribution and temperature


def chi_square(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Statistic in standard deviations above its mean, over tokens due at least 10 times, the others as one."""
    expected = probs * len(tokens)
    counts = np.bincount(tokens, minlength=len(probs))
    large = expected >= 10
    observed, due = np.append(counts[large], counts[~large].sum()), np.append(expected[large], expected[~large].sum())
    observed, due = observed[due > 0], due[due > 0]
    statistic = ((observed - due) ** 2 / due).sum()
    return (statistic - (len(due) - 1)) / math.sqrt(2 * (len(due) - 1))


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 11},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("vocab_size", [V, 700])
def test_draws_follow_the_distribution(row, vocab_size):
    logits = random_logits(5, vocab_size, 1.0)
    tokens = draws(logits, {**row, "seed": 11}, 8192)
    probs, _ = reference_probs(logits, **row)
    assert chi_square(tokens, probs) < 4
    assert abs(np.corrcoef(tokens[:-1], tokens[1:])[0, 1]) < 0.03
    wrong, _ = reference_probs(logits, **{**row, "temperature": row.get("temperature", 1.0) * 0.5})
    assert chi_square(tokens, np.maximum(wrong, 1e-9)) > 8  # the test would see a wrong temperature


def test_seeds_give_independent_draws():
    logits = np.zeros((512, V), np.float32)
    seeds = range(0, 4096, 512)
    tokens = np.concatenate(
        [run(logits, [{"seed": (s + i) // 4, "index": i % 4} for i in range(512)])[0] for s in seeds]
    )
    assert chi_square(tokens, np.full(V, 1 / V)) < 4


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_small_temperatures_tend_to_greedy(magnitude):
    logits = random_logits(6, (32, 700), magnitude / 3).clip(-magnitude, magnitude)
    best = logits.argmax(axis=1)
    logits[np.arange(32), best] = np.sort(logits, axis=1)[:, -2] + 0.15 * magnitude
    temperatures = [1e-45, 1e-38, 1e-20, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3]
    for extra in ({}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}):
        for temperature in temperatures:
            tokens = run(logits, [{"temperature": temperature, "seed": s, **extra} for s in range(32)])[0]
            np.testing.assert_array_equal(tokens, best, err_msg=f"{temperature=}")
    tokens = draws(logits[0], {"temperature": 1e4 * magnitude}, 2048)
    assert len(np.unique(tokens)) > 600


def test_rows_with_nothing_to_draw_from_stay_in_the_vocabulary():
    logits = np.full((4, V), -np.inf, np.float32)
    logits[1] = np.nan
    logits[2, 7] = np.inf
    tokens = run(logits, [{"top_k": 3, "top_p": 0.9}] * 4)[0]
    assert ((tokens >= 0) & (tokens < V)).all()
    assert tokens[2] == 7
    assert (run(logits[:3], [{"temperature": 0.0}] * 3)[0] < V).all()


# --- rows are independent


def test_a_seeded_row_does_not_depend_on_its_batch():
    logits = random_logits(7, (8, V))
    row = {"seed": 1234, "position": 9, "top_p": 0.95}
    alone = [run(logits[:1], [{**row, "position": p}])[0][0] for p in range(20)]
    assert len(set(alone)) > 3
    rng = np.random.default_rng(0)
    for p, expected in enumerate(alone):
        size = (1, 2, 5, 8)[p % 4]
        place = int(rng.integers(size))
        batch = [{"seed": int(rng.integers(1000)), "temperature": float(rng.choice([0, 2])), "top_k": 4}] * size
        batch[place] = {**row, "position": p}
        mates = random_logits(100 + p, (size, V))
        mates[place] = logits[0]
        assert run(mates, batch, pad=False)[0][place] == expected


def test_flags_for_other_rows_change_nothing():
    state = filled_state()
    logits = random_logits(8, (4, V))
    plain = [{"temperature": 0.0, "slot": 0}, {"seed": 5, "slot": 1}, {"top_k": 3, "seed": 6, "slot": 2}]
    loud = {"use_state": True, "slot": 3, "repetition": 1.5, "frequency": 1.0, "suppress_stop": True, "top_p": 0.5}
    quiet = run(logits[:3], plain, state)
    for flags in (None, True):
        np.testing.assert_array_equal(run(logits, [*plain, loud], state, flags=flags)[0][:3], quiet[0])
    np.testing.assert_array_equal(run(logits[:3], plain, state, flags=True)[0], quiet[0])


# --- one executable, in place, at full size


def test_one_executable_for_all_values_and_flags():
    step = jax.jit(sampler.sample, donate_argnums=2)
    state = jax.device_put(sampler.init_slot_state(NUM_SLOTS, V))
    structure = jax.tree.structure(state)
    for i, (row, logprobs) in enumerate(
        [({"temperature": 0.0}, False), ({"top_k": 3}, True), ({"use_state": True, "top_p": 0.2, "slot": 1}, False)] * 2
    ):
        rows = jax.device_put(make_rows([row, {"seed": i}], logprobs=logprobs))
        *_, state = step(jax.device_put(random_logits(i, (2, V))), rows, state)
        assert jax.tree.structure(state) == structure
    assert step._cache_size() == 1


@pytest.fixture(scope="module")
def full_size():
    num_rows, vocab_size = 4, 49152
    state = sampler.init_slot_state(NUM_SLOTS, vocab_size)
    step = jax.jit(sampler.sample, donate_argnums=2)
    rows = make_rows([{}] * num_rows)
    compiled = step.lower(np.zeros((num_rows, vocab_size), np.float32), rows, state).compile()
    return compiled, num_rows, vocab_size


def test_donated_state_is_updated_in_place(full_size):
    compiled, num_rows, vocab_size = full_size
    assert f"s32[{NUM_SLOTS + 1},{vocab_size}]" in compiled.as_text()
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if f"[{NUM_SLOTS + 1},{vocab_size}]" in line.split("(")[0] and " copy(" in line
    ]
    assert not copies
    state = sampler.init_slot_state(NUM_SLOTS, vocab_size)
    where = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), state)
    row = {"use_state": True, "frequency": 1.0, "top_p": 0.9, "top_k": 50}
    rows = make_rows([{**row, "slot": i} for i in range(num_rows)], logprobs=True)
    *_, new = compiled(random_logits(1, (num_rows, vocab_size)), rows, state)
    assert jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), new) == where
    assert state.counts.is_deleted()


def test_full_vocabulary_filters(full_size):
    compiled, num_rows, vocab_size = full_size
    logits = random_logits(4, (num_rows, vocab_size), 1.5)
    mix = [{"top_k": 40}, {"top_p": 0.3}, {"top_k": 1000, "top_p": 0.5, "min_p": 1e-3, "temperature": 0.8}, {}]
    state = sampler.init_slot_state(NUM_SLOTS, vocab_size)
    tokens = []
    for position in range(150):
        rows = make_rows([{**row, "seed": 9, "position": position} for row in mix])
        drawn, *_, state = compiled(logits, rows, state)
        tokens.append(np.asarray(drawn))
    for r, row in enumerate(mix[:-1]):
        probs, unsure = reference_probs(logits[r], **row)
        drawn = np.stack(tokens)[:, r]
        assert ((probs[drawn] > 0) | unsure[drawn]).all(), row
        assert len(np.unique(drawn)) > 10


def test_no_other_seed_and_sample_draw_the_same():
    keys = {tuple(seed_key(seed, index)) for seed in (5, 5 + 3 * 2**32, 3, -1, 2**63 - 1) for index in range(4)}
    assert len(keys) == 20
