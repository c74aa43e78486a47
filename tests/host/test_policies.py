"""Each policy does what its name says, step by step; all of them keep what every scheduler promises."""

import itertools
import warnings
from functools import partial

import pytest

from sarathi_jax.pages import PagePool
from sarathi_jax.schedulers import (
    VLLM,
    ChunkedOnly,
    FasterTransformer,
    HybridOnly,
    Orca,
    Sarathi,
)

from .harness import Engine, ShortestFirst, sizes, soak, toy_cost

POLICIES = [Sarathi, VLLM, Orca, FasterTransformer, ChunkedOnly, HybridOnly]
WHOLE_PROMPTS = [VLLM, Orca, FasterTransformer]


def make(policy, token_budget=64, **settings):
    """A configuration; those that run whole prompts have no token budget."""
    return policy(**settings) if policy in WHOLE_PROMPTS else policy(token_budget=token_budget, **settings)


def build(config, *, num_pages=64, max_model_len=64, tile=1, **limits):
    return config.build(PagePool(num_pages, 16), max_model_len=max_model_len, tile=tile, **limits)


# Figure 4 of the paper: two requests decode, two with long prompts arrive.


def figure_4(config):
    """What runs from the arrival of r2 and r3 on; r0 and r1 have 9 tokens to go."""
    engine = Engine(config=config, max_model_len=64, tile=2)
    for _ in range(2):
        engine.add(4, max_tokens=10)
    while min(len(s.output_token_ids) for s in engine.stops) < 1:
        engine.step()
    for _ in range(2):
        engine.add(40, max_tokens=3)
    return [sizes(plan) for plan in engine.run()]


DECODES = [("r0", 1), ("r1", 1)]
ALL_DECODE = [*DECODES, ("r2", 1), ("r3", 1)]


def test_vllm_stalls_decodes_for_whole_prompts():
    plans = figure_4(VLLM(max_batched_tokens=80))
    assert plans[:3] == [[("r2", 40), ("r3", 40)], ALL_DECODE, ALL_DECODE]
    assert plans[3:] == [DECODES] * 7
    plans = figure_4(VLLM(max_batched_tokens=79))
    assert plans[:4] == [[("r2", 40)], [("r3", 40)], ALL_DECODE, ALL_DECODE]


def test_orca_runs_whole_prompts_beside_the_decodes_in_one_long_iteration():
    assert figure_4(Orca())[:3] == [[*DECODES, ("r2", 40), ("r3", 40)], ALL_DECODE, ALL_DECODE]
    bounded = figure_4(Orca(max_batched_tokens=81))
    assert bounded[:2] == [[*DECODES, ("r2", 40)], [*DECODES, ("r2", 1), ("r3", 40)]]


def test_faster_transformer_lets_new_requests_wait_until_the_batch_is_done():
    plans = figure_4(FasterTransformer())
    both = [("r2", 1), ("r3", 1)]
    assert plans == [DECODES] * 9 + [[("r2", 40), ("r3", 40)], both, both]


def test_sarathi_never_stalls_and_keeps_to_its_budget():
    plans = figure_4(Sarathi(token_budget=20))
    assert plans[:2] == [[*DECODES, ("r2", 18)]] * 2
    assert plans[2:4] == [[*DECODES, ("r2", 4), ("r3", 14)], [*DECODES, ("r2", 1), ("r3", 17)]]
    assert plans[4] == [*DECODES, ("r2", 1), ("r3", 9)]
    assert all(plan[:2] == DECODES for plan in plans[:9])


def test_chunked_only_alternates_and_never_mixes():
    plans = figure_4(ChunkedOnly(token_budget=20))
    with_r2, with_r3 = [*DECODES, ("r2", 1)], [*DECODES, ("r3", 1)]
    assert plans[1:8:2] == [[("r2", 20)], [("r2", 20)], [("r3", 20)], [("r3", 20)]]
    assert plans[0:8:2] == [DECODES, DECODES, with_r2, with_r2]
    assert plans[8:] == [with_r3, with_r3, *[DECODES] * 3]


def test_hybrid_only_runs_one_whole_prompt_beside_the_decodes_whatever_the_budget():
    plans = figure_4(HybridOnly(token_budget=20))
    assert plans[:3] == [[*DECODES, ("r2", 40)], [*DECODES, ("r2", 1), ("r3", 40)], ALL_DECODE]
    assert figure_4(HybridOnly(token_budget=82))[0] == [*DECODES, ("r2", 40), ("r3", 40)]
    assert figure_4(HybridOnly(token_budget=80))[0] == [*DECODES, ("r2", 40)]


