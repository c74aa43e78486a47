"""Every weight of the decoder, declared once: shape, logical axes, and where it comes from in a checkpoint.

Initialisation, loading, quantisation and sharding all follow from this table (`weights.py`). The weights of a slot's
layers (`groups.py`) are stacked over a leading axis and named "layers<slot>.<name>".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sarathi_jax.config import LayerKind, ModelConfig
from sarathi_jax.models.groups import layer_groups

_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."


def _same(x: np.ndarray) -> np.ndarray:
    return x


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight of the model.

    `sources` are the checkpoint's tensors and their shapes, names with {layer} and {expert} to fill in; `pack` makes
    them into one entry: the whole weight, that of one of `layers`, or that of one of `num_experts` of a layer. The
    first `num_inner` axes of an entry are contracted in a matmul; 0 is no matmul.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: dict[str, tuple[int, ...]]
    pack: Callable[..., np.ndarray] = _same
    layers: range | None = None
    num_experts: int | None = None
    num_inner: int = 0

    @property
    def inner_axes(self) -> tuple[int, ...]:
        """Axes of the whole weight that are contracted in a matmul."""
        first = (self.layers is not None) + (self.num_experts is not None)
        return tuple(range(first, first + self.num_inner))

    def entries(self) -> Iterator[tuple[tuple[int, ...], list[str]]]:
        """Each entry's index and the names of its tensors."""
        if self.layers is None:
            yield (), list(self.sources)
            return
        for i, layer in enumerate(self.layers):
            if self.num_experts is None:
                yield (i,), [source.format(layer=layer) for source in self.sources]
                continue
            for expert in range(self.num_experts):
                yield (i, expert), [source.format(layer=layer, expert=expert) for source in self.sources]


def slot_prefix(slot: int) -> str:
    """What the names of a slot's weights begin with."""
    return f"layers{slot}."


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """The weights of a model of this configuration, by name, in a fixed order."""
    d, v = config.hidden_size, config.vocab_size

    def top(shape: tuple[int, ...], axes: tuple[str | None, ...], source: str) -> WeightSpec:
        return WeightSpec(shape=shape, axes=axes, sources={source: shape})

    specs = {"embed": top((v, d), ("vocab", "embed"), "model.embed_tokens.weight")}
    specs |= _norm(config, "final_norm", "model.norm")
    for group in layer_groups(config.layer_kinds):
        for place, kind in enumerate(group.kinds):
            layers, prefix = group.slot_layers(place), slot_prefix(group.first_slot + place)
            specs |= {prefix + name: _stacked(spec, layers) for name, spec in _layer_specs(config, kind).items()}
    if config.positions == "learned":
        specs["positions"] = top((config.max_position, d), (None, "embed"), "model.embed_positions.weight")
    if not config.tie_embeddings:
        specs["head"] = top((v, d), ("vocab", "embed"), "lm_head.weight")
    return specs


def _stacked(spec: WeightSpec, layers: range) -> WeightSpec:
    """A layer's weight (or an expert's), over all layers of a slot."""
    experts = () if spec.num_experts is None else (spec.num_experts,)
    prefix = _EXPERT if experts else _LAYER
    return replace(
        spec,
        shape=(len(layers), *experts, *spec.shape),
        axes=("layer", *(("expert",) if experts else ()), *spec.axes),
        sources={prefix + name: shape for name, shape in spec.sources.items()},
        layers=layers,
    )


def _layer_specs(config: ModelConfig, kind: LayerKind) -> dict[str, WeightSpec]:
    d, hd = config.hidden_size, config.head_dim
    specs = _norm(config, "attn_norm", "input_layernorm") | _attention(config)
    if config.block != "parallel_shared_norm":
        specs |= _norm(config, "mlp_norm", "post_attention_layernorm")
    specs |= _experts(config) if kind.moe else _mlp(config)
    if config.o_bias:
        specs["o_bias"] = WeightSpec(shape=(d,), axes=("embed",), sources={"self_attn.o_proj.bias": (d,)})
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            specs[name] = WeightSpec(shape=(hd,), axes=(None,), sources={f"self_attn.{name}.weight": (hd,)})
    if config.post_norms:
        specs |= _norm(config, "attn_post_norm", "self_attn.post_norm") | _norm(
            config, "mlp_post_norm", "mlp.post_norm"
        )
    return specs


def _norm(config: ModelConfig, name: str, source: str) -> dict[str, WeightSpec]:
    d = config.hidden_size
    specs = {name: WeightSpec(shape=(d,), axes=("embed",), sources={f"{source}.weight": (d,)})}
    if config.norm == "layer":
        specs[f"{name}_bias"] = WeightSpec(shape=(d,), axes=("embed",), sources={f"{source}.bias": (d,)})
    return specs


