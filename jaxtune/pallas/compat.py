"""Calls Triton kernels from JAX; the one place that knows how jax-triton 0.3 (triton 3.6) and 0.4 (3.7) differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxtune.pallas import meshes, targets
from jaxtune.system.extras import install
from jaxtune.system.no_torch import torch_hidden


def triton_refusal() -> str | None:
    """Why Triton kernels cannot run on the GPU that is compiled for, or None."""
    target = targets.here()
    if target is None:
        return "no NVIDIA GPU"
    if not target.has_triton:
        return f"needs compute capability 8.0, this GPU has {target.number}"
    if not _has_jax_triton():
        return f"jax-triton is not installed: {install('cuda13')} (or cuda12)"
    return None


@functools.cache
def _has_jax_triton() -> bool:
    return importlib.util.find_spec("jax_triton") is not None


def triton_call(
    kernel: Any,
    arguments: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    *,
    warps: int,
    stages: int,
    contract: bool = True,
    aliases: Mapping[int, int] | None = None,
    **constants: int | float | tuple,
) -> list[jax.Array]:
    """Calls a Triton kernel on pointers to `arguments` and outputs, and `constants`: in a shard_map on local arrays, on
    a mesh without one on whole arrays. Only where `triton_refusal` returns None.

      contract: products and sums may fuse into multiply-adds; False: each is rounded.
      aliases: {argument: output that takes its memory}, by index, for a kernel that works in place.
      kernel: a @triton.jit function: first `arguments`, then outputs, then constexprs.
      out_types: shape and dtype of each output. grid: programs along up to three axes.
      warps, stages: Triton's num_warps, and num_stages of its software pipelines.
      constants: constexprs by name.
    """
    import jax_triton

    _learn_tensors()
    target = targets.here()
    assert target is not None
    parameters = inspect.signature(jax_triton.triton_call).parameters
    options: dict[str, Any] = {"out_type" if "out_type" in parameters else "out_shape": list(out_types)}
    if not contract:
        if "backend_options" in parameters:
            options["backend_options"] = {"enable_fp_fusion": False}
        else:
            options["enable_fp_fusion"] = False
    call = functools.partial(
        jax_triton.triton_call,
        kernel=kernel,
        num_warps=warps,
        num_stages=stages,
        compute_capability=target.code,
        name=kernel.__name__,
        input_output_aliases=dict(aliases or {}),
        **options,
        **constants,
    )
    types = tuple(str(array.dtype) for array in (*arguments, *out_types))
    key = (kernel, types, tuple(constants.items()), warps, stages, contract, target)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments]
    beside = _Grid(grid, key, functools.partial(_compile, functools.partial(call, grid=grid), shapes))
    return meshes.on_each_device(functools.partial(call, grid=beside))(*arguments)


def begin(program: jax.stages.Traced) -> None:
    """Starts to compile the program's Triton kernels in threads, for which its lowering then waits. Alone it compiles
    one after the other, and Triton's passes need no Python.
    """
    from jax.extend.core import jaxprs_in_params

    jaxprs, seen = [program.jaxpr.jaxpr], set()
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            if isinstance(grid := equation.params.get("grid"), _Grid):
                grid.begin()
            inner = [body for body in jaxprs_in_params(equation.params) if id(body) not in seen]
            seen.update(map(id, inner))
            jaxprs += inner


_compilers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "triton")  # more would take Python's lock more often
_begun: dict[Hashable, Future[None]] = {}  # of kernels, by all that decides them
_begun_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Grid:
    """A call's grid, for which jax-triton asks when it lowers the call, before it looks for the kernel in its cache."""

    sizes: tuple[int, ...]
    key: Hashable = dataclasses.field(compare=False, repr=False)  # of the kernel
    compile: Callable[[], None] = dataclasses.field(compare=False, repr=False)

    def __call__(self, constants: Mapping[str, object]) -> tuple[int, ...]:
        if (future := self.begin()) is not None:
            future.result()
        return self.sizes

    def begin(self) -> Future[None] | None:
        """Starts to compile the kernel into jax-triton's cache, once for equal ones. None while the process ends."""
        with _begun_lock, contextlib.suppress(RuntimeError):  # no thread starts any more
            if self.key not in _begun:
                _begun[self.key] = _compilers.submit(self.compile)
        return _begun.get(self.key)


