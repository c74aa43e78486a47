"""The pool of KV pages: who holds which page, and how often. Plain integers; the arrays are the device's.

Where a page changes hands::

                      allocate(n)                 share(ids)
        ┌────────┐  ───────────────▶  ┌────────┐  ──┐ references + 1
        │  free  │                    │  held  │    │ (another sequence with
        └────────┘  ◀───────────────  └────────┘  ◀─┘  the same prefix)
            ▲         free(ids)            ┊
            ┊         last reference       ┊ free(ids) of a full page whose hash is known
            ┊                              ▼
            ┊   evicted, deepest first ┌────────┐
            └ ┄ ┄ ┄ ┄ ┄ ┄ ┄ ┄ ┄ ┄ ┄ ┄  │ cached │   (dotted: the seam for prefix sharing, empty for now)
                                       └────────┘

    free + cached + held = all pages, always.

A sequence lists the pages it holds in `Sequence.page_ids`, position p in `page_ids[p // page_size - num_released]`.
Only a scheduler moves pages: it allocates while planning, and gives back in `Scheduler.finish`, when it preempts, when
a sequence's last token has been planned, and, where all layers have a window, the pages that no later query sees.

Pages may be given back while a step that reads or writes them is still running on the device: steps run in order, so
the next holder's writes come later. A step that fails takes all of its sequences back to their first token.

Prefix sharing later names a full page by the hash of its tokens chained to the hash of the page before it. Such a page
then becomes *cached* when its last reference goes: contents intact, evictable, found by its hash. `num_cached` is part
of every sum here already, so that callers need not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from sarathi_jax.config import check_positive
from sarathi_jax.request import Sequence


class OutOfPages(RuntimeError):
    """More pages were asked for than are available. Nothing has changed."""


class PagePool:
    """Pages 0 .. num_pages - 1 of `page_size` tokens each. Id `num_pages` is the device's sink: never handed out.

    The free list is last in, first out, lowest ids first from a new pool: the same small set of pages is used again and
    again, so the high-water mark tells what a workload needs, and a page used after its release shows up at once.

    `window`: keys that a query sees at most, itself included, in whatever layer; pages behind it are given back. None:
    sequences keep all their pages.
    """

    def __init__(self, num_pages: int, page_size: int, window: int | None = None):
        check_positive("num_pages", num_pages)
        check_positive("page_size", page_size)
        if window is not None:
            check_positive("window", window)
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_refs = [0] * num_pages

    def __repr__(self) -> str:
        return (
            f"PagePool({self.num_pages} pages of {self.page_size}: "
            f"free={self.num_free}, cached={self.num_cached}, held={self.num_held})"
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose contents may be shared again: 0 until there is a prefix cache."""
        return 0

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones, and cached ones by eviction."""
        return self.num_free + self.num_cached

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_behind(self, position: int) -> int:
        """A sequence's first pages that no query from `position` on sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def most_pages(self, num_tokens: int, chunk_len: int) -> int:
        """The most pages that a sequence must hold at once on its way to `num_tokens`, in chunks of up to `chunk_len`.

        A chunk's queries see `window + chunk_len - 1` keys between them: so many pages, and one for both ends.
        """
        num_pages = self.num_pages_for(num_tokens)
        if self.window is None:
            return num_pages
        return min(num_pages, 1 + self.num_pages_for(self.window + chunk_len - 2))

    def allocate(self, n: int) -> list[int]:
        """`n` pages with one reference each, or OutOfPages with nothing taken."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages; n >= 0")
        if n > self.num_available:
            raise OutOfPages(f"{n} pages asked for, {self.num_available} of {self.num_pages} available")
        pages = self._free[: -n - 1 : -1]
        del self._free[self.num_free - n :]
        for page in pages:
            self._num_refs[page] = 1
        return pages

    def share(self, page_ids: Seq[int]) -> None:
        """One more reference to each page; all must be held already, else ValueError with nothing changed."""
        for page in page_ids:
            self._check_id(page)
            if self._num_refs[page] == 0:
                raise ValueError(f"page {page} is not held: only a held page can be shared")
        for page in page_ids:
            self._num_refs[page] += 1

    def free(self, page_ids: Seq[int]) -> None:
        """One reference less to each page; ValueError, with nothing changed, for a page that is not held as often."""
        refs = self._num_refs
        if page_ids and (min(page_ids) < 0 or max(page_ids) >= self.num_pages):
            for page in page_ids:
                self._check_id(page)
        for i, page in enumerate(page_ids):  # nearly always: held once, and listed once
            if refs[page] != 1:
                for freed in page_ids[:i]:
                    refs[freed] = 1
                break
            refs[page] = 0
        else:
            self._free += page_ids
            return
        for page, times in Counter(page_ids).items():
            if times > refs[page]:
                raise ValueError(f"page {page} is freed {times} times and held {refs[page]} times: double free")
        for page in page_ids:
            refs[page] -= 1
            if refs[page] == 0:
                self._free.append(page)

    def check_integrity(self, sequences: Iterable[Sequence] | None = None) -> None:
        """AssertionError with a sentence unless free + cached + held = all and no page is in two of them.

        With `sequences` (all that are alive; empty means that none is) also that they and nobody else hold the pages.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"a page is in the free list twice: {sorted(self._free)}"
        assert all(0 <= page < self.num_pages for page in free), f"an id in the free list is no page: {sorted(free)}"
        held = {page for page, refs in enumerate(self._num_refs) if refs > 0}
        assert min(self._num_refs) >= 0, f"page {self._num_refs.index(min(self._num_refs))} has a count below zero"
        assert not free & held, f"pages {sorted(free & held)} are both free and held"
        total = len(free) + self.num_cached + len(held)
        assert total == self.num_pages, (
            f"{len(free)} free + {self.num_cached} cached + {len(held)} held = {total}, not all {self.num_pages} pages"
        )
        if sequences is None:
            return
        owners = Counter(page for sequence in sequences for page in sequence.page_ids)
        for page, refs in enumerate(self._num_refs):
            assert owners[page] == refs, (
                f"page {page} has {refs} references and is listed by sequences {owners[page]} times"
            )
        assert all(0 <= page < self.num_pages for page in owners), "a sequence lists a page that is not in the pool"

    def _check_id(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not in the pool of {self.num_pages} pages")
