"""Adam with 8-bit states (arXiv 2110.02861), with the maths of bitsandbytes' AdamW8bit: each moment is one byte per
element and one float32 per block of 256 (blockwise8.py). The direction is computed from the moments before they are
rounded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtune.models.placement.partition import TENSORS
from jaxtune.pallas import adam8 as kernel
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats.blockwise8 import BLOCK, SIGNED_ZERO

MIN_SIZE = 4096  # tensors with fewer elements have float32 moments


class Adam8State(NamedTuple):
    """Trees of the parameters' structure, beside `count`."""

    count: jax.Array  # int32: updates made; steps that were skipped (`finite` false) are not counted
    # first moments: uint8[blocks, 256], codes of the signed map, or float32 of the tensor's shape if it has less than
    # 4096 elements
    m: Any
    # the scales of `m`, the largest absolute value of each block: float32[blocks]; float32[0] where `m` is float32
    m_absmax: Any
    v: Any  # second moments: as `m`, but with codes of the map without negative values
    v_absmax: Any  # the scales of `v`, as `m_absmax`


def first_moments(params, zero_code: int) -> tuple[optax.Updates, optax.Updates]:
    """(moments of zeros, scales of their blocks) of the tensors `params`: uint8[blocks, 256] and float32[blocks]; below
    4096 elements float32 of the tensor's shape and float32[0]. zero_code: the byte that means 0.
    """

    def codes(p):
        if p.size < MIN_SIZE:
            return jnp.zeros(p.shape, jnp.float32)
        return jnp.full((-(-p.size // BLOCK), BLOCK), zero_code, jnp.uint8)

    def scales(p):
        return jnp.zeros(0 if p.size < MIN_SIZE else -(-p.size // BLOCK), jnp.float32)

    return jax.tree.map(codes, params), jax.tree.map(scales, params)


def scale_by_adam_8bit(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Adam's direction m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) in float32, with 2 + 8/256 bytes of state
    per element (small tensors: 8); the counterpart of optax.scale_by_adam.

    Its update also takes `scale`, a factor of the gradients, `finite` (False: the states stay and the direction must
    not be used) and `divided`, a bool for each gradient, whether it is divided over devices (None: none is).
    """

    def init(params):
        signed, unsigned = (first_moments(params, zero) for zero in (SIGNED_ZERO, 0))
        return Adam8State(jnp.zeros((), jnp.int32), *signed, *unsigned)

    def update(updates, state, params=None, *, scale=1.0, finite=True, divided=None, **unused):
        del params, unused
        count = jnp.asarray(optax.safe_increment(state.count))
        # 1 - beta^t by expm1, because a power near 1 loses digits in float32.
        correction1, correction2 = (
            -jnp.expm1(count * jnp.float32(math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
        )

        def one(in_parts, g, m, m_absmax, v, v_absmax):
            if m.dtype == jnp.uint8:
                table: dispatch.Table = {"mosaic": lambda: kernel.refusal(g, m), "reference": lambda: None}
                by_kernel = dispatch.choose("adamw_8bit", table, None) == "mosaic"
                numbers, options = (correction1, correction2, scale, finite), dict(betas=(beta1, beta2), eps=eps)
                if by_kernel:
                    return kernel.adam_update(
                        g, m, m_absmax, v, v_absmax, *numbers, divided=TENSORS if in_parts else None, **options
                    )
                return kernel.plain_update(g, m, m_absmax, v, v_absmax, *numbers, **options)
            g = g.astype(jnp.float32) * scale
            new_m = beta1 * m + (1 - beta1) * g
            new_v = beta2 * v + (1 - beta2) * g * g
            direction = new_m / correction1 / (jnp.sqrt(new_v) / jnp.sqrt(correction2) + eps)
            return direction, jnp.where(finite, new_m, m), m_absmax, jnp.where(finite, new_v, v), v_absmax

        leaves, structure = jax.tree.flatten(updates)
        states = (jax.tree.leaves(tree) for tree in state[1:])
        in_parts = [False] * len(leaves) if divided is None else divided
        results = [one(*tensors) for tensors in zip(in_parts, leaves, *states, strict=True)]
        direction, *moments = (jax.tree.unflatten(structure, column) for column in zip(*results, strict=True))
        return direction, Adam8State(jnp.where(finite, count, state.count), *moments)

    return optax.GradientTransformationExtraArgs(init, update)
