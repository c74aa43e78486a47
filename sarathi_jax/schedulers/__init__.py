"""Scheduling policies: a frozen configuration each, which builds its scheduler."""

from typing import Any

from sarathi_jax.schedulers.base import IterationCost, Limits, Scheduler, SchedulerConfig, arrival_order
from sarathi_jax.schedulers.chunked_only import ChunkedOnly, ChunkedOnlyScheduler
from sarathi_jax.schedulers.draft import Draft
from sarathi_jax.schedulers.faster_transformer import FasterTransformer, FasterTransformerScheduler
from sarathi_jax.schedulers.hybrid_only import HybridOnly, HybridOnlyScheduler
from sarathi_jax.schedulers.orca import Orca, OrcaScheduler
from sarathi_jax.schedulers.sarathi import Sarathi, SarathiScheduler
from sarathi_jax.schedulers.vllm import VLLM, VLLMScheduler

__all__ = [
    "POLICIES", "VLLM", "ChunkedOnly", "ChunkedOnlyScheduler", "Draft", "FasterTransformer",
    "FasterTransformerScheduler", "HybridOnly", "HybridOnlyScheduler", "IterationCost", "Limits", "Orca",
    "OrcaScheduler", "Sarathi", "SarathiScheduler", "Scheduler", "SchedulerConfig", "VLLMScheduler", "arrival_order",
    "make_policy",
]  # fmt: skip

POLICIES: dict[str, type[SchedulerConfig]] = {
    "sarathi": Sarathi,
    "hybrid_only": HybridOnly,
    "chunked_only": ChunkedOnly,
    "vllm": VLLM,
    "orca": Orca,
    "faster_transformer": FasterTransformer,
}
"""Those that come with the library, by the names that commands go by."""


def make_policy(name: str, *, token_budget: int | None = None, **settings: Any) -> SchedulerConfig:
    """The policy of that name; `token_budget` goes to the policies that have one. ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known; known: {', '.join(POLICIES)}")
    if "token_budget" in POLICIES[name].__dataclass_fields__:
        settings["token_budget"] = token_budget
    return POLICIES[name](**settings)
