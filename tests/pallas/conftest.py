"""What the tests of kernels share."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True)
def without_races():
    """Every kernel that a test of this folder interprets is searched for races between its threads, which costs nothing
    that can be measured. On a GPU, which runs the kernels, the fixture does nothing."""
    if jax.default_backend() != "cpu":
        yield
        return
    from tests.pallas import races  # of the interpreter's insides, which other versions of JAX may not have

    with races.detected() as found:
        yield
    assert not found, f"{len(found)} accesses of shared memory are in no order; the interpreter printed which"
