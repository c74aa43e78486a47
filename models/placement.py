"""A model's parts on their meshes: loaded there, or taken from a model that stands elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
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

    ValueError where there are too few devices, or more than the model can be split over, or devices of some processes
    and not of others.
    """
    if plan.data > 1:
        raise ValueError(f"data={plan.data}: an engine is one replica; use LLM or replicas.Replicas")
    [meshes] = plan.meshes()
    owners = {device.process_index for mesh in meshes for device in mesh.devices.flat}
    if owners not in ({jax.process_index()}, set(range(jax.process_count()))):
        raise ValueError(
            f"tensor={plan.tensor} x pipeline={plan.pipeline} is on devices of processes {sorted(owners)}, of "
            f"{jax.process_count()}: an engine is of all processes (they have {jax.device_count()} devices), or of "
            f"one alone (devices=jax.local_devices())"
        )
    stages = split_layers(config, plan.pipeline)
    return [ModelPart(config=config, layers=layers, tensor=plan.tensor) for layers in stages], meshes


class PlacedPart(NamedTuple):
    """A part of a model on its mesh. `decoder` is what a device runs under `jax.shard_map`, with the weights of all;
    None where this process has none of the devices."""

    part: ModelPart
    mesh: Mesh
    decoder: Decoder | None


def load_parts(
    checkpoint: Checkpoint,
    dtype: DTypeLike,
    parts: Sequence[ModelPart],
    meshes: Sequence[Mesh],
    *,
    quantization: Quantization | None = None,
    attention: Backend | None = None,
) -> list[PlacedPart]:
    """The weights of a checkpoint as `load_weights` reads them, each part's on its mesh; a process reads its parts.

    A saved model is restored spread over all devices first, and passed on weight by weight.
    """
    if isinstance(checkpoint, SavedModel):
        everywhere = parallel.tensor_mesh([device for mesh in meshes for device in mesh.devices.flat])
        place = lambda spec: parallel.spread(everywhere, spec.shape)
        weights = load_weights(checkpoint, dtype, place=place, quantization=quantization)
        return _cut(checkpoint.config, weights, parts, meshes, attention)
    placed = []
    for part, mesh in zip(parts, meshes, strict=True):
        weights = {}
        if mesh.local_devices:
            place = lambda spec, mesh=mesh: parallel.sharding(mesh, spec.axes)
            weights = load_weights(checkpoint, dtype, place=place, quantization=quantization, part=part)
        placed.append(_placed(part, mesh, weights, attention))
    return placed


def place_model(model: Decoder, parts: Sequence[ModelPart], meshes: Sequence[Mesh]) -> list[PlacedPart]:
    """A whole model's weights on these meshes; those of the model stay where they are."""
    weights = {name: weight[...] for name, weight in model.weights.items()}
    return _cut(model.config, weights, parts, meshes, model.attention)


def _placed(part: ModelPart, mesh: Mesh, weights: dict[str, Array], attention: Backend | None) -> PlacedPart:
    here = bool(mesh.local_devices)
    decoder = Decoder(part.local_config, weights, attention=attention, axis=TENSOR) if here else None
    return PlacedPart(part, mesh, decoder)


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
    stages = parallel.joined(meshes)
    for move in moves:
        weight = _placed_weight(move, weights, parts[move.part], meshes[move.part], stages)
        if weight is not None:
            placed[move.part][move.name] = weight
        for name in dict(move.sources):
            left[name] -= 1
            if not left[name]:
                del weights[name]
    return [_placed(*each, attention) for each in zip(parts, meshes, placed, strict=True)]


def _placed_weight(move: _Move, weights: dict[str, Array], part: ModelPart, mesh: Mesh, stages: Mesh) -> Array | None:
    """The weight on the part's mesh; None where this process has none of its devices.

    What is on the devices of several processes passes through those of all `stages`, a moment's copy in each: to be
    called by all, in the same order.
    """
    names = list(dict(move.sources))
    target = parallel.sharding(mesh, move.axes)

    def arranged(arrays: dict[str, Any], xp: Any) -> Any:
        if move.sources[0][1] is None:
            return part.arrange(move.axes, arrays[move.name], xp)
        return part.arrange(move.axes, xp.stack([arrays[name][index] for name, index in move.sources]), xp)

    if all(weights[name].is_fully_addressable for name in names):
        if not mesh.local_devices:
            return None
        return land(arranged({name: np.asarray(weights[name]) for name in names}, np), target)
    everywhere = NamedSharding(stages, target.spec)
    array = jax.jit(lambda arrays: arranged(arrays, jnp), out_shardings=everywhere)(
        {name: weights[name] for name in names}
    )
    own = set(mesh.local_devices)
    shards = [shard.data for shard in array.addressable_shards if shard.device in own]
    return jax.make_array_from_single_device_arrays(array.shape, target, shards) if own else None
