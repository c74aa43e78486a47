"""What a model needs of each device's memory: weights, KV cache, activations, and how many tokens find room."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from sarathi_jax.attention_cost import key_bytes
from sarathi_jax.config import ModelConfig, check_choice, check_instance, check_number, check_positive
from sarathi_jax.hardware import Device, find_device
from sarathi_jax.known_models import model_config
from sarathi_jax.models.parts import HeadLayout, ModelPart
from sarathi_jax.models.weight_specs import scale_spec
from sarathi_jax.shapes import round_up
from sarathi_jax.stage_split import split_layers

_GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2}

TPU_LANES = 128
"""On a TPU heads in the pool are padded to a multiple of this, which is how programs read them: those of 64 take the
room of 128. Weights are not: the compiler stores them with a longer axis last."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on each device of a pipeline stage. `state_bytes`: what sampling keeps of each sequence."""

    layers: range
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    room_bytes: int
    """Left for keys and values; negative where not even the rest fits."""

    @property
    def kv_tokens(self) -> int:
        return max(self.room_bytes // self.kv_bytes_per_token, 0)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A model on `tensor` x `pipeline` devices. `fits`: beside everything else there is room for a whole sequence."""

    model: ModelConfig
    device: Device
    tensor: int
    pipeline: int
    heads: HeadLayout
    usable_bytes: int
    max_model_len: int
    stages: tuple[StageMemory, ...]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values find room, in every stage."""
        return min(stage.kv_tokens for stage in self.stages)

    @property
    def spare_bytes(self) -> int:
        """On the fullest device beside one sequence of `max_model_len` tokens; negative is what is missing."""
        return min(stage.room_bytes - self.max_model_len * stage.kv_bytes_per_token for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    def __str__(self) -> str:
        gib = lambda num_bytes: f"{num_bytes / _GIB:8.2f}"
        end = f"fits, with {gib(self.spare_bytes).strip()} GiB to spare beside one"
        if not self.fits:
            end = f"does not fit: {gib(-self.spare_bytes).strip()} GiB are missing on a device for one"
        head = f"{self.heads.num_kv_heads} KV heads of {self.heads.num_groups} query heads"
        lines = [
            f"{self.tensor * self.pipeline} x {self.device.name}, TP{self.tensor} x PP{self.pipeline}: {head}",
            f"GiB on a device, {self.usable_bytes / _GIB:.2f} usable",
            "stage   layers   weights    state  activations    KV room   KV tokens",
        ]
        for i, stage in enumerate(self.stages):
            layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
            lines.append(
                f"{i:5}  {layers:>7}  {gib(stage.weight_bytes)} {gib(stage.state_bytes)}     "
                f"{gib(stage.activation_bytes)}   {gib(stage.room_bytes)}  {stage.kv_tokens:10,}"
            )
        return "\n".join([*lines, f"{self.kv_tokens:,} tokens; {end} sequence of {self.max_model_len:,}"])


def plan(
    model: str | ModelConfig,
    device: str | Device,
    count: int = 1,
    *,
    tensor: int | None = None,
    pipeline: int | None = None,
    dtype: str = "bfloat16",
    quantization: Literal["int8"] | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 128,
    max_step_tokens: int = 2048,
    memory_fraction: float = 0.9,
) -> MemoryPlan:
    """What `count` devices hold of a model: by its name in `known_models.MODELS`, on a device of `hardware.DEVICES`.

    Weights, cache and state are exact, activations an estimate of what the compiled step needs beside them.

    Args:
      tensor, pipeline: how the devices share it; None takes the largest tensor group within a node that neither copies
        nor pads heads.
      dtype: of weights and cache; `quantization` "int8" is that of matmuls' weights.
      max_model_len: a sequence of which must find room; None is the model's.
      max_num_seqs, max_step_tokens: sequences that run at once, and tokens of the largest iteration.
      memory_fraction: share of a device's memory that may be used.

    Raises:
      ValueError: sizes that do not multiply to `count`, or that the model cannot be split over, with those that work.
    """
    config = model_config(model) if isinstance(model, str) else check_instance("model", model, ModelConfig)
    device = find_device(device) if isinstance(device, str) else check_instance("device", device, Device)
    for name, value in (("count", count), ("max_num_seqs", max_num_seqs), ("max_step_tokens", max_step_tokens)):
        check_positive(name, value)
    if dtype not in _BYTES:
        raise ValueError(f"dtype={dtype!r} is not supported; known: {', '.join(_BYTES)}")
    if quantization is not None:
        check_choice("quantization", quantization, Literal["int8"])
    check_number("memory_fraction", memory_fraction, 1e-6, 1.0, "0 < memory_fraction <= 1")
    max_model_len = config.max_position if max_model_len is None else max_model_len
    check_positive("max_model_len", max_model_len)
    tensor, pipeline = _mesh(config, device, count, tensor, pipeline)
    usable = int(device.memory_bytes * memory_fraction)
    size, stages = _BYTES[dtype], []
    lanes = TPU_LANES if device.name.startswith("tpu") else 1
    for layers in split_layers(config, pipeline, device):
        part = ModelPart(config=config, layers=layers, tensor=tensor)
        weights = weight_bytes(part, size, quantization)
        state = state_bytes(part, max_num_seqs)
        activations = _activation_bytes(part, size, max_step_tokens, max_num_seqs)
        local = part.local_config
        head_size = round_up(local.head_dim, lanes)
        stages.append(
            StageMemory(
                layers=layers,
                weight_bytes=weights,
                state_bytes=state,
                activation_bytes=activations,
                kv_bytes_per_token=local.num_layers * key_bytes(local.num_kv_heads, head_size, size),
                room_bytes=usable - weights - state - activations,
            )
        )
    return MemoryPlan(
        model=config,
        device=device,
        tensor=tensor,
        pipeline=pipeline,
        heads=HeadLayout.choose(config, tensor),
        usable_bytes=usable,
        max_model_len=max_model_len,
        stages=tuple(stages),
    )


def weight_bytes(part: ModelPart, value_bytes: int, quantization: Literal["int8"] | None = None) -> int:
    """Of a part's weights on each of its devices."""
    size = lambda spec: prod(part.device_shape(spec))
    total = 0
    for spec in part.specs.values():
        if quantization and spec.num_inner:
            total += size(spec) + 4 * size(scale_spec(spec))
        else:
            total += size(spec) * value_bytes
    return total


def state_bytes(part: ModelPart, max_num_seqs: int) -> int:
    """Of the slots of sequences, which every device of the last stage has whole: see `sampler.SlotState`."""
    return (max_num_seqs + 1) * (4 + _num_logits(part) * (4 + 1 + 1 + 4)) if part.is_last else 0


def _activation_bytes(part: ModelPart, value_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """The most that is alive at one time of a step: in a layer, or where tokens are drawn."""
    c = part.local_config
    residual = 3 * 4 * num_tokens * c.hidden_size
    heads = num_tokens * c.head_dim * (c.num_heads + 2 * c.num_kv_heads) * (4 + value_bytes)
    widths = [c.expert_size * c.experts_per_token if kind.moe else c.intermediate_size for kind in c.layer_kinds]
    mlp = num_tokens * -(-max(widths) // part.tensor) * (4 * (1 + c.gated_mlp) + value_bytes)
    drawing = 3 * 4 * num_seqs * _num_logits(part) if part.is_last else 0
    return residual + max(heads, mlp, drawing)


def _num_logits(part: ModelPart) -> int:
    return -(-part.config.vocab_size // part.tensor) * part.tensor


def _mesh(config: ModelConfig, device: Device, count: int, tensor: int | None, pipeline: int | None) -> tuple[int, int]:
    """Tensor and pipeline sizes, chosen where they are None."""
    for name, value in (("tensor", tensor), ("pipeline", pipeline)):
        if value is not None:
            check_positive(name, value)
    pairs = [(size, count // size) for size in range(1, count + 1) if count % size == 0]
    fitting = [pair for pair in pairs if tensor in (None, pair[0]) and pipeline in (None, pair[1])]
    if not fitting:
        works = ", ".join(f"{t} x {p}" for t, p in pairs)
        raise ValueError(f"tensor={tensor} x pipeline={pipeline} is not count={count}; sizes that are: {works}")
    joined = device.links[-1][0]
    possible = [pair for pair in fitting if pair[0] <= config.num_heads and pair[1] <= config.num_layers] or fitting
    exact = [pair for pair in possible if pair[0] <= joined and HeadLayout.choose(config, pair[0]).is_exact(config)]
    return max(exact or possible[:1])
