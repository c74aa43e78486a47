"""The same tokens on any mesh, compiled once; stages and replicas that share work; pools that agree."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import sarathi_jax as sj
from sarathi_jax.config import CacheConfig, ModelConfig
from sarathi_jax.engine import Engine
from sarathi_jax.llm import LLM
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.weights import init_weights
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan
from sarathi_jax.runner import ModelRunner
from sarathi_jax.stages import stage_use

CONFIG = ModelConfig(
    architecture="llama", vocab_size=263, hidden_size=32, intermediate_size=50, num_layers=4, num_heads=9,
    num_kv_heads=3, head_dim=16, max_position=128,
)  # fmt: skip


@pytest.fixture(scope="session")
def model() -> Decoder:
    """Three KV heads with three query heads each, as SmolLM2; weights so large that no two tokens are close."""
    return Decoder(CONFIG, init_weights(CONFIG, jnp.dtype(jnp.float32), seed=1, scale=0.2))


@pytest.fixture(scope="session")
def make(model) -> Callable[..., sj.Engine | sj.Replicas]:
    """Engines, or replicas, of one shape, and so few pages that sequences are preempted."""

    def make(parallel: sj.Parallel | None):
        kind = sj.Replicas if parallel is not None and parallel.data > 1 else Engine
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="token_budget=")
            engine = kind(
                model, None, scheduler=sj.Sarathi(token_budget=16, max_num_seqs=5), max_model_len=64, parallel=parallel,
                cache=CacheConfig(page_size=8, num_pages=14),
            )  # fmt: skip
        for each in [engine] if kind is Engine else engine.engines:
            object.__setattr__(each.runner.shapes, "num_tokens", (16,))
        return engine

    return make


REQUESTS = {
    f"r{i}": (
        np.random.default_rng(i).integers(0, 263, [1, 40, 17, 3, 33, 9, 25, 12][i]).tolist(),
        SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=10, logprobs=3 if i == 2 else None,
            prompt_logprobs=2 if i == 4 else None, presence_penalty=0.7 if i == 5 else 0.0, n=2 if i == 7 else 1,
        ),
    )
    for i in range(8)
}  # fmt: skip


def answer(engine, **options) -> dict[str, sj.RequestOutput]:
    """All of REQUESTS, checked after every step."""
    for name, (prompt, params) in REQUESTS.items():
        engine.add_request(name, prompt_token_ids=prompt, params=params)
    final = {}
    while engine.has_unfinished():
        final |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    return final


def same(answers: dict[str, sj.RequestOutput], wanted: dict[str, sj.RequestOutput]) -> None:
    """Tokens equal; logprobs equal up to the order of float sums."""
    assert answers.keys() == wanted.keys()
    for name, output in wanted.items():
        got = answers[name]
        assert [o.token_ids for o in got.outputs] == [o.token_ids for o in output.outputs], name
        for ours, theirs in ((got.logprobs, output.logprobs), (got.prompt_logprobs, output.prompt_logprobs)):
            assert (ours is None) == (theirs is None)
            for mine, other in zip(ours or (), theirs or (), strict=True):
                assert (mine is None) == (other is None)
                for token, logprob in (other or {}).items():
                    assert mine[token].logprob == pytest.approx(logprob.logprob, abs=1e-3), f"{name}: {token}"


@pytest.fixture(scope="session")
def wanted(make) -> dict[str, sj.RequestOutput]:
    """What one device answers."""
    return answer(make(None))


MESHES = {
    "TP2": sj.Parallel(tensor=2),
    "TP4": sj.Parallel(tensor=4),
    "PP4": sj.Parallel(pipeline=4),
    "TP2 x PP2": sj.Parallel(tensor=2, pipeline=2),
    "DP2": sj.Parallel(data=2),
}


@pytest.fixture(scope="module")
def warm(make) -> Callable[[str], sj.Engine | sj.Replicas]:
    """The engine on a mesh of that name, ready to serve."""

    def warm(name: str):
        engine = make(MESHES[name])
        engine.warm_up(compile_cache=False)
        return engine

    return functools.cache(warm)


@pytest.mark.parametrize("name", MESHES)
def test_the_same_tokens_as_one_device_and_nothing_compiles(warm, wanted, name):
    engine = warm(name)
    num_compiled, events = engine.num_compiled, []
    listen = lambda event, duration_s, **_: events.append(event) if "compile" in event or "trace" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        same(answer(engine), wanted)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.num_compiled == num_compiled
    assert events == [], "something was traced or compiled while serving"


@pytest.fixture(scope="module")
def pipeline(make):
    engine = make(sj.Parallel(pipeline=2))
    engine.warm_up(compile_cache=False)
    assert engine.num_compiled == 3
    return engine


def test_stages_work_on_different_requests_and_on_chunks_of_one(pipeline, wanted):
    """Both micro-batches are in flight when one is read; no sequence waits for two tokens; chunks follow each other."""
    collect, depths, followed, steps = pipeline.collect, [], [], []

    def look():
        flights = [flight.step.chunks for flight in pipeline._in_flight]
        depths.append(len(flights))
        drawing = [chunk.sequence.seq_id for chunks in flights for chunk in chunks if chunk.samples]
        assert len(set(drawing)) == len(drawing), "a sequence draws in two micro-batches at once"
        ids = [{chunk.sequence.seq_id for chunk in chunks} for chunks in flights]
        followed.append(len(ids) == 2 and bool(ids[0] & ids[1]))
        outputs = collect()
        steps.append(pipeline.last_step)
        return outputs

    pipeline.collect = look
    try:
        same(answer(pipeline), wanted)
    finally:
        del pipeline.collect
    assert pipeline.num_compiled == 3
    assert pipeline.scheduler.num_stages == 2, "the policy spreads decodes over as many plans"
    assert max(depths) == 2
    assert depths.count(2) > len(depths) / 2, "the pipeline was not kept full"
    assert any(followed), "a prompt's next chunk waited for the one before"
    uses = stage_use(steps)
    assert [(use.replica, use.stage) for use in uses] == [(0, 0), (0, 1)]
    assert all(use.busy_s > 0 for use in uses)
    rows = steps[0].num_prefill_tokens + steps[0].num_decode_tokens + steps[0].num_padding
    assert steps[0].collective_bytes == rows * CONFIG.hidden_size * 4, "one hop, of float32 hidden states"
    for step in steps:
        assert step.stages[0][1] <= step.stages[1][1], "a stage ended before the one it waits for"


def test_a_micro_batch_is_sent_off_while_the_one_before_is_in_the_pipeline(warm, monkeypatch):
    """The last stage of the first micro-batch is held up on its devices until the first stage of the second one has
    been sent off. Were a dispatch to wait for any stage, neither would go on."""
    engine = warm("TP2 x PP2")
    first, last = engine.runner.stages
    [num_rows] = engine.runner.shapes.num_tokens
    second_sent, events = threading.Event(), []

    def hold_up() -> np.float32:
        events.append("went on" if second_sent.wait(60) else "gave up")
        return np.float32(0)

    @jax.jit  # on two devices: a CPU runs programs of one that call the host in the caller's thread
    @functools.partial(
        jax.shard_map, mesh=last.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    def held_up(hidden):
        return hidden + io_callback(hold_up, jax.ShapeDtypeStruct((), jnp.float32))

    def run_last(rows, batch, hidden):
        is_held_up = "last stage sent" not in events
        output = run_stage(rows, batch, held_up(hidden) if is_held_up else hidden)
        events.append("last stage sent")
        return output

    def run_first(rows, batch):
        hidden = run(rows, batch)
        events.append("first stage sent")
        if events.count("first stage sent") == 2:
            second_sent.set()
        return hidden

    run, run_stage = first._run, last.run_stage
    monkeypatch.setattr(first, "_run", run_first)
    monkeypatch.setattr(last, "run_stage", run_last)
    for i in range(2):
        params = SamplingParams(temperature=0, max_tokens=1)
        engine.add_request(f"p{i}", prompt_token_ids=[i + 1] * num_rows, params=params)
    assert engine.step() == []
    assert [output.request_id for output in engine.step()] == ["p0"]
    assert "gave up" not in events
    assert events[:3] == ["first stage sent", "last stage sent", "first stage sent"]
    assert events.count("went on") == 2, "once on each device"
    while engine.has_unfinished():
        engine.step()


def test_pools_of_all_stages_agree_after_a_soak(pipeline, model):
    """Random requests, aborts, preemptions; then keys and values of whoever runs are those of one device, layer by
    layer, in every stage at the pages of the one table."""
    rng, checked, preempted, names = np.random.default_rng(5), 0, 0, iter(range(60))

    def add():
        i = next(names, None)
        if i is not None:
            params = SamplingParams(temperature=float(rng.integers(2)), max_tokens=int(rng.integers(1, 24)))
            prompt = rng.integers(0, 263, int(rng.integers(1, 40))).tolist()
            pipeline.add_request(f"s{i}", prompt_token_ids=prompt, params=params)

    reference = ModelRunner(model, pipeline.runner.shapes)
    add()
    while pipeline.has_unfinished():
        if rng.random() < 0.5:
            add()
        if rng.random() < 0.1 and pipeline._live:
            pipeline.abort(str(rng.choice(list(pipeline._live))))
        pipeline.step()
        pipeline.check_integrity()
        pipeline.scheduler.check_integrity()
        if pipeline.last_step:
            preempted += pipeline.last_step.num_preempted
        if rng.random() < 0.1:
            while pipeline.oldest:
                pipeline.collect()
            for seq in pipeline.scheduler.running:
                if seq.page_ids and seq.num_computed:
                    check_pool(pipeline, seq, reference)
                    checked += 1
    assert next(names, None) is None
    assert preempted > 3
    assert checked > 5
    assert pipeline.pool.num_held == 0


def check_pool(engine, seq: Sequence, reference: ModelRunner) -> None:
    """Run the sequence's tokens through one device, and compare what lies in its pages."""
    shapes, length = engine.runner.shapes, seq.num_computed
    tokens = tuple(seq.token_ids(0, length))
    request = Request(request_id="x", prompt_token_ids=tokens, params=SamplingParams(), arrival_time_s=0.0)
    copy = Sequence(request, 0, slot=0)
    copy.page_ids = list(range(-(-length // shapes.page_size)))
    for start in range(0, length, shapes.num_tokens[-1]):
        chunk = Chunk(copy, start, min(shapes.num_tokens[-1], length - start), False)
        reference.execute(StepPlan(chunks=(chunk,), admitted=(copy,) if start == 0 else ())).read()
    for name in ("k", "v"):
        whole = by_layer(getattr(reference.kv, name), CONFIG.num_layers, copy.page_ids, length)
        parts = [
            by_layer(getattr(stage.kv, name), stage.config.num_layers, seq.page_ids, length)
            for stage in engine.runner.stages
        ]
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4, err_msg=f"{name} of {seq}")


def by_layer(pool, num_layers: int, page_ids: list[int], length: int) -> np.ndarray:
    pages = np.asarray(pool).reshape(num_layers, -1, *pool.shape[1:])[:, page_ids]  # [L, N, K, B, D]
    rows = np.moveaxis(pages, 3, 2).reshape(num_layers, -1, *pool.shape[1:2], pool.shape[3])
    return rows[:, :length]


def test_the_same_tokens_after_a_fault_in_a_pipeline(pipeline, wanted, monkeypatch):
    """Steps in flight when one fails are planned again."""
    for name, (prompt, params) in REQUESTS.items():
        pipeline.add_request(name, prompt_token_ids=prompt, params=params)
    final, steps = {}, 0
    while pipeline.has_unfinished():
        steps += 1
        if steps in (3, 9):
            assert pipeline.dispatch()
            with monkeypatch.context() as patch:
                patch.setattr("sarathi_jax.runner.DeviceStep.read", lambda self: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    pipeline.collect()
        final |= {output.request_id: output for output in pipeline.step()}
        pipeline.check_integrity()
    same(final, wanted)


def test_replicas_share_requests_by_what_is_left_to_run(warm):
    """The long one keeps a replica busy, the short ones go to the other; an abort finds its replica."""
    replicas = warm("DP2")
    add = lambda name, length, most: replicas.add_request(
        name, prompt_token_ids=[1] * length, params=SamplingParams(max_tokens=most)
    )
    add("long", 40, 20)
    for i in range(3):
        add(f"short{i}", 4, 4)
    assert [engine.num_unfinished for engine in replicas.engines] == [1, 3]
    with pytest.raises(ValueError, match="in use"):
        add("long", 1, 1)
    assert replicas.abort("long")
    assert not replicas.abort("long")
    add("next", 2, 2)
    assert [engine.num_unfinished for engine in replicas.engines] == [1, 3]
    outputs = LLM(replicas).generate([{"prompt_token_ids": [5, 6]}] * 3, SamplingParams(temperature=0, max_tokens=3))
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    while replicas.has_unfinished():
        replicas.step()
    assert {engine.pool.num_held for engine in replicas.engines} == {0}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 0}, "tensor=0 must be an integer >= 1"),
        ({"tensor": 16}, "mesh of 16 devices, and there are 8"),
        ({"pipeline": 5}, "pipeline=5 is more than num_layers=4; 1 to 4 work"),
        ({"tensor": 2, "devices": jax.devices()[:1] * 2}, "names one of them twice"),
        ({"data": 2}, "an engine is one replica"),
    ],
)
def test_what_cannot_be_split_is_refused(model, parallel, message):
    with pytest.raises(ValueError, match=message):
        sj.Engine(model, None, parallel=sj.Parallel(**parallel))


def test_a_model_that_does_not_fit_the_devices_is_refused(model):
    cache = sj.CacheConfig(num_pages=10**9)
    with pytest.raises(ValueError, match=r"num_pages=1000000000 .* need .* bytes and"):
        sj.Engine(model, None, parallel=sj.Parallel(tensor=2), cache=cache)
