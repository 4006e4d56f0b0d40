"""`plgpu.kernel` for all our Mosaic kernels: interpreted where that is asked for, with a name that profiles show, and
found again by XLA's cache. `interpreted` is the one switch of tests that have no GPU.

jaxlib 0.11 puts a name for dumps into each kernel's module, with a number that counts the modules of the process. The
number is part of what XLA's compilation cache looks a program up by, so one whose kernels are lowered in another order
than last time (a thread was faster, a check was left out) would be compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jaxtune.pallas import dispatch, meshes

_DUMP_NAME = "mosaic_gpu.dump_basename"
_interpret: Any = None


@contextlib.contextmanager
def interpreted():
    """Runs the bodies of all our Mosaic kernels in Pallas' GPU interpreter, on any machine: for tests. On a Hopper GPU
    it changes nothing: there the same tests run the kernels themselves."""
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
    """What `kernel` is to interpret with, or None."""
    return _interpret


def kernel(body, name: str, interpret=None, **options):
    """plgpu.kernel(body, **options), run by the interpreter where `interpret` has its parameters.

    Args:
      body: a module's function, or a functools.partial of one. What that holds, and the options, are hashable or lists
        and dictionaries of what is: they tell kernels apart.
      name: a scope of its own in op_names; jaxtune.profile knows by it what the kernel does.
    """
    _name_modules_alike()
    if interpret is not None:  # not jitted: in a program of its own, the interpreter's callbacks hung
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
    def call(*operands):
        return function(*operands)

    call.__name__ = name
    return jax.jit(call, inline=True)


@functools.cache
def _name_modules_alike() -> None:
    """Gives every module of this process the same name for dumps, unless dumps are asked for."""
    numbered = getattr(mgpu.dialect, "get_or_set_dump_options", None)
    if numbered is None:
        return

    def named(module):
        attributes = module.operation.attributes
        dumped = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)
        if _DUMP_NAME not in attributes and not dumped:
            attributes[_DUMP_NAME] = ir.StringAttr.get("kernel", module.context)
        return numbered(module)

    mgpu.dialect.get_or_set_dump_options = named
