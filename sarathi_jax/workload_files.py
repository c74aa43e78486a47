"""Workloads from files: CSV of lengths, Mooncake's JSONL traces, ShareGPT-style conversations; `.gz` of each.

A row is bad where a number is missing, of the wrong type, out of range (a length below 1 or above `MAX_TOKENS`, a time
below 0 or NaN), or earlier than the row before it; where prompt and output together exceed `max_total_tokens` (after
`scale`); where the line is blank (blank lines at the very end are not rows), not UTF-8 or does not parse. With
`on_bad_row="raise"` the first is a ValueError with file, line and rule; with "skip" it is left out and reported. A file
that is no such file at all (a truncated gzip, a header without the columns, JSON that breaks off) or has no usable row
is a ValueError either way.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from sarathi_jax.config import check_number
from sarathi_jax.workload import WorkItem, Workload, check_tokens

OnBadRow = Literal["raise", "skip"]
_Raw = TypeVar("_Raw")


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was left out: its line in the file, from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How many rows a file has (its header is none), how many are in the workload, and the others."""

    num_rows: int
    num_used: int
    skipped: tuple[BadRow, ...]

    def __str__(self) -> str:
        lines = [f"{self.num_used} of {self.num_rows} rows used"]
        lines += [f"line {row.line}: {row.reason}" for row in self.skipped[:10]]
        return "\n".join(lines + [f"and {len(self.skipped) - 10} more"] * (len(self.skipped) > 10))


class Loaded(NamedTuple):
    workload: Workload
    report: LoadReport


class Encoder(Protocol):
    """Text to token ids, such as `Tokenizer`."""

    def encode(self, text: str, /) -> list[int]: ...


def load_csv(
    path: str | Path, *, scale: float = 1.0, max_total_tokens: int | None = None, on_bad_row: OnBadRow = "raise"
) -> Loaded:
    """Columns num_prefill_tokens, num_decode_tokens and, where there is one, arrived_at in seconds; others are ignored.

    The first line names the columns. Times count from the first row used; without arrived_at all arrive at once: see
    `Workload.with_arrivals`.
    """
    lines = _read_lines(path)
    try:
        header = [name.strip() for name in _csv_fields(lines[0])]
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}; it must name the columns") from error
    for name in ("num_prefill_tokens", "num_decode_tokens", "arrived_at"):
        if (count := header.count(name)) > 1 or (count == 0 and name != "arrived_at"):
            raise ValueError(
                f"{path}, line 1: {count} columns are named {name!r}; its columns are {reprlib.repr(header)}"
            )

    def parse(raw: bytes) -> WorkItem:
        fields = _csv_fields(raw)
        if len(fields) != len(header):
            raise ValueError(f"{len(fields)} fields but {len(header)} columns")
        row = dict(zip(header, fields, strict=True))
        return WorkItem(
            arrived_at_s=_csv_seconds(row["arrived_at"]) if "arrived_at" in row else 0.0,
            num_prefill_tokens=_csv_int("num_prefill_tokens", row["num_prefill_tokens"]),
            num_decode_tokens=_csv_int("num_decode_tokens", row["num_decode_tokens"]),
        )

    return _collect(path, enumerate(lines[1:], 2), parse, scale, max_total_tokens, on_bad_row)


