"""Drawing the next token of every row on the device: penalties, filters, seeds, logprobs. No sort over the vocabulary.

Filters find their cut by bisection over the ordered-integer image of float32: each round counts (top-k) or weighs
(top-p) the tokens at or above a trial logit, so at most 32 passes give the exact cut; tokens tied at it are all kept.
Tokens are drawn by inverting the CDF at two levels, over groups of tokens and then inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, UInt32

from sarathi_jax.arrays import AnyArray, AnyScalar
from sarathi_jax.request import MAX_LOGPROBS, SamplingParams

_LANES = 512  # the V axis is seen as [R, _LANES] and reduced over R first: whole vectors at a time
_LOWEST_KEY = np.int32(-2139095041)  # _key(-inf)


class SlotState(NamedTuple):
    """What outlives a step on the device, a row per sequence slot; row N takes the writes of padding rows."""

    last_token: Int32[Array, " N+1"]
    counts: Int32[Array, "N+1 V"]  # times each token was output
    in_prompt: Bool[Array, "N+1 V"]
    is_stop: Bool[Array, "N+1 V"]  # what min_tokens holds back
    bias: Float[Array, "N+1 V"]


class SamplingRows(NamedTuple):
    """One step's settings, a row per sequence sampled. Flags at the end skip work that no row asked for.

    A row with `use_state` or `suppress_stop` needs `any_state`, one with temperature > 0 `any_random`; a flag that is
    set without need changes no result. Padding rows: temperature 0, `slot` N, `use_state` and `suppress_stop` false.
    """

    temperature: Float[AnyArray, " S"]  # 0 is greedy
    top_k: Int32[AnyArray, " S"]  # <= 0 or >= V is off
    top_p: Float[AnyArray, " S"]
    min_p: Float[AnyArray, " S"]
    repetition: Float[AnyArray, " S"]
    presence: Float[AnyArray, " S"]
    frequency: Float[AnyArray, " S"]
    use_state: Bool[AnyArray, " S"]  # this slot's rows in SlotState are live
    suppress_stop: Bool[AnyArray, " S"]  # the output is still shorter than min_tokens
    key: UInt32[AnyArray, "S 2"]  # threefry words, see seed_key
    position: Int32[AnyArray, " S"]  # index of the token to draw; the draw depends on (key, position) alone
    slot: Int32[AnyArray, " S"]
    any_state: Bool[AnyScalar, ""]
    any_random: Bool[AnyScalar, ""]
    any_logprobs: Bool[AnyScalar, ""]


def init_slot_state(num_slots: int, vocab_size: int) -> SlotState:
    """State of `num_slots` idle slots and the sink row."""
    n = num_slots + 1
    return SlotState(
        last_token=jnp.zeros(n, jnp.int32),
        counts=jnp.zeros((n, vocab_size), jnp.int32),
        in_prompt=jnp.zeros((n, vocab_size), jnp.bool_),
        is_stop=jnp.zeros((n, vocab_size), jnp.bool_),
        bias=jnp.zeros((n, vocab_size), jnp.float32),
    )


def write_slot(
    state: SlotState,
    slot: Int32[AnyScalar, ""],
    counts_row: Int32[AnyArray, " V"],
    in_prompt_row: Bool[AnyArray, " V"],
    is_stop_row: Bool[AnyArray, " V"],
    bias_row: Float[AnyArray, " V"],
) -> SlotState:
    """Set a slot's rows, at admission, for a request that `needs_state`. Jit it with `state` donated."""
    return state._replace(
        counts=state.counts.at[slot].set(counts_row),
        in_prompt=state.in_prompt.at[slot].set(in_prompt_row),
        is_stop=state.is_stop.at[slot].set(is_stop_row),
        bias=state.bias.at[slot].set(bias_row),
    )


def needs_state(params: SamplingParams) -> bool:
    """Whether the request reads its slot's rows: penalties, logit_bias or min_tokens."""
    return params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0


def slot_rows(
    params: SamplingParams,
    prompt_ids: Sequence[int] | np.ndarray,
    output_ids: Sequence[int] | np.ndarray,
    stop_ids: Sequence[int] | np.ndarray,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """counts i32[V], in_prompt bool[V], is_stop bool[V], bias f32[V] for `write_slot`; every id must be in [0, V).

    `stop_ids`: all that min_tokens holds back, the model's EOS ids and the request's own.
    """
    bias_ids = tuple(params.logit_bias or ())
    for name, ids in (("prompt", prompt_ids), ("output", output_ids), ("stop", stop_ids), ("logit_bias", bias_ids)):
        if len(ids) and (min(ids) < 0 or max(ids) >= vocab_size):
            raise ValueError(f"{name} token ids {min(ids)}..{max(ids)} must be within [0, {vocab_size})")
    counts = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size).astype(np.int32)
    in_prompt, is_stop = np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.bool_)
    in_prompt[np.asarray(prompt_ids, np.int64)] = True
    is_stop[np.asarray(stop_ids, np.int64)] = True
    bias = np.zeros(vocab_size, np.float32)
    bias[np.asarray(bias_ids, np.int64)] = list((params.logit_bias or {}).values())
    return counts, in_prompt, is_stop, bias


