"""Answer several prompts at once, and show how long each waited.

python examples/generate.py --prompt "The capital of France is" --prompt "Once upon a time"
python examples/generate.py --file prompts.txt --max_tokens 64 --temperature 0.8
"""

import time
from pathlib import Path

from absl import app, flags, logging

import sarathi_jax as sj

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_PROMPTS = flags.DEFINE_multi_string("prompt", None, "A prompt; may be given more than once.")
_FILE = flags.DEFINE_string("file", None, "A text file with one prompt a line.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 48, "Most tokens to generate for each prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
_TOKEN_BUDGET = flags.DEFINE_integer("token_budget", None, "Tokens of one iteration, decodes included.")
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Most sequences that run at once.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16"], "Precision of weights and KV cache.")
_COMPILE_CACHE = flags.DEFINE_bool("compile_cache", True, "Keep compiled programs for the next start.")

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):",
    "Three good reasons to read a book every month are",
    "The difference between a cat and a dog is",
    "Once upon a time, in a small village by the sea,",
)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    prompts = list(_PROMPTS.value or [])
    if _FILE.value:
        prompts += [line for line in Path(_FILE.value).read_text().splitlines() if line.strip()]
    prompts = prompts or list(DEFAULT_PROMPTS)

    start = time.perf_counter()
    scheduler = sj.Sarathi(token_budget=_TOKEN_BUDGET.value, max_num_seqs=_MAX_NUM_SEQS.value)
    options = {"dtype": _DTYPE.value, "compile_cache": _COMPILE_CACHE.value}
    engine = sj.Engine.load(_MODEL.value, scheduler=scheduler, **options)
    llm = sj.LLM(engine)
    ready = time.perf_counter()
    params = sj.SamplingParams(temperature=_TEMPERATURE.value, max_tokens=_MAX_TOKENS.value, seed=_SEED.value)
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - ready

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {prompt}\n{output.text}")
    print(f"\n{'prompt':28} {'in':>5} {'out':>5} {'TTFT ms':>8} {'TBT ms':>7} {'max TBT':>8}  end")
    for prompt, output in zip(prompts, outputs, strict=True):
        gaps = sorted(output.metrics.tbts_s) or [0.0]
        print(
            f"{prompt[:28]!s:28} {len(output.prompt_token_ids):5} {len(output.token_ids):5} "
            f"{1e3 * (output.metrics.ttft_s or 0):8.0f} {1e3 * gaps[len(gaps) // 2]:7.1f} {1e3 * gaps[-1]:8.1f}  "
            f"{output.finish_reason}"
        )
    num_tokens = sum(len(output.token_ids) for output in outputs)
    runner = engine.runner
    print(
        f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s, {runner.kv.k.dtype.name}; "
        f"ready after {ready - start:.1f} s with {runner.num_compiled} programs compiled"
    )


if __name__ == "__main__":
    app.run(main)
