"""The norm and the rotation of the heads of queries or keys: the public operation `normed_heads`, and the choice of its
implementation."""

from __future__ import annotations

import jax

from jaxtune.pallas import dispatch, meshes
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
    """Computes the RMS norm of each head of queries or keys, and rotates it by its token's position. The function is
    differentiable with respect to x and weight.

    Args:
      x: [B, T, heads, D] bfloat16, float16 or float32, the heads as they are projected.
      weight: float[D], that of the norm.
      table: (cos, sin) of the angles, float32[B, T, rotary_dim / 2]; numbers i and i + rotary_dim / 2 of a head are a
        pair, and numbers from rotary_dim on are not rotated. They get no gradient.
      eps: the number that is added to the mean square.
      offset: the number that is added to the weight; it is ignored if float32 is False.
      float32: True: the normed numbers times the weight are rounded once, to x's dtype. False: the normed numbers and
        the weight are rounded to x's dtype first, and the product again.
      implementation: "triton" (one kernel, and one for the gradients: 16 bits, D a power of two of at least 32, and
        rotary_dim D), "reference" (plain JAX), or None: "triton" if it supports the call and there are at least 4,096
        heads over all tokens, else "reference".
    Returns:
      [B, T, heads, D] in x's dtype, rounded after the norm and after the rotation. The kernel's gradients are rounded
      once.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = Arguments("normed_heads")
    check.array("x", x, "B T heads D", FLOATS)
    check.array("weight", weight, "D", FLOATS)
    for index, part in enumerate(table):
        check.array(f"table[{index}]", part, "B T rotary_dim/2", ("float32",))
    cos, sin = table
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"normed_heads: table rotates {2 * cos.shape[-1]} numbers of heads of {x.shape[-1]}")
    partly = 2 * cos.shape[-1] < x.shape[-1]  # XLA's passes were faster than a kernel, which read too few bytes at once
    if implementation is None and (partly or x.size // x.shape[-1] < _LEAST):
        implementation = "reference"
    if dispatch.choose("normed_heads", implementations(x, weight, table), implementation) == "triton":
        return triton.normed_heads(x, weight, cos, sin, eps, offset, float32)
    return reference.rotated(False, reference.normed(x, weight, eps, offset, float32), cos, sin)


def implementations(x, weight, table) -> dispatch.Table:
    """The table from which dispatch.choose takes the implementation of a call: {name: a function that returns the
    reason why the implementation refuses the call, or None}, in the order in which they are tried. `jaxtune info`
    prints why implementations refuse. The arguments are those of `normed_heads`, as arrays or as shapes."""
    return {"triton": lambda: triton.refusal(x, weight, table), "reference": lambda: None}
