"""Weights in int8: what a matmul gives is that of the rounded weights, and the default model hardly changes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sarathi_jax.models.blocks import LayerWeights, product
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.convert import convert
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.hub import fetch_default_model
from sarathi_jax.models.weight_specs import weight_specs
from sarathi_jax.models.weights import load_weights

GOLDEN = Path(__file__).parent.parent / "golden"
FLOAT32 = jnp.dtype(jnp.float32)


def dequantised(weights: dict, config) -> dict:
    """In NumPy, from what is stored."""
    specs, out = weight_specs(config), {}
    for name, array in weights.items():
        if not name.endswith("_scale"):
            out[name] = np.asarray(array, np.float32)
            if f"{name}_scale" in weights:
                out[name] *= np.expand_dims(np.asarray(weights[f"{name}_scale"]), specs[name].inner_axes)
    return {name: jnp.asarray(array) for name, array in out.items()}


@pytest.mark.parametrize("name", ["qwen3", "falcon_40b"])
def test_a_matmul_is_off_by_what_rounding_can_do(name):
    """By half a step, max |w_c| / 254, for each weight of channel c: |x|_1 of them at most, and in the mean, as they
    are independent, |x|_2 steps over the root of 12. Sums in float32 add what they do without rounding."""
    checkpoint = open_checkpoint(GOLDEN / "tiny" / name)
    exact, rounded = load_weights(checkpoint, FLOAT32), load_weights(checkpoint, FLOAT32, quantization="int8")
    rng = np.random.default_rng(0)
    for n, spec in weight_specs(checkpoint.config).items():
        if not spec.num_inner:
            continue
        slot, short = n.split(".")
        stacks = {key.removeprefix(f"{slot}."): w for key, w in rounded.items() if key.startswith(slot)}
        x = rng.normal(size=(16, *spec.shape[1 : 1 + spec.num_inner])).astype(np.float32)
        multiply = jax.jit(lambda x, stacks, short=short: product(x, LayerWeights(stacks, jnp.int32(1)), short))
        x, got = x.reshape(16, -1).astype(np.float64), np.asarray(multiply(x, stacks)).reshape(16, -1)
        w = np.asarray(exact[n][1], np.float64).reshape(x.shape[1], -1)
        size, largest = np.abs(x).sum(1, keepdims=True), np.abs(w).max(0)
        error, float32 = np.abs(got - x @ w), 2.0**-24 * (len(w) + 8) * (np.abs(x) @ np.abs(w))
        assert (error <= size * largest / 254 + float32).all(), n
        mean = np.linalg.norm(x, axis=1, keepdims=True) * largest / 127 / 12**0.5
        assert np.linalg.norm(error) <= 1.25 * np.linalg.norm(mean), n


@pytest.mark.parametrize("name", ["mixtral", "falcon_40b"])
def test_the_decoder_runs_on_the_rounded_weights(teacher_forcing, forced, name):
    """Every matmul, those of experts and with biases among them, against the same model in float32."""
    checkpoint = open_checkpoint(GOLDEN / "tiny" / name)
    exact = load_weights(checkpoint, FLOAT32)
    rounded = load_weights(checkpoint, FLOAT32, quantization="int8")
    assert {n for n, w in rounded.items() if w.dtype == jnp.int8} == {
        n for n, spec in weight_specs(checkpoint.config).items() if spec.num_inner
    }
    back = dequantised(rounded, checkpoint.config)
    for n, spec in weight_specs(checkpoint.config).items():
        if spec.num_inner:
            step = np.abs(np.asarray(exact[n])).max(spec.inner_axes, keepdims=True) / 127
            assert (np.abs(np.asarray(back[n]) - np.asarray(exact[n])) <= 0.501 * step).all(), n
    ids = np.load(GOLDEN / "tiny" / name / "golden.npz")["prompt_ids"][:40].tolist()
    logits = [
        teacher_forcing(Decoder(checkpoint.config, w), row_counts=(48,), max_len=48, optimise=False).logits(
            [forced(token_ids=ids, prompt_len=40, chunk=40)]
        )[0]
        for w in (rounded, back)
    ]
    error = np.linalg.norm(logits[0] - logits[1], axis=-1) / np.linalg.norm(logits[1], axis=-1)
    assert error.max() < 1e-4, "the same numbers, summed in another order"


def test_the_default_model_hardly_changes(teacher_forcing, forced):
    """SmolLM2 in int8 against transformers in float32, over all stored positions of two prompts. Rounding adds noise to
    every matmul, independent of the others: steps over the root of 12, against the weights themselves. Layers that do
    not enlarge what they are handed leave the root of its squares' sum in the logits."""
    file = np.load(GOLDEN / "smollm2.npz")
    checkpoint = open_checkpoint(fetch_default_model())
    weights, specs = load_weights(checkpoint, FLOAT32, quantization="int8"), weight_specs(checkpoint.config)
    noise = 0.0
    for n, spec in specs.items():
        if spec.num_inner and spec.layers:
            scale = jnp.expand_dims(weights[f"{n}_scale"], spec.inner_axes)
            size = jax.jit(lambda w, scale: jnp.mean(jnp.square(w.astype(FLOAT32) * scale)))(weights[n], scale)
            noise += len(spec.layers) * float(jnp.mean(jnp.square(scale)) / size) / 12
    model = Decoder(checkpoint.config, weights)
    driver = teacher_forcing(model, row_counts=(224,), max_len=160, page_size=16, optimise=False)
    names = ["paragraph", "code"]
    texts = [[*file[f"{n}/prompt_ids"], *file[f"{n}/continuation"]] for n in names]
    runs = [forced(token_ids=ids, prompt_len=len(ids), chunk=len(ids)) for ids in texts]
    errors, agree = [], []
    for n, ours in zip(names, driver.logits(runs, [file[f"{n}/positions"] for n in names]), strict=True):
        golden = file[f"{n}/logits"]
        errors.append(np.linalg.norm(ours[:, file["vocab_ids"]] - golden, axis=-1) / np.linalg.norm(golden, axis=-1))
        agree.append(ours.argmax(-1) == file[f"{n}/top_ids"][:, 0])
    error, same = float(np.concatenate(errors).mean()), float(np.concatenate(agree).mean())
    assert error < noise**0.5, f"mean relative error of the logits {error:.3f}, of {noise**0.5:.3f} expected at most"
    assert same > 0.95, f"the likeliest token is the same at {same:.1%} of the positions"


def test_a_model_saved_in_int8_stays_so(tmp_path):
    convert(GOLDEN / "tiny" / "mixtral", tmp_path / "saved", dtype="float32", quantization="int8")
    source = open_checkpoint(GOLDEN / "tiny" / "mixtral")
    wanted = load_weights(source, FLOAT32, quantization="int8")
    for quantization in (None, "int8"):
        weights = load_weights(open_checkpoint(tmp_path / "saved"), FLOAT32, quantization=quantization)
        assert weights.keys() == wanted.keys()
        assert all(np.array_equal(np.asarray(weights[n]), np.asarray(wanted[n])) for n in wanted)
    convert(GOLDEN / "tiny" / "mixtral", tmp_path / "wide", dtype="float32")
    late = load_weights(open_checkpoint(tmp_path / "wide"), FLOAT32, quantization="int8")
    assert all(np.array_equal(np.asarray(late[n]), np.asarray(wanted[n])) for n in wanted)


def test_another_quantization_is_refused():
    with pytest.raises(Exception, match="int4"):  # here the checked types see it first
        load_weights(open_checkpoint(GOLDEN / "tiny" / "qwen3"), FLOAT32, quantization="int4")
