"""Scheduling policies: a frozen configuration each, which builds its scheduler."""

from sarathi_jax.schedulers.base import Draft, IterationCost, Limits, Scheduler, SchedulerConfig, arrival_order
from sarathi_jax.schedulers.chunked_only import ChunkedOnly, ChunkedOnlyScheduler
from sarathi_jax.schedulers.faster_transformer import FasterTransformer, FasterTransformerScheduler
from sarathi_jax.schedulers.hybrid_only import HybridOnly, HybridOnlyScheduler
from sarathi_jax.schedulers.orca import Orca, OrcaScheduler
from sarathi_jax.schedulers.sarathi import Sarathi, SarathiScheduler
from sarathi_jax.schedulers.vllm import VLLM, VLLMScheduler

__all__ = [
    "VLLM", "ChunkedOnly", "ChunkedOnlyScheduler", "Draft", "FasterTransformer", "FasterTransformerScheduler",
    "HybridOnly", "HybridOnlyScheduler", "IterationCost", "Limits", "Orca", "OrcaScheduler", "Sarathi",
    "SarathiScheduler", "Scheduler", "SchedulerConfig", "VLLMScheduler", "arrival_order",
]  # fmt: skip
