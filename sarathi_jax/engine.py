"""The engine: requests in, iterations run, outputs out. A step is plan, execute, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_jax import device, profiler
from sarathi_jax.budget import TimeModel, choose_budget
from sarathi_jax.config import CacheConfig, check_instance, check_number, check_positive
from sarathi_jax.generation import Generation, LiveRequest, max_prompt_chars
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.weights import load_weights
from sarathi_jax.outputs import ChunkStats, RequestOutput, StepStats
from sarathi_jax.pages import PagePool
from sarathi_jax.progress import progress_bar
from sarathi_jax.request import Request, SamplingParams, Sequence
from sarathi_jax.runner import DeviceStep, ModelRunner, ReadStep
from sarathi_jax.schedulers import Sarathi, Scheduler, SchedulerConfig
from sarathi_jax.shapes import Shapes
from sarathi_jax.tokenizer import Tokenizer


class Engine:
    """Online use: add requests at any time, call `step` while `has_unfinished`.

    One thread calls it. `clock` gives seconds; all times in outputs are its. `lookahead` 1 plans and dispatches a step
    before the tokens of the one before it are read, so that the device never waits for the host; 0 reads each step
    first. None chooses 1 on accelerators and 0 on a CPU, where host and device share the cores. Outputs are the same.

    Shapes are made for the scheduler's largest iteration, and for `max_step_tokens` if that is more (for a later
    `set_scheduler`). `Sarathi(token_budget="auto", tbt_slo_s=...)` is measured at `warm_up`.
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
        max_step_tokens: int = 1,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        scheduler = check_instance("scheduler", Sarathi() if scheduler is None else scheduler, SchedulerConfig)
        cache = check_instance("cache", CacheConfig() if cache is None else cache, CacheConfig)
        config = model.config
        check_positive("max_step_tokens", max_step_tokens)
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
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = config.vocab_size
        self._check_ids("eos_token_ids", self.eos_token_ids)
        self._max_prompt_chars = max_prompt_chars(tokenizer, max_model_len)
        num_pages = device.num_pages(
            config, cache, dtype=dtype, max_num_seqs=scheduler.max_num_seqs, max_model_len=max_model_len
        )
        self.pool = PagePool(num_pages, cache.page_size)
        self._lookahead = lookahead
        self._auto: Sarathi | None = None
        if isinstance(scheduler, Sarathi) and scheduler.token_budget == "auto":
            self._auto = scheduler
            scheduler = scheduler.resolved(device.max_token_budget())
        self.scheduler = self._build(scheduler)
        shapes = Shapes.make(
            max_tokens=max(self.scheduler.max_step_tokens, max_step_tokens),
            tile=device.tile(),
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            page_size=cache.page_size,
            num_pages=num_pages,
        )
        self.runner = ModelRunner(model, shapes, stop_ids=self.eos_token_ids, kv_dtype=dtype)
        self.last_step: StepStats | None = None
        """The iteration read last, for whoever wants to watch."""
        self.clock = clock
        self._rng = np.random.default_rng(seed)
        self._live: dict[str, LiveRequest] = {}
        self._by_sequence: dict[int, tuple[LiveRequest, Generation]] = {}
        self._in_flight: deque[_Flight] = deque()
        self._undelivered: list[RequestOutput] = []
        self._next_seq_id = 0

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        scheduler: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        lookahead: int | None = None,
        max_step_tokens: int = 1,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        warm_up: bool = True,
        compile_cache: bool = True,
        progress: bool | None = None,
    ) -> Engine:
        """An engine on a checkpoint: a known name, a Hugging Face folder or hub name, or a GGUF file.

        `warm_up` compiles every shape now (else each at its first use), through a persistent cache in the user's cache
        folder if `compile_cache`. `progress` None shows a bar when stderr is a terminal. `eos_token_ids` None takes the
        checkpoint's. The rest as in `Engine`.
        """
        if not isinstance(model, (str, Path)):
            raise ValueError(f"model={model!r} must be a name or a path")
        weight_dtype = device.resolve_dtype(dtype)
        checkpoint = open_checkpoint(model)
        tokenizer = checkpoint.tokenizer()
        weights = load_weights(checkpoint, weight_dtype)
        engine = cls(
            Decoder(checkpoint.config, weights),
            tokenizer,
            scheduler=scheduler,
            cache=cache,
            max_model_len=max_model_len,
            eos_token_ids=checkpoint.eos_token_ids if eos_token_ids is None else eos_token_ids,
            lookahead=lookahead,
            max_step_tokens=max_step_tokens,
            seed=seed,
            clock=clock,
        )
        if warm_up:
            engine.warm_up(compile_cache=compile_cache, progress=progress)
        return engine

    def warm_up(self, *, compile_cache: bool = True, progress: bool | None = None) -> float:
        """Compile and run every shape, so that nothing compiles later. Returns the seconds it took."""
        bar = progress_bar("compiling", "programs", show=progress)
        with device.compilation_cache(compile_cache), bar as report:
            seconds = self.runner.warm_up(progress=report)
        if self._auto is not None:
            config, self._auto = self._auto, None
            self.set_scheduler(self._resolved(config, keep=compile_cache, progress=progress))
        return seconds

    def time_model(
        self, *, max_tokens: int | None = None, keep: bool = True, progress: bool | None = None
    ) -> TimeModel:
        """How long iterations take here: measured once (a minute or two), on an idle engine that is warm.

        `max_tokens`: of iterations up to this size; None is as large as a token budget is likely to be.
        `keep`: in the user's cache folder, from where the next engine on the same machine, model and shapes takes it.
        """
        self._require_idle("time_model")
        return profiler.time_model(
            self.runner,
            max_model_len=self.max_model_len,
            max_tokens=max_tokens or device.max_token_budget(),
            folder=device.cache_folder("time_models") if keep else None,
            progress=progress,
        )

    def set_scheduler(self, config: SchedulerConfig) -> None:
        """Another policy on the same pool and programs; only while idle. A token budget "auto" is measured now.

        ValueError if its iterations can be larger than the largest shape, or more than max_num_seqs sequences.
        """
        self._require_idle("set_scheduler")
        config = check_instance("config", config, SchedulerConfig)
        if isinstance(config, Sarathi) and config.token_budget == "auto":
            config = self._resolved(config)
        scheduler, shapes = self._build(config), self.runner.shapes
        if scheduler.max_step_tokens > shapes.num_tokens[-1] or config.max_num_seqs > shapes.num_slots:
            raise ValueError(
                f"{config} plans up to {scheduler.max_step_tokens} tokens and {config.max_num_seqs} sequences; this "
                f"engine's shapes hold {shapes.num_tokens[-1]} and {shapes.num_slots}: make it with max_step_tokens="
                f"{scheduler.max_step_tokens} and a max_num_seqs of {config.max_num_seqs}"
            )
        self.scheduler = scheduler

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to return."""
        return bool(self._live or self._undelivered)

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
        params = SamplingParams() if params is None else check_instance("params", params, SamplingParams)
        params = replace(params)  # our own: the caller's holds a dict
        if self._auto is not None:
            raise ValueError('token_budget="auto" is measured by warm_up: call it before adding requests')
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
        now = self.clock()
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time_s=now if arrival_time is None else arrival_time,
            priority=priority,
        )
        live = LiveRequest(request=request, tokenizer=self.tokenizer)
        seed = int(self._rng.integers(2**63)) if params.seed is None else params.seed
        for index in range(params.n):
            seq = Sequence(request, self._next_seq_id + index, index=index, seed=seed)
            seq.max_total_tokens = self._max_total_tokens(len(token_ids), params.max_tokens)
            live.generations.append(Generation(seq, self.tokenizer))
        for generation in live.generations:
            self.scheduler.add(generation.seq)  # may refuse, the first or none: all are alike
            self._by_sequence[generation.seq.seq_id] = live, generation
        self._next_seq_id += params.n
        self._live[request_id] = live

    def step(self) -> list[RequestOutput]:
        """Run one iteration; the requests that changed. Empty when nothing did (or with lookahead, not yet).

        If it raises (Ctrl-C, memory, a policy's fault), nothing is lost: tokens that were not read are computed again
        by the next steps.
        """
        try:
            self._undelivered += self._run_iteration()
        except BaseException:
            self._recover()
            raise
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs that `step` returned and that somebody else waits for: the next `step` returns them again."""
        self._undelivered += outputs

    def _run_iteration(self) -> list[RequestOutput]:
        start = self.clock()
        plan = self.scheduler.plan(start)
        if plan:
            self._in_flight.append(_Flight(self.runner.execute(plan), start, len(plan.preempted), self.pool.num_held))
        planned = self.clock()
        if not self._in_flight or (plan and len(self._in_flight) <= self.scheduler.lookahead):
            return []
        flight = self._in_flight.popleft()
        step = flight.step.read()
        ready = self.clock()
        outputs = self._update(flight, step, ready)
        self._record(flight, host_s=planned - start + self.clock() - ready)
        return outputs

    def _recover(self) -> None:
        """After an exception inside a step: as if what it and those in flight had planned was never planned."""
        self._in_flight.clear()
        self.scheduler.restart()
        self.runner.recover()
        for request_id, live in list(self._live.items()):  # ended, and the output not handed out
            if all(generation.finish_reason for generation in live.generations):
                self._undelivered.append(live.output(live.generations))
                self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it stands; its pages are free at once. False if there is none of that name."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        for generation in live.generations:
            self.scheduler.finish(generation.seq)
            self._by_sequence.pop(generation.seq.seq_id, None)
        return True

    def drain(self) -> None:
        """Wait for steps that were dispatched for requests that have all ended (with lookahead); only while idle."""
        assert not self._live, "outputs would be lost: step until all requests have ended"
        while self._in_flight:
            self._in_flight.popleft().step.read()

    def check_integrity(self) -> None:
        """AssertionError unless every page is free, cached or held, and held by exactly the sequences alive."""
        self.pool.check_integrity([generation.seq for _, generation in self._by_sequence.values()])

    def _build(self, config: SchedulerConfig) -> Scheduler:
        return config.build(
            self.pool,
            max_model_len=self.max_model_len,
            tile=device.tile(),
            lookahead=self._lookahead,
            default_token_budget=device.default_token_budget(),
        )

    def _resolved(self, config: Sarathi, *, keep: bool = True, progress: bool | None = None) -> Sarathi:
        """With the largest budget that holds the SLO, all decodes and the chunk half-way through the model's length."""
        assert config.tbt_slo_s is not None
        model = self.time_model(keep=keep, progress=progress)
        budget = choose_budget(
            model,
            tbt_slo_s=config.tbt_slo_s,
            max_num_seqs=config.max_num_seqs,
            context=max(self.max_model_len // 2, 1),
            tile=device.tile(),
        )
        return config.resolved(budget)

    def _require_idle(self, what: str) -> None:
        if self._live:
            raise ValueError(f"{what} needs an idle engine; {len(self._live)} requests have not ended")
        self.drain()

    def _prompt_ids(self, prompt: str | None, token_ids: Iterable[int] | None) -> tuple[int, ...]:
        if (prompt is None) == (token_ids is None):
            raise ValueError("give either prompt (text) or prompt_token_ids, and not both")
        if prompt is not None:
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give prompt_token_ids")
            if isinstance(prompt, str) and len(prompt) > self._max_prompt_chars:
                raise ValueError(
                    f"the prompt has {len(prompt)} characters, more than max_model_len={self.max_model_len} tokens "
                    f"can hold"
                )
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

    def _update(self, flight: _Flight, step: ReadStep, now: float) -> list[RequestOutput]:
        """Tokens to their sequences, ends found and pages released, one output for each request that changed."""
        changed: dict[int, tuple[LiveRequest, list[Generation]]] = {}
        for i, chunk in enumerate(flight.step.chunks):
            entry = self._by_sequence.get(chunk.sequence.seq_id)
            if entry is None:  # ended while the step was on its way
                continue
            live, generation = entry
            if step.prompt_scores is not None:
                live.add_prompt_scores(chunk, step.prompt_scores, step.first_rows[i])
            if chunk.samples:
                try:
                    generation.add_token(step.tokens[i], step.scores, i, eos_token_ids=self.eos_token_ids, now=now)
                except Exception as error:  # a tokenizer's fault, say: it ends this one and no other
                    generation.finish_reason, generation.stop_reason = "abort", f"{type(error).__name__}: {error}"
                changed.setdefault(id(live), (live, []))[1].append(generation)
                if generation.finish_reason is not None:
                    self.scheduler.finish(generation.seq)
                    del self._by_sequence[generation.seq.seq_id]
        outputs = []
        for live, generations in changed.values():
            outputs.append(live.output(generations))
            if outputs[-1].finished:
                del self._live[live.request.request_id]
        return outputs

    def _record(self, flight: _Flight, *, host_s: float) -> None:
        chunks = tuple(
            ChunkStats(chunk.sequence.request.request_id, chunk.sequence.index, chunk.start, chunk.num_tokens)
            for chunk in flight.step.chunks
        )
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        self.last_step = StepStats(
            chunks=chunks,
            start_s=flight.start_s,
            wall_s=self.clock() - flight.start_s,
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
