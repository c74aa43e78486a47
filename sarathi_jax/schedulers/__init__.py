"""Scheduling policies: a frozen configuration each, which builds its scheduler."""

from sarathi_jax.schedulers.base import Draft, Scheduler, SchedulerConfig, arrival_order
from sarathi_jax.schedulers.sarathi import Sarathi, SarathiScheduler

__all__ = ["Draft", "Sarathi", "SarathiScheduler", "Scheduler", "SchedulerConfig", "arrival_order"]
