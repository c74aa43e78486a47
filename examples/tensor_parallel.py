"""Every layer of a model split over several devices, here virtual ones of the CPU.

python examples/tensor_parallel.py --tensor 2

SmolLM2 has 3 KV heads: two devices get two heads each, of which one is zeros.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before jax is imported

import jax
from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax.parallel import bytes_per_device

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_TENSOR = flags.DEFINE_integer("tensor", 2, "Devices that share each layer.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["auto", "float32", "bfloat16"], "Precision of weights and KV cache.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 24, "Tokens to generate for each prompt.")

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    params = sj.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS.value)
    tokens = []
    for parallel in (sj.Parallel(), sj.Parallel(tensor=_TENSOR.value)):
        engine = sj.Engine.load(
            _MODEL.value, parallel=parallel, dtype=_DTYPE.value, max_model_len=256,
            scheduler=sj.Sarathi(token_budget=32, max_num_seqs=4),
        )  # fmt: skip
        outputs = sj.LLM(engine).generate(PROMPTS, params)
        tokens.append([output.token_ids for output in outputs])
    print(f"{_TENSOR.value} of {jax.device_count()} devices; each holds:")
    runner = engine.runner
    weights, pool = bytes_per_device(runner.weights), bytes_per_device(runner.kv)
    for device in weights:
        print(f"  {device}: {weights[device] / 2**20:.1f} MiB of weights, {pool[device] / 2**20:.1f} MiB of KV cache")
    shard = next(iter(runner.kv.k.addressable_shards))
    print(f"  keys [pages, KV heads, page size, head size] {runner.kv.k.shape}, of which {shard.data.shape}")
    step = engine.last_step
    assert step is not None
    print(f"last step: {step.num_decode_tokens} decodes, {step.collective_bytes / 2**10:.0f} KiB exchanged by each")
    for output in outputs:
        print(repr(f"{output.prompt}{output.text}"))
    print("tokens equal to one device's:", tokens[0] == tokens[1])


if __name__ == "__main__":
    app.run(main)
