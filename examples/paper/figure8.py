"""What a prompt does to the decodes whose iteration it joins, whole or as a chunk."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from paper.setting import MISTRAL, YI, YI_ARTIFACT, Serving
from paper.table import Row
from paper.trials import Size

TITLE = "Figures 8 and 9: the cost of coalescing prompts with decodes"
WHY = """
Time of a decode iteration with a prompt in it over its time without, contexts of 1024. Whole prompts pass 28.3 x
between 4096 and 8192 tokens; how long the paper's went is not among its published numbers, and the greatest ratio is
where one stops. The chunk fills the iteration to the budget at the end of its prompt, where it costs most. Of
Mistral-7B 512 tokens are 24 ms of arithmetic at an A100's peak, and the paper's own SLO of 5 iterations of 32 decodes
puts one at 20 ms: so such a chunk at least doubles it, there as here, and "hardly" is against the whole prompt's 28.
"""
PROMPTS = (1024, 2048, 4096, 8192, 16384)
BATCHES = (8, 16, 32, 64)
CONTEXT, BUDGET = 1024, 512
SERVINGS = {"Mistral-7B": MISTRAL, "Yi-34B": YI, "Yi-34B, artifact's constants": YI_ARTIFACT}


def slowdown(serving: Serving, batch: int, prompt: int, chunk: int) -> float:
    """Of a batch of decodes by the last `chunk` tokens of a prompt."""
    decodes = [CONTEXT] * batch
    return serving.cost(decodes, [(prompt - chunk, chunk)]) / serving.cost(decodes, [])


def compute(size: Size) -> dict[str, Any]:
    return {
        name: {
            str(batch): {
                "whole": [slowdown(serving, batch, prompt, prompt) for prompt in PROMPTS],
                "chunk": [slowdown(serving, batch, prompt, BUDGET - batch) for prompt in PROMPTS],
            }
            for batch in BATCHES
        }
        for name, serving in SERVINGS.items()
    }


def rows(found: dict[str, Any]) -> list[Row]:
    out = []
    for name, batches in found.items():
        for i, prompt in enumerate(PROMPTS[2:], 2):
            worst = max(ratios["whole"][i] for ratios in batches.values())
            out.append(Row(f"{name}, whole prompt of {prompt}, up to", worst, 28.3))
        worst = max(max(ratios["chunk"]) for ratios in batches.values())
        out.append(Row(f"{name}, chunk to a budget of {BUDGET}, up to", worst, None, "paper: hardly raised"))
    whole, chunk = (found["Mistral-7B"]["16"][kind][-1] for kind in ("whole", "chunk"))
    out.append(Row("Mistral-7B, 16 decodes, prompt of 16384: whole over chunk", whole / chunk))
    return out


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(15, 4), layout="constrained")
    for axes, (name, batches) in zip(figure.subplots(1, 3, sharey=True), found.items(), strict=True):
        for i, (batch, ratios) in enumerate(batches.items()):
            axes.plot(PROMPTS, ratios["whole"], f"C{i}o-", label=f"{batch} decodes, whole prompt")
            axes.plot(PROMPTS, ratios["chunk"], f"C{i}s--", label=f"{batch} decodes, chunk to {BUDGET}")
        axes.axhline(28.3, color="gray", ls=":", label="28.3")
        axes.set(xscale="log", yscale="log", xlabel="prompt tokens", title=name)
        axes.set_xticks(PROMPTS, [str(prompt) for prompt in PROMPTS])
        axes.minorticks_off()
    figure.axes[0].set_ylabel("iteration, times that of decodes alone")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    return figure
