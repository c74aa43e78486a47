"""Falcon-180B over two nodes: a pipeline of two stages against tensor parallelism of eight, and who makes bubbles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from paper.setting import FALCON, SLOS
from paper.table import Row
from paper.trials import Size, capacities, serve

TITLE = "Figure 13: pipeline bubbles, and pipeline against tensor parallelism"
WHY = """
Whole prompts are as in the paper, decodes faster: its 200 ms are slower attention and hosts (76 ms through both
stages here, 141 with the artifact's constants). Decodes by TP8 are not slower here, as an all-reduce's latency counts
once (0.35 ms each with 1 MB; 2 x needs 1.4 ms, 14 messages around a ring of Ethernet make 1.0); prompts, and so
capacity, are. Overlap: a prompt's chunks follow each other through the stages, as in the engine; Sarathi-Serve keeps
a sequence in one. With a budget of 2048 bubbles are 21 %.
"""
WIDE, OVERLAP = replace(FALCON, tensor_parallel=8, pipeline_parallel=1), replace(FALCON, overlap_chunks=True)
SERVED = {"sarathi PP2": FALCON, "vllm PP2": FALCON, "sarathi TP8": WIDE, "vllm TP8": WIDE, "sarathi overlap": OVERLAP}
BATCHES, ITERATIONS = (1, 8, 16, 32, 64, 128), (([4096] * 32, []), ([], [(0, 4096)]))
BUBBLES = {"sarathi": FALCON, "vllm": FALCON, "orca": FALCON, "sarathi overlap": OVERLAP}
RATE = 0.7  # requests/s at which bubbles are counted: about what vllm serves under the relaxed SLO


def compute(size: Size) -> dict[str, Any]:
    found: dict[str, Any] = {"layouts": {}, "bubbles": {}, "capacity": {slo: {} for slo in SLOS}}
    for name, cost in (("TP4-PP2", FALCON.cost), ("TP8", WIDE.cost)):
        found["layouts"][name] = {
            "decode_s": [cost([4096] * n, []) for n in BATCHES],
            "stage_s": [max(cost.stage_s(*iteration)) for iteration in ITERATIONS],
            "parts_s": [cost.operators_s(*iteration) for iteration in ITERATIONS],
        }
    for slo, slo_s in zip(SLOS, FALCON.slo_s, strict=True):
        for name, serving in SERVED.items():
            policy = serving.policies(slo)[name.split()[0]]
            found["capacity"][slo][name] = capacities(serving, policy, "openchat", [slo_s], size)[slo_s].rate or 0.0
    for name, serving in BUBBLES.items():
        report = serve(serving, serving.policies("strict")[name.split()[0]], "openchat", size.num_requests, RATE)
        bubbles, busy = (sum(getattr(use, name) for use in report.stage_use) for name in ("bubble_s", "busy_s"))
        found["bubbles"][name] = {"share": bubbles / (bubbles + busy), "s_per_request": bubbles / len(report.requests)}
    return found


def rows(found: dict[str, Any]) -> list[Row]:
    piped, wide = found["layouts"].values()
    decode, prefill = (1e3 * seconds for seconds in piped["stage_s"])
    out = [Row("a prompt of 4096 in a stage, ms", prefill, 1150.0)]
    out += [Row("32 decodes at 4096 in a stage, ms", decode, 200.0)]
    out += [Row("bubble where the one follows the other, ms", prefill - decode, 950.0)]
    for i, what in enumerate(("32 decodes at 4096 (paper: more than 2)", "a prompt of 4096")):
        parts, ours = wide["parts_s"][i], sum(wide["parts_s"][i].values()) / sum(piped["parts_s"][i].values())
        note = f"all-reduces {1e3 * parts['communication']:.0f} of {1e3 * sum(parts.values()):.0f} ms"
        out.append(Row(f"{what}, TP8 over TP4-PP2", ours, None, note))
    for name, bubbles in found["bubbles"].items():
        note = f"of stage time, at {RATE} requests/s; {bubbles['s_per_request']:.2f} stage-seconds a request"
        out.append(Row(f"bubbles of {name}", bubbles["share"], None, note))
    capacity = found["capacity"].items()
    return out + [Row(f"{slo}: {name}, requests/s", rate) for slo, rates in capacity for name, rate in rates.items()]


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 4), layout="constrained")
    times, shares, bars = figure.subplots(1, 3)
    for name, layout in found["layouts"].items():
        times.plot(BATCHES, [1e3 * seconds for seconds in layout["decode_s"]], "o-", label=name)
    times.set(xlabel="decodes at 4096", ylabel="ms an iteration", title="Falcon-180B", ylim=(0, None))
    percents = {name: 100 * bubbles["share"] for name, bubbles in found["bubbles"].items()}
    shares.bar_label(shares.bar(list(percents), list(percents.values())), fmt="%.0f")
    shares.set(title=f"bubbles at {RATE} requests/s, TP4-PP2", ylabel="% of stage time")
    for i, (slo, rates) in enumerate(found["capacity"].items()):
        drawn = bars.bar([x + 0.4 * i for x in range(len(rates))], list(rates.values()), 0.4, label=slo)
        bars.bar_label(drawn, fmt="%.2f", fontsize="x-small")
    bars.set_xticks([x + 0.2 for x in range(len(SERVED))], [name.replace(" ", "\n") for name in SERVED])
    bars.set(title="capacity, openchat", ylabel="requests/s")
    times.legend()
    bars.legend()
    return figure
