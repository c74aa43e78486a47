"""Detokenizer: streamed text is the whole text, no character is cut, stop strings end it where they should."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import sarathi_jax.detokenizer as detokenizer_module
from sarathi_jax.detokenizer import Detokenizer
from sarathi_jax.tokenizer import Tokenizer


def _byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes; then words, and control and user-defined tokens."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(b) if b in own else chr(next(others)) for b in range(256)]
    words = [" word", "al", "pha b", "eta", "é!", "日本", "\n\n", "zz"]
    spelled = ["".join(letters[b] for b in word.encode()) for word in words]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": [*letters, *spelled, "<|s|>", "<|e|>", "<tool call>", "<日>"],
            "tokenizer.ggml.token_type": [1] * (256 + len(words)) + [3, 3, 4, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 256 + len(words),
        }
    )


SP_PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "▁",
    "▁leading",
    "▁x",
    "ing",
    "日",
    "▁▁",
    "[t]",
]


def _sentencepiece(add_space_prefix: bool) -> Tokenizer:
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": SP_PIECES,
            "tokenizer.ggml.scores": [0.0] * len(SP_PIECES),
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6 + [4],
            "tokenizer.ggml.add_space_prefix": add_space_prefix,
        }
    )


def _plain(decoder: decoders.Decoder | None) -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["a", "##b", "▁", "▁c", "d</w>", ".", "e", "<0xC3>", "<0xA9>"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


BYTES = _byte_level()
TOKENIZERS = {
    "byte_level": BYTES,
    "sentencepiece": _sentencepiece(True),
    "sentencepiece_without_prefix": _sentencepiece(False),
    "word_piece": _plain(decoders.WordPiece()),
    "metaspace": _plain(decoders.Metaspace()),
    "bpe_suffix": _plain(decoders.BPEDecoder()),
    "fallback_metaspace": _plain(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "none": _plain(None),
}


def _with_decoder(tokenizer: Tokenizer, decoder: decoders.Decoder) -> Tokenizer:
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.decoder = decoder
    return Tokenizer(backend)


TOKENIZERS["bytes_of_a_sequence"] = _with_decoder(
    BYTES, decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content="*", left=1)])
)


def ids_of(*tokens: str | bytes | int) -> list[int]:
    """Byte-level ids: a string is one token, bytes are a token each, an int is itself."""
    own = {BYTES.decode([i], skip_special_tokens=False): i for i in range(BYTES.vocab_size)}
    return [i for t in tokens for i in (t if isinstance(t, bytes) else [t if isinstance(t, int) else own[t]])]


def run(tokenizer: Tokenizer, prompt, ids, **options) -> tuple[list[str], Detokenizer]:
    """Deltas after each token and after the end; tokens behind a stop are not pushed."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    deltas = []
    for i in ids:
        stopped = detokenizer.push(i)
        deltas.append(detokenizer.take_delta())
        assert "".join(deltas) == detokenizer.text
        assert stopped == (detokenizer.stop_reason is not None)
        if stopped:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.text, "a stream must add up to the final text"
    detokenizer.finish()
    assert detokenizer.take_delta() == ""
    return deltas, detokenizer


def text_of(tokenizer: Tokenizer, prompt, ids, **options) -> str:
    return run(tokenizer, prompt, ids, **options)[1].text


# ------------------------------------------------------------------------------------------------------- characters

SCRIPTS = ["👩‍👩‍👧‍👦🏳️‍🌈👍🏽", "ภาษาไทย กำลัง", "e\u0301o\u0308 naïve", "日本語、𠮷", "नमस्ते"]


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece", "bytes_of_a_sequence"])
def test_characters_over_several_tokens_come_whole(tokenizer, text):
    t = TOKENIZERS[tokenizer]
    ids = [b + (3 if tokenizer == "sentencepiece" else 0) for b in text.encode()]
    deltas, detokenizer = run(t, [t.vocab_size - 1], ids)
    assert detokenizer.text == text
    assert not any("\ufffd" in delta for delta in deltas)
    if tokenizer != "sentencepiece":
        assert [d for d in deltas if d] == list(text), "a character is shown with its last byte"


def test_every_cut_of_a_character():
    """However a tokenizer's tokens cut the bytes of a character, nothing is shown before its end."""
    data = "👍é".encode()
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(b) if b in own else chr(next(others)) for b in range(256)]
    for cuts in itertools.product([False, True], repeat=len(data) - 1):
        groups: list[str] = [letters[data[0]]]
        for cut, b in zip(cuts, data[1:], strict=True):
            if cut:
                groups.append(letters[b])
            else:
                groups[-1] += letters[b]
        tokens = list(dict.fromkeys(groups))
        t = Tokenizer.from_gguf(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
        )
        deltas, detokenizer = run(t, [], [tokens.index(g) for g in groups])
        assert detokenizer.text == "👍é"
        assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize(
    "data",
    [
        b"\xe2\x82 word\xf0\x9f",
        b"\x80" * 30,
        b"ok\xf0",
        b"\xf0\x9f\x91\x80\x80",
        b"\xc0\xaf\xed\xa0\x80x",
        b"\xe2\x82\xe2\x82\xac",
    ],
)
def test_invalid_bytes_are_marked_once(data):
    assert text_of(BYTES, [97], data) == data.decode(errors="replace") == BYTES.decode(data)


