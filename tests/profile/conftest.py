"""The profile tests share the programs beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

sys.path.insert(0, str(Path(__file__).parent))


def _use_cache(wanted: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", wanted)
    compilation_cache.reset_cache()  # it looks at the setting only once


@pytest.fixture(scope="module", autouse=True)
def compiled_here():
    """No programs from the tests' compilation cache: on a CPU those have lost the names that a trace shows."""
    _use_cache(False)
    yield
    _use_cache(True)
