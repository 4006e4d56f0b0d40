"""Optimizer states in pinned host memory: each tensor's come to the device for its update, and go back (optim.offload).

The update goes tensor by tensor, in one order. While one tensor is updated, the states of the next ones are on their
way to the device and those of the last ones to the host; optimization_barriers hold what is in flight each way to
IN_FLIGHT_BYTES, or to one tensor. An update is nothing beside its transfers, so the whole takes the time of the link,
both ways at once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.lax import optimization_barrier
from jax.sharding import Sharding

HOSTED_BYTES = 1 << 16  # smaller arrays (norms, counts) stay on the device: a transfer costs more than it saves
IN_FLIGHT_BYTES = 1 << 30

# work(index, parameter, states, gradient) -> (new parameter, new states) of one tensor
Work = Callable[[int, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def is_hosted(leaf: Any) -> bool:
    """Whether an array of the optimizer's state is kept on the host; the same for each of the tensor's updates."""
    return leaf.size * leaf.dtype.itemsize >= HOSTED_BYTES


def hosted_bytes(opt_state: Any) -> int:
    """Bytes of the arrays, which may be abstract, that are kept on the host."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state) if is_hosted(leaf))


def shardings(opt_state: Any, device: Sharding) -> Any:
    """Where each array of the state lies, for devices as in `device`."""
    host = device.with_memory_kind("pinned_host")
    return jax.tree.map(lambda leaf: host if is_hosted(leaf) else device, opt_state)


def _like_parameters(structure) -> Callable[[Any], bool]:
    return lambda tree: jax.tree.structure(tree) == structure


def states_of(opt_state: Any, structure: Any, index: int) -> Any:
    """The state of an optimizer of one parameter: every tree like the parameters' holds its leaf `index` alone."""
    same = _like_parameters(structure)
    return jax.tree.map(lambda tree: [jax.tree.leaves(tree)[index]] if same(tree) else tree, opt_state, is_leaf=same)


def joined(opt_state: Any, structure: Any, parts: list[Any]) -> Any:
    """The whole state, as `opt_state` is built, from those of its tensors; what they share is the last one's."""
    same = _like_parameters(structure)
    trees, outline = jax.tree.flatten(opt_state, is_leaf=same)
    columns = [outline.flatten_up_to(part) for part in parts]
    whole = [
        jax.tree.unflatten(structure, [column[place][0] for column in columns]) if same(tree) else columns[-1][place]
        for place, tree in enumerate(trees)
    ]
    return jax.tree.unflatten(outline, whole)


def first_states(optimizer: optax.GradientTransformation, parameters: Any, device: Sharding) -> Any:
    """optimizer.init, each array where it belongs; on the device there is never more than one tensor's.

    parameters: may be abstract.
    """
    leaves, structure = jax.tree.flatten(parameters)
    parts = []
    for leaf in leaves:
        part = optimizer.init([leaf])
        parts.append(jax.block_until_ready(jax.device_put(part, shardings(part, device))))
    return joined(jax.eval_shape(optimizer.init, parameters), structure, parts)


def update_by_tensor(work: Work, parameters: Any, opt_state: Any, gradients: Any, offload: bool) -> tuple[Any, Any]:
    """(new parameters, new states): `work` on one tensor after the other.

    Args:
      offload: the large arrays of opt_state are on the host, as the result's are, and on the device for `work` only.
    """
    weights, structure = jax.tree.flatten(parameters)
    pairs = list(zip(weights, jax.tree.leaves(gradients), strict=True))
    count = len(pairs)
    outline = jax.tree.structure(states_of(opt_state, structure, 0))
    leaves = [jax.tree.leaves(states_of(opt_state, structure, index)) for index in range(count)]
    places = [[place for place, leaf in enumerate(of) if offload and is_hosted(leaf)] for of in leaves]
    sizes = [hosted_bytes(of) if offload else 0 for of in leaves]
    fetched = 0  # tensors whose states are on the device, or on their way to it
    leaving: collections.deque[int] = collections.deque()  # tensors whose states are on their way to the host

    def hosted(tensors):
        return [[leaves[tensor][place] for place in places[tensor]] for tensor in tensors]

    def replace(tensors, arrays):
        for tensor, values in zip(tensors, arrays, strict=True):
            for place, value in zip(places[tensor], values, strict=True):
                leaves[tensor][place] = value

    for index in range(count):
        wanted = index + 1
        while wanted < count and sum(sizes[index + 1 : wanted + 1]) <= IN_FLIGHT_BYTES:
            wanted += 1
        starting, fetched = range(fetched, wanted), wanted
        landing = []
        while sum(sizes[tensor] for tensor in leaving) > IN_FLIGHT_BYTES:
            landing.append(leaving.popleft())
        # One after the other: this tensor, and the transfers that start with it, wait for the last one's update and
        # for the transfers that must have ended.
        last = slice(max(index - 1, 0), index)
        gate = (pairs[index], hosted(starting), hosted(landing), weights[last])
        (weight, gradient), coming, landed, weights[last] = optimization_barrier(gate)
        replace(starting, jax.device_put(coming, jax.memory.Space.Device))
        replace(landing, landed)
        weights[index], state = work(index, weight, jax.tree.unflatten(outline, leaves[index]), gradient)
        leaves[index] = jax.tree.leaves(state)
        replace([index], jax.device_put(hosted([index]), jax.memory.Space.Host))
        leaving.append(index)
    parts = [jax.tree.unflatten(outline, of) for of in leaves]
    return jax.tree.unflatten(structure, weights), joined(opt_state, structure, parts)
