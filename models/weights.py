"""Weights onto devices: read from a checkpoint tensor by tensor, restored, or drawn at random; in int8 if wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from sarathi_jax.config import ModelConfig, check_choice
from sarathi_jax.models.checkpoint import Checkpoint, TensorCheckpoint
from sarathi_jax.models.parts import ModelPart
from sarathi_jax.models.random_model import RandomModel
from sarathi_jax.models.saved import SavedModel
from sarathi_jax.models.weight_specs import WeightSpec, scale_spec, weight_specs

Quantization = Literal["int8"]
Placement = Callable[[WeightSpec], Sharding | None]
"""Where a weight goes, by its shape and logical axes; None is the default device."""


def load_weights(
    checkpoint: Checkpoint,
    dtype: DTypeLike,
    *,
    place: Placement = lambda spec: None,
    quantization: Quantization | None = None,
    part: ModelPart | None = None,
) -> dict[str, Array]:
    """All weights in `dtype`, where `place` wants them; or those of a `part`, laid out for its devices.

    Tensors are read one at a time: the host holds one weight at most beside the model. Saved models are restored, and
    random ones drawn, on the devices; of these there is no part of a saved one, and a part draws its own numbers.

    Args:
      quantization: "int8" rounds the weights of matmuls (all but embedding, head and router) to 8 bits, with a float32
        scale for each output channel, named "<name>_scale". A model saved in int8 has them in any case.

    Raises:
      ValueError: tensors missing from the checkpoint, tensors nobody asks for, or shapes that disagree: all are listed,
        before anything is read.
    """
    config = checkpoint.config
    if quantization is not None:
        check_choice("quantization", quantization, Quantization)
    if isinstance(checkpoint, SavedModel):
        from sarathi_jax.models.orbax_weights import restore_weights  # Orbax takes long to import

        assert part is None, "a saved model is cut after it has been restored"
        stored = weight_shapes(config, dtype, place=place, quantization=checkpoint.quantization)
        weights = restore_weights(checkpoint.weights_path, stored)
        convert = quantization is not None and checkpoint.quantization is None
        return _to_int8(weights, weight_specs(config), place) if convert else weights
    if isinstance(checkpoint, RandomModel):
        weights = init_weights(config, dtype, place=place, specs=part and part.specs)
        specs = weight_specs(config) if part is None else part.specs
        return _to_int8(weights, specs, place) if quantization else weights
    assert isinstance(checkpoint, TensorCheckpoint)
    _check_tensors(checkpoint)
    weights: dict[str, Array] = {}
    for name, spec in (weight_specs(config) if part is None else part.specs).items():
        weight = jax.block_until_ready(_read(checkpoint, spec, dtype, place(spec)))  # the host lets go of its copy
        weights |= _quantized(name, weight, spec, place) if quantization else {name: weight}
    return weights


def weight_shapes(
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    place: Placement = lambda spec: None,
    quantization: Quantization | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """What `load_weights` gives, without the numbers."""
    default = SingleDeviceSharding(jax.devices()[0])
    struct = lambda spec, dtype: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=place(spec) or default)
    shapes = {}
    for name, spec in weight_specs(config).items():
        if quantization and spec.num_inner:
            shapes |= {name: struct(spec, jnp.int8), f"{name}_scale": struct(scale_spec(spec), jnp.float32)}
        else:
            shapes[name] = struct(spec, dtype)
    return shapes


def init_weights(
    config: ModelConfig,
    dtype: DTypeLike,
    seed: int = 0,
    scale: float = 0.02,
    *,
    place: Placement = lambda spec: None,
    specs: Mapping[str, WeightSpec] | None = None,
) -> dict[str, Array]:
    """Random weights (of these `specs`, if not all), drawn where `place` wants them.

    Normal with deviation `scale`, norms around 1. For tests and for timing without weights.
    """
    specs = weight_specs(config) if specs is None else specs

    def draw(key: Array) -> dict[str, Array]:
        weights = {}
        for i, (name, spec) in enumerate(specs.items()):
            noise = jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32) * scale
            mean = 1.0 - config.norm_offset if name.endswith("norm") else 0.0
            weights[name] = (mean + noise).astype(dtype)
        return weights

    # One program, not a few for each weight; rbg compiles several times faster than threefry.
    shardings = {name: place(spec) for name, spec in specs.items()}
    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed, impl="rbg"))


def land(array: np.ndarray, sharding: Sharding) -> Array:
    """An array onto the devices, each its own part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _read(checkpoint: TensorCheckpoint, spec: WeightSpec, dtype: DTypeLike, sharding: Sharding | None) -> Array:
    """A weight, tensor by tensor. Of one that is split the host holds the parts of its own devices and no more."""
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        array = np.empty(spec.shape, jnp.dtype(dtype))
        for index, names in spec.entries():
            array[index] = spec.pack(*map(checkpoint.read, names))
        return jax.device_put(array, sharding)
    indices = sharding.addressable_devices_indices_map(spec.shape)
    where = {device: _bounds(index, spec.shape) for device, index in indices.items()}
    parts = {bounds: np.empty([stop - start for start, stop in bounds], jnp.dtype(dtype)) for bounds in where.values()}
    for index, names in spec.entries():
        entry = spec.pack(*map(checkpoint.read, names))
        for bounds, part in parts.items():  # leading axes, layers and experts, are not split
            part[index] = entry[tuple(slice(*bound) for bound in bounds[len(index) :])]
    shards = [jax.device_put(parts[bounds], device) for device, bounds in where.items()]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _to_int8(weights: dict[str, Array], specs: Mapping[str, WeightSpec], place: Placement) -> dict[str, Array]:
    """The weights of a model, those of matmuls in int8; each is let go when it is converted."""
    converted: dict[str, Array] = {}
    for name, spec in specs.items():
        converted |= _quantized(name, weights.pop(name), spec, place)
    return converted


