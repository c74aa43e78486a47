"""Folders of safetensors load what config and index say and nothing else; damage is found before anything is loaded."""

import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.hf_folder import HFCheckpoint
from sarathi_jax.models.weights import init_weights, load_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def weights(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (10, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (10, 8),
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def folder(tmp_path, tensors=None, **config):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def sharded(tmp_path, **config):
    """Three shards under an index; the tensors."""
    folder(tmp_path, **config)
    tensors, weight_map = weights(), {}
    for i, name in enumerate(tensors):
        shard = f"model-{i % 3 + 1:05d}-of-00003.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n, s in weight_map.items() if s == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def check(checkpoint, tensors):
    assert checkpoint.names == set(tensors)
    for name, value in tensors.items():
        got = checkpoint.read(name)
        assert got.dtype == value.dtype
        assert checkpoint.shape(name) == value.shape
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_in_their_stored_dtype(tmp_path, dtype):
    tensors = weights(dtype)
    checkpoint = open_checkpoint(folder(tmp_path, tensors))
    check(checkpoint, tensors)
    assert checkpoint.read("model.norm.weight").base is not None  # a view of the map, not a copy
    assert checkpoint.config.num_layers == 1


def test_shards_under_an_index(tmp_path):
    tensors = sharded(tmp_path)
    check(HFCheckpoint(tmp_path), tensors)


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path):
    tensors = sharded(tmp_path)
    save_file(weights(seed=9), tmp_path / "model.safetensors")
    save_file(weights(seed=9), tmp_path / "consolidated.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"junk")
    check(HFCheckpoint(tmp_path), tensors)


def test_only_model_safetensors_is_read_without_an_index(tmp_path):
    tensors = weights()
    folder(tmp_path, tensors)
    save_file(weights(seed=9), tmp_path / "adapter.safetensors")
    check(HFCheckpoint(tmp_path), tensors)


def test_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors is named .* but missing"):
        HFCheckpoint(tmp_path)


def test_a_truncated_shard_is_named(tmp_path):
    sharded(tmp_path)
    shard = tmp_path / "model-00003-of-00003.safetensors"
    data = shard.read_bytes()
    for size in (0, 4, 20, len(data) - 1):
        shard.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors.*corrupt"):
            HFCheckpoint(tmp_path)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"x.weight": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"no tensor 'x\.weight'"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../m.safetensors", "/tmp/m.safetensors", "a\\m.safetensors", "m.bin", 3, None])
def test_shard_names_stay_in_the_folder(tmp_path, shard):
    folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match="file in the same folder"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', '{"a": 1, "a": 2}'])
def test_a_broken_index_is_refused(tmp_path, text):
    folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        HFCheckpoint(tmp_path)


def test_tied_embeddings_win_over_a_stored_head(tmp_path):
    tensors = weights()
    checkpoint = HFCheckpoint(folder(tmp_path, tensors, tie_word_embeddings=True))
    assert checkpoint.config.tie_embeddings
    del tensors["lm_head.weight"]
    check(checkpoint, tensors)


def test_stored_rotary_frequencies_are_no_weights(tmp_path):
    tensors = weights()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    check(HFCheckpoint(folder(tmp_path, tensors | buffer)), tensors)


def test_pickles_are_never_opened(tmp_path):
    folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04evil")
    with pytest.raises(ValueError, match="convert them to safetensors"):
        HFCheckpoint(tmp_path)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        HFCheckpoint(tmp_path)
    folder(tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        HFCheckpoint(tmp_path)
    save_file(weights(), tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"only model-00001-of-00002\.safetensors"):
        HFCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="no tensor 'x'"):
        HFCheckpoint(folder(tmp_path, weights())).read("x")


def test_a_folder_of_another_kind_is_told_which_kinds_there_are(tmp_path):
    (tmp_path / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a folder without config\.json; known formats: .*safetensors.*\.gguf"):
        open_checkpoint(tmp_path)


def test_more_layers_or_experts_than_tensors_are_refused_before_they_are_counted_out(tmp_path):
    checkpoint = open_checkpoint(folder(tmp_path, weights(), num_hidden_layers=1000))
    with pytest.raises(ValueError, match="the config has 1000 layers and the checkpoint 4 tensors"):
        load_weights(checkpoint, jnp.dtype(np.float32))
    many = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 1 << 30}
    checkpoint = open_checkpoint(folder(tmp_path, weights(), num_hidden_layers=2, **many))
    with pytest.raises(ValueError, match="the config has 2 layers with 2147483648 experts and"):
        load_weights(checkpoint, jnp.dtype(np.float32))
    with pytest.raises(ValueError, match="num_hidden_layers=100000000 must be from 1 to 1000"):
        open_checkpoint(folder(tmp_path, weights(), num_hidden_layers=10**8))


@pytest.mark.parametrize("dtype", ["float32", np.float32, jnp.float32, jnp.dtype(jnp.float32)])
def test_weights_are_made_in_a_dtype_of_any_spelling(tmp_path, dtype):
    config = open_checkpoint(folder(tmp_path, weights())).config
    made = init_weights(config, dtype)
    assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}
    with pytest.raises(ValueError, match="tensors missing"):
        load_weights(open_checkpoint(tmp_path), dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.int64])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    tensors = weights() | {"model.norm.weight": np.ones(8, dtype)}
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has dtype [IF]\d+; supported: F32, F16, BF16"):
        HFCheckpoint(folder(tmp_path, tensors))


