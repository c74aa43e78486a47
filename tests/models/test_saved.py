"""Saved models: the very weights come back, on any mesh; what is damaged does not load."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.convert import convert, save_model
from sarathi_jax.models.saved import MODEL_FILE, SavedModel, gguf_tokenizer_files, write_description
from sarathi_jax.models.weights import load_weights

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
FLOAT32 = jnp.dtype(jnp.float32)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and np.array_equal(np.asarray(a[k]), np.asarray(b[k])) for k in a
    )


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "opt", "phi3"])
def test_config_and_weights_come_back_bit_by_bit(tmp_path, name):
    source = open_checkpoint(GOLDEN / name)
    convert(GOLDEN / name, tmp_path / "saved", dtype="float32")
    saved = open_checkpoint(tmp_path / "saved")
    assert isinstance(saved, SavedModel)
    assert (saved.config, saved.eos_token_ids) == (source.config, source.eos_token_ids)
    assert same(load_weights(saved, FLOAT32), load_weights(source, FLOAT32))


def test_weights_are_cast_when_they_are_stored_and_when_they_are_read(saved):
    bfloat16 = jnp.dtype(jnp.bfloat16)
    rounded = load_weights(open_checkpoint(GOLDEN / "qwen3"), bfloat16)
    assert same(load_weights(open_checkpoint(saved), bfloat16), rounded)
    wide = load_weights(open_checkpoint(saved), FLOAT32)
    assert same(wide, {name: array.astype(FLOAT32) for name, array in rounded.items()})


def over(num_devices: int):
    """A placement over the first devices: MLP and vocabulary cut, the rest on all of them."""
    mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("model",))
    cut = lambda axis: "model" if axis in ("mlp", "vocab") else None
    return lambda spec: NamedSharding(mesh, PartitionSpec(*map(cut, spec.axes)))


def test_from_one_device_to_four_to_two(tmp_path):
    """Straight onto a mesh that differs from the one that saved, each device its own part."""
    convert(GOLDEN / "gemma2", tmp_path / "one", dtype="float32")
    one = open_checkpoint(tmp_path / "one")
    four = load_weights(one, FLOAT32, place=over(4))
    gate_up = four["layers0.gate_up"]
    assert len(gate_up.sharding.device_set) == 4
    assert {shard.data.shape for shard in gate_up.addressable_shards} == {(*gate_up.shape[:-1], gate_up.shape[-1] // 4)}
    save_model(tmp_path / "four", one.config, four)
    two = load_weights(open_checkpoint(tmp_path / "four"), FLOAT32, place=over(2))
    assert all(len(array.sharding.device_set) == 2 for array in two.values())
    assert same(two, load_weights(open_checkpoint(GOLDEN / "gemma2"), FLOAT32))


def test_tensors_of_a_folder_and_random_ones_go_where_they_are_wanted():
    drawn = open_checkpoint("random:smollm2-135m")
    drawn.config = replace(drawn.config, num_layers=1, vocab_size=512)
    for checkpoint in (open_checkpoint(GOLDEN / "gemma2"), drawn):
        weights = load_weights(checkpoint, jnp.dtype(jnp.bfloat16), place=over(2))
        assert all(len(array.sharding.device_set) == 2 for array in weights.values())
        assert weights["embed"].addressable_shards[0].data.shape[0] == weights["embed"].shape[0] // 2


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>", "<eot>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.eot_token_id": 4,
    "tokenizer.chat_template": "{{ messages[0].content }}é",
    "general.name": "not of the tokenizer",
}


def test_a_tokenizer_out_of_a_gguf_file_comes_back(tmp_path):
    config = open_checkpoint(GOLDEN / "qwen3").config
    files = gguf_tokenizer_files(TOKENIZER)
    assert b"general.name" not in b"".join(files.values())
    write_description(tmp_path, config, eos_token_ids=(3, 4), tokenizer_files=files, quantization=None)
    saved = SavedModel(tmp_path)
    tokenizer = saved.tokenizer()
    assert tokenizer.encode("abba") == [2, 1, 0]
    assert (tokenizer.eos_token_ids, saved.eos_token_ids) == ((3, 4), (3, 4))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "xé"
    assert saved.tokenizer_files() == files, "and may be saved again"


def test_the_tokenizer_files_of_a_folder_are_kept(saved):
    kept = (saved / "tokenizer" / "config.json").read_bytes()
    assert kept == (GOLDEN / "qwen3" / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        open_checkpoint(saved).tokenizer()


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("sarathi_jax.models.convert.write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(GOLDEN / "qwen3", tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        convert(GOLDEN / "qwen3", tmp_path)
    with pytest.raises(ValueError, match="dtype='int8'"):
        convert(GOLDEN / "qwen3", tmp_path / "saved", dtype="int8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    target = tmp_path_factory.mktemp("models") / "saved"
    convert(GOLDEN / "qwen3", target)
    return target


@pytest.fixture
def spoiled(tmp_path, saved):
    """A saved model, after `change` of its description."""

    def spoil(change) -> Path:
        target = tmp_path / "saved"
        shutil.copytree(saved, target)
        file = target / MODEL_FILE
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return target

    return spoil


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format=2), "format 1"),
        (lambda c: c.pop("config"), "ModelConfig"),
        (lambda c: c["config"].update(num_layers="2"), "'2' must be int"),
        (lambda c: c["config"].update(num_layers=0), "num_layers=0"),
        (lambda c: c["config"].update(mystery=1), "fields of ModelConfig"),
        (lambda c: c["config"].pop("num_layers"), "num_layers"),
        (lambda c: c["config"].update(rope_scaling={"kind": "su"}), "'su' is not supported"),
        (lambda c: c["config"].update(window_pattern=3), "must be a list"),
        (lambda c: c.update(eos_token_ids=["x"]), "'x' must be int"),
    ],
)
def test_a_description_that_is_not_one_is_refused(spoiled, change, words):
    with pytest.raises(ValueError, match=f"{MODEL_FILE}: .*{words}"):
        open_checkpoint(spoiled(change))


@pytest.mark.parametrize("change", [{"num_layers": 3}, {"head_dim": 16}, {"tie_embeddings": False}])
def test_weights_that_do_not_fit_the_config_are_refused(spoiled, change):
    saved = open_checkpoint(spoiled(lambda content: content["config"].update(change)))
    with pytest.raises(ValueError, match="does not fit its config"):
        load_weights(saved, FLOAT32)


def test_damaged_weights_are_refused(spoiled):
    target = spoiled(lambda content: None)
    saved = open_checkpoint(target)
    files = sorted((target / "weights").rglob("*"), key=lambda f: f.is_file() and f.stat().st_size)
    files[-1].write_bytes(files[-1].read_bytes()[:100])
    with pytest.raises(ValueError, match="weights: cannot be restored"):
        load_weights(saved, FLOAT32)
    for file in (target / "weights").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(ValueError, match="weights: cannot be restored"):
        load_weights(saved, FLOAT32)
