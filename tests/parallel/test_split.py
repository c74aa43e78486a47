"""A model over a mesh computes what it computes on one device, with two sums a layer and a pool that stays in place."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sarathi_jax as sj
from sarathi_jax import parallel
from sarathi_jax.config import CacheConfig, ModelConfig
from sarathi_jax.engine import Engine
from sarathi_jax.known_models import model_config
from sarathi_jax.memory_plan import plan, state_bytes, weight_bytes
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.hub import fetch_default_model
from sarathi_jax.models.parts import HeadLayout, ModelPart
from sarathi_jax.models.placement import load_parts, place_model
from sarathi_jax.models.weights import init_weights, load_weights
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan
from sarathi_jax.runner import ModelRunner
from sarathi_jax.shapes import Shapes
from sarathi_jax.stage_split import split_layers

PLAIN = ModelConfig(
    architecture="llama", vocab_size=263, hidden_size=32, intermediate_size=50, num_layers=3, num_heads=9,
    num_kv_heads=3, head_dim=16, max_position=64,
)  # fmt: skip
CONFIGS = {
    "one KV head, parallel block, biases": replace(
        PLAIN, num_heads=5, num_kv_heads=1, block="parallel_shared_norm", norm="layer", gated_mlp=False,
        hidden_act="gelu", qkv_bias=True, o_bias=True, mlp_bias=True,
    ),
    "biases one by one, learned positions": replace(
        PLAIN, positions="learned", norm="layer", gated_mlp=False, qkv_bias=True, o_bias=True, mlp_bias=True,
        tie_embeddings=True,
    ),
    "windows, norms around everything, caps": replace(
        PLAIN, post_norms=True, qk_norm=True, sliding_window=7, window_pattern=(True, False), local_rope_theta=100.0,
        attention_soft_cap=20.0, logit_soft_cap=9.0, embed_scale=3.0, norm_offset=1.0, tie_embeddings=True,
    ),
    "experts, and fewer tokens than logprobs": replace(
        PLAIN, vocab_size=17, num_experts=3, experts_per_token=2, expert_size=21, moe_pattern=(True, False),
    ),
}  # fmt: skip
SHAPES = replace(
    Shapes.make(max_tokens=16, tile=16, max_num_seqs=4, max_model_len=64, page_size=8, num_pages=12), num_tokens=(16,)
)


def make_plan(vocab_size: int) -> StepPlan:
    """Two prompts, one of them with a bias and a scored prompt."""
    chunks = []
    for slot, length in enumerate((9, 6)):
        ids = tuple(np.random.default_rng(slot).integers(0, vocab_size, length).tolist())
        params = SamplingParams(
            temperature=0.0, logprobs=5, prompt_logprobs=3 if slot else None, logit_bias={7: 0.5} if slot else None
        )
        request = Request(request_id=f"{slot}", prompt_token_ids=ids, params=params, arrival_time_s=0.0)
        seq = Sequence(request, slot, slot=slot)
        seq.page_ids = [2 * slot, 2 * slot + 1]
        chunks.append(Chunk(seq, 0, length, samples=True))
    return StepPlan(chunks=tuple(chunks), admitted=tuple(chunk.sequence for chunk in chunks))


def split(config: ModelConfig, weights: dict, tensor: int) -> ModelRunner:
    [[mesh]] = parallel.Parallel(tensor=tensor).meshes()
    [placed] = place_model(Decoder(config, weights), [ModelPart.whole(config, tensor)], [mesh])
    return ModelRunner(placed.decoder, SHAPES, mesh=mesh)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_over_four_devices(name):
    """Tokens, and the likeliest ones' logprobs, of samples and of a prompt, are those of one device."""
    config = CONFIGS[name]
    weights = init_weights(config, jnp.dtype(jnp.float32), seed=2, scale=0.3)
    steps = make_plan(config.vocab_size)
    one = ModelRunner(Decoder(config, weights), SHAPES).execute(steps).read()
    runner = split(config, weights, 4)
    where = lambda: [shard.data.unsafe_buffer_pointer() for x in runner.kv for shard in x.addressable_shards]
    before = where()
    many = runner.execute(steps).read()
    assert where() == before, "the pool was copied"
    assert len(set(before)) == 8
    assert many.tokens[:2] == one.tokens[:2]
    for ours, theirs in ((many.scores, one.scores), (many.prompt_scores, one.prompt_scores)):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours.top, theirs.top, atol=2e-3)
        assert np.isfinite(ours.top).all(), "padding of the vocabulary among the likeliest"
        assert (ours.top_ids < config.vocab_size).all()
    assert (np.asarray(many.scores.top_ids)[:2] == one.scores.top_ids[:2]).all()
    check_program(runner, config)


