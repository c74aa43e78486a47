"""Chunked paged attention and its kernels (installed as sarathi_jax.attention)."""

from sarathi_jax.attention.api import Backend, ragged_paged_attention, select_backend, write_kv

__all__ = ["Backend", "ragged_paged_attention", "select_backend", "write_kv"]
