"""Compiling Triton kernels for GPUs that are not there: Triton's own compiler needs none, and brings its assembler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import compat
from tests.gpu.aot.kept import recall
from tests.gpu.aot.target import H200, Target

# Shared memory that a block may have, in KB, by compute capability (CUDA C++ Programming Guide, technical
# specifications per compute capability).
SHARED_MEMORY_KB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
GPUS = [pytest.param(capability, id=f"sm_{capability[0]}{capability[1]}") for capability in SHARED_MEMORY_KB]

_POINTERS = {
    jnp.bfloat16: "*bf16",
    jnp.float16: "*fp16",
    jnp.float32: "*fp32",
    jnp.int32: "*i32",
    jnp.uint32: "*u32",
    jnp.int8: "*i8",
    jnp.uint8: "*u8",
    jnp.float8_e4m3fn: "*fp8e4nv",
}


def target(capability: tuple[int, int]) -> Target:
    """A device of this compute capability, for XLA; its other sizes are the H200's."""
    shared = SHARED_MEMORY_KB[capability] * 1024
    return dataclasses.replace(
        H200,
        kind=f"a GPU of compute capability {capability[0]}.{capability[1]}",
        capability=capability,
        shared_memory_per_block_bytes=shared,
        shared_memory_per_core_bytes=shared + 1024,
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    name: str
    shared_bytes: int
    spilled_bytes: int  # stores of registers to memory, a thread
    ptx: str
    widths: list[int]  # numbers in a row that a thread has of an operand of the tensor cores


@contextlib.contextmanager
def recorded_calls():
    """Yields a list that fills with (kernel, types of arguments and outputs, settings) of the Triton calls traced."""
    calls: list[tuple[Any, list[Any], dict]] = []

    def recorded(original):
        def call(kernel, arguments, out_types, grid, **settings):
            calls.append((kernel, [*map(jax.typeof, arguments), *out_types], settings))
            return original(kernel, arguments, out_types, grid, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("triton_call", "triton_graph_call"):
            patch.setattr(compat, name, recorded(getattr(compat, name)))
        yield calls


def compile_call(call, capability: tuple[int, int], folder) -> Compiled:
    """Compiles a recorded call to machine code, as jax-triton has it compiled."""
    kernel, types, settings = call
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    pointers = {jnp.dtype(dtype): name for dtype, name in _POINTERS.items()}
    others = ("warps", "stages", "contract", "aliases")
    constants = {k: v for k, v in settings.items() if k not in others}
    arrays = [name for name in kernel.arg_names if name not in constants]
    signature = {name: pointers[array.dtype] for name, array in zip(arrays, types, strict=True)}
    source = Source(
        kernel,
        signature={name: signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=constants,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in arrays},
    )
    options = {
        "num_warps": settings["warps"],
        "num_stages": settings["stages"],
        "enable_fp_fusion": settings.get("contract", True),
    }
    number = 10 * capability[0] + capability[1]
    fields = [field.name for field in dataclasses.fields(Compiled)]
    parts = source.hash(), number, sorted(options.items()), fields
    said = recall(parts, functools.partial(_compile, source, number, options, folder))
    return Compiled(kernel.__name__, **said)


def _compile(source, number: int, options: dict, folder) -> dict:
    """The fields of Compiled, but its name."""
    import triton
    from triton.backends.compiler import GPUTarget

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(folder))
        compiled = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
        assembler = triton.knobs.nvidia.ptxas_blackwell if number >= 100 else triton.knobs.nvidia.ptxas
    assert compiled.asm["cubin"]
    ptx = compiled.asm["ptx"]
    (folder / "kernel.ptx").write_text(ptx)
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    said = subprocess.run(
        [assembler.path, "-v", "--gpu-name", architecture[1], str(folder / "kernel.ptx"), "-o", str(folder / "cubin")],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled is not None, said
    widths = sorted({int(width) for width in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])})
    shared = compiled.metadata.shared
    return {"shared_bytes": shared, "spilled_bytes": int(spilled[1]), "ptx": ptx, "widths": widths}
