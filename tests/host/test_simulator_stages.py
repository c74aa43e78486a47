"""Pipelines and replicas on a virtual clock: times and bubbles worked out by hand."""

from __future__ import annotations

import itertools
import random

import pytest

import sarathi_jax as sj
from sarathi_jax.driver import run_open_loop
from sarathi_jax.outputs import StepStats
from sarathi_jax.stages import bubbles, stage_use

from .test_simulator import POLICIES, TICK, Stages, plans, simulator, workload
from .test_trace import load, spans

# ------------------------------------------------------------------------------------------------------------ pipelines


def test_a_lone_request_leaves_every_other_stage_idle():
    """Two stages of 1 s and a hop of 0.5 s: a token every 2.5 s; the bubbles are what is left of those."""
    cost = Stages(per_token_s=(0.0, 0.0), fixed_s=1.0, hop=0.5)
    report = run_open_loop(simulator(cost=cost), workload((0.0, 8, 4)))
    assert report.requests[0].token_s == (2.5, 5.0, 7.5, 10.0)
    assert [s.stages for s in report.iterations[:2]] == [((0.0, 1.0), (1.5, 2.5)), ((2.5, 3.5), (4.0, 5.0))]
    first, last = report.stage_use
    assert (first.busy_s, first.bubble_s, last.busy_s, last.bubble_s) == (4.0, 6.0, 4.0, 6.0)
    assert (first.idle_s, last.idle_s, first.bubble_share) == (4.5, 4.5, 0.6)


def test_two_requests_fill_two_stages():
    cost = Stages(per_token_s=(0.0, 0.0), fixed_s=1.0)
    config = sj.Sarathi(token_budget=8, max_num_seqs=8)
    report = run_open_loop(simulator(config, cost), workload((0.0, 8, 9), (0.0, 8, 9)))
    assert plans(report)[:4] == [(("r0", 0, 8),), (("r1", 0, 8),), (("r0", 8, 1),), (("r1", 8, 1),)]
    assert [r.token_s[:2] for r in report.requests] == [(2.0, 4.0), (3.0, 5.0)]
    assert [use.bubble_s for use in report.stage_use] == [1.0, 1.0], "at the ends only"


def test_the_host_plans_just_before_the_first_stage_is_free():
    """And not before: a request that arrives at 0.8 s is in the micro-batch that starts at 1.25 s."""
    cost = Stages(per_token_s=(0.0, 0.0), fixed_s=1.0, host_s=0.25)
    report = run_open_loop(simulator(cost=cost), workload((0.0, 8, 3), (0.125, 8, 1), (0.875, 8, 1)))
    assert plans(report)[1] == (("r1", 0, 8), ("r2", 0, 8))
    assert [s.stages[0] for s in report.iterations[:3]] == [(0.25, 1.25), (1.25, 2.25), (2.5, 3.5)]
    assert report.requests[2].first_scheduled_s == 1.0


def test_what_ends_when_a_plan_is_due_is_in_it():
    """r1 comes at the very moment at which r0's first token is read: both are in the next micro-batch."""
    cost = Stages(per_token_s=(0.0, 0.0), fixed_s=1.0)
    report = run_open_loop(simulator(cost=cost), workload((0.0, 8, 2), (2.0, 8, 1)))
    assert plans(report) == [(("r0", 0, 8),), (("r0", 8, 1), ("r1", 0, 8))]


@pytest.mark.parametrize("overlap_chunks", [False, True])
def test_nobody_is_in_two_micro_batches(overlap_chunks):
    """But for prompts, whose chunks follow each other if they may."""
    num_overlapping = 0
    for name, seed in itertools.product(("sarathi", "vllm", "chunked_only"), range(3)):
        rng = random.Random(seed)
        items = [(rng.uniform(0, 2), rng.randint(1, 200), rng.randint(1, 20)) for _ in range(60)]
        cost = Stages(per_token_s=(TICK, 2 * TICK, TICK), fixed_s=2 * TICK, hop=TICK, host_s=TICK)
        config = POLICIES[name](64, 12)
        sim = simulator(config, cost, max_model_len=300, overlap_chunks=overlap_chunks)
        report = run_open_loop(sim, workload(*sorted(items)))
        lens = {r.request_id: r.prompt_len for r in report.requests}
        until: dict[str, float] = {}
        for step in report.iterations:
            for chunk in step.chunks:
                is_apart = step.start_s >= until.get(chunk.request_id, 0.0)
                num_overlapping += not is_apart
                is_prompt = chunk.start < lens[chunk.request_id]
                assert is_apart or (overlap_chunks and is_prompt), f"{chunk} while its last one is on its way"
                until[chunk.request_id] = step.stages[-1][1]
        assert report.num_finished == 60
    assert bool(num_overlapping) == overlap_chunks


