"""What the capacity ratios of figures 10 and 11 hang on: the SLO, and the constants of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from paper.setting import FALCON, MISTRAL, YI
from paper.table import Row
from paper.trials import Size, capacities

TITLE = "Sensitivity of figures 10 and 11: Sarathi over vLLM, openchat, budget 512"
WHY = """
Once a chunked iteration fits the SLO, Sarathi's capacity does not depend on it, and vLLM's falls with it: the ratio
is greatest just above the time of such an iteration. The artifact's constants, whose decode of 32 at 4k takes 0.21 s
on Yi-34B, contradict the paper's own SLO of five such iterations (0.2 s), and with them 512 tokens do not fit it: the
evaluation's machine was faster than the artifact's files say. For Falcon-180B the constants hardly matter.
"""
SERVINGS = {"Mistral-7B": (MISTRAL, 2.6), "Yi-34B": (YI, 3.7), "Falcon-180B": (FALCON, 5.6)}
FACTORS = (0.5, 0.75, 1.0, 2.0)
"""On the paper's strict SLO."""


def compute(size: Size) -> dict[str, Any]:
    """By model, constants and policy: requests/s for each of FACTORS."""
    found: dict[str, Any] = {}
    for name, (serving, _) in SERVINGS.items():
        slos_s = [factor * serving.slo_s[0] for factor in FACTORS]
        for constants in ("default", "artifact"):
            machine = replace(serving, artifact=constants == "artifact")
            for policy in ("sarathi", "vllm"):
                answers = capacities(machine, machine.policies("strict")[policy], "openchat", slos_s, size)
                rates = [answers[slo_s].rate or 0.0 for slo_s in slos_s]
                found.setdefault(name, {}).setdefault(constants, {})[policy] = rates
    return found


def gains(rates: dict[str, list[float]]) -> list[float | None]:
    """None where vLLM serves nothing."""
    return [ours / theirs if theirs else None for ours, theirs in zip(rates["sarathi"], rates["vllm"], strict=True)]


def rows(found: dict[str, Any]) -> list[Row]:
    out = []
    for name, machines in found.items():
        serving, claim = SERVINGS[name]
        for constants, rates in machines.items():
            for i, (factor, gain) in enumerate(zip(FACTORS, gains(rates), strict=True)):
                note = f"sarathi {rates['sarathi'][i]:.3g}, vllm {rates['vllm'][i]:.3g}"
                what = f"{name}, SLO x {factor:g} = {factor * serving.slo_s[0]:.3g} s, {constants} constants"
                out.append(Row(what, gain, claim if factor == 1 else None, note))
    return out


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, (name, machines) in zip(figure.subplots(1, 3), found.items(), strict=True):
        slos_s = [factor * SERVINGS[name][0].slo_s[0] for factor in FACTORS]
        for constants, rates in machines.items():
            axes.plot(slos_s, [float("nan") if g is None else g for g in gains(rates)], "o-", label=constants)
        axes.axhline(SERVINGS[name][1], color="gray", ls=":", label="paper, strict SLO")
        axes.axvline(SERVINGS[name][0].slo_s[0], color="gray", ls="--", label="strict SLO")
        axes.set(xlabel="P99 TBT allowed, s", title=name, ylim=(0, None))
    figure.axes[0].set_ylabel("capacity, Sarathi over vLLM")
    figure.axes[0].legend()
    return figure
