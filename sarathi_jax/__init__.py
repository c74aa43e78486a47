"""Stall-free LLM serving in JAX: chunked prefills in hybrid batches, after Sarathi-Serve (OSDI'24).

`import sarathi_jax` alone does not import jax: policies, pages and metrics are plain Python. What runs a model is
imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sarathi_jax.config import CacheConfig, ModelConfig, RopeScaling
from sarathi_jax.outputs import ChunkStats, CompletionOutput, Logprob, RequestMetrics, RequestOutput, StepStats
from sarathi_jax.pages import PagePool
from sarathi_jax.request import Chunk, Request, SamplingParams, Sequence, StepPlan
from sarathi_jax.schedulers import (
    VLLM,
    ChunkedOnly,
    FasterTransformer,
    HybridOnly,
    Orca,
    Sarathi,
    Scheduler,
    SchedulerConfig,
)
from sarathi_jax.versions import check_versions

if TYPE_CHECKING:
    from sarathi_jax.engine import Engine
    from sarathi_jax.llm import LLM
    from sarathi_jax.memory_plan import plan
    from sarathi_jax.parallel import Parallel
    from sarathi_jax.replicas import Replicas
    from sarathi_jax.simulator import Simulator

__version__ = "0.1.0"

check_versions()

_LAZY = {
    "LLM": "sarathi_jax.llm",
    "Engine": "sarathi_jax.engine",
    "Parallel": "sarathi_jax.parallel",
    "Replicas": "sarathi_jax.replicas",
    "Simulator": "sarathi_jax.simulator",
    "plan": "sarathi_jax.memory_plan",
}

__all__ = [
    "LLM", "VLLM", "CacheConfig", "Chunk", "ChunkStats", "ChunkedOnly", "CompletionOutput", "Engine",
    "FasterTransformer", "HybridOnly", "Logprob", "ModelConfig", "Orca", "PagePool", "Parallel", "Replicas",
    "Request", "RequestMetrics", "RequestOutput", "RopeScaling", "SamplingParams", "Sarathi", "Scheduler",
    "SchedulerConfig", "Sequence", "Simulator", "StepPlan", "StepStats", "plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sarathi_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
