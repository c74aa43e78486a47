"""A jax and a flax that do not work together are refused at import, with the way out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sarathi_jax.versions import check_versions

JAX = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")
FLAX = ("0.12.8", "0.12.9", "0.12.10", "0.12.12")
WORKS = {  # as tried
    "0.12.8": {"0.10.2", "0.11.0"},
    "0.12.9": {"0.11.0", "0.11.1"},
    "0.12.10": {"0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"},
    "0.12.12": {"0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"},
}


@pytest.mark.parametrize("flax", FLAX)
@pytest.mark.parametrize("jax", JAX)
def test_only_pairs_that_work_pass(jax, flax):
    if jax in WORKS[flax]:
        check_versions(jax, flax)
    else:
        with pytest.raises(ImportError, match=r'pip install "flax>=0\.12\.') as refusal:
            check_versions(jax, flax)
        assert f"jax {jax} with flax {flax}" in str(refusal.value)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_pair_that_pip_may_install_works(python):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    here = [r for r in requirements if r.marker is None or r.marker.evaluate({"python_version": python})]
    wanted = {r.name: r.specifier for r in here}
    pairs = [(jax, flax) for jax in JAX for flax in FLAX if jax in wanted["jax"] and flax in wanted["flax"]]
    assert pairs
    for jax, flax in pairs:
        check_versions(jax, flax)


@pytest.mark.parametrize("jax", ["0.9.2", "0.13.0"])
def test_a_jax_out_of_range_gets_a_command_for_both(jax):
    with pytest.raises(ImportError, match=r'pip install "jax>=[^"]*" "flax>=[^"]*"$'):
        check_versions(jax, "1.0.0")


def test_a_flax_out_of_range_leaves_jax_alone():
    with pytest.raises(ImportError, match=r'run: pip install "flax>=0\.12\.10,<0\.13"$'):
        check_versions("0.12.0.1", "0.11.2")


def test_development_versions_count_as_their_release():
    check_versions("0.11.1.dev20260801", "0.12.10rc1")


def test_what_is_installed_works():
    check_versions()
