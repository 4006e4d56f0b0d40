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

    name: a scope of its own in op_names; jaxtune.profile knows by it what the kernel does.
    """
    _name_modules_alike()
    interpretation = {} if interpret is None else {"interpret": interpret}
    return meshes.on_each_device(plgpu.kernel(body, kernel_name=name, **options, **interpretation))


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
