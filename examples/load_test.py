"""The same requests at the same rate under every policy: time to first token against time between tokens.

    python examples/load_test.py --rate 0.8 --out load.json

Open loop: requests arrive when they arrive, however busy the engine is. `--trace` writes a Perfetto trace per policy.
"""

import json
from pathlib import Path

from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax import trace, workload
from sarathi_jax.benchmark import EngineServer
from sarathi_jax.driver import run_open_loop
from sarathi_jax.schedulers import POLICIES, make_policy
from sarathi_jax.workload_lengths import OPENCHAT_SHAREGPT4

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_POLICIES = flags.DEFINE_list("policies", list(POLICIES), "Which, in turn.")
_RATE = flags.DEFINE_float("rate", 0.8, "Requests/s.")
_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 64, "Requests for each policy.")
_SCALE = flags.DEFINE_float("scale", 1 / 8, "On the lengths of openchat_sharegpt4 (at most 8192 tokens in all).")
_TOKEN_BUDGET = flags.DEFINE_integer("token_budget", 160, "Of the policies that have one.")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Sequences at once.")
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, arrivals and prompts.")
_OUT = flags.DEFINE_string("out", "load.json", "The reports, as JSON.")
_TRACE = flags.DEFINE_bool("trace", False, "Also write a trace of each run, for ui.perfetto.dev.")


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    n, tokens, max_len = _MAX_NUM_SEQS.value, _TOKEN_BUDGET.value, int(8192 * _SCALE.value)
    policies = {name: make_policy(name, token_budget=tokens, max_num_seqs=n) for name in _POLICIES.value}
    options = {"num_requests": _NUM_REQUESTS.value, "lengths": OPENCHAT_SHAREGPT4, "seed": _SEED.value}
    requests = workload.make_workload(arrivals=workload.Poisson(rate=_RATE.value), **options).scaled(_SCALE.value)
    engine = sj.Engine.load(_MODEL.value, scheduler=sj.Orca(max_num_seqs=n), max_model_len=max_len)
    model, out, reports = engine.time_model(), Path(_OUT.value), {}
    print(f"{_RATE.value} requests/s, token budget {tokens}, ms; TTFT and TBT as P50 / P99, the longest iteration last")
    for name, policy in policies.items():
        engine.set_scheduler(policy)
        reports[name] = report = run_open_loop(EngineServer(engine), requests, num_warm_up=4, seed=_SEED.value)
        assert report.ttft is not None and report.tbt is not None and report.iteration_wall is not None
        ms = [1e3 * s for s in (report.ttft.p50, report.ttft.p99, report.tbt.p50, report.tbt.p99)]
        longest = 1e3 * report.iteration_wall.max
        print(
            f"{name:18} TTFT {ms[0]:7.0f} /{ms[1]:7.0f}   TBT {ms[2]:6.0f} /{ms[3]:6.0f}   {longest:7.0f}", flush=True
        )
        if _TRACE.value:
            trace.write_trace(report, out.with_suffix(f".{name}.trace.json"))
    if "sarathi" in reports:
        bound = model([max_len - 1] * n, [(max_len - tokens, tokens - n)])
        ratio = reports["sarathi"].iteration_wall.max / bound
        print(f"sarathi's longest iteration is {ratio:.2f} x the time predicted for a full one ({1e3 * bound:.0f} ms)")
    out.write_text(json.dumps({name: json.loads(report.to_json()) for name, report in reports.items()}))


if __name__ == "__main__":
    app.run(main)
