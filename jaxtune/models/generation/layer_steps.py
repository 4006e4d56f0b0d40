"""New tokens of rows through all layers of a model, for a step of generation (`through_layers`): by plain_layer.step,
with few kernels, if all layers are plain, otherwise layer by layer by Block.step. slots.py calls it, with layers that
`split_layers` has split once for all steps of a program."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation import plain_layer
from jaxtune.models.layers.segment import Context
from jaxtune.pallas.attention import PackedLayout

type States = Any  # a pytree for each layer


def split_layers(model: Decoder) -> list[tuple]:
    """Splits every layer of `model` by nnx.split into (graph, trainable tensors, frozen tensors), the arguments by
    which `_layer_step` and `_plain_step` get a layer. A program does this once for all of its steps."""
    return [nnx.split(layer, nnx.Param, ...) for layer in model.layers]


def through_layers(
    model: Decoder, splits, tokens, states, at, tables, real, batch_invariant: bool = True
) -> tuple[jax.Array, States]:
    """Runs new tokens of N rows through all layers and the final norm, for a step of generation: by `_plain_step` if C
    is 1, all layers are plain (plain_layer.is_plain), and the final norm, which it then includes, has no dtype of its
    own; otherwise by `_layer_step`. Returns (the hidden states after the final norm [N, C, hidden], the layers' new
    states).

    Args:
      model, splits: the decoder, and its split layers from split_layers.
      tokens: int32[N, C], the next C tokens of each row. A row has all C or, where `real` is False, none.
      states: of the N rows, one pytree for each layer.
      at: int32[N], the position of each row's first token in `tokens`; -1 for a row that has none.
      tables: the rotary tables of the positions, one for each of the decoder's rotary bases (rope.rotary_tables).
      real: bool[N], whether a row has tokens here.
      batch_invariant: whether a row must have the same bits beside any other rows.
    """
    x, after, shared = model.embed(tokens), [], {}
    layers = list(zip(model.layers, model.config.layers, strict=True))
    plain = all(itertools.starmap(plain_layer.is_plain, layers)) and model.norm.compute is None
    if tokens.shape[1] == 1 and plain:
        norms = [*(plain_layer.norm_before(layer, "mixer") for layer in model.layers), model.norm]
        stream = plain_layer.Stream(x[:, 0], norms[0](x[:, 0]))
        for (graph, *state), (_, spec), kept, norm in zip(splits, layers, states, norms[1:], strict=True):
            weight = norm.weight[...]
            stream, kept = _plain_step(graph, spec, batch_invariant, *state, stream, tables, kept, at, real, weight)
            stream = jax.lax.optimization_barrier(stream)
            after.append(kept)
        return stream.normed[:, None], after
    given = model.given(tokens, x) or [{}] * len(model.layers)
    for (graph, *state), (layer, spec), kept, own in zip(splits, layers, states, given, strict=True):
        taken = own | {name: shared[name] for name in layer.takes if name not in own}
        x, kept, more = _layer_step(graph, spec, *state, x, tables, kept, at, real, taken)
        shared |= more
        # Otherwise XLA lets each reader of the residual stream add up all layers below it again.
        x = jax.lax.optimization_barrier(x)
        after.append(kept)
    return model.norm(x), after


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_step(graph, spec: LayerSpec, trainable, frozen, layer_input, tables, state, at, real, taken):
    """Runs one layer for C new tokens of each row: (layer_output [N, C, hidden], the layer's new state, {name: value}
    of what it gives to later layers, such as keys and values that they share).

    It is jitted so that layers of one kind are traced once. Rows that are not real count as padding.

    Args:
      graph, trainable, frozen: the layer's Block, from nnx.split(layer, nnx.Param, ...).
      spec: the layer's kind (its parts, window and rotary base).
      layer_input: [N, C, hidden].
      tables: the rotary tables of the tokens' positions, one for each of the decoder's rotary bases (rotary_tables).
      state: {mixer's name: its state}.
      at: int32[N], position of each row's first token; -1 for a row that has none.
      real: bool[N], whether a row has tokens here.
      taken: {name: value} of what the layer takes from the decoder and from earlier layers (Block.step).
    """
    context = _context(spec, layer_input.shape[1], tables, real)
    return nnx.merge(graph, trainable, frozen).step(layer_input, state, at, context, taken)


def _context(spec: LayerSpec, length: int, tables, real) -> Context:
    """The Context with which a layer of kind `spec` runs `length` new tokens of each row, for _layer_step and
    _plain_step. tables: the rotary tables of the tokens' positions. real: bool[N]; a row where it is False is marked as
    padding."""
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (len(real), length))
    end = jnp.where(real[:, None], length, index)
    return Context(spec, PackedLayout(jnp.where(real[:, None], 0, index), end, tables, max_documents=1))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _plain_step(
    graph, spec: LayerSpec, batch_invariant: bool, trainable, frozen, stream, tables, state, at, real, next_weight
):
    """Runs one layer for one new token of each row by plain_layer.step, in fewer kernels than `_layer_step`: (its
    output, a plain_layer.Stream, and the new state). `through_layers` chooses between the two.

    Args:
      graph, trainable, frozen, spec: the layer's Block, from nnx.split(layer, nnx.Param, ...), and its kind.
      batch_invariant: as for through_layers.
      tables, state: the rotary tables of the tokens' positions; {mixer's name: its caches}.
      at, real: int32[N], each row's position, -1 for a row without a token; bool[N], whether it has one.
      stream: the layer's input, and the same normed for its mixer.
      next_weight: [hidden], the weight of the norm before the next layer, or of the final norm after the last layer;
        the output is normed with it in the same kernel.
    """
    context = _context(spec, 1, tables, real)
    layer = nnx.merge(graph, trainable, frozen)
    return plain_layer.step(layer, stream, state, at, context, next_weight, batch_invariant)
