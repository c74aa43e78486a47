"""Memory plans against the compilers: whole steps of big models, compiled for devices that are not here.

python tests/aot/memory_plans.py tpu|cuda [part of "device model attention"]

Prints, for the fullest device, what `sarathi_jax.plan` counts and what the compiled step holds at its peak, with a pool
of all tokens that the plan finds room for and each attention backend; exits 1 when they differ by more than 5 %. In the
environments of `.ci/aot`.
"""

from __future__ import annotations

import functools
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
from compile_ahead import abstract
from targets import Target, _h100, _tpu

from sarathi_jax import parallel, runner
from sarathi_jax.attention import Backend
from sarathi_jax.axes import TENSOR
from sarathi_jax.memory_plan import MemoryPlan, plan
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.models.parts import ModelPart
from sarathi_jax.sampler import init_slot_state
from sarathi_jax.shapes import Shapes

TOLERANCE = 0.05
ROWS, SEQS, PAGE = 2048, 128, 16
MAX_LEN = 2048  # Falcon's; the TPU kernel has page tables in scalar memory, and those of 32,768 do not fit
MODELS = (
    ("llama2-70b", 8, 1),
    ("llama2-70b", 4, 2),
    ("falcon-180b", 8, 1),
    ("falcon-180b", 4, 2),
    ("mistral-7b", 1, 1),
)
DEVICES = {
    "cuda": {"h100": _h100},
    "tpu": {
        "tpu-v5e": lambda n: _tpu("v5e", {1: "1x1", 4: "2x2", 8: "2x4"}[n], n, 16),
        "tpu-v5p": lambda n: _tpu("v5p", {1: "1x1x1", 4: "2x2x1", 8: "2x2x2"}[n], n, 95),
        "tpu-v6e": lambda n: _tpu("v6e", {1: "1x1", 4: "2x2", 8: "2x4"}[n], n, 32),
    },
}


def stage_runner(
    target: Target, made: MemoryPlan, stage: int, num_pages: int, attention: Backend
) -> runner.ModelRunner:
    """A runner of one stage that has nothing but shapes."""
    shapes = Shapes.make(
        max_tokens=ROWS,
        tile=128,
        max_num_seqs=SEQS,
        max_model_len=made.max_model_len,
        page_size=PAGE,
        num_pages=num_pages,
    )
    part = ModelPart(config=made.model, layers=made.stages[stage].layers, tensor=made.tensor)
    weights = {name: abstract(target, spec.shape, jnp.bfloat16, spec.axes) for name, spec in part.specs.items()}
    make_pool = functools.partial(runner.make_pool, part.local_config, shapes, jnp.bfloat16)
    with target.at_hand():
        local = jax.eval_shape(make_pool).k
    pool = abstract(
        target, (local.shape[0], local.shape[1] * made.tensor, *local.shape[2:]), jnp.bfloat16, parallel.POOL_AXES
    )

    def make_state(self):
        if not self.is_last:
            return ()
        state = jax.eval_shape(lambda: init_slot_state(self.shapes.num_slots, self._num_logits))
        return jax.tree.map(lambda x: abstract(target, x.shape, x.dtype), state)

    single = made.tensor == 1
    decoder = Decoder(part.local_config, weights, attention=attention, axis=None if single else TENSOR)
    with (
        mock.patch.object(runner, "make_pool", return_value=KVPool(pool, pool)),
        mock.patch.object(runner.ModelRunner, "_make_state", make_state),
    ):
        return runner.ModelRunner(
            decoder, shapes, mesh=None if single else target.mesh(), is_first=part.is_first, is_last=part.is_last
        )


def main(platform: str, only: str = "") -> int:
    jax.config.update("jax_enable_compilation_cache", False)
    print(
        "| model | devices | stage, attention | planned GiB (activations) | compiler's GiB (temporary) | off by | s |"
    )
    print("|---|---|---|---|---|---|---|")
    failures = 0
    for device, make_target in DEVICES[platform].items():
        for model, tensor, pipeline in MODELS:
            target = make_target(tensor)
            attentions = [each for each in ("xla", target.backend) if only in f"{device} {model} {each}"]
            if not attentions:
                continue
            made = plan(
                model, device, tensor * pipeline, tensor=tensor, pipeline=pipeline, max_num_seqs=SEQS,
                max_step_tokens=ROWS, max_model_len=MAX_LEN,
            )  # fmt: skip
            name = f"| {model} | {tensor * pipeline} x {device}, TP{tensor} PP{pipeline}"
            num_pages = made.kv_tokens // PAGE - 1
            if num_pages < 1:
                print(f"{name} | | does not fit | | | |", flush=True)
                continue
            programs = [(*stage, attention) for attention in attentions for stage in enumerate(made.stages)]
            for i, stage, attention in programs:
                start = time.perf_counter()
                run = stage_runner(target, made, i, num_pages, attention)
                with target.at_hand():
                    lowered = run.lower(ROWS)
                try:
                    memory = lowered.compile().memory_analysis()
                except jax.errors.JaxRuntimeError as error:
                    print(f"{name} | {i}, {attention} | | {str(error).splitlines()[0]} | | |", flush=True)
                    failures += 1
                    continue
                held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
                found = held + memory.temp_size_in_bytes
                pool = (num_pages + 1) * PAGE * stage.kv_bytes_per_token
                counted = stage.weight_bytes + stage.state_bytes + stage.activation_bytes + pool
                off = counted / found - 1
                failures += abs(off) > TOLERANCE
                planned, compiled = (
                    f"{total / 2**30:.2f} ({part / 2**30:.2f})"
                    for total, part in ((counted, stage.activation_bytes), (found, memory.temp_size_in_bytes))
                )
                seconds = time.perf_counter() - start
                print(f"{name} | {i}, {attention} | {planned} | {compiled} | {off:+.1%} | {seconds:.0f} |", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
