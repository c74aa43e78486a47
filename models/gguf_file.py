"""Reads GGUF files: llama (SmolLM2, Mistral and Mixtral among them), qwen2, qwen3 and qwen3moe; any type the gguf
package can dequantise.

The header is parsed here, with every count and offset checked against the file's size before anything is allocated for
it. (The gguf package's own reader trusts them, and takes seconds over a vocabulary.)
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.gguf_config import BLOCK_NAME, ROPE_FREQS, model_config_from_gguf
from sarathi_jax.models.saved import gguf_tokenizer_files
from sarathi_jax.tokenizer import Tokenizer

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {f"ffn_{name}_exps": f"{name}_proj" for name in ("gate", "up", "down")}
"""Those of all experts of a layer as one, [experts, out, in]."""
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d{1,5})")
"""One expert's, as files from before 2024-04 have them."""
_HF_BLOCK_NAME = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_HF_EXPERT = re.compile(r"mlp\.experts\.\d+\.(\w+)")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1 << 22
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: GGMLQuantizationType
    offset: int
    num_bytes: int
    heads: int | None = None
    """Heads whose rows llama.cpp's converter has reordered; None for rows as they were."""


class _Cursor:
    """Little-endian reads that cannot leave the buffer."""

    def __init__(self, data: np.ndarray) -> None:
        self.buffer = data.data
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.buffer) - self.position

    def take(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes`; the position before."""
        if num_bytes > self.left:
            raise ValueError(
                f"{what} at byte {self.position} needs {num_bytes} bytes but {self.left} are left: truncated or corrupt"
            )
        self.position += num_bytes
        return self.position - num_bytes

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        start = self.take(self.scalar("Q", what), what)
        try:
            return str(self.buffer[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} at byte {start} is not UTF-8: corrupt") from error

    def value(self, key: str) -> Any:
        kind = self.scalar("I", f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the string {key!r}")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], f"the value of {key!r}")
        if kind != _ARRAY:
            raise ValueError(f"{key!r} has the unknown value type {kind}: corrupt")
        kind, count = self.scalar("I", f"the type of {key!r}"), self.scalar("Q", f"the length of {key!r}")
        if kind != _STRING and kind not in _SCALARS:
            raise ValueError(f"{key!r} is an array of the unknown or nested type {kind}")
        code = _SCALARS.get(kind, "Q")
        if count > _MAX_ARRAY or count * struct.calcsize("<" + code) > self.left:
            raise ValueError(
                f"{key!r} claims {count} entries, but {self.left} bytes are left in the file (and at most {_MAX_ARRAY} "
                "entries are read): truncated or corrupt"
            )
        if kind == _STRING:
            return [self.string(f"entry {i} of {key!r}") for i in range(count)]
        start = self.take(count * struct.calcsize("<" + code), f"the array {key!r}")
        return list(struct.unpack_from(f"<{count}{code}", self.buffer, start))


def _parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """Metadata as plain values, and where each tensor lies. ValueError for a file that contradicts itself."""
    cursor = _Cursor(data)
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"starts with {bytes(data[:4])!r}, not b'GGUF': this is not a GGUF file")
    cursor.position = 4
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        hint = "; it is big-endian" if version and version % 65536 == 0 else ""
        raise ValueError(f"has GGUF version {version}{hint}; versions 2 and 3, little-endian, are read")
    num_tensors, num_keys = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")
    if num_tensors * 32 + num_keys * 13 > cursor.left:
        raise ValueError(
            f"claims {num_tensors} tensors and {num_keys} metadata keys, more than its {data.size} bytes can hold: "
            "truncated or corrupt"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise ValueError(f"has the metadata key {key!r} twice: corrupt")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} must be a power of two: corrupt")
    found: dict[str, _Tensor] = {}
    for _ in range(num_tensors):
        name = cursor.string("a tensor name")
        if name in found:
            raise ValueError(f"has the tensor {name!r} twice: corrupt")
        found[name] = _tensor_info(cursor, name)
    return metadata, _place(found, -(-cursor.position // alignment) * alignment, alignment, data.size)


def _tensor_info(cursor: _Cursor, name: str) -> _Tensor:
    num_dims = cursor.scalar("I", f"the rank of {name!r}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions, 1 to {_MAX_DIMS} are possible: corrupt")
    shape = tuple(cursor.scalar("Q", f"the shape of {name!r}") for _ in range(num_dims))[::-1]
    kind = cursor.scalar("I", f"the type of {name!r}")
    try:
        dtype = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(
            f"tensor {name!r} has the unknown type {kind}: corrupt, or newer than the gguf package"
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[dtype]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} cannot be {dtype.name} (blocks of {block}): corrupt")
    return _Tensor(shape, dtype, cursor.scalar("Q", f"the offset of {name!r}"), math.prod(shape) // block * block_bytes)


def _place(found: Mapping[str, _Tensor], start: int, alignment: int, size: int) -> dict[str, _Tensor]:
    """The tensors with offsets from the start of the file, inside it, aligned, and apart from each other."""
    placed, end = {}, 0
    for name, t in sorted(found.items(), key=lambda item: item[1].offset):
        if t.offset % alignment:
            raise ValueError(f"tensor {name!r} at offset {t.offset} is not aligned to {alignment}: corrupt")
        if t.offset < end:
            raise ValueError(f"tensor {name!r} at offset {t.offset} overlaps the one before it: corrupt")
        end = t.offset + t.num_bytes
        if start + end > size:
            raise ValueError(f"tensor {name!r} ends at byte {start + end} of {size}: truncated or corrupt")
        placed[name] = replace(t, offset=start + t.offset)
    return placed


class GGUFCheckpoint:
    """A GGUF file under Hugging Face's tensor names; see `Checkpoint`.

    Tensors are read from a memory map: F32, F16 and BF16 as stored, the quantised types as float32. Rows of q and k,
    which a llama file stores reordered, come back in Hugging Face's order. A tensor of unknown name keeps it.

    ValueError, naming the file, for one that is truncated, corrupt, or of a model that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.source = str(path)
        try:
            self._data = np.memmap(self.path, mode="r") if self.path.stat().st_size else np.zeros(0, np.uint8)
            self.metadata, tensors = _parse(self._data)
            for dtype in {t.dtype for t in tensors.values()}:
                _check_readable(dtype)
            divisors = self._values(tensors[ROPE_FREQS]) if ROPE_FREQS in tensors else None
            self.config = model_config_from_gguf(self.metadata, {n: t.shape for n, t in tensors.items()}, divisors)
            self._tensors = _rename(tensors, self.config, str(self.metadata["general.architecture"]))
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.source}: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        keys = (f"tokenizer.ggml.{which}_token_id" for which in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(self.metadata[key] for key in keys if type(self.metadata.get(key)) is int))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.metadata)

    def tokenizer_files(self) -> dict[str, bytes]:
        return gguf_tokenizer_files(self.metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def stored_name(self, name: str) -> str:
        if match := _HF_BLOCK_NAME.fullmatch(name):
            part = _HF_EXPERT.sub(r"\1", match[2])
            blocks = {new: old for old, new in (_BLOCK | _EXPERTS).items()}
            return f"blk.{match[1]}.{blocks.get(part, part)}.{match[3]}"
        return {new: old for old, new in _TOP.items()}.get(name, name)

    def read(self, name: str) -> np.ndarray:
        return self._values(self._find(name))

    def _values(self, tensor: _Tensor) -> np.ndarray:
        rows = tensor.shape[0] if tensor.heads else math.prod(tensor.shape[:-1])
        raw = np.asarray(self._data[tensor.offset : tensor.offset + tensor.num_bytes]).reshape(rows, -1)
        if tensor.heads:
            raw = raw.reshape(tensor.heads, -1, 2, raw.shape[1]).swapaxes(1, 2).reshape(rows, -1)
        match tensor.dtype:
            case GGMLQuantizationType.F32:
                values = raw.view(np.float32)
            case GGMLQuantizationType.F16:
                values = raw.view(np.float16)
            case GGMLQuantizationType.BF16:
                values = raw.view(ml_dtypes.bfloat16)
            case _:
                with np.errstate(all="ignore"):  # a scale may be infinite; the values show it
                    values = dequantize(raw, tensor.dtype)
        return values.reshape(tensor.shape)

    def _find(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.source} has no tensor {name!r}")
        return self._tensors[name]


def _check_readable(dtype: GGMLQuantizationType) -> None:
    if dtype in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[dtype][1]), np.uint8), dtype)
    except NotImplementedError as error:
        raise ValueError(f"holds tensors of type {dtype.name}, which cannot be read; convert it to another") from error


def _rename(tensors: Mapping[str, _Tensor], config: ModelConfig, arch: str) -> dict[str, _Tensor]:
    """The tensors under Hugging Face's names, with the heads to reorder, and each expert's apart."""
    renamed: dict[str, _Tensor] = {}
    for name, t in tensors.items():
        if name == ROPE_FREQS:  # in the config
            continue
        found = {_TOP.get(name, name): t}
        if match := BLOCK_NAME.fullmatch(name):
            prefix, part, kind = f"model.layers.{match[1]}.", match[2], match[3]
            if part in _BLOCK:
                permuted = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if arch == "llama" else {}
                heads = permuted.get(part)
                if heads and (t.shape[0] != heads * config.head_dim or len(t.shape) > 2):
                    raise ValueError(f"{name!r} has shape {list(t.shape)}; it needs {heads} x {config.head_dim} rows")
                found = {f"{prefix}{_BLOCK[part]}.{kind}": replace(t, heads=heads)}
            elif part in _EXPERTS and kind == "weight":
                apart = _apart(name, t, config.num_experts)
                found = {f"{prefix}mlp.experts.{i}.{_EXPERTS[part]}.weight": one for i, one in enumerate(apart)}
            elif one := _ONE_EXPERT.fullmatch(part):
                found = {f"{prefix}mlp.experts.{one[2]}.{one[1]}_proj.{kind}": t}
        if twice := sorted(found.keys() & renamed.keys()):
            raise ValueError(f"has the tensor {twice[0]!r} twice, once as {name!r}: corrupt")
        renamed |= found
    return renamed


def _apart(name: str, t: _Tensor, num_experts: int) -> list[_Tensor]:
    """The tensor of each expert, of one that has them all."""
    if len(t.shape) != 3 or t.shape[0] != num_experts:
        raise ValueError(f"{name!r} has shape {list(t.shape)}; it needs those of {num_experts} experts")
    size = t.num_bytes // num_experts
    return [replace(t, shape=t.shape[1:], offset=t.offset + i * size, num_bytes=size) for i in range(num_experts)]
