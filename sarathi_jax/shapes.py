"""The one truth about padding: which batch shapes exist, and the smallest that fits.

A shape is a number of token rows. Rows are packed (decodes first, then chunks, no gap between them), so the linear
layers pad only up to the next shape, and warm-up compiles one program for each.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from sarathi_jax.config import check_positive

_SMALLEST = 8


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def token_shapes(max_tokens: int, tile: int) -> tuple[int, ...]:
    """Row counts from 8 up: powers of two to the tile, then multiples of it, each the next or at most 1.25 x the last.

    The largest is the first of them, or the first multiple of the tile, that holds `max_tokens`.
    """
    check_positive("max_tokens", max_tokens)
    shapes = [_SMALLEST]
    while (last := shapes[-1]) < max_tokens:
        following = last * 2 if last < tile else max(last + tile, last * 5 // 4 // tile * tile)
        shapes.append(following if last < tile else min(following, round_up(max_tokens, tile)))
    return tuple(shapes)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The enumerated shapes of one engine.

    num_tokens: T of each shape, ascending. num_rows: sequence rows S (the same in every shape, padded). num_slots: live
    sequences; row and slot `num_slots` of device state is the sink. max_pages: N, width of the page table, the most
    pages that a sequence can have, those behind a window included. num_pages: the pool's pages; page `num_pages` is the
    sink.
    """

    num_tokens: tuple[int, ...]
    num_rows: int
    num_slots: int
    page_size: int
    max_pages: int
    num_pages: int

    @classmethod
    def make(
        cls, *, max_tokens: int, tile: int, max_num_seqs: int, max_model_len: int, page_size: int, num_pages: int,
        window: int | None = None,
    ) -> Shapes:  # fmt: skip
        """`window` as in `PagePool`: with one, a sequence can have more pages than there are, one after the other."""
        max_pages = -(-max_model_len // page_size)
        return cls(
            num_tokens=token_shapes(max(max_tokens, max_num_seqs), tile),
            num_rows=round_up(max_num_seqs, _SMALLEST),
            num_slots=max_num_seqs,
            page_size=page_size,
            max_pages=min(max_pages, num_pages) if window is None else max_pages,
            num_pages=num_pages,
        )

    def fit(self, num_tokens: int) -> int:
        """T of the smallest shape that holds `num_tokens` rows."""
        if not 1 <= num_tokens <= self.num_tokens[-1]:
            raise ValueError(f"num_tokens={num_tokens} has no shape; shapes hold 1 to {self.num_tokens[-1]} tokens")
        return self.num_tokens[bisect_left(self.num_tokens, num_tokens)]
