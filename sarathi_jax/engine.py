"""The engine: requests in, iterations run, outputs out. A step is plan, execute, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_jax import device
from sarathi_jax.config import CacheConfig, check_number, check_positive
from sarathi_jax.detokenizer import Detokenizer
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.weights import load_weights
from sarathi_jax.outputs import (
    ChunkStats,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StepStats,
)
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Request, SamplingParams, Sequence
from sarathi_jax.runner import DeviceStep, ModelRunner, ReadStep, TokenScores
from sarathi_jax.schedulers import Sarathi, SchedulerConfig
from sarathi_jax.shapes import Shapes
from sarathi_jax.tokenizer import Tokenizer


@dataclass(eq=False, kw_only=True)
class _Generation:
    """One sequence with what its caller sees of it."""

    seq: Sequence
    detokenizer: Detokenizer | None
    metrics: RequestMetrics
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return self.detokenizer.text if self.detokenizer else ""


@dataclass(eq=False, kw_only=True)
class _Live:
    """A request until all its generations have ended."""

    request: Request
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    generations: list[_Generation] = field(default_factory=list)


class Engine:
    """Online use: add requests at any time, call `step` while `has_unfinished`.

    One thread calls it. `clock` gives seconds; all times in outputs are its. `lookahead` 1 plans and dispatches a step
    before the tokens of the one before it are read, so that the device never waits for the host; 0 reads each step
    first. None chooses 1 on accelerators and 0 on a CPU, where host and device share the cores. Outputs are the same.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        *,
        scheduler: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        lookahead: int | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        scheduler, cache, config = scheduler or Sarathi(), cache or CacheConfig(), model.config
        if max_model_len is None:
            max_model_len = config.max_position
        check_positive("max_model_len", max_model_len)
        if max_model_len > config.max_position:
            raise ValueError(f"max_model_len={max_model_len} is beyond the model's {config.max_position} positions")
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer knows {tokenizer.vocab_size} ids and the model embeds {config.vocab_size}: "
                f"they do not belong together"
            )
        if lookahead is None:
            lookahead = 0 if device.platform() == "cpu" else 1
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        dtype = device.resolve_dtype(cache.dtype or str(model.dtype))
        if dtype != model.dtype:
            raise ValueError(f"cache dtype={cache.dtype!r} must be the model's, {model.dtype}")
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = config.vocab_size
        num_pages = device.num_pages(
            config, cache, dtype=dtype, max_num_seqs=scheduler.max_num_seqs, max_model_len=max_model_len
        )
        self.pool = PagePool(num_pages, cache.page_size)
        self.scheduler = scheduler.build(
            self.pool,
            max_model_len=max_model_len,
            tile=device.tile(),
            lookahead=lookahead,
            default_token_budget=device.default_token_budget(),
        )
        shapes = Shapes.make(
            max_tokens=self.scheduler.max_step_tokens,
            tile=device.tile(),
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            page_size=cache.page_size,
            num_pages=num_pages,
        )
        self.runner = ModelRunner(model, shapes, stop_ids=self.eos_token_ids)
        self.last_step: StepStats | None = None
        """The iteration read last, for whoever wants to watch."""
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._live: dict[str, _Live] = {}
        self._by_sequence: dict[int, tuple[_Live, _Generation]] = {}
        self._in_flight: deque[_Flight] = deque()
        self._next_seq_id = 0

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        warm_up: bool = True,
        compile_cache: bool = True,
        progress: bool | None = None,
        **options: Any,
    ) -> Engine:
        """An engine on a checkpoint: a known name, a Hugging Face folder, or a GGUF file.

        `warm_up` compiles every shape now (else each at its first use), through a persistent cache in the user's cache
        folder if `compile_cache`. `progress` None shows a bar when stderr is a terminal. The rest as in `Engine`.
        """
        checkpoint = open_checkpoint(model)
        tokenizer = checkpoint.tokenizer()
        weights = load_weights(checkpoint, device.resolve_dtype(dtype))
        options.setdefault("eos_token_ids", checkpoint.eos_token_ids)
        engine = cls(Decoder(checkpoint.config, weights), tokenizer, **options)
        if warm_up:
            engine.warm_up(compile_cache=compile_cache, progress=progress)
        return engine

    def warm_up(self, *, compile_cache: bool = True, progress: bool | None = None) -> float:
        """Compile and run every shape, so that nothing compiles later. Returns the seconds it took."""
        from tqdm import tqdm

        with (
            device.compilation_cache(compile_cache),
            tqdm(
                desc="compiling", unit=" programs", leave=False, disable=None if progress is None else not progress
            ) as bar,
        ):

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            return self.runner.warm_up(progress=report)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request: a text, or token ids. ValueError, with nothing changed, for one that can never run.

        The prompt and `max_tokens` together are cut at max_model_len (finish reason "length").
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} must be SamplingParams")
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r} must be a non-empty string")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority={priority!r} must be an integer; lower is sooner")
        if arrival_time is not None:
            check_number("arrival_time", arrival_time, -1e300, 1e300, "seconds on the engine's clock")
        if request_id in self._live:
            raise ValueError(f"request_id={request_id!r} is in use by a request that has not ended; choose another")
        token_ids = self._prompt_ids(prompt, prompt_token_ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and this engine has none; use stop_token_ids")
        now = self._clock()
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time_s=now if arrival_time is None else arrival_time,
            priority=priority,
        )
        scores: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            scores = [None for _ in token_ids]
        live = _Live(request=request, prompt_logprobs=scores)
        seed = int(self._rng.integers(2**63)) if params.seed is None else params.seed
        for index in range(params.n):
            seq = Sequence(request, self._next_seq_id, index=index, seed=seed)
            seq.max_total_tokens = self._max_total_tokens(len(token_ids), params.max_tokens)
            self.scheduler.add(seq)  # may refuse, the first or none: all are alike
            self._next_seq_id += 1
            generation = _Generation(
                seq=seq,
                detokenizer=self._detokenizer(seq),
                metrics=RequestMetrics(arrival_s=request.arrival_time_s),
                logprobs=None if params.logprobs is None else [],
            )
            live.generations.append(generation)
            self._by_sequence[seq.seq_id] = live, generation
        self._live[request_id] = live

    def step(self) -> list[RequestOutput]:
        """Run one iteration; the requests that changed. Empty when nothing did (or with lookahead, not yet)."""
        start = self._clock()
        plan = self.scheduler.plan(start)
        if plan:
            self._in_flight.append(_Flight(self.runner.execute(plan), start, len(plan.preempted), self.pool.num_held))
        planned = self._clock()
        if not self._in_flight or (plan and len(self._in_flight) <= self.scheduler.lookahead):
            return []
        flight = self._in_flight.popleft()
        step = flight.step.read()
        ready = self._clock()
        outputs = self._update(flight, step, ready)
        self._record(flight, host_s=planned - start + self._clock() - ready)
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it stands; its pages are free at once. False if there is none of that name."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        for generation in live.generations:
            self.scheduler.finish(generation.seq)
            self._by_sequence.pop(generation.seq.seq_id, None)
        return True

    def check_integrity(self) -> None:
        """AssertionError unless every page is free, cached or held, and held by exactly the sequences alive."""
        self.pool.check_integrity([generation.seq for _, generation in self._by_sequence.values()])

    def _prompt_ids(self, prompt: str | None, token_ids: Iterable[int] | None) -> tuple[int, ...]:
        if (prompt is None) == (token_ids is None):
            raise ValueError("give either prompt (text) or prompt_token_ids, and not both")
        if prompt is not None:
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give prompt_token_ids")
            token_ids = self.tokenizer.encode(prompt)
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
            raise ValueError(f"prompt_token_ids={token_ids!r} must be a list of token ids")
        ids = tuple(token_ids)
        if not ids:
            raise ValueError(f"the prompt is empty: {prompt=} makes no token; at least one is needed")
        self._check_ids("prompt_token_ids", ids)
        return tuple(map(int, ids))

    def _check_ids(self, name: str, ids: Iterable[Any]) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < self.vocab_size:
                raise ValueError(f"{name} has {token!r}; token ids are integers in [0, {self.vocab_size})")

    def _max_total_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        if max_tokens is None:
            room = self.pool.num_pages * self.pool.page_size + 1  # the last token needs no page
            return max(min(self.max_model_len, room), prompt_len + 1)
        return min(self.max_model_len, prompt_len + max_tokens)

    def _detokenizer(self, seq: Sequence) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        p = seq.params
        return Detokenizer(
            self.tokenizer, seq.prompt_token_ids, stop=tuple(p.stop or ()), include_stop=p.include_stop_str_in_output,
            skip_special_tokens=p.skip_special_tokens,
        )  # fmt: skip

    def _update(self, flight: _Flight, step: ReadStep, now: float) -> list[RequestOutput]:
        """Tokens to their sequences, ends found and pages released, one output for each request that changed."""
        changed: dict[int, tuple[_Live, list[_Generation]]] = {}
        for i, chunk in enumerate(flight.step.chunks):
            entry = self._by_sequence.get(chunk.sequence.seq_id)
            if entry is None:  # ended while the step was on its way
                continue
            live, generation = entry
            if step.prompt_scores is not None and live.prompt_logprobs is not None:
                self._add_prompt_scores(live, chunk, step.prompt_scores, step.first_rows[i])
            if chunk.samples:
                scores = None if step.scores is None or generation.logprobs is None else step.scores
                self._add_token(generation, step.tokens[i], scores, i, now)
                changed.setdefault(id(live), (live, []))[1].append(generation)
        outputs = []
        for live, generations in changed.values():
            outputs.append(_output(live, set(map(id, generations))))
            if outputs[-1].finished:
                del self._live[live.request.request_id]
        return outputs

    def _add_token(self, generation: _Generation, token: int, scores: TokenScores | None, row: int, now: float) -> None:
        seq, p = generation.seq, generation.seq.params
        seq.output_token_ids.append(token)
        seq.num_pending -= 1
        generation.metrics.token_s.append(now)
        generation.metrics.first_scheduled_s = seq.first_scheduled_s
        generation.metrics.num_preemptions = seq.num_preemptions
        if generation.logprobs is not None and scores is not None:
            generation.logprobs.append(self._candidates(scores, row, token, p.logprobs or 0))
        num_outputs = len(seq.output_token_ids)
        if token in (p.stop_token_ids or ()):
            generation.finish_reason, generation.stop_reason = "stop", token
        elif token in self.eos_token_ids and not p.ignore_eos:
            generation.finish_reason = "stop"
        detokenizer = generation.detokenizer
        hidden = generation.finish_reason and not p.include_stop_str_in_output  # the text ends before the stop token
        if detokenizer is not None and not hidden and detokenizer.push(token, check_stop=num_outputs >= p.min_tokens):
            generation.finish_reason, generation.stop_reason = "stop", detokenizer.stop_reason
        if generation.finish_reason is None and seq.prompt_len + num_outputs >= seq.max_total_tokens:
            generation.finish_reason = "length"
        if generation.finish_reason is not None:
            # What was held back comes out now, and may complete a stop string.
            if detokenizer is not None and detokenizer.finish():
                generation.finish_reason, generation.stop_reason = "stop", detokenizer.stop_reason
            self.scheduler.finish(seq)
            del self._by_sequence[seq.seq_id]

    def _add_prompt_scores(self, live: _Live, chunk, scores: TokenScores, first_row: int) -> None:
        if chunk.sequence.index:
            return
        ids, entries = live.request.prompt_token_ids, live.prompt_logprobs
        assert entries is not None
        for position in range(chunk.start + 1, min(chunk.end + 1, len(ids))):
            row = first_row + position - 1 - chunk.start
            k = live.request.params.prompt_logprobs or 0
            entries[position] = self._candidates(scores, row, ids[position], k)

    def _candidates(self, scores: TokenScores, row: int, chosen: int, k: int) -> dict[int, Logprob]:
        """The k likeliest tokens of a row, best first, and the chosen one."""
        decode = lambda token: self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer else ""
        top = zip(scores.top_ids[row, :k].tolist(), scores.top[row, :k].tolist(), strict=True)
        found = {token: Logprob(value, rank, decode(token)) for rank, (token, value) in enumerate(top, 1)}
        if chosen not in found:
            found[chosen] = Logprob(float(scores.chosen[row]), None, decode(chosen))
        return found

    def _record(self, flight: _Flight, *, host_s: float) -> None:
        chunks = tuple(
            ChunkStats(chunk.sequence.request.request_id, chunk.sequence.index, chunk.start, chunk.num_tokens)
            for chunk in flight.step.chunks
        )
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        self.last_step = StepStats(
            chunks=chunks,
            start_s=flight.start_s,
            wall_s=self._clock() - flight.start_s,
            host_s=host_s,
            num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks) - num_decodes,
            num_decode_tokens=num_decodes,
            num_padding=flight.step.num_padding,
            num_preempted=flight.num_preempted,
            num_pages_held=flight.num_pages_held,
            num_pages=self.pool.num_pages,
        )


@dataclass(frozen=True, slots=True)
class _Flight:
    """A dispatched step that is not read yet."""

    step: DeviceStep
    start_s: float
    num_preempted: int
    num_pages_held: int


def _output(live: _Live, changed: set[int]) -> RequestOutput:
    """A snapshot; only the generations that changed hand out their new text."""
    request = live.request
    completions = tuple(
        CompletionOutput(
            index=g.seq.index,
            text=g.text,
            delta=g.detokenizer.take_delta() if g.detokenizer and id(g) in changed else "",
            token_ids=list(g.seq.output_token_ids),
            finish_reason=g.finish_reason,
            stop_reason=g.stop_reason,
            logprobs=None if g.logprobs is None else list(g.logprobs),
            metrics=g.metrics,
        )
        for g in live.generations
    )
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=live.prompt_logprobs,
        outputs=completions,
    )
