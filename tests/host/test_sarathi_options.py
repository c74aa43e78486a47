"""Sarathi's options: limits on long prompts, chunks by predicted time, and priorities that displace."""

import pytest

from sarathi_jax.schedulers import Sarathi

from .harness import Engine, ShortestFirst, sizes, toy_cost


def test_a_long_prompt_leaves_the_rest_of_the_budget_to_those_behind_it():
    engine = Engine(config=Sarathi(token_budget=32, long_prefill_token_threshold=8), tile=8)
    engine.add(64, max_tokens=1)
    engine.add(10, max_tokens=1)
    engine.add(40, max_tokens=1)
    plans = [sizes(plan) for plan in engine.run()]
    assert plans[:2] == [[("r0", 8), ("r1", 8), ("r2", 8)], [("r0", 8), ("r1", 2), ("r2", 8)]]
    assert len(plans) == 8


def predicted(plan, num_decodes):
    decodes, prompts = plan.chunks[:num_decodes], plan.chunks[num_decodes:]
    return toy_cost([c.start + 1 for c in decodes], [(c.start, c.num_tokens) for c in prompts])


def test_a_time_budget_cuts_chunks_shorter_as_their_context_grows():
    engine = Engine(config=Sarathi(token_budget=96, time_budget_s=0.1, cost=toy_cost), tile=8)
    for _ in range(2):
        engine.add(4, max_tokens=60)
    engine.step()
    engine.add(450, max_tokens=1)
    chunks = []
    while len(plan := engine.step().chunks) == 3:
        chunks.append(plan[2].num_tokens)
        used = toy_cost([plan[0].end, plan[1].end], [])
        left = 450 - plan[2].start
        sizes = [*range(6, min(95, left), 8), *([left] if left < 95 else [])]
        fits = [n for n in sizes if used + toy_cost([], [(plan[2].start, n)]) <= 0.1]
        assert chunks[-1] == fits[-1], "the most tokens in tiles that end in time"
    assert chunks[0] == 54 and chunks[-2] < 16
    assert chunks == [*sorted(chunks[:-1], reverse=True), chunks[-1]]
    assert sum(chunks) == 450


def test_the_token_budget_bounds_what_the_time_budget_allows():
    engine = Engine(config=Sarathi(token_budget=32, time_budget_s=1e6, cost=toy_cost), tile=8)
    engine.add(100, max_tokens=1)
    assert [p.num_tokens for p in engine.run()] == [32, 32, 32, 4]


def test_several_prompts_share_a_time_budget():
    engine = Engine(config=Sarathi(token_budget=64, time_budget_s=0.05, cost=toy_cost), tile=8)
    for _ in range(6):
        engine.add(15, max_tokens=1)
    plans = engine.run()
    assert max(predicted(p, 0) for p in plans) <= 0.05
    assert [len(p.chunks) for p in plans][:1] == [3]


def test_a_prompt_longer_than_the_time_budget_moves_a_tile_at_a_time():
    engine = Engine(config=Sarathi(token_budget=64, time_budget_s=0.001, cost=toy_cost), tile=8)
    engine.add(30, max_tokens=1)
    assert [p.num_tokens for p in engine.run()] == [8, 8, 8, 6]


def test_prompts_wait_for_decodes_that_use_up_the_time_but_not_for_ever():
    config = Sarathi(token_budget=64, time_budget_s=0.004, cost=toy_cost, max_prefill_wait=5)
    engine = Engine(config=config, tile=8)
    for _ in range(4):
        engine.add(1, max_tokens=60)
    for _ in range(20):
        if len(engine.step().chunks) == 4:
            break
    engine.add(15, max_tokens=1)
    plans = [engine.step() for _ in range(15)]
    assert [len(p.chunks) for p in plans] == [4, 4, 4, 4, 5] * 3
    assert [p.chunks[4].num_tokens for p in plans[4::5]] == [4, 4, 4], "what ends the iteration on a tile"
    engine.run()


def test_a_cost_that_is_no_time_is_refused():
    engine = Engine(config=Sarathi(token_budget=64, time_budget_s=0.1, cost=lambda *_: float("nan")), tile=8)
    engine.add(30)
    with pytest.raises(ValueError, match=r"cost gave nan s for 0 decodes and chunks=\[\(0, "):
        engine.step()


# Priorities


def full_engine(*, lookahead=0, num_pages=100, priority_preemption=True):
    config = Sarathi(token_budget=64, max_num_seqs=2, watermark=0.0, priority_preemption=priority_preemption)
    engine = Engine(config=config, num_pages=num_pages, lookahead=lookahead, depth=1 + lookahead)
    running = [engine.add(20, max_tokens=20, priority=p) for p in (1, 0)]
    for _ in range(4):
        engine.step()
    return engine, running


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_urgent_request_takes_the_slot_of_the_worst_which_resumes_later(lookahead):
    engine, (worst, other) = full_engine(lookahead=lookahead)
    urgent = engine.add(30, max_tokens=5, priority=-1)
    plan = engine.step()
    assert plan.preempted == (worst,)
    assert plan.admitted == (urgent,)
    assert sizes(plan) == [("r1", 1), ("r2", 30)]
    engine.run()
    assert engine.finished == [urgent, other, worst]
    assert [s.num_preemptions for s in (worst, other, urgent)] == [1, 0, 0]


