"""Serving on a virtual clock: the engine's plans, times worked out by hand, and nothing lost under load."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import warnings
from collections import Counter

import pytest

import sarathi_jax as sj
from sarathi_jax.budget import TimeModel
from sarathi_jax.capacity import Slo, find_capacity, open_loop_trial
from sarathi_jax.driver import RunFailed, run_open_loop
from sarathi_jax.metrics import Report
from sarathi_jax.outputs import ChunkStats, StepStats
from sarathi_jax.request import SamplingParams
from sarathi_jax.schedulers import SarathiScheduler
from sarathi_jax.shapes import token_shapes
from sarathi_jax.simulator import Simulator
from sarathi_jax.workload import Poisson, WorkItem, Workload, make_workload
from sarathi_jax.workload_lengths import OPENCHAT_SHAREGPT4

from .harness import Engine

TICK = 2.0**-10  # s; powers of two add up exactly

POLICIES = {
    "sarathi": lambda budget, n: sj.Sarathi(token_budget=budget, max_num_seqs=n),
    "vllm": lambda budget, n: sj.VLLM(max_num_seqs=n),
    "orca": lambda budget, n: sj.Orca(max_num_seqs=n),
    "faster_transformer": lambda budget, n: sj.FasterTransformer(max_num_seqs=n),
    "chunked_only": lambda budget, n: sj.ChunkedOnly(token_budget=budget, max_num_seqs=n),
    "hybrid_only": lambda budget, n: sj.HybridOnly(token_budget=budget, max_num_seqs=n),
}


@dataclasses.dataclass(frozen=True)
class Stages:
    """A pipeline: so long a token in each stage, on top of `fixed_s`."""

    per_token_s: tuple[float, ...] = (TICK,)
    fixed_s: float = 0.0
    hop: float = 0.0
    host_s: float = 0.0

    @property
    def num_stages(self):
        return len(self.per_token_s)

    def stage_s(self, decodes, chunks):
        num_tokens = len(decodes) + sum(tokens for _, tokens in chunks)
        return tuple(self.fixed_s + num_tokens * each for each in self.per_token_s)

    def hop_s(self, num_tokens):
        return self.hop


def one_second(decodes, chunks):
    return 1.0


def simulator(scheduler=None, cost=one_second, **options):
    scheduler = scheduler or sj.Sarathi(token_budget=64, max_num_seqs=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Simulator(scheduler, cost, **{"num_pages": 1000, "max_model_len": 4096, **options})


def workload(*items):
    """Items as (arrival, prompt, outputs)."""
    return Workload(
        items=tuple(WorkItem(arrived_at_s=t, num_prefill_tokens=p, num_decode_tokens=d) for t, p, d in items)
    )


def plans(report):
    return [tuple((c.request_id, c.start, c.num_tokens) for c in step.chunks) for step in report.iterations]


# ---------------------------------------------------------------------------------------------------------- one engine


def test_times_of_a_run_are_those_of_the_cost():
    report = run_open_loop(simulator(), workload((0.0, 100, 3), (0.25, 10, 1)))
    assert plans(report) == [
        (("r0", 0, 64),),
        (("r0", 64, 36), ("r1", 0, 10)),
        (("r0", 100, 1),),
        (("r0", 101, 1),),
    ]
    first, second = report.requests
    assert first.token_s == (2.0, 3.0, 4.0) and second.token_s == (2.0,)
    assert (first.first_scheduled_s, second.first_scheduled_s) == (0.0, 1.0)
    assert (second.sent_s, second.arrival_s) == (0.25, 0.25), "nobody is busy: requests are on time"
    assert (report.start_s, report.end_s, report.num_compiled) == (0.0, 4.0, None)
    assert [(s.start_s, s.wall_s, s.num_prefill_tokens, s.num_decode_tokens) for s in report.iterations] == [
        (0.0, 1.0, 64, 0), (1.0, 1.0, 46, 0), (2.0, 1.0, 0, 1), (3.0, 1.0, 0, 1),
    ]  # fmt: skip
    assert [s.num_pages_held for s in report.iterations] == [4, 8, 7, 7]
    assert [s.stages for s in report.iterations] == [((i, i + 1.0),) for i in range(4)]


def test_a_time_model_is_a_cost():
    model = TimeModel(
        shapes=(16, 64), shape_s=(0.5, 1.0), per_decode_s=0.0, per_walked_key_s=0.25, per_chunk_s=0.0, per_pair_s=0.0,
        per_chunk_key_s=0.0,
    )  # fmt: skip
    [record] = run_open_loop(simulator(cost=model), workload((0.0, 20, 3))).requests
    assert record.tbts_s == [0.5 + 21 / 4, 0.5 + 22 / 4], "a decode attends to itself too"


@pytest.mark.parametrize(("lookahead", "token_s"), [(0, (1.25, 2.5, 3.75, 5.0)), (1, (1.25, 2.25, 3.25, 4.25))])
def test_lookahead_hides_the_host(lookahead, token_s):
    """Planned before the step ahead of it is read, an iteration starts when that ends."""
    cost = Stages(per_token_s=(0.0,), fixed_s=1.0, host_s=0.25)
    report = run_open_loop(simulator(cost=cost, lookahead=lookahead), workload((0.0, 8, 4)))
    assert report.requests[0].token_s == token_s
    assert len(report.iterations) == 4


def test_a_host_that_is_slower_than_the_device_is_what_counts():
    cost = Stages(per_token_s=(0.0,), fixed_s=0.25, host_s=1.0)
    report = run_open_loop(simulator(cost=cost, lookahead=1), workload((0.0, 8, 6)))
    assert report.requests[0].tbts_s[1:] == [1.0] * 4


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_those_of_an_engine(name, lookahead):
    """Against a loop of its own that plans, lays tokens out and reads them (`harness`); pages are scarce."""
    rng, asked = random.Random(3), []
    for _ in range(24):
        asked.append((rng.randint(1, 90), rng.randint(1, 40)))
    config = POLICIES[name](32, 6)
    engine = Engine(
        config=config, num_pages=20, page_size=8, max_model_len=140, lookahead=lookahead, depth=1 + lookahead
    )
    for prompt_len, max_tokens in asked:
        engine.add(prompt_len, max_tokens, arrival=0.0)
    expected = [
        tuple((c.sequence.request.request_id, c.start, c.num_tokens) for c in plan.chunks)
        for plan in engine.run(max_steps=20_000)
        if plan
    ]
    sim = simulator(config, num_pages=20, page_size=8, max_model_len=140, lookahead=lookahead)
    report = run_open_loop(sim, workload(*((0.0, p, d) for p, d in asked)))
    assert plans(report) == expected
    assert [r.output_len for r in report.requests] == [d for _, d in asked]
    preemptions = Counter(s.request.request_id for s in engine.preempted)
    assert [r.num_preemptions for r in report.requests] == [preemptions[r.request_id] for r in report.requests]
    assert name in ("orca", "faster_transformer") or preemptions


def test_a_policy_of_ones_own():
    class Halves(SarathiScheduler):
        def chunk_size(self, draft, seq):
            return -(-super().chunk_size(draft, seq) // 2)

    class HalvesConfig(sj.SchedulerConfig):
        def build(self, pool, *, tile, default_token_budget=512, **limits):
            return Halves(self, pool, token_budget=32, **limits)

    report = run_open_loop(simulator(HalvesConfig()), workload((0.0, 20, 1)))
    assert [step.num_prefill_tokens + step.num_decode_tokens for step in report.iterations] == [10, 5, 3, 1, 1]


def test_padding_is_counted_by_the_engines_shapes():
    config = sj.Sarathi(token_budget=64, max_num_seqs=8)
    report = run_open_loop(simulator(config, tile=16), workload((0.0, 70, 3)))
    shapes = token_shapes(64, 16)
    assert [s.num_padding for s in report.iterations] == [0, min(n for n in shapes if n >= 6) - 6, 7, 7]
    with pytest.raises(ValueError, match="multiple of the matmul tile 48"):
        simulator(config, tile=48)


def test_priorities_and_a_length_limit_from_the_model():
    """`max_tokens` None runs to the model's length; a lower priority number goes first."""
    sim = simulator(sj.Sarathi(token_budget=64, max_num_seqs=1), max_model_len=40)
    for name, priority in (("late", 1), ("soon", 0)):
        params = SamplingParams(max_tokens=None)
        sim.add_request(name, prompt_token_ids=iter(range(30)), params=params, priority=priority)
    ends = {}
    while sim.has_unfinished:
        ends |= {output.request_id: output for output in sim.step() if output.finished}
    assert list(ends) == ["soon", "late"]
    assert [len(output.token_ids) for output in ends.values()] == [10, 10]