def check_program(runner: ModelRunner, config: ModelConfig) -> None:
    """One sum for the embeddings; in the loop two a layer, one where attention and MLP are added together; logits
    gathered, and nothing else; no copy of the pool."""
    text = runner._compiled[16].as_text()
    bodies = re.split(r"\n(?=%|ENTRY)", text)
    sums = [len(re.findall(r" = \S+ all-reduce(?:-start)?\(", body)) for body in bodies]
    in_layer = 2 if config.block == "sequential" else 1
    slots = len({name.split(".")[0] for name in ModelPart.whole(config).specs if name.startswith("layers")})
    assert sum(sums) == 1 + in_layer * slots
    if slots == 1:  # a loop of one round is unrolled
        assert sorted(filter(None, sums)) == [1, in_layer]
    gathered = re.findall(r" = (\S+) all-gather(?:-start)?\(", text)
    padded = -(-config.vocab_size // 4) * 4
    assert all(shape.startswith((f"f32[8,{padded}]", f"f32[16,{padded}]")) for shape in gathered), gathered
    assert not re.search(r" (?:all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    pool = ",".join(map(str, runner.kv.k.addressable_shards[0].data.shape))
    copies = re.findall(rf" = f32\[{pool}\]\S* (?:copy|all-gather)\(", text)
    if jax.__version_info__ >= (0, 11):  # before, a CPU's program copies a pool of one KV head, on one device as well
        assert not copies, "the pool is copied"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "expected"),
    [
        (8, 4, 2, (4, 2, 1)),
        (9, 3, 2, (4, 3, 1)),  # SmolLM2: a head of zeros
        (9, 3, 4, (4, 3, 1)),
        (9, 3, 8, (8, 2, 2)),  # copies with two and one query heads, and two of zeros
        (71, 1, 8, (8, 9, 8)),  # Falcon-7B
        (64, 8, 16, (16, 4, 2)),
        (29 * 8, 8, 8, (8, 29, 1)),
    ],
)
def test_head_layout(heads, kv_heads, tensor, expected):
    config = replace(PLAIN, num_heads=heads, num_kv_heads=kv_heads)
    layout = HeadLayout.choose(config, tensor)
    assert (layout.num_kv_heads, layout.num_groups, layout.num_copies) == expected
    columns = layout.columns(config, 2).reshape(layout.num_kv_heads, layout.num_groups + 2)
    group = config.num_groups
    queries = [c for c in columns[:, : layout.num_groups].ravel().tolist() if c < kv_heads * (group + 2)]
    assert sorted(queries) == [k * (group + 2) + g for k in range(kv_heads) for g in range(group)], "each query once"
    for row in columns.tolist():
        own = {c // (group + 2) for c in row if c < kv_heads * (group + 2)}
        assert len(own) <= 1, "query heads beside another's keys"


def test_more_devices_than_query_heads_are_refused():
    with pytest.raises(ValueError, match=r"tensor=10 is more than num_heads=9 .* 1 to 9 work.* 1, 3$"):
        ModelPart.whole(PLAIN, 10)


def test_stages_take_equally_long():
    """Head and embedding count: those stages have fewer layers. Where they weigh little the cut is even."""
    sizes = lambda name, stages: [len(layers) for layers in split_layers(model_config(name), stages)]
    assert sizes("llama2-70b", 4) == [20] * 4
    assert sizes("smollm2-135m", 4)[-1] < 8
    assert sizes("gemma2-9b", 4) == [10, 11, 11, 10], "a head of 256,000 columns"


# ------------------------------------------------------------------------------------------------------- real weights


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(fetch_default_model())


def test_smollm2_over_two_devices_and_two_stages(checkpoint):
    """Weights read onto the meshes are those of the whole model, cut; a device holds its part; the tokens are equal."""
    dtype = jnp.dtype(jnp.float32)
    whole = Decoder(checkpoint.config, load_weights(checkpoint, dtype))
    [meshes] = parallel.Parallel(tensor=2, pipeline=2).meshes()
    layers = split_layers(checkpoint.config, 2)
    parts = [ModelPart(config=checkpoint.config, layers=each, tensor=2) for each in layers]
    loaded = load_parts(checkpoint, dtype, parts, meshes)
    for ours, theirs in zip(loaded, place_model(whole, parts, meshes), strict=True):
        assert list(ours.decoder.weights) == list(theirs.decoder.weights)
        for name, weight in ours.decoder.weights.items():
            assert (weight[...] == theirs.decoder.weights[name][...]).all(), name
            assert weight[...].sharding == theirs.decoder.weights[name][...].sharding
        held = parallel.bytes_per_device([weight[...] for weight in ours.decoder.weights.values()])
        assert set(held) == set(ours.mesh.devices.flat)
        assert set(held.values()) == {weight_bytes(ours.part, 4)}, "the memory plan's figure"

    def answers(model) -> list[list[int]]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="token_budget=")
            engine = Engine(
                model, checkpoint.tokenizer(), scheduler=sj.Sarathi(token_budget=16, max_num_seqs=2), max_model_len=64,
                cache=CacheConfig(num_pages=8),
            )  # fmt: skip
        object.__setattr__(engine.runner.shapes, "num_tokens", (16,))
        prompts = ["The capital of France is", "Water boils at a temperature of one hundred degrees, and"]
        return [o.token_ids for o in sj.LLM(engine).generate(prompts, SamplingParams(temperature=0, max_tokens=8))]

    assert answers(loaded) == answers(whole)


