"""Distributions of prompt and output lengths: simple ones, a trace's, and the two workloads of the OSDI'24 paper."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sarathi_jax.config import check_number
from sarathi_jax.workload import Workload, check_tokens


def _check_range(low_name: str, low: int, high_name: str, high: int, least: int = 1) -> None:
    check_tokens(low_name, low, least)
    check_tokens(high_name, high, least)
    if low > high:
        raise ValueError(f"{low_name}={low} must be <= {high_name}={high}")


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The same lengths for every request."""

    num_prefill_tokens: int
    num_decode_tokens: int

    def __post_init__(self) -> None:
        check_tokens("num_prefill_tokens", self.num_prefill_tokens)
        check_tokens("num_decode_tokens", self.num_decode_tokens)

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return np.full(num_requests, self.num_prefill_tokens), np.full(num_requests, self.num_decode_tokens)


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Prompt and output independent, each equally likely anywhere in its range, both ends included."""

    min_prefill_tokens: int
    max_prefill_tokens: int
    min_decode_tokens: int
    max_decode_tokens: int

    def __post_init__(self) -> None:
        for kind in ("prefill", "decode"):
            low, high = f"min_{kind}_tokens", f"max_{kind}_tokens"
            _check_range(low, getattr(self, low), high, getattr(self, high))

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prefill = rng.integers(self.min_prefill_tokens, self.max_prefill_tokens, num_requests, endpoint=True)
        return prefill, rng.integers(self.min_decode_tokens, self.max_decode_tokens, num_requests, endpoint=True)


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """Total length min_total_tokens + k with a probability that falls as 1/(k + 1)**theta; theta 0 is uniform.

    Prompt to output is `prefill_to_decode_ratio` to 1, the output rounded up, and each at least 1.
    """

    min_total_tokens: int
    max_total_tokens: int
    theta: float = 0.6
    prefill_to_decode_ratio: float = 20.0

    def __post_init__(self) -> None:
        _check_range("min_total_tokens", self.min_total_tokens, "max_total_tokens", self.max_total_tokens, 2)
        check_number("theta", self.theta, 0.0, 100.0, "0 <= theta <= 100")
        ratio = self.prefill_to_decode_ratio
        check_number("prefill_to_decode_ratio", ratio, 1e-6, 1e6, "0.000001 <= prefill_to_decode_ratio <= 1000000")

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        weights = np.arange(1, self.max_total_tokens - self.min_total_tokens + 2, dtype=np.float64) ** -self.theta
        cumulative = np.cumsum(weights)
        total = self.min_total_tokens + np.searchsorted(cumulative / cumulative[-1], rng.random(num_requests), "right")
        decode = np.ceil(total / (1.0 + self.prefill_to_decode_ratio)).astype(np.int64)
        decode = np.clip(decode, 1, total - 1)
        return total - decode, decode


@dataclass(frozen=True, kw_only=True)
class TraceLengths:
    """(prompt, output) pairs drawn from those of a workload, with replacement."""

    workload: Workload

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prefill, decode = self.workload.lengths()
        drawn = rng.integers(len(self.workload), size=num_requests)
        return prefill[drawn], decode[drawn]


@dataclass(frozen=True, kw_only=True)
class GeneralizedWeibull:
    """A length with the quantile function scale * (((1-u)**-tail - 1) / tail) ** (1/shape), rounded up.

    The generalized Weibull family of Mudholkar, Srivastava and Kollia (1996), with a free weight of the tail: tail 0
    is Weibull's, above 0 falls like a power, below 0 ends at scale * (-1/tail) ** (1/shape). A `long_share` of the
    draws is spread evenly over (long_min, long_max] instead: rare and very long lengths. Above `max_tokens`: drawn
    again.
    """

    scale: float
    shape: float
    tail: float
    max_tokens: int
    long_share: float = 0.0
    long_min: int = 0
    long_max: int = 0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, 1e-6, 1e9, "0.000001 <= scale <= 1e9 tokens")
        check_number("shape", self.shape, 0.1, 100.0, "0.1 <= shape <= 100")
        check_number("tail", self.tail, -100.0, 10.0, "-100 <= tail <= 10")
        check_tokens("max_tokens", self.max_tokens)
        check_number("long_share", self.long_share, 0.0, 0.5, "0 <= long_share <= 0.5")
        if not 0 <= self.long_min <= self.long_max <= self.max_tokens or (self.long_share and not self.long_max):
            raise ValueError(
                f"long_min={self.long_min} and long_max={self.long_max} must be 0 <= long_min <= long_max <= "
                f"max_tokens={self.max_tokens}, and long_max > 0 with long_share={self.long_share}"
            )

    def quantile(self, u: np.ndarray) -> np.ndarray:
        """Tokens at u in [0, 1), before `max_tokens`; not in order among the `long_share`, which comes last."""
        split = 1.0 - self.long_share
        exponent = -np.log1p(-np.minimum(u / split, 1.0 - 2.0**-53))
        with np.errstate(over="ignore"):  # the far end of a heavy tail is cut below
            base = np.expm1(self.tail * exponent) / self.tail if self.tail else exponent
            body = self.scale * base ** (1.0 / self.shape)
        if self.long_share:
            rare = self.long_min + (u - split) / self.long_share * (self.long_max - self.long_min)
            body = np.where(u < split, body, rare)
        return np.ceil(np.clip(body, 1.0, 2.0**53)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class FittedLengths:
    """Prompt and output independent; pairs longer than `max_total_tokens` together are drawn again."""

    prefill: GeneralizedWeibull
    decode: GeneralizedWeibull
    max_total_tokens: int

    def __post_init__(self) -> None:
        check_tokens("max_total_tokens", self.max_total_tokens, 2)
        rng = np.random.default_rng(0)
        kept = np.mean([self._fits(*self._draw(1000, rng))])
        if kept < 0.05:
            raise ValueError(f"max_total_tokens={self.max_total_tokens} keeps {kept:.1%} of the pairs; 5 % at least")

    def _draw(self, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        u = rng.random((2, num))
        return self.prefill.quantile(u[0]), self.decode.quantile(u[1])

    def _fits(self, prefill: np.ndarray, decode: np.ndarray) -> np.ndarray:
        single = (prefill <= self.prefill.max_tokens) & (decode <= self.decode.max_tokens)
        return single & (prefill + decode <= self.max_total_tokens)

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prefill, decode = self._draw(num_requests, rng)
        while (again := np.flatnonzero(~self._fits(prefill, decode))).size:
            prefill[again], decode[again] = self._draw(again.size, rng)
        return prefill, decode


OPENCHAT_SHAREGPT4 = FittedLengths(
    prefill=GeneralizedWeibull(scale=4180.0, shape=0.7535, tail=-0.07756, max_tokens=8192),
    decode=GeneralizedWeibull(scale=656.2, shape=1.281, tail=-0.3031, max_tokens=1024),
    max_total_tokens=8192,
)
"""The paper's openchat_sharegpt4, total <= 8192, from published figures alone.

