"""An engine without a model, for schedulers.

It plans, lays the chunks out in a pool of tagged positions, and reads the tokens when the steps in flight are `depth`.
The token at position p is p, so outputs must count up from the prompt's length. What every policy promises is checked
at each step.
"""

import itertools
import random
import warnings
from collections import deque
from typing import NamedTuple

from sarathi_jax import schedulers as policies
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Request, SamplingParams, Sequence
from sarathi_jax.schedulers import Sarathi, SarathiScheduler, arrival_order

WHOLE = (
    policies.VLLMScheduler,
    policies.OrcaScheduler,
    policies.FasterTransformerScheduler,
    policies.HybridOnlyScheduler,
)
MIXES = policies.SarathiScheduler, policies.OrcaScheduler
NEVER_MIXES = policies.VLLMScheduler, policies.FasterTransformerScheduler, policies.ChunkedOnlyScheduler


class Engine:
    def __init__(
        self,
        *,
        budget=64,
        max_num_seqs=8,
        num_pages=1000,
        page_size=16,
        max_model_len=10_000,
        tile=1,
        lookahead=0,
        depth=1,
        watermark=0.01,
        num_stages=1,
        window=None,
        config=None,
    ):
        self.pool = PagePool(num_pages, page_size, window)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = config or Sarathi(token_budget=budget, max_num_seqs=max_num_seqs, watermark=watermark)
            self.scheduler = config.build(
                self.pool, max_model_len=max_model_len, tile=tile, lookahead=lookahead, num_stages=num_stages
            )
        self.depth = depth
        self.in_flight = deque()
        self.stops = {}
        self.finished = []
        self.num_steps = 0
        self.ids = itertools.count()
        self.kv = {}
        self.preempted = []

    def add(self, prompt_len, max_tokens=4, *, arrival=None, priority=0, stop_after=None):
        seq_id = next(self.ids)
        request = Request(
            request_id=f"r{seq_id}",
            prompt_token_ids=tuple(range(prompt_len)),
            params=SamplingParams(max_tokens=max_tokens),
            arrival_time_s=float(self.num_steps if arrival is None else arrival),
            priority=priority,
        )
        total = self.scheduler.max_total_tokens(prompt_len, max_tokens)
        seq = Sequence(request=request, seq_id=seq_id, max_total_tokens=total)
        self.stops[seq] = stop_after
        self.scheduler.add(seq)
        return seq

    def step(self):
        """Plan and lay out one step; read the oldest one if `depth` are in flight, or if there was nothing to plan."""
        scheduler = self.scheduler
        unfinished = [s for s in scheduler.running if not s.at_limit]
        ready = [s for s in unfinished if s.num_pending <= scheduler.lookahead]
        decodes = [s for s in ready if s.is_decoding]
        oldest = ready[0] if ready and ready[0] is unfinished[0] else None
        before = {s: (s.num_computed, s.num_tokens) for s in [*scheduler.running, *scheduler.waiting]}
        behind = lambda s: self.first_seen(s.num_computed) // self.pool.page_size - s.num_released
        was_running, was_held = bool(scheduler.running), any(s.page_ids[behind(s) :] for s in unfinished)
        plan = scheduler.plan(float(self.num_steps))
        self.num_steps += 1
        self.check(plan, before)
        self.check_policy(plan, decodes, oldest, was_running, was_held)
        for chunk in plan.chunks:
            self.lay_out(chunk)
        self.preempted += plan.preempted
        if plan:
            self.in_flight.append(plan)
        if self.in_flight and (len(self.in_flight) >= self.depth or not plan):
            self.read(self.in_flight.popleft())
        return plan

    def lay_out(self, chunk):
        seq, size = chunk.sequence, self.pool.page_size
        num_known = seq.prompt_len + len(seq.output_token_ids)
        num_on_device = self.scheduler.lookahead if chunk.num_tokens == 1 and chunk.start > 0 else 0
        assert chunk.end <= num_known + num_on_device, f"{chunk} holds tokens that nobody knows yet"
        place = lambda position: (seq.page_ids[position // size - seq.num_released], position % size)
        for position in range(chunk.start, chunk.end):
            self.kv[place(position)] = (seq.seq_id, position)
        for position in range(self.first_seen(chunk.start), chunk.end):
            assert position // size >= seq.num_released, f"position {position} of {seq} was given away"
            tag = self.kv.get(place(position))
            assert tag == (seq.seq_id, position), f"position {position} of {seq} reads {tag}"

    def first_seen(self, position):
        """The oldest key that a query there sees."""
        return 0 if self.pool.window is None else max(position - self.pool.window + 1, 0)

    def read(self, plan):
        for chunk in plan.chunks:
            seq = chunk.sequence
            if not chunk.samples or seq.is_finished:
                continue
            seq.output_token_ids.append(chunk.end)
            seq.num_pending -= 1
            if (seq.at_limit and not seq.num_pending) or len(seq.output_token_ids) == self.stops[seq]:
                self.finished.append(seq)
                self.scheduler.finish(seq)

    def abort(self, seq):
        self.scheduler.finish(seq)

    def fail(self):
        """A step raised: what was planned and not read never was."""
        self.in_flight.clear()
        self.scheduler.restart()

    def run(self, max_steps=2000):
        plans = []
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            plans.append(self.step())
        assert not self.scheduler.has_unfinished, f"not done after {max_steps} steps: {self.scheduler.running}"
        while self.in_flight:
            self.read(self.in_flight.popleft())
        self.check_idle()
        return plans

    def check(self, plan, before):
        scheduler = self.scheduler
        scheduler.check_integrity()
        chunks = plan.chunks
        assert plan or self.in_flight or not scheduler.has_unfinished, "nothing planned, nothing in flight, work left"
        assert all(c.num_tokens >= 1 for c in chunks), "an empty chunk"
        assert len({c.sequence for c in chunks}) == len(chunks), "two chunks of one sequence"
        for c in chunks:
            num_computed, num_tokens = before[c.sequence]
            assert c.start == num_computed, f"{c} computes tokens again or leaves some out"
            assert c.samples == (c.end == num_tokens), f"{c} of {num_tokens} tokens"
            assert c.sequence.num_tokens <= c.sequence.max_total_tokens
            num_pages = self.pool.num_pages_for(scheduler.max_model_len if scheduler.reserves else c.end)
            num_pages -= self.first_seen(c.start) // self.pool.page_size
            if getattr(scheduler, "priority_preemption", False):
                assert len(c.sequence.page_ids) >= num_pages
            else:
                assert len(c.sequence.page_ids) == num_pages, "pages for exactly these tokens and what they see"
            if self.pool.window is not None and not scheduler.reserves:
                most = (self.pool.window + c.num_tokens - 3) // self.pool.page_size + 2  # its keys touch no more
                assert num_pages <= most, f"{num_pages} pages for {c}, more than {most}"

    def check_policy(self, plan, decodes, oldest, was_running, was_held):
        scheduler, planned = self.scheduler, {c.sequence for c in plan.chunks}
        urgent_victims = plan.preempted if getattr(scheduler, "priority_preemption", False) else ()
        assert plan.num_tokens <= scheduler.max_step_tokens, "no shape holds it"
        assert not planned & set(plan.preempted), "preempted and planned at once"
        assert plan.chunks or not plan.admitted, "admitted by a plan that nobody will see"
        assert all(s.slot is not None for s in plan.admitted), "admitted without a slot"
        if scheduler.reserves:
            assert not plan.preempted, "reserves and preempts"
        if isinstance(scheduler, WHOLE):
            for c in plan.chunks:
                assert c.sequence in decodes or (c.start == 0 and c.samples), f"part of a prompt: {c}"
        if isinstance(scheduler, NEVER_MIXES):
            assert not planned & set(decodes) or planned <= set(decodes), "prompts and decodes in one iteration"
        elif isinstance(scheduler, MIXES) and scheduler.num_stages == 1:
            assert planned | set(plan.preempted) >= set(decodes), "a decode stalls"
            if oldest in decodes and oldest not in urgent_victims:
                assert oldest in planned, "the oldest sequence stalls"
        if isinstance(scheduler, policies.FasterTransformerScheduler):
            assert not (plan.admitted and was_running), "a slot was filled again"
        if isinstance(scheduler, policies.SarathiScheduler) and not isinstance(scheduler, WHOLE):
            assert plan.num_tokens <= max(scheduler.token_budget, len(decodes)), "more than the budget"
        if plan.admitted:
            last = max(map(scheduler.order, plan.admitted))
            passed = [s for s in scheduler.waiting if s not in urgent_victims and scheduler.order(s) < last]
            assert not passed, "the head was overtaken"
            assert set(plan.preempted) <= set(urgent_victims), "admitted while pages are short"
            if was_held and not scheduler.reserves and not getattr(scheduler, "priority_preemption", False):
                assert scheduler.pool.num_free >= scheduler._num_spare, "the watermark was not kept"

    def check_idle(self):
        self.scheduler.check_integrity()
        assert self.pool.num_free == self.pool.num_pages
        assert not self.scheduler.waiting
        assert not self.scheduler.running
        for seq in self.finished:
            want = seq.params.max_tokens or seq.max_total_tokens - seq.prompt_len
            want = min(want, seq.max_total_tokens - seq.prompt_len, self.stops[seq] or want)
            assert seq.output_token_ids == list(range(seq.prompt_len, seq.prompt_len + want)), f"outputs of {seq}"


def sizes(plan):
    return [(c.sequence.request.request_id, c.num_tokens) for c in plan.chunks]


class Soaked(NamedTuple):
    """How much was preempted, refused and aborted, how often one sequence was preempted at most, and how many were
    served whose tokens the pool could not hold at once."""

    preempted: int
    refused: int
    aborted: int
    most: int
    longer: int


def soak(seed, make_config=Sarathi, *, windows=(None,)):
    """Random load on a random small engine; with windows a smaller one yet, some of whose steps fail.

    `make_config` takes token_budget (of tiles), max_num_seqs and watermark.
    """
    rng = random.Random(seed)
    window = random.Random(seed).choice(windows)
    modes = [(0, 1, 1), (0, 1, 1), (1, 2, 1), (1, 2, 1), (1, 1, 1), (0, 2, 1), (0, 2, 2), (0, 3, 3)]
    lookahead, depth, num_stages = rng.choice(modes)
    page_size = rng.choice([1, 2, 4, 16])
    num_pages = rng.randint(3, 14) * max(1, (8 if window is None else 4) // page_size)
    tile = rng.choice([1, 2, 8])
    max_model_len = rng.choice([40, 200])
    token_budget, max_num_seqs = tile * rng.randint(1, 6), rng.randint(1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = make_config(
            token_budget=token_budget, max_num_seqs=max_num_seqs, watermark=rng.choice([0.0, 0.01, 0.2])
        )
    if isinstance(config, (policies.Orca, policies.FasterTransformer)):
        num_pages = -(-max_model_len // page_size) * rng.randint(1, 3) + rng.randint(0, 3)
    engine = Engine(
        config=config,
        tile=tile,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        lookahead=lookahead,
        depth=depth,
        num_stages=num_stages,
        window=window,
    )
    num_refused = num_aborted = work = 0
    alive = []
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            prompt_len = rng.choice([1, rng.randint(1, 12), rng.randint(1, 60)])
            max_tokens = rng.choice([1, rng.randint(1, 30), None])
            stop_after = rng.choice([None, None, rng.randint(1, 10)])
            arrival = engine.num_steps - rng.choice([0, 0, 5])
            try:
                seq = engine.add(
                    prompt_len, max_tokens, arrival=arrival, priority=rng.choice([0] * 5 + [1]), stop_after=stop_after
                )
            except ValueError:
                num_refused += 1
            else:
                alive.append(seq)
                work += seq.max_total_tokens
        if alive and rng.random() < 0.15:
            engine.abort(alive.pop(rng.randrange(len(alive))))
            num_aborted += 1
            engine.scheduler.check_integrity()
        if window is not None and rng.random() < 0.05:
            engine.fail()
            engine.scheduler.check_integrity()
        engine.step()
    engine.run(max_steps=40 * work + 100)
    finished = set(engine.finished)
    assert all(s.is_finished for s in alive)
    assert num_aborted + len(finished) >= len(alive)
    assert all(s in finished for s in alive), "ended by neither an abort nor its last token"
    longer = [s for s in finished if s.num_tokens - 1 > num_pages * page_size]
    most = max((s.num_preemptions for s in alive), default=0)
    return Soaked(len(engine.preempted), num_refused, num_aborted, most, len(longer))


class ShortestFirstScheduler(SarathiScheduler):
    def order(self, seq):
        return (seq.prompt_len, *arrival_order(seq))


class ShortestFirst(Sarathi):
    scheduler_class = ShortestFirstScheduler


def toy_cost(decodes, chunks):
    """Milliseconds: 1 a decode, 0.01 a token decodes attend to, 1 a prompt token, 0.02 a token that it attends to."""
    prompts = sum(n * (1 + 0.02 * (start + n / 2)) for start, n in chunks)
    return 1e-3 * (len(decodes) + 0.01 * sum(decodes) + prompts)
