"""Lion (arXiv 2302.06675) with 8-bit momentum, by the maths of bitsandbytes' Lion8bit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtune.pallas.formats.blockwise8 import SIGNED_ZERO, decode, encode, in_blocks
from jaxtune.train.optimizer.adam8 import first_moments


class Lion8State(NamedTuple):
    """Trees of the parameters' structure."""

    m: optax.Updates  # uint8[blocks, 256], codes of the signed map, or float32 of a tensor of less than 4096 elements
    m_absmax: (
        optax.Updates
    )  # float32[blocks], the largest absolute value of each block; float32[0] where `m` is float32


def scale_by_lion_8bit(beta1: float, beta2: float) -> optax.GradientTransformationExtraArgs:
    """Lion's direction sign(beta1 m + (1 - beta1) g); beta2 decays m, in 1 + 4/256 bytes an element. Its update takes
    `scale`, a factor of the gradients, and `finite`; False: the states stay.
    """

    def update(updates, state, params=None, *, scale=1.0, finite=True, **unused):
        del params, unused

        def one(g, m, m_absmax):
            coded = m.dtype == jnp.uint8
            old = decode(m, m_absmax, signed=True) if coded else m
            gradient = (in_blocks(g) if coded else g.astype(jnp.float32)) * scale
            direction = jnp.sign(beta1 * old + (1 - beta1) * gradient)
            new = beta2 * old + (1 - beta2) * gradient
            news = encode(new, signed=True) if coded else (new, m_absmax)
            if coded:
                direction = direction.reshape(-1)[: g.size].reshape(g.shape)
            return direction, *(jnp.where(finite, n, o) for n, o in zip(news, (m, m_absmax), strict=True))

        leaves, structure = jax.tree.flatten(updates)
        results = [one(*row) for row in zip(leaves, *map(jax.tree.leaves, state), strict=True)]
        direction, *moments = (jax.tree.unflatten(structure, column) for column in zip(*results, strict=True))
        return direction, Lion8State(*moments)

    return optax.GradientTransformationExtraArgs(lambda params: Lion8State(*first_moments(params, SIGNED_ZERO)), update)
