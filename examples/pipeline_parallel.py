"""A model's layers cut into stages, each on devices of its own, with a micro-batch in every stage.

python examples/pipeline_parallel.py --pipeline 2 --trace pipeline.json

Open the trace in ui.perfetto.dev: a lane for each stage, with its bubbles.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before jax is imported

from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax.benchmark import EngineServer
from sarathi_jax.driver import run_open_loop
from sarathi_jax.parallel import bytes_per_device
from sarathi_jax.pipeline import PipelineRunner
from sarathi_jax.stages import stage_use
from sarathi_jax.trace import write_trace
from sarathi_jax.workload import WorkItem, Workload

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_PIPELINE = flags.DEFINE_integer("pipeline", 2, "Stages.")
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices of each stage.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["auto", "float32", "bfloat16"], "Precision of weights and KV cache.")
_TRACE = flags.DEFINE_string("trace", None, "Write the timeline of the run to this file.")

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are", "Once upon a time,"]


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    tokens = []
    for parallel in (sj.Parallel(), sj.Parallel(tensor=_TENSOR.value, pipeline=_PIPELINE.value)):
        engine = sj.Engine.load(
            _MODEL.value, parallel=parallel, dtype=_DTYPE.value, max_model_len=256,
            scheduler=sj.Sarathi(token_budget=32, max_num_seqs=4),
        )  # fmt: skip
        outputs = sj.LLM(engine).generate(PROMPTS, sj.SamplingParams(temperature=0, max_tokens=16))
        tokens.append([output.token_ids for output in outputs])
    print("tokens equal to one device's:", tokens[0] == tokens[1])
    assert isinstance(engine.runner, PipelineRunner) and engine.tokenizer is not None
    for i, stage in enumerate(engine.runner.stages):
        weights, pool = bytes_per_device(stage.weights), bytes_per_device(stage.kv)
        for device, size in weights.items():
            print(
                f"stage {i}, {stage.config.num_layers} layers, {device}: {size / 2**20:.1f} MiB of weights, "
                f"{pool[device] / 2**20:.1f} MiB of KV cache"
            )
    prompts = [tuple(engine.tokenizer.encode(prompt * 8)) for prompt in PROMPTS * 2]
    requests = Workload(
        items=tuple(
            WorkItem(arrived_at_s=0.0, num_prefill_tokens=len(ids), num_decode_tokens=16, prompt_token_ids=ids)
            for ids in prompts
        )
    )
    report = run_open_loop(EngineServer(engine), requests)
    for use in stage_use(report.iterations):
        print(
            f"stage {use.stage}: busy {use.busy_s:.2f} s, bubbles {use.bubble_s:.2f} s ({use.bubble_share:.0%} of the "
            f"time with micro-batches in flight)"
        )
    assert report.ttft is not None
    sizes = [step.num_prefill_tokens + step.num_decode_tokens for step in report.iterations]
    print(
        f"{len(sizes)} micro-batches of {min(sizes)} to {max(sizes)} tokens; {report.ttft.mean:.2f} s to first tokens"
    )
    if _TRACE.value:
        print(f"{write_trace(report, _TRACE.value)} events in {_TRACE.value}")


if __name__ == "__main__":
    app.run(main)
