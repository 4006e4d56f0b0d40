"""Norm and rotation of heads by Triton kernels, with a custom derivative. Their time is that of memory; XLA norms in
one pass and rotates in another, and needs four passes for dx, with the weight's gradient one more.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, meshes, one_order
from jaxtune.pallas.normed_heads import reference


class Tile(NamedTuple):
    """How a kernel divides its work."""

    elements: int  # of x in a tile
    warps: int  # of a program
    steps: int  # tiles of a program; the backward writes one row of gradients of the weight for them


FORWARD, BACKWARD = Tile(2048, 4, 1), Tile(1024, 2, 8)


def refusal(x, weight, table) -> str | None:
    """Why the kernels cannot compute a call, or None; it may run their check at first use. Arguments may be shapes."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    dim, rotary = x.shape[-1], 2 * table[0].shape[-1]
    if dim < 32 or dim & (dim - 1):
        return f"head dim {dim}, no power of two of at least 32"
    if rotary < dim:
        return f"{rotary} of {dim} dimensions are rotated"
    return _first_use(jnp.dtype(x.dtype), jnp.dtype(weight.dtype), dim)


def _first_use(dtype, weight_dtype, dim: int) -> str | None:

    def compare():
        keys = jax.random.split(jax.random.key(0), 4)
        x, dout = (jax.random.normal(key, (2, 37, 3, dim)).astype(dtype) for key in keys[:2])
        weight = (1 + 0.1 * jax.random.normal(keys[2], (dim,))).astype(weight_dtype)
        angles = jax.random.normal(keys[3], (2, 37, dim // 2))

        def run(function, x, weight, dout):
            out, pull = jax.vjp(lambda x, weight: function(x, weight, jnp.cos(angles), jnp.sin(angles)), x, weight)
            return out, *pull(dout)

        def kernels(*arrays):
            return normed_heads(*arrays, 1e-6, 0.0, True)

        def exact(x, weight, *table):
            return reference.rotated(False, reference.normed(x, weight, 1e-6, 0.0, True), *table)

        kernel_results = jax.jit(functools.partial(run, kernels))(x, weight, dout)
        float32_operands = (array.astype(jnp.float32) for array in (x, weight, dout))
        return kernel_results, dispatch.exactly(functools.partial(run, exact))(*float32_operands)

    call = f"{dtype}, weight {weight_dtype}, head dim {dim}"
    return dispatch.first_use("normed_heads", "triton", call, compare)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def normed_heads(x, weight, cos, sin, eps: float, offset: float, float32: bool):
    """As api.normed_heads, for 16 bits, with cos and sin float32[B, T, D / 2]."""
    norm = eps, offset, float32

    def run(x, cos, sin, weight):
        if one_order.runs_kernels():
            return one_order.triton.heads(x, weight, cos, sin, *norm)
        [out] = _call("normed_heads_kernel", FORWARD, x, weight, cos, sin, (), (), norm)
        return out

    return meshes.on_each_device(run, rows=3)(x, cos, sin, weight)


def _normed_heads_fwd(x, weight, cos, sin, eps, offset, float32):
    return normed_heads(x, weight, cos, sin, eps, offset, float32), (x, weight, cos, sin)


def _normed_heads_bwd(eps, offset, float32, residuals, dout):
    """Gradients of x and weight. XLA adds up the programs' shares of the weight's, unless nothing reads them."""
    x, weight, cos, sin = residuals
    norm = eps, offset, float32

    def run(x, cos, sin, dout, weight):
        sums = jax.ShapeDtypeStruct((_programs(x, BACKWARD), x.shape[-1]), jnp.float32)
        extras, steps = ((dout,), (sums,)), BACKWARD.steps
        dx, sums = _call("normed_heads_gradient_kernel", BACKWARD, x, weight, cos, sin, *extras, norm, STEPS=steps)
        return dx, sums.sum(0).astype(weight.dtype)

    dx, dweight = meshes.on_each_device(run, rows=4, results=1)(x, cos, sin, dout, weight)
    return dx, dweight, None, None


normed_heads.defvjp(_normed_heads_fwd, _normed_heads_bwd)


def _block(x, tile: Tile) -> int:
    return max(1, tile.elements // x.shape[-1])


def _programs(x, tile: Tile) -> int:
    return -(-x.size // x.shape[-1] // (_block(x, tile) * tile.steps))


def _call(kernel: str, tile: Tile, x, weight, cos, sin, extra_arrays, outputs, norm, **constants) -> list[jax.Array]:
    """Outputs of a kernel of kernels.py, the first like x. outputs: shapes of further outputs."""
    from jaxtune.pallas.normed_heads import kernels

    heads, dim = x.shape[2:]
    eps, offset, float32 = norm
    return compat.triton_call(
        getattr(kernels, kernel),
        (x, weight, cos, sin, *extra_arrays),
        [jax.ShapeDtypeStruct(x.shape, x.dtype), *outputs],
        (_programs(x, tile),),
        warps=tile.warps,
        stages=1,
        COUNT=x.size // dim,
        HEADS=heads,
        HALF=dim // 2,
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
        BLOCK=_block(x, tile),
        **constants,
    )
