"""What the machine decides when the caller does not: dtype, tile, token budget, pool size, compilation cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike

from sarathi_jax.attention import pool_head_size
from sarathi_jax.attention_cost import key_bytes
from sarathi_jax.config import CacheConfig, ModelConfig

CPU_MEMORY_FRACTION = 0.1
ACCELERATOR_MEMORY_FRACTION = 0.85

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def platform() -> str:
    """ "cpu", "gpu" or "tpu": that of JAX's default device."""
    return jax.default_backend()


def tile() -> int:
    """Rows of a matmul tile: token budgets are multiples of it."""
    return 16 if platform() == "cpu" else 128


def default_token_budget() -> int:
    """Just below the knee where an iteration turns compute-bound; the paper's strict setting on accelerators."""
    return 128 if platform() == "cpu" else 512


def max_token_budget() -> int:
    """Largest budget that calibration looks at."""
    return 512 if platform() == "cpu" else 2048


def cache_folder(name: str) -> Path:
    """A folder of that name in the user's cache, private, made if it is not there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sarathi_jax" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def resolve_dtype(name: str) -> jnp.dtype:
    """The dtype of weights and cache: "float32", "bfloat16", or "auto" for the faster one here.

    On a CPU bfloat16 wins where the processor multiplies it (AVX-512 BF16 or AMX) and jax >= 0.12 uses that; an older
    jax converts on the way and is several times slower than in float32.
    """
    if name == "auto":
        if platform() != "cpu":
            return jnp.dtype(jnp.bfloat16)
        modern = tuple(int(part) for part in version("jax").split(".")[:2]) >= (0, 12)
        return jnp.dtype(jnp.bfloat16 if modern and _cpu_multiplies_bfloat16() else jnp.float32)
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; choose 'auto', {', '.join(map(repr, DTYPES))}")
    return jnp.dtype(DTYPES[name])


def processor() -> str:
    """The processor's name and the cores this process may use."""
    name = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name or 'cpu'} x{cores}"


def _cpu_multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def page_bytes(config: ModelConfig, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page, keys and values of all layers."""
    each = key_bytes(config.num_kv_heads, pool_head_size(config.head_dim), jnp.dtype(dtype).itemsize)
    return config.num_layers * page_size * each


def num_pages(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    dtype: DTypeLike,
    max_num_seqs: int,
    max_model_len: int,
    stages: Sequence[tuple[ModelConfig, Mesh]] = (),
) -> int:
    """Pages of the pool: as configured, or what a share of the free memory holds, but no more than can ever be used.

    `stages`: what one device runs, and the mesh of those that do, of each stage of a pipeline; none is the default
    device. Where they are several processes' all call this, and the least of what they find is taken.

    What memory decides is cut to three significant bits: the pool's size is part of every program, and the next start,
    with a little more or less memory free, should find its programs in the compilation cache. Call with the weights on
    the device. Raises ValueError when not even one page fits, or not all that are configured.
    """
    page = lambda local: page_bytes(local, cache.page_size, dtype)
    sizes = [(page(local), device) for local, mesh in stages for device in mesh.local_devices]
    if not sizes:
        size, free = page(config), free_memory_bytes()
    elif platform() == "cpu":  # virtual devices share the machine's memory
        size, free = sum(size for size, _ in sizes), free_memory_bytes()
    else:
        size, free = min(((size, free_memory_bytes(d)) for size, d in sizes), key=lambda each: each[1] / each[0])
    if cache.num_pages is not None:
        needed = (cache.num_pages + 1) * size  # the sink
        if needed > free:
            raise ValueError(
                f"num_pages={cache.num_pages} of page_size={cache.page_size} need {needed:,} bytes and "
                f"{free:,} are free; lower num_pages or page_size, or leave num_pages out"
            )
        return cache.num_pages
    on_cpu = platform() == "cpu"
    fraction = cache.memory_fraction or (CPU_MEMORY_FRACTION if on_cpu else ACCELERATOR_MEMORY_FRACTION)
    fitting = int(free * fraction) // size - 1  # the sink
    if fitting < 1:
        raise ValueError(
            f"no room for the KV cache: {fraction:.0%} of {free / 2**20:.0f} MiB free hold no page of "
            f"{size / 2**20:.1f} MiB; raise memory_fraction, or lower page_size"
        )
    if any(mesh.is_multi_process for _, mesh in stages):
        fitting = int(multihost_utils.process_allgather(np.int32(fitting)).min())
    step = 1 << max(fitting.bit_length() - 3, 0)
    return min(fitting // step * step, max_num_seqs * -(-max_model_len // cache.page_size))


def free_memory_bytes(device: Any = None) -> int:
    """Memory not in use: the device's own, on a CPU the machine's."""
    stats = (device or jax.local_devices()[0]).memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@contextlib.contextmanager
def compilation_cache(enabled: bool) -> Iterator[None]:
    """Compile within a persistent cache in a private folder of the user's; one that is set already is left alone."""
    if not enabled or jax.config.jax_compilation_cache_dir:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache as jax_cache

    settings = {
        "jax_compilation_cache_dir": str(cache_folder("xla")),  # it holds programs: nobody else may write there
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # the choice of folder is made once, by the first compilation
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
