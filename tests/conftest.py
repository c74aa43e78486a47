"""The test session: eight virtual devices, strict promotion, checked shapes, a compilation cache, fixed examples."""

from __future__ import annotations

import os
import shutil
import tempfile

# jax reads these once, when it is imported. Eight virtual devices cost a single-device test nothing that could be
# measured on two cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Tests compile the same small programs many times; from the cache that is several times faster. It lives as long as
# the session, in a folder only this user can read (it holds code): jax does not write entries atomically, so a folder
# that outlives a killed run, or that two runs share, would make later runs warn, and warnings are errors here.
_cache_dir = tempfile.mkdtemp(prefix="sarathi_jax-tests-")
jax.config.update("jax_compilation_cache_dir", _cache_dir)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Must come before the first import of these modules.
CHECKED = ("sarathi_jax.attention", "sarathi_jax.models", "sarathi_jax.sampler")
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

hypothesis.settings.register_profile("default", derandomize=True, deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("thorough", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("default")  # --hypothesis-profile=thorough searches on


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_cache_dir, ignore_errors=True)
