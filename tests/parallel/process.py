"""One of the processes that test_processes.py starts: python process.py SCENARIO PORT,PORT,... PROCESS_ID FOLDER."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp

import sarathi_jax as sj
from sarathi_jax import budget, distributed, profiler
from sarathi_jax.budget import Iteration, TimeModel
from sarathi_jax.channel import Channel
from sarathi_jax.config import CacheConfig, ModelConfig
from sarathi_jax.engine import Engine
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.placement import PlacedPart, layout, load_parts
from sarathi_jax.models.saved import SavedModel
from sarathi_jax.models.weights import init_weights
from sarathi_jax.request import SamplingParams, StepPlan

CONFIG = ModelConfig(
    architecture="llama", vocab_size=263, hidden_size=32, intermediate_size=50, num_layers=4, num_heads=6,
    num_kv_heads=2, head_dim=16, max_position=128,
)  # fmt: skip
PROMPTS = [[7 * i % 263 for i in range(n)] for n in (1, 20, 33, 5, 12)]
MESHES = {
    "TP4": sj.Parallel(tensor=4),  # of all processes
    "TP2 x PP2": sj.Parallel(tensor=2, pipeline=2),  # a process has a stage
    "PP4": sj.Parallel(pipeline=4),  # and two of them
}


def make_model() -> Decoder:
    """Weights so large that no two tokens are close."""
    return Decoder(CONFIG, init_weights(CONFIG, jnp.dtype(jnp.float32), seed=3, scale=0.2))


def restored_model(folder: Path, parallel: sj.Parallel) -> Sequence[PlacedPart]:
    return load_parts(SavedModel(folder / "saved"), jnp.dtype(jnp.float32), *layout(CONFIG, parallel))


def make_engine(
    model: Decoder | Sequence[PlacedPart], parallel: sj.Parallel | None, *, num_pages: int = 24, auto: bool = False
) -> Engine:
    budgets = {"token_budget": "auto", "tbt_slo_s": 1.0} if auto else {"token_budget": 16}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="token_budget=")
        engine = Engine(
            model, None, scheduler=sj.Sarathi(**budgets, max_num_seqs=3), parallel=parallel, max_model_len=64,
            cache=CacheConfig(page_size=8, num_pages=num_pages),
        )  # fmt: skip
    object.__setattr__(engine.runner.shapes, "num_tokens", (16,))
    return engine


def time_model(seconds: float) -> TimeModel:
    """Of 16 rows, whatever is in them."""
    return TimeModel(
        shapes=(16,), shape_s=(seconds,), per_decode_s=0, per_walked_key_s=0, per_chunk_s=0, per_pair_s=0,
        per_chunk_key_s=0,
    )  # fmt: skip


def a_few_iterations(*_, **__) -> tuple[list[Iteration], list[Iteration]]:
    """To profile: a decode, a chunk, both."""
    return [Iteration((9,), ()), Iteration((), ((8, 12),))], [Iteration((9,), ((8, 12),))]


def run(engine) -> dict[str, list]:
    """Tokens and logprobs: greedy and drawn, with a penalty, an abort and a request that comes late."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=8, presence_penalty=0.5 if i == 2 else 0.0,
            logit_bias={5: 1.0} if i == 3 else None, logprobs=2 if i == 3 else None,
            prompt_logprobs=1 if i == 4 else None,
        )  # fmt: skip
        engine.add_request(f"r{i}", prompt_token_ids=prompt, params=params)
    final, step = {}, 0
    while engine.has_unfinished():
        final |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        step += 1
        if step == 4:
            engine.abort("r1")
            engine.add_request("late", prompt_token_ids=[1, 2, 3], params=SamplingParams(temperature=0.0, max_tokens=4))
    final.pop("r1", None)
    scores = lambda rows: [[(token, row[token].logprob) for token in sorted(row)] for row in rows or () if row]
    return {
        name: [output.token_ids, scores(output.logprobs), scores(output.prompt_logprobs)]
        for name, output in final.items()
    }


def change_plan(engine: Engine, number: int, change: Callable[[StepPlan], Any]) -> None:
    """Have the scheduler's plan of that number changed."""
    make_plan, count = engine.scheduler.plan, 0

    def plan(now: float) -> StepPlan:
        nonlocal count
        count += 1
        made = make_plan(now)
        return change(made) if count == number else made

    engine.scheduler.plan = plan


def all_well(ports: list[int], me: int, folder: Path, channel: Channel) -> None:
    """Every mesh in turn, each with a channel of its own, and what cannot be."""
    model, answers = make_model(), {}
    for parallel, kind in ((sj.Parallel(tensor=2), Engine), (sj.Parallel(tensor=2, data=2), sj.Replicas)):
        try:
            kind(model, None, parallel=parallel)
            refused = "nothing"
        except ValueError as error:
            refused = str(error)
        answers[f"refused {kind.__name__} in {me}"] = refused
    if me == 1:  # meanwhile the other one waits for it in what they do together
        answers["alone"] = run(make_engine(model, sj.Parallel(pipeline=2, devices=tuple(jax.local_devices()))))
    profiler.fit = lambda *_, **__: time_model(0.1 + 10 * me)  # by process 1's clock nothing would do
    budget.profile_plan = a_few_iterations
    for (name, parallel), port in zip(MESHES.items(), ports, strict=True):
        is_restored = name != "PP4"
        engine = make_engine(
            restored_model(folder, parallel) if is_restored else model, None if is_restored else parallel,
            auto=name == "TP2 x PP2",
        )  # fmt: skip
        engine.warm_up(compile_cache=False)
        num_compiled = engine.num_compiled
        lead = lambda leader: (run(leader), leader.last_step.collective_bytes)
        if name != "TP4":
            channel = Channel("127.0.0.1", port, num_processes=2, process_id=me, timeout_s=120)
        result = distributed.serve(engine, channel, lead)
        assert engine.num_compiled == num_compiled, f"{name}: something was compiled while serving"
        assert engine.scheduler.config.token_budget == 16
        if result:
            answers[name] = result
    (folder / f"answers{me}.json").write_text(json.dumps(answers))


def main(scenario: str, ports: str, process_id: str, folder: str) -> None:
    me, (jax_port, port, *others) = int(process_id), map(int, ports.split(","))
    channel = distributed.initialize(f"127.0.0.1:{jax_port}", num_processes=2, process_id=me, port=port)
    assert jax.config.read("jax_cuda_visible_devices") == "all", (
        "Slurm says one process on this node; it is to have all GPUs"
    )
    if scenario == "all well":
        all_well([port, *others], me, Path(folder), channel)
        return
    engine = make_engine(make_model(), MESHES["TP2 x PP2" if scenario == "follower dies" else "TP4"])

    def lead(leader):
        if scenario == "leader dies":
            os.kill(os.getpid(), 9)
        return run(leader)

    if me == 1 and scenario == "follower dies":
        change_plan(engine, 3, lambda plan: os.kill(os.getpid(), 9))
    result = distributed.serve(engine, channel, lead)
    if me == 0:
        (Path(folder) / "answers0.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
