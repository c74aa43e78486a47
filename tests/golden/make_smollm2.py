"""Makes smollm2.npz: what Hugging Face transformers computes for SmolLM2-135M-Instruct, in float32 on a CPU.

python make_smollm2.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2.npz [--noise]

The GGUF is dequantised by transformers. Each prompt is continued by 32 greedy tokens (end-of-sequence ignored), then
prompt and continuation are run once more as a whole, without a cache; all logits stored come from that second run.
README.md lists the arrays. `--noise` also runs three prompts in float64 and prints how far float32 lies from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import types
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers

NUM_NEW = 32
NUM_SPREAD = 64
NUM_VOCAB = 256
LONG_LEN = 2000

MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why does bread rise in the oven?"},
]

CODE = '''def merge_intervals(intervals):
    """Joins intervals that touch or overlap."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
'''

RECORD = """{
\t"station": "Harrow Point",
\t"readings": [
\t\t{"hour": 6,  "wind_ms": 4.5, "rain": false},
\t\t{"hour": 12, "wind_ms": 7.25, "rain": true},
\t\t{"hour": 18,"""

UNICODE = "Grüße aus Zürich! 你好，世界 🌍🚀 ¿Cómo estás? Привет — naïve café № 7 … ½ kg ≈ 500 g\u200d👩‍🔬 שלום"  # noqa: RUF001

PARAGRAPH = (
    "The ferry left the island at half past six, while the harbour lamps were still burning. Only four people had "
    "bought a ticket that morning: a baker with two baskets of rolls, a surveyor who slept against his tripod, and a "
    "pair of sisters who had argued all the way down the hill and were now sharing one scarf. Nobody noticed the dog "
    "until the boat was past the breakwater. It sat at the stern, wet and entirely calm, and watched the island grow "
    "small, as if it had made this crossing many times before and"
)

LETTER = """Dear Ansel,

You asked me how the mill works, so I will try to explain it without a drawing. Water comes down the stone channel from
the upper pond and meets the wheel a little above its middle. The wheel is four metres across and made of larch, with
thirty-two buckets; when the pond is full it turns nine times a minute, and when it is low, perhaps five. A wooden shaft
carries this slow turning through the wall. Inside, a large gear with seventy-two teeth drives a small one with only
twelve, so the upright spindle goes round six times for each turn of the wheel. On top of the spindle sits the runner
stone, which weighs as much as a horse and must never touch the stone that lies still beneath it.

The gap between the two is the whole art. If it is too wide, the grain comes out cracked but whole; if it is too narrow,
the flour grows hot and smells of burning. My grandmother set it by ear. She said that a well-fed mill hums, that a
hungry one rattles, and that one should go to bed only when it hums. I set it with a brass screw and a feeler gauge, and
then, when nobody is looking, I listen too.

Come in October if you can. The pond is high then, the apples are in, and there is always one evening when the
neighbours bring their last sacks and stay until midnight. Bring a coat, for the stone floor is cold, and bring"""


# Here the model's own pre-tokenizer ("smollm": every digit alone, then GPT-2's rule) and plain GPT-2's differ.
SPACINGS = [
    "x  12",
    "a\n\n1. one\n\n\n22",
    "\t\t7",
    "   3 dozen",
    "no digits  here \n\n  at all ",
    "²³ ½  ١٢٣ Ⅷ",
    "2" * 9,
]


def _split(text: str, sep: str = "|") -> list[str]:
    return text.split(sep)


def ledger(count_tokens) -> str:
    """A storehouse ledger of exactly LONG_LEN tokens whose last line asks for something said near its beginning."""
    rng = random.Random(20240607)
    keepers = _split("Mara|Oskar|Ilse|Teodor|Wren|Pavel|Nadia|Bram|Sunniva|Lucan|Edda|Jorin|Amalie|Rafe|Tindra|Kasimir")
    goods = _split(
        "brass lenses|coils of hemp rope|jars of blue dye|sacks of barley|oak planks|copper kettles|wool blankets|"
        "boxes of candles|iron hinges|bundles of reeds|casks of vinegar|sheets of glass|clay lamps|felt hats|"
        "bags of salt|cedar chests|bottles of ink|rolls of canvas|pewter spoons|bricks of tea"
    )
    places = _split(
        "the north shed|the cellar under the chapel|a loft above the stables|the long barn|the boathouse|"
        "the old granary|a cart by the gate|the tower room|the dry cistern|the weaver's attic"
    )
    reasons = _split(
        "because the roof leaked|before the first frost|at the miller's request|after the bridge was mended|"
        "since the road was flooded|to make room for the harvest|when the market closed early|"
        "so that the goats would not reach them|against the advice of the clerk|as the moon was nearly full"
    )
    shapes = (
        "{k} stored {n} {g} in {p} {r}.",
        "On day {d}, {n} {g} went from {p} to {q}, and {k} signed for them.",
        "{k} owes {j} {n} {g}, to be paid on day {d} {r}.",
        "The {g} that {k} had promised came late: {n} arrived at {p}, where {j} counted them twice.",
        "Nobody could find {k}'s {g}; {j} had moved all {n} of them to {q} {r}.",
        "Price agreed between {k} and {j}: {n} {g} for {m} silver marks, kept in {p}.",
    )
    head = (
        "Ledger of the storehouse at Vellin, copied fair.\n"
        "The key to the iron door hangs behind the painting of the heron, and its number is 4719.\n"
    )
    tail = "\nThe clerk closed the ledger and repeated to himself where the key to the iron door hangs: behind the"
    body = ""
    while True:
        (k, j), (p, q) = rng.sample(keepers, 2), rng.sample(places, 2)
        line = rng.choice(shapes).format(
            k=k, j=j, p=p, q=q, g=rng.choice(goods), r=rng.choice(reasons), n=rng.randint(2, 96), m=rng.randint(3, 400),
            d=rng.randint(1, 365),
        )  # fmt: skip
        longer = body + line + rng.choice((" ", " ", "\n"))
        if count_tokens(head + longer + tail) > LONG_LEN:
            break
        body = longer
    fill = _split(
        "So it was written and so it was kept and no one in the house had any reason to doubt a word of it", " "
    )
    text, words = head + body.rstrip() + tail, 0
    while count_tokens(text) < LONG_LEN:
        words += 1
        text = head + body.rstrip() + "\n" + " ".join(fill[:words]) + tail
    if count_tokens(text) != LONG_LEN:
        raise AssertionError(f"{count_tokens(text)=} cannot be filled up to {LONG_LEN}")
    return text


def use_own_pre_tokenizer(tokenizer) -> None:
    """Sets the pre-tokenizer that the GGUF names; transformers leaves it at plain GPT-2's for every GGUF."""
    parts = tokenizers.pre_tokenizers
    tokenizer.backend_tokenizer.pre_tokenizer = parts.Sequence(
        [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def prompts(tokenizer) -> dict[str, str]:
    """The texts by name; the chat one already rendered by the model's own template."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    return {
        "capital": "The capital of France is",
        "one_token": "Hi",
        "two_tokens": "Once upon",
        "code": CODE,
        "digits": "Fibonacci: 1, 1, 2, 3, 5, 8, 13, 21, 34, 55. Pi: 3.14159265. Date: 2031-07-09 18:45:00. Next: 89,",
        "unicode": UNICODE,
        "chat": tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True),
        "record": RECORD,
        "riddle": "Q: I have hands but cannot clap, and a face but no eyes. What am I?\nA:",
        "paragraph": PARAGRAPH,
        "letter": LETTER,
        "ledger": ledger(count),
    }


@torch.inference_mode()
def continue_greedily(model, ids: list[int]) -> list[int]:
    """NUM_NEW tokens of largest logit, one at a time over transformers' cache; end-of-sequence does not stop it."""
    out, cache, step = [], None, torch.tensor([ids])
    for _ in range(NUM_NEW):
        result = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        step = torch.tensor([[out[-1]]])
    return out


@torch.inference_mode()
def full_logits(model, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), V] of one pass over the whole sequence, without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def logsumexp(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    top = logits.max(-1, keepdims=True).astype(np.float64)
    return (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[:, 0]


def record(model, ids: list[int], vocab_ids: np.ndarray) -> dict[str, np.ndarray]:
    """All arrays stored for one prompt. Row r is the logits at position positions[r], which predict its next token."""
    new = continue_greedily(model, ids)
    logits = full_logits(model, ids + new)
    num_prompt = len(ids)
    predicted = logits[num_prompt - 1 : num_prompt - 1 + NUM_NEW]
    if predicted.argmax(-1).tolist() != new:
        raise AssertionError("the cached and the whole run disagree on a greedy token: choose another prompt")
    best = np.sort(predicted, axis=-1)[:, -2:]

    spread = np.unique(np.linspace(0, num_prompt - 1, min(NUM_SPREAD, num_prompt)).round().astype(np.int64))
    positions = np.concatenate([spread, np.arange(num_prompt, num_prompt + NUM_NEW)])
    rows = logits[positions]
    top_ids = np.argsort(-rows, axis=-1, kind="stable")[:, :5]
    before = logits[: num_prompt - 1]
    chosen = np.take_along_axis(before, np.array(ids[1:], np.int64)[:, None], axis=-1)[:, 0] if num_prompt > 1 else []
    return {
        "prompt_ids": np.array(ids, np.int32),
        "continuation": np.array(new, np.int32),
        "gap": (best[:, 1] - best[:, 0]).astype(np.float32),
        "positions": positions.astype(np.int32),
        "logits": rows[:, vocab_ids],
        "top_ids": top_ids.astype(np.int32),
        "top_logits": np.take_along_axis(rows, top_ids, axis=-1),
        "logsumexp": logsumexp(rows).astype(np.float32),
        "norm": np.sqrt((rows.astype(np.float64) ** 2).sum(-1)).astype(np.float32),
        "prompt_logprobs": (np.array(chosen, np.float64) - logsumexp(before)).astype(np.float32),
    }


def to_float64(model) -> None:
    """Makes the model compute in float64 throughout: weights, norms, rotary angles and softmax."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        dim = self.config.head_dim
        base = float(self.config.rope_parameters["rope_theta"])
        inv_freq = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    model.double()
    model.set_attn_implementation("sdpa")  # the eager one computes its softmax in float32
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(norm, module)
    model.model.rotary_emb.forward = types.MethodType(rotary, model.model.rotary_emb)


def print_error(label: str, got: np.ndarray, want: np.ndarray) -> None:
    """How far `got` lies from `want`, both [T, V]: absolute, against each row's largest logit, and row L2."""
    error = np.abs(got - want)
    largest = (error.max(-1) / np.abs(want).max(-1)).max()
    l2 = (np.sqrt((error**2).sum(-1)) / np.sqrt((want.astype(np.float64) ** 2).sum(-1))).max()
    print(
        f"{label}: max abs {error.max():.2e}, over the row's largest logit {largest:.2e}, row L2 {l2:.2e}", flush=True
    )


def print_noise(model, arrays: dict[str, np.ndarray]) -> None:
    """Prints the distance of float32 from float64 for three prompts. The model is float64 afterwards."""
    names = ("unicode", "paragraph", "ledger")
    ids = {
        name: np.concatenate([arrays[f"{name}/{k}"] for k in ("prompt_ids", "continuation")]).tolist() for name in names
    }
    eager = {name: full_logits(model, ids[name]) for name in names}
    model.set_attn_implementation("sdpa")
    for name in names:
        print_error(f"{name}, float32 sdpa against float32 eager", full_logits(model, ids[name]), eager[name])
    to_float64(model)
    for name in names:
        exact = full_logits(model, ids[name])
        if exact.dtype != np.float64:
            raise AssertionError(f"{exact.dtype=} where float64 is meant")
        print_error(f"{name}, float32 eager against float64", eager[name], exact)
        logprob = np.abs((eager[name] - logsumexp(eager[name])[:, None]) - (exact - logsumexp(exact)[:, None])).max()
        print(f"{name}, logprobs: max abs {logprob:.2e}", flush=True)


def check_weights(model, path: Path) -> None:
    """The dequantised weights are those of the gguf package, and plain float32 linear layers hold them."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
    ):
        want = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        np.testing.assert_array_equal(model.state_dict()[ours].numpy(), want, err_msg=ours)
    kinds = {type(m) for m in model.modules() if "Linear" in type(m).__name__}
    if kinds != {torch.nn.Linear} or {p.dtype for p in model.parameters()} != {torch.float32}:
        raise AssertionError(f"{kinds=} hold the weights, not plain float32 linear layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--noise", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(2)
    folder, file = str(args.gguf.parent), args.gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    use_own_pre_tokenizer(tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, args.gguf)

    texts = prompts(tokenizer)
    rng = np.random.default_rng(0)
    vocab_ids = np.sort(rng.choice(model.config.vocab_size, NUM_VOCAB, replace=False)).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"vocab_ids": vocab_ids}
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False).input_ids
        arrays[f"{name}/text"] = np.array(text)
        arrays |= {f"{name}/{key}": value for key, value in record(model, ids, vocab_ids).items()}
        new, gap = arrays[f"{name}/continuation"], arrays[f"{name}/gap"]
        print(f"{name}: {len(ids)} tokens, smallest gap {gap.min():.4f}, {tokenizer.decode(new)!r}", flush=True)

    meta = {
        "model": "SmolLM2-135M-Instruct, Q4_1 GGUF, dequantised to float32",
        "gguf_sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest(),
        "names": list(texts),
        "messages": MESSAGES,
        "tokenizations": [[text, tokenizer(text, add_special_tokens=False).input_ids] for text in SPACINGS],
        "attention": "eager",
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (torch, transformers, tokenizers, np)},
        },
    }
    arrays["meta"] = np.array(json.dumps(meta))
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    if args.noise:
        print_noise(model, arrays)


if __name__ == "__main__":
    main()
