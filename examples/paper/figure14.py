"""What cutting a prompt into chunks costs it: keys read again, and matmuls of fewer tokens."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from paper.setting import YI, YI_ARTIFACT
from paper.table import Row
from paper.trials import Size

TITLE = "Figure 14: overhead of chunked prefills"
WHY = """
Time of a prompt of Yi-34B (two A100s) in chunks over its time whole; the paper's column is the artifact's file. The
model has the bound of 25 % and next to nothing at 2048. It has not the scatter of the measured ratios: those below 1
say that the measured whole prompt was slower than its chunks, and 1024 no better than 512, which no sum of operators
gives. Every chunk pays an iteration's host time: 15.8 ms on the artifact's machine, 2 ms by default.
"""
PROMPTS, CHUNKS = (2048, 4096, 8192, 16384), (512, 1024, 2048)
ARTIFACT = {
    512: (1.15, 1.19, 1.12, 1.00),
    1024: (1.17, 1.20, 1.11, 0.96),
    2048: (1.00, 1.02, 0.94, 0.81),
}
SERVINGS = {"default constants": YI, "artifact's constants": YI_ARTIFACT}


def compute(size: Size) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, serving in SERVINGS.items():
        whole = {prompt: serving.cost([], [(0, prompt)]) for prompt in PROMPTS}
        found[name] = {
            str(chunk): [
                sum(serving.cost([], [(start, chunk)]) for start in range(0, prompt, chunk)) / whole[prompt]
                for prompt in PROMPTS
            ]
            for chunk in CHUNKS
        }
    return found


def rows(found: dict[str, Any]) -> list[Row]:
    out = []
    for name, ratios in found.items():
        out.append(Row(f"chunks of 512, {name}, worst prompt", max(ratios["512"]), None, "paper: at most 1.25"))
        for chunk, measured in ARTIFACT.items():
            for i, prompt in enumerate(PROMPTS):
                out.append(Row(f"chunks of {chunk}, prompt of {prompt}, {name}", ratios[str(chunk)][i], measured[i]))
    return out


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (name, ratios) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for i, chunk in enumerate(CHUNKS):
            axes.plot(PROMPTS, ratios[str(chunk)], f"C{i}o-", label=f"chunks of {chunk}")
            axes.plot(PROMPTS, ARTIFACT[chunk], f"C{i}x:", label=f"chunks of {chunk}, measured")
        axes.axhline(1.25, color="gray", ls="--", label="25 %")
        axes.set(xscale="log", xlabel="prompt tokens", title=f"Yi-34B, 2 x A100, {name}")
        axes.set_xticks(PROMPTS, [str(prompt) for prompt in PROMPTS])
        axes.minorticks_off()
    figure.axes[0].set_ylabel("prefill time, chunked over whole")
    figure.axes[0].legend(fontsize="small")
    return figure
