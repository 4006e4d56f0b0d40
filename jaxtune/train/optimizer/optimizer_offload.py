"""Optimizer states in pinned host memory: each tensor's states are copied to the device for its update, and back.

While a group of tensors is updated, the next one's states arrive and the last one's leave; optimization barriers start
both copies before the update and end them after it. Updates are short, and XLA (jaxlib 0.11.2) queues copies of both
directions in one queue, so the whole takes their sum on the link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.lax import optimization_barrier
from jax.sharding import Sharding

HOSTED_BYTES = 1 << 16  # smaller arrays (norms, counts) stay on the device: a transfer costs more than it saves
GROUP_BYTES = 1 << 29  # bytes of a group's states; a larger tensor is a group of its own

# A function (index, parameter, states, gradient) -> (new parameter, new states) that updates one tensor.
Work = Callable[[int, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def is_hosted(leaf: Any) -> bool:
    """Whether a state array is on the host: from 64 KiB."""
    return leaf.size * leaf.dtype.itemsize >= HOSTED_BYTES


def hosted_bytes(opt_state: Any) -> int:
    """Bytes of the state arrays on the host; may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state) if is_hosted(leaf))


def shardings(opt_state: Any, device: Sharding) -> Any:
    """A sharding for each array: pinned host memory for large ones, else `device`."""
    host = device.with_memory_kind("pinned_host")
    return jax.tree.map(lambda leaf: host if is_hosted(leaf) else device, opt_state)


def moved(opt_state, target_shardings):
    """The state with each array in the memory of its sharding (from `shardings`). A copied array is deleted, so that no
    state is on the device twice.
    """

    def one(leaf: jax.Array, sharding: Sharding) -> jax.Array:
        if _on_host(leaf.sharding) == _on_host(sharding):
            return leaf
        copy = jax.block_until_ready(jax.device_put(leaf, sharding))
        leaf.delete()
        return copy

    return jax.tree.map(one, opt_state, target_shardings)


def _on_host(sharding: Sharding) -> bool:
    return sharding.memory_kind == "pinned_host"


def like_parameters(structure) -> Callable[[Any], bool]:
    """Recognises trees of the parameters' structure, such as moments."""
    return lambda tree: jax.tree.structure(tree) == structure


def states_of(opt_state: Any, structure: Any, index: int) -> Any:
    """The state of parameter `index` (in the order of jax.tree.leaves): each subtree of the parameters' `structure`,
    such as the first moments, becomes a list of one array; shared values such as a count stay.
    """
    is_moments = like_parameters(structure)
    return jax.tree.map(
        lambda tree: [jax.tree.leaves(tree)[index]] if is_moments(tree) else tree, opt_state, is_leaf=is_moments
    )


def joined(opt_state: Any, structure: Any, states: list[Any]) -> Any:
    """The inverse of `states_of`, from the states of all parameters in order. opt_state: gives the structure; may be
    abstract. Shared values are the last parameter's.
    """
    is_moments = like_parameters(structure)
    trees, outline = jax.tree.flatten(opt_state, is_leaf=is_moments)
    columns = [outline.flatten_up_to(state) for state in states]
    subtrees = [
        jax.tree.unflatten(structure, [column[index][0] for column in columns])
        if is_moments(tree)
        else columns[-1][index]
        for index, tree in enumerate(trees)
    ]
    return jax.tree.unflatten(outline, subtrees)


def first_states(optimizer: optax.GradientTransformation, parameters: Any, device: Sharding) -> Any:
    """optimizer.init one parameter at a time, large arrays in pinned host memory, so that the device never has more
    than one parameter's. device: sharding of the others.
    """
    leaves, structure = jax.tree.flatten(parameters)
    states = []
    for leaf in leaves:
        state = optimizer.init([leaf])
        states.append(jax.block_until_ready(jax.device_put(state, shardings(state, device))))
    return joined(jax.eval_shape(optimizer.init, parameters), structure, states)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """At most one update and one copy in each direction at a time: indices of groups, or None."""

    update: int | None  # the group that is updated
    incoming: int | None  # the group whose states are copied to the device
    outgoing: int | None  # the group whose states are copied to the host


