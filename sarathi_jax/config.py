"""Frozen configuration. Every dataclass checks itself when it is made; nothing is silently rounded."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


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


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched, under Hugging Face's names for the kinds and fields.

    `original_max_position` is the context the model was trained at (dynamic, llama3, yarn).
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

    def __post_init__(self) -> None:
        kinds = ("default", "linear", "dynamic", "llama3", "yarn")
        if self.kind not in kinds:
            raise ValueError(f"rope scaling kind {self.kind!r} is not supported; known: {', '.join(kinds)}")
        check_number("rope scaling factor", self.factor, 1.0, 1e6, "1 <= factor <= 1e6")
        if self.kind in ("llama3", "yarn", "dynamic") and self.original_max_position is None:
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

    `sliding_window` counts keys a query sees, itself included (Hugging Face's convention); None is full attention.
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
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    hidden_act: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            check_positive(name, getattr(self, name))
        check_positive("head_dim", self.head_dim)
        check_positive("max_position", self.max_position)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        if self.sliding_window is not None:
            check_positive("sliding_window", self.sliding_window)
        check_number("rms_norm_eps", self.rms_norm_eps, 1e-30, 1e30, "rms_norm_eps > 0 and finite")
        check_number("rope_theta", self.rope_theta, math.nextafter(1, 2), 1e30, "rope_theta > 1 and finite")
        if self.rope_scaling.kind == "dynamic" and self.head_dim == 2:
            raise ValueError("head_dim=2 has no 'dynamic' rope scaling, whose exponent is head_dim / (head_dim - 2)")
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1e-30, 1e30, f"{name} is None, or > 0 and finite")

    @property
    def num_groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_params(self) -> int:
        """Weights in the whole model, norms and biases included."""
        d, f, h, k, hd = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim
        layer = d * hd * (h + 2 * k) + h * hd * d + 3 * d * f + 2 * d
        layer += (
            hd * (h + 2 * k) * self.qkv_bias + d * self.o_bias + (2 * f + d) * self.mlp_bias + 2 * hd * self.qk_norm
        )
        return self.num_layers * layer + d + self.vocab_size * d * (1 if self.tie_embeddings else 2)


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
