"""The paper's workloads, runs of them, and capacity searches that share their trials."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paper.setting import Serving

import sarathi_jax as sj
from sarathi_jax.capacity import Capacity, Slo, Trial, TrialResult, config_key, find_capacity, open_loop_trial
from sarathi_jax.driver import run_open_loop
from sarathi_jax.metrics import Report
from sarathi_jax.workload import Poisson, Workload, make_workload
from sarathi_jax.workload_lengths import ARXIV_SUMMARIZATION, OPENCHAT_SHAREGPT4

WORKLOADS = {"openchat": OPENCHAT_SHAREGPT4, "arxiv": ARXIV_SUMMARIZATION}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Requests of a capacity trial, how near a search comes, and the file that keeps trials for the next run."""

    num_requests: int = 384
    tolerance: float = 0.025
    trials: Path | None = None


def requests(workload: str, num_requests: int, rate: float) -> Workload:
    lengths = WORKLOADS[workload]
    return make_workload(num_requests=num_requests, arrivals=Poisson(rate=rate), lengths=lengths, seed=0)


def serve(serving: Serving, policy: sj.SchedulerConfig, workload: str, num_requests: int, rate: float) -> Report:
    """One run at a rate, to its end."""
    server = serving.simulator(policy, WORKLOADS[workload].max_total_tokens)
    return run_open_loop(server, requests(workload, num_requests, rate), progress=False)


def capacities(
    serving: Serving, policy: sj.SchedulerConfig, workload: str, slos_s: Iterable[float], size: Size
) -> dict[float, Capacity]:
    """By P99 TBT allowed. From the loosest on: a run that ended judges every SLO, and one that was hopeless under a
    loose SLO is so under a tight one."""
    work, max_model_len = requests(workload, size.num_requests, 1.0), WORKLOADS[workload].max_total_tokens
    parts = {"cost": serving.cost, "overlap_chunks": serving.overlap_chunks, "policy": policy, "workload": workload}
    key = config_key(num_requests=size.num_requests, **parts)
    known: dict[float, TrialResult] = {}
    # From below capacity on: short trials far above it can hold a TBT, as few requests decode beside the prompts.
    low = 1.0 if serving.cost.num_stages == 1 else 0.125

    def keep(trial: Trial) -> None:
        known[trial.rate] = trial.result

    def search(slo: Slo) -> Capacity:
        def run(rate: float) -> TrialResult:
            if rate not in known:
                server = serving.simulator(policy, max_model_len)
                known[rate] = TrialResult.of(open_loop_trial(server, work, slo, progress=False)(rate))
            return known[rate]

        return find_capacity(
            run, slo, start_rate=low, tolerance=size.tolerance, on_trial=keep, results_path=size.trials,
            key=None if size.trials is None else key,
        )  # fmt: skip

    return {slo_s: search(Slo(tbt_p99_s=slo_s)) for slo_s in sorted(slos_s, reverse=True)}
