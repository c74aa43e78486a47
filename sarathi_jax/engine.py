"""The engine: requests in, iterations run, outputs out. A step is plan, execute, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TypeVar

import numpy as np

from sarathi_jax import device, profiler
from sarathi_jax.attention import Backend
from sarathi_jax.budget import TimeModel
from sarathi_jax.config import CacheConfig, check_instance, check_positive
from sarathi_jax.flight import Flight
from sarathi_jax.generation import Generation, LiveRequest
from sarathi_jax.intake import Intake
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.placement import PlacedPart, is_shared, layout, load_parts, place_model
from sarathi_jax.models.weights import Quantization, load_weights
from sarathi_jax.outputs import RequestOutput, StepStats
from sarathi_jax.pages import PagePool
from sarathi_jax.parallel import Parallel
from sarathi_jax.pipeline import StageClock, make_runner
from sarathi_jax.progress import progress_bar
from sarathi_jax.request import SamplingParams, Sequence, StepPlan
from sarathi_jax.runner import ReadStep
from sarathi_jax.schedulers import Sarathi, Scheduler, SchedulerConfig
from sarathi_jax.shapes import Shapes
from sarathi_jax.tokenizer import Tokenizer

_T = TypeVar("_T")


class Engine:
    """Online use: add requests at any time, call `step` while `has_unfinished`.

    One thread calls it. `clock` gives seconds; all times in outputs are its. `lookahead` 1 plans and dispatches a step
    before the tokens of the one before it are read, so that the device never waits for the host; 0 reads each step
    first. None chooses 1 on accelerators and 0 on a CPU, where host and device share the cores. Outputs are the same.

    Shapes are made for the scheduler's largest iteration, and for `max_step_tokens` if that is more (for a later
    `set_scheduler`). `Sarathi(token_budget="auto", tbt_slo_s=...)` is measured at `warm_up`.

    `parallel`: the devices that share the model. In a pipeline as many micro-batches are in flight as there are stages,
    the oldest read when the last was dispatched, and `lookahead` is 0; a sequence whose next token is on its way sits
    out, while chunks of a prompt follow each other. Replicas (`data`) are `replicas.Replicas`.
    """

    def __init__(
        self,
        model: Decoder | Seq[PlacedPart],
        tokenizer: Tokenizer | None,
        *,
        parallel: Parallel | None = None,
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
        if isinstance(model, Decoder) and is_shared(parallel):
            model = place_model(model, *layout(model.config, parallel))
        parts: Seq[PlacedPart] = () if isinstance(model, Decoder) else model
        num_stages = max(len(parts), 1)
        if isinstance(model, Decoder):
            decoder, config = model, model.config
        else:
            decoder = next(placed.decoder for placed in model if placed.decoder is not None)
            config = model[0].part.config
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
        if num_stages > 1 and lookahead:
            raise ValueError(
                f"{lookahead=} with {num_stages} stages: micro-batches in flight are planned ahead already; use 0"
            )
        if lookahead is None:
            lookahead = 0 if device.platform() == "cpu" or num_stages > 1 else 1
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        dtype = device.resolve_dtype(cache.dtype or str(decoder.dtype))
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = config.vocab_size
        self._intake = Intake(tokenizer, vocab_size=config.vocab_size, max_model_len=max_model_len)
        self._intake.check_ids("eos_token_ids", self.eos_token_ids)
        num_pages = device.num_pages(
            config, cache, dtype=dtype, max_num_seqs=scheduler.max_num_seqs, max_model_len=max_model_len,
            stages=[(placed.part.local_config, placed.mesh) for placed in parts],
        )  # fmt: skip
        self.pool = PagePool(num_pages, cache.page_size, config.kv_window)
        self._lookahead, self._num_stages = lookahead, num_stages
        self.auto: Sarathi | None = None
        """The policy whose token budget has still to be measured."""
        if isinstance(scheduler, Sarathi) and scheduler.token_budget == "auto":
            self.auto = scheduler
            scheduler = scheduler.resolved(device.max_token_budget())
        self.scheduler = self._build(scheduler)
        shapes = Shapes.make(
            max_tokens=max(self.scheduler.max_step_tokens, max_step_tokens),
            tile=device.tile(),
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            page_size=cache.page_size,
            num_pages=num_pages,
            window=config.kv_window,
        )
        self.runner = make_runner(model, shapes, stop_ids=self.eos_token_ids, kv_dtype=dtype)
        self.replica = 0
        """Its number among those of `replicas.Replicas`."""
        self.last_step: StepStats | None = None
        """The iteration read last, for whoever wants to watch."""
        self.clock = clock
        self.on_plan: Callable[[float, StepPlan], None] | None = None
        """Told of every plan, and of the time it was made for, before it is sent off."""
        is_timed = num_stages > 1 and all(placed.decoder is not None for placed in parts)  # all stages are here
        self._stage_clock = StageClock(num_stages, lambda: self.clock()) if is_timed else None
        self._rng = np.random.default_rng(seed)
        self._live: dict[str, LiveRequest] = {}
        self._by_sequence: dict[int, tuple[LiveRequest, Generation]] = {}
        self._in_flight: deque[Flight] = deque()
        self._undelivered: list[RequestOutput] = []
        self._next_seq_id = 0

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        scheduler: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
        parallel: Parallel | None = None,
        dtype: str = "auto",
        quantization: Quantization | None = None,
        attention: Backend | None = None,
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
        """An engine on a checkpoint: a known name, a Hugging Face folder or hub name, a GGUF file, or a saved model.

        `warm_up` compiles every shape now (else each at its first use), through a persistent cache in the user's cache
        folder if `compile_cache`. `progress` None shows a bar when stderr is a terminal. `eos_token_ids` None takes the
        checkpoint's. `quantization` as in `weights.load_weights`, `attention` as in `attention.select_backend`. The
        rest as in `Engine`.
        """
        if not isinstance(model, (str, Path)):
            raise ValueError(f"model={model!r} must be a name or a path")
        weight_dtype = device.resolve_dtype(dtype)
        checkpoint = open_checkpoint(model)
        tokenizer = checkpoint.tokenizer()
        if is_shared(parallel):
            where = layout(checkpoint.config, parallel)
            placed = load_parts(checkpoint, weight_dtype, *where, quantization=quantization, attention=attention)
        else:
            weights = load_weights(checkpoint, weight_dtype, quantization=quantization)
            placed = Decoder(checkpoint.config, weights, attention=attention)
        engine = cls(
            placed,
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
        """Compile and run every shape, so that nothing compiles later. Returns the seconds it took.

        A token budget "auto" is measured then; of an engine of several processes `distributed.serve` has it measured.
        """
        bar = progress_bar("compiling", "programs", show=progress)
        with device.compilation_cache(compile_cache), bar as report:
            seconds = self.runner.warm_up(progress=report)
        if self.auto is not None and not self.is_joint:
            model = self.time_model(keep=compile_cache, progress=progress)
            self.settle_auto(profiler.token_budget(self.auto, model, self.max_model_len))
        return seconds

    @property
    def is_joint(self) -> bool:
        """Whether other processes have a part in it."""
        return any(mesh.is_multi_process for mesh in self.runner.meshes)

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

    def settle_auto(self, token_budget: int) -> None:
        """Give the policy in `auto` the token budget that was measured."""
        assert self.auto is not None
        config, self.auto = self.auto, None
        self.set_scheduler(config.resolved(token_budget))

    def set_scheduler(self, config: SchedulerConfig) -> None:
        """Another policy on the same pool and programs; only while idle. A token budget "auto" is measured now.

        ValueError if its iterations can be larger than the largest shape, or more than max_num_seqs sequences.
        """
        self._require_idle("set_scheduler")
        config = check_instance("config", config, SchedulerConfig)
        if isinstance(config, Sarathi) and config.token_budget == "auto":
            config = config.resolved(profiler.token_budget(config, self.time_model(), self.max_model_len))
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

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; after `warm_up` it never changes."""
        return self.runner.num_compiled

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
        if self.auto is not None:
            raise ValueError('token_budget="auto" is measured by warm_up: call it before adding requests')
        request = self._intake.request(
            request_id, prompt, prompt_token_ids, params, arrival_time=arrival_time, priority=priority, now=self.clock()
        )
        if request_id in self._live:
            raise ValueError(f"request_id={request_id!r} is in use by a request that has not ended; choose another")
        params = request.params
        live = LiveRequest(request=request, tokenizer=self.tokenizer)
        seed = int(self._rng.integers(2**63)) if params.seed is None else params.seed
        for index in range(params.n):
            seq = Sequence(request, self._next_seq_id + index, index=index, seed=seed)
            seq.max_total_tokens = self.scheduler.max_total_tokens(seq.prompt_len, params.max_tokens)
            live.generations.append(Generation(seq, self.tokenizer))
        for generation in live.generations:
            self.scheduler.add(generation.seq)  # may refuse, the first or none: all are alike
            self._by_sequence[generation.seq.seq_id] = live, generation
        self._next_seq_id += params.n
        self._live[request_id] = live

    def step(self) -> list[RequestOutput]:
        """Run one iteration; the requests that changed. Empty when nothing did (or with steps in flight, not yet).

        If it raises (Ctrl-C, memory, a policy's fault), nothing is lost: tokens that were not read are computed again
        by the next steps.
        """
        planned = self.dispatch()
        return [] if planned and len(self._in_flight) < self._depth else self.collect()

    def dispatch(self) -> bool:
        """Half a step: plan an iteration and send it off, without waiting. False with nothing to plan, or no room."""
        return len(self._in_flight) < self._depth and self._guarded(self._dispatch)

    def collect(self) -> list[RequestOutput]:
        """The other half: wait for the oldest step in flight, if there is one; the requests that changed."""
        self._guarded(self._collect)
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs that `step` returned and that somebody else waits for: the next `step` returns them again."""
        self._undelivered += outputs

    @property
    def oldest(self) -> Flight | None:
        """The step that `collect` waits for."""
        return self._in_flight[0] if self._in_flight else None

    @property
    def _depth(self) -> int:
        """Steps in flight when one is read."""
        return max(self._num_stages, self.scheduler.lookahead + 1)

    def _guarded(self, part: Callable[[], _T]) -> _T:
        try:
            return part()
        except BaseException:
            self._recover()
            raise

    def _dispatch(self) -> bool:
        start = self.clock()
        plan = self.scheduler.plan(start)
        if self.on_plan is not None:
            self.on_plan(start, plan)
        if plan:
            step = self.runner.execute(plan)
            ends = [] if self._stage_clock is None else self._stage_clock.watch(step.stage_outputs)
            flight = Flight(
                step=step, start_s=start, host_s=self.clock() - start, num_preempted=len(plan.preempted),
                num_pages_held=self.pool.num_held, replica=self.replica, ends=ends,
            )  # fmt: skip
            self._in_flight.append(flight)
        return bool(plan)

    def _collect(self) -> None:
        if not self._in_flight:
            return
        flight = self._in_flight.popleft()
        step = flight.step.read()
        ready = self.clock()
        self._undelivered += self._update(flight, step, ready)
        now = self.clock()
        host_s = flight.host_s + now - ready
        self.last_step = flight.stats(self._stage_clock, end_s=now, host_s=host_s, num_pages=self.pool.num_pages)

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
            num_stages=self._num_stages,
            default_token_budget=device.default_token_budget(),
        )

    def _require_idle(self, what: str) -> None:
        if self._live:
            raise ValueError(f"{what} needs an idle engine; {len(self._live)} requests have not ended")
        self.drain()

    def _update(self, flight: Flight, step: ReadStep, now: float) -> list[RequestOutput]:
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
