"""What a caller gets back: texts, tokens, logprobs and times of a request. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """One candidate token. `rank` is 1 for the likeliest; None for a chosen token outside the ranks asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class Latencies:
    """What follows from when a request arrived, was first scheduled, and had its tokens (s)."""

    arrival_s: float
    first_scheduled_s: float | None
    token_s: Any  # a sequence of floats: growing in a request, fixed in a record

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from arrival."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def scheduling_delay_s(self) -> float | None:
        """From arrival to the first batch that the request was in."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def tbts_s(self) -> list[float]:
        """Times between consecutive tokens: one fewer than tokens, as the first token ends no gap."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the last token so far."""
        return self.token_s[-1] - self.arrival_s if self.token_s else None


@dataclass(kw_only=True)
class RequestMetrics(Latencies):
    """Times of one sequence on the engine's clock (s). A token's time is when it was there for the caller."""

    arrival_s: float
    first_scheduled_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of a request's `n` generations. `delta` is the text that came since the output before this one.

    `stop_reason` is the stop string or stop token id that ended it, None for EOS and for length. `logprobs` holds, for
    each output token, the candidates by id (the chosen one among them), None unless asked for.
    """

    index: int
    text: str
    delta: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request as it stands: cumulative. `text`, `token_ids`, ... are the first generation's.

    `prompt_logprobs` has an entry for each prompt token, None for the first; it is there once the prompt has run.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: tuple[CompletionOutput, ...]

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def delta(self) -> str:
        return self.outputs[0].delta

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.outputs[0].metrics


class ChunkStats(NamedTuple):
    """One sequence's part of an iteration: `num_tokens` from position `start`, of the request's generation `sample`."""

    request_id: str
    sample: int
    start: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One iteration: what ran, and its time (s). `host_s` is planning, building and updating; `wall_s` is all.

    `chunks` in order of the batch; `num_pages_held` when it was planned, of `num_pages`.
    """

    chunks: tuple[ChunkStats, ...]
    start_s: float
    wall_s: float
    host_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_padding: int
    num_preempted: int
    num_pages_held: int
    num_pages: int

    @property
    def num_seqs(self) -> int:
        return len(self.chunks)

    @property
    def padding_share(self) -> float:
        """Padding rows among all rows of the batch."""
        total = self.num_prefill_tokens + self.num_decode_tokens + self.num_padding
        return self.num_padding / total if total else 0.0
