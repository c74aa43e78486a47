"""Weights to and from an Orbax checkpoint, every device its own part: the host holds no copy of the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array


def write_weights(path: Path, weights: Mapping[str, Array]) -> None:
    """Save to a folder that is not there yet; each device writes what it holds."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), dict(weights))


def restore_weights(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """The weights of these names and shapes, in their dtypes, straight onto their shardings.

    One after the other, the largest first: Orbax would hold several beside the model.

    ValueError where the checkpoint is missing, damaged, or holds other weights.
    """
    weights = {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            _check(dict(checkpointer.metadata(path.absolute()).item_metadata), wanted)
            for name in sorted(wanted, key=lambda name: -math.prod(wanted[name].shape)):
                item = {name: wanted[name]}
                args = ocp.args.PyTreeRestore(
                    item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
                )
                weights |= checkpointer.restore(path.absolute(), args=args)
    except Exception as error:  # of many kinds, from Orbax and TensorStore
        raise ValueError(f"{path}: cannot be restored ({type(error).__name__}: {error})") from error
    return {name: weights[name] for name in wanted}


def _check(metadata: Mapping, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    stored = {name: tuple(leaf.shape) for name, leaf in metadata.items()}
    needed = {name: leaf.shape for name, leaf in wanted.items()}
    if wrong := sorted(name for name in stored.keys() | needed.keys() if stored.get(name) != needed.get(name)):
        raise ValueError(
            f"does not fit its config in {len(wrong)} weights, such as {wrong[0]}: {stored.get(wrong[0])} is stored, "
            f"{needed.get(wrong[0])} is needed"
        )
