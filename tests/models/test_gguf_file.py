"""GGUF files give the weights that went in, in Hugging Face's order, and corrupt ones are refused in words."""

import math
import resource
import struct
import time

import gguf
import ml_dtypes
import numpy as np
import pytest

from sarathi_jax.config import RopeScaling
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.gguf_config import llama3_scaling
from sarathi_jax.models.gguf_file import GGUFCheckpoint

from .gguf_files import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, T, hf_weights, permute, write


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_back_under_its_hf_name_in_hf_order(tmp_path, arch):
    weights = hf_weights(bias=arch != "qwen3", qk_norm=arch == "qwen3")
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights, arch=arch))
    assert checkpoint.names == set(weights)
    for name, value in weights.items():
        assert checkpoint.shape(name) == value.shape
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, value, err_msg=name)


def test_the_oracle_permutation_is_not_the_identity_and_depends_on_the_heads():
    w = np.arange(HEADS * HEAD_DIM)
    assert (permute(w, HEADS) != w).any()
    assert (permute(w, HEADS) != permute(w, KV_HEADS)).any()


@pytest.mark.parametrize("dtype", [T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1])
def test_stored_types_keep_their_dtype_and_quantised_ones_become_float32(tmp_path, dtype):
    weights = hf_weights()
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", weights, dtype=dtype))
    for name, value in weights.items():
        got = checkpoint.read(name)
        assert got.shape == value.shape
        if value.ndim == 1:
            np.testing.assert_array_equal(got, value)
        elif dtype in (T.F16, T.BF16):
            stored = np.float16 if dtype is T.F16 else ml_dtypes.bfloat16
            assert got.dtype == stored
            np.testing.assert_array_equal(got, value.astype(stored))
        else:
            assert got.dtype == np.float32
            expected = gguf.quants.dequantize(gguf.quants.quantize(value, dtype), dtype)
            np.testing.assert_array_equal(got, expected, err_msg=name)
            assert np.abs(got - value).max() < (0.03 if dtype is T.Q8_0 else 0.6)


