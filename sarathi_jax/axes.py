"""Logical axes of arrays, and the axis of the mesh that each is split over."""

TENSOR = "tensor"
"""The mesh axis that layers, embedding and head are split over."""

STAGE = "stage"
"""That of the tensor groups of a pipeline, where something passes from one to another."""

MESH_AXES = {
    "vocab": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
    "layer": None,
    "expert": None,
    None: None,
}
"""Logical axis of a weight, or of the KV pool -> mesh axis."""
