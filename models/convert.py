"""Any checkpoint that is read here to a saved model: weights as the decoder has them, in Orbax's format."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array

from sarathi_jax.config import ModelConfig
from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.orbax_weights import write_weights
from sarathi_jax.models.saved import write_description
from sarathi_jax.models.weights import Quantization, load_weights


def convert(
    source: str | Path, target: str | Path, *, dtype: str = "bfloat16", quantization: Quantization | None = None
) -> None:
    """Save the model `source` (a name, a GGUF file, a Hugging Face folder or hub name) in the new folder `target`.

    Weights are stored in `dtype` ("float32" or "bfloat16"), those of matmuls in int8 if so wanted. `LLM(target)` and
    `open_checkpoint(target)` read them.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} must be 'float32' or 'bfloat16'")
    _check_free(Path(target))
    checkpoint = open_checkpoint(source)
    save_model(
        target,
        checkpoint.config,
        load_weights(checkpoint, jnp.dtype(dtype), quantization=quantization),
        eos_token_ids=checkpoint.eos_token_ids,
        tokenizer_files=checkpoint.tokenizer_files(),
    )


def save_model(
    target: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Array],
    *,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer_files: Mapping[str, bytes] | None = None,
) -> None:
    """Save weights, on whatever devices they are, and what belongs to them in the new folder `target`.

    The folder appears when all of it is written. What there is before lies in a hidden one beside it, which is no model
    until its last file.
    """
    target = Path(target)
    _check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_weights(temporary / "weights", weights)
        write_description(  # last: without it the folder is no model
            temporary,
            config,
            eos_token_ids=tuple(eos_token_ids),
            tokenizer_files=tokenizer_files or {},
            quantization="int8" if any(name.endswith("_scale") for name in weights) else None,
        )
        temporary.chmod(0o755)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_free(target: Path) -> None:
    if target.exists():
        raise ValueError(f"target={str(target)!r} exists already; give a new folder, or remove it")
