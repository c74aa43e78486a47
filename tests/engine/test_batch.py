"""BatchBuilder against a builder written row by row: rows, positions, pages, settings and padding of random plans."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax.batch import BatchBuilder, BuiltBatch
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan
from sarathi_jax.shapes import Shapes

PAGE_SIZE, MAX_LEN = 4, 60


def make_shapes(max_num_seqs: int = 5, budget: int = 32, num_pages: int = 60, window: int | None = None) -> Shapes:
    return Shapes.make(
        max_tokens=budget, tile=16, max_num_seqs=max_num_seqs, max_model_len=MAX_LEN, page_size=PAGE_SIZE,
        num_pages=num_pages, window=window,
    )  # fmt: skip


def make_sequence(seq_id: int, rng: np.random.Generator, *, index: int = 0) -> Sequence:
    prompt = tuple(rng.integers(0, 99, int(rng.integers(1, 40))).tolist())
    params = SamplingParams(
        n=1,
        temperature=float(rng.choice([0.0, 0.7])),
        top_k=int(rng.integers(-1, 5)),
        top_p=float(rng.choice([0.5, 1.0])),
        min_p=float(rng.choice([0.0, 0.1])),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.4])),
        frequency_penalty=float(rng.choice([0.0, -0.4])),
        min_tokens=int(rng.choice([0, 2])),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, 0, 2]),
    )
    request = Request(request_id=str(seq_id), prompt_token_ids=prompt, params=params, arrival_time_s=float(seq_id))
    seq = Sequence(request, seq_id, index=index, seed=seq_id * 7)
    seq.max_total_tokens = min(MAX_LEN, len(prompt) + 8)
    return seq


def naive(plan: StepPlan, built: BuiltBatch, shapes: Shapes) -> None:
    """What the batch of a plan must be, one row after another, in plain Python."""
    batch = jax.tree.map(np.asarray, built.batch)
    t, s = batch.tokens, batch.sampling
    num_rows = len(t.token_ids)
    sink_page, sink_slot = shapes.num_pages, shapes.num_slots
    assert num_rows in shapes.num_tokens
    assert all(size < plan.num_tokens for size in shapes.num_tokens if size < num_rows), "not the smallest shape"
    assert (built.num_tokens, built.num_padding) == (plan.num_tokens, num_rows - plan.num_tokens)
    assert sorted(map(id, built.chunks)) == sorted(map(id, plan.chunks))

    decodes = [c for c in built.chunks if c.num_tokens == 1]
    assert list(built.chunks[: len(decodes)]) == decodes, "decodes stand first"
    assert [c.end for c in decodes] == sorted((c.end for c in decodes), reverse=True), "the longest first"
    assert (t.num_seqs, t.num_decodes) == (len(built.chunks), len(decodes))

    row = 0
    any_targets = False
    for i, c in enumerate(built.chunks):
        seq = c.sequence
        assert built.first_rows[i] == row == t.cu_q_lens[i]
        for position in range(c.start, c.end):
            all_ids = [*seq.prompt_token_ids, *seq.output_token_ids]
            pending = position >= len(all_ids)
            assert t.positions[row] == position
            assert t.prompt_lens[row] == seq.prompt_len
            assert t.page_ids[row] == seq.page_ids[position // PAGE_SIZE - seq.num_released]
            assert t.offsets[row] == position % PAGE_SIZE
            assert batch.from_device[row] == pending
            if pending:
                assert batch.token_slots[row] == seq.slot
            else:
                assert t.token_ids[row] == all_ids[position]
            wants = seq.params.prompt_logprobs is not None and seq.index == 0 and position + 1 < seq.prompt_len
            assert batch.wants_target[row] == wants
            if wants:
                assert batch.targets[row] == seq.prompt_token_ids[position + 1]
            any_targets |= wants
            row += 1
        assert batch.last_rows[i] == row - 1
        assert t.kv_lens[i] == c.end
        num_pages = seq.num_released + len(seq.page_ids)
        assert t.page_table[i].tolist()[:num_pages] == [sink_page] * seq.num_released + seq.page_ids
        assert (t.page_table[i, num_pages:] <= sink_page).all()
        p, samples = seq.params, c.samples
        assert s.slot[i] == (seq.slot if samples else sink_slot)
        assert s.suppress_stop[i] == (samples and c.end - seq.prompt_len < p.min_tokens)
        if samples:
            assert s.position[i] == c.end
            given = (s.temperature[i], s.top_p[i], s.min_p[i], s.repetition[i], s.presence[i], s.frequency[i])
            asked = (
                p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            )  # fmt: skip
            assert given == tuple(map(np.float32, asked))
            assert s.top_k[i] == max(p.top_k, 0)
            assert s.use_state[i] == (p.has_penalties or p.min_tokens > 0)
            words = [seq.seed % 2**32, (seq.seed >> 32) % 2**32, seq.index]
            assert s.key[i].tolist() == np.random.SeedSequence(words).generate_state(2).tolist()
        else:
            assert s.temperature[i] == 0.0
            assert not s.use_state[i]
    assert batch.any_targets == any_targets
    sampling = [c for c in built.chunks if c.samples]
    assert s.any_random == any(not c.sequence.params.is_greedy for c in sampling)
    assert s.any_logprobs == any(c.sequence.params.logprobs is not None for c in sampling)

    # Padding: writes to the sink page, keeps nothing, samples for the sink slot.
    assert (t.page_ids[row:] == sink_page).all()
    assert not batch.from_device[row:].any()
    assert not batch.wants_target[row:].any()
    assert (t.cu_q_lens[len(built.chunks) :] == row).all()
    rest = slice(len(built.chunks), None)
    assert (s.slot[rest] == sink_slot).all()
    assert (s.temperature[rest] == 0).all()
    assert not s.use_state[rest].any()
    assert not s.suppress_stop[rest].any()
    assert (t.page_table[rest] == sink_page).all()
    assert (t.kv_lens[rest] == 0).all()


@pytest.mark.parametrize("max_num_seqs", [1, 5, 8])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_random_plans_are_laid_out_as_a_naive_builder_would(max_num_seqs, lookahead):
    """Plans of the real scheduler: mid-prefill, decodes, preemption, slots and pages used again, unread tokens, pages
    given back behind a window (in a pool that could not hold the longest)."""
    seen: set[str] = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        window = None if seed < 6 else 9
        shapes = make_shapes(max_num_seqs, num_pages=(60, 30)[seed % 2] if window is None else 11, window=window)
        pool = PagePool(shapes.num_pages, PAGE_SIZE, window)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = sj.Sarathi(token_budget=32, max_num_seqs=max_num_seqs).build(
                pool, max_model_len=MAX_LEN, tile=16, lookahead=lookahead
            )
        builder, unread = BatchBuilder(shapes), []
        for i in range(14):
            scheduler.add(make_sequence(i, rng, index=i % 3))
        for _ in range(400):
            plan = scheduler.plan(0.0)
            if plan:
                built = builder.build(plan)
                naive(plan, built, shapes)
                unread.append(plan)
                seen |= {"preempted"} if plan.preempted else set()
                seen |= {"released"} if any(c.sequence.num_released for c in plan.chunks) else set()
                seen |= {"pending"} if built.batch.from_device.any() else set()
                seen |= {"mixed"} if 0 < plan.num_decode_tokens < plan.num_tokens else set()
                seen |= {f"{len(plan.chunks)} sequences"}
            while unread and (len(unread) > lookahead or not plan):
                for c in unread.pop(0).chunks:
                    if c.samples and not c.sequence.is_finished:
                        c.sequence.output_token_ids.append(int(rng.integers(0, 99)))
                        c.sequence.num_pending -= 1
                        if c.sequence.at_limit and not c.sequence.num_pending:
                            scheduler.finish(c.sequence)
            if not scheduler.has_unfinished:
                break
        assert not scheduler.has_unfinished
    assert "released" in seen
    assert "mixed" in seen or max_num_seqs == 1
    assert {f"{n} sequences" for n in range(1, max_num_seqs + 1)} <= seen
    assert "pending" in seen or not lookahead
    assert "preempted" in seen or max_num_seqs == 1


@pytest.mark.parametrize("max_num_seqs", [1, 5, 8, 20])
def test_a_batch_has_one_structure_whatever_it_holds(max_num_seqs):
    """What warm-up compiled for is what serving passes, in every shape and with every option on or off (J03)."""
    shapes = make_shapes(max_num_seqs, budget=96)
    signature = lambda batch: jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype, type(x)), batch)
    for num_rows in shapes.num_tokens:
        builder = BatchBuilder(shapes)
        empty = signature(builder.empty(num_rows))
        for seed, params in enumerate(
            [
                SamplingParams(temperature=0.0),
                SamplingParams(seed=1, top_p=0.5, top_k=3, logprobs=2, prompt_logprobs=1),
                SamplingParams(logit_bias={1: 1.0}, min_tokens=2, repetition_penalty=2.0),
            ]
        ):
            size = min(num_rows, MAX_LEN)
            request = Request(request_id="a", prompt_token_ids=tuple(range(size)), params=params, arrival_time_s=0.0)
            pages = list(range(-(-size // PAGE_SIZE)))
            seq = Sequence(request, seed, slot=0, page_ids=pages, max_total_tokens=size + 1)
            plan = StepPlan(chunks=(Chunk(seq, 0, size, True),), admitted=(seq,))
            built = builder.build(plan)
            if built.num_tokens + built.num_padding == num_rows:
                assert signature(built.batch) == empty
        assert jax.tree.structure(builder.empty(num_rows)) == jax.tree.structure(built.batch)


def test_an_empty_batch_is_padding_only():
    shapes = make_shapes()
    batch = BatchBuilder(shapes).empty(16)
    assert (batch.tokens.page_ids == shapes.num_pages).all()
    assert (batch.sampling.slot == shapes.num_slots).all()
    assert batch.tokens.num_seqs == batch.tokens.num_decodes == 0
    assert not (batch.any_targets or batch.sampling.any_state or batch.sampling.any_random)


def planned(num_tokens: int, page_ids: list[int], *, slot: int | None = 0) -> StepPlan:
    request = Request(
        request_id="a", prompt_token_ids=tuple(range(num_tokens)), params=SamplingParams(), arrival_time_s=0.0
    )
    seq = Sequence(request, 0, slot=slot, page_ids=page_ids, max_total_tokens=num_tokens + 1)
    return StepPlan(chunks=(Chunk(seq, 0, num_tokens, True),), admitted=(seq,))


@pytest.mark.parametrize("page_ids", [[0, 60], [0, -1], [0, 999]])
def test_a_page_outside_the_pool_is_caught_on_the_host(page_ids):
    """On the device it would be clamped into somebody else's page."""
    with pytest.raises(AssertionError, match="outside the pool"):
        BatchBuilder(make_shapes()).build(planned(8, page_ids))


def test_a_token_without_a_page_is_caught_on_the_host():
    with pytest.raises(AssertionError, match="without a page"):
        BatchBuilder(make_shapes()).build(planned(8, [3]))


@pytest.mark.parametrize("slot", [None, 5, -1])
def test_a_sequence_without_a_slot_of_its_own_is_caught(slot):
    with pytest.raises(AssertionError, match="slot"):
        BatchBuilder(make_shapes()).build(planned(4, [0], slot=slot))


def test_pages_of_the_slots_last_holder_are_forgotten():
    """A short sequence in the slot of a longer one, which gave its pages to a third."""
    builder = BatchBuilder(make_shapes())
    builder.build(planned(20, [9, 8, 7, 6, 5]))
    batch = builder.build(planned(6, [1, 2])).batch
    assert batch.tokens.page_table[0, :2].tolist() == [1, 2]
    assert batch.tokens.page_ids[:6].tolist() == [1, 1, 1, 1, 2, 2]
