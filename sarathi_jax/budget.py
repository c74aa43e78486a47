"""The token budget: iteration time as a function of what is in it, and the largest budget that holds an SLO.

A profile times iterations of known content on the machine at hand. `fit` makes a `TimeModel` of it: a table of the
shapes' own times (the plateau while weights are read, the knee, the steps of the tile) plus terms that are linear in
the attention work. `choose_budget` then takes the largest tile-aligned budget whose iteration, with a full batch of
decodes, stays within the SLO (Sarathi-Serve, section 4.3).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sarathi_jax.config import check_number, check_positive
from sarathi_jax.shapes import round_up


class Iteration(NamedTuple):
    """What an iteration holds: decodes by their context lengths (the new token included), chunks as (start, tokens)."""

    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(tokens for _, tokens in self.chunks)


class Sample(NamedTuple):
    """A measured iteration (s)."""

    iteration: Iteration
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimeModel:
    """Seconds of an iteration, predicted. `shapes` (rows) and `shape_s` are the table; the rest multiply features.

    per_decode_s: a decode; per_walked_key_s: a key that decodes walk; per_chunk_s: a chunk; per_pair_s: a pair of
    query and key of a chunk; per_chunk_key_s: a key that a chunk reads. Decodes walk their keys in groups of
    `decode_group` neighbours by length, all rows of a group (the last one's empty rows too) as far as its longest.
    `machine` says where it was measured, and `median_error` how well it predicts what it was not fitted to (relative;
    None if nothing was held out).
    """

    shapes: tuple[int, ...]
    shape_s: tuple[float, ...]
    per_decode_s: float
    per_walked_key_s: float
    per_chunk_s: float
    per_pair_s: float
    per_chunk_key_s: float
    decode_group: int = 1
    machine: str = ""
    median_error: float | None = None

    def __call__(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of an iteration of decodes, by context length, and chunks (start, tokens)."""
        work = _attention_features(decodes, chunks, self.decode_group)
        rows = len(decodes) + sum(tokens for _, tokens in chunks)
        return self.shape_time(rows) + sum(w * c for w, c in zip(work, self._coefficients, strict=True))

    def shape_time(self, num_tokens: int) -> float:
        """Seconds of the smallest shape that holds `num_tokens` rows, without attention; beyond the table, in
        proportion."""
        if num_tokens < 1:
            return 0.0
        i = bisect_left(self.shapes, num_tokens)
        return self.shape_s[i] if i < len(self.shapes) else self.shape_s[-1] * num_tokens / self.shapes[-1]

    @property
    def _coefficients(self) -> tuple[float, ...]:
        return (self.per_decode_s, self.per_walked_key_s, self.per_chunk_s, self.per_pair_s, self.per_chunk_key_s)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> TimeModel:
        """ValueError for a file that is not one of `save`."""
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            model = cls(**arguments)
            model((1,), ((0, 2),))
        except (OSError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not a saved time model ({error}); delete it and calibrate again") from error
        return model


def _attention_features(decodes: Sequence[int], chunks: Sequence[tuple[int, int]], group: int) -> tuple[float, ...]:
    """Decodes, keys they walk, chunks, (query, key) pairs of chunks, keys that chunks read."""
    by_length = sorted(decodes, reverse=True)
    walked = group * sum(by_length[::group])
    pairs = sum(tokens * start + tokens * (tokens + 1) / 2 for start, tokens in chunks)
    keys = sum(start + tokens for start, tokens in chunks)
    return float(len(decodes)), float(walked), float(len(chunks)), pairs, float(keys)


def profile_plan(
    shapes: Sequence[int], *, max_num_seqs: int, max_model_len: int, seed: int = 0, num_hybrid: int = 24
) -> tuple[list[Iteration], list[Iteration]]:
    """Iterations to time: those to fit to, and hybrid ones to hold out.

    Every shape filled by fresh chunks, one where a sequence is that long (and by decodes where they can fill it), small
    and full decode batches of growing context, chunks of growing start, and random hybrids.
    """
    longest = max(max_model_len - 1, 2)
    contexts = sorted({max(longest >> i, 1) for i in range(5)})
    fit: list[Iteration] = []
    for rows in shapes:
        if rows <= longest:
            fit.append(Iteration((), ((0, rows),)))
            fit += [Iteration((), ((start, rows),)) for start in contexts if start + rows <= max_model_len]
        elif (count := -(-rows // longest)) <= max_num_seqs:
            size = -(-rows // count)
            fit.append(Iteration((), tuple((0, min(size, rows - row)) for row in range(0, rows, size))))
        if rows <= max_num_seqs:
            fit += [Iteration((context,) * rows, ()) for context in (1, *contexts)]
    few = sorted({1, min(3, max_num_seqs), max_num_seqs})
    fit += [Iteration((context,) * num_decodes, ()) for num_decodes in few for context in contexts]
    rng = np.random.default_rng(seed)

    def hybrid() -> Iteration:
        num_decodes = int(rng.integers(1, max_num_seqs)) if max_num_seqs > 1 else 0
        decodes = tuple(int(x) for x in rng.integers(1, longest, size=num_decodes))
        room = max(int(rng.integers(2, max(shapes[-1] - num_decodes, 3))), 2)
        sizes = [room] if rng.random() < 0.5 or room < 8 else [room // 2, room - room // 2]
        sizes = sizes[: max(max_num_seqs - num_decodes, 1)]
        sizes = [min(size, longest) for size in sizes]
        return Iteration(decodes, tuple((int(rng.integers(0, max_model_len - size)), size) for size in sizes))

    hybrids = [hybrid() for _ in range(num_hybrid)]
    return fit + hybrids[::2], hybrids[1::2]


def fit(
    samples: Iterable[Sample],
    shapes: Sequence[int],
    *,
    held_out: Iterable[Sample] = (),
    decode_group: int = 1,
    machine: str = "",
) -> TimeModel:
    """The time model of these samples, in relative least squares with no negative term.

    Shapes that no sample has get the time between their neighbours. ValueError when there are fewer samples than terms.
    """
    samples, held_out, shapes = list(samples), list(held_out), tuple(shapes)
    used = sorted({_row_shape(shapes, s.iteration.num_tokens) for s in samples})
    if len(samples) < len(used) + 5:
        raise ValueError(f"{len(samples)} samples are too few for {len(used)} shapes and 5 terms")
    columns = np.zeros((len(samples), len(used) + 5))
    for row, sample in zip(columns, samples, strict=True):
        row[used.index(_row_shape(shapes, sample.iteration.num_tokens))] = 1.0
        it = sample.iteration
        row[len(used) :] = _attention_features(it.decodes, it.chunks, decode_group)
    seconds = np.array([sample.seconds for sample in samples])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError("every sample must have a positive, finite time")
    solution = _nonnegative_least_squares(columns / seconds[:, None], np.ones(len(samples)))
    shape_s = np.interp(shapes, used, np.maximum.accumulate(solution[: len(used)]))
    per_decode, per_walked_key, per_chunk, per_pair, per_chunk_key = map(float, solution[len(used) :])
    model = TimeModel(
        shapes=shapes,
        shape_s=tuple(float(s) for s in shape_s),
        per_decode_s=per_decode,
        per_walked_key_s=per_walked_key,
        per_chunk_s=per_chunk,
        per_pair_s=per_pair,
        per_chunk_key_s=per_chunk_key,
        decode_group=decode_group,
        machine=machine,
    )
    if not held_out:
        return model
    errors = [abs(model(*s.iteration) - s.seconds) / s.seconds for s in held_out]
    return replace(model, median_error=float(np.median(errors)))


def _row_shape(shapes: Sequence[int], num_tokens: int) -> int:
    return shapes[min(bisect_left(shapes, num_tokens), len(shapes) - 1)]


def _nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """argmin |a x - b| over x >= 0 (Lawson and Hanson 1974), columns scaled to one."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    n = a.shape[1]
    x, active = np.zeros(n), np.zeros(n, bool)
    for _ in range(30 * n):
        gradient = a.T @ (b - a @ x)
        gradient[active] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10:
            break
        active[entering] = True
        while active.any():
            trial = np.zeros(n)
            trial[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            if (trial[active] > 0).all():
                x = trial
                break
            falling = active & (trial <= 0)
            step = np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-300))
            x = x + step * (trial - x)
            active &= x > 1e-12
            x[~active] = 0.0
    return x / scale


def choose_budget(
    model: TimeModel,
    *,
    tbt_slo_s: float,
    max_num_seqs: int,
    context: int,
    tile: int,
    max_budget: int | None = None,
    margin: float = 0.1,
) -> int:
    """The largest multiple of `tile` whose iteration, with all `max_num_seqs` decoding, is predicted within the SLO.

    Decodes and the chunk stand at `context`. Only budgets that leave prompts at least a tile are considered. `margin`:
    the share of the SLO that stays free, as the model predicts the middle of what iterations take, not their tail.

    Raises:
      ValueError: not even the smallest such budget fits; the message has the predicted floor.
    """
    check_number("tbt_slo_s", tbt_slo_s, 1e-9, 1e9, "seconds, > 0")
    check_number("margin", margin, 0.0, 0.9, "a share of the SLO: 0 <= margin <= 0.9")
    check_positive("context", context)
    largest = max_budget or model.shapes[-1]
    smallest = round_up(max_num_seqs + 1, tile)

    def seconds(budget: int) -> float:
        return model([context] * max_num_seqs, [(context, budget - max_num_seqs)])

    fitting = [b for b in range(smallest, largest + 1, tile) if seconds(b) <= (1 - margin) * tbt_slo_s]
    if not fitting:
        raise ValueError(
            f"no token budget holds tbt_slo_s={tbt_slo_s} with a margin of {margin:.0%}: {max_num_seqs} decodes at "
            f"{context} tokens and the smallest chunk ({smallest - max_num_seqs} tokens) are predicted to take "
            f"{seconds(smallest):.4f} s, the decodes alone {model([context] * max_num_seqs, []):.4f} s; raise "
            f"tbt_slo_s or lower max_num_seqs"
        )
    return fitting[-1]
