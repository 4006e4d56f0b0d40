"""What the tests of kernels share."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture
def without_races():
    """The kernels that a test interprets are searched for races between their threads. Nothing on a GPU, which runs
    them."""
    if jax.default_backend() != "cpu":
        yield
        return
    from tests.pallas import races  # of the interpreter's insides, which other versions of JAX may not have

    with races.detected() as found:
        yield
    assert not found, f"{len(found)} accesses of shared memory are in no order; the interpreter printed which"
