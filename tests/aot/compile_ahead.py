"""Compile the attention kernels and whole hybrid steps for devices that are not here, and look at what comes out.

python tests/aot/compile_ahead.py tpu|cuda [part of "target, program"]

Prints a table; exits 1 when a program does not compile, does not hold the kernel, copies the KV pool, needs more memory
than the device has, or communicates where it should not. `.ci/aot` makes the environments.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from targets import TARGETS, Target

from sarathi_jax import parallel, runner
from sarathi_jax.attention import pool_head_size, ragged_paged_attention
from sarathi_jax.axes import TENSOR
from sarathi_jax.config import ModelConfig
from sarathi_jax.models.decoder import Decoder, KVPool
from sarathi_jax.models.parts import ModelPart
from sarathi_jax.sampler import init_slot_state
from sarathi_jax.shapes import Shapes

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SHAPES = Shapes.make(max_tokens=512, tile=128, max_num_seqs=64, max_model_len=8192, page_size=16, num_pages=4096)
MODELS = {
    "small": ModelConfig(
        architecture="llama", vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_layers=4,
        num_heads=16, num_kv_heads=8, head_dim=128, max_position=8192,
    ),
    "heads of 64": ModelConfig(
        architecture="llama", vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_layers=4,
        num_heads=58, num_kv_heads=2, head_dim=64, max_position=8192,
    ),
    "8B": ModelConfig(
        architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_position=131072, rope_theta=500000.0,
    ),
}  # fmt: skip


class Program(NamedTuple):
    """Something to compile, what it is given on each device, and the shape of a pool there."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    held_bytes: int
    pool: tuple[int, ...]
    collectives: set[str]


class Abstract(jax.ShapeDtypeStruct):
    """A weight that is not there; what indexes it whole gets it back."""

    def __getitem__(self, _):
        return self


def abstract(target: Target, shape, dtype, axes=()) -> Abstract:
    mesh = target.mesh()
    where = SingleDeviceSharding(mesh.devices.flat[0]) if mesh.size == 1 else parallel.sharding(mesh, axes)
    return Abstract(shape, dtype, sharding=where)


def kernels(target: Target) -> Iterator[Program]:
    """The attention call alone: head sizes, page sizes, groups, a window, a cap."""
    i32 = functools.partial(abstract, target, dtype=jnp.int32)
    for tokens, heads, kv_heads, head_size, page_size, options in (
        (16, 32, 8, 128, 16, {}),
        (64, 32, 8, 128, 64, {}),
        (512, 32, 8, 128, 16, {}),
        (512, 8, 1, 128, 16, {}),
        (2048, 64, 8, 128, 128, {}),
        (512, 24, 8, 64, 16, {"window": 1000}),
        (64, 29, 1, 64, 16, {}),
        (512, 71, 1, 64, 16, {}),
        (512, 16, 8, 256, 32, {"soft_cap": 50.0}),
    ):
        with target.at_hand():
            pool_size = pool_head_size(head_size)
        pool = abstract(target, (4096, kv_heads, page_size, pool_size), jnp.bfloat16)
        arguments = (
            abstract(target, (tokens, heads, head_size), jnp.bfloat16), pool, pool,
            i32((64,)), i32((64, 256)), i32((65,)), i32(()), i32(()),
        )  # fmt: skip
        call = functools.partial(ragged_paged_attention, scale=head_size**-0.5, backend=target.backend, **options)
        name = f"kernel, {tokens} rows, {heads} / {kv_heads} x {head_size}, pages of {page_size}"
        yield Program(name, functools.partial(jax.jit(call).lower, *arguments), 0, pool.shape, set())


