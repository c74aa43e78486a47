"""Pages run out: who is refused, who gives way, and that nobody starves or loses a token."""

import pytest

from sarathi_jax.request import Status
from sarathi_jax.schedulers import arrival_order

from .harness import Engine, sizes


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fits"),
    [(799, 2, True), (800, 1, True), (801, 1, False), (1000, 1, False), (796, 5, True), (796, 6, False)],
)
def test_what_the_pool_can_never_hold_is_refused_and_harms_nobody(prompt_len, max_tokens, fits):
    engine = Engine(budget=64, num_pages=50, max_model_len=4096)
    if fits:
        engine.add(prompt_len, max_tokens)
    else:
        with pytest.raises(ValueError, match=r"51 pages|63 pages") as error:
            engine.add(prompt_len, max_tokens)
        for text in (f"prompt of {prompt_len}", f"max_tokens={max_tokens}", "the pool has 50", "num_pages"):
            assert text in str(error.value)
    engine.add(10)
    engine.run(max_steps=50)
    assert not engine.preempted


def test_the_limit_message_has_the_three_numbers():
    engine = Engine(max_model_len=64)
    with pytest.raises(ValueError, match=r"prompt of 64 tokens, max_tokens=30, max_model_len=64"):
        engine.add(64, max_tokens=30)
    seq = engine.add(50, max_tokens=30)
    engine.run()
    assert len(seq.output_token_ids) == 14


def test_an_empty_prompt_and_a_wild_arrival_time_are_refused():
    engine = Engine()
    with pytest.raises(ValueError, match="empty prompt"):
        engine.add(0)
    with pytest.raises(ValueError, match="arrival_time_s=nan"):
        engine.add(4, arrival=float("nan"))
    assert not engine.scheduler.has_unfinished


def test_a_request_that_outgrows_the_pool_never_starts_and_one_that_fills_it_runs_alone():
    engine = Engine(num_pages=4)
    with pytest.raises(ValueError, match="10 pages of 16 and the pool has 4"):
        engine.add(50, max_tokens=100)
    full = engine.add(50, max_tokens=15)
    unlimited = engine.add(50, max_tokens=None)
    engine.run(max_steps=50)
    assert len(full.output_token_ids) == len(unlimited.output_token_ids) == 15
    assert not engine.preempted


def test_only_as_many_are_preempted_as_are_needed_and_latest_first():
    engine = Engine(budget=128, num_pages=6, watermark=0.0)
    a, b, c = (engine.add(31, max_tokens=30) for _ in range(3))
    engine.step()
    assert engine.pool.num_free == 0
    engine.step()
    plan = engine.step()
    assert plan.preempted == (c,)
    assert [x.sequence for x in plan.chunks] == [a, b]
    assert c.status is Status.WAITING
    assert (c.num_computed, c.page_ids, c.slot, c.num_preemptions) == (0, [], None, 1)
    assert c.output_token_ids == [31, 32], "outputs are kept"
    engine.run()


def test_a_preempted_request_resumes_before_later_arrivals():
    engine = Engine(num_pages=8, max_num_seqs=4, watermark=0.0)
    first = engine.add(40, max_tokens=60)
    a = engine.add(40, max_tokens=60)
    while not a.num_preemptions:
        engine.step()
        if engine.num_steps > 20 and len(engine.stops) < 8:
            engine.add(4, max_tokens=4)
    assert engine.scheduler.waiting[0] is a
    order = []
    while engine.scheduler.has_unfinished:
        order += engine.step().admitted
        if len(engine.stops) < 200:
            engine.add(4, max_tokens=4)
    assert order[0] is a
    assert order == sorted(order, key=arrival_order)
    assert a.num_preemptions <= 2
    assert engine.finished[0] is first


