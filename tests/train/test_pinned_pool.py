"""The pool of pinned host memory grows beside the compiler."""

import threading

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.train.engine import pinned_pool
from tests import patience


@pytest.fixture
def pinned(monkeypatch):
    return _recorded(monkeypatch)


def _recorded(monkeypatch):
    """The bytes of each piece that is pinned; pieces of 1 KB, from one byte on."""
    pieces = []
    put = jax.device_put

    def record(array, where):
        pieces.append(array.nbytes)
        assert where.memory_kind == "pinned_host"
        return put(array, where)

    monkeypatch.setattr(pinned_pool, "LEAST_BYTES", 1.0)
    monkeypatch.setattr(pinned_pool, "_PIECE", 2**10)
    monkeypatch.setattr(jax, "device_put", record)
    return pieces


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50_000))
def test_as_much_is_pinned_as_a_step_will_pin(nbytes):
    with pytest.MonkeyPatch.context() as patch:
        pieces = _recorded(patch)
        with pinned_pool.growing(float(nbytes)):
            pass
    assert nbytes <= sum(pieces) < nbytes + 2**10


def test_little_is_left_to_the_step(pinned, monkeypatch):
    monkeypatch.setattr(pinned_pool, "LEAST_BYTES", 2.0**35)
    before = {*threading.enumerate()}
    with pinned_pool.growing(2.0**34):
        assert not {thread for thread in threading.enumerate() if thread.name == "pinning"} - before
    assert not pinned


def test_a_failure_ends_it(pinned, monkeypatch):
    entered, before = threading.Event(), {*threading.enumerate()}
    put = jax.device_put

    def slow(array, where):
        entered.set()
        return put(array, where)

    monkeypatch.setattr(jax, "device_put", slow)
    with pytest.raises(ValueError, match="no plan"), pinned_pool.growing(1e15):
        assert entered.wait(patience.SECONDS)
        raise ValueError("no plan fits")
    for thread in {each for each in threading.enumerate() if each.name == "pinning"} - before:
        thread.join(patience.SECONDS)
        assert not thread.is_alive()


def test_a_full_host_is_the_steps_to_report(pinned, monkeypatch):
    def full(array, where):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating pinned host memory")

    monkeypatch.setattr(jax, "device_put", full)
    with pinned_pool.growing(1e12):
        pass
