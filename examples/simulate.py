"""A model on devices that you need not have, under one of the policies: the metrics table of a simulated run.

    python examples/simulate.py --model llama3-8b --device h100 --replicas 2
    python examples/simulate.py --model falcon-180b --tensor_parallel 4 --pipeline_parallel 2 --policy vllm \
        --rate 0.5 --trace_out falcon.json                                  # look at it in ui.perfetto.dev

Lengths are openchat_sharegpt4's or a file's: a .csv, or a Mooncake .jsonl with its own arrival times (.gz of either).
"""

import time

from absl import app, flags

import sarathi_jax as sj
from sarathi_jax.cost_model import CostModel
from sarathi_jax.driver import run_open_loop
from sarathi_jax.hardware import DEVICES, find_device
from sarathi_jax.known_models import MODELS, model_config
from sarathi_jax.schedulers import POLICIES, make_policy
from sarathi_jax.trace import write_trace
from sarathi_jax.workload import Poisson, Workload, make_workload
from sarathi_jax.workload_files import load_csv, load_mooncake
from sarathi_jax.workload_lengths import OPENCHAT_SHAREGPT4

_MODEL = flags.DEFINE_enum("model", "mistral-7b", sorted(MODELS), "Its shape is what counts.")
_DEVICE = flags.DEFINE_enum("device", "a100", sorted(DEVICES), "What it runs on.")
_TENSOR = flags.DEFINE_integer("tensor_parallel", 1, "Devices of a stage.")
_PIPELINE = flags.DEFINE_integer("pipeline_parallel", 1, "Stages.")
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Copies of all that, behind one queue.")
_POLICY = flags.DEFINE_enum("policy", "sarathi", sorted(POLICIES), "Scheduler.")
_TOKEN_BUDGET = flags.DEFINE_integer("token_budget", 2048, "Of the policies that have one.")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 128, "Sequences at once, of each replica.")
_MAX_LEN = flags.DEFINE_integer("max_model_len", None, "Longest prompt and output together; None: what there is.")
_LOOKAHEAD = flags.DEFINE_integer("lookahead", 0, "1: plan while the step before runs (one stage only).")
_TRACE = flags.DEFINE_string("trace", None, "Requests from a file; those that are too long are left out, and said.")
_NUM = flags.DEFINE_integer("num_requests", 1000, "At most so many.")
_RATE = flags.DEFINE_float("rate", None, "Requests/s. None: the trace's own, else 2.")
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and arrivals.")
_TRACE_OUT = flags.DEFINE_string("trace_out", None, "The run as a timeline, with a lane for every pipeline stage.")


def requests() -> Workload:
    if _TRACE.value is None:
        rate = Poisson(rate=_RATE.value or 2.0)
        return make_workload(num_requests=_NUM.value, arrivals=rate, lengths=OPENCHAT_SHAREGPT4, seed=_SEED.value)
    load = load_csv if ".csv" in _TRACE.value else load_mooncake
    loaded = load(_TRACE.value, max_total_tokens=_MAX_LEN.value, on_bad_row="skip" if _MAX_LEN.value else "raise")
    print(loaded.report)
    work = loaded.workload.head(min(_NUM.value, len(loaded.workload)))
    if work.requests_per_s is None:
        return work.with_arrivals(Poisson(rate=_RATE.value or 2.0), seed=_SEED.value)
    return work.with_rate(_RATE.value) if _RATE.value else work


def main(_) -> None:
    work, name, n, budget = requests(), _POLICY.value, _MAX_NUM_SEQS.value, _TOKEN_BUDGET.value
    cost = CostModel(
        model=model_config(_MODEL.value), device=find_device(_DEVICE.value), tensor_parallel=_TENSOR.value,
        pipeline_parallel=_PIPELINE.value,
    )  # fmt: skip
    policy = make_policy(name, token_budget=budget, max_num_seqs=n)
    max_len = _MAX_LEN.value or max(item.num_total_tokens for item in work)
    longest_step = budget if hasattr(policy, "token_budget") else max_len
    num_pages = cost.kv_tokens(max_step_tokens=longest_step, max_num_seqs=n) // 16
    simulator = sj.Simulator(
        policy, cost, num_pages=num_pages, max_model_len=max_len, lookahead=_LOOKAHEAD.value,
        tile=cost.device.token_tile, num_replicas=_REPLICAS.value, kv_window=cost.model.kv_window,
    )  # fmt: skip
    start = time.perf_counter()
    report = run_open_loop(simulator, work)
    table = report.to_table()
    print(f"{policy}\n{_REPLICAS.value} x {_MODEL.value} on {_DEVICE.value}, {num_pages} pages of 16 each\n{table}")
    print(f"{report.wall_s:,.1f} s simulated in {time.perf_counter() - start:.2f} s")
    if _TRACE_OUT.value:
        print(f"{write_trace(report, _TRACE_OUT.value)} events in {_TRACE_OUT.value}")


if __name__ == "__main__":
    app.run(main)
