"""Measure how long iterations take on this machine, and draw the token budget that holds a time between tokens.

python examples/calibrate_budget.py --tbt_slo_s 0.2 --out budget.png
"""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax import budget, device, profiler

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_SLO = flags.DEFINE_float("tbt_slo_s", 0.2, "Longest time between tokens that is acceptable (s).")
_MAX_BUDGET = flags.DEFINE_integer("max_budget", 512, "Largest budget to look at.")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Sequences that decode at once.")
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 1024, "Longest sequence.")
_CONTEXT = flags.DEFINE_integer(
    "context", 512, "Tokens before the decodes and the chunk that the budget must hold for."
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each iteration; the median counts.")
_OUT = flags.DEFINE_string("out", "budget.png", "Picture; the numbers go beside it as JSON.")


def draw(path: Path, model: budget.TimeModel, samples: list[budget.Sample], chosen: int, tile: int) -> None:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    n, context = _MAX_NUM_SEQS.value, _CONTEXT.value
    for label, chosen_samples, marker in (
        ("one chunk, from 0", [s for s in samples if not s.iteration.decodes and s.iteration.chunks[0][0] == 0], "o"),
        ("one chunk, further on", [s for s in samples if not s.iteration.decodes and s.iteration.chunks[0][0]], "."),
        ("decodes", [s for s in samples if not s.iteration.chunks], "x"),
        ("hybrid", [s for s in samples if s.iteration.chunks and s.iteration.decodes], "^"),
    ):
        axes.plot([s.iteration.num_tokens for s in chosen_samples], [1e3 * s.seconds for s in chosen_samples], marker,
                  label=f"measured: {label}", alpha=0.7)  # fmt: skip
    tokens = np.arange(1, model.shapes[-1] + 1)
    axes.plot(tokens, [1e3 * model([], [(0, int(t))]) for t in tokens], "k-", lw=1, label="model: one chunk, from 0")
    hybrid = np.arange(n + 1, model.shapes[-1] + 1)
    full = [1e3 * model([context] * n, [(context, int(t) - n)]) for t in hybrid]
    axes.plot(hybrid, full, "r-", lw=1.5, label=f"model: {n} decodes + a chunk, all at {context}")
    axes.axhline(1e3 * _SLO.value, color="gray", ls="--", label=f"SLO {1e3 * _SLO.value:.0f} ms")
    axes.axvline(chosen, color="r", ls=":", label=f"token budget {chosen} (tile {tile})")
    axes.set(xlabel="tokens in the iteration", ylabel="ms", xlim=0, ylim=0, title=model.machine.split(" rows-")[0])
    axes.title.set_fontsize(7)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    sarathi = sj.Sarathi(token_budget=_MAX_BUDGET.value, max_num_seqs=_MAX_NUM_SEQS.value)
    engine = sj.Engine.load(_MODEL.value, scheduler=sarathi, max_model_len=_MAX_MODEL_LEN.value)
    largest = _MAX_BUDGET.value
    to_fit, held_out = profiler.profile(
        engine.runner, max_model_len=_MAX_MODEL_LEN.value, max_tokens=largest, repeats=_REPEATS.value
    )
    model = profiler.fit(engine.runner, to_fit, held_out, max_tokens=largest)
    print(f"{len(to_fit)} iterations fitted; {len(held_out)} held out: median error {model.median_error:.1%}")
    tile = device.tile()
    num_seqs, context = _MAX_NUM_SEQS.value, _CONTEXT.value
    chosen = budget.choose_budget(model, tbt_slo_s=_SLO.value, max_num_seqs=num_seqs, context=context, tile=tile)
    predicted_s = model([context] * num_seqs, [(context, chosen - num_seqs)])
    print(f"token budget {chosen}, tiles of {tile}: {1e3 * predicted_s:.0f} of {1e3 * _SLO.value:.0f} ms predicted")
    out = Path(_OUT.value)
    draw(out, model, to_fit + held_out, chosen, tile)
    model.save(out.with_suffix(".json"))
    measured = [[*sample.iteration, sample.seconds] for sample in to_fit + held_out]
    out.with_suffix(".samples.json").write_text(json.dumps(measured))
    print(f"wrote {out}, {out.with_suffix('.json')} and {out.with_suffix('.samples.json')}")


if __name__ == "__main__":
    app.run(main)
