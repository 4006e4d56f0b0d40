"""A compiler is asked once for each program, and again for whatever is another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.gpu.aot import kept
from tests.gpu.aot.target import H200
from tests.gpu.aot.triton_compiler import target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    return tmp_path / "ahead"


def said(device=H200, factor=2, scope="scope", options=None):
    def function(x):
        with jax.named_scope(scope):
            return x * factor

    array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=device.sharding())
    with device.lowering():
        return jax.jit(function).lower(array).compile(compiler_options=options)


def test_a_program_is_compiled_once_and_another_one_anew(folder):
    first = said()
    assert "scope/mul" in first.as_text()
    assert first.memory_analysis().argument_size_in_bytes == 4 * 1024 * 1024
    [file] = folder.iterdir()
    written = file.stat().st_ino
    again = said()
    assert (again.as_text(), again.memory_analysis()) == (first.as_text(), first.memory_analysis())
    assert [one.stat().st_ino for one in folder.iterdir()] == [written]
    option = {"xla_gpu_enable_triton_gemm": False}
    for count, changes in enumerate(
        [dict(factor=3), dict(scope="other"), dict(device=target((8, 9))), dict(options=option)], 2
    ):
        said(**changes)
        assert len(list(folder.iterdir())) == count, changes


def test_what_fails_or_was_damaged_is_asked_again(folder):
    def fails():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        kept.recall(("a", 1), fails)
    assert kept.recall(("a", 1), lambda: {"b": [2]}) == {"b": [2]} == kept.recall(("a", 1), fails)
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="no memory"):
        kept.recall(("a", 1), fails)
