"""A model taken apart for the sampler's programs: its Structure, which is static, and the list of its arrays, of which
the plain adapters of linears are cast to the compute dtype. `flattened` does it for a sampler, when it is made and when
its weights are updated; `structure_of` makes the Structure, and `rounded_places` finds the arrays that are cast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import linears
from jaxtune.models.placement import partition


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """A model without its arrays: the static argument of the sampler's programs. The programs get the arrays apart, as
    the argument `leaves`, and build the model from both (`model`). It is compared by identity, so `structure_of` makes
    it: programs are compiled again for another object."""

    graph: nnx.GraphDef  # the model's structure
    treedef: Hashable  # the tree structure of nnx.state(model), by which the list of arrays becomes that state again
    config: DecoderConfig  # the model's config

    def model(self, leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Decoder:
        """Builds the model from its arrays; the programs call it while they are traced, and plans with shapes alone.
        leaves: in the order of jax.tree.leaves(nnx.state(model)); jax.ShapeDtypeStructs give a model without
        numbers."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


@functools.lru_cache(32)
def structure_of(graph: nnx.GraphDef, treedef: Hashable, config: DecoderConfig) -> Structure:
    """The Structure of a model; equal arguments give the same object (of the last 32). graph is the model's
    nnx.GraphDef, treedef the tree structure of its state, and config its DecoderConfig. `flattened` and slots_for call
    it. Programs are looked up by the object's identity: comparing two descriptions of a deep model would take the host
    as long as the device takes for a token."""
    return Structure(graph, treedef, config)


def flattened(model: Decoder) -> tuple[Structure, list[jax.Array]]:
    """Takes a model apart for the programs: (its Structure, which has no arrays and is their static argument, the list
    of its arrays). The A and B of plain adapters of linears (`_rounded_sides`) are cast to the compute dtype, in new
    arrays; all others are the model's own. The sampler does so once for the weights of a model and not for each call of
    a program, because flattening a deep model takes the host as long as the device takes for many tokens.

    Raises:
      ValueError: weights are divided over devices.
    """
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    partition.require_undivided(leaves, "Sampler")
    structure = structure_of(graph, treedef, model.config)
    places = rounded_places(structure, tuple(leaf.shape for leaf in leaves))
    places = [place for place in places if leaves[place].dtype != model.dtype]
    for place, value in zip(places, _cast([leaves[place] for place in places], model.dtype), strict=True):
        leaves[place] = value
    return structure, leaves


@functools.lru_cache(32)
def rounded_places(structure: Structure, shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    """The indices of the arrays that a sampler casts to the compute dtype (_rounded_sides) among the model's arrays in
    the order of jax.tree.leaves, for `flattened`. They are computed once for models of one structure. shapes: the
    shapes of all arrays, in that order."""
    leaves = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    place_of = {id(leaf): place for place, leaf in enumerate(leaves)}
    return [place_of[id(side.get_value())] for side in _rounded_sides(structure.model(leaves))]


def _rounded_sides(model: Decoder) -> list[nnx.Variable]:
    """The variables of `model` that a sampler casts to the compute dtype: the A and B of the adapters of its linears.
    Each product would cast them, so that it computes the same with them, and a decoding step needs no casts.

    Adapters whose float32 numbers are used too are not among them: those with DoRA, and those of linears that round
    their weights or, by a precision map, multiply in a dtype of their own. Neither are adapters of experts."""
    plain = [linear for _, linear in linears(model) if linear.fake_quant is None and linear.compute is None]
    loras = [linear.lora for linear in plain if linear.lora is not None and linear.lora.magnitude is None]
    return [side for lora in loras for side in (lora.a, lora.b)]


@functools.partial(jax.jit, static_argnums=1)
def _cast(arrays: list[jax.Array], dtype: str) -> list[jax.Array]:
    """The arrays, cast to `dtype` by one compiled program, so that `flattened` dispatches one and not one for each."""
    return [array.astype(dtype) for array in arrays]