# ------------------------------------------------------------------------------------- measurement: capacity, results


def test_a_capacity_search_finds_the_service_rate():
    """One at a time, 0.5 s each: 2 requests/s; above it the queue grows, however short the trial."""
    items = make_workload(num_requests=400, arrivals=Poisson(rate=1.0), lengths=OPENCHAT_SHAREGPT4, seed=0)
    ones = dataclasses.replace(
        items, items=tuple(dataclasses.replace(i, num_prefill_tokens=1, num_decode_tokens=1) for i in items)
    )
    slo = Slo(tbt_p99_s=1.0)
    sim = simulator(sj.Sarathi(token_budget=8, max_num_seqs=1), lambda decodes, chunks: 0.5)
    found = find_capacity(open_loop_trial(sim, ones, slo), slo, start_rate=0.5)
    assert found.converged and found.rate is not None and 1.7 < found.rate <= 2.15


def test_the_same_seed_gives_the_same_bytes():
    def run():
        items = make_workload(num_requests=60, arrivals=Poisson(rate=4.0), lengths=OPENCHAT_SHAREGPT4, seed=3)
        cost = Stages(per_token_s=(TICK / 8, TICK / 8), fixed_s=TICK)
        sim = simulator(cost=cost, num_replicas=2, num_pages=1200, max_model_len=8192)
        return run_open_loop(sim, items, num_warm_up=2)

    report, again = run(), run()
    text = report.to_json()
    assert text == again.to_json()
    assert Report.from_json(text) == report and Report.from_json(text).to_json() == text


