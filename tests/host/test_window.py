"""Where all layers have a window, the pages behind it are given back: none too early, none too late, at any moment."""

import itertools
from functools import partial

import pytest

from sarathi_jax.config import ModelConfig
from sarathi_jax.driver import run_open_loop
from sarathi_jax.pages import PagePool
from sarathi_jax.request import SamplingParams
from sarathi_jax.schedulers import VLLM, ChunkedOnly, FasterTransformer, HybridOnly, Orca, Sarathi
from sarathi_jax.simulator import Simulator
from sarathi_jax.workload import WorkItem, Workload

from .harness import Engine, sizes, soak

POLICIES = {
    "Sarathi": Sarathi,
    "threshold": partial(Sarathi, long_prefill_token_threshold=5),
    "urgent": partial(Sarathi, priority_preemption=True),
    "ChunkedOnly": ChunkedOnly,
    "HybridOnly": HybridOnly,
    "VLLM": VLLM,
    "Orca": Orca,
    "FasterTransformer": FasterTransformer,
}
WHOLE = {"HybridOnly", "VLLM", "Orca", "FasterTransformer"}
RESERVES = {"Orca", "FasterTransformer"}
WINDOWS = (1, 2, 3, 7, 16, 40)


def make(name, token_budget, **settings):
    if name in WHOLE - {"HybridOnly"}:
        return POLICIES[name](**settings)
    return POLICIES[name](token_budget=token_budget, **settings)


def model(num_layers=4, **fields):
    return ModelConfig(
        architecture="x", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=num_layers, num_heads=2,
        num_kv_heads=1, head_dim=4, max_position=64, **fields,
    )  # fmt: skip


# Which pages


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"sliding_window": 5}, 5),
        ({"sliding_window": 5, "window_pattern": (True, False)}, None),
        ({"sliding_window": 5, "window_pattern": (True, True, True, True, True, False)}, 5),  # no sixth layer
    ],
)
def test_a_model_with_one_full_layer_keeps_everything(fields, window):
    """All layers are under one page table."""
    assert model(**fields).kv_window == window