def steps(target: Target) -> Iterator[Program]:
    """The runner's whole step: 64 sequences, decodes alone and with chunks, split over the chips."""
    for name, config in MODELS.items():
        part = ModelPart.whole(config, target.num_devices)
        weights = {key: abstract(target, spec.shape, jnp.bfloat16, spec.axes) for key, spec in part.specs.items()}
        with target.at_hand():
            local = jax.eval_shape(functools.partial(runner.make_pool, part.local_config, SHAPES, jnp.bfloat16))
        shape = (local.k.shape[0], local.k.shape[1] * target.num_devices, *local.k.shape[2:])
        pool = abstract(target, shape, jnp.bfloat16, parallel.POOL_AXES)
        run = make_runner(target, part, weights, KVPool(pool, pool))
        held = (*weights.values(), pool, pool)
        for tokens in (64, 512):
            yield Program(
                f"step of {name}, {tokens} rows",
                functools.partial(run.lower, tokens),
                sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in held),
                local.k.shape,
                {"all-reduce", "all-gather"} if target.num_devices > 1 else set(),
            )


def make_runner(target: Target, part: ModelPart, weights: dict, pool: KVPool) -> runner.ModelRunner:
    """A runner that has nothing but shapes: it can lower its step and not run it."""

    def make_state(self):
        state = jax.eval_shape(lambda: init_slot_state(self.shapes.num_slots, self._num_logits))
        return jax.tree.map(lambda x: abstract(target, x.shape, x.dtype), state)

    single = target.num_devices == 1
    model = Decoder(part.local_config, weights, attention=target.backend, axis=None if single else TENSOR)
    with (
        mock.patch.object(runner, "make_pool", return_value=pool),
        mock.patch.object(runner.ModelRunner, "_make_state", make_state),
    ):
        return runner.ModelRunner(model, SHAPES, mesh=None if single else target.mesh())


def examine(target: Target, program: Program) -> list[str]:
    """Compile, print a row, and say what is wrong."""
    if program.held_bytes > target.memory_bytes:
        print(f"| {target.name} | {program.name} | {program.held_bytes / 2**30:.2f} | does not fit | | | |", flush=True)
        return []
    start = time.perf_counter()
    with target.at_hand():
        lowered = program.lower()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    calls = len(re.findall(r"custom_call_target=\"(?:mosaic_gpu\w*|tpu_custom_call)\"", text))
    found = collections.Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    shape = ",".join(map(str, program.pool))
    copies = re.findall(rf"= [a-z0-9]+\[{shape}\][^ ]* (?:copy|copy-start|transpose|convert)\(", text)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    pool_bytes = 2 * jnp.dtype(jnp.bfloat16).itemsize * functools.reduce(int.__mul__, program.pool)
    print(
        f"| {target.name} | {program.name} | {held / 2**30:.2f} | {memory.temp_size_in_bytes / 2**20:.1f} | {calls} | "
        f"{', '.join(f'{count} {op}' for op, count in found.items()) or 'none'} | {seconds:.0f} |",
        flush=True,
    )
    problems = []
    if not calls:
        problems.append("the kernel is not in the program")
    if copies:
        problems.append(f"the KV pool is copied: {copies[:3]}")
    if memory.temp_size_in_bytes > pool_bytes / 2 and "step" in program.name:
        problems.append(f"temporaries of {memory.temp_size_in_bytes:,} bytes beside a pool of {pool_bytes:,}")
    if held + memory.temp_size_in_bytes > target.memory_bytes:
        problems.append(f"needs {held + memory.temp_size_in_bytes:,} bytes of {target.memory_bytes:,}")
    if set(found) - program.collectives:
        problems.append(f"communicates: {dict(found)}")
    return problems


def main(platform: str, only: str = "") -> int:
    jax.config.update("jax_enable_compilation_cache", False)
    print("| target | program | held GiB | temporary MiB | kernels | collectives | s |\n|---|---|---|---|---|---|---|")
    failures = 0
    for target in TARGETS[platform]:
        for program in itertools.chain(kernels(target) if target.num_devices == 1 else (), steps(target)):
            if only not in f"{target.name}, {program.name}":
                continue
            problems = examine(target, program)
            for problem in problems:
                print(f"FAILED {target.name}, {program.name}: {problem}", flush=True)
            failures += bool(problems)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
