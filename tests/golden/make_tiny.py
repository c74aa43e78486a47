"""Makes tiny/ and rope.npz: small random models in Hugging Face's folder layout, and what transformers makes of them.

python make_tiny.py --out FOLDER

Weights come from NumPy's generator, large enough that a wrong mask, position, bias or norm changes every logit: the
script tries such mistakes and fails if one does not show. Each model's logits cover a whole prompt in one pass without
a cache. README.md lists the files and their arrays.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import types
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PROMPT_LEN = 300
SHORT_LEN = 80  # with NUM_NEW more it stays within ORIGINAL
NUM_NEW = 16
VOCAB = 96
ORIGINAL = 100  # trained context of the models whose positions depend on the length of the sequence
MIN_GAP = 0.02  # between the two largest logits wherever a greedy token is stored
MIN_DISTANCE = 0.05  # of a mistake's logits, over the standard deviation of the right ones

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


def longrope(size: int) -> dict:
    """Short and long factors for `size` frequencies, far from one and from each other."""
    short = [1.0 + 0.1 * i for i in range(size)]
    return rope(
        "longrope", short_factor=short, long_factor=[2.0 + 1.5 * i for i in range(size)],
        original_max_position_embeddings=ORIGINAL,
    )  # fmt: skip


# name: (configuration class, seed, what differs from SHAPE; None takes a field away). The models of one seed and shape
# have the same weights.
MODELS: dict[str, tuple[str, int, dict]] = {
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
        {"rope_parameters": rope("dynamic", factor=2.0), "rms_norm_eps": 1e-5, "max_position_embeddings": ORIGINAL},
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
    "qwen2_window": (
        "Qwen2Config",
        16,
        {
            "rope_parameters": rope("yarn", **YARN),
            "head_dim": None,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 30,
            "max_window_layers": 2,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        17,
        {
            "rope_parameters": rope("linear", factor=2.0),
            "num_hidden_layers": 3,
            "sliding_window": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        18,
        {
            "rope_parameters": rope("yarn", **YARN),
            "head_dim": 24,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        19,
        {
            "rope_parameters": rope("linear", factor=2.0),
            "num_hidden_layers": 5,
            "sliding_window": 28,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        20,
        {
            "rope_parameters": {
                "full_attention": rope("linear", theta=1000000.0, factor=8.0),
                "sliding_attention": rope(theta=100.0),
            },
            "num_hidden_layers": 7,
            "sliding_window": 28,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
        },
    ),
    "phi3": (
        "Phi3Config",
        21,
        {
            "rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75},
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": None,
            "original_max_position_embeddings": ORIGINAL,
            "pad_token_id": 0,
            "sliding_window": 60,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        22,
        {
            "rope_parameters": rope("llama3", theta=2000000.0, **LLAMA3),
            "num_hidden_layers": 5,
            "head_dim": None,
            "no_rope_layer_interval": 3,
            "pad_token_id": 0,
        },
    ),
    "falcon_7b": (
        "FalconConfig",
        23,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "rope_parameters": rope("linear", factor=2.0),
            "ffn_hidden_size": 40,
        },
    ),
    "falcon_40b": (
        "FalconConfig",
        24,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "rope_parameters": rope(theta=500.0),
            "ffn_hidden_size": 40,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "opt": (
        "OPTConfig",
        25,
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim")),
            "ffn_dim": 40,
            "word_embed_proj_dim": 48,
            "num_hidden_layers": 3,
            "pad_token_id": 1,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        26,
        {
            **dict.fromkeys(("num_key_value_heads", "head_dim")),
            "rope_parameters": rope("linear", factor=2.0, partial_rotary_factor=0.5),
        },
    ),
    "gpt_neox_sequential": (
        "GPTNeoXConfig",
        27,
        {
            **dict.fromkeys(("num_key_value_heads", "head_dim")),
            "rope_parameters": rope(partial_rotary_factor=0.5),
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
        },
    ),
}
STORED_DTYPE = {"falcon_7b": "bfloat16", "falcon_40b": "float16", "mixtral": "bfloat16", "qwen3_moe": "bfloat16"}
SHARDED = {"gemma2": "60KB"}
HAS_SHORT = ("llama_dynamic", "phi3")


def make_config(name: str, **changes):
    """The configuration of the model `name`, with `changes` on top; None takes a field away."""
    kind, _, fields = MODELS[name]
    fields = {key: value for key, value in (SHAPE | fields | changes).items() if value is not None}
    return getattr(transformers, kind)(**copy.deepcopy(fields), dtype="float32")


def make_model(config, seed: int, stored: str = "float32"):
    """A model on random weights, rounded to the dtype they are stored in; every tensor has a generator of its own, so
    that families can share them."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    owners: dict[int, str] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            owners.setdefault(id(weight), type(module).__name__)  # of a tied weight, the embedding
    with torch.no_grad():
        for i, (name, weight) in enumerate(sorted(model.named_parameters())):
            rng, owner = np.random.default_rng([seed, i]), owners[id(weight)]
            if name.endswith(".bias"):
                value = rng.normal(0.0, 0.7, weight.shape)
            elif "Norm" in owner:
                value = rng.uniform(0.4, 1.8, weight.shape) - (1.0 if owner.startswith("Gemma") else 0.0)
            elif "Embedding" in owner:
                value = rng.normal(0.0, 0.4, weight.shape)
            else:
                value = rng.normal(0.0, 0.22, weight.shape)
            value = torch.from_numpy(value.astype(np.float32))
            weight.copy_(value.to(getattr(torch, stored)).float())
    return model


