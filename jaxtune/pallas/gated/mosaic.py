"""The backward of a gated activation as a Pallas Mosaic GPU kernel for Hopper, which overwrites its inputs.

It is bound by memory. A lane reads 16 bytes of each array and writes 16 bytes of each result to the same place. The
memory is kept busy by many warps on each multiprocessor, as a lane needs few registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import dispatch, gpu_kernel

_VECTOR = 8  # bfloat16 that a lane reads and writes at once: 16 bytes
CHUNK = 128 * _VECTOR  # elements of a warpgroup, which is a program
MOST = 2**32  # the largest number of elements


def refusal(dtype, size: int, activation: str) -> str | None:
    """The reason why the kernel cannot serve arrays of this dtype and number of elements (`size`), or None. activation:
    its name, such as "silu"."""
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    reason = unsupported(dtype, size, activation)
    if reason is not None:
        return reason
    if size >= MOST:
        return f"{size} elements: their numbers have 32 bits"
    return None


def unsupported(dtype, size: int, activation: str) -> str | None:
    """The reason why the kernel cannot serve arrays of this dtype and number of elements (`size`) on any GPU, or None;
    the limit on the size is not tested. activation: its name, such as "silu". The planner, which forecasts memory for
    a GPU that may not be there, asks this."""
    if activation not in ("silu", "gelu_tanh"):
        return f"activation {activation}: Mosaic has no erf"
    if dtype != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype)}"
    if size % CHUNK:
        return f"{size} elements, no multiple of {CHUNK}"
    return None


def _sigmoid(z):
    """The sigmoid of float32 z in registers by the approximate square root, because Pallas has no approximate division;
    its error is 2^-21."""
    root = lax.rsqrt(1.0 + jnp.exp(-z))
    return root * root


def _share(x, activation: str):
    """(s(x), its derivative s'(x)) at float32 x in registers, for an activation of the form x s(x): s is the sigmoid
    for "silu", and the tanh approximation of the normal distribution function for "gelu_tanh"."""
    if activation == "silu":
        share = _sigmoid(x)
        return share, share * (1.0 - share)
    scale, cubic = float(2 * np.sqrt(2 / np.pi)), 0.044715  # (1 + tanh(z / 2)) / 2 is the sigmoid of z
    square = x * x
    share = _sigmoid(x * (scale + scale * cubic * square))
    return share, share * (1.0 - share) * (scale + 3 * scale * cubic * square)


def _results(values, activation: str):
    """(gated, dgate, dup), float32 in registers, of one chunk: gated is activation(gate) * up, and the others are the
    gradients of gate and up. values: (gate, up, dgated) in registers, dgated being the gradient of gated. activation:
    "silu" or "gelu_tanh"."""
    gate, up, dgated = (each.astype(jnp.float32) for each in values)
    share, slope = _share(gate, activation)
    active = gate * share
    return active * up, dgated * up * (share + gate * slope), dgated * active


def _kernel(gate_ref, up_ref, dgated_ref, *, activation):
    """Replaces gate_ref, up_ref and dgated_ref, bfloat16[chunks, CHUNK] in global memory, by gated, dgate and dup; a
    program, which is one warpgroup, has one chunk. activation: "silu" or "gelu_tanh", as in _results."""
    refs = (gate_ref, up_ref, dgated_ref)
    layout = plgpu.Layout.WG_STRIDED((CHUNK,), _VECTOR)
    number = lax.axis_index("chunk")
    values = [plgpu.load(ref.at[number], layout=layout, optimized=False) for ref in refs]
    for ref, value in zip(refs, _results(values, activation), strict=True):
        ref[number] = value.astype(ref.dtype)


def gated_backward(gate, up, dgated, activation: str):
    """(activation(gate) * up, dgate, dup) from bfloat16 gate, up and dgated, the gradient of the first, written over
    the arguments if nothing else reads them. `refusal` says which calls it supports."""
    refs = [jax.new_ref(each.reshape(-1, CHUNK)) for each in (gate, up, dgated)]
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
