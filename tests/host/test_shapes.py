"""The enumerated shapes: few, aligned, and one for every number of tokens that a plan can hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_jax.shapes import Shapes, round_up, token_shapes


def make(**options) -> Shapes:
    defaults = {
        "max_tokens": 32, "tile": 16, "max_num_seqs": 8, "max_model_len": 100, "page_size": 16, "num_pages": 50
    }  # fmt: skip
    return Shapes.make(**(defaults | options))


@pytest.mark.parametrize(
    ("max_tokens", "tile", "expected"),
    [
        (1, 16, (8,)),
        (8, 16, (8,)),
        (9, 16, (8, 16)),
        (16, 16, (8, 16)),
        (17, 16, (8, 16, 32)),
        (64, 16, (8, 16, 32, 48, 64)),
        (128, 16, (8, 16, 32, 48, 64, 80, 96, 112, 128)),
        (512, 128, (8, 16, 32, 64, 128, 256, 384, 512)),
    ],
)
def test_the_shapes_of_common_settings(max_tokens, tile, expected):
    assert token_shapes(max_tokens, tile) == expected


@given(max_tokens=st.integers(1, 20_000), tile=st.sampled_from([8, 16, 32, 128, 256]))
def test_shapes_are_few_aligned_and_hold_every_plan(max_tokens, tile):
    shapes = token_shapes(max_tokens, tile)
    assert list(shapes) == sorted(set(shapes))
    assert shapes[-1] >= max_tokens
    assert len(shapes) <= 40, "each is a program to compile"
    for shape in shapes:
        assert shape % tile == 0 or (shape < tile and shape & (shape - 1) == 0), f"{shape} ends off the tile"
    assert shapes[-1] <= max(8, round_up(max_tokens, tile)), "no shape that nothing fills"
    for smaller, larger in itertools.pairwise(shapes):
        assert larger <= max(2 * smaller, smaller + tile), "more than half of a step could be padding"


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (31, 32), (32, 32)]
)
def test_the_smallest_shape_that_fits(num_tokens, rows):
    assert make().fit(num_tokens) == rows


@pytest.mark.parametrize("num_tokens", [0, -1, 33, 1000])
def test_what_no_shape_holds_is_refused(num_tokens):
    with pytest.raises(ValueError, match=rf"num_tokens={num_tokens} .* 1 to 32"):
        make().fit(num_tokens)


def test_decodes_beyond_the_budget_still_fit():
    """Every decode runs in every step, even if they are more than the budget."""
    shapes = make(max_tokens=16, max_num_seqs=40)
    assert shapes.fit(40) == 48


@pytest.mark.parametrize(("max_num_seqs", "rows"), [(1, 8), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_sequence_rows_are_padded_and_slots_are_not(max_num_seqs, rows):
    shapes = make(max_num_seqs=max_num_seqs)
    assert (shapes.num_rows, shapes.num_slots) == (rows, max_num_seqs)


@pytest.mark.parametrize(("max_model_len", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (100, 7)])
def test_the_page_table_is_as_wide_as_the_longest_sequence(max_model_len, pages):
    assert make(max_model_len=max_model_len).max_pages == pages


@pytest.mark.parametrize(("window", "pages"), [(None, 4), (50, 7)])
def test_with_a_window_a_sequence_may_pass_through_more_pages_than_there_are(window, pages):
    assert make(max_model_len=100, num_pages=4, window=window).max_pages == pages


@pytest.mark.parametrize("max_tokens", [0, -5, True, 3.5])
def test_a_budget_that_is_no_positive_integer_is_refused(max_tokens):
    with pytest.raises(ValueError, match="max_tokens"):
        token_shapes(max_tokens, 16)
