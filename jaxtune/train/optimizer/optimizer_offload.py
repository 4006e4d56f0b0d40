"""Optimizer states in pinned host memory (optim.offload, or the plan of an adapter's run): each tensor's states are
copied to the device for its update, and back. `first_states` makes the states, `shardings` says where each array is,
`moved` brings those of a checkpoint there, `hosted_bytes` says how much is on the host, `is_hosted` which arrays,
`states_of` and `joined` take the states of one tensor out of the whole and put them back, and `update_by_tensor` makes
an update, also for full fine-tuning whose states stay on the device.

Tensors are updated in groups (`_groups`), in stages (`_stages`). While a group is updated, the states of the next one
are copied to the device and those of the previous one to the host; optimization barriers start both copies before the
update and end both after it. An update takes much less time than its transfers, so the whole takes the time of the host
link in both directions: XLA (jaxlib 0.11.2) puts all copies of a program into one queue, in which copies to the host
and from the host do not overlap."""

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
    """Whether an array of the optimizer's state (`leaf`) is stored on the host with optim.offload: it has at least 64
    KiB. Smaller ones stay on the device, as `shardings`, `hosted_bytes` and `update_by_tensor` find by it."""
    return leaf.size * leaf.dtype.itemsize >= HOSTED_BYTES


def hosted_bytes(opt_state: Any) -> int:
    """The bytes of those arrays of the optimizer's state `opt_state`, which may be abstract, that are stored on the
    host with optim.offload: those of 64 KiB or more (`is_hosted`). The planner counts them, and groups are made by
    them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(opt_state) if is_hosted(leaf))


def shardings(opt_state: Any, device: Sharding) -> Any:
    """A tree of shardings, one for each array of the optimizer's state `opt_state`: arrays of 64 KiB or more get
    `device` with the memory kind pinned_host, and smaller ones get `device` itself. device: the sharding of arrays that
    are in device memory. Runs with optim.offload place new states by it, and compile their steps for it."""
    host = device.with_memory_kind("pinned_host")
    return jax.tree.map(lambda leaf: host if is_hosted(leaf) else device, opt_state)


def moved(opt_state, wanted):
    """The optimizer's state `opt_state`, read from a checkpoint, with each array in the memory that `wanted` names, the
    result of `shardings`. An array in the other memory is copied, and deleted when the copy is there, so that no state
    is on the device twice; the others stay as they are. A run whose plan was changed after the read calls it."""

    def one(leaf: jax.Array, sharding: Sharding) -> jax.Array:
        """`leaf`, or its copy in the memory of `sharding`."""
        if _on_host(leaf.sharding) == _on_host(sharding):
            return leaf
        copy = jax.block_until_ready(jax.device_put(leaf, sharding))
        leaf.delete()
        return copy

    return jax.tree.map(one, opt_state, wanted)


def _on_host(sharding: Sharding) -> bool:
    """Whether an array with this sharding is in pinned host memory; False if the sharding names no memory."""
    return sharding.memory_kind == "pinned_host"


def _like_parameters(structure) -> Callable[[Any], bool]:
    """A function that returns True for a tree with the tree structure of the parameters (`structure`), as the moments
    in an optimizer's state have it, and False for any other. `states_of` and `joined` find by it what has an array for
    each parameter."""
    return lambda tree: jax.tree.structure(tree) == structure


def states_of(opt_state: Any, structure: Any, index: int) -> Any:
    """The optimizer's state of one parameter alone, with which that parameter is updated: every subtree of `opt_state`
    that has the parameters' tree structure (`structure`), such as the first moments, becomes a list of one array, that
    of parameter `index` in the order of jax.tree.leaves. Values that all parameters share, such as a count, stay.
    `joined` is the inverse."""
    same = _like_parameters(structure)
    return jax.tree.map(lambda tree: [jax.tree.leaves(tree)[index]] if same(tree) else tree, opt_state, is_leaf=same)


def joined(opt_state: Any, structure: Any, parts: list[Any]) -> Any:
    """The inverse of states_of, by which first_states and update_by_tensor make their results: the state of all
    parameters, from those of each one.

    Args:
      opt_state: a state whose structure the result has; its arrays are not used and may be abstract.
      structure: the parameters' tree structure.
      parts: the state of each parameter, in order, as states_of returns it. Of values that all parameters share, such
        as a count, the last one's is used.
    """
    same = _like_parameters(structure)
    trees, outline = jax.tree.flatten(opt_state, is_leaf=same)
    columns = [outline.flatten_up_to(part) for part in parts]
    whole = [
        jax.tree.unflatten(structure, [column[place][0] for column in columns]) if same(tree) else columns[-1][place]
        for place, tree in enumerate(trees)
    ]
    return jax.tree.unflatten(outline, whole)


def first_states(optimizer: optax.GradientTransformation, parameters: Any, device: Sharding) -> Any:
    """The result of optimizer.init for a run with optim.offload, made one parameter at a time, so that the device never
    has more than one parameter's large states at once. Arrays of 64 KiB or more are in pinned host memory, smaller ones
    on the device. `parameters` may be abstract. device: the sharding of arrays that stay in device memory."""
    leaves, structure = jax.tree.flatten(parameters)
    parts = []
    for leaf in leaves:
        part = optimizer.init([leaf])
        parts.append(jax.block_until_ready(jax.device_put(part, shardings(part, device))))
    return joined(jax.eval_shape(optimizer.init, parameters), structure, parts)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """What happens at the same time in update_by_tensor, which goes through the list that `_stages` makes: at most one
    update and one copy in each direction. A group is a list of tensors that are updated in turn; a field has the index
    of a group, or None if there is nothing to do."""

    update: int | None  # the group that is updated
    incoming: int | None  # the group whose states are copied to the device
    outgoing: int | None  # the group whose states are copied to the host


def _stages(sizes: list[int]) -> list[_Stage]:
    """The stages of update_by_tensor, in their order, for groups whose states in host memory have these sizes in bytes:
    each says which group is updated, and which groups' states are copied to the device and to the host meanwhile. While
    a group of more than GROUP_BYTES is updated, no other group's states are on the device: its own are copied right
    before and right after its update."""
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
    """Divides the tensors, in their order, into groups: the indices of each group's tensors. update_by_tensor copies
    the states of a group between host and device at once, so that copies are large and the states on the device few. A
    group's states have at most GROUP_BYTES (512 MiB), or the group is one larger tensor. sizes: the bytes of each
    tensor's states that are in host memory."""
    groups: list[list[int]] = [[]]
    for tensor, size in enumerate(sizes):
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > GROUP_BYTES:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def update_by_tensor(work: Work, parameters: Any, opt_state: Any, gradients: Any, offload: bool) -> tuple[Any, Any]:
    """Updates every tensor by `work`, in order: returns (new parameters, new states), trees like the given ones. The
    train step calls it within jit, with optim.offload or where tensors are to be updated one by one. So it determines
    what the compiled update keeps on the device at a time.

    Args:
      work: updates one tensor: gets (its index, the parameter, its states as states_of returns them, its gradient), and
        returns (the new parameter, the new states).
      parameters, opt_state, gradients: trees of all tensors.
      offload: True: arrays of 64 KiB or more in opt_state and in the returned states are in host memory, and are on the
        device only around the update of their group of tensors. False: everything is on the device.
    """
    weights, structure = jax.tree.flatten(parameters)
    slopes = jax.tree.leaves(gradients)
    outline = jax.tree.structure(states_of(opt_state, structure, 0))
    leaves = [jax.tree.leaves(states_of(opt_state, structure, tensor)) for tensor in range(len(weights))]
    places = [[place for place, leaf in enumerate(of) if offload and is_hosted(leaf)] for of in leaves]
    sizes = [hosted_bytes(of) if offload else 0 for of in leaves]
    groups = _groups(sizes) if offload else [[tensor] for tensor in range(len(weights))]

    def hosted(group: int | None) -> list[list[jax.Array]]:
        """The large states (64 KiB or more) of each tensor of a group, as they are now, which are copied between host
        and device; [] if `group` is None."""
        return [[leaves[tensor][place] for place in places[tensor]] for tensor in _members(groups, group)]

    def replace(group: int | None, arrays: list[list[jax.Array]]) -> None:
        """Sets the large states of the tensors of a group to `arrays`, in the form that `hosted` returns: their copies
        on the other side of the link."""
        for tensor, values in zip(_members(groups, group), arrays, strict=True):
            for place, value in zip(places[tensor], values, strict=True):
                leaves[tensor][place] = value

    last: list[int] = []  # tensors of the previous stage, for which this one waits
    for stage in _stages([sum(sizes[tensor] for tensor in group) for group in groups]):
        tensors = _members(groups, stage.update)
        gate = (
            [(weights[tensor], slopes[tensor]) for tensor in tensors],
            hosted(stage.incoming),
            hosted(stage.outgoing),
            [weights[tensor] for tensor in last],
        )
        pairs, incoming, outgoing, done = optimization_barrier(gate)
        for tensor, weight in zip(last, done, strict=True):
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
    parts = [jax.tree.unflatten(outline, of) for of in leaves]
    return jax.tree.unflatten(structure, weights), joined(opt_state, structure, parts)


def _members(groups: list[list[int]], group: int | None) -> list[int]:
    """The indices of the tensors in one of the `groups`, that with the index `group`; [] if `group` is None, as where a
    stage of update_by_tensor has nothing to update or to copy."""
    return [] if group is None else groups[group]
