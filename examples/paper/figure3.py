"""Throughput by batch size: a prompt saturates the device by itself, decodes need each other."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from paper.setting import MISTRAL, YI, YI_ARTIFACT
from paper.table import Row
from paper.trials import Size

TITLE = "Figure 3: throughput by batch size"
WHY = """
The curves are those of Mistral-7B on an A100, prompts and contexts of 1024; the times the artifact's, of Yi-34B on
two A100s, contexts of 1022. A decode costs the artifact 1 ms, 15 times the reading of its keys, and an iteration 16
ms of host time. The device's own constants, which nothing of the artifact went into, have neither, so decodes are
faster here. In-sample rows have attention and host fitted to these very times.
"""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
DECODE_MS = (46.8, 47.5, 48.8, 69.7, 77.3, 87.9, 127.8, 189.3)
PROMPTS, PREFILL_MS = (128, 512, 1024, 2048, 4096, 8192, 16384), (48, 106, 214, 366, 758, 1863, 4408)
SERVINGS = {"default": YI, "in-sample": YI_ARTIFACT}


def compute(size: Size) -> dict[str, Any]:
    cost = MISTRAL.cost
    return {
        "prefill_tokens_per_s": [n * 1024 / cost([], [(0, 1024)] * n) for n in BATCHES],
        "decode_tokens_per_s": [n / cost([1024] * n, []) for n in BATCHES],
        "yi_ms": {
            name: {
                "decode": [1e3 * serving.cost([1022] * n, []) for n in BATCHES],
                "prefill": [1e3 * serving.cost([], [(0, n)]) for n in PROMPTS],
            }
            for name, serving in SERVINGS.items()
        },
    }


def rows(found: dict[str, Any]) -> list[Row]:
    prefill, decode, yi = found["prefill_tokens_per_s"], found["decode_tokens_per_s"], found["yi_ms"]
    ms, note = yi["default"]["decode"], "paper: almost linear"
    out = [
        Row("Mistral-7B prefill tokens/s, batch 8 over batch 1", prefill[3] / prefill[0], 1.0, "paper: saturated"),
        Row("Mistral-7B decode tokens/s, batch 32 over batch 1", decode[5] / decode[0], None, note),
        Row("Yi-34B decode tokens/s, 128 over 1", 128 * ms[0] / ms[-1], 128 * DECODE_MS[0] / DECODE_MS[-1]),
    ]
    for name, times in yi.items():
        for i in (0, 3, 5, 7):
            out.append(Row(f"Yi-34B decode of {BATCHES[i]}, ms, {name}", times["decode"][i], DECODE_MS[i]))
        for i in (1, 3, 5):
            out.append(Row(f"Yi-34B prefill of {PROMPTS[i]}, ms, {name}", times["prefill"][i], PREFILL_MS[i]))
    return out


def draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, times = figure.subplots(1, 2)
    for kind in ("prefill", "decode"):
        curves.plot(BATCHES, found[f"{kind}_tokens_per_s"], "o-", label=kind)
    for (name, ms), style in zip(found["yi_ms"].items(), ("-", "--"), strict=True):
        times.plot(BATCHES, ms["decode"], f"C0{style}", label=f"decodes, {name}")
        times.plot(PROMPTS, ms["prefill"], f"C1{style}", label=f"prefill, {name}")
    times.plot(BATCHES, DECODE_MS, "C0o", label="measured decodes")
    times.plot(PROMPTS, PREFILL_MS, "C1o", label="measured prefills")
    for axes in (curves, times):
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize="small")
    curves.set(xlabel="batch size", ylabel="tokens/s", title="Mistral-7B, A100, length 1024")
    times.set(xlabel="batch size, or prompt tokens", ylabel="ms", title="Yi-34B, 2 x A100")
    return figure
