"""Capacity against the time allowed between tokens: what the token budget trades, and that a batch limit does not."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from paper.setting import MISTRAL, YI
from paper.table import Row
from paper.trials import Size, capacities

import sarathi_jax as sj

TITLE = "Figure 12: capacity by SLO"
WHY = """
A budget serves what its iterations allow: 512 tokens of Yi-34B take 0.11 s and 2048 of Mistral-7B 0.16 s, so under
100 ms these serve next to nothing, and where they fit, throughput is the limit and not the SLO. The batch limit is
nothing to vllm where stalls are: up to 500 ms of Mistral-7B and throughout Yi-34B. Beyond that Mistral-7B fills its
slots: 32 hold 31 requests at 2.25 requests/s (16 s each), 64 hold 59 at 2.9.
"""
SLOS_S = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
POLICIES = {
    **{f"sarathi {budget}": sj.Sarathi(token_budget=budget, max_num_seqs=128) for budget in (512, 2048)},
    **{f"vllm {seqs}": sj.VLLM(max_num_seqs=seqs) for seqs in (32, 64, 128)},
}
VLLMS = [name for name in POLICIES if name.startswith("vllm")]


def compute(size: Size) -> dict[str, Any]:
    """Requests/s of openchat_sharegpt4, by model and policy, for each of SLOS_S."""
    found: dict[str, Any] = {}
    for model, serving in (("Mistral-7B", MISTRAL), ("Yi-34B", YI)):
        for name, policy in POLICIES.items():
            answers = capacities(serving, policy, "openchat", SLOS_S, size)
            found.setdefault(model, {})[name] = [answers[slo_s].rate or 0.0 for slo_s in SLOS_S]
    return found


def gain(found: dict[str, Any], model: str, policy: str, slo_s: float) -> float | None:
    """Over the best vllm."""
    at = SLOS_S.index(slo_s)
    best = max(found[model][name][at] for name in VLLMS)
    return found[model][policy][at] / best if best else None


def rows(found: dict[str, Any]) -> list[Row]:
    out = [
        Row("Mistral-7B, 100 ms: budget 512 over the best vllm", gain(found, "Mistral-7B", "sarathi 512", 0.1), 3.5),
        Row("Yi-34B, 1 s: budget 2048 over the best vllm", gain(found, "Yi-34B", "sarathi 2048", 1.0), 1.65),
    ]
    for model, rates in found.items():
        for i, slo_s in enumerate(SLOS_S):
            values = [rates[name][i] for name in VLLMS]
            shown = ", ".join(f"{name} {rates[name][i]:.3g}" for name in POLICIES)
            flat = max(values) / min(values) if min(values) else None
            out.append(Row(f"{model}, {1e3 * slo_s:.0f} ms: vllm, best over worst of 32, 64, 128", flat, 1.0, shown))
    return out


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (model, rates) in zip(figure.subplots(1, 2), found.items(), strict=True):
        for name in POLICIES:
            axes.plot(SLOS_S, rates[name], "o--" if name in VLLMS else "s-", label=name)
        axes.set(xlabel="P99 TBT allowed, s", ylabel="capacity, requests/s", title=f"{model}, openchat", ylim=(0, None))
    figure.axes[0].legend(fontsize="small")
    return figure