def test_chunks_made_late_are_chunks():
    step = run_open_loop(simulator(), workload((0.0, 100, 3), (0.25, 10, 1))).iterations[1]
    made = (ChunkStats("r0", 0, 64, 36), ChunkStats("r1", 0, 0, 10))
    assert step.chunks == made and made == step.chunks and tuple(step.chunks) == made
    assert step.chunks[1] == made[1] and step.chunks[:1] == made[:1] and hash(step.chunks) == hash(made)
    assert step.num_seqs == 2 and step == dataclasses.replace(step, chunks=made)
    assert step.chunks != made[:1] and step.chunks != 3


def operations(num_requests):
    """Calls made, Python's and C's, and iterations, of a run whose queue and batch stay as long as they are."""
    items = workload(*((i / 2, 40, 12) for i in range(num_requests)))
    sim = simulator(cost=Stages(per_token_s=(TICK,), fixed_s=0.125))
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        report = run_open_loop(sim, items)
    finally:
        sys.setprofile(None)
    return count, len(report.iterations)


def test_work_is_linear_in_iterations():
    few, many = operations(100), operations(1600)
    assert many[1] > 15 * few[1]
    assert many[0] / many[1] == pytest.approx(few[0] / few[1], rel=0.05)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_named_with_its_plan(seconds):
    sim = simulator(cost=lambda decodes, chunks: seconds if decodes else 1.0)
    with pytest.raises(
        RunFailed, match=rf"cost gave {seconds} s for stage 0 of 1 decodes \(contexts \[71\]\)"
    ) as error:
        run_open_loop(sim, workload((0.0, 70, 3)))
    assert len(error.value.report.iterations) == 2
    assert not sim.has_unfinished
    sim.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": 3.0}, r"cost=3\.0 must be a function"),
        ({"scheduler": "sarathi"}, "scheduler='sarathi' must be SchedulerConfig"),
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"routing": "random"}, "routing='random' must be one of 'least_tokens', 'round_robin'"),
        ({"lookahead": 1, "cost": Stages(per_token_s=(1.0, 1.0))}, "lookahead=1 with 2 stages"),
        ({"cost": Stages(host_s=-1.0)}, r"host_s of the cost=-1\.0"),
        ({"cost": Stages(per_token_s=())}, "num_stages of the cost=0"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"start_s": math.nan}, "start_s=nan"),
        ({"scheduler": sj.Orca(), "num_pages": 3}, "reserves pages for max_model_len=4096"),
    ],
)
def test_a_bad_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        simulator(**options)