def test_uniform_chunks_remove_bubbles():
    """Whole prompts beside small decodes make stages wait for each other (OSDI'24, section 5.3 and figure 13)."""
    rng = random.Random(0)
    items = sorted((rng.uniform(0, 5), rng.randint(500, 3000), rng.randint(50, 150)) for _ in range(80))
    cost = Stages(per_token_s=(TICK / 4, TICK / 4), fixed_s=16 * TICK)
    share = {}
    for name in ("sarathi", "vllm", "orca"):
        report = run_open_loop(simulator(POLICIES[name](512, 128), cost, num_pages=20_000), workload(*items))
        assert report.num_finished == 80
        share[name] = max(use.bubble_share for use in report.stage_use)
        assert "bubbles     " in report.to_table()
    assert share["sarathi"] < share["orca"] / 2 and share["sarathi"] < share["vllm"] / 2, share


def test_bubbles_by_hand():
    """Two replicas in turn; replica 1 has two bursts with nothing in flight between them."""

    def step(replica, *stages):
        return StepStats(
            chunks=(), start_s=stages[0][0], wall_s=1.0, host_s=0.0, num_prefill_tokens=1, num_decode_tokens=0,
            num_padding=0, num_preempted=0, num_pages_held=0, num_pages=1, replica=replica, stages=stages,
        )  # fmt: skip

    steps = [
        step(1, (0.0, 1.0), (1.0, 4.0)),
        step(0, (0.5, 1.0), (1.0, 2.0)),
        step(1, (2.0, 3.0), (4.0, 5.0)),
        step(1, (10.0, 11.0), (11.5, 12.0)),
    ]
    assert sorted(bubbles(steps)) == [
        (0, 0, 1.0, 2.0), (0, 1, 0.5, 1.0),
        (1, 0, 1.0, 2.0), (1, 0, 3.0, 5.0), (1, 0, 11.0, 12.0), (1, 1, 0.0, 1.0), (1, 1, 10.0, 11.5),
    ]  # fmt: skip
    uses = {(use.replica, use.stage): (use.busy_s, use.bubble_s, use.idle_s) for use in stage_use(steps)}
    assert uses == {(0, 0): (0.5, 1, 0), (0, 1): (1, 0.5, 0), (1, 0): (3, 4, 8), (1, 1): (4.5, 2.5, 6.5)}


def test_stages_are_lanes_of_the_trace(tmp_path):
    cost = Stages(per_token_s=(TICK, 3 * TICK), fixed_s=TICK)
    sim = simulator(cost=cost, num_replicas=2)
    report = run_open_loop(sim, workload(*((i / 8, 50, 8) for i in range(12))))
    events = load(report, tmp_path / "trace.json")  # checks that spans of a lane do not overlap
    lanes = spans(events, "pipeline stages")
    assert {event["tid"] for event in lanes} == {1, 2, 3, 4}
    idle = sum(event["dur"] for event in lanes if event["name"] == "bubble") / 1e6
    assert idle == pytest.approx(sum(use.bubble_s for use in report.stage_use), rel=1e-6)
    assert len(lanes) == 2 * len(report.iterations) + sum(event["name"] == "bubble" for event in lanes)
    assert len(spans(events, "decodes")) == 12 * 7


# ------------------------------------------------------------------------------------------------------------- replicas


def test_replicas_in_turn_and_by_load():
    """A long prompt keeps one busy: by load the next two go to the other, in turn the third waits behind it."""
    items = workload((0.0, 1000, 1), (0.25, 10, 1), (0.5, 10, 1))
    cost = Stages(per_token_s=(TICK,))
    where = {}
    for routing in ("least_tokens", "round_robin"):
        sim = simulator(sj.VLLM(max_num_seqs=4), cost, num_replicas=2, routing=routing)
        report = run_open_loop(sim, items)
        where[routing] = [step.replica for step in sorted(report.iterations, key=lambda s: s.start_s)]
        assert report.requests[1].first_scheduled_s == 0.25, "an idle replica begins when the request arrives"
    assert where == {"least_tokens": [0, 1, 1], "round_robin": [0, 1, 0]}


def test_replicas_do_not_wait_for_each_other():
    """Two of them do as two simulators would with every other request each."""
    rng = random.Random(1)
    items = [(i / 4, rng.randint(1, 300), rng.randint(1, 30)) for i in range(40)]
    cost = Stages(per_token_s=(TICK,), fixed_s=8 * TICK)
    options = {"num_pages": 60, "max_model_len": 400}
    both = run_open_loop(simulator(cost=cost, num_replicas=2, routing="round_robin", **options), workload(*items))
    for replica in (0, 1):
        alone = run_open_loop(simulator(cost=cost, **options), workload(*items[replica::2]))
        mine = [r for i, r in enumerate(both.requests) if i % 2 == replica]
        assert [r.token_s for r in mine] == [r.token_s for r in alone.requests]
        steps = [s for s in both.iterations if s.replica == replica]
        assert [(s.start_s, s.wall_s, s.num_pages_held) for s in steps] == [
            (s.start_s, s.wall_s, s.num_pages_held) for s in alone.iterations
        ]