def seed_key(seed: int, index: int) -> UInt32[np.ndarray, " 2"]:
    """Threefry key words of sample `index` of a request with this seed."""
    low, high = seed % 2**32, seed % 2**64 >> 32  # words of their own, so that no other seed and index give the same
    return np.random.SeedSequence([low, high, index]).generate_state(2)


def prompt_logprobs(
    logits: Float[Array, "N V"], targets: Int32[Array, " N"], num_logprobs: int = MAX_LOGPROBS
) -> tuple[Float[Array, " N"], Int32[Array, "N K"], Float[Array, "N K"]]:
    """Log-softmax at `targets`, and the K = min(num_logprobs, V) likeliest ids, best first, with theirs."""
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    top, top_ids = lax.top_k(logits, min(num_logprobs, logits.shape[-1]))
    return chosen - log_z, top_ids.astype(jnp.int32), top - log_z[:, None]


def sample(
    logits: Float[Array, "S V"], rows: SamplingRows, state: SlotState, *, num_logprobs: int = MAX_LOGPROBS
) -> tuple[Int32[Array, " S"], Float[Array, " S"], Int32[Array, "S K"], Float[Array, "S K"], SlotState]:
    """Tokens, logprob of each, K = min(num_logprobs, V) likeliest ids and their logprobs, new state. Pure.

    vLLM's order: logit_bias, min_tokens, repetition, frequency, presence; greedy rows take the likeliest (the lowest
    id of equals); the others divide by temperature, then min_p, top_k, top_p. Logprobs are of the raw logits, and zeros
    unless `any_logprobs`. No row's result depends on another's. Jit with `state` donated: it is updated in place.
    """
    num_rows, vocab_size = logits.shape
    sink = state.last_token.shape[0] - 1
    rows = SamplingRows(*map(jnp.asarray, rows))
    logits = logits.astype(jnp.float32)
    adjusted = lax.cond(rows.any_state, lambda: _penalise(logits, rows, state), lambda: logits)
    greedy = _argmax(adjusted)
    tokens = lax.cond(rows.any_random, lambda: _draw(adjusted, greedy, rows), lambda: greedy)

    k = min(num_logprobs, vocab_size)
    chosen, top_ids, top = lax.cond(
        rows.any_logprobs,
        lambda: prompt_logprobs(logits, tokens, num_logprobs),
        lambda: (jnp.zeros_like(logits[:, 0]), jnp.zeros((num_rows, k), jnp.int32), jnp.zeros_like(logits[:, :k])),
    )
    counted = jnp.where(rows.use_state, rows.slot, sink)
    state = state._replace(
        last_token=state.last_token.at[rows.slot].set(tokens),
        counts=state.counts.at[counted, tokens].add(1),
    )
    return tokens, chosen, top_ids, top, state


def _penalise(logits: Float[Array, "S V"], rows: SamplingRows, state: SlotState) -> Float[Array, "S V"]:
    """logit_bias, min_tokens and penalties, on the rows that use their slot."""
    counts = state.counts[rows.slot]
    x = logits + state.bias[rows.slot]
    seen = (counts > 0) | state.in_prompt[rows.slot]
    factor = rows.repetition[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / factor, x * factor), x)
    x = x - rows.frequency[:, None] * counts.astype(jnp.float32)
    x = x - jnp.where(counts > 0, rows.presence[:, None], 0.0)
    x = jnp.where(rows.use_state[:, None], x, logits)
    return jnp.where(rows.suppress_stop[:, None] & state.is_stop[rows.slot], -jnp.inf, x)


def _argmax(x: Float[Array, "S V"]) -> Int32[Array, " S"]:
    """The first index of each row's maximum, as two plain reductions, which vectorise."""
    num_tokens = x.shape[-1]
    at_max = x == x.max(axis=-1, keepdims=True)
    first = jnp.where(at_max, jnp.arange(num_tokens, dtype=jnp.int32)[None], num_tokens).min(axis=-1)
    return jnp.minimum(first, num_tokens - 1)