def test_the_clock_does_not_go_backwards():
    sim = simulator(start_s=10.0)
    sim.wait_until(12.0)
    for bad in (11.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"the clock is at 12\.0 s"):
            sim.wait_until(bad)
    sim.add_request("a", prompt_token_ids=range(9), params=SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        sim.wait_until(20.0)


def test_what_can_never_run_is_refused_and_harms_nobody():
    sim = simulator(num_pages=4)
    report = run_open_loop(sim, workload((0.0, 100, 3), (0.0, 10, 3), (0.5, 4096, 1)))
    assert [r.status for r in report.requests] == ["rejected", "finished", "rejected"]
    assert "the pool has 4" in (report.requests[0].error or "")
    assert "max_model_len=4096" in (report.requests[2].error or "")
    with pytest.raises(ValueError, match=r"stop=\('x',\): simulated tokens have neither ids nor text"):
        sim.add_request("s", prompt_token_ids=[1], params=SamplingParams(stop="x"))
    sim.add_request("a", prompt_token_ids=[1], params=SamplingParams())
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        sim.add_request("a", prompt_token_ids=[1], params=SamplingParams())


def test_a_policy_that_plans_nothing_is_said_to():
    class Idle(SarathiScheduler):
        def chunk_size(self, draft, seq):
            return 0

    class IdleConfig(sj.SchedulerConfig):
        def build(self, pool, *, tile, default_token_budget=512, **limits):
            return Idle(self, pool, token_budget=32, **limits)

    sim = simulator(IdleConfig())
    with pytest.raises(RunFailed, match=r"Idle plans nothing at 0\.5 s with 2 requests unfinished"):
        run_open_loop(sim, workload((0.0, 20, 1), (0.5, 20, 1)))


def test_a_run_after_one_that_was_stopped_is_like_the_first():
    cost = Stages(per_token_s=(TICK, TICK), fixed_s=TICK)
    sim, items = simulator(cost=cost, num_replicas=2), workload(*((i / 16, 100, 30) for i in range(20)))
    stopped = run_open_loop(sim, items, stop_when=lambda progress: progress.now_s > 0.5)
    assert stopped.num_aborted and stopped.stopped
    assert all(r.output_len == len(r.token_s) for r in stopped.requests)
    assert sum(s.num_decode_tokens for s in stopped.iterations) == sum(
        max(r.output_len - 1, 0) for r in stopped.requests
    )
    sim.check_integrity()
    again, whole = run_open_loop(sim, items), run_open_loop(simulator(cost=cost, num_replicas=2), items)
    gaps = lambda report: [[t - report.start_s for t in r.token_s] for r in report.requests]
    assert plans(again) == plans(whole)
    assert [t for ts in gaps(again) for t in ts] == pytest.approx([t for ts in gaps(whole) for t in ts])


# ----------------------------------------------------------------------------------------------------------------- soak


class Checked(Simulator):
    """Checks every promise of queues and pages at each step."""

    def step(self):
        before = self.now()
        outputs = super().step()
        self.check_integrity()
        assert self.now() >= before, "the clock went backwards"
        return outputs


@pytest.mark.parametrize("seed", range(60))
def test_soak(seed):
    rng = random.Random(seed)
    name = rng.choice(sorted(POLICIES))
    num_stages, num_replicas = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    lookahead = rng.choice([0, 1]) if num_stages == 1 else 0
    max_model_len, page_size = rng.choice([40, 200]), rng.choice([1, 4, 16])
    num_pages = -(-max_model_len // page_size) * rng.randint(1, 3)
    cost = Stages(
        per_token_s=tuple(rng.choice([TICK, 3 * TICK]) for _ in range(num_stages)), fixed_s=rng.choice([0.0, 8 * TICK]),
        hop=rng.choice([0.0, TICK]), host_s=rng.choice([0.0, TICK]),
    )  # fmt: skip
    items, at = [], 0.0
    for _ in range(50):
        at += rng.choice([0.0, rng.expovariate(20.0)])
        prompt_len = rng.randint(1, max_model_len - 1)
        items.append((at, prompt_len, rng.randint(1, max_model_len - prompt_len)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = POLICIES[name](rng.choice([8, 64]), rng.randint(1, 6))
        sim = Checked(
            config, cost, num_pages=num_pages, page_size=page_size, max_model_len=max_model_len, lookahead=lookahead,
            num_replicas=num_replicas, routing=rng.choice(["least_tokens", "round_robin"]),
            overlap_chunks=rng.random() < 0.5,
        )  # fmt: skip
    report = run_open_loop(sim, workload(*items))
    assert report.num_finished == 50
    assert [r.output_len for r in report.requests] == [d for _, _, d in items]
    starts = [step.start_s for step in report.iterations]
    for replica in range(num_replicas):
        mine = [step.start_s for step in report.iterations if step.replica == replica]
        assert mine == sorted(mine)
    assert all(step.wall_s > 0 for step in report.iterations) and len(starts) > 0
    for r in report.requests:
        assert r.first_scheduled_s is not None and r.arrival_s <= r.first_scheduled_s < r.token_s[0]
        assert list(r.token_s) == sorted(r.token_s)
    computed = Counter()
    for step in report.iterations:
        for chunk in step.chunks:
            computed[chunk.request_id] += chunk.num_tokens
    for (_, p, d), r in zip(items, report.requests, strict=True):
        once = p + d - 1  # the last token is never run
        assert computed[r.request_id] >= once
        assert r.num_preemptions or computed[r.request_id] == once, "tokens run twice, or never"
    if name == "sarathi" and num_stages == 1:
        no_decode_stalls(report)


def no_decode_stalls(report):
    """From its first token to its last a request is in every iteration of its replica, unless it was preempted."""
    lens = {r.request_id: r.prompt_len for r in report.requests if not r.num_preemptions}
    by_replica: dict[int, list[StepStats]] = {}
    for step in report.iterations:
        by_replica.setdefault(step.replica, []).append(step)
    for steps in by_replica.values():
        seen: dict[str, list[int]] = {}
        for i, step in enumerate(steps):
            for chunk in step.chunks:
                if chunk.start + chunk.num_tokens >= lens.get(chunk.request_id, math.inf):
                    seen.setdefault(chunk.request_id, []).append(i)
        for name, indices in seen.items():
            assert indices == list(range(indices[0], indices[-1] + 1)), f"{name} stalled"