def _stages(sizes: list[int]) -> list[_Stage]:
    """The stages for groups with these bytes; a group above GROUP_BYTES is alone on the device."""
    stages, pending = [_Stage(None, 0, None)], None
    for group in range(len(sizes)):
        following = group + 1 if group + 1 < len(sizes) else None
        if max(sizes[group : group + 2]) > GROUP_BYTES:
            stages += [_Stage(group, None, pending), _Stage(None, following, group)]
            pending = None
        else:
            stages.append(_Stage(group, following, pending))
            pending = group
    return stages if pending is None else [*stages, _Stage(None, None, pending)]


def _groups(sizes: list[int]) -> list[list[int]]:
    """Tensors in groups of at most 512 MiB of hosted states, `sizes` of each, or one larger tensor."""
    groups: list[list[int]] = [[]]
    for tensor, size in enumerate(sizes):
        if groups[-1] and sum(sizes[member] for member in groups[-1]) + size > GROUP_BYTES:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def update_by_tensor(work: Work, parameters: Any, opt_state: Any, gradients: Any, offload: bool) -> tuple[Any, Any]:
    """Updates each tensor by `work`, in order: (new parameters, new states). Within jit. offload: arrays of 64 KiB or
    more in the states are in host memory, and on the device only around their group's update.
    """
    weights, structure = jax.tree.flatten(parameters)
    slopes = jax.tree.leaves(gradients)
    outline = jax.tree.structure(states_of(opt_state, structure, 0))
    leaves = [jax.tree.leaves(states_of(opt_state, structure, tensor)) for tensor in range(len(weights))]
    hosted_indices = [
        [index for index, leaf in enumerate(tensor_leaves) if offload and is_hosted(leaf)] for tensor_leaves in leaves
    ]
    sizes = [hosted_bytes(tensor_leaves) if offload else 0 for tensor_leaves in leaves]
    groups = _groups(sizes) if offload else [[tensor] for tensor in range(len(weights))]

    def hosted(group: int | None) -> list[list[jax.Array]]:
        return [[leaves[tensor][index] for index in hosted_indices[tensor]] for tensor in _members(groups, group)]

    def replace(group: int | None, arrays: list[list[jax.Array]]) -> None:
        for tensor, values in zip(_members(groups, group), arrays, strict=True):
            for index, value in zip(hosted_indices[tensor], values, strict=True):
                leaves[tensor][index] = value

    last: list[int] = []  # tensors of the previous stage, for which this one waits
    for stage in _stages([sum(sizes[tensor] for tensor in group) for group in groups]):
        tensors = _members(groups, stage.update)
        gate = (
            [(weights[tensor], slopes[tensor]) for tensor in tensors],
            hosted(stage.incoming),
            hosted(stage.outgoing),
            [weights[tensor] for tensor in last],
        )
        pairs, incoming, outgoing, awaited = optimization_barrier(gate)
        for tensor, weight in zip(last, awaited, strict=True):
            weights[tensor] = weight
        incoming = jax.device_put(incoming, jax.memory.Space.Device)
        outgoing = jax.device_put(outgoing, jax.memory.Space.Host)
        results = []
        for tensor, (weight, slope) in zip(tensors, pairs, strict=True):
            new, state = work(tensor, weight, jax.tree.unflatten(outline, leaves[tensor]), slope)
            results.append((new, jax.tree.leaves(state)))
        # The two transfers start independently.
        incoming, outgoing, results = optimization_barrier((incoming, outgoing, results))
        replace(stage.incoming, incoming)
        replace(stage.outgoing, outgoing)
        for tensor, (new, state) in zip(tensors, results, strict=True):
            weights[tensor], leaves[tensor] = new, state
        last = tensors or last
    new_states = [jax.tree.unflatten(outline, tensor_leaves) for tensor_leaves in leaves]
    return jax.tree.unflatten(structure, weights), joined(opt_state, structure, new_states)


def _members(groups: list[list[int]], group: int | None) -> list[int]:
    return [] if group is None else groups[group]
