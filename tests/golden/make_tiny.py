"""Makes tiny/ and rope.npz: small random models in Hugging Face's folder layout, and what transformers makes of them.

python make_tiny.py --out FOLDER

Weights come from NumPy's generator, large enough that a wrong mask, position, bias or norm changes every logit. Each
model's logits cover a whole prompt in one pass without a cache. README.md lists the files and their arrays.
"""

from __future__ import annotations

import argparse
import copy
import json
import types
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PROMPT_LEN = 150
SHORT_LEN = 80  # with NUM_NEW more it stays within DYNAMIC_ORIGINAL
NUM_NEW = 16
VOCAB = 96
DYNAMIC_ORIGINAL = 100
MIN_GAP = 0.02  # between the two largest logits wherever a greedy token is stored

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str = "default", theta: float = 10000.0, **fields) -> dict:
    """The `rope_parameters` of a configuration."""
    return {"rope_type": kind, "rope_theta": theta, **fields}


# name: (configuration class, seed, what differs from SHAPE). The models of one seed and shape have the same weights.
MODELS = {
    "llama_default": ("LlamaConfig", 10, {"rope_parameters": rope(), "rms_norm_eps": 1e-5}),
    "llama_tied": (
        "LlamaConfig",
        11,
        {"rope_parameters": rope(theta=500.0), "rms_norm_eps": 1e-2, "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama_linear": ("LlamaConfig", 10, {"rope_parameters": rope("linear", factor=4.0), "rms_norm_eps": 1e-5}),
    "llama_dynamic": (
        "LlamaConfig",
        10,
        {
            "rope_parameters": rope("dynamic", factor=2.0),
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": DYNAMIC_ORIGINAL,
        },
    ),
    "llama_llama3": ("LlamaConfig", 10, {"rope_parameters": rope("llama3", **LLAMA3), "rms_norm_eps": 1e-5}),
    "llama_yarn": (
        "LlamaConfig",
        10,
        {"rope_parameters": rope("yarn", **YARN), "rms_norm_eps": 1e-5, "max_position_embeddings": 256},
    ),
    "llama_bias": (
        "LlamaConfig",
        12,
        {"rope_parameters": rope(), "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral_window": ("MistralConfig", 13, {"rope_parameters": rope(), "rms_norm_eps": 1e-5, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", 14, {"rope_parameters": rope(theta=1000000.0), "rms_norm_eps": 1e-6, "head_dim": None}),
    "qwen3": (
        "Qwen3Config",
        15,
        {
            "rope_parameters": rope(theta=1000000.0),
            "rms_norm_eps": 1e-2,
            "head_dim": 32,
            "intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
}


def make_config(name: str, **changes):
    """The configuration of the model `name`, with `changes` on top; None takes a field away."""
    kind, _, fields = MODELS[name]
    fields = {key: value for key, value in (SHAPE | fields | changes).items() if value is not None}
    return getattr(transformers, kind)(**copy.deepcopy(fields), dtype="float32")


def make_model(config, seed: int):
    """A model on random weights; every tensor has a generator of its own, so that families can share them."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for i, (name, weight) in enumerate(sorted(model.named_parameters())):
            rng = np.random.default_rng([seed, i])
            if name.endswith("norm.weight"):
                value = rng.uniform(0.4, 1.8, weight.shape)
            elif name.endswith(".bias"):
                value = rng.normal(0.0, 0.7, weight.shape)
            elif "embed_tokens" in name:
                value = rng.normal(0.0, 0.4, weight.shape)
            else:
                value = rng.normal(0.0, 0.22, weight.shape)
            weight.copy_(torch.from_numpy(value.astype(np.float32)))
    return model


@torch.inference_mode()
def run(model, ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one pass over the whole sequence, without a cache and without a memory of earlier runs."""
    rotary = model.model.rotary_emb
    if rotary.rope_type == "dynamic":  # it would keep the base of the longest sequence seen so far
        rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq.clone(), rotary.original_max_seq_len
    return model(torch.from_numpy(ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def continue_greedily(model, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """NUM_NEW greedy tokens and each one's distance to the runner-up, every one from a whole pass without a cache."""
    tokens, gaps = [], []
    for _ in range(NUM_NEW):
        last = run(model, np.concatenate([ids, np.array(tokens, np.int64)]))[-1]
        second, first = np.sort(last)[-2:]
        tokens.append(int(last.argmax()))
        gaps.append(first - second)
    return np.array(tokens, np.int32), np.array(gaps, np.float32)


def golden(model, ids: np.ndarray, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays stored for one prompt."""
    tokens, gaps = continue_greedily(model, ids)
    arrays = {"prompt_ids": ids.astype(np.int32), "logits": run(model, ids), "greedy_ids": tokens, "gap": gaps}
    return {prefix + key: value for key, value in arrays.items()}


def choose_prompt(models: list, lengths: list[int], seed: int) -> np.ndarray:
    """The first random prompt whose greedy continuations are all clear, for every model and at every length."""
    for attempt in range(200):
        ids = np.random.default_rng([seed, attempt]).integers(3, VOCAB, PROMPT_LEN)
        if all(continue_greedily(m, ids[:n])[1].min() > MIN_GAP for m in models for n in lengths):
            return ids
    raise AssertionError(f"no prompt found with all gaps above {MIN_GAP=}: choose another {seed=}")


def fix_dynamic_base(model) -> None:
    """Holds the dynamic rotary base at that of factor x original positions, whatever the length of a sequence."""
    rotary = model.model.rotary_emb
    longest = int(model.config.rope_parameters["factor"] * DYNAMIC_ORIGINAL)
    rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, "cpu", seq_len=longest)
    rotary.rope_type = "default"  # transformers then leaves inv_freq alone


def to_float64(model):
    """A copy that computes in float64: weights, norms, softmax and rotary angles (inverse frequencies stay float32)."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        inv_freq = self.inv_freq
        if self.rope_type == "dynamic":
            inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](self.config, "cpu", seq_len=position_ids.max() + 1)
        angles = position_ids[..., None].double() * inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    model = copy.deepcopy(model)
    model.model.rotary_emb.forward = types.MethodType(rotary, model.model.rotary_emb)
    inv_freq = model.model.rotary_emb.inv_freq
    model.double()
    model.model.rotary_emb.inv_freq = inv_freq
    model.set_attn_implementation("sdpa")  # the eager one computes its softmax in float32
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
    return model


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, over the standard deviation of `want`."""
    return float(np.abs(got - want).max() / want.std())


def write_old_config(folder: Path) -> None:
    """Beside config.json, the same under the field names of transformers 4 (rope_theta, rope_scaling, torch_dtype)."""
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config["torch_dtype"] = config.pop("dtype")
    del config["transformers_version"]
    old = folder / "config_v4.json"
    old.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    read = transformers.AutoConfig.from_pretrained(old).to_dict()
    new = transformers.AutoConfig.from_pretrained(folder).to_dict()
    different = {key for key in read | new if read.get(key) != new.get(key)} - {"transformers_version", "_name_or_path"}
    if different:
        raise AssertionError(f"{old}: transformers reads {different} differently from config.json")


def variants(name: str, model, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Logits of what a mistake would compute; they must lie far from the right ones."""
    weights = model.state_dict()

    def with_config(**changes) -> np.ndarray:
        other = transformers.AutoModelForCausalLM.from_config(make_config(name, **changes), attn_implementation="eager")
        other.load_state_dict(weights, strict=False)
        return run(other.eval(), ids)

    def without(*endings: str, value: float = 0.0) -> np.ndarray:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for key, weight in other.named_parameters():
                if key.endswith(endings):
                    weight.fill_(value)
        return run(other, ids)

    parameters = model.config.rope_parameters
    out = {"norms of one": without("norm.weight", value=1.0), "eps of zero": with_config(rms_norm_eps=0.0)}
    out["only the first pair rotated"] = with_config(rope_parameters=rope(theta=1e30))
    out["another theta"] = with_config(rope_parameters=parameters | {"rope_theta": 2 * parameters["rope_theta"]})
    if parameters["rope_type"] != "default":
        out["plain rope"] = with_config(rope_parameters=rope())
    if parameters["rope_type"] == "yarn":
        out["yarn without attention factor"] = with_config(rope_parameters=parameters | {"attention_factor": 1.0})
        out["yarn without truncation"] = with_config(rope_parameters=parameters | {"truncate": False})
    if name == "llama_bias":
        out |= {f"no {n} bias": without(n + ".bias") for n in ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")}
    if name == "qwen2":
        out |= {f"no {n} bias": without(n + ".bias") for n in ("q_proj", "k_proj", "v_proj")}
    if name == "qwen3":
        out["q_norm and k_norm of one"] = without("q_norm.weight", "k_norm.weight", value=1.0)
    if name == "mistral_window":
        out |= {f"window {n}": with_config(sliding_window=n) for n in (23, 25, 512)}
    return out


def make(name: str, folder: Path) -> None:
    """Writes one model and its golden arrays, and prints how far mistakes would lie from them."""
    _, seed, _ = MODELS[name]
    model = make_model(make_config(name), seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_old_config(folder)

    if name == "llama_dynamic":
        fixed = copy.deepcopy(model)
        fix_dynamic_base(fixed)
        ids = choose_prompt([model, fixed], [PROMPT_LEN, SHORT_LEN], seed)
        arrays = golden(model, ids) | golden(model, ids[:SHORT_LEN], "short_")
        arrays |= golden(fixed, ids, "fixed_") | golden(fixed, ids[:SHORT_LEN], "fixed_short_")
    else:
        ids = choose_prompt([model], [PROMPT_LEN], seed)
        arrays = golden(model, ids)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    np.testing.assert_array_equal(run(read.eval(), ids), arrays["logits"])
    np.savez_compressed(folder / "golden.npz", **arrays)

    logits = arrays["logits"]
    noise = distance(logits, run(to_float64(model), ids))
    print(f"{name}: logits spread by {logits.std():.2f}, smallest gap {arrays['gap'].min():.3f}, noise {noise:.1e}")
    others = {label: distance(other, logits) for label, other in variants(name, model, ids).items()}
    if name == "llama_dynamic":
        others["fixed base"] = distance(arrays["fixed_logits"], logits)
        others["short prompt, fixed base"] = distance(arrays["fixed_short_logits"], arrays["short_logits"])
    print("   " + ", ".join(f"{label} {value:.2g}" for label, value in others.items()), flush=True)


def make_rope(path: Path) -> None:
    """Inverse frequencies and attention factors of transformers for configurations as real models have them."""
    llama31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    deepseek = {"factor": 40.0, "original_max_position_embeddings": 4096}
    cases = {  # name: (head size, max_position_embeddings, length of the sequence, rope_parameters)
        "default": (64, 8192, None, rope(theta=100000.0)),
        "linear": (128, 16384, None, rope("linear", factor=4.0)),
        "dynamic_short": (128, 4096, 4000, rope("dynamic", factor=2.0)),
        "dynamic_5000": (128, 4096, 5000, rope("dynamic", factor=2.0)),
        "dynamic_8192": (128, 4096, 8192, rope("dynamic", factor=2.0)),
        "llama3_8b": (128, 131072, None, rope("llama3", 500000.0, **llama31)),
        "llama3_1b": (64, 131072, None, rope("llama3", 500000.0, **llama31 | {"factor": 32.0})),
        "yarn": (128, 131072, None, rope("yarn", 1000000.0, **yarn)),
        "yarn_no_truncate": (64, 131072, None, rope("yarn", 150000.0, **yarn, truncate=False)),
        "yarn_betas": (128, 131072, None, rope("yarn", 1000000.0, **yarn, beta_fast=16.0, beta_slow=2.0)),
        "yarn_attention_factor": (128, 131072, None, rope("yarn", 1000000.0, **yarn, attention_factor=1.25)),
        "yarn_mscale": (64, 163840, None, rope("yarn", **deepseek, mscale=0.707, mscale_all_dim=1.0)),
        "yarn_mscale_alone": (64, 163840, None, rope("yarn", **deepseek, mscale=0.707)),
    }
    arrays, table = {}, {}
    for name, (head_dim, max_position, seq_len, parameters) in cases.items():
        config = transformers.LlamaConfig(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rope_parameters=copy.deepcopy(parameters),
        )
        if parameters["rope_type"] == "default":
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            inv_freq, attention_factor = rotary.inv_freq, rotary.attention_scaling
        else:
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=seq_len)
        arrays[f"{name}/inv_freq"] = inv_freq.numpy()
        arrays[f"{name}/attention_factor"] = np.array(attention_factor, np.float64)
        table[name] = {
            "head_dim": head_dim,
            "max_position_embeddings": max_position,
            "seq_len": seq_len,
            "rope_parameters": parameters,
        }
    np.savez_compressed(path, cases=np.array(json.dumps(table)), **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets tiny/ and rope.npz")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in MODELS:
        make(name, args.out / "tiny" / name)
    make_rope(args.out / "rope.npz")


if __name__ == "__main__":
    main()