@pytest.mark.parametrize(("window", "page_size"), [*itertools.product((1, 2, 5, 8, 17), (1, 3, 8))])
def test_a_page_is_behind_when_no_later_query_sees_a_key_of_it(window, page_size):
    pool = PagePool(4, page_size, window)
    for position in range(3 * window + 2 * page_size):
        later = range(position, position + window)
        seen = {key for query in later for key in range(max(query - window + 1, 0), query + 1)}
        assert pool.num_behind(position) == min(key // page_size for key in seen), position
    assert PagePool(4, page_size).num_behind(100) == 0


@pytest.mark.parametrize(
    ("window", "page_size", "chunk_len"), [*itertools.product((1, 2, 5, 8, 17), (1, 3, 8), (1, 2, 6, 16))]
)
def test_the_most_pages_are_those_of_the_worst_chunk(window, page_size, chunk_len):
    """Of all chunks that there can be: enough for each, and one page less would not be."""
    pool, lengths = PagePool(4, page_size, window), range(1, 80)
    worst = 0
    for num_tokens in lengths:
        for start in range(max(num_tokens - chunk_len, 0), num_tokens):  # those that end here
            seen = range(max(start - window + 1, 0), num_tokens)
            worst = max(worst, len({key // page_size for key in seen}))
        assert pool.most_pages(num_tokens, chunk_len) == worst, num_tokens
    assert PagePool(4, page_size).most_pages(79, chunk_len) == -(-79 // page_size)


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_a_bad_window_is_named(window):
    with pytest.raises(ValueError, match="window"):
        PagePool(4, 4, window)


# What a sequence holds


def test_what_a_sequence_holds_does_not_grow_with_its_length():
    """Window 20 in pages of 4: a chunk of 16 sees 35 keys; a decode 20."""
    engine = Engine(budget=16, page_size=4, num_pages=12, window=20, max_model_len=400)
    seq = engine.add(200, max_tokens=100)
    held = []
    while not seq.is_finished:
        engine.step()
        held.append(engine.pool.num_held)
    assert held[:4] == [4, 8, 9, 9]
    assert set(held[2:12]) == {9}, "(20 - 1) keys before the chunk lie in 5 pages, its own in 4"
    assert set(held[16:-1]) == {5, 6}
    engine.run()
    assert seq.num_preemptions == 0


def test_a_page_goes_to_another_in_the_iteration_that_no_longer_sees_it():
    engine = Engine(budget=8, page_size=4, num_pages=4, window=4, watermark=0.0)
    long = engine.add(60, max_tokens=1)
    engine.step()
    assert (long.page_ids, engine.pool.num_free) == ([0, 1], 2)
    engine.step()
    assert (long.num_released, long.page_ids) == (1, [1, 0, 2]), "the first page has positions 8 to 11 now"
    engine.run()


def test_a_window_longer_than_the_model_changes_nothing():
    def plans(window):
        engine = Engine(budget=16, num_pages=8, max_num_seqs=4, max_model_len=100, window=window)
        for i in range(8):
            engine.add(20 + 5 * i, max_tokens=12 + i)
        return [(sizes(plan), [list(c.sequence.page_ids) for c in plan.chunks]) for plan in engine.run()]

    assert plans(100) == plans(None)


@pytest.mark.parametrize("name", POLICIES)
def test_harness_sees_a_page_that_is_given_back_too_early(name, monkeypatch):
    right = PagePool.num_behind
    monkeypatch.setattr(PagePool, "num_behind", lambda self, position: right(self, position + 1))
    engine = Engine(config=make(name, 16, max_num_seqs=4), num_pages=60, page_size=4, window=10, max_model_len=120)
    engine.add(50, max_tokens=30)
    with pytest.raises(AssertionError):
        engine.run()


# What fits


@pytest.mark.parametrize("name", ["Sarathi", "ChunkedOnly"])
def test_a_prompt_longer_than_the_pool_is_served(name):
    """Ten pages of 16 hold 160 tokens, and a window of 100 beside a chunk of 32 needs 10."""
    engine = Engine(config=make(name, 32, max_num_seqs=4), num_pages=10, window=100, max_model_len=2000)
    seqs = [engine.add(1500, max_tokens=200), engine.add(40, max_tokens=60), engine.add(700, max_tokens=None)]
    engine.run(max_steps=6000)
    assert [len(seq.output_token_ids) for seq in seqs] == [200, 60, 1300]


def test_what_can_never_fit_is_refused_with_the_budget_as_a_knob():
    engine = Engine(budget=32, num_pages=9, window=100, max_model_len=2000)
    engine.add(144, max_tokens=1)
    with pytest.raises(ValueError, match=r"146 tokens need 10 pages of 16 and the pool has 9; .*token budget"):
        engine.add(145, max_tokens=1)
    seq = engine.add(100, max_tokens=None)
    engine.run()
    assert len(seq.output_token_ids) == 45, "as long as all of it fits"
    engine = Engine(budget=16, max_num_seqs=4, num_pages=9, window=100, max_model_len=2000)
    engine.add(145, max_tokens=1)
    engine.run()


@pytest.mark.parametrize("name", sorted(WHOLE - RESERVES))
def test_a_policy_of_whole_prompts_needs_them_whole(name):
    """Also to compute prompt and outputs again in one piece; then it gives back what is behind."""
    engine = Engine(config=make(name, 32, max_num_seqs=4), num_pages=10, window=20, max_model_len=200)
    with pytest.raises(ValueError, match="11 pages of 16 and the pool has 10"):
        engine.add(161, max_tokens=1)
    seq = engine.add(150, max_tokens=None)
    engine.step()
    assert engine.pool.num_held == 10
    engine.step()
    assert engine.pool.num_held == 2, "of 20 keys"
    engine.run()
    assert len(seq.output_token_ids) == 11


@pytest.mark.parametrize("name", sorted(RESERVES))
def test_a_reservation_shrinks_from_its_front(name):
    engine = Engine(config=make(name, 32, max_num_seqs=4), num_pages=10, window=20, max_model_len=160)
    seq = engine.add(100, max_tokens=60)
    held = []
    while not seq.is_finished:
        engine.step()
        held.append(engine.pool.num_held)
    assert (held[0], held[1], held[-2]) == (10, 10 - 81 // 16, 10 - 138 // 16)
    engine.run()
    with pytest.raises(ValueError, match=r"11 of 16, and the pool has 10"):
        Engine(config=make(name, 32), num_pages=10, window=20, max_model_len=161)


def test_a_preempted_sequence_comes_back_when_its_window_fits():
    """Its 60 tokens would never fit 9 pages."""
    engine = Engine(budget=16, page_size=4, num_pages=9, window=16, max_num_seqs=2, watermark=0.0, max_model_len=400)
    first, second = engine.add(60, max_tokens=100), engine.add(60, max_tokens=100)
    engine.run()
    assert engine.finished == [first, second]
    assert second.num_preemptions == 1


def test_an_urgent_prompt_longer_than_the_pool_goes_before_others():
    config = Sarathi(token_budget=16, max_num_seqs=4, watermark=0.0, priority_preemption=True)
    engine = Engine(config=config, page_size=4, num_pages=12, window=16, max_model_len=400)
    others = [engine.add(20, max_tokens=60, priority=1) for _ in range(2)]
    for _ in range(12):
        engine.step()
    urgent = engine.add(150, max_tokens=2)
    assert urgent in engine.step().admitted
    engine.run()
    assert engine.finished[0] is urgent and urgent.num_preemptions == 0
    assert all(len(seq.output_token_ids) == 60 for seq in others)


# At any moment


@pytest.mark.parametrize("name", POLICIES)
def test_soak(name):
    """Lookahead, stages, preemption, aborts and steps that fail; `harness.Engine` looks at every key that is read."""

    def make_config(*, token_budget, **settings):
        return make(name, token_budget, **settings)

    counts = [soak(seed, make_config, windows=WINDOWS) for seed in range(20, 24 if name in RESERVES else 30)]
    preempted, _, aborted, _, longer = map(sum, zip(*counts, strict=True))
    assert aborted > 20
    assert (preempted > 20) == (name not in RESERVES)
    assert (longer > 10) == (name not in WHOLE), "sequences longer than the pool"


def test_a_pipeline_of_chunks_gives_back_while_chunks_are_in_flight():
    engine = Engine(budget=16, page_size=4, num_pages=12, window=20, num_stages=3, depth=3, max_model_len=400)
    seq = engine.add(200, max_tokens=5)
    starts = []
    while engine.scheduler.has_unfinished:
        plan = engine.step()
        starts += [c.start for c in plan.chunks]
        assert engine.pool.num_held <= 9
    assert starts[:12] == list(range(0, 192, 16))
    engine.run()
    assert len(seq.output_token_ids) == 5


# The simulator


def test_the_simulator_has_the_window_too():
    work = Workload(items=(WorkItem(arrived_at_s=0.0, num_prefill_tokens=600, num_decode_tokens=40),))
    config = Sarathi(token_budget=32, max_num_seqs=4)
    simulator = lambda **options: Simulator(config, lambda decodes, chunks: 1.0, max_model_len=1000, **options)
    held = [step.num_pages_held for step in run_open_loop(simulator(num_pages=12, kv_window=100), work).iterations]
    assert max(held) == 9 and held[-1] == 7
    everything = run_open_loop(simulator(num_pages=50), work)
    assert max(step.num_pages_held for step in everything.iterations) == 40
    with pytest.raises(ValueError, match="40 pages of 16 and the pool has 12"):
        simulator(num_pages=12).add_request("a", prompt_token_ids=range(600), params=SamplingParams(max_tokens=40))
