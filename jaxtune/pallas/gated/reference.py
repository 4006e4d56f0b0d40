"""The gated activation and its gradients in plain JAX (`gated_backward`), with which the kernel's results are compared,
and which computes the calls that the kernel refuses; ACTIVATIONS has the activations by name, for models too."""

from __future__ import annotations

import functools

import jax

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def gated_backward(gate, up, dgated, activation: str):
    """Computes (activation(gate) * up, the gradient of gate, the gradient of up) in plain JAX, all three in the shape
    and dtype of the arguments. gate and up are arrays of one shape and dtype, and dgated, the gradient of
    activation(gate) * up, is like them. activation: a key of ACTIVATIONS. This plain implementation runs where the
    kernel refuses a call, and the kernel is compared with it."""
    gated, pullback = jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)
    return gated, *pullback(dgated)