def test_int8_weights_are_cut_with_their_scales(checkpoint):
    """Rounded where they were read, or taken from a model that was rounded whole: the same numbers."""
    small = replace(checkpoint.config, num_layers=2)
    source = load_weights(checkpoint, jnp.dtype(jnp.float32), quantization="int8")
    cut = {n: w[:2] if n.startswith("layers") else w for n, w in source.items()}
    [[mesh]] = parallel.Parallel(tensor=2).meshes()
    [placed] = place_model(Decoder(small, cut), [ModelPart.whole(small, 2)], [mesh])
    held = parallel.bytes_per_device([weight[...] for weight in placed.decoder.weights.values()])
    assert set(held.values()) == {weight_bytes(placed.part, 4, "int8")}
    scale = np.asarray(placed.decoder.weights["layers0.qkv_scale"][...])
    assert (scale[:, :3] == np.asarray(cut["layers0.qkv_scale"])).all()
    assert (scale[:, 3] == 0).all()


# ------------------------------------------------------------------------------------------------------ memory plans


def test_a_memory_plan_counts_what_is_there():
    """Weights and state to the byte; the compiler's temporaries within the estimate's range."""
    weights = init_weights(PLAIN, jnp.dtype(jnp.float32))
    runner = split(PLAIN, weights, 4)
    part = ModelPart.whole(PLAIN, 4)
    assert set(parallel.bytes_per_device(runner._leaves).values()) == {weight_bytes(part, 4)}
    assert set(parallel.bytes_per_device(runner._state).values()) == {state_bytes(part, 4)}
    made = plan(PLAIN, "h100", 4, tensor=4, dtype="float32", max_num_seqs=4, max_step_tokens=16)
    pool = parallel.bytes_per_device(runner.kv)
    assert set(pool.values()) == {made.stages[0].kv_bytes_per_token * 13 * 8}


def test_memory_plans_of_published_models():
    """LLaMA2-70B in 16 bits: 128.5 GiB of weights in all; too much for one H100, and by how much it says."""
    fits = sj.plan("llama2-70b", "h100", 8)
    assert (fits.tensor, fits.pipeline, fits.fits) == (8, 1, True)
    assert fits.stages[0].weight_bytes * 8 == pytest.approx(128.5 * 2**30, rel=0.001)
    one = sj.plan("llama2-70b", "h100", 1)
    assert not one.fits
    assert one.spare_bytes == pytest.approx((0.9 * 79.6 - 128.5 - 1.25) * 2**30, rel=0.05)
    assert "GiB are missing" in str(one)
    falcon = {device: sj.plan("falcon-180b", device, 8, tensor=8).stages[0] for device in ("h100", "tpu-v5p")}
    assert falcon["tpu-v5p"].weight_bytes == falcon["h100"].weight_bytes
    assert falcon["tpu-v5p"].kv_bytes_per_token == 2 * falcon["h100"].kv_bytes_per_token, "heads of 64 stand in 128"
    eight_bit = sj.plan("llama2-70b", "h100", 8, quantization="int8")
    assert eight_bit.stages[0].weight_bytes < 0.52 * fits.stages[0].weight_bytes
    for wrong, message in (
        ({"tensor": 3}, "tensor=3 .* is not count=8; sizes that are: 1 x 8"),
        ({"dtype": "int4"}, "dtype='int4'"),
    ):
        with pytest.raises(ValueError, match=message):
            sj.plan("llama2-70b", "h100", 8, **wrong)


def test_a_restored_model_is_spread_and_then_cut(tmp_path):
    """A model in this library's own format, in 3 layers of two kinds, over two stages of two devices."""
    from sarathi_jax.models.convert import save_model
    from sarathi_jax.models.saved import SavedModel

    config = CONFIGS["windows, norms around everything, caps"]
    weights = init_weights(config, jnp.dtype(jnp.float32), seed=4)
    save_model(tmp_path / "saved", config, weights)
    [meshes] = parallel.Parallel(tensor=2, pipeline=2).meshes()
    parts = [ModelPart(config=config, layers=layers, tensor=2) for layers in (range(1), range(1, 3))]
    restored = load_parts(SavedModel(tmp_path / "saved"), jnp.dtype(jnp.float32), parts, meshes)
    placed = place_model(Decoder(config, weights), parts, meshes)
    for ours, theirs in zip(restored, placed, strict=True):
        assert {n: np.asarray(w[...]).tobytes() for n, w in ours.decoder.weights.items()} == {
            n: np.asarray(w[...]).tobytes() for n, w in theirs.decoder.weights.items()
        }
    assert jax.device_count() >= 4
