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
from tiny_models import HAS_SHORT, MODELS, SHAPE, SHARDED, STORED_DTYPE, VOCAB, rope
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PROMPT_LEN = 300
SHORT_LEN = 80  # with NUM_NEW more it stays within ORIGINAL
NUM_NEW = 16
MIN_GAP = 0.02  # between the two largest logits wherever a greedy token is stored
MIN_DISTANCE = 0.05  # of a mistake's logits, over the standard deviation of the right ones


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
        case "falcon_11b":
            out["a norm each"] = with_config(num_ln_in_parallel_attn=2)
        case "falcon_sequential":
            out["in parallel"] = with_config(parallel_attn=True)
            out["one norm"] = without("post_attention_layernorm.weight", value=1.0)
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
