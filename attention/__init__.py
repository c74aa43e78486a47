"""Chunked paged attention and its kernels (installed as sarathi_jax.attention)."""

from sarathi_jax.attention.api import (
    Backend,
    Schedule,
    pool_head_size,
    ragged_paged_attention,
    schedule_attention,
    select_backend,
    write_kv,
)

__all__ = [
    "Backend",
    "Schedule",
    "pool_head_size",
    "ragged_paged_attention",
    "schedule_attention",
    "select_backend",
    "write_kv",
]
