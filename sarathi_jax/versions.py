"""Which flax goes with which jax.

The two move together: pip can install pairs that fail at the first `flax.nnx` module with an error that names neither.
`check_versions` says so first, without importing either.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Releases of flax in [flax_min, flax_end) work with releases of jax in [jax_min, jax_end)."""

    flax_min: str
    flax_end: str
    jax_min: str
    jax_end: str

    @property
    def flax_range(self) -> str:
        return f">={self.flax_min},<{self.flax_end}"

    @property
    def jax_range(self) -> str:
        return f">={self.jax_min},<{self.jax_end}"


PAIRINGS = (  # each tried, oldest first; Python 3.11 can install the first only, Python >= 3.12 gets the last
    Pairing(flax_min="0.12.8", flax_end="0.12.9", jax_min="0.10.2", jax_end="0.11.1"),
    Pairing(flax_min="0.12.9", flax_end="0.12.10", jax_min="0.11.0", jax_end="0.11.2"),
    Pairing(flax_min="0.12.10", flax_end="0.13", jax_min="0.11.0", jax_end="0.13"),
)


def check_versions(jax_version: str | None = None, flax_version: str | None = None) -> None:
    """Raise ImportError, with the pip command that mends it, unless this jax and this flax work together.

    A version that is None is read from the installed package's metadata.
    """
    jax = jax_version if jax_version is not None else _installed("jax")
    flax = flax_version if flax_version is not None else _installed("flax")
    with_flax = [p for p in PAIRINGS if flax is not None and _within(flax, p.flax_min, p.flax_end)]
    with_jax = [p for p in PAIRINGS if jax is not None and _within(jax, p.jax_min, p.jax_end)]
    if any(p in with_jax for p in with_flax):
        return

    found = f"jax {jax or '(not installed)'} with flax {flax or '(not installed)'}"
    if flax is not None and with_flax:
        why = f"flax {flax} works only with jax {with_flax[0].jax_range}"
    elif jax is not None and with_jax:
        why = f"jax {jax} works only with flax {' or '.join(p.flax_range for p in with_jax)}"
    else:
        why = f"jax >={PAIRINGS[0].jax_min},<{PAIRINGS[-1].jax_end} and a flax of the same time are supported"
    if with_jax:  # keep the user's jax: an accelerator's plugins may be tied to it
        fix = f'pip install "flax{with_jax[-1].flax_range}"'
    else:
        pairing = PAIRINGS[-1] if sys.version_info >= (3, 12) else PAIRINGS[0]
        fix = f'pip install "jax{pairing.jax_range}" "flax{pairing.flax_range}"'
    raise ImportError(f"sarathi_jax cannot run on {found}: {why}; to fix it, run: {fix}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(version: str, start: str, end: str) -> bool:
    return _release(start) <= _release(version) < _release(end)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version's release: "0.12.1.dev20261101" is (0, 12, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ImportError(f"version {version!r} of jax or flax must start with numbers, like 0.12.1")
    return tuple(int(part) for part in match.group().split("."))
