"""The gradients of quantisation-aware training (QAT) beside the product with a rounded weight: of the weight itself
(`straight_through`), and of adapters that are merged into it before it is rounded.

With qat.gradients = straight_through the adapter's gradients are those of the adapter without rounding, for which no
dense gradient of the merged weight is needed (`adapter_gradients`, `gradients_of`, `magnitude_gradients`). With clipped
the gradient of the merged weight is computed, and passes only where the grid clips nothing (`unclipped_gradients`).
`adapter_noise` is what dropout on the adapter's input adds to such a product; then its derivative takes the place of
`adapter_gradients`. The callers are models/linear.py and models/layers/expert_linear.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from jaxtune.models.fake_quant import FakeQuant


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> jax.Array:
    """A weight [..., out, in] rounded to the grid `spec`, in the weight's own dtype. In the backward, the gradient of
    the result is passed to the weight, unchanged, or if `spec` clips gradients, with zeros where the weight is
    outside the grid's range; x gets none. Linears and experts whose weights are trained whole round them so in
    quantisation-aware training.

    x: the activations that the rounded weight will multiply. An optimization barrier makes the rounding depend on them,
    so that forward and backward each round. Otherwise XLA would round once for both, and keep the rounded weight in
    memory in between."""
    weight, _ = optimization_barrier((weight, x))
    return spec.round(weight).astype(weight.dtype)


def _straight_through_fwd(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The forward rule of `straight_through`, with its arguments (the grid `spec`, the weight [..., out, in], the
    activations x): (its result, the residual: the weight, from which the backward computes again what was clipped; None
    if gradients are not clipped)."""
    return straight_through(spec, weight, x), weight if spec.clips else None


def _straight_through_bwd(spec: FakeQuant, weight: jax.Array | None, dweight: jax.Array):
    """The backward rule of `straight_through`: (the gradient of the weight, None for x). The gradient is dweight, with
    zeros where the weight is outside the grid's range if gradients are clipped. spec: the grid. weight: what the
    forward saved, the weight if gradients are clipped, else None. dweight: [..., out, in], the gradient of the rounded
    weight."""
    if weight is None:
        return dweight, None
    tied, dweight = optimization_barrier((weight, dweight))
    return jnp.where(spec.within(tied), dweight, 0), None


straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def unclipped_gradients[A](spec: FakeQuant, merge: Callable[[A], jax.Array], lora: A, dmerged: jax.Array) -> A:
    """The gradient of an adapter through a merged weight that is rounded to the grid `spec`, as a pytree like the
    adapter. The rounding passes the gradient where the merged weight is in the grid's range, and none elsewhere. The
    backwards of linears and experts with clipped gradients call it.

    Args:
      merge: (the adapter) -> the merged weight, float32[out, in], of one linear or one expert.
      lora: the adapter, a pytree such as LoraWeights.
      dmerged: [out, in] in any floating-point dtype, the gradient of the rounded weight.
    """
    merged, pullback = jax.vjp(merge, lora)
    (dlora,) = pullback(jnp.where(spec.within(merged), dmerged, 0).astype(merged.dtype))
    return dlora


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapter_gradients(out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Returns `out`, a linear's output [..., out], unchanged. In the backward the adapter's matrices a [r, in] and b
    [out, r] get the gradients that the term `scale b a x` would give, so that the adapter trains although `out` was
    computed from the rounded merged weight. Linears call it with straight-through gradients and without dropout. x:
    [..., in], the linear's input, which gets no gradient here. scale: the adapter's scale."""
    del x, a, b, scale
    return out


def _adapter_gradients_bwd(scale, residuals, dout):
    """The backward rule of `adapter_gradients`: (dout itself for out, None for x, the gradients of a and b that the
    term `scale b a x` would give, in the dtypes of a and b). scale: the adapter's scale. residuals: (x, a, b) of the
    forward. dout: [..., out], the gradient of `out`."""
    x, a, b = residuals
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dy, x = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])

    def product(left, right, dtype=x.dtype):
        """The matrix product left @ right, with `dtype` as the dtype of its sums and of the result."""
        return jnp.matmul(left, right, precision=precision, preferred_element_type=dtype)

    inner = product(x, a.astype(x.dtype).T)
    dinner = product(dy, b.astype(x.dtype))
    da, db = product(dinner.T, x, a.dtype), product(dy.T, inner, b.dtype)
    return dout, None, scale * da, scale * db


adapter_gradients.defvjp(lambda out, x, a, b, scale: (out, (x, a, b)), _adapter_gradients_bwd)


@jax.custom_vjp
def gradients_of(out: jax.Array, term: jax.Array) -> jax.Array:
    """Returns the array `out` unchanged. In the backward the gradient of the result is passed to `out` and also to
    `term`, an array of the same shape, whose value is not used. So, with straight-through gradients, the adapters of
    experts get the gradients of the term that they would add, although `out` was computed from their rounded merged
    weights."""
    del term
    return out


gradients_of.defvjp(lambda out, term: (out, None), lambda _, dout: (dout, dout))


@jax.custom_vjp
def magnitude_gradients(out: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Returns `out` unchanged: [..., out], the product of x and a rounded merged weight with DoRA, without the bias and
    with dropout's noise if there is dropout. In the backward the magnitude [out] gets its gradient: the merged weight's
    rows are proportional to it, and so are the rounded rows, because scales are proportional to their largest numbers.
    A magnitude of 0 gets the gradient 0. Linears call it with straight-through gradients."""
    del magnitude
    return out


def _magnitude_gradients_bwd(residuals, dout):
    """The backward rule of `magnitude_gradients`: (dout, the sum of dout * out over tokens divided by the magnitude). A
    magnitude of 0 gets 0. The sums are in float32, the gradient in the magnitude's dtype. residuals: (out, magnitude)
    of the forward. dout: [..., out], the gradient of `out`."""
    out, magnitude = residuals
    sums = (dout.astype(jnp.float32) * out.astype(jnp.float32)).reshape(-1, out.shape[-1]).sum(0)
    return dout, jnp.where(magnitude == 0, 0, sums / jnp.where(magnitude == 0, 1, magnitude)).astype(magnitude.dtype)


magnitude_gradients.defvjp(lambda out, magnitude: (out, (out, magnitude)), _magnitude_gradients_bwd)


def adapter_noise(
    x: jax.Array, dropped: jax.Array, a: jax.Array, b: jax.Array, scale: float, both: bool = False
) -> jax.Array:
    """What dropout adds to a product with a rounded merged weight: the adapter's term `scale b a x` with dropout minus
    the term without it, whose mean over masks is zero. [..., out] in x's dtype. Both x and `dropped` get gradients.
    Linears add it to the product; with straight-through gradients a and b get all their gradients by it.

    Args:
      x: [..., in], the linear's input.
      dropped: the same after dropout.
      a: [r, in].
      b: [out, r].
      scale: the adapter's.
      both: True: a and b get the gradients of both terms, which are zero on average, for products whose weight passes
        its own gradient to them (clipped gradients). False: only those of the term with dropout.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def term(x, a, b):
        """The adapter's term, scale * b (a x), [..., out] in x's dtype."""
        inner = jnp.matmul(x, a.astype(x.dtype).T, precision=precision)
        return scale * jnp.matmul(inner, b.astype(x.dtype).T, precision=precision)

    return term(dropped, a, b) - term(x, *((a, b) if both else jax.lax.stop_gradient((a, b))))