# More of each


def test_faster_transformer_runs_all_prompts_of_a_batch_before_any_decode_and_fills_no_slot_again():
    engine = Engine(config=FasterTransformer(max_num_seqs=3, max_batched_tokens=64), max_model_len=64)
    for prompt_len, max_tokens in ((30, 2), (30, 5), (40, 3), (4, 1)):
        engine.add(prompt_len, max_tokens=max_tokens)
    assert [sizes(plan) for plan in engine.run()] == [
        [("r0", 30), ("r1", 30)],
        [("r2", 40)],
        [("r0", 1), ("r1", 1), ("r2", 1)],
        [("r1", 1), ("r2", 1)],
        [("r1", 1)],
        [("r1", 1)],
        [("r3", 4)],
    ]


@pytest.mark.parametrize("policy", [Orca, FasterTransformer])
def test_reserving_admits_by_the_longest_request_there_could_be(policy):
    """Four pages each of eight: two run though ten short ones would fit, and the watermark takes none of them."""
    engine = Engine(config=policy(watermark=0.5), num_pages=8, max_model_len=64)
    for _ in range(3):
        engine.add(4, max_tokens=2)
    assert sizes(engine.step()) == [("r0", 4), ("r1", 4)]
    assert engine.pool.num_free == 0
    engine.run()


@pytest.mark.parametrize("policy", [Orca, FasterTransformer])
def test_a_pool_below_one_reservation_is_refused(policy):
    with pytest.raises(ValueError, match=rf"{policy.__name__} .*max_model_len=65 .*: 5 of 16, .*has 4; lower max_mod"):
        build(policy(), num_pages=4, max_model_len=65)
    build(policy(), num_pages=4, max_model_len=64)


def test_vllm_computes_a_preempted_sequence_again_in_one_piece():
    engine = Engine(config=VLLM(watermark=0.0), num_pages=4, max_model_len=64)
    a, b = (engine.add(30, max_tokens=20) for _ in range(2))
    plans = engine.run()
    again = [c for p in plans for c in p.chunks if c.sequence is b and c.num_tokens > 30]
    assert [(c.start, c.num_tokens, c.samples) for c in again] == [(0, 33, True)]
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_vllm_decodes_when_the_head_of_the_queue_does_not_fit():
    engine = Engine(config=VLLM(watermark=0.0), num_pages=4, max_model_len=64)
    engine.add(30, max_tokens=9)
    engine.step()
    engine.add(40, max_tokens=2)
    engine.add(4, max_tokens=2)
    assert sizes(engine.step()) == [("r0", 1)], "r1 does not fit, and r2 does not overtake it"
    engine.run()


def test_chunked_only_gives_the_turn_away_when_it_cannot_move():
    """The pool is full: the prompt gets no page and one decode needs another. Two turns in a row are never empty."""
    engine = Engine(config=ChunkedOnly(token_budget=16, watermark=0.0), num_pages=6, max_model_len=96)
    decodes = [engine.add(16, max_tokens=30) for _ in range(2)]
    for _ in range(4):
        engine.step()
    engine.add(80, max_tokens=2)
    plans = engine.run(max_steps=120)
    assert all(plan.chunks for plan in plans)
    assert engine.pool.num_free == 6
    assert all(len(s.output_token_ids) == 30 for s in decodes)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_largest_plan_fits_the_largest_shape_and_is_reached(policy):
    """Three sequences decode when one more, as long as there can be, arrives; then four arrive at once."""
    engine = Engine(config=make(policy, 8, max_num_seqs=4), max_model_len=64, tile=8)
    for _ in range(3):
        engine.add(1, max_tokens=5)
    engine.step()
    engine.step()
    engine.add(63, max_tokens=1)
    plans = engine.run()
    for _ in range(4):
        engine.add(63, max_tokens=1)
    plans += engine.run()
    largest = {Sarathi: 8, VLLM: 32 * 63, Orca: 4 * 63, FasterTransformer: 4 * 63, ChunkedOnly: 8, HybridOnly: 3 + 63}
    assert max(p.num_tokens for p in plans) == min(largest[policy], 4 * 63)
    assert engine.scheduler.max_step_tokens >= max(p.num_tokens for p in plans)
    if policy is HybridOnly:
        assert engine.scheduler.max_step_tokens == 66


