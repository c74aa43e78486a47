"""The folder of a saved model: config and tokenizer, beside the weights that `orbax_weights` writes and restores."""

from __future__ import annotations

import json
import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from sarathi_jax.config import ModelConfig
from sarathi_jax.tokenizer import Tokenizer

MODEL_FILE = "sarathi_model.json"
_FORMAT = 1
_GGUF_TOKENIZER = "tokenizer_gguf.json"


class SavedModel:
    """A folder written by `convert.save_model`.

    ValueError, naming the file, for what is missing, malformed or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.source = str(path)
        file = self.path / MODEL_FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise ValueError(f"is not of format {_FORMAT}")
            self.config = _decode(ModelConfig, content.get("config"))
            self.eos_token_ids = _decode(tuple[int, ...], content.get("eos_token_ids"))
            self.quantization = content.get("quantization")
            if self.quantization not in (None, "int8"):
                raise ValueError(f"quantization={self.quantization!r} is not known; known: int8")
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{file}: {error}") from error

    @property
    def weights_path(self) -> Path:
        return self.path / "weights"

    def tokenizer(self) -> Tokenizer:
        folder = self.path / "tokenizer"
        file = folder / _GGUF_TOKENIZER
        if not file.is_file():
            return Tokenizer.from_folder(folder)
        try:
            metadata = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: is not valid JSON ({error})") from error
        if not isinstance(metadata, dict):
            raise ValueError(f"{file}: must hold a JSON object")
        return Tokenizer.from_gguf(metadata)

    def tokenizer_files(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (self.path / "tokenizer").glob("*") if file.is_file()}


def write_description(
    folder: Path,
    config: ModelConfig,
    *,
    eos_token_ids: tuple[int, ...],
    tokenizer_files: Mapping[str, bytes],
    quantization: str | None,
) -> None:
    """Everything of a saved model but its weights."""
    (folder / "tokenizer").mkdir()
    for name, content in tokenizer_files.items():
        (folder / "tokenizer" / name).write_bytes(content)
    content = {
        "format": _FORMAT,
        "quantization": quantization,
        "eos_token_ids": eos_token_ids,
        "config": asdict(config),
    }
    (folder / MODEL_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def gguf_tokenizer_files(metadata: dict[str, Any]) -> dict[str, bytes]:
    """The tokenizer of a GGUF file's metadata, for `SavedModel.tokenizer`."""
    keys = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return {_GGUF_TOKENIZER: json.dumps(keys).encode()}


def _decode(kind: Any, value: Any) -> Any:
    """JSON to a dataclass, a tuple or a plain value of that type; ValueError for what does not fit."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        names = {field.name for field in fields(kind)}
        if not isinstance(value, dict) or value.keys() - names:
            raise ValueError(f"{reprlib.repr(value)} must be an object with fields of {kind.__name__}")
        return kind(**{name: _decode(hints[name], x) for name, x in value.items()})
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return None if value is None else _decode(next(k for k in typing.get_args(kind) if k is not type(None)), value)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{reprlib.repr(value)} must be a list")
        return tuple(_decode(typing.get_args(kind)[0], x) for x in value)
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is not kind:
        raise ValueError(f"{reprlib.repr(value)} must be {kind.__name__}")
    return value
