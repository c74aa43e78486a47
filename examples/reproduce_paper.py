"""The tables and figures of Sarathi-Serve (OSDI'24) on simulated machines, beside the paper's numbers.

    python examples/reproduce_paper.py --out reproduction                     # all, a quarter of an hour on one core
    python examples/reproduce_paper.py --only figure12,table4 --quick

For each a picture, the numbers as JSON, and a Markdown table that says where ours differ and why. Capacity trials are
kept in --out: a run that was cut off goes on. Nothing is fitted to a figure: machines are those of `hardware`, whose
constants come from measured operators (and are assumed where there are none), policies and pages the engine's own.
"""

import json
import time
from pathlib import Path

from absl import app, flags
from paper import figure3, figure5, figure8, figure10, figure12, figure13, figure14, sensitivity, table4
from paper.table import markdown
from paper.trials import Size

FIGURES = {
    "figure3": figure3, "figure5": figure5, "figure8": figure8, "figure10": figure10, "figure12": figure12,
    "figure13": figure13, "figure14": figure14, "table4": table4, "sensitivity": sensitivity,
}  # fmt: skip

_ONLY = flags.DEFINE_list("only", list(FIGURES), "Which; figure5 has 7 in it, figure8 9, figure10 11.")
_QUICK = flags.DEFINE_bool("quick", False, "Shorter trials and searches to 10 %: a first look.")
_OUT = flags.DEFINE_string("out", "reproduction", "Folder of pictures, numbers and tables.")


def main(_) -> None:
    if unknown := set(_ONLY.value) - set(FIGURES):
        raise app.UsageError(f"--only={','.join(sorted(unknown))}: known are {', '.join(FIGURES)}")
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    trials = out / "trials.jsonl"
    size = Size(num_requests=96, tolerance=0.1, trials=trials) if _QUICK.value else Size(trials=trials)
    for name in _ONLY.value:
        figure, start = FIGURES[name], time.perf_counter()
        found = figure.compute(size)
        (out / f"{name}.json").write_text(json.dumps(found))
        table = markdown(figure.TITLE, figure.rows(found), figure.WHY)
        (out / f"{name}.md").write_text(table)
        figure.draw(found).savefig(out / f"{name}.png", dpi=130)
        print(f"{table}\n{name}: {time.perf_counter() - start:.1f} s\n", flush=True)


if __name__ == "__main__":
    app.run(main)
