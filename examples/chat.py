"""Talk to a model in the terminal; its answer streams as it is made. An empty line or Ctrl-D ends.

python examples/chat.py
"""

from absl import app, flags, logging

import sarathi_jax as sj

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A known name, a Hugging Face folder, or a GGUF file.")
_SYSTEM = flags.DEFINE_string("system", None, "A system message.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Most tokens of an answer.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.2, "0 is greedy.")
_TOP_P = flags.DEFINE_float("top_p", 0.9, "Draw from the likeliest tokens with this mass.")


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    llm = sj.LLM(_MODEL.value, scheduler=sj.Sarathi(max_num_seqs=1))
    params = sj.SamplingParams(temperature=_TEMPERATURE.value, top_p=_TOP_P.value, max_tokens=_MAX_TOKENS.value)
    messages = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    while True:
        try:
            question = input("\nyou: ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if not question:
            break
        messages.append({"role": "user", "content": question})
        print("model: ", end="", flush=True)
        text = ""
        try:
            for output in llm.stream(messages, params):
                print(output.delta, end="", flush=True)
                text = output.text
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print(" ...", end="")
        except ValueError as error:  # the conversation no longer fits the model, say: a shorter question may
            print(f"[{error}]")
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    app.run(main)
