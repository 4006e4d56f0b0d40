"""Within `exact` operations give a token's numbers bits that do not depend on how many rows or tokens are computed,
where in a row they stand, and whether a row is trained, prefilled or decoded. On a GPU the kernels of triton.py compute
them. On a CPU, whose products and reductions choose their order by shape, they are loops over elementwise steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.one_order import functions, triton

_STEP = 16  # columns that are added in one step of a loop


@contextlib.contextmanager
def exact(enabled: bool = True) -> Iterator[None]:
    """What is traced within adds up in one order; False: as usual."""
    with dispatch.in_one_order(enabled):
        yield


def is_exact() -> bool:
    """Whether `exact` surrounds the trace."""
    return bool(dispatch.in_one_order.value)


def runs_kernels() -> bool:
    """Whether the operations have kernels where `exact` surrounds the trace: on a GPU."""
    return is_exact() and targets.here() is not None


def exactly_if[**P, R](enabled: bool, function: Callable[P, R]) -> Callable[P, R]:
    """The function, if enabled with its trace within `exact`."""
    if not enabled:
        return function

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        with exact(enabled):
            return function(*arguments, **options)

    return run


def of_order[**P](computed: Callable[P, jax.Array], usual: Callable[P, jax.Array]) -> Callable[P, jax.Array]:
    """`computed` within `exact` on a CPU, whose own functions have other last bits by shape; otherwise `usual`."""

    @functools.wraps(usual)
    def run(*arguments: P.args, **options: P.kwargs) -> jax.Array:
        return (computed if is_exact() and not runs_kernels() else usual)(*arguments, **options)

    return run


exp = of_order(functions.exp, jnp.exp)
log = of_order(functions.log, jnp.log)
tanh = of_order(functions.tanh, jnp.tanh)
sigmoid = of_order(functions.sigmoid, jax.nn.sigmoid)


@jax.custom_jvp
def total(x: jax.Array) -> jax.Array:
    """float32[...], the sum over the last axis: halves are added to each other, behind zeros up to a power of two."""
    x = x.astype(jnp.float32)
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


@total.defjvp
def _total_jvp(primals, tangents):
    return total(*primals), tangents[0].astype(jnp.float32).sum(-1)


def contracted(left: jax.Array, right: jax.Array) -> jax.Array:
    """float32, the sum of left * right over their last axes, which broadcast before it: one accumulator, ascending.

    left, right: [..., K]; a loop multiplies and adds 16 columns a step, one after another.
    """
    shape = jnp.broadcast_shapes(left.shape[:-1], right.shape[:-1])
    padding = -left.shape[-1] % _STEP

    def in_steps(array):
        array = jnp.pad(array.astype(jnp.float32), [(0, 0)] * (array.ndim - 1) + [(0, padding)])
        return jnp.moveaxis(array.reshape(*array.shape[:-1], -1, _STEP), (-2, -1), (0, 1))

    def add(so_far, columns):
        for a, b in zip(*columns, strict=True):
            so_far = so_far + a * b
        return so_far, None

    return jax.lax.scan(add, jnp.zeros(shape, jnp.float32), (in_steps(left), in_steps(right)))[0]


@jax.custom_vjp
def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32[..., out], x times the transpose of weight; its derivative is XLA's.

    x: [..., in]. weight: [out, in].
    """
    return _sums(x, weight, jnp.float32)


def _sums(x, weight, dtype) -> jax.Array:
    if targets.here() is None:
        return contracted(x[..., None, :], weight).astype(dtype)
    out = triton.product(x.reshape(-1, x.shape[-1]), weight, None, dtype)
    return out.reshape(*x.shape[:-1], len(weight))


def adapted(x: jax.Array, weight: jax.Array, adapter: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
    """[N, out] in x's dtype, x [N, in] times the transpose of weight [out, in]. Not differentiable.

    adapter: (x A^T times the scale [N, r], B [out, r]), whose product is rounded and added in x's dtype; None: there is
      none.
    """
    if targets.here() is not None:
        return triton.product(x, weight, adapter, x.dtype)
    out = _sums(x, weight, x.dtype)
    return out if adapter is None else out + _sums(*adapter, x.dtype)


def _product_bwd(operands, dout):
    return jax.vjp(lambda x, weight: _plain_product(x, weight), *operands)[1](dout)


def _plain_product(x, weight):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision, preferred_element_type=jnp.float32)


product.defvjp(lambda x, weight: (product(x, weight), (x, weight)), _product_bwd)


def normaliser(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the largest score, the logarithm of the sum of exp(score - largest)), float32[...], over the last axis."""
    top = scores.max(-1)
    return top, log(total(exp(scores - top[..., None])))


def tempered(scores: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """Times the rounded inverse, as XLA may divide by a constant."""
    return scores * (jnp.float32(1.0) / jnp.asarray(temperature, jnp.float32))


def log_probabilities(
    logits: jax.Array, tokens: jax.Array, temperature: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """(log-probabilities of tokens under softmax(logits / temperature) float32[N, K], log-sum-exp float32[N]).

    logits: float32[N, size or more]. tokens: int32[N, K]. temperature: float32[N].
    """
    if targets.here() is not None:
        return triton.log_probabilities(logits, tokens, temperature, size)
    scores = tempered(logits[:, :size], temperature[:, None])
    top, log_sum = normaliser(scores)
    of_tokens = jnp.take_along_axis(scores, tokens, axis=1)
    return (of_tokens - top[:, None]) - log_sum[:, None], top + log_sum


def softmax(scores: jax.Array) -> jax.Array:
    """float32[..., K] over the last axis."""
    weights = exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights / total(weights)[..., None]
