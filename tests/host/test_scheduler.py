"""Scheduling by `Sarathi`: decodes never stall, pages and slots add up, nothing is generated twice or lost."""

from dataclasses import dataclass

import pytest

from sarathi_jax.pages import PagePool
from sarathi_jax.schedulers import Sarathi, SarathiScheduler, Scheduler, SchedulerConfig

from .harness import Engine, sizes, soak

# Chunks


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("budget", [16, 24])
def test_pages_are_taken_chunk_by_chunk_at_page_edges(prompt_len, budget):
    engine = Engine(budget=budget, max_num_seqs=4, tile=8)
    seq = engine.add(prompt_len, max_tokens=18)
    pages = []
    while not seq.is_finished:
        plan = engine.step()
        pages.append(-(-plan.chunks[0].end // 16))
        assert seq.is_finished or len(seq.page_ids) == pages[-1]
    num_chunks = -(-prompt_len // budget)
    assert pages == [-(-min((i + 1) * budget, prompt_len) // 16) for i in range(num_chunks)] + [
        -(-(prompt_len + i) // 16) for i in range(1, 18)
    ]


@pytest.mark.parametrize("prompt_len", [16, 32, 48])
def test_a_lone_request_of_whole_pages_ends_in_the_expected_steps(prompt_len):
    engine = Engine(budget=16, max_num_seqs=1, num_pages=4)
    engine.add(prompt_len, max_tokens=4)
    assert len(engine.run(max_steps=prompt_len // 16 + 4 + 2)) == prompt_len // 16 + 3


def test_the_only_token_of_a_chunked_prompt_is_sampled_by_its_last_chunk():
    engine = Engine(budget=16, max_num_seqs=1)
    engine.add(50, max_tokens=1)
    plans = engine.run()
    assert [(c.num_tokens, c.samples) for p in plans for c in p.chunks] == [
        (16, False),
        (16, False),
        (16, False),
        (2, True),
    ]


def test_the_next_prompt_is_cut_to_fill_the_budget_after_a_small_last_chunk():
    engine = Engine(budget=64)
    engine.add(84, max_tokens=1)
    engine.step()
    engine.add(500)
    assert sizes(engine.step()) == [("r0", 20), ("r1", 44)]


def test_several_partial_prompts_with_an_abort_in_between():
    engine = Engine(budget=16, max_num_seqs=4)
    a, _b, _c = (engine.add(100) for _ in range(3))
    for i in range(40):
        if i == 3:
            engine.abort(a)
        engine.step()
        assert sum(s.num_computed < s.prompt_len for s in engine.scheduler.running) <= 1
    engine.run()
    assert [s.request.request_id for s in engine.finished] == ["r1", "r2"]


def test_slot_and_pages_of_a_finished_request_are_free_in_a_prefill_only_step():
    engine = Engine(budget=16, max_num_seqs=2)
    a = engine.add(8, max_tokens=1)
    b = engine.add(64, max_tokens=2)
    engine.step()
    assert a.is_finished
    assert a.slot is None
    assert a.page_ids == []
    assert sizes(engine.step()) == [("r1", 16)]
    c = engine.add(8, max_tokens=2)
    engine.step()
    engine.step()
    engine.step()
    assert (b.slot, c.slot) == (1, 0)
    engine.run()


def test_a_prompt_ending_in_a_chunk_of_one_is_not_taken_for_a_decode():
    engine = Engine(budget=4, max_num_seqs=4, tile=4)
    for _ in range(4):
        engine.add(1, max_tokens=9)
    engine.step()
    engine = Engine(budget=4, max_num_seqs=4, tile=4)
    engine.add(5, max_tokens=2)
    assert [sizes(p) for p in engine.run()] == [[("r0", 4)], [("r0", 1)], [("r0", 1)]]


def test_thechunk_size_is_one_method_to_override():
    """A policy of one's own: a configuration and a scheduler, nothing registered, nothing changed."""

    class Halves(SarathiScheduler):
        def chunk_size(self, draft, seq):
            return -(-super().chunk_size(draft, seq) // 2)

    @dataclass(frozen=True, kw_only=True)
    class HalvesConfig(SchedulerConfig):
        def build(self, pool, *, max_model_len, tile, lookahead=0, num_stages=1, default_token_budget=512):
            return Halves(self, pool, max_model_len=max_model_len, token_budget=32, lookahead=lookahead)

    engine = Engine(config=HalvesConfig(max_num_seqs=2))
    engine.add(20, max_tokens=1)
    assert [p.num_tokens for p in engine.run()] == [10, 5, 3, 1, 1]


# Decodes and prefills


def test_a_long_prompt_never_stalls_decodes():
    engine = Engine(budget=16, max_num_seqs=4)
    decodes = [engine.add(4, max_tokens=60) for _ in range(2)]
    engine.step()
    engine.add(14 * 40, max_tokens=1)
    for _ in range(40):
        plan = engine.step()
        assert sizes(plan) == [("r0", 1), ("r1", 1), ("r2", 14)]
    assert all(len(s.output_token_ids) == 41 for s in decodes)
    engine.run()


def test_a_prompt_advances_by_a_tile_a_step_when_the_budget_exceeds_the_decodes_by_a_tile():
    engine = Engine(budget=16, max_num_seqs=8, tile=8)
    for _ in range(7):
        engine.add(1, max_tokens=100)
    engine.step()
    long = engine.add(80, max_tokens=1)
    for _ in range(9):
        engine.step()
    assert long.is_finished


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(4, 8), (1, 8)])
def test_a_budget_below_the_decodes_warns_and_clamps(budget, max_num_seqs):
    with pytest.warns(UserWarning, match=f"token_budget={budget} .*max_num_seqs={max_num_seqs}"):
        config = Sarathi(token_budget=budget, max_num_seqs=max_num_seqs)
    engine = Engine(config=config)
    for _ in range(12):
        engine.add(3, max_tokens=30)
    plans = engine.run()
    assert max(p.num_tokens for p in plans) <= max(budget, max_num_seqs)
    # eight decodes do run at once: a new prompt may start whenever the budget is not used up
    assert len(engine.finished) == 12


def test_decodes_beyond_the_budget_all_run_and_prefills_get_nothing():
    engine = Engine(budget=8, max_num_seqs=8)
    for _ in range(8):
        engine.add(1, max_tokens=20)
    engine.step()
    engine.scheduler.token_budget = 5
    assert len(engine.step().chunks) == 8
    engine.abort(engine.scheduler.running[0])
    engine.add(10)
    assert sizes(engine.step()) == [(f"r{i}", 1) for i in range(1, 8)]
    assert engine.scheduler.num_waiting == 1


@pytest.mark.parametrize("budget", [0, -8, True, 2.5, "64"])
def test_a_bad_budget_is_refused(budget):
    with pytest.raises(ValueError, match="token_budget"):
        Sarathi(token_budget=budget)


@pytest.mark.parametrize(("budget", "nearest"), [(100, "96 or 112"), (8, "nearest: 16")])
def test_a_budget_off_the_tile_is_refused_with_the_nearest(budget, nearest):
    config = Sarathi(token_budget=budget, max_num_seqs=2)
    with pytest.raises(ValueError, match=f"token_budget={budget} .*tile 16; .*{nearest}"):
        config.build(PagePool(8, 16), max_model_len=64, tile=16)


def test_the_default_budget_is_the_platforms():
    scheduler = Sarathi(max_num_seqs=128).build(PagePool(8, 16), max_model_len=64, tile=16, default_token_budget=256)
    assert scheduler.token_budget == 256
    assert scheduler.max_step_tokens == 256
    with pytest.warns(UserWarning, match=r"token_budget=128 .*max_num_seqs=128 \+ tile=16"):
        Sarathi(max_num_seqs=128).build(PagePool(8, 16), max_model_len=64, tile=16, default_token_budget=128)


def test_one_warning_is_enough():
    with pytest.warns(UserWarning, match="max_num_seqs=8:") as record:
        Sarathi(token_budget=4, max_num_seqs=8).build(PagePool(8, 16), max_model_len=64, tile=4)
    assert len(record) == 1
    assert record[0].filename == __file__


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_num_seqs", value) for value in (0, True, 2.0)],
        *[("watermark", value) for value in (-0.1, 1.0, float("nan"), "0.1", True)],
    ],
)
def test_a_bad_setting_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        Sarathi(**{field: value})


@pytest.mark.parametrize("field", ["lookahead", "num_stages", "max_model_len", "tile"])
def test_build_refuses_nonsense(field):
    args = {"max_model_len": 64, "tile": 16, field: -1}
    with pytest.raises(ValueError, match=field):
        Sarathi().build(PagePool(8, 16), **args)


def test_a_pipeline_spreads_its_decodes():
    engine = Engine(budget=16, max_num_seqs=8)
    for _ in range(8):
        engine.add(1, max_tokens=50)
    engine.step()
    scheduler = engine.scheduler
    scheduler.num_stages = engine.depth = 3
    plans = [engine.step() for _ in range(9)]
    assert [len(p.chunks) for p in plans] == [3, 3, 2] * 3
    engine.run()


# The way out


def test_an_abort_before_the_first_schedule_is_quiet():
    engine = Engine(max_num_seqs=1)
    a, b = engine.add(40), engine.add(40)
    engine.step()
    engine.abort(b)
    assert b.is_finished
    assert b.page_ids == []
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)
    engine.run()
    assert engine.finished == [a]
    engine.abort(a)
    engine.abort(b)
    engine.check_idle()


def test_finish_of_one_that_was_never_added():
    engine = Engine()
    with pytest.raises(ValueError, match="too long"):
        engine.add(20_000)
    (seq,) = engine.stops
    engine.abort(seq)
    assert seq.is_finished
    engine.check_idle()


@pytest.mark.parametrize(("lookahead", "depth"), [(0, 1), (1, 2), (0, 2)])
def test_an_abort_at_any_moment_leaves_the_others_alone(lookahead, depth):
    """Five requests in a pool so small that some are preempted; one is aborted, twice, at each possible step."""
    seen = set()
    for victim in range(5):
        for moment in range(0, 90, 2):
            engine = Engine(budget=16, num_pages=8, max_num_seqs=4, lookahead=lookahead, depth=depth)
            seqs = [engine.add(20 + 3 * i, max_tokens=12 + i) for i in range(5)]
            for _ in range(moment):
                if engine.scheduler.has_unfinished:
                    engine.step()
            seq = seqs[victim]
            what = "preempted" if seq.num_preemptions and seq.slot is None else seq.status.value
            seen.add((what, seq.num_pending > 0, 0 < seq.num_computed < seq.prompt_len))
            engine.abort(seq)
            engine.abort(seq)
            engine.scheduler.check_integrity()
            engine.run()
            others = [s for s in seqs if s is not seq]
            assert [len(s.output_token_ids) for s in others] == [s.params.max_tokens for s in others]
    assert {("waiting", False, False), ("finished", False, False), ("preempted", False, False)} <= seen
    assert {("running", depth > 1, False), ("running", False, True)} <= seen


# Soak


def test_soak():
    preempted, refused, aborted, most, _ = zip(*(soak(seed) for seed in range(40)), strict=True)
    assert min(sum(preempted), sum(refused), sum(aborted)) > 100, "the soak does not reach what it is for"
    assert max(most) < 10, f"a sequence was preempted {max(most)} times"


def test_scheduler_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Scheduler(Sarathi(), PagePool(4, 4), max_model_len=8)
    with pytest.raises(TypeError, match="abstract"):
        SchedulerConfig()
