"""What the loader asks of stored weights, and the one way to open them: by name, GGUF file, or folder."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from sarathi_jax.config import ModelConfig
from sarathi_jax.models import hub
from sarathi_jax.models.gguf_file import GGUFCheckpoint
from sarathi_jax.models.hf_folder import HFCheckpoint
from sarathi_jax.tokenizer import Tokenizer


@runtime_checkable
class Checkpoint(Protocol):
    """Stored weights under Hugging Face's Llama names, read one tensor at a time.

    Names are such as `model.embed_tokens.weight` [V, D], `model.layers.0.self_attn.q_proj.weight` [out, in] (and
    `.bias`), `model.layers.0.self_attn.q_norm.weight`, `model.layers.0.mlp.gate_proj.weight`,
    `model.layers.0.input_layernorm.weight`, `model.layers.0.post_attention_layernorm.weight`, `model.norm.weight`,
    `lm_head.weight` (not with tied embeddings). Tensors of other names are in `names` as they are stored.
    """

    config: ModelConfig
    source: str
    """Where it was read from, for messages."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray:
        """float32, float16 or bfloat16 as stored, float32 for quantised ones; possibly a read-only view of the file."""
        ...

    def tokenizer(self) -> Tokenizer: ...


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model by name (`hub.MODELS`), by GGUF file, by folder in Hugging Face's layout, or by hub name `org/name`.

    ValueError for what none of these is, or for a file that is corrupt or of an unsupported model.
    """
    name = str(path)
    if name in hub.MODELS:
        return GGUFCheckpoint(hub.fetch(name))
    path = Path(path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model {name!r} is a folder without config.json; known formats: a folder in Hugging Face's layout "
                "(config.json, tokenizer.json, safetensors), or a .gguf file, passed by its own path"
            )
        return HFCheckpoint(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return GGUFCheckpoint(path)
        raise ValueError(
            f"model {name!r} is a file but no .gguf; pass a GGUF file or the folder that holds config.json"
        )
    if _HUB_NAME.fullmatch(name) and not name.lower().endswith(".gguf"):
        return HFCheckpoint(_from_hub(name))
    raise ValueError(
        f"model {name!r} is not found; pass one of the names {', '.join(hub.MODELS)}, a .gguf file, a folder in "
        "Hugging Face's layout (config.json, safetensors), or a hub name org/name"
    )


def _from_hub(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"model {name!r} is no local path, and fetching it as a hub name needs huggingface_hub, which is not "
            "installed; pip install 'sarathi_jax[hub]', or pass a local folder"
        )
    huggingface_hub = importlib.import_module("huggingface_hub")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # many kinds, network and hub alike; each gets the same advice
        raise RuntimeError(
            f"model {name!r} is no local path, and fetching it as a hub name failed ({type(error).__name__}: {error}); "
            "check the name and the network, or pass a local folder"
        ) from error