@pytest.mark.parametrize("lookahead", [0, 1])
def test_recompute_after_preemption_neither_loses_nor_repeats_tokens(lookahead):
    """Budget below prompt + outputs, so that what is computed again comes in chunks too."""
    outputs = []
    for num_pages in (6, 1000):
        engine = Engine(budget=16, num_pages=num_pages, lookahead=lookahead, depth=1 + lookahead)
        seqs = [engine.add(30, max_tokens=40) for _ in range(3)]
        starts = {}
        while engine.scheduler.has_unfinished:
            engine.step()
            for seq in seqs:
                starts.setdefault(seq, seq.first_scheduled_s)
                assert starts[seq] in (None, seq.first_scheduled_s), "a preemption moved the start"
                starts[seq] = seq.first_scheduled_s
        assert bool(engine.preempted) == (num_pages == 6)
        engine.run()
        outputs.append([s.output_token_ids for s in seqs])
    assert outputs[0] == outputs[1]
    assert [len(o) for o in outputs[0]] == [40] * 3


def test_a_preempted_request_waits_until_its_tokens_are_read():
    engine = Engine(budget=128, num_pages=6, watermark=0.0, lookahead=1, depth=9)
    a, b = (engine.add(47, max_tokens=40) for _ in range(2))
    engine.step()
    engine.step()
    engine.read(engine.in_flight.popleft())
    assert engine.step().preempted == (b,)
    assert b.num_pending == 1
    engine.abort(a)
    assert not engine.step(), "pages and slots are free, the last token of b is not known"
    assert (b.num_pending, b.output_token_ids) == (0, [47, 48])
    assert sizes(engine.step()) == [("r1", 49)]
    engine.run()


def test_a_prefill_takes_pages_from_a_later_prefill_but_never_from_a_decode():
    engine = Engine(budget=32, num_pages=8, watermark=0.0, max_num_seqs=4)
    decode = engine.add(16, max_tokens=60)
    engine.step()
    long = engine.add(100, max_tokens=2)
    while engine.pool.num_free != 0:
        engine.step()
    while not decode.is_finished:
        plan = engine.step()
        assert plan.chunks[0].sequence is decode
        assert decode not in plan.preempted
    engine.run()
    assert long.output_token_ids == [100, 101]


def test_a_decode_in_flight_keeps_its_pages_from_an_older_prefill():
    engine = Engine(budget=32, num_pages=8, watermark=0.0, max_num_seqs=4, depth=2)
    decode = engine.add(33, max_tokens=12, arrival=5)
    while not decode.output_token_ids:
        engine.step()
    long = engine.add(100, max_tokens=2, arrival=0)
    engine.run()
    assert decode.num_preemptions == long.num_preemptions == 0


def test_pages_of_a_sequence_whose_last_token_is_sampled_are_not_waited_for():
    engine = Engine(num_pages=4, watermark=0.0, lookahead=1, depth=2)
    a = engine.add(31, max_tokens=2, arrival=0)
    b = engine.add(31, max_tokens=20, arrival=1)
    engine.run()
    assert (a.num_preemptions, b.num_preemptions) == (0, 0)


def test_the_watermark_stays_free_at_admission_but_not_for_a_lone_request():
    engine = Engine(num_pages=10, watermark=0.5, budget=128)
    engine.add(16 * 8, max_tokens=2)
    engine.add(16, max_tokens=2)
    assert sizes(engine.step()) == [("r0", 128)]
    assert engine.scheduler.num_waiting == 1
    engine.run()
    engine = Engine(num_pages=100, watermark=0.07)
    assert engine.scheduler._num_spare == 7


def test_the_head_of_the_queue_is_never_overtaken_and_never_starved():
    engine = Engine(num_pages=20, watermark=0.0, budget=512, max_num_seqs=8)
    engine.add(16 * 15, max_tokens=6)
    engine.step()
    head = engine.add(16 * 19, max_tokens=2)
    small = [engine.add(4, max_tokens=2) for _ in range(3)]
    while not head.first_scheduled_s:
        plan = engine.step()
        assert not set(small) & set(plan.admitted) or head in plan.admitted
    assert head.first_scheduled_s == 6.0
    engine.run()


def test_priority_comes_before_arrival():
    engine = Engine(max_num_seqs=1)
    engine.add(4)
    engine.step()
    late, urgent = engine.add(4, arrival=1), engine.add(4, arrival=9, priority=-1)
    assert list(engine.scheduler.waiting) == [urgent, late]
    engine.run()
