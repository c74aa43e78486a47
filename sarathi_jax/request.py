"""Requests and what a scheduler plans with them: SamplingParams, Request, Sequence, Chunk, StepPlan."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from sarathi_jax.config import check_int, check_number

MAX_LOGPROBS = 20
"""Most candidates per position that `logprobs` and `prompt_logprobs` can ask for."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Names, defaults and ranges are vLLM's.

    temperature 0 is greedy. top_k 0 or -1 is off, as are top_p 1 and min_p 0. `repetition_penalty` looks at prompt and
    output, presence and frequency penalties at the output only. `seed` makes a request reproducible whatever its batch
    mates; sample i of `n` draws from (seed, i). `max_tokens` None runs to the model's length. `stop_token_ids` and
    `stop` still stop under `ignore_eos`. `logprobs`/`prompt_logprobs` k: the k likeliest tokens and the chosen one, of
    the raw logits (before temperature and penalties).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # normalising the containers a caller may pass, once, before anyone reads them
        check_int("n", self.n, 1, 1024, "1 <= n <= 1024")
        check_number("temperature", self.temperature, 0.0, 1e4, "0 <= temperature <= 10000, 0 is greedy")
        check_number("top_p", self.top_p, 0.0, 1.0, "0 < top_p <= 1")
        if self.top_p == 0.0:
            raise ValueError("top_p=0 is out of range; 0 < top_p <= 1 (for greedy set temperature=0)")
        check_int("top_k", self.top_k, -1, 2**31 - 1, "top_k >= 1, or 0 / -1 for off")
        check_number("min_p", self.min_p, 0.0, 1.0, "0 <= min_p <= 1")
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -2.0, 2.0, f"-2 <= {name} <= 2")
        check_number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "0.001 <= repetition_penalty <= 1000")
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1, "a signed 64-bit integer")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, "max_tokens >= 1, or None for the model's limit")
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1, "min_tokens >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be <= max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 0, MAX_LOGPROBS, f"0 <= {name} <= {MAX_LOGPROBS}")
        for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                set_(self, name, int(getattr(self, name)))  # NumPy's integers overflow where Python's do not
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = () if stop is None else stop
        if not isinstance(stop, (tuple, list)) or any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={self.stop!r} must be a non-empty string, or a list of them")
        set_(self, "stop", tuple(stop))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, (tuple, list)):
            raise ValueError(f"stop_token_ids={ids!r} must be a list of token ids")
        for token in ids:
            check_int("stop_token_ids entry", token, 0, 2**31 - 1, "token ids are >= 0")
        set_(self, "stop_token_ids", tuple(map(int, ids)))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
            bias = {}
            for token, value in self.logit_bias.items():
                check_int("logit_bias key", token, 0, 2**31 - 1, "token ids are >= 0")
                check_number(f"logit_bias[{token}]", value, -100.0, 100.0, "-100 <= bias <= 100")
                bias[int(token)] = float(value)
            set_(self, "logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Status(enum.Enum):
    """Where a sequence stands. A preempted sequence is WAITING again, with its outputs kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for: validated prompt ids and parameters. `priority` lower is sooner (vLLM's sense)."""

    request_id: str
    prompt_token_ids: Seq[int]
    params: SamplingParams
    arrival_time_s: float
    prompt: str | None = None
    priority: int = 0


@dataclass(eq=False)
class Sequence:
    """One generation in progress: the only thing that schedulers, pages and engine change.

    Tokens are prompt + outputs; `num_pending` further ones are sampled on the device and not read yet. `num_tokens`
    counts all three: sampling adds to it, and reading, which moves a token from pending to outputs, changes nothing.
    `num_computed` counts the tokens whose K and V are in its pages, or will be once the steps planned so far have run.
    """

    request: Request
    seq_id: int
    index: int = 0
    seed: int = 0
    """Drives its draws, with `index`: the request's own seed, or one the engine drew for it."""

    max_total_tokens: int = 0
    """Prompt and output may not exceed this (the smaller of max_model_len and prompt + max_tokens)."""

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    page_ids: list[int] = field(default_factory=list)
    num_released: int = 0
    """Pages before those of `page_ids`, given back when the window had passed them."""

    slot: int | None = None
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    num_in_flight: int = 0
    """Plans not read yet that it sits out for, beside what `num_pending` says: counted by who runs a pipeline, if at
    all."""

    draft_number: int | None = None
    """The plan in the making that it is in, if it is: see `schedulers.Draft`."""

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.request.prompt_token_ids
        self.prompt_len = len(self.prompt_token_ids)
        self.params = self.request.params
        self.num_tokens = self.prompt_len + len(self.output_token_ids) + self.num_pending

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}/{self.index}, {self.status.value}, prompt={self.prompt_len}, "
            f"outputs={len(self.output_token_ids)}+{self.num_pending}, computed={self.num_computed}, "
            f"pages={len(self.page_ids)})"
        )

    @property
    def num_pages(self) -> int:
        """Pages from its first token to the last it has a place for, whether held or given back."""
        return self.num_released + len(self.page_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to run through the model; 1 for a sequence that is decoding, more while prefilling."""
        return self.num_tokens - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_decoding(self) -> bool:
        """Only its last sampled token is left to run."""
        return self.num_uncomputed == 1 and self.num_tokens > self.prompt_len

    @property
    def at_limit(self) -> bool:
        """All tokens it may have are sampled (read or pending): nothing more to schedule."""
        return self.num_tokens >= self.max_total_tokens

    def drop_pending(self) -> None:
        """Tokens that were sampled and not read count as never sampled."""
        self.num_tokens = self.prompt_len + len(self.output_token_ids)
        self.num_pending = 0

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions [start, stop); pending ones are left out."""
        n = len(self.prompt_token_ids)
        ids = list(self.prompt_token_ids[start:stop])
        if stop > n:
            ids += self.output_token_ids[max(start - n, 0) : stop - n]
        return ids


class Chunk(NamedTuple):
    """`num_tokens` tokens of one sequence from position `start`. A decode is a chunk of 1; there is no phase flag.

    `samples`: the chunk reaches the last token there is, so the step draws the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class StepPlan(NamedTuple):
    """One iteration: chunks in order (decodes first under `sarathi`). Its pages are held when it is returned."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum([num_tokens for _, _, num_tokens, _ in self.chunks])

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of chunks of 1."""
        return [num_tokens for _, _, num_tokens, _ in self.chunks].count(1)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens
