"""Two requests are decoding when two long prompts arrive: what every policy does next, iteration by iteration.

    python examples/compare_policies.py --out policies.png

Real runs, drawn as figure 4 of the Sarathi-Serve paper: a bar is an iteration, a stall is where A and B get no token.
"""

import json
from pathlib import Path

import matplotlib as mpl
from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax.benchmark import EngineServer
from sarathi_jax.driver import run_open_loop
from sarathi_jax.workload import WorkItem, Workload

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_LONG = flags.DEFINE_integer("long", 900, "Tokens of the two long prompts.")
_ARRIVAL = flags.DEFINE_float("arrival_s", 0.5, "When they arrive.")
_TOKEN_BUDGET = flags.DEFINE_integer("token_budget", 128, "Of the policies that have one.")
_OUT = flags.DEFINE_string("out", "policies.png", "Picture; the numbers go beside it as JSON.")

COLORS = {"decode": "#4c9f70", "prefill": "#d1495b", "hybrid": "#2e86ab"}


def draw(path: Path, reports: dict) -> None:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(
        len(reports), 1, figsize=(12, 1.5 * len(reports)), sharex=True, layout="constrained"
    )
    for axes, (name, report) in zip(all_axes, reports.items(), strict=True):
        for step in report.iterations:
            kind = "prefill" if not step.num_decode_tokens else "hybrid" if step.num_prefill_tokens else "decode"
            for chunk in step.chunks:
                row = int(chunk.request_id[1:])
                color = COLORS["decode" if chunk.num_tokens == 1 else "prefill"]
                axes.barh(row, step.wall_s, 0.8, step.start_s - report.start_s, color=color, edgecolor="white", lw=0.2)
            axes.barh(4, step.wall_s, 0.5, step.start_s - report.start_s, color=COLORS[kind], edgecolor="white", lw=0.2)
        stall = max(gap for record in report.requests[:2] for gap in record.tbts_s)
        axes.axvline(_ARRIVAL.value, color="black", lw=0.8, ls=":")
        axes.set_yticks(range(5), ["A", "B", "C", "D", "iteration"], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(f"{name}: longest gap between tokens of A or B {1e3 * stall:.0f} ms", fontsize=9, loc="left")
    all_axes[-1].set_xlabel("s   (green: decodes, red: prompt chunks; last row blue: both in one iteration)")
    figure.savefig(path, dpi=130)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    budget, n = _TOKEN_BUDGET.value, 4
    policies = {
        "FasterTransformer": sj.FasterTransformer(max_num_seqs=n),
        "Orca": sj.Orca(max_num_seqs=n),
        "vLLM (2023)": sj.VLLM(max_num_seqs=n),
        "chunked only": sj.ChunkedOnly(token_budget=budget, max_num_seqs=n),
        "hybrid only": sj.HybridOnly(token_budget=budget, max_num_seqs=n),
        "Sarathi": sj.Sarathi(token_budget=budget, max_num_seqs=n),
    }
    short = [WorkItem(arrived_at_s=0.0, num_prefill_tokens=32, num_decode_tokens=60) for _ in range(2)]
    long = [WorkItem(arrived_at_s=_ARRIVAL.value, num_prefill_tokens=_LONG.value, num_decode_tokens=12)] * 2
    workload = Workload(items=(*short, *long))
    engine = sj.Engine.load(_MODEL.value, scheduler=policies["Orca"], max_model_len=1024)
    reports = {}
    for name, policy in policies.items():
        engine.set_scheduler(policy)
        reports[name] = run_open_loop(EngineServer(engine), workload, num_warm_up=4)
        gaps = [record.tbts_s for record in reports[name].requests[:2]]
        print(f"{name:18} longest gap of A, B {1e3 * max(map(max, gaps)):7.0f} ms   "
              f"last first token {max(r.ttft_s or 0 for r in reports[name].requests):6.2f} s")  # fmt: skip
    out = Path(_OUT.value)
    draw(out, reports)
    out.with_suffix(".json").write_text(json.dumps({k: json.loads(r.to_json()) for k, r in reports.items()}))


if __name__ == "__main__":
    app.run(main)
