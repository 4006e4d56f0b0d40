"""Norm of the residual stream with a derivative by a Triton kernel. XLA computes the norm itself, in one pass in which
it also adds up what is normed; for x's gradient it would need two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, meshes
from jaxtune.pallas.normed_heads import normed

_WIDEST = 8192  # numbers of a row that the registers of 8 warps hold


class Tile(NamedTuple):
    """How the kernel divides its work."""

    rows: int  # of a tile
    warps: int  # of a program
    # between how many programs the rows are divided, if there are enough, where the weight is trained: each writes its
    # share of the weight's gradient. Otherwise each tile has its own program.
    programs: int


def tile(width: int) -> Tile:
    if width <= 1024:
        return Tile(2, 4, 512)
    return Tile(1, 4 if width <= 2048 else 8, 512)


def refusal(x, weight) -> str | None:
    """Why the kernel cannot compute a call's gradient, or None; it may run its check at first use."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    size = x.shape[-1]
    if size > _WIDEST or size % 8:
        return f"rows of {size} numbers, no multiple of 8 of at most {_WIDEST}"
    return _first_use(jnp.dtype(x.dtype), jnp.dtype(weight.dtype), size)


def _first_use(dtype, weight_dtype, size: int) -> str | None:

    def compare():
        keys = jax.random.split(jax.random.key(0), 4)
        x, dnormed, stream_gradient = (jax.random.normal(key, (37, size)).astype(dtype) for key in keys[:3])
        weight = (1 + 0.1 * jax.random.normal(keys[3], (size,))).astype(weight_dtype)

        def run(function, x, weight, stream_gradient, dnormed):
            (_, out), pull = jax.vjp(function, x, weight)
            return out, *pull((stream_gradient, dnormed))

        def exact(x, weight):
            return x, normed(x, weight, 1e-6, 0.0, True)

        operands = x, weight, stream_gradient, dnormed
        kernel_results = jax.jit(functools.partial(run, lambda x, weight: normed_stream(x, weight, 1e-6, 0.0, True)))(
            *operands
        )
        float32_operands = (array.astype(jnp.float32) for array in operands)
        return kernel_results, dispatch.exactly(functools.partial(run, exact))(*float32_operands)

    return dispatch.first_use("normed_stream", "triton", f"{dtype}, weight {weight_dtype}, {size}", compare)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def normed_stream(x, weight, eps: float, offset: float, float32: bool):
    """As api.normed_stream, for 16 bits."""
    return x, normed(x, weight, eps, offset, float32)


def _normed_stream_fwd(x, weight, eps, offset, float32):
    """The last residual is () if the weight gets a gradient, else None."""
    trained = () if weight.perturbed else None
    return normed_stream(x.value, weight.value, eps, offset, float32), (x.value, weight.value, trained)


def _normed_stream_bwd(eps, offset, float32, residuals, gradients):
    """(gradient of x, of weight or None where nothing reads it); `gradients`: (passed, dnormed), like x or symbolic
    zeros.
    """
    x, weight, trained = residuals
    stream_gradient, dnormed = (None if _is_zero(gradient) else gradient for gradient in gradients)
    if dnormed is None:
        return jnp.zeros_like(x) if stream_gradient is None else stream_gradient, None

    def run(x, dnormed, stream_gradient, weight):
        dx, *sums = gradient(x, dnormed, stream_gradient, weight, eps, offset, float32, trained is not None)
        return dx, *(shares.sum(0).astype(weight.dtype) for shares in sums)

    dx, *dweight = meshes.on_each_device(run, rows=3, results=1)(x, dnormed, stream_gradient, weight)
    return dx, dweight[0] if dweight else None


normed_stream.defvjp(_normed_stream_fwd, _normed_stream_bwd, symbolic_zeros=True)


def _is_zero(gradient) -> bool:
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


def gradient(x, dnormed, stream_gradient, weight, eps, offset, float32, trained: bool) -> list[jax.Array]:
    """Runs the kernel: [gradient of x, and if `trained` the programs' shares float32[programs, size] of the weight's].

    x, weight: [..., size] of 16 bits, [size]. dnormed: gradient of the normed x.
    stream_gradient: like x, added to its gradient, or None.
    eps: added to the mean square. offset: added to the weight, if float32. float32: only the product was rounded.
    """
    from jaxtune.pallas.normed_stream import kernels

    size = x.shape[-1]
    count, width = x.size // size, 1 << (size - 1).bit_length()
    rows, warps, programs = tile(width)
    steps = max(1, count // (rows * programs)) if trained else 1
    programs = -(-count // (rows * steps))
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    # Without a gradient of the weight the kernel gets an array that it leaves as it is, for it has no fewer parameters.
    outputs.append(jax.ShapeDtypeStruct((programs, size) if trained else (1,), jnp.float32))
    results = compat.triton_call(
        kernels.normed_stream_gradient_kernel,
        (x, weight, dnormed, dnormed if stream_gradient is None else stream_gradient),
        outputs,
        (programs,),
        warps=warps,
        stages=1,
        COUNT=count,
        SIZE=size,
        WIDTH=width,
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
        PASSED=int(stream_gradient is not None),
        TRAINED=int(trained),
        BLOCK=rows,
        STEPS=steps,
    )
    return results if trained else results[:1]