Scale, shape and tail of each side solve for its median, P90 and standard deviation, given the limits. The output's
standard deviation is that of the released lengths: the paper's 101 cannot go with its median and P90, which need at
least 125. A million draws, in tokens, and the released lengths for what the fit has not seen:

|        |          | median | P90  | std  | mean | P10 | P25 | P75  | P99  |
|--------|----------|--------|------|------|------|-----|-----|------|------|
| prompt | wanted   | 1730   | 5696 | 2088 |      |     |     |      |      |
|        | reached  | 1733   | 5696 | 2088 | 2354 | 159 | 583 | 3710 | 7529 |
|        | released | 1730   | 5696 | 2089 | 2340 | 74  | 580 | 3734 | 7434 |
| output | wanted   | 415    | 834  | 266  |      |     |     |      |      |
|        | reached  | 416    | 834  | 266  | 444  | 104 | 221 | 646  | 1000 |
|        | released | 415    | 834  | 266  | 439  | 84  | 228 | 628  | 998  |
"""

ARXIV_SUMMARIZATION = FittedLengths(
    prefill=GeneralizedWeibull(scale=7803.0, shape=2.639, tail=1.499, max_tokens=16384),
    decode=GeneralizedWeibull(
        scale=202.1, shape=4.574, tail=1.296, max_tokens=4096, long_share=0.0097, long_min=1024, long_max=4096
    ),
    max_total_tokens=16384,
)
"""The paper's arxiv_summarization, total <= 16384, from published figures alone but for the output's P10.

As OPENCHAT_SHAREGPT4. No smooth tail gives the output's standard deviation next to its P90: 1 % of the outputs are
spread over 1025 to 4096 instead, and the share solves for it. The output's P10 over its median is that of a public
set of the same kind (vattention's lengths: 0.604). A million draws, in tokens:

|        |         | median | P90   | std  | mean | P10  | P25  | P75   | P99   |
|--------|---------|--------|-------|------|------|------|------|-------|-------|
| prompt | wanted  | 7059   | 12985 | 3638 |      |      |      |       |       |
|        | reached | 7067   | 12990 | 3638 | 7562 | 3121 | 4721 | 10087 | 15758 |
| output | wanted  | 208    | 371   | 265  |      | 126  |      |       |       |
|        | reached | 209    | 371   | 265  | 255  | 126  | 161  | 275   | 1185  |
"""