def test_an_urgent_request_takes_as_many_pages_as_its_prompt_needs():
    """Worst first, and a prompt of several chunks is not stopped half-way by those it went before."""
    config = Sarathi(token_budget=16, max_num_seqs=8, watermark=0.0, priority_preemption=True)
    engine = Engine(config=config, num_pages=8)
    a, b, c = (engine.add(16, max_tokens=30, priority=1) for _ in range(3))
    for _ in range(6):
        engine.step()
    assert engine.pool.num_free == 2
    urgent = engine.add(60, max_tokens=2)
    plan = engine.step()
    assert plan.preempted == (c,), "two of its pages are enough"
    assert len(urgent.page_ids) == 4
    while not urgent.is_finished:
        assert urgent.num_preemptions == 0
        engine.step()
    assert engine.num_steps == 6 + 6
    engine.run()
    assert a.num_preemptions <= b.num_preemptions <= c.num_preemptions


@pytest.mark.parametrize("priority_preemption", [False, True])
def test_nobody_is_displaced_by_an_equal_or_without_the_option(priority_preemption):
    engine, _ = full_engine(priority_preemption=priority_preemption)
    engine.add(4, max_tokens=2, priority=1 if priority_preemption else -1)
    engine.run()
    assert not engine.preempted


def test_nobody_is_displaced_when_it_would_not_be_enough():
    engine, _ = full_engine(num_pages=6)
    engine.add(80, max_tokens=2, priority=0)
    assert not engine.step().preempted, "5 pages needed, 2 free and 2 held by the one that is worse"
    engine.run()


def test_an_urgent_request_gives_way_to_a_decode_that_is_more_urgent():
    """It went before r1 and got the last pages, one of which r0 needs in the same iteration."""
    engine = Engine(config=Sarathi(token_budget=64, max_num_seqs=3, watermark=0, priority_preemption=True), num_pages=4)
    engine.add(16, max_tokens=9, priority=0)
    low = engine.add(32, max_tokens=9, priority=2)
    engine.step()
    urgent = engine.add(48, max_tokens=2, priority=1)
    plan = engine.step()
    assert (plan.admitted, plan.preempted) == ((), (low, urgent))
    assert sizes(plan) == [("r0", 1)]
    engine.run()


@pytest.mark.parametrize(("max_num_seqs", "num_pages"), [(1, 100), (3, 7)])
def test_a_request_whose_last_token_is_on_its_way_is_not_displaced(max_num_seqs, num_pages):
    """Its pages are free already; for its slot the urgent one waits a step."""
    config = Sarathi(token_budget=64, max_num_seqs=max_num_seqs, watermark=0.0, priority_preemption=True)
    engine = Engine(config=config, num_pages=num_pages, lookahead=1, depth=2)
    ending = engine.add(30, max_tokens=2, priority=2)
    if max_num_seqs > 1:
        engine.add(17, max_tokens=9, priority=1)
    engine.step()
    engine.step()
    assert ending.at_limit and not ending.is_finished
    urgent = engine.add(70, max_tokens=2)
    plan = engine.step()
    assert not plan.preempted
    assert (urgent in plan.admitted) == (max_num_seqs == 3)
    engine.run()
    assert not engine.preempted


def test_the_worst_priority_goes_first_whatever_the_order():
    config = ShortestFirst(token_budget=64, max_num_seqs=2, priority_preemption=True)
    engine = Engine(config=config)
    worst = engine.add(10, max_tokens=9, priority=2)
    engine.add(20, max_tokens=9, priority=1)
    engine.step()
    engine.add(5, max_tokens=2, priority=0)
    assert engine.step().preempted == (worst,)
    engine.run()


def test_an_urgent_request_with_unread_tokens_displaces_nobody_before_they_are_read():
    config = ShortestFirst(token_budget=64, max_num_seqs=2, watermark=0.0, priority_preemption=True)
    engine = Engine(config=config, num_pages=3, lookahead=2, depth=3)
    low, urgent = engine.add(15, max_tokens=9, priority=2), engine.add(31, max_tokens=9, priority=1)
    engine.step()
    engine.step()
    assert engine.step().preempted == (urgent,), "the order, not the priority, says who gives its page to a decode"
    assert urgent.num_pending == 1
    assert sizes(engine.step()) == [("r0", 1)]
    assert urgent.num_pending == 0
    assert engine.step().preempted == (low,)
    engine.run()


def test_a_pool_full_of_others_is_no_bar_to_the_most_urgent():
    """Arrivals ever more urgent; each goes before all others and every output is complete."""
    config = Sarathi(token_budget=32, max_num_seqs=3, priority_preemption=True)
    engine = Engine(config=config, num_pages=9, lookahead=1, depth=2)
    for i in range(12):
        seq = engine.add(20, max_tokens=20, priority=-i)
        plan = engine.step()
        assert seq in plan.admitted
        engine.step()
    engine.run()
    finished = [s.request.priority for s in engine.finished]
    assert set(finished[:3]) == {-11, -10, -9}
    assert finished[3:] == sorted(finished[3:])
    assert {s.num_preemptions for s in engine.finished[:3]} == {0}