def _draw(x: Float[Array, "S V"], greedy: Int32[Array, " S"], rows: SamplingRows) -> Int32[Array, " S"]:
    """A token for each row with a temperature, the greedy one for the others and where no weight is left."""
    num_rows, vocab_size = x.shape
    # Below the smallest normal float the device flushes to 0.
    random = rows.temperature >= jnp.finfo(jnp.float32).tiny
    uniform = jax.vmap(_uniform_pair)(rows.key, rows.position)
    num_groups = -(-vocab_size // _LANES)
    x = jnp.pad(x, ((0, 0), (0, num_groups * _LANES - vocab_size)), constant_values=-jnp.inf)
    x = x.reshape(num_rows, num_groups, _LANES)

    peak = _reduce(jnp.max, x)
    scale = jnp.where(random, rows.temperature, 1.0)
    shift = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp((x - shift[:, None, None]) / scale[:, None, None])  # <= 1, the likeliest exactly 1
    weights = jnp.where(weights >= rows.min_p[:, None, None], weights, 0.0)

    by_k = random & (rows.top_k > 0) & (rows.top_k < vocab_size)
    by_p = random & (rows.top_p < 1.0)
    weights = lax.cond(by_k.any(), lambda: _keep_top_k(x, weights, peak, rows.top_k, by_k), lambda: weights)
    weights = lax.cond(by_p.any(), lambda: _keep_top_p(x, weights, peak, rows.top_p, by_p), lambda: weights)

    lane_weights = weights.sum(axis=1)  # S _LANES: a lane is the group of tokens l, l + _LANES, ...
    lane = _invert_cdf(lane_weights, uniform[:, 0])
    in_lane = jnp.take_along_axis(weights, lane[:, None, None], axis=2)[:, :, 0]
    drawn = _invert_cdf(in_lane, uniform[:, 1]) * _LANES + lane
    total = lane_weights.sum(axis=-1)
    return jnp.where(random & (total > 0) & jnp.isfinite(total), drawn, greedy)


def _uniform_pair(key: UInt32[AnyArray, " 2"], position: Int32[AnyArray, ""]) -> Float[Array, " 2"]:
    typed = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(typed, position), (2,), jnp.float32)


def _invert_cdf(weights: Float[Array, "S G"], uniform: Float[Array, " S"]) -> Int32[Array, " S"]:
    """Index drawn in proportion to the weights; never one of weight 0 while another is positive."""
    size = weights.shape[-1]
    cdf = jnp.cumsum(weights, axis=-1)
    index = jnp.arange(size, dtype=jnp.int32)[None]
    positive = weights > 0
    reached = positive & (cdf > (uniform * cdf[:, -1])[:, None])
    first = jnp.where(reached, index, size).min(axis=-1)
    last = jnp.where(positive, index, 0).max(axis=-1)  # rounding can leave `reached` empty
    return jnp.minimum(first, last)


def _reduce(op: Callable[..., Array], x: Array) -> Array:
    """[S R lanes] -> [S]."""
    return op(op(x, axis=1), axis=-1)


def _key(x: Float[Array, " S"]) -> Int32[Array, " S"]:
    """Integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ np.int32(0x7FFFFFFF))


def _unkey(key: Int32[Array, " S"]) -> Float[Array, " S"]:
    return lax.bitcast_convert_type(jnp.where(key >= 0, key, key ^ np.int32(0x7FFFFFFF)), jnp.float32)


def _bisect(
    excess: Callable[[Float[Array, " S"]], Float[Array, " S"]], peak: Float[Array, " S"], active: Bool[AnyArray, " S"]
) -> Float[Array, " S"]:
    """The highest cut <= peak of each active row with `excess(cut)` >= 0, -inf for the others. 32 rounds at most.

    `excess` falls as the cut rises; 0 says that a higher cut keeps the same tokens or too few, and ends the row.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # excess(low) >= 0 > excess(high)
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        over = excess(_unkey(middle))
        low, high = jnp.where(over >= 0, middle, low), jnp.where(over >= 0, high, middle)
        return low, jnp.where(over == 0, low + 1, high)

    low = jnp.full_like(peak, _LOWEST_KEY, jnp.int32)
    high = jnp.where(active, _key(peak) + 1, low + 1)
    low, _ = lax.while_loop(lambda bounds: (bounds[0] + 1 < bounds[1]).any(), halve, (low, high))
    return _unkey(low)


def _keep_top_k(x: Array, weights: Array, peak: Array, top_k: AnyArray, active: AnyArray) -> Array:
    """Weights [S R lanes] of the k likeliest tokens, and of those equal to the k-th."""

    def excess(cut: Array) -> Array:
        count = _reduce(jnp.sum, jnp.where(x >= cut[:, None, None], 1.0, 0.0))  # exact: V < 2**24
        return count - top_k.astype(jnp.float32)

    return jnp.where(x >= _bisect(excess, peak, active)[:, None, None], weights, 0.0)


def _keep_top_p(x: Array, weights: Array, peak: Array, top_p: AnyArray, active: AnyArray) -> Array:
    """Weights [S R lanes] of the fewest likeliest tokens that hold top_p of the mass, and of ties with the last."""
    needed = top_p * _reduce(jnp.sum, weights)

    def excess(cut: Array) -> Array:
        mass = _reduce(jnp.sum, jnp.where(x >= cut[:, None, None], weights, 0.0))
        return jnp.where(mass >= needed, 1.0, -1.0)  # never 0: a token too light to change a sum may still be dropped

    return jnp.where(x >= _bisect(excess, peak, active)[:, None, None], weights, 0.0)