def is_readable(dtype):
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[dtype][1]), np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("dtype", [dtype for dtype in T if is_readable(dtype)], ids=lambda dtype: dtype.name)
def test_every_type_that_can_be_dequantised_is_read(tmp_path, dtype):
    """Random bytes, in a weight whose rows the file has in another order."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[dtype]
    name, rows = "model.layers.1.self_attn.q_proj.weight", HEADS * HEAD_DIM
    raw = np.random.default_rng(3).integers(0, 256, (rows, 512 // block * num_bytes), np.uint8)
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", hf_weights(), raw={name: (raw, dtype)}))
    with np.errstate(all="ignore"):
        got = checkpoint.read(name).astype(np.float32)
        np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, dtype))
    assert checkpoint.shape(name) == (rows, 512)


def test_config_of_a_llama_file(tmp_path):
    config = GGUFCheckpoint(write(tmp_path / "m.gguf", hf_weights())).config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, HIDDEN, FFN)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.max_position, config.norm_eps, config.rope_theta) == (512, 1e-5, 10000.0)
    assert config.rope_scaling == RopeScaling()
    assert not any((config.tie_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert config.sliding_window is None


def test_flags_follow_the_architecture_and_the_tensors(tmp_path):
    tied = GGUFCheckpoint(write(tmp_path / "a.gguf", hf_weights(head=False)))
    assert tied.config.tie_embeddings
    assert "lm_head.weight" not in tied.names
    qwen2 = GGUFCheckpoint(write(tmp_path / "b.gguf", hf_weights(bias=True), arch="qwen2")).config
    assert (qwen2.architecture, qwen2.qkv_bias, qwen2.o_bias) == ("Qwen2ForCausalLM", True, False)
    wide = hf_weights(qk_norm=True, head_dim=32)
    qwen3 = GGUFCheckpoint(write(tmp_path / "c.gguf", wide, arch="qwen3", head_dim=32)).config
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_dim) == (True, False, 32)
    assert GGUFCheckpoint(write(tmp_path / "d.gguf", hf_weights(bias=True))).config.qkv_bias


def test_qwen2_has_its_biases_even_where_the_file_lacks_them(tmp_path):
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", hf_weights(), arch="qwen2"))
    assert checkpoint.config.qkv_bias  # so that the loader misses them
    assert "model.layers.0.self_attn.q_proj.bias" not in checkpoint.names


@pytest.mark.parametrize("layer", [0, 1])
def test_a_block_that_is_not_there_is_noticed(tmp_path, layer):
    weights = {name: w for name, w in hf_weights().items() if f".{layer}." not in name}
    with pytest.raises(ValueError, match="block_count'=2 but tensors of 1 blocks"):
        GGUFCheckpoint(write(tmp_path / "m.gguf", weights))


def test_metadata_is_plain_python(tmp_path):
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", hf_weights(), keys=[("add_bool", "llama.x", True)]))
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == [f"t{i}é" for i in range(VOCAB)]
    assert checkpoint.metadata["tokenizer.ggml.scores"] == [0.5] * VOCAB
    assert checkpoint.metadata["llama.x"] is True
    assert checkpoint.metadata["llama.block_count"] == 2
    assert checkpoint.eos_token_ids == (2, 3)


def test_unknown_tensors_stay_visible_under_their_own_name(tmp_path):
    path = write(tmp_path / "m.gguf", hf_weights(), extra=[("blk.0.attn_sinks.weight", np.ones(4, np.float32))])
    assert "blk.0.attn_sinks.weight" in GGUFCheckpoint(path).names


def test_a_key_length_that_is_absent_is_hidden_over_heads(tmp_path):
    path = write(tmp_path / "m.gguf", hf_weights(), leave_out=["attention.key_length", "rope.dimension_count"])
    assert GGUFCheckpoint(path).config.head_dim == HEAD_DIM


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("add_uint32", "llama.expert_shared_count", 1), "llama.expert_shared_count"),
        (("add_float32", "llama.attention.clamp_kqv", 8.0), "clamp_kqv"),
        (("add_uint32", "split.count", 3), "3 parts"),
        (("add_string", "llama.rope.scaling.type", "longrope"), "'longrope'"),
        (("add_uint32", "llama.attention.value_length", 8), "value_length"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, key, message):
    path = write(tmp_path / "m.gguf", hf_weights(), keys=[key])
    with pytest.raises(ValueError, match=message) as caught:
        GGUFCheckpoint(path)
    assert str(path) in str(caught.value)


def test_partial_rotary_and_other_architectures_are_refused(tmp_path):
    keys = [("add_uint32", "llama.rope.dimension_count", HEAD_DIM // 2)]
    path = write(tmp_path / "m.gguf", hf_weights(), keys=keys, leave_out=["rope.dimension_count"])
    with pytest.raises(ValueError, match=r"rope\.dimension_count'=8; only the head size, 16"):
        GGUFCheckpoint(path)
    path = write(tmp_path / "g.gguf", hf_weights(), arch="gemma2")
    with pytest.raises(ValueError, match=r"'gemma2', not supported; known: llama, qwen2, qwen3"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([("add_float32", "llama.rope.scaling.factor", 4.0)], RopeScaling(kind="linear", factor=4.0)),
        ([("add_float32", "llama.rope.scale_linear", 2.0)], RopeScaling(kind="linear", factor=2.0)),
        (
            [
                ("add_string", "llama.rope.scaling.type", "yarn"),
                ("add_float32", "llama.rope.scaling.factor", 4.0),
                ("add_uint32", "llama.rope.scaling.original_context_length", 128),
            ],
            RopeScaling(kind="yarn", factor=4.0, original_max_position=128),
        ),
        ([("add_string", "llama.rope.scaling.type", "none")], RopeScaling()),
    ],
)
def test_rope_scaling_keys(tmp_path, keys, expected):
    assert GGUFCheckpoint(write(tmp_path / "m.gguf", hf_weights(), keys=keys)).config.rope_scaling == expected


def llama3_divisors(*, theta, head_dim, factor, low, high, original):
    """What llama.cpp's converter stores in rope_freqs.weight, written out from its source."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(
    "kind",
    [
        {"theta": 500000.0, "head_dim": 64, "factor": 32.0, "low": 1.0, "high": 4.0, "original": 8192},
        {"theta": 500000.0, "head_dim": 128, "factor": 8.0, "low": 1.0, "high": 4.0, "original": 8192},
        {"theta": 500000.0, "head_dim": 128, "factor": 6.5, "low": 2.0, "high": 6.0, "original": 4096},
    ],
)
def test_llama3_divisors_become_a_scaling_with_the_same_divisors(kind):
    divisors = llama3_divisors(**kind)
    scaling = llama3_scaling(divisors, kind["theta"], kind["head_dim"])
    assert (scaling.kind, scaling.factor) == ("llama3", kind["factor"])
    assert scaling.original_max_position is not None
    again = llama3_divisors(
        theta=kind["theta"],
        head_dim=kind["head_dim"],
        factor=scaling.factor,
        low=scaling.low_freq_factor,
        high=scaling.high_freq_factor,
        original=scaling.original_max_position,
    )
    np.testing.assert_allclose(again, divisors, rtol=1e-5)


@pytest.mark.parametrize(
    "divisors", [[1, 2, 1, 2], [1, 1, np.nan, 8], [1, 1, 1, np.inf], [0, 0, 0, 0], [1, 2, 3, 4], [1, 1]]
)
def test_other_divisors_are_refused(divisors):
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        llama3_scaling(np.array(divisors, np.float32), 10000.0, 8)


