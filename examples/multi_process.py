"""One model over the devices of several processes. Alone it starts two, with two virtual CPU devices each.

python examples/multi_process.py

Each process has a pipeline stage on its two devices, and the hidden states go from the one to the other.

One process on each host, with all of its GPUs or TPU chips, under a launcher that gives each its number:

python examples/multi_process.py --tensor 8 --coordinator HOST_0:9876 --num_processes 2 --process_id NUMBER

WORKSPACE.md has the commands for Slurm and for a TPU slice.
"""

import os
import socket
import subprocess
import sys

from absl import app, flags, logging

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_TENSOR = flags.DEFINE_integer("tensor", 2, "Devices that share each layer.")
_PIPELINE = flags.DEFINE_integer("pipeline", 2, "Stages; all of them together have the devices of all processes.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0; None starts two processes here.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 2, "Processes of the group.")
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "This one's number.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["auto", "float32", "bfloat16"], "Precision of weights and KV cache.")

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


def start_here() -> int:
    """Both processes on this machine; the exit code of whichever failed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, *sys.argv, f"--coordinator={address}"]
    processes = [subprocess.Popen([*command, f"--process_id={i}"], env=env) for i in range(_NUM_PROCESSES.value)]
    return max(abs(process.wait()) for process in processes)


def run(coordinator: str) -> None:
    import sarathi_jax as sj
    from sarathi_jax import distributed
    from sarathi_jax.parallel import bytes_per_device

    channel = distributed.initialize(coordinator, num_processes=_NUM_PROCESSES.value, process_id=_PROCESS_ID.value)
    options = {"scheduler": sj.Sarathi(token_budget=32, max_num_seqs=4), "dtype": _DTYPE.value, "max_model_len": 256}
    parallel = sj.Parallel(tensor=_TENSOR.value, pipeline=_PIPELINE.value)
    engine = sj.Engine.load(_MODEL.value, parallel=parallel, **options)
    for device, size in bytes_per_device(engine.runner.weights).items():
        print(f"process {_PROCESS_ID.value}, {device}: {size / 2**20:.1f} MiB of weights", flush=True)

    def main(leader: distributed.Leader) -> None:
        """Process 0 alone runs this; the others do what its engine does."""
        answers = []
        for llm in (sj.LLM(leader), sj.LLM(_MODEL.value, **options)):
            answers.append(llm.generate(PROMPTS, sj.SamplingParams(temperature=0, max_tokens=16)))
        for output in answers[0]:
            print(repr(f"{output.prompt}{output.text}"), flush=True)
        tokens = [[output.token_ids for output in outputs] for outputs in answers]
        print("tokens equal to one device's:", tokens[0] == tokens[1], flush=True)

    distributed.serve(engine, channel, main)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if _COORDINATOR.value is None:
        sys.exit(start_here())
    run(_COORDINATOR.value)


if __name__ == "__main__":
    app.run(main)
