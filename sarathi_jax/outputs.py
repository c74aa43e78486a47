"""What a caller gets back: texts, tokens, logprobs and times of a request. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

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
    prompt_token_ids: Sequence[int]
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


class PlannedChunks(Sequence[ChunkStats]):
    """A plan's chunks as `ChunkStats`, made when somebody looks: equal to the tuple of them.

    Columns of `request.Chunk`s. Of a simulation that makes a million nobody may ever look at one.
    """

    __slots__ = ("_sequences", "_sizes", "_starts")

    def __init__(self, sequences: tuple[Any, ...], starts: tuple[int, ...], sizes: tuple[int, ...]):
        self._sequences, self._starts, self._sizes = sequences, starts, sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> ChunkStats: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ChunkStats, ...]: ...

    def __getitem__(self, index: int | slice) -> ChunkStats | tuple[ChunkStats, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        sequence = self._sequences[index]
        return ChunkStats(sequence.request.request_id, sequence.index, self._starts[index], self._sizes[index])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (tuple, PlannedChunks)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def of_prompts(self) -> tuple[ChunkStats, ...]:
        if self._sizes.count(1) == len(self) and 0 not in self._starts:
            return ()
        return tuple(self[i] for i, size in enumerate(self._sizes) if size > 1 or not self._starts[i])


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One iteration: what ran, and its time (s). `host_s` is planning, building and updating; `wall_s` is all.

    `chunks` in order of the batch; `num_pages_held` when it was planned, of `num_pages`. Simulators and pipelines tell
    which `replica` it ran on and when it was in each of its pipeline's `stages`: (start, end), on the server's clock.
    `collective_bytes`: what a device of each stage passes on to the others of its own and to the next stage, summed.
    """

    chunks: Sequence[ChunkStats]
    start_s: float
    wall_s: float
    host_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_padding: int
    num_preempted: int
    num_pages_held: int
    num_pages: int
    replica: int = 0
    stages: tuple[tuple[float, float], ...] = ()
    collective_bytes: int = 0

    @classmethod
    def make(cls, **fields: Any) -> StepStats:
        """`StepStats(...)` without a frozen class's call for every field: a simulation makes a hundred thousand."""
        stats = object.__new__(cls)
        stats.__dict__.update(fields)
        return stats

    @property
    def num_seqs(self) -> int:
        return len(self.chunks)

    @property
    def prompt_chunks(self) -> Sequence[ChunkStats]:
        """Those that may begin a prompt: all but decodes, and whatever else has one token beyond the first."""
        if isinstance(self.chunks, PlannedChunks):
            return self.chunks.of_prompts()
        return [chunk for chunk in self.chunks if chunk.num_tokens > 1 or not chunk.start]

    @property
    def padding_share(self) -> float:
        """Padding rows among all rows of the batch."""
        total = self.num_prefill_tokens + self.num_decode_tokens + self.num_padding
        return self.num_padding / total if total else 0.0
