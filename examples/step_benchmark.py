"""Time single iterations of the engine: a prefill, decodes, and hybrid batches, beside a plain matmul of their FLOPs.

python examples/step_benchmark.py --json steps.json
"""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax import profiler
from sarathi_jax.budget import Iteration

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Precision of weights and KV cache.")
_REPEATS = flags.DEFINE_integer("repeats", 20, "Runs of each, taken in turn; the median is what counts.")
_JSON = flags.DEFINE_string("json", None, "Write the numbers to this file.")

CASES = {  # decodes by their context lengths, chunks as (start, tokens)
    "prefill of 512": ((), ((0, 512),)),
    "16 decodes at 256": ((256,) * 16, ()),
    "8 decodes at 256 + chunk of 64": ((256,) * 8, ((0, 64),)),
    "8 decodes at 256 + chunk of 256": ((256,) * 8, ((0, 256),)),
    "1 decode at 256": ((256,), ()),
    "16 decodes at 2048": ((2048,) * 16, ()),
    "chunk of 256 at 2048": ((), ((2048, 256),)),
}


def matmul_seconds(rows: int, weights: jax.Array, flops: float) -> float:
    """Time of a plain matmul of `rows` rows with stacked weights [L, d, n], scaled to `flops`."""
    x = jnp.ones((rows, weights.shape[1]), weights.dtype)
    start = time.perf_counter()
    jax.block_until_ready(_matmul(x, weights))
    return (time.perf_counter() - start) * flops / (2.0 * rows * weights.size)


@jax.jit
def _matmul(x, weights):
    return jax.lax.map(lambda w: jax.lax.dot(x, w, preferred_element_type=jnp.float32).max(), weights)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    sarathi = sj.Sarathi(token_budget=512, max_num_seqs=16)
    engine = sj.Engine.load(_MODEL.value, dtype=_DTYPE.value, scheduler=sarathi, max_model_len=2560)
    config, shapes, dtype = engine.runner.config, engine.runner.shapes, engine.runner.kv.k.dtype
    head = config.vocab_size * config.hidden_size
    width = (config.num_params - head) // config.num_layers // config.hidden_size
    weights = jnp.ones((config.num_layers, config.hidden_size, width), dtype)
    plans = {name: profiler.make_plan(engine.runner, Iteration(*case)) for name, case in CASES.items()}
    rows = {name: shapes.fit(plan.num_tokens) for name, plan in plans.items()}
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CASES}
    for _ in range(_REPEATS.value + 2):
        for name, (decodes, chunks) in CASES.items():
            keys = sum(decodes) + sum(n * start + n * (n + 1) // 2 for start, n in chunks)
            flops = 2.0 * (rows[name] * (config.num_params - head) + shapes.num_rows * head)
            flops += 4.0 * keys * config.num_heads * config.head_dim * config.num_layers
            step = profiler.time_plan(engine.runner, plans[name])
            runs[name].append((step.wall_s, step.host_s, matmul_seconds(rows[name], weights, flops)))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {dtype.name}, {_REPEATS.value} runs each, ms")
    print(f"{'iteration':34} {'rows':>5} {'median':>8} {'p10':>7} {'p90':>7} {'host':>6} {'matmul':>8} {'ratio':>6}")
    results = {}
    for name, values in runs.items():
        wall, host, plain = 1e3 * np.array(values[2:]).T  # the first two warm the caches
        low, mid, high = np.percentile(wall, [10, 50, 90])
        numbers = [mid, low, high, float(np.median(host)), float(np.median(plain)), float(np.median(wall / plain))]
        results[name] = dict(zip(["ms", "p10", "p90", "host_ms", "matmul_ms", "ratio"], numbers, strict=True))
        print(f"{name:34} {rows[name]:5} " + "{:8.1f} {:7.1f} {:7.1f} {:6.2f} {:8.1f} {:6.2f}".format(*numbers))
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    app.run(main)
