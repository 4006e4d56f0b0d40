"""Triton kernels that are compiled in threads beside the lowering of their program."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.models.programs.digests import Digests
from jaxtune.models.programs.kept import Request
from jaxtune.pallas import compat, targets
from jaxtune.pallas.gated import gated_thin, gated_thin_backward, thin_kernels
from jaxtune.pallas.thin_pair import thin_pair, thin_pairs
from tests import patience
from tests.gpu.aot.target import H200

triton_lib = pytest.importorskip("jax_triton.triton_lib")


@pytest.fixture
def compilations(monkeypatch):
    """Fills with the name of the thread of each compilation by jax-triton; no kernel is compiled already."""
    threads, compiles = [], triton_lib.compile_ttir_inplace

    def recorded(*arguments):
        threads.append(threading.current_thread().name)
        return compiles(*arguments)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", recorded)
    forget()
    return threads


def forget() -> None:
    jax.clear_caches()
    compat._begun.clear()
    triton_lib._COMPILED_KERNEL_CACHE.clear()


@functools.cache
def where() -> jax.sharding.Sharding:
    return H200.sharding()


def forward_and_backward(activation: str):
    def run(gate, up, dgated, dinner, a, dout, b, inner):
        forward = gated_thin(gate, up, a, activation, implementation="triton")
        backward = gated_thin_backward(gate, up, dgated, dinner, activation, implementation="triton")
        pair = thin_pair(dout, b, inner, implementation="triton")
        return forward, backward, pair, thin_pairs([dout] * 2, [b] * 2, jnp.concatenate([inner, inner], axis=1))

    return run


def arguments(tokens: int, size: int, rank: int, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    shapes = [(tokens, size)] * 3 + [(tokens, rank), (rank, size), (tokens, 1024), (1024, rank), (tokens, rank)]
    dtypes = [dtype] * 6 + [jnp.float32, dtype]
    return [jax.ShapeDtypeStruct(*array, sharding=where()) for array in zip(shapes, dtypes, strict=True)]


def lowered(function, shapes) -> str:
    request = Request(function, tuple(shapes), where(), None, {})
    with H200.lowering():
        return request.lowered(request.traced()).as_text()


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.sampled_from([2049, 4096, 16384]),
    size=st.sampled_from([576, 2880, 14336]),
    rank=st.sampled_from([4, 8, 16, 32]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_a_program_has_the_kernels_that_its_lowering_compiles_alone(tokens, size, rank, dtype, activation):
    """Each byte of their assembly, in which the module has them."""
    shapes = arguments(tokens, size, rank, dtype)
    texts = []
    for alone in (False, True):
        forget()
        with pytest.MonkeyPatch.context() as patch:
            if alone:
                patch.setattr(compat, "begin", lambda program: None)
                patch.setattr(compat._Grid, "__call__", lambda grid, constants: grid.sizes)
            texts.append(lowered(forward_and_backward(activation), shapes))
    assert texts[0] == texts[1] and texts[0].count("@triton_kernel_call") == 4


def test_each_kernel_is_compiled_once_and_not_by_the_lowering(compilations):
    """Four kernels in two layers, then the same in other programs, of which three are lowered at once."""
    run, shapes = forward_and_backward("silu"), arguments(4096, 2880, 16)

    def twice(*arrays):
        return run(*arrays), run(*(array + 1 for array in arrays))

    lowered(twice, shapes)
    assert len(compilations) == 4 and all(name.startswith("triton") for name in compilations)
    forget()
    compilations.clear()

    def check(number: int):
        shapes_here = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in shapes]
        program = jax.jit(lambda *arrays: (number, run(*arrays)))
        program.trace(*shapes_here).lower(lowering_platforms=("cuda",))

    with H200.lowering(), ThreadPoolExecutor(3) as pool:
        list(pool.map(check, range(3)))
    assert len(compilations) == 4


def test_shapes_that_are_only_traced_compile_nothing(compilations):
    with targets.compile_for((9, 0)):
        jax.eval_shape(forward_and_backward("silu"), *arguments(4096, 2880, 16))
    assert not compilations and not compat._begun


def test_a_kernel_that_does_not_compile_fails_the_lowering_with_its_own_words(monkeypatch):
    def refused(*arguments):
        raise ValueError("TTIR->TTGIR pass failed!")

    forget()
    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", refused)
    with H200.lowering():
        shapes = arguments(4096, 2880, 16)
        program = jax.jit(forward_and_backward("silu")).trace(*shapes)
        compat.begin(program)
        assert [future.result() for future in compat._begun.values()] == [None] * 4
        with pytest.raises(ValueError, match=r"^TTIR->TTGIR pass failed!$"):
            program.lower()
        monkeypatch.undo()
        program.lower()


ENDING = """
from tests.gpu.aot.test_triton_beside import *

with H200.lowering():
    program = jax.jit(forward_and_backward("silu")).trace(*arguments(4096, 2880, 16))
compat.begin(program)
print("begun", len(compat._begun), flush=True)
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "import os; os._exit(3)"])
def test_a_process_ends_while_kernels_are_compiled(end):
    done = subprocess.run(
        [sys.executable, "-c", ENDING + end], capture_output=True, text=True, timeout=patience.SECONDS, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3 if end else 0, "begun 4\n", "")


def test_a_kernel_is_in_a_program_s_digest_by_its_source(monkeypatch):
    def digest() -> bytes:
        jax.clear_caches()
        shapes = arguments(4096, 576, 8)
        with H200.lowering():
            return Digests().of(jax.jit(forward_and_backward("silu")).trace(*shapes).jaxpr)

    kernel, before = thin_kernels.gated_thin_kernel, digest()
    assert digest() == before
    source = kernel.src
    kernel._unsafe_update_src(source.replace("def ", "def  ", 1))
    changed = digest()
    kernel._unsafe_update_src(source)
    assert changed != before == digest()
