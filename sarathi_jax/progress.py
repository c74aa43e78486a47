"""A progress bar for what takes longer than a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm


@contextlib.contextmanager
def progress_bar(
    desc: str, unit: str, *, show: bool | None, delay_s: float = 0.0
) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that moves the bar. `show` None: on a terminal only. It is gone at the end."""
    disable = None if show is None else not show
    with tqdm(desc=desc, unit=f" {unit}", delay=delay_s, leave=False, disable=disable) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
