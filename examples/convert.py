"""Save a model, be it a GGUF file or a Hugging Face folder or name, in a folder that loads fast and onto any mesh.

python examples/convert.py --model smollm2-135m-instruct --target /tmp/smollm2
python examples/generate.py --model /tmp/smollm2
"""

import time
from pathlib import Path

from absl import app, flags, logging

from sarathi_jax.models.checkpoint import open_checkpoint
from sarathi_jax.models.convert import convert

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_TARGET = flags.DEFINE_string("target", None, "The new folder.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "What the weights are stored in.")


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    start = time.perf_counter()
    convert(_MODEL.value, _TARGET.value, dtype=_DTYPE.value)
    seconds = time.perf_counter() - start
    num_bytes = sum(file.stat().st_size for file in Path(_TARGET.value).rglob("*") if file.is_file())
    config = open_checkpoint(_TARGET.value).config
    print(f"{config.architecture}: {config.num_params / 1e6:,.1f} million weights, {num_bytes / 1e6:,.0f} MB")
    print(f"saved in {seconds:.1f} s; load it with sj.LLM({_TARGET.value!r})")


if __name__ == "__main__":
    app.run(main)