def test_bytes_that_end_no_character_wait_no_longer_than_needed():
    deltas, _ = run(BYTES, [], b"\x80" * 30)
    assert deltas == ["\ufffd"] * 30 + [""]
    deltas, _ = run(BYTES, [], b"a\xf0\x9fb\xe2")
    assert deltas == ["a", "", "", "\ufffdb", "", "\ufffd"]


def test_a_long_run_of_byte_tokens_is_decoded_once():
    t = TOKENIZERS["sentencepiece"]
    calls = []

    class Counting:
        def decode(self, ids, **options):
            calls.append(len(ids))
            return t.backend.decode(ids, **options)

    detokenizer = Detokenizer(t, [260])
    counted = Tokenizer(t.backend)
    counted.backend = Counting()  # type: ignore[assignment]
    detokenizer._decoder._tokenizer = counted  # type: ignore[attr-defined]
    for _ in range(500):
        detokenizer.push(3 + 0x80)
    detokenizer.push(261)
    assert detokenizer.text == "\ufffd" * 500 + " x"
    assert sum(calls) < 3 * 500


@given(st.binary(max_size=40), st.binary(max_size=6))
@example(b"\xac", b"\xe2\x82")
@example(b"x", b"\xe2\x82")
def test_any_bytes_stream_as_python_decodes_them(data, prompt):
    full, before = (prompt + data).decode(errors="replace"), prompt.decode(errors="replace")
    common = len(before) if full.startswith(before) else len(before) - 1  # a character that the prompt began
    assert text_of(BYTES, prompt, data) == full[common:]


def _added_by(tokenizer: Tokenizer, prompt, ids, skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    full = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    while not full.startswith(before):
        before = before[:-1]
    return full[len(before) :]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_ids_stream_as_the_library_decodes_them(name, skip):
    """In the context of the prompt; with special tokens, ids of no token, and SentencePiece's leading spaces."""
    t, rng = TOKENIZERS[name], random.Random(0)
    odd = [t.vocab_size, t.vocab_size + 40, -1, 2**40]
    start = 256 if name.startswith("byte") else 259 if "sentencepiece" in name else 0
    often = [*range(start, t.vocab_size), *([1, 2] if "sentencepiece" in name else [])]
    for _ in range(1000):
        few = rng.choices(range(t.vocab_size), k=3) + odd
        ids = [rng.choice(often if rng.random() < 0.7 else few) for _ in range(rng.randint(1, 24))]
        cut = rng.randint(0, len(ids))
        prompt, ids = ids[:cut], ids[cut:]
        deltas, detokenizer = run(t, prompt, ids, skip_special_tokens=skip)
        assert detokenizer.text == _added_by(t, prompt, ids, skip), (prompt, ids)
        assert "".join(deltas).count("\ufffd") == detokenizer.text.count("\ufffd")


def test_word_spaces_are_kept():
    t = TOKENIZERS["sentencepiece"]
    space, leading, x = 259, 260, 261
    assert text_of(t, [x], [leading, x]) == " leading x", "a first token with a space keeps it behind a prompt"
    assert text_of(t, [], [space, leading, x]) == " leading x", "the text's own first space goes once"
    assert text_of(t, [1], [leading, 2, x]) == "leading x"
    assert text_of(t, [1], [leading, 2, x], skip_special_tokens=False) == " leading</s> x"


def test_ids_without_a_token_add_no_text():
    for odd in (BYTES.vocab_size, 280, 10**9, -5, 2**70):
        assert text_of(BYTES, [odd], [97, odd, 98]) == "ab"


# ----------------------------------------------------------------------------------------------------- stop strings


def test_a_stop_string_over_token_borders():
    ids = ids_of("al", "pha b", "eta")
    deltas, detokenizer = run(BYTES, [97], ids, stop=("ha be",))
    assert (detokenizer.text, detokenizer.stop_reason) == ("alp", "ha be")
    assert deltas == ["al", "p", "", ""]
    deltas, detokenizer = run(BYTES, [97], ids, stop=("ha be",), include_stop=True)
    assert (detokenizer.text, detokenizer.stop_reason) == ("alpha be", "ha be")


def test_every_split_of_a_stop_string():
    """Over one to four tokens, with text before and behind in the same tokens: always the same cut."""
    letters = {BYTES.decode([b]): BYTES.token(b) for b in range(256)}
    text = "xSTOPxy"
    for num in range(1, 5):
        for cuts in itertools.combinations(range(1, len(text)), num - 1):
            parts = [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))]
            tokens = list(dict.fromkeys("".join(letters[c] for c in part) for part in parts))
            t = Tokenizer.from_gguf(
                {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
            )
            ids = [tokens.index("".join(letters[c] for c in part)) for part in parts]
            assert text_of(t, [], ids, stop=("STOP",)) == "x"
            assert text_of(t, [], ids, stop=("STOP",), include_stop=True) == "xSTOP"


def _stopped(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What one sees who reads character by character and stops at the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.lists(st.sampled_from([*b"ab", *ids_of("al", "zz", "日本"), 0xE6, 0x97, 0xA5, 264, 999]), max_size=30),
    st.lists(st.text("abzl日\ufffd", min_size=1, max_size=4), max_size=3).map(tuple),
    st.booleans(),
)
@example(list(b"abab"), ("bab", "aba"), False)
@example(list(b"aaba"), ("aba",), False)
@example(list(b"aab"), ("ab", "aab"), False)
def test_stop_strings_do_not_depend_on_tokens(ids, stop, include):
    deltas, detokenizer = run(BYTES, list(b"abzz"), ids, stop=stop, include_stop=include)
    assert (detokenizer.text, detokenizer.stop_reason) == _stopped(BYTES.decode(ids), stop, include)
    if detokenizer.stop_reason and not include:
        assert not any(s in "".join(deltas) for s in stop)


def test_of_overlapping_stop_strings_the_first_complete_one_wins():
    assert run(BYTES, [], b"xabcd", stop=("abcd", "bc"))[1].stop_reason == "bc"
    assert run(BYTES, [], b"xabcd", stop=("bc", "abc"))[1].stop_reason == "abc", "the longest at the same character"
    assert text_of(BYTES, [], b"xabcd", stop=("bc", "abc")) == "x"


def test_only_generated_text_matches():
    assert text_of(BYTES, b"STOP", b"x", stop=("STOP",)) == "x"
    assert text_of(BYTES, b"ST", b"OP", stop=("STOP",)) == "OP"


def test_held_text_is_released_as_soon_as_it_cannot_match():
    deltas, detokenizer = run(BYTES, [], b"aabaac", stop=("aabaad", "zzzz"))
    assert deltas == ["", "", "", "", "", "aabaac", ""]
    assert detokenizer.stop_reason is None
    deltas, _ = run(BYTES, [], b"aazzz", stop=("zzzz",))
    assert deltas == ["a", "a", "", "", "", "zzz"], "what is held at the end is flushed once"
    deltas, _ = run(BYTES, [], b"aab", stop=("ab", "aac"))
    assert deltas[:3] == ["", "", "a"]


def test_a_stop_string_in_the_flushed_text_counts():
    t = TOKENIZERS["sentencepiece"]
    detokenizer = Detokenizer(t, [260], stop=("é",))
    assert [detokenizer.push(i) for i in (261, 3 + 0xC3, 3 + 0xA9)] == [False, False, False]
    assert detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_reason) == (" x", "é")


