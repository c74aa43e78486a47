"""Token ids of one generation to text, a token at a time, with stop strings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from sarathi_jax.tokenizer import Tokenizer

_PROMPT_TAIL = 8  # tokens of the prompt that a decoder may need to see: a whole character, and something before it
_MAX_HELD = 16  # tokens that an unknown kind of decoder may hold back before a U+FFFD counts as final
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """The text of one generated sequence, grown token by token.

    The text is what `tokenizer.decode` makes of prompt and outputs, less the prompt's: it never shows part of a
    character, and bytes that form none become U+FFFD once they are certain not to. A token may thus add no text, and a
    later one the text of several. Tokens of a byte in a SentencePiece vocabulary wait for the end of their run, as the
    library's decode makes a run U+FFFD as a whole.

    With `stop` strings, text that may begin one is held back until that is settled. The match that is complete first
    ends the text, before it or (`include_stop`) behind it, however tokens cut it; of matches complete at the same
    character, the longest. Only generated text matches.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        if isinstance(stop, str) or any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={stop!r} must be a tuple of non-empty strings")
        self.stop = stop
        self.include_stop = include_stop
        self.stop_reason: str | None = None
        """The stop string that ended the text."""
        self.finished = False
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        kind = _Utf8 if tokenizer.decoder_kind == "byte_level" else _Window
        self._decoder: _Decoder = kind(tokenizer, self._prompt_tail(prompt_token_ids), skip_special_tokens)
        self._parts: list[str] = []
        self._fresh: list[str] = []  # the parts that no delta has taken yet
        self._held = ""  # the longest end of the text that begins a stop string
        self._checks = True

    @property
    def text(self) -> str:
        """All text that is safe to show."""
        self._parts[:] = ["".join(self._parts)]
        return self._parts[0]

    def take_delta(self) -> str:
        """Text that became safe to show since the last call."""
        delta = "".join(self._fresh)
        self._fresh.clear()
        return delta

    def push(self, token_id: int, *, check_stop: bool = True) -> bool:
        """Add a generated token; True when a stop string ends the text (now or before: later tokens change nothing).

        Without `check_stop` (`min_tokens`) the text of this token is final and takes part in no match.
        """
        if self.stop_reason is not None:
            return True
        assert not self.finished, "push after finish"
        self._checks = check_stop
        piece = self._piece(token_id)
        return piece is not None and self._add(self._decoder.push(token_id, piece))

    def finish(self) -> bool:
        """End of the sequence: release what was held back. True when a stop string ends the text. Idempotent."""
        if not self.finished and self.stop_reason is None:
            self._add(self._decoder.flush())
            if self.stop_reason is None:
                self._release(self._held)
        self.finished = True
        return self.stop_reason is not None

    def _piece(self, token_id: int) -> str | None:
        return None if token_id in self._skipped else self._tokenizer.token(token_id)

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[tuple[int, str]]:
        """The last tokens of the prompt that have text: enough of them, and a run of byte tokens whole."""
        tail = []
        for token_id in reversed(prompt_token_ids):
            if (piece := self._piece(token_id)) is not None:
                tail.append((token_id, piece))
                if len(tail) >= _PROMPT_TAIL and not _BYTE_TOKEN.fullmatch(piece):
                    break
        return tail[::-1]

    def _release(self, text: str) -> None:
        self._held = ""
        if text:
            self._parts.append(text)
            self._fresh.append(text)

    def _add(self, new: str) -> bool:
        if not new:
            return False
        text = self._held + new
        if not self.stop or not self._checks:
            self._release(text)
            return False
        matches = [(start + len(s), start, s) for s in self.stop if (start := text.find(s)) >= 0]
        if matches:
            end, start, self.stop_reason = min(matches)
            self._release(text[: end if self.include_stop else start])
            return True
        num_held = max(_num_begun(text, s) for s in self.stop)
        cut = len(text) - num_held
        self._release(text[:cut])
        self._held = text[cut:]
        return False


def _num_begun(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with; the most there are."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class _Decoder(Protocol):
    """Tokens that have text in, text that no later token changes out."""

    def push(self, token_id: int, piece: str) -> str: ...

    def flush(self) -> str: ...


class _Utf8:
    """Byte-level vocabularies: tokens are bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer, tail: list[tuple[int, str]], skip_special_tokens: bool) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for _, piece in tail:
            self._utf8.decode(_token_bytes(piece))
        self._prompt_is_open = bool(self._utf8.getstate()[0])

    def push(self, token_id: int, piece: str) -> str:
        return self._own(self._utf8.decode(_token_bytes(piece)))

    def flush(self) -> str:
        return self._own(self._utf8.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """`text` without the U+FFFD of a character that the prompt began and nothing finished."""
        if text and self._prompt_is_open:
            self._prompt_is_open = False
            return text.removeprefix("\ufffd")
        return text


class _Window:
    """Any other decoder: new text is what decoding a few tokens more adds (the two offsets of vLLM's detokenizer)."""

    def __init__(self, tokenizer: Tokenizer, tail: list[tuple[int, str]], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._has_byte_tokens = tokenizer.decoder_kind == "byte_fallback"
        self._ids = [token_id for token_id, _ in tail]
        self._start_over(0)

    def push(self, token_id: int, piece: str) -> str:
        self._ids.append(token_id)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(piece):
            return ""
        return self._added(final=self._has_byte_tokens or len(self._ids) - self._num_shown >= _MAX_HELD)

    def flush(self) -> str:
        return self._added(final=True)

    def _added(self, *, final: bool) -> str:
        text = self._decode()
        if not final and text.endswith("\ufffd"):
            return ""
        num_known = len(self._shown)
        while not text.startswith(self._shown[:num_known]):  # a character that the prompt began
            num_known -= 1
        if len(text) > num_known:
            self._start_over(self._num_shown)
        return text[num_known:]

    def _start_over(self, start: int) -> None:
        self._ids = self._ids[start:]
        self._num_shown = len(self._ids)
        self._shown = self._decode()

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable Latin-1 is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[letter] for letter in piece])
    except KeyError:  # an added token that is not written in the alphabet is itself, as in the library's decode
        return piece.encode()