def rewrite(tmp_path, change):
    """model.safetensors with its header changed by `change(header)`, which may also return raw bytes."""
    good = save(weights())
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    raw = change(header)
    raw = json.dumps(header).encode() if raw is None else raw
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + good[8 + length :])


def set_(name, **fields):
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        set_("model.norm.weight", shape=[9]),
        set_("model.norm.weight", shape=[-8]),
        set_("model.norm.weight", shape=[1 << 61, 8]),
        set_("model.norm.weight", shape=[True]),
        set_("model.norm.weight", shape="8"),
        set_("model.norm.weight", dtype=3),
        set_("model.norm.weight", dtype="F16"),
        set_("model.norm.weight", data_offsets=[0, 32]),
        set_("model.norm.weight", data_offsets=[32, 0]),
        set_("model.norm.weight", data_offsets=[1 << 50, (1 << 50) + 32]),
        set_("model.norm.weight", data_offsets=[0]),
        lambda header: header.pop("model.norm.weight") and None,
        lambda header: header.update(x=None),
        lambda header: header.update(x={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
        lambda header: b"[1, 2]",
        lambda header: b"\xff\xfe",
        lambda header: b"[" * 100_000,
        lambda header: b'{"a": 1, "a": 2}',
    ],
)
def test_headers_that_lie_are_refused(tmp_path, change):
    folder(tmp_path)
    rewrite(tmp_path, lambda header: None)
    check(HFCheckpoint(tmp_path), weights())
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_length_that_lies_is_refused(tmp_path, length):
    folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + save(weights())[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*corrupt"):
        HFCheckpoint(tmp_path)


def test_flipped_header_bytes_give_a_value_error_or_a_readable_folder(tmp_path):
    folder(tmp_path)
    good = save(weights())
    rng, refused = np.random.default_rng(3), 0
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, 8 + int.from_bytes(good[:8], "little"), rng.integers(1, 3)):
            data[at] ^= int(rng.integers(1, 256))
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            checkpoint = HFCheckpoint(tmp_path)
        except ValueError:
            refused += 1
            continue
        for name in checkpoint.names:
            checkpoint.read(name)
    assert refused > 50


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        ({"eos_token_id": [5, 6]}, 2, (5, 6)),
        ({"eos_token_id": 7}, 2, (7,)),
        ({}, [2, 3, 2], (2, 3)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_generation_config_first(tmp_path, generation, config, expected):
    folder(tmp_path, weights(), eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert HFCheckpoint(tmp_path).eos_token_ids == expected


def test_a_bad_config_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: .*gemma"):
        HFCheckpoint(folder(tmp_path, weights(), model_type="gemma"))
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id"):
        HFCheckpoint(folder(tmp_path, weights(), eos_token_id="</s>"))
