"""A model's parts on their meshes: loaded there, or taken from a model that stands elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from sarathi_jax import parallel
from sarathi_jax.attention import Backend
from sarathi_jax.axes import TENSOR
from sarathi_jax.config import ModelConfig, check_instance
from sarathi_jax.models.checkpoint import Checkpoint
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.parts import ModelPart
from sarathi_jax.models.saved import SavedModel
from sarathi_jax.models.weight_specs import scale_spec, weight_specs
from sarathi_jax.models.weights import Quantization, land, load_weights
from sarathi_jax.parallel import Parallel
from sarathi_jax.stage_split import split_layers


def is_shared(plan: Parallel | None) -> TypeGuard[Parallel]:
    """Whether it asks for more than the default device."""
    return plan is not None and check_instance("parallel", plan, Parallel) != Parallel()


def layout(config: ModelConfig, plan: Parallel) -> tuple[list[ModelPart], list[Mesh]]:
    """The parts of a model for one replica, and the meshes they go to.

    ValueError where there are too few devices, or more than the model can be split over.
    """
    if plan.data > 1:
        raise ValueError(f"data={plan.data}: an engine is one replica; use LLM or replicas.Replicas")
    [meshes] = plan.meshes()
    if jax.process_count() > 1 and (plan.pipeline > 1 or not meshes[0].local_devices):
        raise ValueError(
            f"tensor={plan.tensor} x pipeline={plan.pipeline} leaves processes without a part in every layer; in "
            f"several processes use pipeline=1 and tensor={jax.device_count()}, all their devices"
        )
    stages = split_layers(config, plan.pipeline)
    return [ModelPart(config=config, layers=layers, tensor=plan.tensor) for layers in stages], meshes


class PlacedPart(NamedTuple):
    """A part of a model on its mesh. `decoder` is what a device runs under `jax.shard_map`, with the weights of all."""

    part: ModelPart
    mesh: Mesh
    decoder: Decoder


def load_parts(
    checkpoint: Checkpoint,
    dtype: DTypeLike,
    parts: Sequence[ModelPart],
    meshes: Sequence[Mesh],
    *,
    quantization: Quantization | None = None,
    attention: Backend | None = None,
) -> list[PlacedPart]:
    """The weights of a checkpoint as `load_weights` reads them, each part's on its mesh.

    A saved model is restored spread over all devices first, and passed on weight by weight.
    """
    if isinstance(checkpoint, SavedModel):
        everywhere = parallel.tensor_mesh([device for mesh in meshes for device in mesh.devices.flat])
        place = lambda spec: parallel.spread(everywhere, spec.shape)
        weights = load_weights(checkpoint, dtype, place=place, quantization=quantization)
        return _cut(checkpoint.config, weights, parts, meshes, attention)
    placed = []
    for part, mesh in zip(parts, meshes, strict=True):
        place = lambda spec, mesh=mesh: parallel.sharding(mesh, spec.axes)
        weights = load_weights(checkpoint, dtype, place=place, quantization=quantization, part=part)
        placed.append(_placed(part, mesh, weights, attention))
    return placed


def place_model(model: Decoder, parts: Sequence[ModelPart], meshes: Sequence[Mesh]) -> list[PlacedPart]:
    """A whole model's weights on these meshes; those of the model stay where they are."""
    weights = {name: weight[...] for name, weight in model.weights.items()}
    return _cut(model.config, weights, parts, meshes, model.attention)


def _placed(part: ModelPart, mesh: Mesh, weights: dict[str, Array], attention: Backend | None) -> PlacedPart:
    return PlacedPart(part, mesh, Decoder(part.local_config, weights, attention=attention, axis=TENSOR))


class _Move(NamedTuple):
    """A weight of part `part` out of a whole model's: all of one, or a layer of each of several, by name and index."""

    part: int
    name: str
    axes: tuple[str | None, ...]
    sources: list[tuple[str, int | None]]


def _cut(
    config: ModelConfig,
    weights: dict[str, Array],
    parts: Sequence[ModelPart],
    meshes: Sequence[Mesh],
    attention: Backend | None,
) -> list[PlacedPart]:
    """The parts of a whole model. Takes weights out of `weights` as they have been placed."""
    whole = weight_specs(config)
    homes: dict[tuple[str, int], tuple[str, int | None]] = {
        (name.partition(".")[2], layer): (name, index)
        for name, spec in whole.items()
        for index, layer in enumerate(spec.layers or ())
    }
    order = {name: place for place, name in enumerate(whole)}
    moves: list[_Move] = []
    for i, part in enumerate(parts):
        for name, spec in part.logical_specs.items():
            short = name.partition(".")[2]
            sources: list[tuple[str, int | None]] = [homes[short, layer] for layer in spec.layers or ()]
            sources = sources or [(name, None)]
            moves.append(_Move(i, name, spec.axes, sources))
            if f"{sources[0][0]}_scale" in weights:
                scales = [(f"{source}_scale", index) for source, index in sources]
                moves.append(_Move(i, f"{name}_scale", scale_spec(spec).axes, scales))
    moves.sort(key=lambda move: max(order[name.removesuffix("_scale")] for name, _ in move.sources))
    left = Counter(name for move in moves for name in dict(move.sources))
    placed: list[dict[str, Array]] = [{} for _ in parts]
    for move in moves:
        placed[move.part][move.name] = _placed_weight(move, weights, parts[move.part], meshes[move.part])
        for name in dict(move.sources):
            left[name] -= 1
            if not left[name]:
                del weights[name]
    return [_placed(*each, attention) for each in zip(parts, meshes, placed, strict=True)]


def _placed_weight(move: _Move, weights: dict[str, Array], part: ModelPart, mesh: Mesh) -> Array:
    on_host = all(weights[name].is_fully_addressable for name in dict(move.sources))
    xp = np if on_host else jnp
    arrays = {name: np.asarray(weights[name]) if on_host else weights[name] for name in dict(move.sources)}
    if move.sources[0][1] is None:
        array = arrays[move.name]
    else:
        array = xp.stack([arrays[name][index] for name, index in move.sources])
    array, sharding = part.arrange(move.axes, array, xp), parallel.sharding(mesh, move.axes)
    return land(array, sharding) if on_host else jax.device_put(array, sharding)
