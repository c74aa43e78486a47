"""Where the time of an iteration goes, the plateau of the linear layers, and the steps of their tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from paper.setting import MISTRAL
from paper.table import Row
from paper.trials import Size

from sarathi_jax.cost_model import CostModel
from sarathi_jax.hardware import Efficiency, find_device
from sarathi_jax.known_models import model_config

TITLE = "Figures 5 and 7: operators, and the plateau of linear layers"
WHY = """
Compute-bound in theory: the first token count whose arithmetic in LLaMA2-70B's linear layers (TP4) outlasts their
memory traffic on an A100 without friction or tiles. Reached: 90 % of the tokens/s at 4096; the paper reads 500 to 600
off measured curves. Tiles of 64 rows give the A100's measured matmuls of all sizes best (medians of 5 to 6 %, with
128 rows 6 to 10 %) but the step behind 256 too low: measured layers of four models take 1.29 to 1.35 as long for 264
tokens, predicted ones 1.13 to 1.22, with 128 rows 1.32 to 1.45.
"""
IDEAL = {"efficiency": Efficiency(math=1.0, memory=1.0, matmul_kernel_s=0.0), "num_cores": 1, "tile": (1, 1)}
COUNTS = (1, 128, 256, 512, 1024, 2048, 4096)


def layer_s(cost: CostModel, counts: list[int], **changes: Any) -> np.ndarray:
    """Seconds of a layer's matmuls, on the device with changes."""
    cost = replace(cost, device=replace(cost.device, **changes))
    return np.array([sum(cost.matmuls_s(count).values()) for count in counts])


def compute(size: Size) -> dict[str, Any]:
    whole = CostModel(model=model_config("llama2-70b"), device=find_device("a100"))
    quarter, counts, few = replace(whole, tensor_parallel=4), [1, *range(16, 4097, 16)], [*range(1, 513)]
    math = layer_s(quarter, few, **IDEAL, memory_bytes_per_s=1e16)
    memory = layer_s(quarter, few, **IDEAL, flops_per_s=1e18)
    times = {tp: layer_s(replace(whole, tensor_parallel=tp), counts) for tp in (1, 2, 4, 8)}
    small, large = (layer_s(MISTRAL.cost, [1, 128, 256, 257], tile=(rows, 64)) for rows in (64, 128))
    return {
        "counts": counts,
        "layer_ms": {str(tp): (1e3 * seconds).tolist() for tp, seconds in times.items()},
        "compute_bound": 1 + int(np.argmax(math >= memory)),
        "reached": {str(tp): counts[int(np.argmax(counts / s >= 0.9 * counts[-1] / s[-1]))] for tp, s in times.items()},
        "one_to_128": float(small[1] / small[0]),
        "tile_step": [float(each[3] / each[2]) for each in (small, large)],
        "operators_s": [MISTRAL.cost.operators_s([], [(0, count)]) for count in COUNTS],
    }


def rows(found: dict[str, Any]) -> list[Row]:
    return [
        Row("linear layers compute-bound in theory from, tokens", found["compute_bound"], 200.0, "paper: about"),
        *(Row(f"reached with TP{tp}, tokens", n, (500.0, 600.0)) for tp, n in found["reached"].items()),
        Row("Mistral-7B linear layers, 128 tokens over 1", found["one_to_128"], 1.0, "paper: about as much"),
        Row("Mistral-7B linear layers, 257 tokens over 256", found["tile_step"][0], 1.32),
        Row("  with tiles of 128 rows", found["tile_step"][1], 1.32),
    ]


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    bottom = np.zeros(len(COUNTS))
    for kind in ("linear", "attention", "others", "host"):
        share = np.array([parts[kind] / sum(parts.values()) for parts in found["operators_s"]])
        bars.bar(range(len(COUNTS)), share, bottom=bottom, label=kind)
        bottom += share
    bars.set_xticks(range(len(COUNTS)), [str(count) for count in COUNTS])
    bars.set(xlabel="prompt tokens (1: a decode)", ylabel="share of the iteration", title="Mistral-7B, A100")
    for tp, ms in found["layer_ms"].items():
        curves.plot(found["counts"], ms, label=f"TP{tp}")
    curves.loglog()
    curves.set(xlabel="tokens", ylabel="linear layers, ms a layer", title="LLaMA2-70B, A100")
    bars.legend(loc="lower right")
    curves.legend()
    return figure
