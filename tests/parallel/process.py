"""One of the processes that test_processes.py starts: python process.py SCENARIO PORT,PORT PROCESS_ID OUTPUT."""

from __future__ import annotations

import json
import os
import sys
import warnings

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax.numpy as jnp

import sarathi_jax as sj
from sarathi_jax import distributed
from sarathi_jax.config import CacheConfig, ModelConfig
from sarathi_jax.engine import Engine
from sarathi_jax.models.decoder import Decoder
from sarathi_jax.models.weights import init_weights
from sarathi_jax.request import SamplingParams

CONFIG = ModelConfig(
    architecture="llama", vocab_size=263, hidden_size=32, intermediate_size=50, num_layers=2, num_heads=6,
    num_kv_heads=2, head_dim=16, max_position=128,
)  # fmt: skip
PROMPTS = [[7 * i % 263 for i in range(n)] for n in (1, 20, 33, 5, 12)]


def make_engine(parallel: sj.Parallel | None, *, num_pages: int = 24) -> Engine:
    """Weights so large that no two tokens are close; the devices of all processes share them."""
    model = Decoder(CONFIG, init_weights(CONFIG, jnp.dtype(jnp.float32), seed=3, scale=0.2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="token_budget=")
        engine = Engine(
            model, None, scheduler=sj.Sarathi(token_budget=16, max_num_seqs=3),
            cache=CacheConfig(page_size=8, num_pages=num_pages), max_model_len=64, parallel=parallel,
        )  # fmt: skip
    object.__setattr__(engine.runner.shapes, "num_tokens", (16,))
    return engine


def run(engine) -> dict[str, list[int]]:
    """Greedy and drawn, with a penalty, an abort and a request that comes late."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=8, presence_penalty=0.5 if i == 2 else 0.0,
            logit_bias={5: 1.0} if i == 3 else None,
        )  # fmt: skip
        engine.add_request(f"r{i}", prompt_token_ids=prompt, params=params)
    final, step = {}, 0
    while engine.has_unfinished():
        final |= {output.request_id: output.token_ids for output in engine.step()}
        engine.check_integrity()
        step += 1
        if step == 4:
            engine.abort("r1")
            engine.add_request("late", prompt_token_ids=[1, 2, 3], params=SamplingParams(temperature=0.0, max_tokens=4))
    final.pop("r1", None)
    return final


def main(scenario: str, ports: str, process_id: str, output: str) -> None:
    me, (jax_port, port) = int(process_id), map(int, ports.split(","))
    channel = distributed.initialize(f"127.0.0.1:{jax_port}", num_processes=2, process_id=me, port=port)
    engine = make_engine(sj.Parallel(tensor=4))
    if scenario == "all well":
        engine.warm_up(compile_cache=False)
    num_compiled = engine.num_compiled

    def lead(leader):
        if scenario == "leader dies":
            os.kill(os.getpid(), 9)
        result = run(leader)
        assert leader.num_compiled == num_compiled or scenario != "all well"
        return result

    if me == 1 and scenario in ("follower dies", "out of step"):
        plan, count = engine.scheduler.plan, 0

        def fail(now):
            nonlocal count
            count += 1
            if count == 3 and scenario == "follower dies":
                os.kill(os.getpid(), 9)
            made = plan(now)
            return type(made)(chunks=made.chunks[:1], admitted=made.admitted) if count == 3 else made

        engine.scheduler.plan = fail
    result = distributed.serve(engine, channel, lead)
    if me == 0:
        with open(output, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
