"""Muon (Keller Jordan; arXiv 2502.16982): the momentum of a matrix, made nearly orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

# An iteration x -> a x + b (x x^T) x + c (x x^T)^2 x on singular values up to 1 never gives one above 1.21. Times 0.2
# and the root of a side below 2^24.
LARGEST_DIRECTION = 1024.0
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LIKE_ADAM = 0.2  # the root mean square of AdamW's updates, by which one learning rate serves both


class MuonState(NamedTuple):
    """Trees of the parameters' structure, beside the number of updates made."""

    count: jax.Array
    m: optax.Updates  # the momentum, or Adam's first moment; float32
    v: optax.Updates  # Adam's second moment; float32[0] of a tensor that Muon updates


def orthogonal(x: jax.Array) -> jax.Array:
    """The matrices of [..., m, n] with singular values near 1, float32, by Newton-Schulz in bfloat16."""
    tall = x.shape[-2] > x.shape[-1]
    x = (jnp.swapaxes(x, -1, -2) if tall else x).astype(jnp.float32)
    x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)).astype(jnp.bfloat16)
    a, b, c = _COEFFICIENTS

    def product(left, right):
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    for _ in range(_ITERATIONS):
        square = product(x, jnp.swapaxes(x, -1, -2)).astype(jnp.bfloat16)
        terms = (b * square.astype(jnp.float32) + c * product(square, square)).astype(jnp.bfloat16)
        x = (a * x.astype(jnp.float32) + product(terms, x)).astype(jnp.bfloat16)
    return (jnp.swapaxes(x, -1, -2) if tall else x).astype(jnp.float32)


def _matrices(x: jax.Array) -> jax.Array:
    """[..., m, n]: a convolution's kernel [out, channels, frames, rows, columns] as the matrix of its product."""
    return x.reshape(len(x), -1) if x.ndim == 5 else x


def scale_by_muon(
    momentum: float, beta1: float, beta2: float, eps: float, which: Callable[..., list[bool]]
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction, 0.2 sqrt(longer side) times an orthogonal matrix with Nesterov momentum, for tensors that
    `which` marks; Adam's for others. A list of tensors has no names: its update needs `decayed` and `embeddings`.

      momentum: Muon's. beta1, beta2, eps: Adam's, for the other tensors.
    """

    def init(params):
        leaves, structure = jax.tree.flatten(params)
        second = [
            jnp.zeros(0 if matrix else leaf.shape, jnp.float32)
            for leaf, matrix in zip(leaves, which(params), strict=True)
        ]
        first = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return MuonState(jnp.zeros((), jnp.int32), first, jax.tree.unflatten(structure, second))

    def update(updates, state, params=None, *, decayed=None, embeddings=None, **unused):
        del unused
        count = jnp.asarray(optax.safe_increment(state.count))
        correction1, correction2 = (
            -jnp.expm1(count * jnp.float32(math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
        )

        def one(is_matrix, g, m, v):
            if is_matrix:
                m = momentum * m + (1 - momentum) * g
                matrices = _matrices(momentum * m + (1 - momentum) * g)
                size = _LIKE_ADAM * math.sqrt(max(matrices.shape[-2:]))
                return (size * orthogonal(matrices)).reshape(g.shape), m, v
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            return m / correction1 / (jnp.sqrt(v / correction2) + eps), m, v

        leaves, structure = jax.tree.flatten(updates)
        moments = map(jax.tree.leaves, (state.m, state.v))
        rows = zip(which(params, decayed, embeddings), leaves, *moments, strict=True)
        direction, m, v = (
            jax.tree.unflatten(structure, column) for column in zip(*(one(*r) for r in rows), strict=True)
        )
        return direction, MuonState(count, m, v)

    return optax.GradientTransformationExtraArgs(init, update)
