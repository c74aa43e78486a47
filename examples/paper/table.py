"""Our numbers beside the paper's, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A quantity here and in the paper: a number, a range, or None where the paper gives none."""

    what: str
    ours: float | None
    paper: float | tuple[float, float] | None = None
    note: str = ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value >= 1 else f"{value:.3g}"


def ratio(row: Row) -> float | None:
    """Ours over the paper's; over the nearer end of a range, and 1 inside it."""
    if row.ours is None or row.paper is None:
        return None
    if isinstance(row.paper, tuple):
        low, high = row.paper
        return row.ours / min(max(row.ours, low), high)
    return row.ours / row.paper


def markdown(title: str, rows: Iterable[Row], why: str) -> str:
    """A heading, the table, and why the two differ."""
    lines = [f"### {title}", "", "| | ours | paper | ours / paper | |", "|---|---|---|---|---|"]
    for row in rows:
        paper = " to ".join(map(_number, row.paper)) if isinstance(row.paper, tuple) else _number(row.paper)
        shown = "-" if (found := ratio(row)) is None else f"{found:.2f}"
        lines.append(f"| {row.what} | {_number(row.ours)} | {paper} | {shown} | {row.note} |")
    return "\n".join([*lines, "", why.strip(), ""])
