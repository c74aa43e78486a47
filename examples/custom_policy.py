"""A scheduling policy of your own: Sarathi with short prompts ahead of long ones, and no prompt left behind.

Each prompt token counts as so many seconds of lateness, so a long prompt lets short ones pass until it has waited its
due. Change `order` (who comes first), `chunk_size` (how much of a prompt) or `plan` (all of it), and pass yours along.

python examples/custom_policy.py
python examples/custom_policy.py --seconds_per_token 0     # first come, first served
"""

from dataclasses import dataclass
from typing import ClassVar

from absl import app, flags, logging

import sarathi_jax as sj
from sarathi_jax.schedulers import SarathiScheduler

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_SECONDS_PER_TOKEN = flags.DEFINE_float("seconds_per_token", 0.1, "Lateness that a prompt token counts as.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 6, "Prompts, every other one long; they arrive together.")


class ShortFirstScheduler(SarathiScheduler):
    def order(self, seq: sj.Sequence) -> tuple[float, int]:
        assert isinstance(self.config, ShortFirst)
        return seq.request.arrival_time_s + self.config.seconds_per_token * seq.prompt_len, seq.seq_id


@dataclass(frozen=True, kw_only=True)
class ShortFirst(sj.Sarathi):
    """`sj.Sarathi` and its settings, in another order."""

    scheduler_class: ClassVar[type[SarathiScheduler]] = ShortFirstScheduler

    seconds_per_token: float = 0.1


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    policy = ShortFirst(token_budget=128, max_num_seqs=4, seconds_per_token=_SECONDS_PER_TOKEN.value)
    llm = sj.LLM(_MODEL.value, scheduler=policy, max_model_len=1024)
    short, story = "The capital of France is", "Once upon a time there was a king who had three daughters. "
    prompts = [short if i % 2 else story * (20 + i) for i in range(_NUM_PROMPTS.value)]
    outputs = llm.generate(prompts, sj.SamplingParams(temperature=0, max_tokens=8))

    print(f"{'arrived':>7} {'prompt':>7} {'TTFT s':>7}  in the order of their first tokens")
    for i, output in sorted(enumerate(outputs), key=lambda pair: pair[1].metrics.ttft_s or 0):
        print(f"{i:7} {len(output.prompt_token_ids):7} {output.metrics.ttft_s or 0:7.2f}  {output.text!r}")


if __name__ == "__main__":
    app.run(main)
