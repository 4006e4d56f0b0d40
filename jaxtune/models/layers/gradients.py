"""Gradients of a layer's tensors, in which None is zero."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtune.system import private_jax


def pulled_back(pullback: Callable, gradients) -> tuple:
    """A jax.vjp's gradients of each argument, with None for tensors of the first that it does not read: zeros would be
    added, and a barrier between would hide from XLA that they are.
    """
    first, *of_inputs = pullback(gradients)
    leaves, structure = jax.tree.flatten(first)
    read = private_jax.read_by(pullback)[: len(leaves)]
    first = structure.unflatten([leaf if is_read else None for leaf, is_read in zip(leaves, read, strict=True)])
    return first, *of_inputs


def zeros_of_read(function: Callable, tensors, *shapes):
    """Zeros for the tensors, its first argument, that the function reads, and None for others; only traced."""
    leaves, structure = jax.tree.flatten(tensors)
    read: list[bool] = []

    def look(*values):
        read.extend(private_jax.read_by(jax.vjp(function, tensors, *values)[1])[: len(leaves)])

    jax.eval_shape(look, *shapes)
    pairs = zip(leaves, read, strict=True)
    return structure.unflatten([jnp.zeros_like(leaf) if is_read else None for leaf, is_read in pairs])


def added(total, more):
    """The sum of two trees of gradients, in which None is zero."""
    if total is None or more is None:
        return more if total is None else total
    return jax.tree.map(
        lambda a, b: b if a is None else a if b is None else a + b, total, more, is_leaf=lambda leaf: leaf is None
    )


def with_zeros(total, tensors):
    """The gradients of `tensors` with zeros for None."""
    return jax.tree.map(
        lambda gradient, tensor: jnp.zeros_like(tensor) if gradient is None else gradient,
        total,
        tensors,
        is_leaf=lambda leaf: leaf is None,
    )
