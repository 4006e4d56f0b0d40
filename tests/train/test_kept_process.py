"""What a user's function does to the process is set back, and said once."""

from __future__ import annotations

import io
import sys

import jax
import pytest

from jaxtune.train.user_code import calling, kept_process


def wide() -> str:
    jax.config.update("jax_enable_x64", True)
    return "done"


def replaced(key: str) -> str:
    setattr(sys, key, io.StringIO())
    return "done"


def closed(key: str) -> str:
    getattr(sys, key).close()
    return "done"


CASES = {
    "wide": (wide, "changed jax_enable_x64, which is set back"),
    "stdout": (lambda: replaced("stdout"), "replaced sys.stdout, which is set back"),
    "stderr": (lambda: replaced("stderr"), "replaced sys.stderr, which is set back"),
    "none": (lambda: setattr(sys, "stdout", None) or "done", "replaced sys.stdout, which is set back"),
    "closed": (lambda: closed("stdout"), "closed sys.stdout: what the run says there goes to sys.stderr"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_set_back_and_said(case, monkeypatch):
    function, words = CASES[case]
    monkeypatch.setattr(kept_process, "_said", set())
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    for _ in range(2):
        assert calling.call(function, {}, "the reward f").value == "done"
        assert sys.stdout is (err if case == "closed" else out) and sys.stderr is err
        if case == "closed":
            monkeypatch.setattr(sys, "stdout", io.StringIO())
            out = sys.stdout
    assert not jax.config.jax_enable_x64
    assert err.getvalue().splitlines() == [f"warning: the reward f {words}"]


def test_a_function_that_fails_is_set_back_too(monkeypatch):
    def fails() -> None:
        wide()
        raise ValueError("no")

    assert isinstance(calling.call(fails, {}, "f").error, ValueError) and not jax.config.jax_enable_x64
