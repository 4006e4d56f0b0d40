"""Runs Triton kernels' bodies in Triton's interpreter, on torch tensors in main memory, and Gluon's in numpy."""

from __future__ import annotations

import contextlib

import gluon_interpreter
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import interpreter

from jaxtune.pallas import compat, targets


def _to_torch(array) -> torch.Tensor:
    array = np.array(array)
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == jnp.float8_e4m3fn:
        return torch.from_numpy(array.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def _to_jax(tensor: torch.Tensor):
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.view(torch.int16).numpy().view(jnp.bfloat16))
    if tensor.dtype == torch.float8_e4m3fn:
        return jnp.asarray(tensor.view(torch.int8).numpy().view(jnp.float8_e4m3fn))
    return jnp.asarray(tensor.numpy())


def _call(kernel, arguments, out_types, grid, *, warps, stages, contract=True, aliases=None, **constants):
    """compat.triton_call. What the kernel leaves unwritten is NaN, or where an argument's memory is taken, that."""
    if isinstance(kernel, GluonJITFunction):
        return gluon_interpreter.call(kernel, arguments, out_types, grid, aliases, **constants)
    outputs = [_to_torch(np.full(t.shape, np.nan, t.dtype)) for t in out_types]
    for argument, output in (aliases or {}).items():
        outputs[output] = _to_torch(arguments[argument])
    names = [name for name in kernel.arg_names if name not in constants]
    arrays = dict(zip(names, (*map(_to_torch, arguments), *outputs), strict=True))
    kernel[(*grid, *(1,) * (3 - len(grid)))](**arrays, **constants)
    return [_to_jax(tensor) for tensor in outputs]


def _numbers(side):
    """The interpreter holds bfloat16 and e4m3 as their bits, in integers, and would multiply these."""
    if side.dtype.scalar == tl.bfloat16:
        return side.data.view(jnp.bfloat16)
    if side.dtype.scalar == tl.float8e4nv:
        return side.data.view(jnp.float8_e4m3fn)
    return side.data


def _dot(self, a, b, d, *_):
    """In float64: a float32 product of numpy has other bits with another number of rows, on some processors."""
    wide = np.int64 if d.dtype.scalar.is_int() else np.float64
    product = np.matmul(_numbers(a).astype(wide), _numbers(b).astype(wide)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_CONVERT = interpreter._convert_float


def _convert(numbers, given, wanted, rounding):
    """The interpreter cuts numbers off when it converts them to e4m3 or bfloat16, which GPUs round."""
    if given == tl.float32 and wanted == tl.bfloat16:
        return numbers.view(np.float32).astype(jnp.bfloat16).view(np.uint16)
    if wanted != tl.float8e4nv:
        return _CONVERT(numbers, given, wanted, rounding)
    assert given == tl.float32
    rounded = np.clip(numbers.view(np.float32), -448, 448).astype(jnp.float8_e4m3fn)
    return rounded.view(np.uint8)


@contextlib.contextmanager
def interpreted(capability=(8, 0)):
    """In this context Triton implementations serve calls, outside of jit, with the tiles of that compute capability."""
    with pytest.MonkeyPatch.context() as patch, targets.compile_for(capability):
        for name in ("triton_call", "triton_graph_call"):
            patch.setattr(compat, name, _call)
        patch.setattr(compat, "_has_jax_triton", lambda: True)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter, "_convert_float", _convert)
        yield