def _attention(config: ModelConfig) -> dict[str, WeightSpec]:
    d, k, g, hd = config.hidden_size, config.num_kv_heads, config.num_groups, config.head_dim
    sizes = {"q": k * g * hd, "k": k * hd, "v": k * hd}

    def sources(part: str, *tail: int) -> dict[str, tuple[int, ...]]:
        return {f"self_attn.{name}_proj.{part}": (size, *tail) for name, size in sizes.items()}

    def pack(q, key, value):
        """q [H D, d], k and v [K D, d] -> [d, K, G + 2, D]: each KV head beside its query heads, to shard together."""
        q, key, value = q.reshape(k, g, hd, -1), key.reshape(k, 1, hd, -1), value.reshape(k, 1, hd, -1)
        return np.moveaxis(np.concatenate([q, key, value], axis=1), -1, 0)

    specs = {
        "qkv": WeightSpec(
            shape=(d, k, g + 2, hd), axes=("embed", "kv_heads", None, None), sources=sources("weight", d), pack=pack,
            num_inner=1,
        ),
        "o": WeightSpec(
            shape=(k, g, hd, d), axes=("kv_heads", None, None, "embed"),
            sources={"self_attn.o_proj.weight": (d, k * g * hd)}, pack=lambda o: o.T.reshape(k, g, hd, d), num_inner=3,
        ),
    }  # fmt: skip
    if config.qkv_bias:
        specs["qkv_bias"] = WeightSpec(
            shape=(k, g + 2, hd),
            axes=("kv_heads", None, None),
            sources=sources("bias"),
            pack=lambda *qkv: pack(*qkv)[0],
        )
    return specs


def _mlp(config: ModelConfig) -> dict[str, WeightSpec]:
    d, f = config.hidden_size, config.intermediate_size
    down = WeightSpec(
        shape=(f, d), axes=("mlp", "embed"), sources={"mlp.down_proj.weight": (d, f)}, pack=np.transpose, num_inner=1
    )
    if config.gated_mlp:
        specs = {
            "gate_up": WeightSpec(
                shape=(d, 2, f), axes=("embed", None, "mlp"), pack=_pack_gate_up, num_inner=1,
                sources={"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)},
            ),
            "down": down,
        }  # fmt: skip
        bias = WeightSpec(
            shape=(2, f), axes=(None, "mlp"), pack=lambda gate, up: np.stack([gate, up]),
            sources={"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,)},
        )  # fmt: skip
    else:
        up = WeightSpec(
            shape=(d, f), axes=("embed", "mlp"), sources={"mlp.up_proj.weight": (f, d)}, pack=np.transpose, num_inner=1
        )
        specs = {"up": up, "down": down}
        bias = WeightSpec(shape=(f,), axes=("mlp",), sources={"mlp.up_proj.bias": (f,)})
    if config.mlp_bias:
        specs["gate_up_bias" if config.gated_mlp else "up_bias"] = bias
        specs["down_bias"] = WeightSpec(shape=(d,), axes=("embed",), sources={"mlp.down_proj.bias": (d,)})
    return specs


def _experts(config: ModelConfig) -> dict[str, WeightSpec]:
    d, f, e = config.hidden_size, config.expert_size, config.num_experts
    return {
        "router": WeightSpec(
            shape=(d, e), axes=("embed", None), sources={"mlp.gate.weight": (e, d)}, pack=np.transpose
        ),
        "experts_gate_up": WeightSpec(
            shape=(d, 2, f), axes=("embed", None, "mlp"), pack=_pack_gate_up, num_inner=1, num_experts=e,
            sources={"gate_proj.weight": (f, d), "up_proj.weight": (f, d)},
        ),
        "experts_down": WeightSpec(
            shape=(f, d), axes=("mlp", "embed"), pack=np.transpose, num_experts=e, num_inner=1,
            sources={"down_proj.weight": (d, f)},
        ),
    }  # fmt: skip


def _pack_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.stack([gate.T, up.T], axis=1)


def scale_spec(spec: WeightSpec) -> WeightSpec:
    """The scales of a weight in int8: one for each output channel of an entry."""
    kept = [i for i in range(len(spec.shape)) if i not in spec.inner_axes]
    shape, axes = tuple(spec.shape[i] for i in kept), tuple(spec.axes[i] for i in kept)
    return replace(spec, shape=shape, axes=axes, sources={}, num_inner=0)
