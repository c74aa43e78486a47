"""The rotary fields of a config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Mapping
from typing import Any, get_args

from sarathi_jax.config import RopeKind, RopeScaling
from sarathi_jax.models.families.fields import MAX_INT, Fields, to_flag, to_number

_ORIGINAL = "original_max_position_embeddings"
_KIND_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"},
}
_PARTIAL = "partial_rotary_factor"


def rope(
    f: Fields, *, theta: float = 10000.0, theta_key: str = "rope_theta", renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """ModelConfig's `rope_theta` and `rope_scaling`, from `rope_scaling` or `rope_parameters` (which has the base too).

    `theta` is the default of `theta_key`; `renamed` are kinds that the family means otherwise.
    """
    return rope_of(f, *rope_object(f), theta=f.number(theta_key, theta), renamed=renamed)


def partial_rope(
    f: Fields,
    head_dim: int,
    *,
    share_key: str = _PARTIAL,
    share: float = 1.0,
    theta_key: str = "rope_theta",
    renamed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """As `rope`, and `rotary_dim`: the share of a head's dimensions that is rotated, `share` by default."""
    field, value = rope_object(f)
    share = f.number(share_key, share)
    if value.get(_PARTIAL) is not None:
        share = to_number(_PARTIAL, value[_PARTIAL])
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{share_key}={share} must be above 0 and at most 1")
    dim = int(head_dim * share)
    whole = {key: entry for key, entry in value.items() if key != _PARTIAL}
    found = rope_of(f, field, whole, theta=f.number(theta_key, 10000.0), renamed=renamed)
    return found | {"rotary_dim": None if dim == head_dim else dim}


def rope_object(f: Fields) -> tuple[str, Mapping[str, Any]]:
    """The object that describes the rotary positions, and the field it is in."""
    field = "rope_scaling" if f.get("rope_scaling") else "rope_parameters"
    value = f.get(field) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}={reprlib.repr(value)} must be one flat object")
    return field, value


def rope_of(
    f: Fields, field: str, rope: Any, *, theta: float, renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """As `rope`, from the object `rope`, found in `field`; `theta` unless it says otherwise."""
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"{field}={reprlib.repr(rope)} must be one flat object; one for each layer type is not supported"
        )
    if rope.get(_PARTIAL, 1) not in (None, 1):
        raise ValueError(f"{_PARTIAL}={rope[_PARTIAL]!r} in {field} is not supported; only 1 is")
    if rope.get("rope_theta") is not None:
        theta = to_number("rope_theta", rope["rope_theta"])
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None:
        if any(
            value is not None for key, value in rope.items() if key not in ("type", "rope_type", "rope_theta", _PARTIAL)
        ):
            raise ValueError(f"{field}={reprlib.repr(dict(rope))} has no 'rope_type'; say which kind of scaling it is")
        return {"rope_theta": theta}
    kind = (renamed or {}).get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _KIND_FIELDS:
        raise ValueError(f"{field} of kind {kind!r} is not supported; known: {', '.join(get_args(RopeKind))}")
    plain = {"rope_type", "type", "rope_theta", _PARTIAL, "finetuned"}
    extra = {key for key, value in rope.items() if value is not None} - plain - _KIND_FIELDS[kind]
    if unknown := extra - set.union(*_KIND_FIELDS.values()):
        raise ValueError(f"{field} has {sorted(unknown)}, which {kind!r} does not know; remove what is not needed")
    if extra:
        warnings.warn(f"{field} has {sorted(extra)}, which {kind!r} does not use", UserWarning, stacklevel=2)
    return {"rope_theta": theta, "rope_scaling": _scaling(f, field, rope, kind)}


def _scaling(f: Fields, field: str, rope: Mapping[str, Any], kind: str) -> RopeScaling:
    """As transformers derives it: the trained length is max_position_embeddings where it is not given apart."""
    max_position = f.integer("max_position_embeddings")
    original = f.get(_ORIGINAL) or rope.get(_ORIGINAL)
    original = max_position if original is None else original
    if isinstance(original, bool) or not isinstance(original, int) or not 1 <= original <= MAX_INT:
        raise ValueError(f"{_ORIGINAL}={reprlib.repr(original)} must be an integer from 1 to {MAX_INT}")

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        if value is None and default is None:
            raise ValueError(f"{field} of kind {kind!r} needs {key!r}")
        return to_number(f"{field}[{key!r}]", default if value is None else value)

    def optional(key: str) -> float | None:
        return None if rope.get(key) is None else number(key)

    def factors(key: str) -> tuple[float, ...]:
        value = rope.get(key)
        if not isinstance(value, list):
            raise ValueError(f"{field} of kind {kind!r} needs {key!r}, a list of numbers")
        return tuple(to_number(f"{field}[{key!r}]", x) for x in value)

    match kind:
        case "linear":
            return RopeScaling(kind="linear", factor=number("factor"))
        case "dynamic":  # transformers stretches max_position_embeddings, whatever the original length
            return RopeScaling(kind="dynamic", factor=number("factor"), original_max_position=max_position)
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=number("factor"),
                original_max_position=original,
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=number("factor", max_position / original),
                original_max_position=original,
                beta_fast=optional("beta_fast") or 32.0,
                beta_slow=optional("beta_slow") or 1.0,
                attention_factor=optional("attention_factor"),
                mscale=optional("mscale") or None,  # to transformers 0 is none
                mscale_all_dim=optional("mscale_all_dim") or None,
                truncate=rope.get("truncate") is None or to_flag("truncate", rope["truncate"]),
            )
        case "longrope":
            return RopeScaling(
                kind="longrope",
                factor=number("factor", max(max_position / original, 1.0)),
                original_max_position=original,
                attention_factor=optional("attention_factor"),
                short_factors=factors("short_factor"),
                long_factors=factors("long_factor"),
            )
    return RopeScaling()
