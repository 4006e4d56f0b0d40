"""The gated activation and its gradients in plain jnp, with which the kernels' results are compared, and which serves
calls that they refuse."""

from __future__ import annotations

import functools

import jax

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def gated_backward(gate, up, dgated, activation: str):
    """(activation(gate) * up, dgate, dup) from gate, up and dgated, the gradient of the first, in plain jnp.
    activation: a key of ACTIVATIONS."""
    gated, pullback = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    return gated, *pullback(dgated)
