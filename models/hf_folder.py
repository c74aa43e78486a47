"""Reads a folder in Hugging Face's layout: config.json and safetensors, memory-mapped. Pickles are never opened."""

from __future__ import annotations

import json
import math
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sarathi_jax.models.families.names import Part
from sarathi_jax.models.hf_config import family_of, model_config_from_hf
from sarathi_jax.tokenizer import Tokenizer

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja",
)  # fmt: skip
_MAX_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
_MAX_RANK = 8


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HFCheckpoint:
    """A folder in Hugging Face's layout; see `Checkpoint`.

    With an index only the files it names are read, else model.safetensors alone; other .safetensors files are left out.
    Tensors come under Llama's names, whatever the family calls them (`families`). Every header is checked against its
    file before anything is loaded. Tensors (F32, F16, BF16) are read-only views of the memory map, in their stored
    dtype, or copies of some rows. With tie_word_embeddings a stored lm_head.weight is dropped: the config wins.

    ValueError, naming the file, for what is missing, truncated, corrupt or not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.source = str(path)
        hf_config = _load_json(self.path / "config.json")
        try:
            self.config = model_config_from_hf(hf_config)
            self._names = family_of(hf_config).names(self.config)
        except ValueError as error:
            raise ValueError(f"{self.path / 'config.json'}: {error}") from error
        self.eos_token_ids = _eos_token_ids(self.path, hf_config)
        self._tensors: dict[str, tuple[Path, _Tensor, Part]] = {}
        self._maps: dict[Path, np.ndarray] = {}
        for file, wanted in _weight_files(self.path).items():
            header = _read_header(file)
            for name in header if wanted is None else wanted:
                if name not in header:
                    raise ValueError(f"{file}: has no tensor {name!r}, which {_INDEX} says is in it")
                if self._names.is_buffer(name):
                    continue
                if header[name].dtype not in _DTYPES:
                    raise ValueError(
                        f"{file}: tensor {name!r} has dtype {header[name].dtype}; supported: {', '.join(_DTYPES)}"
                    )
                self._add(file, name, header[name])

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)

    def tokenizer_files(self) -> dict[str, bytes]:
        files = (self.path / name for name in _TOKENIZER_FILES)
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def shape(self, name: str) -> tuple[int, ...]:
        _, tensor, part = self._find(name)
        return tensor.shape if part.rows is None else (part.rows.num_rows, *tensor.shape[1:])

    def read(self, name: str) -> np.ndarray:
        file, tensor, part = self._find(name)
        if file not in self._maps:
            self._maps[file] = np.asarray(np.memmap(file, mode="r"))
        dtype = np.dtype(_DTYPES[tensor.dtype])
        end = tensor.offset + math.prod(tensor.shape) * dtype.itemsize
        array = self._maps[file][tensor.offset : end].view(dtype).reshape(tensor.shape)
        return array if part.rows is None else part.rows.pick(array)

    def stored_name(self, name: str) -> str:
        return self._names.stored(name)

    def _add(self, file: Path, stored: str, tensor: _Tensor) -> None:
        for part in self._names.parts(stored):
            if part.name == "lm_head.weight" and self.config.tie_embeddings:
                continue
            if part.name in self._tensors:
                raise ValueError(f"{file}: tensor {stored!r} is {part.name!r}, which the checkpoint has already")
            if part.stored_rows is not None and tensor.shape[:1] != (part.stored_rows,):
                raise ValueError(
                    f"{file}: tensor {stored!r} has shape {list(tensor.shape)}; the config asks for {part.stored_rows} "
                    "rows"
                )
            self._tensors[part.name] = file, tensor, part

    def _find(self, name: str) -> tuple[Path, _Tensor, Part]:
        if name not in self._tensors:
            raise ValueError(f"{self.source} has no tensor {name!r}")
        return self._tensors[name]


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, each with the tensors to take from it (None: all). All of them are there."""
    if (folder / _INDEX).is_file():
        index = _load_json(folder / _INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / _INDEX}: needs a 'weight_map' from tensor names to file names")
        files: dict[Path, list[str] | None] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\x00]+\.safetensors", shard):
                raise ValueError(
                    f"{folder / _INDEX}: {name!r} is mapped to {reprlib.repr(shard)}; it must be a .safetensors "
                    "file in the same folder"
                )
            names = files.setdefault(folder / shard, [])
            assert names is not None
            names.append(name)
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise ValueError(
                f"{folder}: {', '.join(missing)} is named in {_INDEX} but missing; fetch the rest of the model"
            )
        return files
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    found = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if not any(name.endswith(".safetensors") for name in found) and found:
        raise ValueError(
            f"{folder}: holds pickled weights only ({', '.join(found[:3])}), which are never opened, since a pickle "
            "can run code; convert them to safetensors"
        )
    raise ValueError(
        f"{folder}: has neither {_SINGLE} nor {_INDEX}" + (f" (only {', '.join(found[:3])})" if found else "")
    )


def _read_header(file: Path) -> dict[str, _Tensor]:
    """The tensors of one safetensors file, with offsets from its start; all of it checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{file}: claims a header of {length} bytes in a file of {size} (at most {_MAX_HEADER} are read): "
                "truncated or corrupt"
            )
        header = _parse_json(file, stream.read(length))
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry) for name, entry in header.items()}
    position = 0
    for name, (tensor, begin, end) in sorted(tensors.items(), key=lambda item: item[1][1:]):
        if begin != position:
            raise ValueError(f"{file}: tensor {name!r} begins at {begin}, not where the one before it ends: corrupt")
        if (
            tensor.dtype in _DTYPES
            and end - begin != math.prod(tensor.shape) * np.dtype(_DTYPES[tensor.dtype]).itemsize
        ):
            raise ValueError(
                f"{file}: tensor {name!r} of {tensor.dtype} {list(tensor.shape)} does not fill its {end - begin} "
                "bytes: corrupt"
            )
        position = end
    if 8 + length + position != size:
        raise ValueError(
            f"{file}: has {size} bytes, its header describes {8 + length + position}: truncated or corrupt; "
            "fetch it again"
        )
    return {name: _Tensor(t.dtype, t.shape, 8 + length + begin) for name, (t, begin, _) in tensors.items()}


def _tensor(file: Path, name: str, entry: Any) -> tuple[_Tensor, int, int]:
    """One entry of a header, and its first and last byte in the data."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            numbers = [*shape, begin, end]
            if len(shape) <= _MAX_RANK and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) and begin <= end:
                return _Tensor(dtype, tuple(shape), 0), begin, end
    raise ValueError(f"{file}: the header's entry for {name!r} is malformed ({reprlib.repr(entry)}): corrupt")


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """From generation_config.json where it says, else from config.json; a number or a list of them."""
    for name in ("generation_config.json", "config.json"):
        source = config if name == "config.json" else _load_json(folder / name) if (folder / name).is_file() else {}
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if any(type(token) is not int or token < 0 for token in ids):
                raise ValueError(f"{folder / name}: eos_token_id={reprlib.repr(ids)} must be token ids")
            return tuple(dict.fromkeys(ids))
    return ()


def _load_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} is missing; a folder in Hugging Face's layout is needed")
    return _parse_json(file, file.read_bytes())


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON ({error}): truncated or corrupt") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return parsed
