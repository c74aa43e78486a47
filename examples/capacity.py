"""The highest load each policy serves within an SLO, on the real engine: capacity bars, and P99 TBT against load.

    python examples/capacity.py --num_requests 64 --out capacity.png        # half an hour or more on 2 cores

The SLO is 5 x the time of a decode iteration of max_num_seqs at the scaled 4k context (the paper's strict rule).
--simulate asks the simulator instead, with this machine's time model: seconds, and to be compared."""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax import budget, capacity, device, profiler, workload
from sarathi_jax.benchmark import EngineServer
from sarathi_jax.schedulers import make_policy
from sarathi_jax.workload_lengths import OPENCHAT_SHAREGPT4

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_POLICIES = flags.DEFINE_list("policies", ["sarathi", "vllm", "orca", "faster_transformer"], "Also the ablations.")
_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 64, "Requests of a trial.")
_SCALE = flags.DEFINE_float("scale", 1 / 8, "On the lengths of openchat_sharegpt4 (at most 8192 tokens in all).")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Sequences at once.")
_SLO = flags.DEFINE_float("slo_s", None, "P99 TBT allowed; None measures 5 decode iterations. Name it to resume.")
_TOLERANCE = flags.DEFINE_float("tolerance", 0.025, "Relative precision of the answer.")
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, arrivals and prompts.")
_SIMULATE = flags.DEFINE_bool("simulate", False, "Trials on the simulator, with the time model measured here.")
_OUT = flags.DEFINE_string("out", "capacity.png", "Picture; trials (resumable) and numbers go beside it.")


def draw(path: Path, found: dict[str, capacity.Capacity], slo: capacity.Slo) -> None:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    slo_ms, (figure, (bars, curves)) = 1e3 * slo.tbt_p99_s, plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    bars.bar_label(bars.bar(list(found), [answer.rate or 0.0 for answer in found.values()]), fmt="%.2f")
    bars.set(ylabel="capacity, requests/s", title=f"P99 TBT <= {slo_ms:.0f} ms, median delay <= 2 s")
    for name, answer in found.items():
        trials = sorted((t.rate, 1e3 * t.result.tbt_p99_s, t.passed) for t in answer.trials if t.result.tbt_p99_s)
        (line,) = curves.plot(*zip(*[t[:2] for t in trials if t[2]], strict=True), "o-", label=name)
        curves.plot(*zip(*[t[:2] for t in trials if not t[2]], strict=True), "x", color=line.get_color())
    curves.axhline(slo_ms, color="gray", ls="--", label="SLO")
    curves.set(xlabel="requests/s", ylabel="P99 TBT, ms", yscale="log", title="trials: o holds, x fails (ended early)")
    curves.legend()
    figure.savefig(path, dpi=130)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    n, out, max_len = _MAX_NUM_SEQS.value, Path(_OUT.value), int(8192 * _SCALE.value)
    engine = sj.Engine.load(_MODEL.value, scheduler=sj.Orca(max_num_seqs=n), max_model_len=max_len)
    plan = profiler.make_plan(engine.runner, budget.Iteration((max_len // 2,) * n, ()))
    decode_s = float(np.median([profiler.time_plan(engine.runner, plan).wall_s for _ in range(15)]))
    slo, tile = capacity.Slo(tbt_p99_s=_SLO.value or round(5 * decode_s, 3)), device.tile()
    model = engine.time_model(max_tokens=2 * max_len)  # two of the longest prompts at once
    tokens = budget.choose_budget(model, tbt_slo_s=slo.tbt_p99_s, max_num_seqs=n, context=max_len // 2, tile=tile)
    print(f"decode iteration {1e3 * decode_s:.1f} ms, {slo}, token budget {tokens} ({model.median_error=:.1%})")
    options = {"num_requests": _NUM_REQUESTS.value, "lengths": OPENCHAT_SHAREGPT4, "seed": (seed := _SEED.value)}
    requests, found = workload.make_workload(arrivals=workload.Poisson(rate=1.0), **options).scaled(_SCALE.value), {}
    for name in _POLICIES.value:
        policy = make_policy(name, token_budget=tokens, max_num_seqs=n)
        engine.set_scheduler(policy)
        server, key = EngineServer(engine), {"policy": policy, "machine": model.machine, "requests": repr(requests)}
        if _SIMULATE.value:
            pages, ahead, key["model"] = engine.pool.num_pages, engine.scheduler.lookahead, model
            server = sj.Simulator(policy, model, num_pages=pages, max_model_len=max_len, lookahead=ahead, tile=tile)
        trial = capacity.open_loop_trial(server, requests, slo, num_warm_up=4, seed=seed)
        trial = trial if _SIMULATE.value else capacity.undisturbed(trial, model)
        search = {"start_rate": 1.0, "tolerance": _TOLERANCE.value, "results_path": out.with_suffix(".trials.jsonl")}
        found[name] = capacity.find_capacity(trial, slo, key=capacity.config_key(**key, seed=seed), **search)
        print(f"{name}\n{found[name].to_table()}", flush=True)
        draw(out, found, slo)
    result = {"slo_s": slo.tbt_p99_s, "budget": tokens, "rates": {name: answer.rate for name, answer in found.items()}}
    out.with_suffix(".json").write_text(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
