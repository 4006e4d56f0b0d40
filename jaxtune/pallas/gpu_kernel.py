"""`kernel`, by which all Mosaic GPU kernels of jaxtune are made, in place of Pallas' `plgpu.kernel`. It gives a kernel
a name that profiles show, traces equal kernels once, and makes XLA's compilation cache recognise them. Within
`interpreted`, kernels run in Pallas' interpreter, for tests without a GPU. `compile_beside` compiles a program's
kernels in parallel, before XLA would compile them one by one. Tests on a Hopper GPU run the kernels there even within
`interpreted`.

jaxlib 0.11 puts a name for dumps into each kernel's module, with a number that counts the modules of the process. The
number is part of the key of XLA's compilation cache, so a program whose kernels are lowered in another order than last
time (a thread was faster, a check was left out) would be compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

from jaxtune.pallas import dispatch, meshes
from jaxtune.system.private_mlir import ir

_DUMP_NAME = "mosaic_gpu.dump_basename"
_interpret: Any = None


@contextlib.contextmanager
def interpreted():
    """A context in which Mosaic kernels run in Pallas' GPU interpreter, for tests on a machine without a Hopper GPU. It
    affects those kernels whose caller passes `interpreter()` to `kernel`, in all threads. On a Hopper GPU it changes
    nothing: there the same tests run the kernels on the GPU."""
    global _interpret
    if dispatch.compute_capability() == (9, 0) and jax.default_backend() == "gpu":
        yield
        return
    before, _interpret = _interpret, plgpu.InterpretGPUParams()
    try:
        yield
    finally:
        _interpret = before


def interpreter() -> Any:
    """What a caller passes to `kernel` as `interpret`: within `interpreted` the parameters of Pallas' GPU interpreter,
    otherwise None. The functions that say why a kernel cannot run also ask for it, because the interpreter needs no
    Hopper GPU, and so do the kernels' bodies and callers, which replace what the interpreter cannot run, such as inline
    PTX, and take fewer programs."""
    return _interpret


def kernel(body, name: str, interpret=None, **options):
    """Returns a Mosaic GPU kernel as a function of arrays, plgpu.kernel(body, **options). On a mesh of several devices
    each device runs it, within a shard_map on its part of the arrays, and elsewhere on whole arrays, so that all do the
    same work (meshes.on_each_device).

    Args:
      body: the kernel's body, a function of references: a module's function, or a functools.partial of one. The
        arguments of the partial, and the options, must be hashable, or lists and dictionaries of hashable values: they
        identify the kernel, so that equal kernels are traced and lowered once for the same shapes. A function that is
        defined anew for each call would be traced each time, and kept. An interpreted kernel is not jitted.
      name: the kernel's name, a scope in the op_names of the program, by which jaxtune.profile recognises the kernel.
      interpret: the interpreter's parameters, from `interpreter()`, with which the interpreter runs the kernel; None:
        the GPU runs it.
      options: the keyword arguments of plgpu.kernel, such as grid and out_type.
    """
    _name_modules_alike()
    if interpret is not None:  # not jitted, because in a separate program the interpreter's callbacks hung
        return meshes.on_each_device(plgpu.kernel(body, kernel_name=name, interpret=interpret, **options))
    function, *given = (body.func, body.args, body.keywords) if isinstance(body, functools.partial) else (body,)
    values, structure = jax.tree.flatten((given, options))
    key = (function, name, structure, tuple((type(value), value) for value in values))
    if key not in _traced_once:
        _traced_once[key] = _jitted(plgpu.kernel(body, kernel_name=name, **options), name)
    return meshes.on_each_device(_traced_once[key])


# A step calls a kernel from several programs of layers: by which residuals they keep, forward, backward and computing
# again. Traced at each call, it would be lowered at each, which took 60 % of a start's Python time: a model of experts
# calls 18 kernels from 55 places. One jitted function has one trace for the same shapes, which is lowered once.
_traced_once: dict[Hashable, Callable[..., Any]] = {}


def _jitted(function, name: str) -> Callable[..., Any]:
    """For `kernel`: returns `function`, a Mosaic kernel as a function of arrays, under a jit with the name `name` that
    is inlined, traced without x64, in which numbers created in the kernel would have 64 bits. The jit makes JAX trace
    and lower the kernel once for all calls with the same shapes; inlining keeps the program as if there were no jit."""

    def call(*operands):
        with jax.enable_x64(False):  # with it, numbers created in a kernel would have 64 bits
            return function(*operands)

    call.__name__ = name
    return jax.jit(call, inline=True)


_TARGET = "mosaic_gpu_v2"


def compile_beside(program: jax.stages.Lowered, device: Any, pool: Executor) -> list[Future[None]]:
    """Starts to compile the different Mosaic kernels of a lowered program in parallel, and returns a future for each,
    which has no result but raises what the compilation raised. It shortens the start of a run, whose training program
    (Engine) calls it after lowering and then lets XLA compile the program.

    XLA would compile them one by one at the end of a program, and also those of a program that it takes from its cache.
    Mosaic does not compile a kernel again that the process has compiled before, in any program, so XLA then finds them
    done.

    Args:
      program: the lowered program, such as jax.jit(f).lower(x).
      device: the jax.Device to compile for.
      pool: the threads; each kernel is compiled in one of them.
    """
    module: Any = program.compiler_ir()
    kernels: dict[bytes, dict[str, Any]] = {}

    def keep(operation):
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == _TARGET:
            settings = {each.name: each.attr for each in operation.attributes["mhlo.backend_config"]}
            kernel = {name: _value(setting) for name, setting in settings.items()}
            kernels.setdefault(kernel["kernel_hash"], kernel)
        return ir.WalkResult.ADVANCE

    module.operation.walk(keep)
    return [pool.submit(_compile, kernel, device) for kernel in kernels.values()]


def _value(setting) -> Any:
    """Converts `setting`, an MLIR attribute in the backend_config of a kernel's custom call, to a Python value, with
    which `_compile` makes the call again: bytes for a string, else a number or bool."""
    return setting.value_bytes if isinstance(setting, ir.StringAttr) else setting.value


def _compile(kernel: dict[str, Any], device: Any) -> None:
    """Compiles a kernel for `device`, a jax.Device, by compiling a small program that calls it. The program never runs,
    so its arguments do not matter; what counts is that the process has then compiled the kernel. kernel: the settings
    of the kernel's custom call, {name: value}."""
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.int32), has_side_effect=True)
    given = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    jax.jit(lambda given: call(given, **kernel)).lower(given).compile()


@functools.cache
def _name_modules_alike() -> None:
    """Gives the module of every kernel that this process lowers the same name for dumps, unless dumps are asked for (an
    environment variable MOSAIC_GPU_DUMP...). jaxlib's own names are numbered, and would change the keys of XLA's
    compilation cache. It replaces a function of jaxlib, once in a process; `kernel` calls it before it makes a
    kernel."""
    numbered = mgpu.dialect.get_or_set_dump_options

    def named(module):
        attributes = module.operation.attributes
        dumped = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)
        if _DUMP_NAME not in attributes and not dumped:
            attributes[_DUMP_NAME] = ir.StringAttr.get("kernel", module.context)
        return numbered(module)

    mgpu.dialect.get_or_set_dump_options = named
