"""Writes GGUF files as llama.cpp's converter would."""

from __future__ import annotations

import gguf
import numpy as np

T = gguf.GGMLQuantizationType
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2


def permute(weights, num_heads):
    """What llama.cpp's converter does to q and k, written out from its source."""
    out = weights.shape[0]
    return (
        weights.reshape(num_heads, 2, out // num_heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    )


def hf_weights(*, bias=False, qk_norm=False, head=True, head_dim=HEAD_DIM, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
            p + "self_attn.q_proj.weight": (HEADS * head_dim, HIDDEN),
            p + "self_attn.k_proj.weight": (KV_HEADS * head_dim, HIDDEN),
            p + "self_attn.v_proj.weight": (KV_HEADS * head_dim, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HEADS * head_dim),
            p + "mlp.gate_proj.weight": (FFN, HIDDEN),
            p + "mlp.up_proj.weight": (FFN, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if bias:
            shapes |= {p + f"self_attn.{x}_proj.bias": (h * head_dim,) for x, h in zip("qkv", (4, 2, 2), strict=True)}
        if qk_norm:
            shapes |= {p + f"self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, i, part = stem.split(".", 3)
        return f"blk.{i}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def write(path, weights, *, arch="llama", dtype=T.F32, head_dim=HEAD_DIM, keys=(), extra=(), raw=None, leave_out=()):
    """A file of `weights` under Hugging Face's names. `keys`: (setter, name, value) after the usual ones; `raw`: bytes
    and their type in place of the weights of these names."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "rope.dimension_count": head_dim,
    }.items():
        if name not in leave_out:
            writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}é" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * VOCAB)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    for setter, name, value in keys:
        getattr(writer, setter)(name, value)
    raw = raw or {}
    for name, value in weights.items():
        value, kind = raw.get(name, (value, dtype))
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            value = permute(value, HEADS if "q_proj" in name else KV_HEADS)
        if name in raw:
            writer.add_tensor(gguf_name(name), value, raw_dtype=kind)
        elif value.ndim == 1 or dtype is T.F32:
            writer.add_tensor(gguf_name(name), value)
        elif dtype is T.F16:
            writer.add_tensor(gguf_name(name), value.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, dtype), raw_dtype=dtype)
    for name, value in extra:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
