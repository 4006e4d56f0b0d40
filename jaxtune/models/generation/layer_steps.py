"""A step of generation through all layers: with few kernels if all are plain (plain_layer.py), else by Block.step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation import plain_layer
from jaxtune.models.generation.exchanged import is_wide, keep_device_rows, linears_of_step
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.segment import Context
from jaxtune.models.placement import partition
from jaxtune.models.placement.gathers import gather
from jaxtune.models.placement.streams import Arrivals, with_arrived
from jaxtune.pallas.attention import PackedLayout

type States = Any  # a pytree for each layer


def split_layers(model: Decoder) -> list[tuple]:
    """(graph, trainable tensors, frozen tensors) of every layer."""
    return [nnx.split(layer, nnx.Param, ...) for layer in model.layers]


def layers_of_steps(model: Decoder, tokens_a_row: int) -> list[tuple]:
    """`split_layers` for `through_layers`; once for all steps of a program."""
    if _are_plain(model, tokens_a_row):
        for layer in model.layers:
            keep_device_rows(layer)
    return split_layers(model)


def _are_plain(model: Decoder, tokens_a_row: int) -> bool:
    layers = zip(model.layers, model.config.layers, strict=True)
    return tokens_a_row == 1 and model.norm.compute is None and all(itertools.starmap(plain_layer.is_plain, layers))


def through_layers(
    model: Decoder, splits, tokens, states, positions, tables, real, batch_invariant: bool = True
) -> tuple[jax.Array, States]:
    """(hidden states [N, C, hidden] after the final norm, new states) for C new tokens in each of N rows.

    model: its embedding, norms and config are used.
    splits: `layers_of_steps`.
    tokens: int32[N, C].
    states: a pytree for each layer.
    positions: int32[N], the position of each row's first token; -1 for none.
    tables: rotary tables, one for each rotary base.
    real: bool[N]; False for a row that does not decode, whose results are ignored. bool[N, C]: for each token, of which
      those that pad a row come last.
    batch_invariant: a row must have the same bits beside any other rows.
    """
    x, new_states, shared = model.embed(tokens), [], {}
    layers, plain = list(zip(model.layers, model.config.layers, strict=True)), _are_plain(model, tokens.shape[1])
    weights = _Coming([state for _, *state in splits], [_staying(layer) if plain else set() for layer in model.layers])
    if plain:
        norms = [*(plain_layer.norm_before(layer, "mixer") for layer in model.layers), model.norm]
        stream = plain_layer.first_stream(model.layers[0], x[:, 0])
        for (graph, *_), (layer, spec), layer_state, norm in zip(splits, layers, states, norms[1:], strict=True):
            weight = norm.weight[...]
            stream, state = weights.next(stream.of(is_wide(layer), len(tokens)))
            stream, layer_state = _plain_step(
                graph, spec, batch_invariant, *state, stream, tables, layer_state, positions, real, weight
            )
            stream = jax.lax.optimization_barrier(stream)
            new_states.append(layer_state)
        return stream.of(False, len(tokens)).normed[:, None], new_states
    decoder_values = model.per_layer_inputs(tokens, x) or [{}] * len(model.layers)
    for (graph, *_), (layer, spec), layer_state, layer_values in zip(
        splits, layers, states, decoder_values, strict=True
    ):
        inputs = layer_values | {name: shared[name] for name in layer.takes if name not in layer_values}
        x, state = weights.next(x)
        x, layer_state, outputs = _layer_step(graph, spec, *state, x, tables, layer_state, positions, real, inputs)
        shared |= outputs
        # Otherwise XLA lets each reader of the residual stream add up all layers below it again.
        x = jax.lax.optimization_barrier(x)
        new_states.append(layer_state)
    return model.norm(x), new_states


def _staying(layer: Block) -> set[int]:
    """The ids of arrays of Shards by which a step multiplies as they are."""
    return {id(shard.array) for linear in linears_of_step(layer) for shard in partition.shards(linear.stored_weight)}


class _Coming:
    """Layers' weights in turn; copies of later ones begin with a layer's input."""

    def __init__(self, weights: list, staying: Sequence[Collection[int]]):
        self._weights, self._staying = weights, staying
        self._arrivals, self._layer = Arrivals(weights), 0
        self._gathered = list(map(gather, self._gathers(0)))

    def next[X](self, x: X) -> tuple[X, list]:
        """(a layer's input, its weights)"""
        layer, self._layer = self._layer, self._layer + 1
        weights, staying = with_arrived(self._weights[layer], self._arrivals.take(layer)), self._staying[layer]
        gathered = iter(self._gathered)
        shards = partition.shards(weights)
        weights = partition.with_whole(weights, [s if id(s.array) in staying else next(gathered) for s in shards])
        beside, gathers = later = self._arrivals.beside(layer), self._gathers(layer + 1)
        if jax.tree.leaves(later):
            x, (beside, gathers) = jax.lax.optimization_barrier((x, later))
        self._arrivals.arrive(layer, jax.device_put(beside, jax.memory.Space.Device))
        self._gathered = list(map(gather, gathers))
        return x, weights

    def _gathers(self, layer: int) -> list[partition.Shard]:
        shards = partition.shards(self._weights[layer : layer + 1])
        return [shard for shard in shards if id(shard.array) not in self._staying[layer]]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_step(graph, spec: LayerSpec, trainable, frozen, layer_input, tables, state, positions, real, inputs):
    """Runs one layer: (output [N, C, hidden], new state, {name: value} for later layers)."""
    context = _context(spec, layer_input.shape[1], tables, real)
    return nnx.merge(graph, trainable, frozen).step(layer_input, state, positions, context, inputs)


def _context(spec: LayerSpec, length: int, tables, real) -> Context:
    """Rows or tokens where `real` (bool[N] or bool[N, length]) is False are padding."""
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (len(real), length))
    count = length if real.ndim == 1 else real.sum(1, keepdims=True, dtype=jnp.int32)
    real = real[:, None] if real.ndim == 1 else real
    end = jnp.where(real, count, index)
    return Context(spec, PackedLayout(jnp.where(real, 0, index), end, tables, max_documents=1))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _plain_step(
    graph,
    spec: LayerSpec,
    batch_invariant: bool,
    trainable,
    frozen,
    stream,
    tables,
    state,
    positions,
    real,
    next_weight,
):
    """_layer_step in fewer kernels, for one token a row: (output Stream, new state)."""
    context = _context(spec, 1, tables, real)
    layer = nnx.merge(graph, trainable, frozen)
    return plain_layer.step(layer, stream, state, positions, context, next_weight, batch_invariant)
