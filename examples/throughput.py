"""Batches of prompts on this engine or on vLLM, whose calls are the same: seconds, and tokens per second.

    python examples/throughput.py
    python examples/throughput.py --engine vllm --model HuggingFaceTB/SmolLM2-135M-Instruct    # where vLLM is installed

Prompts are random ids, outputs have a fixed length. Both engines get the same budget, sequences and precision, and
nothing is reused from an earlier prompt; each batch runs once before it is timed."""

import importlib
import time

import numpy as np
from absl import app, flags, logging

_ENGINE = flags.DEFINE_enum("engine", "sarathi_jax", ["sarathi_jax", "vllm"], "The package to time.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "What the package can load.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Precision of weights and KV cache.")
_TOKEN_BUDGET = flags.DEFINE_integer("token_budget", 512, "Most tokens of an iteration.")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Most sequences at once.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each batch.")


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    package, budget, num_seqs = importlib.import_module(_ENGINE.value), _TOKEN_BUDGET.value, _MAX_NUM_SEQS.value
    if _ENGINE.value == "vllm":
        options = {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs, "enable_prefix_caching": False}
    else:
        options = {"scheduler": package.Sarathi(token_budget=budget, max_num_seqs=num_seqs)}
    llm = package.LLM(_MODEL.value, dtype=_DTYPE.value, max_model_len=1024, **options)

    rng = np.random.default_rng(0)
    mixed = zip(rng.integers(16, 801, 64).tolist(), rng.integers(16, 129, 64).tolist(), strict=True)
    batches = {
        "1 prompt of 512": [(512, 1)],
        "16 prompts of 512": [(512, 1)] * 16,
        "1 x 128 tokens": [(16, 128)],
        "16 x 128 tokens": [(16, 128)] * 16,
        "64 of 16-800 in, 16-128 out": list(mixed),
    }
    print(f"{_ENGINE.value}, {_DTYPE.value}, median of {_REPEATS.value} (least - most)")
    for name, lengths in batches.items():
        params = [package.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for _, n in lengths]
        seconds, num_in, num_out = [], sum(n for n, _ in lengths), sum(n for _, n in lengths)
        for _ in range(1 + _REPEATS.value):
            prompts = [{"prompt_token_ids": rng.integers(1000, 30_000, n).tolist()} for n, _ in lengths]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds.append(time.perf_counter() - start)
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == num_out
        least, median, most = np.quantile(seconds[1:], [0, 0.5, 1])
        rates = f"{num_in / median:6.0f} tokens/s in, {num_out / median:5.0f} out"
        print(f"{name:28} {median:7.3f} s ({least:.3f} - {most:.3f})  {rates}", flush=True)


if __name__ == "__main__":
    app.run(main)
