"""SmolLM3: some layers without positions."""

from __future__ import annotations

from typing import Any

from sarathi_jax.models.families.family import Family
from sarathi_jax.models.families.fields import WINDOW, Fields, shortest, windows
from sarathi_jax.models.families.llama import attention_biases, llama_like


def _smollm3(f: Fields) -> dict[str, Any]:
    num_layers, interval = f.num_layers(), f.integer("no_rope_layer_interval", 4)
    if interval < 1:
        raise ValueError(f"no_rope_layer_interval={interval} must be at least 1")
    has_rope = f.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(num_layers)])
    if not isinstance(has_rope, list) or len(has_rope) < num_layers or any(x not in (0, 1) for x in has_rope):
        raise ValueError(f"no_rope_layers={has_rope!r:.200} must be 0 or 1 for each of num_hidden_layers={num_layers}")
    has_rope = [bool(x) for x in has_rope[:num_layers]]
    layer_types, window = f.layer_types(), f.get("sliding_window")
    if window is not None:
        window = f.integer("sliding_window") if f.flag("use_sliding_window") else None
    is_windowed = [not x for x in has_rope] if layer_types is None else [kind == WINDOW for kind in layer_types]
    return {
        **llama_like(f, kv_heads=4, tied=True, theta=2e6),
        **attention_biases(f),
        **windows(window, is_windowed),
        "mlp_bias": f.flag("mlp_bias"),
        "rope_pattern": shortest(has_rope),
    }


SMOLLM3 = Family(model_type="smollm3", architecture="SmolLM3ForCausalLM", config=_smollm3)