def load_mooncake(
    path: str | Path,
    *,
    scale: float = 1.0,
    max_total_tokens: int | None = None,
    on_bad_row: OnBadRow = "raise",
    hash_block_len: int = 512,
) -> Loaded:
    """A JSON object a line: timestamp (ms), input_length, output_length and, where there are some, hash_ids.

    Times count from the first row used. There is one hash id to every `hash_block_len` prompt tokens begun.
    """
    check_tokens("hash_block_len", hash_block_len)

    def parse(raw: bytes) -> WorkItem:
        row = _parse_json(_decode(raw))
        if not isinstance(row, dict):
            raise ValueError("is not a JSON object")
        if missing := {"timestamp", "input_length", "output_length"} - row.keys():
            raise ValueError(f"lacks {sorted(missing)}")
        check_number("timestamp", row["timestamp"], 0, 1e15, "0 <= timestamp <= 1e15 milliseconds")
        check_tokens("input_length", row["input_length"])
        check_tokens("output_length", row["output_length"])
        ids, needed = row.get("hash_ids"), -(-row["input_length"] // hash_block_len)
        if ids is not None and (not isinstance(ids, list) or len(ids) != needed):
            raise ValueError(f"hash_ids={reprlib.repr(ids)} must be a list of {needed}, one to {hash_block_len} tokens")
        return WorkItem(
            arrived_at_s=row["timestamp"] / 1000,
            num_prefill_tokens=row["input_length"],
            num_decode_tokens=row["output_length"],
            hash_ids=None if ids is None else tuple(ids),
        )

    lines = enumerate(_read_lines(path), 1)
    return _collect(path, lines, parse, scale, max_total_tokens, on_bad_row, hash_block_len)


def load_sharegpt(
    path: str | Path,
    tokenizer: Encoder,
    *,
    scale: float = 1.0,
    max_total_tokens: int | None = None,
    on_bad_row: OnBadRow = "raise",
) -> Loaded:
    """A JSON list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}.

    A conversation's first human (or user) turn is the prompt, as `tokenizer.encode` gives it; the gpt (or assistant)
    turn right behind it is counted for the output length, without what the tokenizer adds to any text (BOS). All arrive
    at once: see `Workload.with_arrivals`.
    """
    num_added = len(tokenizer.encode(""))

    def parse(entry: tuple[int, Any]) -> WorkItem:
        try:
            prompt, answer = _first_exchange(entry[1])
            ids, num_answer = tuple(tokenizer.encode(prompt)), len(tokenizer.encode(answer)) - num_added
            return WorkItem(
                arrived_at_s=0.0, num_prefill_tokens=len(ids), num_decode_tokens=num_answer, prompt_token_ids=ids
            )
        except ValueError as error:
            raise ValueError(f"conversation {entry[0]}: {error}") from None

    return _collect(path, _json_entries(path), parse, scale, max_total_tokens, on_bad_row)


def _collect(
    path: str | Path,
    rows: Iterable[tuple[int, _Raw]],
    parse: Callable[[_Raw], WorkItem],
    scale: float,
    max_total_tokens: int | None,
    on_bad_row: OnBadRow,
    hash_block_len: int | None = None,
) -> Loaded:
    """The workload of the (line, raw row) that `parse` makes an item of; a ValueError of its is a bad row."""
    check_number("scale", scale, 1e-6, 1e6, "0.000001 <= scale <= 1000000")
    if max_total_tokens is not None:
        check_tokens("max_total_tokens", max_total_tokens, 2)
    if on_bad_row not in ("raise", "skip"):
        raise ValueError(f"{on_bad_row=} must be 'raise' or 'skip'")
    items: list[WorkItem] = []
    skipped: list[BadRow] = []
    for line, raw in rows:
        try:
            item = parse(raw).scaled(scale)
            if max_total_tokens is not None and item.num_total_tokens > max_total_tokens:
                raise ValueError(f"{item.num_total_tokens} tokens in all are above {max_total_tokens=}")
            if items and item.arrived_at_s < items[-1].arrived_at_s:
                raise ValueError(
                    f"arrives at {item.arrived_at_s} s, before the last row used, at {items[-1].arrived_at_s} s"
                )
        except ValueError as error:
            if on_bad_row == "raise":
                raise ValueError(f"{path}, line {line}: {error} (on_bad_row='skip' leaves such rows out)") from error
            skipped.append(BadRow(line=line, reason=str(error)))
        else:
            items.append(item)
    report = LoadReport(num_rows=len(items) + len(skipped), num_used=len(items), skipped=tuple(skipped))
    if not items:
        raise ValueError(f"{path} has no usable row: {report}")
    start = items[0].arrived_at_s
    span = items[-1].arrived_at_s - start
    workload = Workload(
        items=tuple(replace(item, arrived_at_s=item.arrived_at_s - start) for item in items) if start else tuple(items),
        requests_per_s=(len(items) - 1) / span if span else None,
        hash_block_len=None if hash_block_len is None else hash_block_len * scale,
    )
    return Loaded(workload, report)


def _read(path: str | Path) -> bytes:
    """The file's bytes, unpacked where they are gzip's, without a byte order mark."""
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}; fetch it again") from error
    return data.removeprefix(b"\xef\xbb\xbf")


