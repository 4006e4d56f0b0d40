"""The backward of a gated activation as a Pallas Mosaic GPU kernel for Hopper, `gated_backward`: from gate, up and the
gradient of activation(gate) * up it computes activation(gate) * up and the gradients of gate and up, and writes these
over its three inputs. `refusal` says which calls it cannot compute on this GPU, `unsupported` which on any GPU. In the
kernel's body, `_kernel`, `_results` computes the results of a chunk, from the `_share` of the activation.

Its time is that of reading and writing memory. A lane reads 16 bytes of each array and writes 16 bytes of each result
to the same address. As a lane needs few registers, many warps run on each multiprocessor and keep the memory busy.
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
MOST = 2**32  # arrays of this number of elements or more are refused


def refusal(dtype, size: int, activation: str) -> str | None:
    """The reason why the kernel cannot compute a call on this GPU, or None; the choice of an implementation asks it.
    Reasons are a GPU that is not Hopper (where the kernel is not interpreted), another activation than "silu" and
    "gelu_tanh", another dtype than bfloat16, a size that is no multiple of CHUNK, or an array of 2^32 elements or more.

    Args:
      dtype: of the arrays.
      size: the number of elements of each.
      activation: its name, such as "silu".
    """
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    reason = unsupported(dtype, size, activation)
    if reason is not None:
        return reason
    if size >= MOST:
        return f"{size} elements: their numbers have 32 bits"
    return None


def unsupported(dtype, size: int, activation: str) -> str | None:
    """The reason why the kernel cannot compute a call on any GPU, or None: another activation than "silu" and
    "gelu_tanh", another dtype than bfloat16, or a size that is no multiple of CHUNK. The planner asks this and not
    `refusal`, because it forecasts memory also for a GPU that this machine does not have; the largest size is not
    tested.

    Args:
      dtype: of the arrays.
      size: the number of elements of each.
      activation: its name, such as "silu".
    """
    if activation not in ("silu", "gelu_tanh"):
        return f"activation {activation}: Mosaic has no erf"
    if dtype != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype)}"
    if size % CHUNK:
        return f"{size} elements, no multiple of {CHUNK}"
    return None


def _sigmoid(z):
    """The sigmoid of z, float32 in registers, as the square of 1 / sqrt(1 + exp(-z)), whose approximate instruction is
    fast; Pallas has no approximate division. The error is 2^-21. `_share` needs it for both activations."""
    root = lax.rsqrt(1.0 + jnp.exp(-z))
    return root * root


def _share(x, activation: str):
    """Returns (s(x), its derivative s'(x)) for x, float32 in registers. The activation is x s(x): s is the sigmoid for
    "silu", and the tanh approximation of the normal distribution function for "gelu_tanh". `activation` is one of these
    two. `_results` makes the activation and its derivative of these."""
    if activation == "silu":
        share = _sigmoid(x)
        return share, share * (1.0 - share)
    scale, cubic = float(2 * np.sqrt(2 / np.pi)), 0.044715  # (1 + tanh(z / 2)) / 2 is the sigmoid of z
    square = x * x
    share = _sigmoid(x * (scale + scale * cubic * square))
    return share, share * (1.0 - share) * (scale + 3 * scale * cubic * square)


def _results(values, activation: str):
    """For `_kernel`: returns (gated, dgate, dup) of one chunk, float32 in registers: gated is activation(gate) * up,
    and the others are the gradients of gate and up. values: (gate, up, dgated) of the chunk in registers, dgated being
    the gradient of gated. activation: "silu" or "gelu_tanh"."""
    gate, up, dgated = (each.astype(jnp.float32) for each in values)
    share, slope = _share(gate, activation)
    active = gate * share
    return active * up, dgated * up * (share + gate * slope), dgated * active


def _kernel(gate_ref, up_ref, dgated_ref, *, activation):
    """The kernel's body: replaces the contents of gate_ref, up_ref and dgated_ref, bfloat16[chunks, CHUNK] in global
    memory, by activation(gate) * up, the gradient of gate and the gradient of up. dgated is the gradient of
    activation(gate) * up. Each program, which is one warpgroup, computes one row, a chunk of CHUNK elements.
    activation: "silu" or "gelu_tanh"."""
    refs = (gate_ref, up_ref, dgated_ref)
    layout = plgpu.Layout.WG_STRIDED((CHUNK,), _VECTOR)
    number = lax.axis_index("chunk")
    values = [plgpu.load(ref.at[number], layout=layout, optimized=False) for ref in refs]
    for ref, value in zip(refs, _results(values, activation), strict=True):
        ref[number] = value.astype(ref.dtype)


def gated_backward(gate, up, dgated, activation: str):
    """Computes (activation(gate) * up, the gradient of gate, the gradient of up) by the kernel, all bfloat16 in the
    shape of the arguments, with float32 inside. The results are written over the arguments' memory if nothing else
    reads it; otherwise XLA copies the arguments first. api.gated_backward calls it on each device.

    Args:
      gate, up: bfloat16 arrays of one shape.
      dgated: bfloat16, the gradient of activation(gate) * up.
      activation: "silu" or "gelu_tanh"; `refusal` says which calls are supported.
    """
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
