"""The page pool: no page is lost, handed out twice or freed twice, whatever the order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sarathi_jax.pages import OutOfPages, PagePool
from sarathi_jax.request import Request, SamplingParams, Sequence


def state(pool):
    return list(pool._free), list(pool._num_refs)


def make_sequence(page_ids):
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), arrival_time_s=0.0)
    return Sequence(request=request, seq_id=0, max_total_tokens=8, page_ids=page_ids)


def test_every_page_is_handed_out_once_and_never_the_sink():
    pool = PagePool(7, 16)
    pages = pool.allocate(3) + pool.allocate(4)
    assert sorted(pages) == list(range(7))
    assert pages == sorted(pages), "a new pool hands out the lowest ids first"
    assert (pool.num_free, pool.num_held, pool.num_cached, pool.num_available) == (0, 7, 0, 0)


def test_a_freed_page_is_the_next_to_be_used():
    pool = PagePool(8, 4)
    a, _b = pool.allocate(2), pool.allocate(2)
    pool.free(a)
    assert pool.allocate(1) == [a[-1]]


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (48, 3)]
)
def test_num_pages_for(num_tokens, num_pages):
    assert PagePool(4, 16).num_pages_for(num_tokens) == num_pages


def test_a_failed_allocation_takes_nothing():
    pool = PagePool(4, 16)
    pool.allocate(1)
    before = state(pool)
    with pytest.raises(OutOfPages, match=r"4 pages asked for, 3 of 4 available"):
        pool.allocate(4)
    assert state(pool) == before
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1)
    assert state(pool) == before


def test_a_shared_page_is_free_after_its_last_reference():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.free(pages)
    assert pool.num_held == 2
    pool.free(pages)
    assert (pool.num_held, pool.num_free) == (0, 4)


@pytest.mark.parametrize(
    ("page_ids", "message"),
    [
        ([3], "page 3 .* double free"),
        ([0, 0], "page 0 is freed 2 times and held 1 times: double free"),
        ([0, 1, 3], "page 3"),
        ([0, 4], "page 4 is not in the pool of 4"),
        ([0, -1], "page -1 is not in the pool"),
    ],
)
def test_a_double_free_names_the_page_and_changes_nothing(page_ids, message):
    pool = PagePool(4, 16)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(ValueError, match=message):
        pool.free(page_ids)
    assert state(pool) == before


@pytest.mark.parametrize(
    ("page_ids", "message"), [([0, 3], "page 3 is not held"), ([0, 9], "page 9 is not in the pool")]
)
def test_only_held_pages_can_be_shared(page_ids, message):
    pool = PagePool(4, 16)
    pool.allocate(2)
    before = state(pool)
    with pytest.raises(ValueError, match=message):
        pool.share(page_ids)
    assert state(pool) == before


@pytest.mark.parametrize("args", [(0, 16), (4, 0), (-1, 16), (True, 16), (4, 2.0)])
def test_a_pool_needs_positive_integers(args):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        PagePool(*args)


def lose_a_page(pool):
    pool._free.pop()


def free_twice(pool):
    pool._free.append(pool._free[0])


def free_while_held(pool):
    pool._free[0] = 0


def count_below_zero(pool):
    pool._num_refs[pool._free[0]] = -1


def foreign_page(pool):
    pool._free[0] = 8


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lose_a_page, "5 free .* 2 held = 7, not all 8 pages"),
        (free_twice, "in the free list twice"),
        (free_while_held, "both free and held"),
        (count_below_zero, "below zero"),
        (foreign_page, "is no page"),
    ],
)
def test_check_integrity_sees(damage, sentence):
    pool = PagePool(8, 16)
    pool.allocate(2)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=sentence):
        pool.check_integrity()


def test_check_integrity_compares_with_the_sequences():
    pool = PagePool(8, 16)
    pages = pool.allocate(2)
    pool.check_integrity([make_sequence(pages)])
    for owners in ([], [make_sequence(pages), make_sequence(pages)], [make_sequence(pages[:1])]):
        with pytest.raises(AssertionError, match="references"):
            pool.check_integrity(owners)
    with pytest.raises(AssertionError, match="not in the pool"):
        pool.check_integrity([make_sequence([*pages, 8])])


class PoolMachine(RuleBasedStateMachine):
    """Against a model that only knows how often each page is held."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9, 4)
        self.holders: list[list[int]] = []

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        available = 9 - len({page for pages in self.holders for page in pages})
        if n > available:
            with pytest.raises(OutOfPages):
                self.pool.allocate(n)
            return
        pages = self.pool.allocate(n)
        assert len(set(pages)) == n
        assert not set(pages) & {page for held in self.holders for page in held}, "handed out twice"
        assert all(0 <= page < 9 for page in pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share_a_prefix(self, data):
        pages = data.draw(st.sampled_from(self.holders))
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(prefix)
        self.holders.append(list(prefix))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule(data=st.data())
    def free_what_nobody_holds(self, data):
        held = {page for pages in self.holders for page in pages}
        unheld = sorted(set(range(-1, 11)) - held)
        page = data.draw(st.sampled_from(unheld))
        with pytest.raises(ValueError, match=f"page {page}"):
            self.pool.free([*sorted(held), page])

    @invariant()
    def agrees(self):
        held = {page for pages in self.holders for page in pages}
        assert self.pool.num_held == len(held)
        assert self.pool.num_free == 9 - len(held)
        self.pool.check_integrity([make_sequence(pages) for pages in self.holders])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