@torch.inference_mode()
def run(model, ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one pass over the whole sequence, without a cache and without a memory of earlier runs."""
    if model.config.model_type == "llama":
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


def choose_prompt(model, lengths: list[int], seed: int) -> np.ndarray:
    """The first random prompt whose greedy continuations are all clear, at every length."""
    for attempt in range(400):
        ids = np.random.default_rng([seed, attempt]).integers(3, VOCAB, PROMPT_LEN)
        if all(continue_greedily(model, ids[:n])[1].min() > MIN_GAP for n in lengths):
            return ids
    raise AssertionError(f"no prompt found with all gaps above {MIN_GAP=}: choose another {seed=}")


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
    weights, config = model.state_dict(), model.config

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

    kinds = {key.rsplit(".", 1)[0].rsplit(".", 1)[-1] for key in weights if key.endswith(".bias")}
    out = {f"no {kind} bias": without(f"{kind}.bias") for kind in sorted(kinds) if (name, kind) != ("opt", "k_proj")}
    parameters = getattr(config, "rope_parameters", None)
    if parameters and "rope_type" in parameters:
        plain = {key: parameters[key] for key in ("partial_rotary_factor",) if key in parameters}
        theta = parameters["rope_theta"]
        out["only the first pair rotated"] = with_config(rope_parameters=rope(theta=1e30, **plain))
        out["another theta"] = with_config(rope_parameters=parameters | {"rope_theta": 2 * theta})
        if parameters["rope_type"] != "default":
            out["plain rope"] = with_config(rope_parameters=rope(theta=theta, **plain))
        if parameters["rope_type"] == "yarn":
            out["yarn without attention factor"] = with_config(rope_parameters=parameters | {"attention_factor": 1.0})
            out["yarn without truncation"] = with_config(rope_parameters=parameters | {"truncate": False})
        if parameters["rope_type"] == "longrope":
            out["short factors"] = with_config(rope_parameters=parameters | {"long_factor": parameters["short_factor"]})
            out["no attention factor"] = with_config(rope_parameters=parameters | {"attention_factor": 1.0})
    if getattr(config, "sliding_window", None) is not None:
        window = config.sliding_window
        changed = {"windows by one fewer": window - 1, "windows by one more": window + 1, "no window": 512}
        out |= {label: with_config(sliding_window=n) for label, n in changed.items()}
    match name:
        case "llama_tied" | "qwen3":
            out["eps of zero"] = with_config(rms_norm_eps=0.0)
        case "gemma2":
            for field in ("attn_logit_softcapping", "final_logit_softcapping"):
                out[f"no {field}"] = with_config(**{field: 1e6})
            types = config.layer_types
            out["windows in the other layers"] = with_config(layer_types=types[1:] + types[:1])
        case "gemma3":
            local, main = (config.rope_parameters[f"{kind}_attention"] for kind in ("sliding", "full"))
            nested = lambda full, sliding: {"full_attention": full, "sliding_attention": sliding}
            out["one base for all"] = with_config(rope_parameters=nested(main, main))
            out["no scaling"] = with_config(rope_parameters=nested(rope(theta=main["rope_theta"]), local))
            out["another pattern"] = with_config(sliding_window_pattern=4)
        case "qwen2_window":
            out["windows from another layer on"] = with_config(max_window_layers=3)
        case "mixtral" | "qwen3_moe":
            out["one expert fewer"] = with_config(num_experts_per_tok=config.num_experts_per_tok - 1)
        case "smollm3":
            out["positions in every layer"] = with_config(no_rope_layers=[1] * 5)
            out["another interval"] = with_config(no_rope_layer_interval=2)
        case "falcon_40b":
            out["one norm"] = without("ln_mlp.weight", value=1.0)
        case "gpt_neox" | "gpt_neox_sequential":
            out["the other residual"] = with_config(use_parallel_residual=not config.use_parallel_residual)
            whole = parameters | {"partial_rotary_factor": 1.0}
            out["all dimensions rotated"] = with_config(rope_parameters=whole)
        case "opt":
            out["no positions"] = without("embed_positions.weight")
    if name == "qwen3_moe":
        out["shares that sum to one"] = with_config(norm_topk_prob=True)
    if name in ("gemma2", "gemma3"):
        out["plain scale"] = with_config(query_pre_attn_scalar=16)
        out["no norm after attention"] = without("post_attention_layernorm.weight")
    return out


def make(name: str, folder: Path) -> None:
    """Writes one model and its golden arrays, and prints how far mistakes would lie from them."""
    _, seed, _ = MODELS[name]
    model = make_model(make_config(name), seed, STORED_DTYPE.get(name, "float32"))
    shutil.rmtree(folder, ignore_errors=True)
    stored = copy.deepcopy(model).to(getattr(torch, STORED_DTYPE.get(name, "float32")))
    stored.save_pretrained(folder, **({"max_shard_size": SHARDED[name]} if name in SHARDED else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if model.config.model_type in ("llama", "mistral", "qwen2", "qwen3"):
        write_old_config(folder)

    ids = choose_prompt(model, [PROMPT_LEN, *([SHORT_LEN] if name in HAS_SHORT else [])], seed)
    arrays = golden(model, ids)
    if name in HAS_SHORT:
        arrays |= golden(model, ids[:SHORT_LEN], "short_")
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    np.testing.assert_array_equal(run(read.eval(), ids), arrays["logits"])
    np.savez_compressed(folder / "golden.npz", **arrays)

    logits = arrays["logits"]
    noise = (
        f", noise {distance(logits, run(to_float64(model), ids)):.1e}" if (folder / "config_v4.json").exists() else ""
    )
    print(f"{name}: logits spread by {logits.std():.2f}, smallest gap {arrays['gap'].min():.3f}{noise}")
    others = {label: distance(other, logits) for label, other in variants(name, model, ids).items()}
    print("   " + ", ".join(f"{label} {value:.2g}" for label, value in others.items()), flush=True)
    if unseen := [label for label, value in others.items() if value < MIN_DISTANCE]:
        raise AssertionError(f"{name}: {unseen} hardly change the logits; draw larger weights")


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
    parser.add_argument("--only", nargs="*", default=list(MODELS), help="models to make; default all, and rope.npz")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        make(name, args.out / "tiny" / name)
    make_rope(args.out / "rope.npz")


if __name__ == "__main__":
    main()