def _compile(call: Callable, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Lowers a program of one call. An error is the lowering's of the program, which compiles what the cache lacks."""
    with contextlib.suppress(Exception):
        jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))


@functools.cache
def _learn_tensors() -> None:
    """Triton looks for the class of torch's tensors; without torch they are known by their data_ptr."""
    from triton._C import libtriton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    if hasattr(libtriton, "native_specialize_impl"):
        with torch_hidden(), contextlib.suppress(AttributeError):
            libtriton.native_specialize_impl(CUDABackend(GPUTarget("cuda", 80, 32)), 1, False, False, False)


_compiling = threading.Lock()  # Triton's settings are those of the process
_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "float8_e4m3fn": "*fp8e4nv"}
_POINTERS |= {"int8": "*i8", "uint8": "*u8", "uint32": "*u32"}


def triton_graph_call(
    kernel: Any,
    arguments: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    *,
    warps: int,
    stages: int,
    aliases: Mapping[int, int] | None = None,
    **constants: int | float | None,
) -> list[jax.Array]:
    """`triton_call` for a Triton or Gluon kernel as a node of a CUDA graph, without time between kernels. Use few in a
    program, because each contains the kernel's whole assembly.

      arguments: they and outputs are bfloat16, float16, float32, int32, uint32, int8, uint8 or float8_e4m3fn (else
        KeyError).
      constants: compile-time; None for an array that this call does not read.
      out_types: shape and dtype of each output. grid: programs along up to three axes.
      warps, stages: Triton's num_warps and num_stages. aliases: {argument: output that takes its memory}, by index.
    """
    target = targets.here()
    assert target is not None
    types = tuple(_POINTERS[str(array.dtype)] for array in (*arguments, *out_types))
    built = _assembly(kernel, types, tuple(constants.items()), warps, stages, target.code)
    sizes = {f"grid_{axis}": np.int32(size) for axis, size in zip("xyz", (*grid, 1, 1), strict=False)}
    call = functools.partial(
        jax.ffi.ffi_call(
            "__gpu$xla.gpu.ptx",
            # The last ones are scratch memory, which no kernel here uses.
            [*out_types, *[jax.ShapeDtypeStruct((16,), np.uint8)] * built.scratch],
            vmap_method="sequential",
            input_output_aliases=dict(aliases or {}),
        ),
        name=built.name,
        kernel_type="ptx",
        kernel_data=built.ptx,
        block_x=np.int32(32 * warps),
        block_y=np.int32(1),
        block_z=np.int32(1),
        shared_mem_bytes=np.int32(built.shared_bytes),
        **sizes,
    )
    return list(meshes.on_each_device(call)(*arguments))[: len(out_types)]


@dataclasses.dataclass(frozen=True)
class _Assembly:
    """A Triton kernel, compiled to PTX."""

    name: str  # the kernel's name in the assembly
    ptx: str  # the assembly, NVIDIA's PTX as text
    shared_bytes: int  # bytes of dynamic shared memory that a program needs
    scratch: int  # how many pointers to scratch memory the kernel takes after its arrays


@functools.cache
def _assembly(kernel, types: tuple[str, ...], constants: tuple, warps: int, stages: int, code: int) -> _Assembly:
    """Compiles for arrays aligned to 16 bytes, cached; needs no GPU. types: of each array, such as "*bf16"."""
    import triton
    from triton.backends.compiler import GPUTarget

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    named = dict(constants)
    arrays = [name for name in kernel.arg_names if name not in named]
    source = Source(
        kernel,
        signature=dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(arrays, types, strict=True)),
        constexprs=named,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in arrays},
    )
    target = GPUTarget("cuda", code, 32)
    with _compiling, triton.knobs.cache.scope():
        # jax-triton sets it to "", with which Triton's compiler finds no folder.
        triton.knobs.cache.dir = triton.knobs.cache.dir or triton.knobs.cache.get_triton_dir("cache")
        built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    ptx = built.asm["ptx"]
    parameters = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert parameters is not None and not built.metadata.global_scratch_size
    return _Assembly(built.metadata.name, ptx, built.metadata.shared, parameters[1].count(".param") - len(types))
