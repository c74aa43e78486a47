"""Text to token ids and back, on the `tokenizers` library: from GGUF metadata or a Hugging Face folder."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from sarathi_jax import chat_template

DecoderKind = Literal["byte_level", "byte_fallback", "other"]

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = tuple(r"[^\r\n\p{L}\p{N}]?" + word for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_TEKKEN = "|".join((*_WORDS, r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*", _TAIL))
_GPT4O = "|".join((*(f"{w}{_ENGLISH}?" for w in _WORDS), r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*", _TAIL))

_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "phi-2", "exaone4", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
}
"""GGUF's `tokenizer.ggml.pre`, under llama.cpp's names, to the expressions that split text, one after another."""

_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"})
"""Kinds that take a word found in the vocabulary before any merge, and add BOS unless the file says not to."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a server must know: BOS, the ids that end a generation, the chat template.

    `vocab_size` bounds the ids the tokenizer knows; a model's own vocabulary may be padded beyond it. The first of
    `eos_token_ids` is the tokenizer's own. `add_bos` None does as the backend's post-processor does.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have gaps
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        if add_bos and bos_token_id is None:
            raise ValueError("add_bos=True needs a BOS token and there is none; set bos_token or add_bos=False")
        before, after = _post_processing(backend)
        if add_bos is False:
            before = [i for i in before if i != bos_token_id]
        elif add_bos and bos_token_id not in before:
            before = [bos_token_id, *before]
        self._before, self._after = before, after
        self.add_bos = bos_token_id is not None and bos_token_id in before

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_token_id={self.bos_token_id}, "
            f"eos_token_ids={self.eos_token_ids}, add_bos={self.add_bos})"
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, behind BOS where the tokenizer adds one. Special tokens are found by their text."""
        _check_text("text", text)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, as the tokenizers library has it. Ids without a token (padded rows) are ''.

        Raises ValueError where the tokenizer's own decoder breaks down.
        """
        known = [i for i in ids if 0 <= i < self.vocab_size]
        try:
            return self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's Rust panics; no class of it can be imported
                raise
            raise ValueError(f"the tokenizer's decoder breaks down at ids {reprlib.repr(known)}: {error}") from None

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that has none, whatever its size."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt that the model's chat template makes of `messages`; `kwargs` are variables of the template."""
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template; set chat_template, or give a prompt, not messages")
        names = {
            "bos_token": "" if self.bos_token_id is None else self.token(self.bos_token_id),
            "eos_token": self.token(self.eos_token_ids[0]) if self.eos_token_ids else "",
        }
        variables = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt} | names | kwargs
        return chat_template.render(self.chat_template, messages, variables)

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads and does not set itself; empty where it cannot be parsed."""
        return chat_template.variables(self.chat_template or "")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Ids of the rendered template, with one BOS where the tokenizer adds one, whether or not the template does."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        ids = self.encode(text, add_special_tokens=False)
        bos = self.bos_token_id
        return [bos, *ids] if self.add_bos and bos is not None and ids[:1] != [bos] else ids

    @cached_property
    def decoder_kind(self) -> DecoderKind:
        """How the backend makes text of tokens: `byte_level` tokens are bytes, `byte_fallback` has tokens of a byte."""
        decoder = self.backend.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        kinds = [d["type"] for d in state.get("decoders", [state] if state else [])]
        if kinds == ["ByteLevel"]:
            return "byte_level"
        return "byte_fallback" if "ByteFallback" in kinds else "other"

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer a GGUF file describes; `metadata` maps its keys to plain values.

        Kinds `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE). Raises ValueError for others, for an unknown
        pre-tokenizer, and for keys that are missing, of a wrong type, or contradictory.
        """
        kind = _required(metadata, "tokenizer.ggml.model", "a string")
        tokens = list(_required(metadata, "tokenizer.ggml.tokens", "a list of strings"))
        pre = _get(metadata, "tokenizer.ggml.pre", "a string", "default")
        if kind == "gpt2":
            merges = _required(metadata, "tokenizer.ggml.merges", "a list of strings")
            backend = _byte_level_backend(tokens, merges, pre)
        elif kind == "llama":
            backend = _sentencepiece_backend(tokens, metadata)
        else:
            raise ValueError(f"tokenizer.ggml.model={kind!r} is not supported; known: gpt2, llama")
        types = list(_get(metadata, "tokenizer.ggml.token_type", "a list of integers", ()))
        if types and len(types) != len(tokens):
            raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        for special in (True, False):
            wanted = (_CONTROL, _UNKNOWN) if special else (_USER_DEFINED,)
            found = [t for t, kind_ in zip(tokens, types, strict=False) if kind_ in wanted]
            new = [AddedToken(t, normalized=False, special=special) for t in found]
            _ = backend.add_special_tokens(new) if special else backend.add_tokens(new)

        by_default = {"bos": 1, "eos": 2} if kind == "llama" else {}
        bos = _token_id(metadata, "bos", tokens, by_default.get("bos"))
        eos = [_token_id(metadata, name, tokens, by_default.get(name)) for name in ("eos", "eot", "eom")]
        by_kind = kind == "llama" or pre in _WHOLE_WORDS
        return cls(
            backend,
            bos_token_id=bos,
            eos_token_ids=[i for i in eos if i is not None],
            add_bos=_get(metadata, "tokenizer.ggml.add_bos_token", "true or false", by_kind),
            chat_template=_get(metadata, "tokenizer.chat_template", "a string"),
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face layout: tokenizer.json, and the configuration beside it.

        Raises ValueError for what is missing or malformed, and for a decoder that breaks down at some token.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file} does not exist; a model folder needs tokenizer.json (of a fast tokenizer)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        here = f" in {folder / 'tokenizer_config.json'}"
        eos = [_named_id(backend, config, "eos_token", here)]
        for name in ("generation_config.json", "config.json"):
            ids = _get(_read_json(folder / name), "eos_token_id", _IDS, [], f" in {folder / name}")
            eos += ids if isinstance(ids, list) else [ids]
        bos = _named_id(backend, config, "bos_token", here)
        if bos is None and "bos_token" not in config:
            bos = _get(_read_json(folder / "config.json"), "bos_token_id", "an integer >= 0", at=" in config.json")
        tokenizer = cls(
            backend,
            bos_token_id=bos,
            eos_token_ids=[i for i in eos if i is not None],
            add_bos=_get(config, "add_bos_token", "true or false", at=here),
            chat_template=_folder_chat_template(folder, config, here),
        )
        try:
            tokenizer.decode(sorted(backend.get_vocab(with_added_tokens=True).values()), skip_special_tokens=False)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        return tokenizer


