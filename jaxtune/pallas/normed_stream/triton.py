"""The norm of the residual stream with a derivative by a Triton kernel (`normed_stream`). `refusal` says which calls it
cannot compute on this GPU.

The norm itself is left to XLA, which computes it in one pass, in which it also adds up what is normed. XLA needs two
passes for the gradient of x: the first computes sums over each row, the second reads the same arrays once more.
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
    """The Tile of the kernel for rows whose size, rounded up to a power of two, is `width`."""
    if width <= 1024:
        return Tile(2, 4, 512)
    return Tile(1, 4 if width <= 2048 else 8, 512)


def refusal(x, weight) -> str | None:
    """The reason why the kernel cannot compute the gradient of a call, or None if it can. It needs a GPU that runs
    Triton kernels, jax-triton, bfloat16 or float16, and rows of at most 8,192 numbers, a multiple of 8. It is also
    refused if the check at first use on this GPU found that its results differ from those of plain JAX.

    x: [..., size]. weight: [size]."""
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
    """The reason why this GPU must not run the kernel for such calls, or None: it compares a small case with plain JAX
    in float32, once for each kind of call (dispatch.first_use). size: of a row."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 4)
        x, dnormed, passed = (jax.random.normal(key, (37, size)).astype(dtype) for key in keys[:3])
        weight = (1 + 0.1 * jax.random.normal(keys[3], (size,))).astype(weight_dtype)

        def run(function, x, weight, passed, dnormed):
            (_, out), pull = jax.vjp(function, x, weight)
            return out, *pull((passed, dnormed))

        def exact(x, weight):
            return x, normed(x, weight, 1e-6, 0.0, True)

        given = x, weight, passed, dnormed
        got = jax.jit(functools.partial(run, lambda x, weight: normed_stream(x, weight, 1e-6, 0.0, True)))(*given)
        wide = (array.astype(jnp.float32) for array in given)
        return got, dispatch.exactly(functools.partial(run, exact))(*wide)

    return dispatch.first_use("normed_stream", "triton", f"{dtype}, weight {weight_dtype}, {size}", compare)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def normed_stream(x, weight, eps: float, offset: float, float32: bool):
    """(x, x [..., size] normed in plain JAX), with a derivative by the kernel. The arguments are those of `normed`;
    `refusal` says which calls are supported."""
    return x, normed(x, weight, eps, offset, float32)


def _normed_stream_fwd(x, weight, eps, offset, float32):
    """The forward rule of `normed_stream`: (its results, the residuals (x, weight, None if the weight gets no gradient,
    otherwise ())). x and weight tell here whether they get one."""
    trained = () if weight.perturbed else None
    return normed_stream(x.value, weight.value, eps, offset, float32), (x.value, weight.value, trained)


def _normed_stream_bwd(eps, offset, float32, residuals, gradients):
    """The backward rule of `normed_stream`. From the gradients of its results, (passed, dnormed), each like x or a
    symbolic zero, it computes (the gradient of x, that of the weight, or None where nothing reads it). Each program
    adds up its rows' gradients of the weight, and XLA these sums."""
    x, weight, trained = residuals
    passed, dnormed = (None if _is_zero(gradient) else gradient for gradient in gradients)
    if dnormed is None:
        return jnp.zeros_like(x) if passed is None else passed, None

    def run(x, dnormed, passed, weight):
        dx, *sums = gradient(x, dnormed, passed, weight, eps, offset, float32, trained is not None)
        return dx, *(each.sum(0).astype(weight.dtype) for each in sums)

    dx, *dweight = meshes.on_each_device(run, rows=3, results=1)(x, dnormed, passed, weight)
    return dx, dweight[0] if dweight else None


normed_stream.defvjp(_normed_stream_fwd, _normed_stream_bwd, symbolic_zeros=True)


def _is_zero(gradient) -> bool:
    """Whether a gradient that the backward rule gets stands for zeros, because nothing reads that result."""
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


def gradient(x, dnormed, passed, weight, eps, offset, float32, trained: bool) -> list[jax.Array]:
    """Calls the kernel: [the gradient of x, and if the weight is `trained`, the programs' sums float32[programs, size]
    of its gradient].

    x, dnormed: [..., size], what is normed and the gradient of the result. passed: like x, what is added to the
    gradient of x; None: nothing. The other arguments are those of `normed`."""
    from jaxtune.pallas.normed_stream import kernels

    size = x.shape[-1]
    count, width = x.size // size, 1 << (size - 1).bit_length()
    rows, warps, programs = tile(width)
    steps = max(1, count // (rows * programs)) if trained else 1
    programs = -(-count // (rows * steps))
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    # Without a gradient of the weight the kernel gets an array that it leaves as it is, for it has no fewer parameters.
    outputs.append(jax.ShapeDtypeStruct((programs, size) if trained else (1,), jnp.float32))
    found = compat.triton_call(
        kernels.normed_stream_gradient_kernel,
        (x, weight, dnormed, dnormed if passed is None else passed),
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
        PASSED=int(passed is not None),
        TRAINED=int(trained),
        BLOCK=rows,
        STEPS=steps,
    )
    return found if trained else found[:1]
