"""A model taken apart for the sampler's programs: its static Structure, and the list of its arrays."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.attention import Attention
from jaxtune.models.lora import copy_structure, linears
from jaxtune.models.placement.streams import is_on_host
from jaxtune.models.programs.kept import Function


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """A model without its arrays, a static argument compared by identity: programs are compiled again for another
    object, so `structure_of` makes it.
    """

    graph: nnx.GraphDef  # the model's structure
    treedef: Hashable  # the tree structure of nnx.state(model), by which the list of arrays becomes that state again
    config: DecoderConfig  # the model's config

    def model(self, leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Decoder:
        """Builds the model from arrays or jax.ShapeDtypeStructs in the order of jax.tree.leaves(nnx.state(model))."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


@functools.lru_cache(8)
def shaped(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Decoder:
    """The model of these shapes, one for all who only read it, as to put one together takes a while."""
    return structure.model(shapes)


@functools.lru_cache(32)
def structure_of(graph: nnx.GraphDef, treedef: Hashable, config: DecoderConfig) -> Structure:
    """The same object for equal arguments (of the last 32). Identity, because comparing two descriptions of a deep
    model takes the host as long as a token takes the device.

      graph: of nnx.split(model).
      treedef: the tree structure of nnx.state(model).
      config: the model's.
    """
    return Structure(graph, treedef, config)


CACHES = {"fp8": "float8_e4m3fn"}  # what a sampler's keys and values may be stored in, beside their own dtype


def check_cache(key: str, cache: str | None, exact: bool = False) -> None:
    """ValueError for another name than those of CACHES or None, or with `exact`. key: names it in messages."""
    if cache is None:
        return
    if cache not in CACHES:
        raise ValueError(f"{key} = {cache!r}: {', '.join(map(repr, CACHES))} or None")
    if exact:
        raise ValueError(
            f"{key} = {cache!r}: with exact training reads keys and values unrounded; leave one of them out"
        )


def require_cached(model: Decoder, key: str, cache: str | None) -> None:
    """ValueError for a model without keys and values that `cache` could store. key: names it in messages."""
    if cache is not None and not _with_keys(model):
        raise ValueError(f"{key} = {cache!r}: no layer of the model has keys and values; leave it out")


def takes_cache(model: Decoder, cache: str | None, exact: bool) -> bool:
    """Whether keys and values could be stored in fewer bits than they are. cache, exact: as of Sampler."""
    return cache is None and not exact and bool(_with_keys(model))


def with_cache(model: Decoder, cache: str | None) -> Decoder:
    """The model with key/value caches in a format of CACHES; None: in its own dtype. ValueError for another name, or a
    model without such caches.
    """
    check_cache("Sampler: cache", cache)
    if cache is None:
        return model
    require_cached(model, "Sampler: cache", cache)
    model = copy_structure(model)
    for mixer in _with_keys(model):
        mixer.cache_dtype = CACHES[cache]
    return model


def _with_keys(model: Decoder) -> list[Attention]:
    return [mixer for layer in model.layers for mixer in layer.mixers.values() if type(mixer) is Attention]


def flattened(model: Decoder) -> tuple[Structure, list[jax.Array]]:
    """(Structure, arrays), the model's own except for plain adapters, which are cast to the compute dtype. Done once,
    because flattening a deep model takes the host as long as many tokens take the device.
    """
    model = copy.copy(model)
    model.source = model.base_digest = model.base_fingerprint = model.qat = None  # which change no program
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structure = structure_of(graph, treedef, model.config)
    indices = rounded_indices(structure, tuple(leaf.shape for leaf in leaves))
    indices = [index for index in indices if leaves[index].dtype != model.dtype]
    sides = [leaves[index] for index in indices]
    shapes = any(isinstance(side, jax.ShapeDtypeStruct) for side in sides)
    cast = (_cast_shapes if shapes else _cast)(model.dtype, sides) if sides else []
    for index, value in zip(indices, cast, strict=True):
        leaves[index] = value
    return structure, leaves


def shapes_of(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of arrays; those that stream from host memory have their sharding, too."""
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if is_on_host(a) else None) for a in leaves)


@functools.lru_cache(32)
def rounded_indices(structure: Structure, shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    """The indices among jax.tree.leaves of the arrays that a sampler casts."""
    leaves = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    index_of = {id(leaf): index for index, leaf in enumerate(leaves)}
    return [index_of[id(side.get_value())] for side in _rounded_sides(structure.model(leaves))]


def _rounded_sides(model: Decoder) -> list[nnx.Variable]:
    """The A and B of linears' adapters that products read in the compute dtype only."""
    plain = [linear for _, linear in linears(model) if linear.fake_quant is None and linear.compute is None]
    loras = [linear.lora for linear in plain if linear.lora is not None and linear.lora.magnitude is None]
    return [side for lora in loras for side in (lora.a, lora.b)]


def _cast_shapes(dtype: str, shapes: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape.shape, dtype) for shape in shapes]


def _all_cast(dtype: str, arrays: list[jax.Array]) -> list[jax.Array]:
    return [array.astype(dtype) for array in arrays]


_cast = Function(_all_cast, 1)  # one program for all arrays