def test_tokens_after_a_stop_change_nothing():
    detokenizer = Detokenizer(BYTES, [], stop=("b",))
    assert [detokenizer.push(i) for i in b"abc"] == [False, True, True]
    assert detokenizer.finish()
    assert detokenizer.text == detokenizer.take_delta() == "a"


def test_text_before_min_tokens_takes_part_in_no_match():
    detokenizer = Detokenizer(BYTES, [], stop=("ab",))
    assert not detokenizer.push(ord("a"), check_stop=False)
    assert detokenizer.take_delta() == "a", "nothing is held while nothing is checked"
    assert not detokenizer.push(ord("b"), check_stop=False)
    assert not detokenizer.push(ord("a"), check_stop=False)
    assert not detokenizer.push(ord("b"))
    assert not detokenizer.push(ord("a"))
    assert detokenizer.push(ord("b"))
    assert detokenizer.text == "abab"
    detokenizer = Detokenizer(BYTES, [], stop=("ab",))
    assert not any(detokenizer.push(i, check_stop=i != ord("b")) for i in b"abc")
    assert detokenizer.text == detokenizer.take_delta() == "abc", "held text comes once"


def test_cost_does_not_grow_with_the_text(monkeypatch):
    """Stop strings are looked for in what is new and in what was held back, never in the text before."""
    looked_at = []
    begun = detokenizer_module._num_begun
    monkeypatch.setattr(
        detokenizer_module, "_num_begun", lambda text, stop: looked_at.append(len(text)) or begun(text, stop)
    )
    text_of(BYTES, [], b"abczz" * 400, stop=("zzzz", "abcx"))
    assert len(looked_at) == 2 * 2000
    assert max(looked_at) <= 4


@pytest.mark.parametrize("stop", ["abc", ("",), (1,), ("a", None)])
def test_bad_stop_strings(stop):
    with pytest.raises(ValueError, match="stop="):
        Detokenizer(BYTES, [], stop=stop)


def test_decoder_kinds():
    kinds = {name: t.decoder_kind for name, t in TOKENIZERS.items()}
    assert kinds["byte_level"] == "byte_level"
    assert {n for n, k in kinds.items() if k == "byte_fallback"} == {n for n in kinds if "sentence" in n or "fall" in n}
