"""Backward of a gated activation as a Pallas Mosaic GPU kernel for Hopper, which writes its three results over its
three inputs. A lane reads 16 bytes of each array and writes 16 bytes to the same address; it needs few registers, so
many warps run on each multiprocessor and keep the memory busy.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.pallas import gpu_kernel
from jaxtune.pallas.mosaic_modules import plgpu

_VECTOR = 8  # bfloat16 that a lane reads and writes at once: 16 bytes
CHUNK = 128 * _VECTOR  # elements of a warpgroup, which is a program
MOST = 2**32  # arrays of this number of elements or more are refused


def refusal(dtype, size: int, activation: str) -> str | None:
    """Why the kernel cannot compute a call on this GPU, or None. size: elements of an array."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    reason = unsupported(dtype, size, activation)
    if reason is not None:
        return reason
    if size >= MOST:
        return f"{size} elements: their numbers have 32 bits"
    return None


def unsupported(dtype, size: int, activation: str) -> str | None:
    """Why the kernel cannot compute a call on any GPU, or None; for plans of a GPU that this machine lacks. It does not
    test the largest size.

      dtype: of all three arrays. size: elements of one. activation: a key of ACTIVATIONS.
    """
    if activation not in ("silu", "gelu_tanh"):
        return f"activation {activation}: Mosaic has no erf"
    if dtype != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype)}"
    if size % CHUNK:
        return f"{size} elements, no multiple of {CHUNK}"
    return None


def _sigmoid(z):
    """Sigmoid of float32 z as the square of 1 / sqrt(1 + exp(-z)), with an error of 2^-21."""
    root = lax.rsqrt(1.0 + jnp.exp(-z))
    return root * root


def _share(x, activation: str):
    """(s(x), s'(x)) of float32 x in registers; the activation is x s(x)."""
    if activation == "silu":
        share = _sigmoid(x)
        return share, share * (1.0 - share)
    scale, cubic = float(2 * np.sqrt(2 / np.pi)), 0.044715  # (1 + tanh(z / 2)) / 2 is the sigmoid of z
    square = x * x
    share = _sigmoid(x * (scale + scale * cubic * square))
    return share, share * (1.0 - share) * (scale + 3 * scale * cubic * square)


def _results(values, activation: str):
    gate, up, dgated = (value.astype(jnp.float32) for value in values)
    share, slope = _share(gate, activation)
    active = gate * share
    return active * up, dgated * up * (share + gate * slope), dgated * active


def _kernel(gate_ref, up_ref, dgated_ref, *, activation):
    """Replaces gate, up and dgated, bfloat16[chunks, CHUNK], by the results, a chunk a warpgroup."""
    refs = (gate_ref, up_ref, dgated_ref)
    layout = plgpu.Layout.WG_STRIDED((CHUNK,), _VECTOR)
    number = lax.axis_index("chunk")
    values = [plgpu.load(ref.at[number], layout=layout, optimized=False) for ref in refs]
    for ref, value in zip(refs, _results(values, activation), strict=True):
        ref[number] = value.astype(ref.dtype)


def gated_backward(gate, up, dgated, activation: str):
    """As api.gated_backward, in place, for bfloat16 and a multiple of 1,024 elements."""
    refs = [jax.new_ref(array.reshape(-1, CHUNK)) for array in (gate, up, dgated)]
    gpu_kernel.kernel(
        functools.partial(_kernel, activation=activation),
        "gated_backward",
        gpu_kernel.interpreter(),
        out_type=(),
        grid=(gate.size // CHUNK,),
        grid_names=("chunk",),
        # A warpgroup reads and writes only its own elements, so nothing has to wait.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*refs)
    return tuple(ref[...].reshape(gate.shape) for ref in refs)
