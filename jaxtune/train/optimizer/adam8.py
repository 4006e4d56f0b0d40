"""Adam with 8-bit states (arXiv 2110.02861), with the maths of bitsandbytes' AdamW8bit: `scale_by_adam_8bit` makes the
optax transformation, of which `make_optimizer` (optim.py) makes adamw_8bit, and `Adam8State` is its state.

Each moment is stored as one byte per element and one float32 per block of 256 elements (blockwise8.py), or in float32
for a tensor of less than 4096 elements. A step decodes the moments, updates them, computes Adam's direction from them
before they are rounded, and encodes them. For moments in bytes one kernel does this where there is one (pallas/adam8),
else XLA. The direction is float32 and without the learning rate, by which the caller multiplies it."""

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
    """The state of 8-bit Adam (`scale_by_adam_8bit`), which optim.name=adamw_8bit has: a count, and the two moments of
    each tensor with the scales of their blocks. Each field but `count` is a tree of the parameters' structure."""

    count: jax.Array  # int32: updates made; steps that were skipped (`finite` false) are not counted
    # first moments: uint8[blocks, 256], codes of the signed map, or float32 of the tensor's shape if it has less than
    # 4096 elements
    m: Any
    # the scales of `m`, the largest absolute value of each block: float32[blocks]; float32[0] where `m` is float32
    m_absmax: Any
    v: Any  # second moments: as `m`, but with codes of the map without negative values
    v_absmax: Any  # the scales of `v`, as `m_absmax`


def first_moments(params, zero_code: int) -> tuple[optax.Updates, optax.Updates]:
    """(moments of zeros for the tensors `params`, their blocks' scales): uint8[blocks, 256] and float32[blocks], or
    float32 of the tensor's shape and float32[0] below 4096 elements. zero_code: the byte that means 0."""

    def codes(p):
        if p.size < MIN_SIZE:
            return jnp.zeros(p.shape, jnp.float32)
        return jnp.full((-(-p.size // BLOCK), BLOCK), zero_code, jnp.uint8)

    def scales(p):
        return jnp.zeros(0 if p.size < MIN_SIZE else -(-p.size // BLOCK), jnp.float32)

    return jax.tree.map(codes, params), jax.tree.map(scales, params)


def scale_by_adam_8bit(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Adam's direction m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) with 8-bit states; the counterpart of
    optax.scale_by_adam. `make_optimizer` adds weight decay and the learning rate to make adamw_8bit of it.

    The state (Adam8State) takes 2 + 8/256 bytes per element, and 8 bytes in tensors of less than 4096 elements. The
    direction is float32, computed from moments that are not yet rounded to 8 bits in this step, and is not multiplied
    by minus the learning rate. The update takes three more keyword arguments: `scale`, a factor of the gradients (1 by
    default); `finite`, a bool (True by default): if it is false, the states stay as they are, and the direction must
    not be used; and `divided`, a bool for each gradient, whether it is divided over devices (None: none is), which the
    kernel must know. Other arguments are ignored.

    Args:
      beta1, beta2: decay rates of the first and second moments.
      eps: is added to the denominator.
    """

    def init(params):
        signed, unsigned = (first_moments(params, zero) for zero in (SIGNED_ZERO, 0))
        return Adam8State(jnp.zeros((), jnp.int32), *signed, *unsigned)

    def update(updates, state, params=None, *, scale=1.0, finite=True, divided=None, **others):
        """(directions, new Adam8State) for the gradients `updates` and the Adam8State `state`. The directions are a
        tree like the gradients, in float32, without the learning rate. scale: a factor of the gradients. finite: a
        bool; if it is false, the new state equals the old one. divided: a bool for each gradient, whether it is divided
        over devices; None: none is. params, others: not used."""
        del params, others
        count = jnp.asarray(optax.safe_increment(state.count))
        # 1 - beta^t by expm1, because a power near 1 loses digits in float32.
        correction1, correction2 = (
            -jnp.expm1(count * jnp.float32(math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
        )

        def one(in_parts, g, m, m_absmax, v, v_absmax):
            """(direction, and the new m, m_absmax, v, v_absmax) of one tensor with the gradient `g`, by the kernel
            where there is one. in_parts: whether the tensor is divided over devices."""
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
