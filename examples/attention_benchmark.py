"""Time attention backends on decodes, chunks and both, beside the floor of the device's own bandwidth and matmuls.

python examples/attention_benchmark.py --backends pallas_gpu,xla
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from sarathi_jax.attention import pool_head_size, ragged_paged_attention, select_backend
from sarathi_jax.attention_cost import attention_cost

_BACKENDS = flags.DEFINE_list("backends", None, "Backends to time; by default the engine's.")
_HEADS = flags.DEFINE_list("heads", ["32", "8", "128"], "Query heads, KV heads, head size.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 16, "Tokens of a page.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of queries, keys and values.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Runs of each, taken in turn; the median is what counts.")
_SCALE = flags.DEFINE_integer("scale", None, "Divide all lengths by this; by default 1, on a CPU 8.")

CASES = {  # (q_len, kv_len) of each sequence
    "64 decodes at 4k": [(1, 4096)] * 64,
    "1 decode at 32k": [(1, 32768)],
    "chunk of 2k at 8k": [(2048, 8192)],
    "64 decodes at 4k + chunk of 2k at 8k": [(1, 4096)] * 64 + [(2048, 8192)],
}


def seconds(function, *arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def peaks(dtype) -> tuple[float, float]:
    """Bytes/s of a copy and FLOP/s of a matmul, the best of a few."""
    size = 4096 if jax.default_backend() != "cpu" else 1024
    flat, square = jnp.ones(2**27 if size > 1024 else 2**24, jnp.float32), jnp.ones((size, size), dtype)
    copy, dot = jax.jit(lambda x: x + 1), jax.jit(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32))
    best = [min(seconds(f, x) for _ in range(6)) for f, x in ((copy, flat), (dot, square))]
    return 2 * flat.nbytes / best[0], 2 * size**3 / best[1]


def batch(lens, heads, kv_heads, head_size, pool_size, dtype):
    """The call's arrays, each sequence on pages of its own, in random order."""
    rng, q_lens = np.random.default_rng(0), [q_len for q_len, _ in lens]
    needed = [-(-kv_len // _PAGE_SIZE.value) for _, kv_len in lens]
    order, table = iter(rng.permutation(sum(needed))), np.zeros((len(lens), max(needed)), np.int32)
    for row, pages in zip(table, needed, strict=True):
        row[:pages] = [next(order) for _ in range(pages)]
    new = lambda i: jax.random.normal(jax.random.key(i), (sum(needed), kv_heads, _PAGE_SIZE.value, head_size), dtype)
    pools = [jnp.pad(new(i), [(0, 0)] * 3 + [(0, pool_size - head_size)]) for i in (0, 1)]
    q = jax.random.normal(jax.random.key(2), (sum(q_lens), heads, head_size), dtype)
    numbers = [[kv_len for _, kv_len in lens], table, np.cumsum([0, *q_lens]), len(lens), q_lens.count(1)]
    return q, *pools, *(jnp.asarray(x, jnp.int32) for x in numbers)


def main(_) -> None:
    (heads, kv_heads, size), dtype = map(int, _HEADS.value), jnp.dtype(_DTYPE.value)
    scale = _SCALE.value or (8 if jax.default_backend() == "cpu" else 1)
    bytes_per_s, flops_per_s = peaks(dtype)
    print(f"{jax.devices()[0].device_kind}: copy {bytes_per_s / 1e9:.0f} GB/s, matmul {flops_per_s / 1e12:.2f} TFLOP/s")
    for name, lens in CASES.items():
        lens = [(max(q_len // scale, 1), kv_len // scale) for q_len, kv_len in lens]
        cost = attention_cost(lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, value_bytes=dtype.itemsize)
        floor_s = cost.floor_s(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
        for backend in map(select_backend, _BACKENDS.value or [None]):
            arrays = batch(lens, heads, kv_heads, size, pool_head_size(size), dtype)
            call = jax.jit(functools.partial(ragged_paged_attention, scale=size**-0.5, backend=backend))
            median = statistics.median([seconds(call, *arrays) for _ in range(_REPEATS.value + 2)][2:])
            rates = f"{cost.num_bytes / median / 1e9:8.1f} GB/s {cost.flops / median / 1e12:8.3f} TFLOP/s"
            print(f"{name:38} / {scale} {backend:10} {1e3 * median:9.3f} ms {floor_s / median:6.1%} of floor {rates}")


if __name__ == "__main__":
    app.run(main)