def test_rope_freqs_in_a_file_become_the_scaling_and_no_weight(tmp_path):
    divisors = llama3_divisors(theta=10000.0, head_dim=HEAD_DIM, factor=8.0, low=1.0, high=4.0, original=8192)
    assert len(set(divisors.tolist())) > 2
    checkpoint = GGUFCheckpoint(write(tmp_path / "a.gguf", hf_weights(), extra=[("rope_freqs.weight", divisors)]))
    expected = RopeScaling(kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1, high_freq_factor=4)
    assert checkpoint.config.rope_scaling == expected
    assert "rope_freqs.weight" not in checkpoint.names
    yarn = [("add_string", "llama.rope.scaling.type", "yarn"), ("add_float32", "llama.rope.scaling.factor", 4.0)]
    path = write(tmp_path / "b.gguf", hf_weights(), extra=[("rope_freqs.weight", divisors)], keys=yarn)
    with pytest.raises(ValueError, match="'yarn'; one of them"):
        GGUFCheckpoint(path)


def read_all(path):
    checkpoint = GGUFCheckpoint(path)
    for name in checkpoint.names:
        checkpoint.read(name)


def test_truncation_at_any_point_is_a_value_error(tmp_path):
    good = write(tmp_path / "good.gguf", hf_weights(), dtype=T.Q8_0).read_bytes()
    bad = tmp_path / "bad.gguf"
    header = good.index(b"output_norm.weight")
    rng = np.random.default_rng(1)
    for at in {
        0,
        3,
        4,
        8,
        23,
        24,
        *rng.integers(0, header, 30).tolist(),
        *rng.integers(0, len(good) - 32, 30).tolist(),
    }:
        bad.write_bytes(good[:at])
        with pytest.raises(ValueError, match=r"bad\.gguf"):
            read_all(bad)


def test_flipped_header_bytes_give_a_value_error_or_a_readable_file_quickly(tmp_path):
    good = write(tmp_path / "good.gguf", hf_weights(), dtype=T.Q4_0).read_bytes()
    bad = tmp_path / "bad.gguf"
    header = gguf.GGUFReader(tmp_path / "good.gguf").data_offset
    rng = np.random.default_rng(2)
    messages, start, before = [], time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            data[at] ^= int(rng.integers(1, 256))
        bad.write_bytes(data)
        try:
            read_all(bad)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("bad.gguf" in message and len(message) < 1000 for message in messages)
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("value", [0xFF, 0x7F, 0x80])
def test_huge_counts_are_refused_before_anything_is_allocated(tmp_path, value):
    good = write(tmp_path / "good.gguf", hf_weights()).read_bytes()
    bad = tmp_path / "bad.gguf"
    key = good.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for at in (8, 16, 24, key):  # tensors, keys, a key's length, an array's length
        for size in (1, 4, 8):
            data = bytearray(good)
            data[at + 8 - size : at + 8] = bytes([value]) * size
            bad.write_bytes(data)
            with pytest.raises(ValueError, match="truncated or corrupt"):
                GGUFCheckpoint(bad)


def test_lies_about_tensors_are_found(tmp_path):
    good = write(tmp_path / "good.gguf", hf_weights()).read_bytes()
    bad = tmp_path / "bad.gguf"
    info = good.index(b"output_norm.weight") + len("output_norm.weight")  # rank, dim, type, offset

    def refused(at, packed, message):
        bad.write_bytes(good[:at] + packed + good[at + len(packed) :])
        with pytest.raises(ValueError, match=message):
            GGUFCheckpoint(bad)

    refused(info, struct.pack("<I", 5), "5 dimensions")
    refused(info, struct.pack("<I", 0), "0 dimensions")
    refused(info + 4, struct.pack("<Q", 0), "corrupt")
    refused(info + 4, struct.pack("<Q", 1 << 60), "truncated or corrupt|overlaps")
    refused(info + 12, struct.pack("<I", 999), "unknown type 999")
    refused(info + 16, struct.pack("<Q", 1 << 63), "truncated or corrupt")
    refused(info + 16, struct.pack("<Q", 1), "not aligned")
    refused(info + 16, struct.pack("<Q", 0), "overlaps")
    blocks = good.index(b"llama.block_count") + len("llama.block_count") + 4
    refused(blocks, struct.pack("<I", 1 << 31), "block_count")
    refused(4, struct.pack("<I", 1), "version 1")
    refused(4, struct.pack(">I", 3), "big-endian")
    refused(0, b"GGML", "not a GGUF file")


def test_a_missing_tensor_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tensor 'x'"):
        GGUFCheckpoint(write(tmp_path / "m.gguf", hf_weights())).read("x")


def test_open_checkpoint_says_what_it_knows(tmp_path):
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        open_checkpoint("nowhere.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no \.gguf"):
        open_checkpoint(tmp_path / "model.bin")
