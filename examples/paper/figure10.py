"""The request rate that each policy serves within an SLO, for the paper's models and workloads."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from paper.setting import FALCON, LLAMA, MISTRAL, SLOS, YI
from paper.table import Row
from paper.trials import WORKLOADS, Size, capacities

TITLE = "Figures 10 and 11: capacity"
WHY = """
Paper: the SLOs that it states. Rule: 5 and 25 decode iterations of 32 at 4k as predicted here, near those on the
A100s of one stage, half and less in pipelines, whose decodes are faster here. Constants are the machines' defaults,
with nothing of the paper's in them. With its SLOs, strict ratios on openchat are within 20 % of the paper's but
Falcon-180B's, of which it says "up to": it grows to 5.4 at half the SLO (see the sensitivity). Under the rule's 0.38
s an iteration of 512 tokens does not fit. In a pipeline 512 serves more than the larger budget, whose bubbles are
longer. Orca is held by its 8 sequences there.
"""
SERVINGS = {"Mistral-7B": MISTRAL, "Yi-34B": YI, "LLaMA2-70B": LLAMA, "Falcon-180B": FALCON}
CLAIMS = {
    "vllm": {"Mistral-7B": 2.6, "Yi-34B": 3.7, "LLaMA2-70B": 4.3, "Falcon-180B": 5.6},
    "orca": {"Yi-34B": 4.0, "LLaMA2-70B": 6.3},
}
"""Of Sarathi over these, openchat and strict; of Falcon-180B the paper says "up to"."""
POLICIES, KINDS = ("sarathi", "vllm", "orca"), ("paper", "rule")


def compute(size: Size) -> dict[str, Any]:
    """By model, workload, SLO and which SLO ("paper" or "rule"): its seconds and each policy's capacity."""
    found: dict[str, Any] = {}
    for name, serving in SERVINGS.items():
        slos = {slo: {"paper": serving.slo_s[i], "rule": serving.rule_s(slo)} for i, slo in enumerate(SLOS)}
        for workload in WORKLOADS:
            cells = {slo: {kind: {"slo_s": s} for kind, s in kinds.items()} for slo, kinds in slos.items()}
            for policy in POLICIES:
                settings = {slo: serving.policies(slo)[policy] for slo in SLOS}
                for setting in set(settings.values()):
                    places = [(slo, kind) for slo in SLOS if settings[slo] == setting for kind in slos[slo]]
                    answers = capacities(serving, setting, workload, {slos[s][k] for s, k in places}, size)
                    for slo, kind in places:
                        cells[slo][kind][policy] = answers[slos[slo][kind]].rate or 0.0
            found.setdefault(name, {})[workload] = cells
    return found


def rows(found: dict[str, Any]) -> list[Row]:
    """Over vllm all of them, over orca those of which the paper says something."""
    out = []
    for kind, (name, workloads) in product(KINDS, found.items()):
        for (workload, cells), slo in product(workloads.items(), SLOS):
            cell = cells[slo][kind]
            note = ", ".join(f"{policy} {cell[policy]:.3g}" for policy in POLICIES)
            for other in ("vllm", "orca"):
                gain = cell["sarathi"] / cell[other] if cell[other] else None
                claim = CLAIMS[other].get(name) if (workload, slo) == ("openchat", "strict") else None
                if claim is not None or other == "vllm":
                    what = f"{name}, {workload}, {slo} ({kind}, {cell['slo_s']:.3g} s): over {other}"
                    out.append(Row(what, gain, claim, note))
    return out


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(14, 6.5), layout="constrained")
    for column, (name, workloads) in enumerate(found.items()):
        for line, (workload, cells) in enumerate(workloads.items()):
            axes = figure.add_subplot(2, 4, 1 + column + 4 * line)
            groups = [*product(SLOS, KINDS)]
            for i, policy in enumerate(POLICIES):
                rates = [cells[slo][kind][policy] for slo, kind in groups]
                bars = axes.bar(np.arange(len(groups)) + 0.27 * (i - 1), rates, 0.27, label=policy)
                axes.bar_label(bars, fmt="%.2g", fontsize="x-small")
            labels = [f"{slo}\n{kind} {cells[slo][kind]['slo_s']:.2g} s" for slo, kind in groups]
            axes.set_xticks(range(len(groups)), labels, fontsize="x-small")
            axes.set(title=f"{name}, {workload}", ylabel="requests/s" if column == 0 else None)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure
