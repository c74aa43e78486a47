"""Tokenizer: the ids a model was trained on, chat prompts, and refusals a user can act on."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from sarathi_jax.detokenizer import Detokenizer
from sarathi_jax.tokenizer import Tokenizer


def byte_letters() -> list[str]:
    """GPT-2's letter for each of the 256 bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in own else chr(next(others)) for b in range(256)]


def byte_level(*extra: str, pre: str = "gpt-2", merges: tuple[str, ...] = (), **keys) -> Tokenizer:
    """A GGUF tokenizer whose first 256 ids are the bytes, then `extra`: <|...|> control, [...] user-defined."""
    kinds = {"<": 3, "[": 4}
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*byte_letters(), *extra],
            "tokenizer.ggml.token_type": [1] * 256 + [kinds.get(t[0], 1) for t in extra],
            "tokenizer.ggml.merges": list(merges),
            **{f"tokenizer.{k}" if k == "chat_template" else f"tokenizer.ggml.{k}": v for k, v in keys.items()},
        }
    )


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
PIECES += [
    "▁",
    "l",
    "e",
    "a",
    "d",
    "i",
    "n",
    "g",
    "x",
    "in",
    "ng",
    "ing",
    "le",
    "▁le",
    "▁a",
    "▁x",
    "ad",
    "▁lead",
    "[sep]",
]
SCORES = dict(zip(("in", "le", "ing", "▁le", "ad", "▁a", "▁x", "▁lead", "ng"), range(-1, -10, -1), strict=True))


def sentencepiece(**keys) -> Tokenizer:
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": [float(SCORES.get(p, -100)) for p in PIECES],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 260) + [4],
            **{f"tokenizer.ggml.{k}": v for k, v in keys.items()},
        }
    )


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.token(i) for i in ids]


# --------------------------------------------------------------------------------------------------------- SmolLM2

# From transformers 5.24 (AutoTokenizer over the same GGUF, with the Digits + ByteLevel pre-tokenizer of SmolLM2's
# tokenizer.json, which its GGUF conversion leaves out), and equal to a BPE written in Python after llama.cpp's split.
# fmt: off
GOLDEN = [
    ("", []),
    ("Hello, world!", [19556, 28, 905, 17]),
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("  leading and trailing  ", [216, 2899, 284, 35079, 256]),
    ("a  b   c\t\td\n\n\ne \r\n", [81, 216, 278, 256, 265, 197, 197, 84, 1116, 198, 85, 216, 2738]),
    ("na\xefve caf\xe9 \u2014 \u201cquotes\u201d \u2026", [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548]),
    ("\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u4e2d\u6587",
      [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226, 29917, 28589,
      29184]),
    ("\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
      [10283, 250, 43662, 10283, 119, 43662, 31933, 222, 10283, 241, 10283, 112]),
    ("\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd!",
      [10813, 235, 119, 321, 231, 10813, 235, 117, 10813, 233, 128, 31752, 321, 231, 10813, 230, 226, 15107, 235,
      231, 10813, 233, 138, 17]),
    ("e\u0301 vs \xe9", [85, 151, 219, 6375, 26411]),
    ("In 2024, 3.14159 \xd7 1,000 = \u0663\xbd \u2167",
      [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41, 15493, 216, 33, 28, 32, 32, 32, 446, 216,
      164, 113, 16738, 216, 173, 223, 117]),
    ("  12 34", [256, 33, 34, 216, 35, 36]),
    ("def f(x):\n    return x**2  # n'est-ce pas?\n",
      [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 304, 23, 381, 29, 319, 40113, 47, 198]),
    ("I'll we've they're DON'T it's", [57, 3060, 392, 3543, 502, 2316, 422, 2154, 23, 68, 357, 506]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("text<|endoftext|> more", [2692, 0, 540]),
    ("<repo_name>x<file_sep>", [3, 104, 5]),
    ("\u200b\ufeff\xa0x\u3000y", [321, 229, 186, 136, 140, 15442, 104, 12109, 218, 105]),
    ("\x00\x1f\x7f", [190, 215, 217]),
    ("x" * 40, [31069] * 10),
]
# fmt: on
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
]
CHAT_TEXT = (
    "<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n"
)
# fmt: off
CHAT_IDS = [1, 9690, 198, 21350, 13099, 30, 2, 198, 1, 4093, 198, 34, 27, 34, 47, 2, 198, 1, 520, 9531, 198, 36, 2, 198,
            1, 4093, 198, 3528, 216, 35, 27, 35, 47, 2, 198]
# fmt: on


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    from sarathi_jax.models.gguf_file import GGUFCheckpoint
    from sarathi_jax.models.hub import fetch_default_model

    try:
        path = fetch_default_model()
    except RuntimeError as error:
        pytest.skip(f"the default model is not to be had: {error}")
    return Tokenizer.from_gguf(GGUFCheckpoint(path).metadata)


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_smollm2_ids_are_those_of_its_training(smollm2, text, ids):
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_properties(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert not smollm2.add_bos
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.decode([1, 4093, 198, 26843, 2]) == "user\nHi"


def test_smollm2_chat_prompt(smollm2):
    assert smollm2.apply_chat_template(CHAT, add_generation_prompt=False) == CHAT_TEXT
    assert smollm2.apply_chat_template(CHAT) == CHAT_TEXT + "<|im_start|>assistant\n"
    assert smollm2.encode_chat(CHAT, add_generation_prompt=False) == CHAT_IDS
    assert smollm2.encode_chat(CHAT) == [*CHAT_IDS, 1, 520, 9531, 198]


def test_smollm2_streams_its_own_encodings(smollm2):
    text = "<|im_start|>user\nnaïve 日本語 ภาษาไทย 👩‍👩‍👧‍👦 1234<|im_end|>\n  def f(x): pass\n"
    ids = smollm2.encode(text)
    for skip in (True, False):
        full = smollm2.decode(ids, skip_special_tokens=skip)
        for cut in range(len(ids)):
            prompt = smollm2.decode(ids[:cut], skip_special_tokens=skip)
            detokenizer = Detokenizer(smollm2, ids[:cut], skip_special_tokens=skip)
            for i in ids[cut:]:
                detokenizer.push(i)
            detokenizer.finish()
            # of a character that the prompt began, all is generated text
            assert prompt.rstrip("\ufffd") + detokenizer.text == full


# ------------------------------------------------------------------------------------------------------- GGUF kinds

SPLITS = {
    "gpt-2": ["I", "'m", " 1234", "\n\n", " don", "'", "T", "   ", " é", "!?"],
    "smollm": ["I", "'m", " ", "1", "2", "3", "4", "\n\n", " don", "'", "T", "   ", " é", "!?"],
    "llama-bpe": ["I", "'m", " ", "123", "4", "\n\n", " don", "'T", "   ", " é", "!?"],
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", "\n\n", " don", "'T", "   ", " é", "!?"],
    "gpt-4o": ["I'm", " ", "123", "4", "\n\n", " don'T", "   ", " é", "!?"],
    "tekken": ["I", "'m", " ", "1", "2", "3", "4", "\n\n", " don", "'T", "   ", " é", "!?"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_cut_as_the_model_was_trained(pre):
    backend = byte_level(pre=pre, add_bos_token=False).backend
    pieces = backend.pre_tokenizer.pre_tokenize_str("I'm 1234\n\n don'T    é!?")
    letters = {letter: b for b, letter in enumerate(byte_letters())}
    assert [bytes(letters[c] for c in piece).decode() for piece, _ in pieces] == SPLITS[pre]


def test_llama3_takes_a_known_word_whole():
    word = byte_level("ab", "abc", "<|b|>", pre="llama-bpe", merges=("a b",), bos_token_id=258)
    assert word.encode("abc") == [258, 257], "a word in the vocabulary needs no merges; BOS is llama 3's default"
    assert byte_level("ab", "abc", merges=("a b",)).encode("abc") == [256, ord("c")]


def test_sentencepiece_merges_follow_the_scores():
    t = sentencepiece()
    assert spelled(t, t.encode("leading")) == ["<s>", "▁lead", "ing"]
    # "in" is the best merge, so that "ng" is never formed
    assert spelled(t, t.encode("ing", add_special_tokens=False)) == ["▁", "ing"]
    assert t.add_bos
    assert (t.bos_token_id, t.eos_token_ids) == (1, (2,))


def test_sentencepiece_ties_go_to_the_longer_left_half():
    tokens = ["<unk>", "▁", "a", "aa", "aaa"]
    t = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0, -9.0, -9.0, -1.0, -2.0],
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    merges = json.loads(t.backend.to_str())["model"]["merges"]
    assert merges == [["a", "a"], ["aa", "a"], ["a", "aa"]]
    assert spelled(t, t.encode("aaaa")) == ["▁", "aa", "aa"]
    assert spelled(t, t.encode("aaa")) == ["▁", "aaa"]


@pytest.mark.parametrize("text", ["a", " a", "  x leading", "é日👍", "", "\n", "a é x", "a  "])
def test_sentencepiece_round_trip(text):
    t = sentencepiece()
    assert t.decode(t.encode(text)) == text
    without = sentencepiece(add_space_prefix=False)
    assert without.decode(without.encode(text)) == text
    assert t.encode(text) == [1, *without.encode(" " + text)[1:]] or not text


def test_sentencepiece_unknown_characters_become_bytes():
    t = sentencepiece()
    assert spelled(t, t.encode("é")[1:]) == ["▁", "<0xC3>", "<0xA9>"]


def test_token_types():
    t = byte_level("<|im_end|>", "[tool]", eos_token_id=256)
    assert t.encode("a<|im_end|>[tool]") == [ord("a"), 256, 257]
    assert t.decode([97, 256, 257]) == "a[tool]", "only control tokens are special"
    assert t.decode([97, 256, 257], skip_special_tokens=False) == "a<|im_end|>[tool]"
    assert t.special_ids == {256}
    sp = sentencepiece()
    assert sp.decode([0, 1, 2, sp.backend.token_to_id("[sep]")]) == "[sep]"


def test_gguf_eos_ids_are_all_that_end_a_turn():
    t = byte_level("<|a|>", "<|b|>", "<|c|>", eos_token_id=257, eot_token_id=258, eom_token_id=257)
    assert t.eos_token_ids == (257, 258)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer.ggml.model='bert'.*known: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, r"no 'tokenizer.ggml.model'"),
        ({"tokenizer.ggml.tokens": None}, r"no 'tokenizer.ggml.tokens'"),
        ({"tokenizer.ggml.merges": None}, r"no 'tokenizer.ggml.merges'"),
        ({"tokenizer.ggml.pre": "klingon"}, r"tokenizer.ggml.pre='klingon'.*known: .*llama-bpe.*smollm"),
        ({"tokenizer.ggml.merges": ["a b"]}, "merge of 'a' and 'b' needs"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' must be two tokens"),
        ({"tokenizer.ggml.eos_token_id": 9}, "eos_token_id=9 is outside the vocabulary of 2"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for 2 tokens"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos=True needs a BOS token"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, r"no 'tokenizer.ggml.scores'"),
    ],
)
def test_bad_gguf_metadata(change, message):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata | change)


@pytest.mark.parametrize(
    ("kind", "key", "value", "rule"),
    [
        ("gpt2", "model", ["gpt2"], "a string"),
        *[("gpt2", "tokens", value, "a list of strings") for value in (5, "ab", [1, 2], ["a", None])],
        *[("gpt2", "pre", value, "a string") for value in (["x"], 5)],
        *[("gpt2", "merges", value, "a list of strings") for value in (5, [1], "a b")],
        *[("gpt2", "token_type", value, "a list of integers") for value in (3, ["a", "b"], [1.0, 1.0])],
        *[("gpt2", "eos_token_id", value, "an integer >= 0") for value in ("x", [1], 1.5, -1, True)],
        *[("llama", "bos_token_id", value, "an integer >= 0") for value in ("x", 1.5)],
        *[("llama", "unknown_token_id", value, "an integer >= 0") for value in ("a", -1)],
        ("llama", "unknown_token_id", 10**9, "outside the vocabulary of 2"),
        *[("llama", "scores", value, "a list of numbers") for value in ("x", ["a", "b"], 5)],
        *[("llama", name, "no", "true or false") for name in ("add_bos_token", "add_space_prefix")],
        ("gpt2", "add_bos_token", 0, "true or false"),
    ],
)
def test_gguf_values_of_a_wrong_type_are_named(kind, key, value, rule):
    metadata = {"model": kind, "tokens": ["a", "b"], "eos_token_id": 1, "bos_token_id": 0}
    metadata |= {"merges": []} if kind == "gpt2" else {"scores": [0.0, 0.0]}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in (metadata | {key: value}).items()}
    shown = re.escape(f"tokenizer.ggml.{key}={value!r}")
    with pytest.raises(ValueError, match=rf"{shown}.*{rule}"):
        Tokenizer.from_gguf(metadata)


def test_a_gguf_chat_template_is_text():
    with pytest.raises(ValueError, match=r"tokenizer\.chat_template=5 must be a string"):
        byte_level(chat_template=5)


def test_a_sentencepiece_vocabulary_may_be_smaller_than_its_default_ids():
    keys = {"model": "llama", "tokens": [], "scores": [], "add_bos_token": False}
    t = Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    assert (t.vocab_size, t.bos_token_id, t.eos_token_ids) == (0, None, ())


# ----------------------------------------------------------------------------------------------- texts and odd ids


def test_ids_with_gaps_keep_their_text():
    vocab = {letter: i for i, letter in enumerate(byte_letters())} | {"ab": 4000}
    t = Tokenizer(Backend(models.BPE(vocab=vocab, merges=[("a", "b")])))
    assert t.encode("ab") == [4000]
    assert t.decode([4000, 97]) == "ab a"
    assert t.token(4000) == "ab"
    assert (t.vocab_size, t.token(3999), t.decode([3999])) == (4001, None, "")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_half_a_surrogate_is_refused(text):
    t = byte_level("<|s|>", bos_token_id=256, chat_template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="half a surrogate pair"):
        t.encode(text)
    with pytest.raises(ValueError, match="half a surrogate pair"):
        t.encode_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_text_must_be_a_string(text):
    with pytest.raises(ValueError, match="must be a string"):
        byte_level().encode(text)


@pytest.mark.parametrize("odd", [-1, 257, 280, 10**9, 2**32, 2**70])
def test_ids_without_a_token_are_empty(odd):
    t = byte_level("<|s|>")
    assert t.decode([97, odd, 98]) == "ab"
    assert t.token(odd) is None
    assert t.decode([odd]) == ""


def test_a_folders_truncation_and_padding_do_not_cut_prompts():
    t = byte_level()
    t.backend.enable_truncation(2)
    t.backend.enable_padding(length=8)
    assert Tokenizer(t.backend).encode("abcd") == [97, 98, 99, 100]


# ------------------------------------------------------------------------------------------------------------- chat

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


def chat(template: str | None = TEMPLATE, *, add_bos: bool = True) -> Tokenizer:
    keys = {} if template is None else {"chat_template": template}
    return byte_level("<|s|>", "<|e|>", bos_token_id=256, eos_token_id=257, add_bos_token=add_bos, **keys)


@pytest.mark.parametrize("writes_bos", [True, False])
def test_one_bos_in_chat_and_in_raw_text(writes_bos):
    t = chat(TEMPLATE if writes_bos else TEMPLATE.removeprefix("{{ bos_token }}"))
    assert t.encode_chat(HI) == [256, *b"[user]Hi", 257]
    assert t.encode("Hi") == [256, *b"Hi"]
    assert t.encode("Hi", add_special_tokens=False) == [*b"Hi"]


def test_no_bos_where_neither_adds_one():
    t = chat(TEMPLATE.removeprefix("{{ bos_token }}"), add_bos=False)
    assert t.encode_chat(HI) == [*b"[user]Hi", 257]
    assert chat(add_bos=False).encode_chat(HI)[:2] == [256, ord("[")], "the template's own stays"


def test_template_helpers():
    template = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "{% endfor %}"
        "{% if tools is not none %}tools{% endif %}{% if add_generation_prompt %}>{% endif %}{{ extra }}"
        "{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "user", "content": c} for c in ("<é>", "b", "c")]
    assert chat(template).apply_chat_template(messages, extra="!") == '"<é>""b">!4'
    assert chat(template).apply_chat_template(messages, add_generation_prompt=False, tools=[]) == '"<é>""b"tools4'


def test_without_a_template():
    with pytest.raises(ValueError, match="no chat template"):
        chat(None).apply_chat_template(HI)


@pytest.mark.parametrize(
    "messages",
    [[], "hi", None, {"role": "user"}, ["hi"], [{"content": "x"}], [{"role": 1}], [{"role": "u", "content": 5}]],
)
def test_malformed_messages(messages):
    with pytest.raises(ValueError, match=r"^messages"):
        chat().apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ 'a' + messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_template_errors_are_value_errors(template, message):
    with pytest.raises(ValueError, match=f"chat template.*{message}"):
        chat(template).apply_chat_template(HI)


def test_an_interrupted_decode_stays_an_interrupt():
    class Interrupted:
        def decode(self, *_, **__):
            raise KeyboardInterrupt

    t = byte_level()
    t.backend = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        t.decode([97])


def test_tokenizing_needs_no_jax():
    code = "import sys, sarathi_jax.tokenizer, sarathi_jax.detokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
