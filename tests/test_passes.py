"""A program that was compiled with XLA's costly passes is not taken for one without them, nor the other way round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxtune.system.private_jax import compilation_cache
from tests.passes import compiled_with_passes


@pytest.fixture
def cache(tmp_path):
    """An empty folder in which JAX stores what it compiles."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def compiled_now(function, folder) -> int:
    """How many programs a call of `function` adds to the folder, which is emptied."""
    function(jnp.arange(3.0))
    found = list(folder.glob("*of_this_test*.program"))
    for file in found:
        file.unlink()
    return len(found)


def of_this_test_by(factor: int):
    def of_this_test(x):
        return x * factor

    return jax.jit(of_this_test)


def test_a_function_is_compiled_anew_under_the_other_setting(cache):
    first, second = of_this_test_by(2), of_this_test_by(3)
    assert jax.config.values["jax_disable_most_optimizations"]  # all tests but those that say otherwise
    with compiled_with_passes(True):
        first(jnp.arange(3.0))
        with compiled_with_passes(False):
            # The program with the passes was taken neither from memory nor the folder.
            assert compiled_now(first, cache) == 2
            assert compiled_now(first, cache) == 0
            assert compiled_now(second, cache) == 1
            with compiled_with_passes(True):
                assert compiled_now(first, cache) == 0  # it is in memory
                assert compiled_now(second, cache) == 1
            assert compiled_now(second, cache) == 0
        assert compiled_now(first, cache) == compiled_now(second, cache) == 0


def test_the_usual_setting_is_that_of_a_program_without_the_passes(cache):
    first = of_this_test_by(4)
    assert compiled_now(first, cache) == 1
    with compiled_with_passes(False):
        assert compiled_now(first, cache) == 0
