"""Frozen configuration. Every dataclass checks itself when it is made; nothing is silently rounded."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Block = Literal["sequential", "parallel", "parallel_shared_norm"]
Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned"]

MAX_LAYERS = 1000
"""Far more than any model has: every layer is looked at."""


_T = TypeVar("_T")


def check_instance(name: str, value: Any, kind: type[_T]) -> _T:
    """`value`, or ValueError unless it is of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} must be {kind.__name__}")
    return value


def check_positive(name: str, value: Any, *, knob: str = "") -> None:
    """Raise ValueError unless `value` is an int >= 1 (bools are not ints here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer >= 1{'; ' + knob if knob else ''}")


def check_int(name: str, value: Any, low: int, high: int, rule: str) -> None:
    """Raise ValueError unless `value` is an integer (NumPy's too, a bool never) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be an integer; {rule}")
    check_number(name, value, low, high, rule)


def check_number(name: str, value: Any, low: float, high: float, rule: str) -> None:
    """Raise ValueError unless `value` is a number in [low, high]; NaN never is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be a number; {rule}")
    if not low <= value <= high:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name}={value!r} is out of range; {rule}")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ValueError unless `value` is one of a Literal's values."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not supported; known: {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched, under Hugging Face's names for the kinds and fields.

    `original_max_position` is the context the model was trained at (dynamic, llama3, yarn, longrope). `short_factors`
    and `long_factors` divide the frequencies one by one (longrope): the long ones where the sequence is longer than
    that context.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kinds = get_args(RopeKind)
        if self.kind not in kinds:
            raise ValueError(f"rope scaling kind {self.kind!r} is not supported; known: {', '.join(kinds)}")
        check_number("rope scaling factor", self.factor, 1.0, 1e6, "1 <= factor <= 1e6")
        if self.kind in ("llama3", "yarn", "dynamic", "longrope") and self.original_max_position is None:
            raise ValueError(f"rope scaling {self.kind!r} needs original_max_position_embeddings")
        if self.original_max_position is not None:
            check_positive("original_max_position", self.original_max_position)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_number(name, getattr(self, name), 1e-6, 1e6, f"1e-6 <= {name} <= 1e6")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling 'llama3' has low_freq_factor={self.low_freq_factor!r}; it must be less than "
                f"high_freq_factor={self.high_freq_factor!r}"
            )
        if self.kind == "yarn" and not self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope scaling 'yarn' has beta_slow={self.beta_slow!r}; it must be less than "
                f"beta_fast={self.beta_fast!r}"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1e-6, 1e6, f"{name} is None, or 1e-6 <= {name} <= 1e6")
        for name in ("short_factors", "long_factors"):
            if bool(getattr(self, name)) != (self.kind == "longrope"):
                raise ValueError(
                    f"rope scaling {self.kind!r} has {name}={getattr(self, name)!r}; longrope alone has it"
                )
            for value in getattr(self, name):
                check_number(name, value, 1e-6, 1e6, f"each of {name} is from 1e-6 to 1e6")
        if self.kind == "longrope" and self.factor > 1.0 and self.original_max_position == 1:
            raise ValueError("rope scaling 'longrope' needs original_max_position > 1")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What a layer does that others of its model may not: layers of one kind share a compiled loop body.

    `window` None is full attention, `rope` None no rotary positions; "local" are those of base `local_rope_theta`.
    """

    window: int | None
    rope: Literal["main", "local"] | None
    moe: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    A pattern says which layers have something, and is repeated: layer l has it if `pattern[l % len(pattern)]`.

    Attributes:
      intermediate_size: width of the MLP; of the dense layers' if others have experts.
      block: "sequential" adds attention, then the MLP of the sum; "parallel" feeds both from the same residual stream,
        through a norm each or through one ("parallel_shared_norm").
      norm: RMSNorm with a scale, or LayerNorm with scale and bias.
      norm_offset: added to the norms' stored scales (Gemma's 1).
      post_norms: a norm after attention and one after the MLP as well (Gemma 2 and 3).
      qk_norm: RMSNorm over each head of queries and keys.
      gated_mlp: act(x gate) * (x up), or else act(x up).
      positions: "rope", or "learned" embeddings, added to the tokens'.
      rope_theta: base of the rotary frequencies; `local_rope_theta`, unscaled, is that of layers with a window.
      rotary_dim: how many of a head's first dimensions are rotated; None is all.
      rope_pattern: layers with rotary positions (the others have none: NoPE).
      sliding_window: keys a query sees, itself included (Hugging Face's convention); None is full attention.
      window_pattern: layers that have the window.
      query_scale: factor on the scores; None is head_dim ** -0.5.
      attention_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap).
      embed_scale: factor on the embeddings (rounded to the weights' dtype).
      num_experts: experts of a layer with a mixture; 0 is no mixture. A token goes through `experts_per_token` of
        them, each a gated MLP of width `expert_size`, weighted by their softmax probabilities, which `norm_topk_prob`
        makes sum to one.
      moe_pattern: layers that have experts.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    block: Block = "sequential"
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    hidden_act: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    local_rope_theta: float | None = None
    rotary_dim: int | None = None
    rope_pattern: tuple[bool, ...] = (True,)
    sliding_window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk_prob: bool = True
    moe_pattern: tuple[bool, ...] = (True,)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            check_positive(name, getattr(self, name))
        check_positive("head_dim", self.head_dim)
        check_positive("max_position", self.max_position)
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers={self.num_layers} must be at most {MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        for name, choices in (("block", Block), ("norm", Norm), ("positions", Positions), ("hidden_act", Activation)):
            check_choice(name, getattr(self, name), choices)
        check_number("norm_eps", self.norm_eps, 1e-30, 1e30, "norm_eps > 0 and finite")
        check_number("norm_offset", self.norm_offset, 0.0, 1.0, "0 <= norm_offset <= 1")
        check_number("embed_scale", self.embed_scale, 1e-30, 1e30, "embed_scale > 0 and finite")
        for name in ("query_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1e-30, 1e30, f"{name} is None, or > 0 and finite")
        if self.post_norms and self.block != "sequential":
            raise ValueError(f"post_norms=True with block={self.block!r} is not supported; block must be 'sequential'")
        for name in ("rope_pattern", "window_pattern", "moe_pattern"):
            pattern = getattr(self, name)
            if not isinstance(pattern, tuple) or not pattern or any(type(value) is not bool for value in pattern):
                raise ValueError(f"{name}={pattern!r} must be a tuple of True and False, at least one")
        for field in fields(self):
            if field.type == "bool" and type(getattr(self, field.name)) is not bool:
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} must be True or False")
        self._check_positions()
        self._check_experts()

    def _check_positions(self) -> None:
        if self.sliding_window is not None:
            check_positive("sliding_window", self.sliding_window)
        for name, pattern in (("window_pattern", self.window_pattern), ("local_rope_theta", self.local_rope_theta)):
            if self.sliding_window is None and pattern not in (None, (True,)):
                raise ValueError(f"{name}={pattern!r} needs a sliding_window")
        for name in ("rope_theta", "local_rope_theta"):
            if name == "rope_theta" or self.local_rope_theta is not None:
                check_number(name, getattr(self, name), math.nextafter(1, 2), 1e30, f"{name} > 1 and finite")
        if self.positions == "learned":
            rope = (self.rope_scaling, self.local_rope_theta, self.rotary_dim, self.rope_pattern)
            if rope != (RopeScaling(), None, None, (True,)):
                raise ValueError("positions='learned' has no rotary positions; leave rope and rotary fields out")
            return
        name, dim = ("head_dim", self.head_dim) if self.rotary_dim is None else ("rotary_dim", self.rotary_dim)
        check_positive(name, dim)
        if dim % 2 or dim > self.head_dim:
            raise ValueError(f"{name}={dim} must be even for rotary positions and at most head_dim={self.head_dim}")
        if self.rope_scaling.kind == "dynamic" and dim == 2:
            raise ValueError(f"{name}=2 has no 'dynamic' rope scaling, whose exponent is {name} / ({name} - 2)")
        for field in ("short_factors", "long_factors"):
            factors = getattr(self.rope_scaling, field)
            if factors and len(factors) != dim // 2:
                raise ValueError(f"{field} has {len(factors)} factors; {dim // 2} are needed, half of {name}={dim}")

    def _check_experts(self) -> None:
        sizes = {name: getattr(self, name) for name in ("num_experts", "experts_per_token", "expert_size")}
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes.values()):
            raise ValueError(f"{sizes} must be integers >= 0")
        if self.num_experts == 0:
            if any(sizes.values()) or self.moe_pattern != (True,):
                raise ValueError(f"num_experts=0 is no mixture, but there are {sizes}, moe_pattern={self.moe_pattern}")
            return
        if not 1 <= self.experts_per_token <= self.num_experts or self.expert_size < 1:
            raise ValueError(f"{sizes}: 1 <= experts_per_token <= num_experts and expert_size >= 1 are needed")
        if not self.gated_mlp or self.mlp_bias:
            raise ValueError("experts are gated MLPs without biases; gated_mlp must be True and mlp_bias False")

    @property
    def num_groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        has = lambda pattern, layer: pattern[layer % len(pattern)]
        kinds = []
        for layer in range(self.num_layers):
            window = self.sliding_window if has(self.window_pattern, layer) else None
            rope = None
            if self.positions == "rope" and has(self.rope_pattern, layer):
                rope = "main" if window is None or self.local_rope_theta is None else "local"
            kinds.append(LayerKind(window=window, rope=rope, moe=self.num_experts > 0 and has(self.moe_pattern, layer)))
        return tuple(kinds)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Keys a query of each layer sees, itself included; None is all."""
        return tuple(kind.window for kind in self.layer_kinds)

    @property
    def kv_window(self) -> int | None:
        """Latest keys that some layer still reads, a query's own included; None where a layer reads them all."""
        return None if None in self.layer_windows else self.sliding_window

    @property
    def num_params(self) -> int:
        """Weights in the whole model, norms and biases included."""
        d, f, h, k, hd = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim
        norm = d if self.norm == "rms" else 2 * d
        num_norms = (1 if self.block == "parallel_shared_norm" else 2) + 2 * self.post_norms
        attention = d * hd * (h + 2 * k) + h * hd * d
        attention += hd * (h + 2 * k) * self.qkv_bias + d * self.o_bias + 2 * hd * self.qk_norm
        wide = 1 + self.gated_mlp
        dense = (wide + 1) * d * f + (wide * f + d) * self.mlp_bias
        moe = self.num_experts * (3 * d * self.expert_size + d)
        num_moe = sum(kind.moe for kind in self.layer_kinds)
        top = norm + self.vocab_size * d * (1 if self.tie_embeddings else 2)
        top += self.max_position * d if self.positions == "learned" else 0
        layers = self.num_layers * (attention + num_norms * norm)
        return top + layers + num_moe * moe + (self.num_layers - num_moe) * dense


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    Either `num_pages`, or the share `memory_fraction` of the device memory left after the weights (on CPU: of the
    machine's free memory, and never more than `max_num_seqs` full-length sequences need). `dtype` None is the model's.
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_positive("page_size", self.page_size)
        if self.num_pages is not None:
            check_positive("num_pages", self.num_pages)
        if self.memory_fraction is not None:
            check_number("memory_fraction", self.memory_fraction, 1e-6, 1 - 1e-6, "0 < memory_fraction < 1")
        if self.num_pages is not None and self.memory_fraction is not None:
            raise ValueError("num_pages and memory_fraction are both set; give one of them")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"cache dtype={self.dtype!r} must be None, 'float32' or 'bfloat16'")
