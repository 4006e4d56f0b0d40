"""Gradients of quantisation-aware training around the product with a rounded weight. Straight-through: an adapter gets
the gradients that it would get without rounding, which needs no dense gradient of the merged weight. Clipped: the
gradient of the merged weight is computed, and passes only where the grid clips nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from jaxtune.models.qat.fake_quant import FakeQuant


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> jax.Array:
    """A weight rounded to the grid, in its own dtype. It gets the result's gradient, with zeros where the grid clips if
    `spec` clips gradients; x gets none.

      spec: the grid.
      weight: [..., out, in].
      x: the activations that it multiplies. A barrier ties the rounding to them, so that forward and backward each
        round; otherwise XLA would keep the rounded weight in memory.
    """
    weight, _ = optimization_barrier((weight, x))
    return spec.round(weight).astype(weight.dtype)


def _straight_through_fwd(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    return straight_through(spec, weight, x), weight if spec.clips else None


def _straight_through_bwd(spec: FakeQuant, weight: jax.Array | None, dweight: jax.Array):
    if weight is None:
        return dweight, None
    tied, dweight = optimization_barrier((weight, dweight))
    return jnp.where(spec.in_range(tied), dweight, 0), None


straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def unclipped_gradients[A](spec: FakeQuant, merge: Callable[[A], jax.Array], lora: A, dmerged: jax.Array) -> A:
    """The gradient of an adapter through a merged weight that is rounded to the grid: it passes only where the merged
    weight is in the grid's range.

      spec: the grid. lora: the adapter's arrays.
      merge: adapter -> merged weight float32[out, in], of one linear or one expert.
      dmerged: [out, in], the gradient of the rounded weight.
    """
    merged, pullback = jax.vjp(merge, lora)
    (dlora,) = pullback(jnp.where(spec.in_range(merged), dmerged, 0).astype(merged.dtype))
    return dlora


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapter_gradients(out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """`out` unchanged; a and b get the gradients of the term `scale b a x`, so that the adapter trains although `out`
    came from the rounded merged weight. x gets none.

      out: [..., out], the product with the rounded merged weight.
      x: [..., in].
      a, b: the adapter's matrices, [r, in] and [out, r].
      scale: of the adapter, such as alpha / r.
    """
    del x, a, b, scale
    return out


def _adapter_gradients_bwd(scale, residuals, dout):
    x, a, b = residuals
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dy, x = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])

    def product(left, right, dtype=x.dtype):
        return jnp.matmul(left, right, precision=precision, preferred_element_type=dtype)

    inner = product(x, a.astype(x.dtype).T)
    dinner = product(dy, b.astype(x.dtype))
    da, db = product(dinner.T, x, a.dtype), product(dy.T, inner, b.dtype)
    return dout, None, scale * da, scale * db


adapter_gradients.defvjp(lambda out, x, a, b, scale: (out, (x, a, b)), _adapter_gradients_bwd)


@jax.custom_vjp
def gradients_of(out: jax.Array, term: jax.Array) -> jax.Array:
    """`out` unchanged; its gradient passes to `out` and to `term`, an array of the same shape whose value is not used.
    So experts' adapters get gradients although `out` came from rounded merged weights.
    """
    del term
    return out


gradients_of.defvjp(lambda out, term: (out, None), lambda _, dout: (dout, dout))


@jax.custom_vjp
def magnitude_gradients(out: jax.Array, magnitude: jax.Array) -> jax.Array:
    """`out` [..., out], a product with a rounded DoRA weight without the bias, unchanged; the magnitude [out] gets its
    gradient. The rows, rounded too, are proportional to it, because scales are to their largest numbers.
    """
    del magnitude
    return out


def _magnitude_gradients_bwd(residuals, dout):
    """The sum of dout * out over tokens / magnitude, in float32; 0 for a magnitude of 0."""
    out, magnitude = residuals
    sums = (dout.astype(jnp.float32) * out.astype(jnp.float32)).reshape(-1, out.shape[-1]).sum(0)
    return dout, jnp.where(magnitude == 0, 0, sums / jnp.where(magnitude == 0, 1, magnitude)).astype(magnitude.dtype)


magnitude_gradients.defvjp(lambda out, magnitude: (out, (out, magnitude)), _magnitude_gradients_bwd)


def adapter_noise(
    x: jax.Array, dropped: jax.Array, a: jax.Array, b: jax.Array, scale: float, both_terms: bool = False
) -> jax.Array:
    """What dropout adds to a product with a rounded merged weight: the term `scale b a x` with dropout minus the term
    without, [..., out] in x's dtype. Its mean over masks is zero. x and `dropped` get gradients.

      x: [..., in].
      dropped: x after dropout.
      a, b: the adapter's matrices, [r, in] and [out, r].
      scale: of the adapter, such as alpha / r.
      both_terms: True: a and b get the gradients of both terms, for clipped gradients; False: those of the term with
        dropout.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def term(x, a, b):
        """scale b a x, [..., out], for x [..., in], a [r, in], b [out, r]."""
        inner = jnp.matmul(x, a.astype(x.dtype).T, precision=precision)
        return scale * jnp.matmul(inner, b.astype(x.dtype).T, precision=precision)

    return term(dropped, a, b) - term(x, *((a, b) if both_terms else jax.lax.stop_gradient((a, b))))
