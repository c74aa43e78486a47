"""Weights in int8: what a matmul gives is that of the rounded weights, and the default model hardly changes."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("name", ["qwen3_moe", "falcon_40b"])
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
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)


def test_the_default_model_hardly_changes(teacher_forcing, forced):
    """SmolLM2 in int8 against transformers in float32, over all stored positions of four prompts."""
    file = np.load(GOLDEN / "smollm2.npz")
    checkpoint = open_checkpoint(fetch_default_model())
    model = Decoder(checkpoint.config, load_weights(checkpoint, FLOAT32, quantization="int8"))
    driver = teacher_forcing(model, row_counts=(512,), max_len=256, page_size=16)
    names = ["paragraph", "code", "unicode", "record"]
    texts = [[*file[f"{n}/prompt_ids"], *file[f"{n}/continuation"]] for n in names]
    runs = [forced(token_ids=ids, prompt_len=len(ids), chunk=128) for ids in texts]
    errors, agree = [], []
    for n, logits in zip(names, driver.logits(runs), strict=True):
        ours, golden = logits[file[f"{n}/positions"]], file[f"{n}/logits"]
        errors.append(np.linalg.norm(ours[:, file["vocab_ids"]] - golden, axis=-1) / np.linalg.norm(golden, axis=-1))
        agree.append(ours.argmax(-1) == file[f"{n}/top_ids"][:, 0])
    error, same = float(np.concatenate(errors).mean()), float(np.concatenate(agree).mean())
    assert error < 0.05, f"mean relative error of the logits {error:.3f}"
    assert same > 0.95, f"the likeliest token is the same at {same:.1%} of the positions"


def test_a_model_saved_in_int8_stays_so(tmp_path):
    convert(GOLDEN / "tiny" / "qwen3_moe", tmp_path / "saved", dtype="float32", quantization="int8")
    source = open_checkpoint(GOLDEN / "tiny" / "qwen3_moe")
    wanted = load_weights(source, FLOAT32, quantization="int8")
    for quantization in (None, "int8"):
        weights = load_weights(open_checkpoint(tmp_path / "saved"), FLOAT32, quantization=quantization)
        assert weights.keys() == wanted.keys()
        assert all(np.array_equal(np.asarray(weights[n]), np.asarray(wanted[n])) for n in wanted)
    convert(GOLDEN / "tiny" / "qwen3_moe", tmp_path / "wide", dtype="float32")
    late = load_weights(open_checkpoint(tmp_path / "wide"), FLOAT32, quantization="int8")
    assert all(np.array_equal(np.asarray(late[n]), np.asarray(wanted[n])) for n in wanted)


def test_another_quantization_is_refused():
    with pytest.raises(Exception, match="int4"):  # here the checked types see it first
        load_weights(open_checkpoint(GOLDEN / "tiny" / "qwen3"), FLOAT32, quantization="int4")
