"""What a checkpoint is, and the one way to open one: by name, GGUF file, or folder."""

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
from sarathi_jax.models.random_model import PREFIX, RandomModel
from sarathi_jax.models.saved import MODEL_FILE, SavedModel
from sarathi_jax.tokenizer import Tokenizer


@runtime_checkable
class Checkpoint(Protocol):
    """A model to load: its config, where its weights are, and its tokenizer.

    One of `TensorCheckpoint`, `SavedModel` and `RandomModel`; `weights.load_weights` knows what to do with each.
    """

    config: ModelConfig
    source: str
    """Where it was read from, for messages."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def tokenizer(self) -> Tokenizer | None: ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, for a saved model; none where there is no tokenizer."""
        ...


@runtime_checkable
class TensorCheckpoint(Checkpoint, Protocol):
    """Stored weights under Hugging Face's Llama names, read one tensor at a time.

    Names are such as `model.embed_tokens.weight` [V, D], `model.layers.0.self_attn.q_proj.weight` [out, in] (and
    `.bias`), `model.layers.0.mlp.experts.0.gate_proj.weight`, `model.layers.0.input_layernorm.weight`,
    `model.norm.weight`, `lm_head.weight` (not with tied embeddings): those that `weights.weight_specs` lists. Tensors
    nobody knows are in `names` as they are stored.
    """

    @property
    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_name(self, name: str) -> str:
        """What the file calls that tensor (or the one it is a part of), for messages."""
        ...

    def read(self, name: str) -> np.ndarray:
        """float32, float16 or bfloat16 as stored, float32 for quantised ones; possibly a read-only view of the file."""
        ...


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model: a name of `hub.MODELS`, `random:<name>`, a GGUF file, a saved model, a folder in Hugging Face's
    layout, or a hub name `org/name`.

    ValueError for what none of these is, or for a file that is corrupt or of an unsupported model.
    """
    name = str(path)
    if name in hub.MODELS:
        return GGUFCheckpoint(hub.fetch(name))
    if name.startswith(PREFIX):
        return RandomModel(name)
    path = Path(path).expanduser()
    if (path / MODEL_FILE).is_file():
        return SavedModel(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model {name!r} is a folder without config.json; known formats: a folder in Hugging Face's layout "
                f"(config.json, tokenizer.json, safetensors), a saved model ({MODEL_FILE}), or a .gguf file, passed by "
                "its own path"
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
        f"model {name!r} is not found; pass one of the names {', '.join(hub.MODELS)}, random:<name>, a .gguf file, a "
        "folder in Hugging Face's layout (config.json, safetensors), or a hub name org/name"
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
