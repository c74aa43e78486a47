"""What is asked of a server, and when: requests by length and arrival, and arrival processes.

Length distributions are in `workload_lengths`, traces from files in `workload_files`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from sarathi_jax.config import check_int, check_number
from sarathi_jax.request import SamplingParams

MAX_TOKENS = 10_000_000
"""Longest prompt or output a workload can hold: above any model's context, so a larger number is a mistake."""

_GREEDY = SamplingParams(temperature=0.0)
_MAX_TIME_S = 1e12


def check_tokens(name: str, value: Any, low: int = 1) -> None:
    """Raise ValueError unless `value` is an integer in [low, MAX_TOKENS]."""
    check_int(name, value, low, MAX_TOKENS, f"{low} <= {name} <= {MAX_TOKENS}")


def stream(seed: int, name: str, *key: int) -> np.random.Generator:
    """The random stream of this seed, name and key, independent of every other one."""
    check_int("seed", seed, 0, 2**63 - 1, "a non-negative 64-bit integer")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()), *key)))


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One request: when it arrives, how long its prompt is and how many tokens it is to generate (each at least 1).

    `prompt_token_ids` where the text is known. `hash_ids` name the blocks of the prompt in order: requests share a
    prefix where their first ids are equal (Mooncake's traces; block length: `Workload.hash_block_len`).
    """

    arrived_at_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    prompt_token_ids: tuple[int, ...] | None = None
    hash_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_number("arrived_at_s", self.arrived_at_s, 0.0, _MAX_TIME_S, f"0 <= arrived_at_s <= {_MAX_TIME_S:g}")
        check_tokens("num_prefill_tokens", self.num_prefill_tokens)
        check_tokens("num_decode_tokens", self.num_decode_tokens)
        for name, ids in (("prompt_token_ids", self.prompt_token_ids), ("hash_ids", self.hash_ids)):
            if ids is not None and not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError(f"{name} must be integers >= 0 only")
        ids = self.prompt_token_ids
        if ids is not None and len(ids) != self.num_prefill_tokens:
            raise ValueError(f"num_prefill_tokens={self.num_prefill_tokens} but there are {len(ids)} prompt_token_ids")

    @property
    def num_total_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    def sampling_params(self, base: SamplingParams = _GREEDY) -> SamplingParams:
        """`base`, generating exactly `num_decode_tokens`: its limits and stop conditions do not count."""
        return replace(
            base, max_tokens=self.num_decode_tokens, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=()
        )

    def scaled(self, lengths: float) -> WorkItem:
        """Prompt and output `lengths` times as long, rounded up; known prompt ids are cut and cannot be stretched."""
        check_number("lengths", lengths, 1e-6, 1e6, "0.000001 <= lengths <= 1000000")
        # The slack keeps 100 * 0.07 = 7.000000000000001 at 7.
        prefill, decode = (
            max(1, math.ceil(n * lengths - 1e-9)) for n in (self.num_prefill_tokens, self.num_decode_tokens)
        )
        ids = self.prompt_token_ids
        if ids is not None and prefill > len(ids):
            raise ValueError(f"{lengths=} cannot stretch a prompt whose {len(ids)} token ids are given; at most 1")
        ids = None if ids is None else ids[:prefill]
        return replace(self, num_prefill_tokens=prefill, num_decode_tokens=decode, prompt_token_ids=ids)


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Of one kind of length, in tokens; percentiles interpolate linearly between samples, `std` divides by n."""

    mean: float
    std: float
    median: float
    p90: float
    min: int
    max: int


@dataclass(frozen=True, kw_only=True)
class WorkloadStatistics:
    """What a workload really holds. The rate and the gaps' coefficient of variation (CV) are None without gaps."""

    num_requests: int
    requests_per_s: float | None
    gap_cv: float | None
    prefill: LengthStatistics
    decode: LengthStatistics
    total: LengthStatistics


class Arrivals(Protocol):
    """An arrival process: `rate` is the nominal one in requests/s, None where there are no gaps."""

    @property
    def rate(self) -> float | None: ...

    def times(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        """Seconds, in order, the first at 0."""
        ...


class Lengths(Protocol):
    """A joint distribution of prompt and output lengths."""

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output lengths in tokens, int64."""
        ...


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in order of arrival; behaves as the tuple of them. There is at least one.

    `requests_per_s` is the nominal rate, which `with_rate` scales from: the arrival process's own, a trace's measured
    one (a part of it keeps that), None when all arrive at once. `hash_block_len` is the number of prompt tokens to a
    hash id.
    """

    items: tuple[WorkItem, ...]
    requests_per_s: float | None = None
    hash_block_len: float | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("items is empty; a workload needs at least one request")
        if self.requests_per_s is not None:
            _check_rate("requests_per_s", self.requests_per_s)
        if self.hash_block_len is not None:
            check_number("hash_block_len", self.hash_block_len, 1e-6, MAX_TOKENS, "a positive number of tokens")
        elif any(item.hash_ids is not None for item in self.items):
            raise ValueError("hash_block_len=None but there are hash_ids; give the number of prompt tokens to an id")
        times = [item.arrived_at_s for item in self.items]
        for index in range(1, len(times)):
            if times[index] < times[index - 1]:
                raise ValueError(f"items[{index}] arrives at {times[index]} s, before items[{index - 1}]; sort them")

    def __repr__(self) -> str:
        return f"<Workload of {len(self)} requests, nominally {self.requests_per_s} a second>"

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[WorkItem]:
        return iter(self.items)

    def __getitem__(self, index: int) -> WorkItem:
        return self.items[index]

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output lengths in tokens, int64, in order of arrival."""
        prefill, decode = np.array([(i.num_prefill_tokens, i.num_decode_tokens) for i in self.items], np.int64).T
        return prefill, decode

    def _arriving(self, times: np.ndarray, requests_per_s: float | None) -> Workload:
        items = (replace(item, arrived_at_s=t) for item, t in zip(self.items, times.tolist(), strict=True))
        return replace(self, items=tuple(items), requests_per_s=requests_per_s)

    def with_rate(self, requests_per_s: float) -> Workload:
        """The same requests, every gap multiplied by old nominal rate / new one; the first arrives at 0."""
        _check_rate("requests_per_s", requests_per_s)
        if self.requests_per_s is None:
            raise ValueError("all requests arrive at once: there is no gap to scale; use with_arrivals(Poisson(...))")
        times = np.array([item.arrived_at_s for item in self.items])
        return self._arriving((times - times[0]) * (self.requests_per_s / requests_per_s), requests_per_s)

    def with_arrivals(self, arrivals: Arrivals, *, seed: int) -> Workload:
        """The same requests in the same order, arriving as `make_workload` with these arrivals and seed would."""
        return self._arriving(arrivals.times(len(self), stream(seed, "arrivals")), arrivals.rate)

    def scaled(self, lengths: float) -> Workload:
        """Every prompt and output `lengths` times as long, rounded up (so at least 1); arrivals stay."""
        block_len = None if self.hash_block_len is None else self.hash_block_len * lengths
        return replace(self, items=tuple(item.scaled(lengths) for item in self.items), hash_block_len=block_len)

    def limited(self, max_total_tokens: int, *, on_over_long: Literal["raise", "skip"] = "raise") -> Workload:
        """Refuse, or leave out, requests whose prompt and output together exceed `max_total_tokens`."""
        check_tokens("max_total_tokens", max_total_tokens, 2)
        if on_over_long not in ("raise", "skip"):
            raise ValueError(f"{on_over_long=} must be 'raise' or 'skip'")
        fits = [item.num_total_tokens <= max_total_tokens for item in self.items]
        if all(fits):
            return self
        index = fits.index(False)
        if on_over_long == "raise" or not any(fits):
            raise ValueError(
                f"items[{index}] has {self.items[index].num_total_tokens} tokens, above {max_total_tokens=}, as have "
                f"{fits.count(False)} of {len(self)}; raise the limit, use scaled(...), or on_over_long='skip'"
            )
        return replace(self, items=tuple(item for item, fit in zip(self.items, fits, strict=True) if fit))

    def head(self, num_requests: int) -> Workload:
        """The first `num_requests` to arrive."""
        check_int("num_requests", num_requests, 1, len(self), f"1 to {len(self)}, the number of requests there are")
        return replace(self, items=self.items[:num_requests])

    def statistics(self) -> WorkloadStatistics:
        gaps = np.diff([item.arrived_at_s for item in self.items])
        mean_gap = float(gaps.mean()) if gaps.size else 0.0
        prefill, decode = self.lengths()
        return WorkloadStatistics(
            num_requests=len(self),
            requests_per_s=1.0 / mean_gap if mean_gap else None,
            gap_cv=float(gaps.std()) / mean_gap if mean_gap else None,
            prefill=_describe(prefill),
            decode=_describe(decode),
            total=_describe(prefill + decode),
        )

    def token_ids(self, item_index: int, *, vocab_size: int, seed: int, exclude: Iterable[int] = ()) -> tuple[int, ...]:
        """The prompt of a request: its own ids where known, else random ones, `num_prefill_tokens` exactly.

        Ids and not text: encoding random text again changes its length. The same (item_index, vocab_size, seed,
        exclude) gives the same ids. Blocks of equal hash id get equal tokens, so shared prefixes stay shared. Random
        ids leave `exclude` out (special tokens).
        """
        index = range(len(self))[item_index]
        item, num_tokens = self.items[index], self.items[index].num_prefill_tokens
        if item.prompt_token_ids is not None:
            if (largest := max(item.prompt_token_ids)) >= vocab_size:
                raise ValueError(f"items[{index}] holds token id {largest}, outside {vocab_size=}: another tokenizer's")
            return item.prompt_token_ids
        check_int("vocab_size", vocab_size, 1, 2**31 - 1, "vocab_size >= 1")
        allowed = np.delete(np.arange(vocab_size), [token for token in {*exclude} if 0 <= token < vocab_size])
        if not allowed.size:
            raise ValueError(f"exclude leaves none of {vocab_size=} ids")
        if item.hash_ids is None:
            drawn = stream(seed, "prompt", index).integers(allowed.size, size=num_tokens)
        else:
            assert self.hash_block_len is not None
            starts = [math.ceil(block * self.hash_block_len - 1e-9) for block in range(len(item.hash_ids))]
            counts = np.diff(np.minimum([*starts, num_tokens], num_tokens))
            blocks = zip(item.hash_ids, counts.tolist(), strict=True)
            drawn = np.concatenate([stream(seed, "block", h).integers(allowed.size, size=n) for h, n in blocks])
        return tuple(allowed[drawn].tolist())


def _describe(lengths: np.ndarray) -> LengthStatistics:
    median, p90 = np.percentile(lengths, [50, 90]).tolist()
    mean, std = float(lengths.mean()), float(lengths.std())
    return LengthStatistics(mean=mean, std=std, median=median, p90=p90, min=int(lengths.min()), max=int(lengths.max()))


def make_workload(*, num_requests: int, arrivals: Arrivals, lengths: Lengths, seed: int) -> Workload:
    """Random requests, the same for the same arguments. Arrivals and lengths draw from streams of their own: one does
    not change with the other."""
    check_int("num_requests", num_requests, 1, MAX_TOKENS, f"1 <= num_requests <= {MAX_TOKENS}")
    times = arrivals.times(num_requests, stream(seed, "arrivals")).tolist()
    prefill, decode = (column.tolist() for column in lengths.sample(num_requests, stream(seed, "lengths")))
    items = tuple(
        WorkItem(arrived_at_s=t, num_prefill_tokens=p, num_decode_tokens=d)
        for t, p, d in zip(times, prefill, decode, strict=True)
    )
    return Workload(items=items, requests_per_s=arrivals.rate)


# Arrival processes: gaps of mean 1, over the rate.


def _check_rate(name: str, rate: float) -> None:
    check_number(name, rate, 1e-9, 1e9, "requests per second, above 0 and finite (all at once: AllAtOnce())")


def _times(unit_gaps: np.ndarray, rate: float) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(unit_gaps)]) / rate


@dataclass(frozen=True, kw_only=True)
class _Rate:
    rate: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)


@dataclass(frozen=True, kw_only=True)
class Poisson(_Rate):
    """Independent exponential gaps of mean 1/rate."""

    def times(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        return _times(rng.exponential(size=num_requests - 1), self.rate)


@dataclass(frozen=True, kw_only=True)
class CappedPoisson(_Rate):
    """sarathi-serve's "Poisson": exponential gaps cut at 3/rate, so 5.2 % more requests/s than `rate` and a CV of 0.88.

    For comparison with its published numbers only.
    """

    def times(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        return _times(np.minimum(rng.exponential(size=num_requests - 1), 3.0), self.rate)


@dataclass(frozen=True, kw_only=True)
class Gamma(_Rate):
    """Gamma gaps of mean 1/rate and CV 1/sqrt(burstiness): below 1 is burstier than Poisson, 1 is Poisson."""

    burstiness: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("burstiness", self.burstiness, 1e-4, 1e6, "0.0001 <= burstiness <= 1000000; the CV is its -1/2th")

    def times(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        return _times(rng.gamma(self.burstiness, 1.0 / self.burstiness, size=num_requests - 1), self.rate)


@dataclass(frozen=True, kw_only=True)
class Static(_Rate):
    """Equal gaps of 1/rate."""

    def times(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        return _times(np.ones(num_requests - 1), self.rate)


@dataclass(frozen=True, kw_only=True)
class AllAtOnce:
    """Everything at time 0: offline throughput."""

    @property
    def rate(self) -> None:
        return None

    def times(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(num_requests)
