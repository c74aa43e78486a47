"""Mixtures of experts out of GGUF files are those of the folders that transformers wrote, which have golden logits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.weights import load_weights

from .gguf_files import permute

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
ARCHITECTURES = {"mixtral": gguf.MODEL_ARCH.LLAMA, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE}
RAW = gguf.GGMLQuantizationType.Q6_K
"""What bytes are written as."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def stored(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """The config.json of a folder, and its tensors under Hugging Face's names."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return config, {key: value.astype(np.float32) for key, value in tensors.items()}


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of each layer as one tensor, under the name that the gguf package knows such a one by."""
    out, experts = {}, {}
    for name, value in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = value
        else:
            out[name] = value
    return out | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def old_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A Mixtral's experts one by one, as the first files had them."""
    names = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
    old = lambda m: f"blk.{m[1]}.{names[m[3]]}.{m[2]}.weight"
    pattern = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(\w+)\.weight")
    return {pattern.sub(old, name): value for name, value in tensors.items()}


def write(path: Path, name: str, *, change=stacked, keys: dict | None = None, leave_out: tuple[str, ...] = ()) -> Path:
    """The folder `name` as a GGUF file; `change` of its tensors; `keys` beside or instead of the usual ones."""
    config, tensors = stored(name)
    arch, heads = ARCHITECTURES[name], config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    rope = config["rope_parameters"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_weights_norm": config.get("norm_topk_prob"),
    }
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (values | (keys or {})).items():
        if value is not None and key not in leave_out:
            add[type(value)](f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    maps = [gguf.get_tensor_name_map(a, config["num_hidden_layers"]) for a in (arch, gguf.MODEL_ARCH.LLAMA)]
    for key, value in change(tensors).items():
        if arch is gguf.MODEL_ARCH.LLAMA and ("q_proj" in key or "k_proj" in key):
            value = permute(value, heads if "q_proj" in key else config["num_key_value_heads"])
        names = [found for m in maps if (found := m.get_name(key, (".weight",)))]  # a dense MLP's: in the second
        writer.add_tensor((names or [key])[0], value, raw_dtype=RAW if value.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "change"), [("mixtral", stacked), ("qwen3_moe", stacked), ("mixtral", old_names)])
def test_config_and_weights_are_those_of_the_folder(tmp_path, name, change):
    """Dense layers among those with experts, a width of their own, shares that do not sum to one."""
    got, wanted = open_checkpoint(write(tmp_path / "m.gguf", name, change=change)), open_checkpoint(GOLDEN / name)
    assert got.config == wanted.config
    ours, theirs = (load_weights(checkpoint, jnp.dtype(jnp.float32)) for checkpoint in (got, wanted))
    assert ours.keys() == theirs.keys()
    for key in ours:
        np.testing.assert_array_equal(np.asarray(ours[key]), np.asarray(theirs[key]), err_msg=key)


def test_what_llama_cpp_takes_for_granted(tmp_path):
    """Shares sum to one, and experts share the width of the dense layers, where a file does not say."""
    left_out = ("expert_weights_norm", "expert_feed_forward_length")
    config = open_checkpoint(write(tmp_path / "m.gguf", "qwen3_moe", leave_out=left_out)).config
    assert config.norm_topk_prob
    assert config.expert_size == config.intermediate_size // config.experts_per_token


def test_experts_of_a_quantised_tensor_lie_one_after_the_other(tmp_path):
    raw = np.random.default_rng(0).integers(0, 256, (5, 40, gguf.GGML_QUANT_SIZES[RAW][1]), np.uint8)
    change = lambda tensors: stacked(tensors) | {"model.layers.1.block_sparse_moe.experts.w1.weight": raw}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "mixtral", change=change))
    with np.errstate(all="ignore"):
        for i, expert in enumerate(raw):
            got = checkpoint.read(f"model.layers.1.mlp.experts.{i}.gate_proj.weight")
            np.testing.assert_array_equal(got, gguf.quants.dequantize(expert, RAW))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("mixtral", {"expert_count": 4}, r"ffn_(gate|up|down)_exps\.weight' has shape \[5, .*those of 4 experts"),
        ("mixtral", {"expert_count": 0}, r"ffn_(gate|up|down)_exps\.weight' has shape \[5, .*those of 0 experts"),
        ("mixtral", {"expert_count": 1 << 20}, "llama.expert_count=1048576 is out of range; at most 65536"),
        ("mixtral", {"expert_used_count": 6}, "expert_used_count=6 is out of range"),
        ("mixtral", {"expert_shared_count": 1}, "expert_shared_count'=1, which is not supported"),
        ("mixtral", {"expert_gating_func": 2}, "expert_gating_func'=2, which is not supported"),
        ("mixtral", {"expert_weights_scale": 2.5}, "expert_weights_scale'=2.5, which is not supported"),
        ("qwen3_moe", {"expert_count": 0}, "qwen3moe.expert_count'=0, which is not supported"),
        ("qwen3_moe", {"expert_weights_norm": 1}, "expert_weights_norm'=1; it must be true or false"),
    ],
)
def test_what_does_not_fit_or_is_not_done_is_refused_by_name(tmp_path, name, keys, message):
    with pytest.raises(ValueError, match=message):
        open_checkpoint(write(tmp_path / "m.gguf", name, keys=keys))


def test_a_missing_router_or_stack_is_named(tmp_path):
    def without(part):
        return lambda tensors: {name: value for name, value in stacked(tensors).items() if part not in name}

    with pytest.raises(ValueError, match=r"expert_count'=5 but no tensor 'blk\.\*\.ffn_gate_inp\.weight'"):
        open_checkpoint(write(tmp_path / "a.gguf", "mixtral", change=without("block_sparse_moe.gate")))
    stack = without("layers.1.block_sparse_moe.experts.w2")
    checkpoint = open_checkpoint(write(tmp_path / "b.gguf", "mixtral", change=stack))
    with pytest.raises(ValueError, match=r"1 tensors missing: blk\.1\.ffn_down_exps\.weight"):
        load_weights(checkpoint, jnp.dtype(jnp.float32))


def test_the_same_expert_stored_twice_is_refused(tmp_path):
    twice = lambda tensors: stacked(tensors) | {"blk.1.ffn_up.2.weight": np.zeros((40, 48), np.float32)}
    with pytest.raises(ValueError, match=r"experts\.2\.up_proj\.weight' twice"):
        open_checkpoint(write(tmp_path / "m.gguf", "mixtral", change=twice))