_IDS = "an integer >= 0, or a list of them"


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(type(entry) in kinds for entry in value)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


_RULES: dict[str, Callable[[Any], bool]] = {
    "a string": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "an integer >= 0": _is_id,
    _IDS: lambda value: _is_id(value) or (isinstance(value, list) and all(map(_is_id, value))),
    "a list of strings": _list_of(str),
    "a list of integers": _list_of(int),
    "a list of numbers": _list_of(int, float),
}


def _get(source: Mapping[str, Any], key: str, rule: str, default: Any = None, at: str = "") -> Any:
    """`source[key]`, or `default` where that is missing or null; ValueError for a value against the rule."""
    value = source.get(key)
    if value is None:
        return default
    if not _RULES[rule](value):
        raise ValueError(f"{key}={reprlib.repr(value)}{at} must be {rule}")
    return value


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name}={text!r} must be a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has half a surrogate pair, {text[error.start]!a} at character {error.start}; "
                "it is no Unicode text: replace or remove it"
            ) from None


def _post_processing(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the backend's post-processor puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    ids = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(ids) - len(plain) + 1):
        if plain and ids[start : start + len(plain)] == plain:
            return ids[:start], ids[start + len(plain) :]
    return ids[: len(ids) - len(plain)], []


def _required(metadata: Mapping[str, Any], key: str, rule: str) -> Any:
    if metadata.get(key) is None:
        raise ValueError(f"the GGUF metadata has no {key!r}; it is needed to build the tokenizer")
    return _get(metadata, key, rule)


def _token_id(metadata: Mapping[str, Any], name: str, tokens: list[str], default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = _get(metadata, key, "an integer >= 0")
    if value is None:
        return default if default is not None and default < len(tokens) else None
    if value >= len(tokens):
        raise ValueError(f"{key}={value} is outside the vocabulary of {len(tokens)} tokens")
    return value


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    for left, right in merges:  # the library panics at such a merge
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ValueError(f"GGUF tokenizer: merge of {left!r} and {right!r} needs both, and their union, as tokens")
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def _assemble(backend: tokenizers.Tokenizer, parts: dict[str, Any]) -> tokenizers.Tokenizer:
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def _split_merges(merges: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ValueError(f"tokenizer.ggml.merges entry {merge!r} must be two tokens and one space between them")
        pairs.append((left, right))
    return pairs


def _byte_level_backend(tokens: list[str], merges: Iterable[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre={pre!r} is not supported; known: {', '.join(sorted(_PRE_TOKENIZERS))}")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _bpe(vocab, _split_merges(merges), ignore_merges=pre in _WHOLE_WORDS)
    splits: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in _PRE_TOKENIZERS[pre]]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    parts = {"pre_tokenizer": pre_tokenizers.Sequence(splits), "decoder": decoders.ByteLevel()}
    return _assemble(backend, parts | ({"normalizer": normalizers.NFC()} if pre.startswith("qwen") else {}))


def _sentencepiece_backend(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _get(metadata, "tokenizer.ggml.merges", "a list of strings")
    if merges is not None:
        merges = _split_merges(merges)
    else:
        merges = _merges_from_scores(vocab, _required(metadata, "tokenizer.ggml.scores", "a list of numbers"))
    unknown = _token_id(metadata, "unknown", tokens, 0)
    unk_token = None if unknown is None else tokens[unknown]
    backend = _bpe(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    prefixed = _get(metadata, "tokenizer.ggml.add_space_prefix", "true or false", True)
    to_pieces: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    to_pieces.append(normalizers.Replace(" ", "▁"))
    to_text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        to_text.append(decoders.Strip(content=" ", left=1))
    return _assemble(backend, {"normalizer": normalizers.Sequence(to_pieces), "decoder": decoders.Sequence(to_text)})


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges that a SentencePiece vocabulary implies: every cut of a piece in two pieces, the best score first.

    Ties go to the longer halves, as in transformers' conversion of SentencePiece models.
    """
    if len(scores) < len(vocab):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocab)} tokens")
    merges = []
    for piece, index in vocab.items():
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += [(scores[index], *cut) for cut in cuts]
    merges.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _named_id(backend: tokenizers.Tokenizer, config: dict[str, Any], key: str, at: str) -> int | None:
    value = config.get(key)
    token = _get({key: value.get("content")} if isinstance(value, dict) else config, key, "a string", at=at)
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ValueError(f"{key}={token!r}{at} is not a token of tokenizer.json")
    return token_id


def _folder_chat_template(folder: Path, config: dict[str, Any], at: str) -> str | None:
    """chat_template.jinja, else the configuration's template; of several named ones, `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if not isinstance(template, list):
        return _get(config, "chat_template", "a string", at=at)
    for entry in template:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ValueError(f"chat_template{at} has {reprlib.repr(entry)}, not the strings 'name' and 'template'")
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named and len(named) != 1:
        raise ValueError(f"chat templates {sorted(named)} in {folder}: one of several must be named 'default'")
    return named["default"] if "default" in named else next(iter(named.values()))