def _quantized(name: str, weight: Array, spec: WeightSpec, place: Placement) -> dict[str, Array]:
    """A weight in int8 with its scales, or as it is where it is no matmul's."""
    if not spec.num_inner:
        return {name: weight}

    def convert(w: Float[Array, "*_"]) -> tuple[Int8[Array, "*_"], Float[Array, "*_"]]:
        largest = jnp.max(jnp.abs(w), axis=spec.inner_axes, keepdims=True).astype(jnp.float32)
        scale = jnp.where(largest > 0, largest / 127.0, 1.0)
        return jnp.round(w.astype(jnp.float32) / scale).astype(jnp.int8), jnp.squeeze(scale, spec.inner_axes)

    rounded, scale = jax.jit(convert, out_shardings=(place(spec), place(scale_spec(spec))))(weight)
    return {name: rounded, f"{name}_scale": scale}


def _check_tensors(checkpoint: TensorCheckpoint) -> None:
    config, names = checkpoint.config, checkpoint.names
    num_experts = config.num_experts * sum(kind.moe for kind in config.layer_kinds)
    if config.num_layers + num_experts > len(names):  # before the names of all those layers and experts are built
        raise ValueError(
            f"checkpoint {checkpoint.source} does not fit its config: the config has {config.num_layers} layers"
            + (f" with {num_experts} experts" if num_experts else "")
            + f" and the checkpoint {len(names)} tensors"
        )
    wanted = {
        name: shape
        for spec in weight_specs(config).values()
        for _, sources in spec.entries()
        for name, shape in zip(sources, spec.sources.values(), strict=True)
    }
    problems = []
    for label, found in (("missing", wanted.keys() - names), ("not understood", names - wanted.keys())):
        if found:
            found = {checkpoint.stored_name(name) for name in found}
            shown = ", ".join(sorted(found)[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
            problems.append(f"{len(found)} tensors {label}: {shown}")
    for name in sorted(wanted.keys() & names):
        if tuple(checkpoint.shape(name)) != wanted[name]:
            problems.append(
                f"{checkpoint.stored_name(name)} has shape {tuple(checkpoint.shape(name))}, the config asks for "
                f"{wanted[name]}"
            )
    if problems:
        raise ValueError(f"checkpoint {checkpoint.source} does not fit its config: " + "; ".join(problems[:20]))