# An order of one's own


def test_an_order_of_ones_own_holds_for_queue_and_preemption():
    engine = Engine(config=ShortestFirst(token_budget=16, max_num_seqs=2, watermark=0.0), num_pages=6)
    lengths = [40, 10, 30, 20]
    for n in lengths:
        engine.add(n, max_tokens=30)
    assert sizes(engine.step()) == [("r1", 10), ("r3", 6)]
    engine.run()
    assert [s.prompt_len for s in engine.finished] == sorted(lengths)
    assert {s.prompt_len for s in engine.preempted} <= {20, 30, 40}


# Settings


@pytest.mark.parametrize("policy", WHOLE_PROMPTS)
def test_a_cap_below_the_longest_prompt_is_refused_by_both_names(policy):
    with pytest.raises(ValueError, match=rf"max_batched_tokens=63 .*max_model_len=64, and {policy.__name__} "):
        build(policy(max_batched_tokens=63))
    assert build(policy(max_batched_tokens=64, max_num_seqs=1)).max_batched_tokens == 64
    for value in (0, -1, True, 64.0, "64"):
        with pytest.raises(ValueError, match="max_batched_tokens"):
            policy(max_batched_tokens=value)


@pytest.mark.parametrize(
    ("config", "max_model_len", "expected"),
    [
        (VLLM(), 64, 2048),
        (VLLM(), 4096, 4096),
        (Orca(max_num_seqs=16), 64, 16 + 4 * 64),
        (Orca(max_num_seqs=2), 64, 128),
        (Orca(max_num_seqs=1), 64, 64),
        (FasterTransformer(max_num_seqs=8), 100, 8 + 4 * 100),
        (FasterTransformer(max_num_seqs=3), 100, 300),
    ],
)
def test_the_cap_has_a_default(config, max_model_len, expected):
    scheduler = build(config, num_pages=1000, max_model_len=max_model_len)
    assert scheduler.max_batched_tokens == scheduler.max_step_tokens == expected


@pytest.mark.parametrize("policy", [Sarathi, ChunkedOnly, HybridOnly])
def test_token_budgets_are_tiles(policy):
    with pytest.raises(ValueError, match=r"token_budget=8 .*tile 16; nearest: 16"):
        build(policy(token_budget=8, max_num_seqs=4), tile=16)
    with pytest.raises(ValueError, match=r"token_budget=40 .*tile 16; nearest: 32 or 48"):
        build(policy(token_budget=40, max_num_seqs=4), tile=16)
    assert build(policy(max_num_seqs=4), tile=16, default_token_budget=96).token_budget == 96
    for value in (0, True, 2.5, "64"):
        with pytest.raises(ValueError, match="token_budget"):
            policy(token_budget=value)


def test_a_budget_that_lets_prompts_wait_for_decodes_is_warned_of():
    with pytest.warns(UserWarning, match=r"max_batched_tokens=64 .*max_num_seqs=16 \+ max_model_len=64") as record:
        build(Orca(max_batched_tokens=64))
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="token_budget=8 is below max_num_seqs=16"):
        Sarathi(token_budget=8)
    for config in (ChunkedOnly(token_budget=8), HybridOnly(token_budget=8), VLLM(), Orca(), FasterTransformer()):
        build(config)