def _read_lines(path: str | Path) -> list[bytes]:
    lines = _read(path).rstrip().split(b"\n")
    if lines == [b""]:
        raise ValueError(f"{path} is empty")
    return lines


def _decode(raw: bytes) -> str:
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    if not text:
        raise ValueError("is blank")
    return text


def _csv_fields(raw: bytes) -> list[str]:
    try:
        return next(csv.reader([_decode(raw)]))
    except csv.Error as error:
        raise ValueError(f"is not CSV: {error}") from error


def _csv_int(name: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise ValueError(f"{name}={reprlib.repr(text)} must be a whole number")
    return int(text)


def _csv_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"arrived_at={reprlib.repr(text)} must be a number of seconds") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("is JSON nested too deeply") from error
    except ValueError as error:  # also of a number with thousands of digits
        raise ValueError(f"is not JSON: {error}") from error


def _json_entries(path: str | Path) -> Iterator[tuple[int, tuple[int, Any]]]:
    """(line, (index from 1, entry)) of a JSON list. What does not parse hides all behind it: always a ValueError."""
    try:
        text = _read(path).decode()
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise ValueError(f"{path}, line {line}: not UTF-8 at byte {error.start} of the file") from error
    decoder, space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def behind_space(at: int) -> int:
        return space.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]

    at = behind_space(0)
    if text[at : at + 1] != "[":
        raise ValueError(f"{path} is empty" if at == len(text) else f"{path} must hold a JSON list of conversations")
    line, counted, index = 1, 0, 0
    at = behind_space(at + 1)
    closed = text[at : at + 1] == "]"
    while not closed:
        line, counted, index = line + text.count("\n", counted, at), at, index + 1
        try:
            entry, at = decoder.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError(f"{path}, line {line}: is JSON nested too deeply") from error
        except ValueError as error:
            raise ValueError(f"{path}, from line {line}: is not JSON: {error}") from error
        yield line, (index, entry)
        at = behind_space(at)
        closed = text[at : at + 1] == "]"
        if not closed:
            if text[at : at + 1] != ",":
                end = 1 + text.count("\n", 0, at)
                raise ValueError(f"{path}, line {end}: ',' or ']' expected; is the file cut off?")
            at = behind_space(at + 1)
    if behind_space(at + 1) != len(text):
        raise ValueError(f"{path}, line {1 + text.count(chr(10), 0, at)}: more behind the end of the list")


def _first_exchange(entry: Any) -> tuple[str, str]:
    """The texts of the first human turn and of the gpt turn right behind it."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ValueError('must be an object with a list "conversations"')
    if not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns):
        raise ValueError('every turn must be an object with a text "value"')
    speakers = [turn.get("from") for turn in turns]
    first = next((i for i, speaker in enumerate(speakers) if speaker in ("human", "user")), None)
    if first is None or first + 1 == len(turns) or speakers[first + 1] not in ("gpt", "assistant"):
        raise ValueError(f"must have a human turn with a gpt turn right behind; the turns are {reprlib.repr(speakers)}")
    return turns[first]["value"], turns[first + 1]["value"]
