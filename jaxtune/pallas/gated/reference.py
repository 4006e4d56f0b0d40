"""The gated activation and its backward in plain jnp."""

from __future__ import annotations

import functools

import jax

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def gated_backward(gate, up, dgated, activation: str):
    """(gated, dgate, dup) from gate, up and the gradient dgated, in plain jnp; see api.gated_backward."""
    gated, pullback = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    return gated, *pullback(dgated)
