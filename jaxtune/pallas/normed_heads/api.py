"""Norm and rotation of the heads of queries or keys."""

from __future__ import annotations

import jax

from jaxtune.pallas import dispatch, meshes, one_order
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.normed_heads import reference, triton

# Heads, over all tokens, below which plain JAX runs: a step of generation, whose programs are CUDA graphs, which a
# kernel of jax-triton would divide.
_LEAST = 4096


@meshes.on_any_mesh
def normed_heads(
    x: jax.Array,
    weight: jax.Array,
    table: tuple[jax.Array, jax.Array],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """RMS norm of each head, then rotation by its token's position: [B, T, heads, D] in x's dtype, rounded after each
    of both. Differentiable in x and weight; the kernel's gradients are rounded once. TypeError or ValueError for wrong
    arguments or an implementation that refuses.

      x: [B, T, heads, D] bfloat16, float16 or float32.
      table: (cos, sin), float32[B, T, rotary_dim / 2]; numbers i and i + rotary_dim / 2 of a head are a pair, those
        from rotary_dim on stay.
      implementation: "triton" (16 bits, D a power of two of at least 32, rotary_dim D), "reference", or None: "triton"
        if it supports the call and there are at least 4,096 heads over all tokens.
      eps: added to the mean square of a head.
      weight: float[D].
      offset: added to the weight, if float32; else ignored.
      float32: True: only the product with the weight is rounded; False: both factors are rounded first, too.
    """
    check = Arguments("normed_heads")
    check.array("x", x, "B T heads D", FLOATS)
    check.array("weight", weight, "D", FLOATS)
    for index, angles in enumerate(table):
        check.array(f"table[{index}]", angles, "B T rotary_dim/2", ("float32",))
    cos, sin = table
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"normed_heads: table rotates {2 * cos.shape[-1]} numbers of heads of {x.shape[-1]}")
    partly = 2 * cos.shape[-1] < x.shape[-1]  # XLA's passes were faster than a kernel, which read too few bytes at once
    if implementation is None and (partly or (x.size // x.shape[-1] < _LEAST and not one_order.runs_kernels())):
        implementation = "reference"
    if dispatch.choose("normed_heads", implementations(x, weight, table), implementation) == "triton":
        return triton.normed_heads(x, weight, cos, sin, eps, offset, float32)
    return reference.rotated(False, reference.normed(x, weight, eps, offset, float32), cos, sin)


def implementations(x, weight, table) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial. Arguments may be shapes.

    x: [B, T, heads, D]. weight: [D]. table: (cos, sin), [B, T, rotary_dim / 2].
    """
    return {"triton": lambda: triton.refusal(x, weight, table), "reference": lambda: None}