@pytest.mark.parametrize("policy", POLICIES)
def test_unknown_settings_are_refused(policy):
    with pytest.raises(TypeError, match="chunk_size"):
        policy(chunk_size=64)
    with pytest.raises(TypeError, match="max_modal_len"):
        build(make(policy, max_num_seqs=2), max_modal_len=3)
    for limit in ("lookahead", "num_stages", "max_model_len"):
        with pytest.raises(ValueError, match=limit):
            build(make(policy, max_num_seqs=2), **{limit: -1})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"token_budget": "auto"}, r'token_budget="auto" is found from tbt_slo_s'),
        ({"tbt_slo_s": 0.1}, "token_budget=None and tbt_slo_s=0.1"),
        ({"token_budget": 64, "tbt_slo_s": 0.1}, "token_budget=64 and tbt_slo_s=0.1"),
        ({"token_budget": "auto", "tbt_slo_s": 0.0}, "tbt_slo_s=0.0 is out of range"),
        ({"token_budget": "auto", "tbt_slo_s": "fast"}, "tbt_slo_s='fast'"),
        ({"time_budget_s": 0.1}, "time_budget_s=0.1 and cost=None"),
        ({"cost": toy_cost}, "time_budget_s=None and cost="),
        ({"cost": toy_cost, "time_budget_s": -1}, "time_budget_s=-1 is out of range"),
        ({"cost": toy_cost, "time_budget_s": float("nan")}, "time_budget_s=nan is out of range"),
        ({"cost": 3, "time_budget_s": 1}, "cost=3 must be callable"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold=0"),
        ({"max_prefill_wait": 0}, "max_prefill_wait=0"),
        ({"priority_preemption": 1}, "priority_preemption=1"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings, match):
    with pytest.raises(ValueError, match=match):
        Sarathi(**settings)


def test_auto_is_resolved_before_it_is_built():
    config = Sarathi(token_budget="auto", tbt_slo_s=0.1, max_num_seqs=4, long_prefill_token_threshold=16)
    with pytest.raises(ValueError, match=r'token_budget="auto" \(tbt_slo_s=0.1\) has to be measured'):
        build(config)
    assert config.resolved(96) == Sarathi(token_budget=96, max_num_seqs=4, long_prefill_token_threshold=16)
    assert build(config.resolved(96)).token_budget == 96
    kept = ShortestFirst(token_budget="auto", tbt_slo_s=0.1).resolved(64)
    assert isinstance(build(kept), ShortestFirst.scheduler_class)


# All of them


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("lookahead", "depth", "num_stages"), [(0, 1, 1), (1, 2, 1), (0, 2, 2), (1, 4, 2)])
def test_every_policy_runs_as_it_comes(policy, lookahead, depth, num_stages):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = policy()
        build(config, max_model_len=512, tile=16)
    engine = Engine(config=config, max_model_len=512, tile=16, lookahead=lookahead, depth=depth, num_stages=num_stages)
    for i in range(10):
        engine.add(1 + 37 * i, max_tokens=1 + 3 * i)
        engine.step()
    engine.run()
    assert len(engine.finished) == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_does_not_change_how_much_is_generated(policy):
    """Nor does a pool so small that those that preempt do."""
    for num_pages in (6, 400):
        engine = Engine(config=make(policy, 16, max_num_seqs=4, watermark=0.0), num_pages=num_pages, max_model_len=96)
        seqs = [engine.add(n, max_tokens=40, stop_after=stop) for n, stop in ((30, None), (47, 7), (31, 33), (9, None))]
        engine.run()
        assert [len(s.output_token_ids) for s in seqs] == [40, 7, 33, 40]
        assert bool(engine.preempted) == (num_pages == 6 and policy not in (Orca, FasterTransformer)), num_pages


OPTIONS = {
    "threshold": partial(Sarathi, long_prefill_token_threshold=5),
    "time": partial(Sarathi, time_budget_s=0.012, cost=toy_cost, max_prefill_wait=3),
    "urgent": partial(Sarathi, priority_preemption=True),
    "shortest": ShortestFirst,
    "shortest_urgent": partial(ShortestFirst, priority_preemption=True),
}


@pytest.mark.parametrize("name", [*(p.__name__ for p in POLICIES[1:]), *OPTIONS])
def test_soak(name):
    by_name = {p.__name__: p for p in POLICIES} | OPTIONS
    policy = by_name[name]

    def make_config(*, token_budget, **settings):
        return make(policy, token_budget, **settings)

    counts = [soak(seed, make_config) for seed in range(12)]
    preempted, refused, aborted, most, _ = zip(*counts, strict=True)
    assert min(sum(refused), sum(aborted)) > 20, "the soak does not reach what it is for"
    assert (sum(preempted) > 20) == (policy not in (Orca, FasterTransformer))
    assert max(most) < 30, f"a sequence was preempted {max(most)} times"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_abort_at_any_moment_leaves_the_others_alone(policy):
    for moment, victim in itertools.product(range(0, 40, 3), range(4)):
        engine = Engine(config=make(policy, 16, max_num_seqs=3), num_pages=8, max_model_len=64, lookahead=1, depth=2)
        seqs = [engine.add(20 + 3 * i, max_tokens=12 + i) for i in range(4)]
        for _ in range(moment):
            if engine.scheduler.has_unfinished:
                engine.step()
        engine.abort(seqs[victim])
        engine.abort(seqs[victim])
        engine.run()
        others = [s for s in seqs if s is not seqs[victim]]
        assert [len(s.output_token_ids) for s in others] == [s.params.max_tokens for s in others]
