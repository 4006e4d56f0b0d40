"""Makes all Mosaic GPU kernels: gives them names for profiles, traces equal ones once, and makes XLA's compilation
cache recognise them. jaxlib 0.11 numbers each kernel's module in the process, and the number enters the cache's key, so
a program whose kernels are lowered in another order would be compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxtune.pallas import meshes, targets
from jaxtune.pallas.mosaic_modules import mgpu, plgpu
from jaxtune.system.private_mlir import ir

_DUMP_NAME = "mosaic_gpu.dump_basename"
_interpret: Any = None


@contextlib.contextmanager
def interpreted():
    """A context in which kernels that get `interpreter()` run in Pallas' GPU interpreter, in all threads; on a Hopper
    GPU they run there.
    """
    global _interpret
    if targets.here() is targets.HOPPER and jax.default_backend() == "gpu":
        yield
        return
    before, _interpret = _interpret, plgpu.InterpretGPUParams()
    try:
        yield
    finally:
        _interpret = before


def refusal() -> str | None:
    """Why Mosaic's kernels, which are for Hopper, cannot run here, or None: there, and within `interpreted`."""
    return targets.required(targets.HOPPER) if _interpret is None else None


def interpreter() -> Any:
    """`interpret` for `kernel`: within `interpreted` the interpreter's parameters, else None. Bodies ask it, too, to
    replace what the interpreter cannot run, such as inline PTX.
    """
    return _interpret


def kernel(body, name: str, interpret=None, **options):
    """A Mosaic GPU kernel as a function of arrays: in a shard_map of local arrays, on a mesh without one of whole
    arrays.

      body: a module's function, or a partial of one. Its arguments and `options` must be hashable, or lists and dicts
        of hashables: they identify the kernel, which is traced once for equal shapes. A function defined anew for each
        call would be traced each time, and kept.
      name: its scope in op_names, by which jaxtune.profile recognises it.
      interpret: from `interpreter()`; not jitted then.
      options: of plgpu.kernel, such as grid and out_type.
    """
    _name_modules_alike()
    if interpret is not None:  # not jitted, because in a separate program the interpreter's callbacks hung
        return meshes.on_each_device(plgpu.kernel(body, kernel_name=name, interpret=interpret, **options))
    function, *bound_arguments = (
        (body.func, body.args, body.keywords) if isinstance(body, functools.partial) else (body,)
    )
    values, structure = jax.tree.flatten((bound_arguments, options))
    key = (function, name, structure, tuple((type(value), value) for value in values))
    if key not in _traced_once:
        _traced_once[key] = _jitted(plgpu.kernel(body, kernel_name=name, **options), name)
    return meshes.on_each_device(_traced_once[key])


# A step calls a kernel from several programs of layers: by which residuals they keep, forward, backward and computing
# again. Traced at each call, it would be lowered at each, which took 60 % of a start's Python time: a model of experts
# calls 18 kernels from 55 places. One jitted function has one trace for the same shapes, which is lowered once.
_traced_once: dict[Hashable, Callable[..., Any]] = {}


def _jitted(function, name: str) -> Callable[..., Any]:
    """An inlined jit, by which JAX lowers the kernel once for equal shapes."""

    def call(*operands):
        with jax.enable_x64(False):  # with it, numbers created in a kernel would have 64 bits
            return function(*operands)

    call.__name__ = name
    return jax.jit(call, inline=True)


_TARGET = "mosaic_gpu_v2"


type Settings = dict[str, bytes | int | bool]  # of a kernel's custom call


def kernels_of(program: jax.stages.Lowered) -> list[Settings]:
    """The different Mosaic kernels of a lowered program, for `compile_beside`."""
    module: Any = program.compiler_ir()
    kernels: dict[object, Settings] = {}

    def keep(operation):
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == _TARGET:
            settings = {attribute.name: attribute.attr for attribute in operation.attributes["mhlo.backend_config"]}
            kernel = {name: _value(setting) for name, setting in settings.items()}
            kernels.setdefault(kernel["kernel_hash"], kernel)
        return ir.WalkResult.ADVANCE

    module.operation.walk(keep)
    return list(kernels.values())


def compile_beside(kernels: Iterable[Settings], device: Any, pool: Executor) -> list[Future[None]]:
    """Starts to compile Mosaic kernels in parallel. XLA would compile a program's one by one, also if it is from a
    cache and Mosaic's library has no name (`program_cache`); Mosaic compiles no kernel twice in a process.

      device: for which it is compiled. pool: runs the compilations; the futures raise their errors.
    """
    return [pool.submit(_compile, kernel, device) for kernel in kernels]


def _value(setting) -> bytes | int | bool:
    """An MLIR attribute as bytes, a number or bool."""
    return setting.value_bytes if isinstance(setting, ir.StringAttr) else setting.value


def _compile(kernel: Settings, device: Any) -> None:
    """Compiles a small program that calls the kernel and never runs."""
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.int32), has_side_effect=True)
    operand = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    jax.jit(lambda operand: call(operand, **kernel)).lower(operand).compile()


@functools.cache
def _name_modules_alike() -> None:
    """Gives every kernel's module the same name for dumps, by replacing a function of jaxlib once."""
    numbered = mgpu.dialect.get_or_set_dump_options

    def named(module):
        attributes = module.operation.attributes
        dumped = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)
        if _DUMP_NAME not in attributes and not dumped:
            attributes[_DUMP_NAME] = ir.StringAttr.get("kernel", module.context)
        return numbered(module)

    mgpu.dialect.get_or_set_dump_options = named
