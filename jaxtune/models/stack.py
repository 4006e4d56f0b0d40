"""Runs the layers, and decides what happens to every residual between forward and backward.

A layer is a chain of segments between named residuals, as its block declares them (models/layers). By a plan, each
residual is kept in device memory, offloaded to pinned host memory and brought back one layer ahead of its use, or
dropped and recomputed by running earlier segments again; or it is kept rounded to e4m3, and read as that in the
backward, where a layer says that it may be. The backward is written by hand (a custom_vjp around the whole
stack): it calls jax.vjp on a segment at its saved inputs, where the unused product is dead code and disappears, or the
segment's own backward with its saved outputs.

The layers are unrolled in the one jitted step. On an H200, 8B shape, a scan costs 7 % for copying residuals into
stacked buffers, and slices of one stacked host buffer do not overlap with compute; separate buffers do.
The layer functions are module-level and jitted, so layers of one kind are traced once; XLA still compiles each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT, Block
from jaxtune.models.layers.segment import Context, Segment, multiplications
from jaxtune.models.layers.tiles import tiled_residuals
from jaxtune.models.placement.collectives import CollectiveSchedule
from jaxtune.models.placement.partition import Shard, gather, scatter, shards, with_whole
from jaxtune.models.placement.transfers import TransferSchedule, copies_start_at_once, cut, join
from jaxtune.models.residual_plan import KEEP, LayerPlan, ResidualPlan, residuals_of, unknown_residual
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.formats import dense
from jaxtune.pallas.quant_matmul import in_e4m3


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What a layer's program is specialised on: residuals that are kept, that are kept in FP8 and that are offloaded;
    names of what can leave it beside its output; the tokens of each row in a tile of its tokenwise segments, or None;
    residuals that are not tied to its gradient (BackwardOrder.free).
    """

    graph: nnx.GraphDef
    spec: LayerSpec
    kept: tuple[str, ...]
    in_fp8: tuple[str, ...]
    offloaded: tuple[str, ...]
    aux: tuple[str, ...]
    tile: int | None
    free: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a program of the stack is specialised on. aux: names of what leaves it beside its output. short: whether any
    residual is not kept. whole_weights: as in ResidualPlan, at least 1."""

    layers: tuple[_Layer, ...]
    aux: tuple[str, ...]
    short: bool
    whole_weights: int

    def stays_whole(self, index: int) -> bool:
        """Whether the weights of a layer are not gathered again for its backward."""
        return index >= len(self.layers) - self.whole_weights


def _scope(segment: Segment) -> contextlib.AbstractContextManager:
    return jax.named_scope(segment.name) if segment.scoped else contextlib.nullcontext()


def _run(segment: Segment, block: Block, context: Context, values) -> tuple:
    with _scope(segment):
        return segment.run(block, context, *values)


def _pullback(block_of, trainable, segment: Segment, context: Context, inputs) -> tuple[tuple, Callable]:
    """(outputs, their derivative)"""

    def run(trainable, *values):
        return tuple(_run(segment, block_of(trainable), context, values))

    return jax.vjp(run, trainable, *inputs)


def _together(order, held, doutputs, total):
    """The same, none of them before the others; the sum of weights' gradients only where those come first."""
    if order.weights_first:
        return optimization_barrier((held, doutputs, total))
    return *optimization_barrier((held, doutputs)), total


def _differentiable(names, gradients) -> dict[str, jax.Array]:
    """The gradients of those values that have one: not of integers."""
    named = zip(names, gradients, strict=True)
    return {name: value for name, value in named if value.dtype != jax.dtypes.float0}


def _work(segments, block: Block, x: jax.Array, backward: bool = False) -> list[float]:
    """How long segments take for x [B, T, hidden], in multiplications of large products."""
    rows, length = x.shape[:2]
    return [multiplications(segment, block, rows * length, length, backward) for segment in segments]


def _contexts(block: Block, spec: LayerSpec, layout: PackedLayout, key) -> Callable[[Segment, Any], tuple]:
    """(segment, values) -> (its context, the values). Dropout keys are those of a layer that runs whole and has no aux
    values. Masks are drawn when these values are there: XLA would draw those of all layers at once, or keep the
    forward's for the backward."""
    names = [segment.name for segment in block.segments()]
    keys = {} if key is None else dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def context_of(segment: Segment, values):
        if segment.name not in keys:
            return Context(spec, layout), values
        key, values = optimization_barrier((keys[segment.name], values))
        return Context(spec, layout, key), values

    return context_of


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("tile", "in_fp8"))
def layer_forward(
    graph,
    spec: LayerSpec,
    wanted: tuple[str, ...],
    trainable,
    frozen,
    layer_input,
    layout,
    key,
    leaving=(),
    gathers=(),
    tile=None,
    in_fp8: tuple[str, ...] = (),
):
    """(layer_output, {name: value} for the wanted names, copies of `leaving` on the host, `gathers` whole) of one
    layer.

    Args:
      wanted: names of residuals, and of what leaves the layer beside its output.
      gathers: Shards of weights that the next layer needs whole.
      tile: tokens of each row that tokenwise segments run over at a time.
      in_fp8: those of the wanted names whose values are rounded.
    """
    with jax.named_scope("layer"), copies_start_at_once():
        block = nnx.merge(graph, trainable, frozen)
        segments = block.segments(tile, aux=wanted)
        context_of = _contexts(block, spec, layout, key)
        values: dict[str, Any] = {LAYER_INPUT: layer_input}
        work = _work(segments, block, layer_input)
        copies = TransferSchedule(leaving, work, jax.memory.Space.Host)
        collectives = CollectiveSchedule(gathers, (), work)
        for stage, segment in enumerate(segments):
            inputs = collectives.start(stage, copies.start(stage, [values[name] for name in segment.reads]))
            context, inputs = context_of(segment, inputs)
            outputs = _run(segment, block, context, inputs)
            outputs = collectives.finish(stage, copies.finish(stage, outputs))
            values.update(zip(segment.outputs, outputs, strict=True))
        found = {name: values[name] for name in wanted if name in values}
        output = values[LAYER_OUTPUT]
        rounded = {name: in_e4m3(found[name]) for name in in_fp8 if name in found}
        if rounded:  # before the next layer begins: else XLA may keep what they are made of
            rounded, output = optimization_barrier((rounded, output))
        return output, found | rounded, copies.arrays, collectives.gathered


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="tile")
def layer_backward(
    graph,
    spec: LayerSpec,
    trainable,
    frozen,
    saved,
    doutput,
    layout,
    key,
    coming=(),
    gathers=(),
    scatters=(),
    tile=None,
    daux=None,
):
    """(gradient of the trainable tensors, gradient of layer_input, copies of `coming` on the device, `gathers` whole,
    this device's parts of `scatters`) of one layer, from its saved residuals.

    Args:
      gathers: Shards of weights that the layer below needs whole. scatters: (the Shard of a tensor of the layer above,
        its gradient).
      daux: {name: gradient} of what left the layer beside its output.
    """
    values, daux = dict(saved), daux or {}
    block = nnx.merge(graph, trainable, frozen)
    segments = block.segments(tile, aux=tuple(daux))
    context_of = _contexts(block, spec, layout, key)
    order = block.order
    again = [s for s in segments[:-1] if not s.aux and any(name not in values for name in s.outputs)]
    back = [s for s in reversed(segments) if s.differentiable]
    work = [*_work(again, block, doutput), *_work(back, block, doutput, backward=True)]
    copies = TransferSchedule(coming, work, jax.memory.Space.Device, last_is_thin=True)
    collectives = CollectiveSchedule(gathers, scatters, work)

    def start(stage, values):
        return collectives.start(stage, copies.start(stage, values))

    def finish(stage, values):
        return collectives.finish(stage, copies.finish(stage, values))

    def block_of(trainable):
        return nnx.merge(graph, trainable, frozen)

    pullback_of = functools.partial(_pullback, block_of, trainable)
    pullbacks = {}
    with jax.named_scope("layer"), copies_start_at_once():
        with jax.named_scope("recompute"):
            for stage, segment in enumerate(again):
                inputs = start(stage, [dense(values[name]) for name in segment.reads])
                context, inputs = context_of(segment, inputs)
                at_once = order.derivatives_at_once or segment.derivative_bytes is not None
                if at_once and segment.differentiable and segment.backward is None:
                    outputs, pullbacks[segment.name] = pullback_of(segment, context, inputs)
                else:
                    outputs = _run(segment, block, context, inputs)
                outputs = finish(stage, outputs)
                values = {**dict(zip(segment.outputs, outputs, strict=True)), **values}
        with jax.named_scope("backward"):
            gradients = {LAYER_OUTPUT: doutput, **daux}
            total = None
            for stage, segment in enumerate(back, len(again)):
                doutputs = tuple(gradients[name] for name in segment.outputs if name in gradients)
                # What the derivative computes again of a segment waits for its gradient, and takes no memory before.
                held = {name: values[name] for name in segment.reads if name not in order.shared}
                held, doutputs, total = _together(order, held, doutputs, total)
                inputs = start(stage, [dense(held.get(name, values[name])) for name in segment.reads])
                context, doutputs = context_of(segment, doutputs)
                if segment.backward is not None:
                    outputs = tuple(values.get(name) for name in segment.outputs)
                    with _scope(segment):
                        found = segment.backward(block_of, trainable, context, tuple(inputs), outputs, doutputs)
                    dtrainable, dinputs = found
                else:
                    pullback = pullbacks.get(segment.name) or pullback_of(segment, context, inputs)[1]
                    dtrainable, *dinputs = pullback(doutputs)
                if dtrainable is not None:
                    total = dtrainable if total is None else jax.tree.map(jnp.add, total, dtrainable)
                for name, value in finish(stage, _differentiable(segment.reads, dinputs)).items():
                    gradients[name] = gradients[name] + value if name in gradients else value
        return total, gradients[LAYER_INPUT], copies.arrays, collectives.gathered, collectives.scattered


def _layer_key(keys, index):
    return None if keys is None else keys[index]


def _shards_of(trainables, frozens, index: int) -> list[Shard]:
    """The weights of a layer that have to be gathered; none of a layer that is not there."""
    return shards((trainables[index], frozens[index])) if 0 <= index < len(trainables) else []


def _first_gathered(trainables, frozens) -> list[jax.Array]:
    """What the first layer needs, which no layer runs before."""
    return [gather(shard) for shard in _shards_of(trainables, frozens, 0)]


def _with_gradients(trainable, gradients) -> list[tuple[Shard, jax.Array]]:
    """Shards of trainable tensors, each with the gradient of its whole tensor."""
    pairs = jax.tree.map(
        lambda leaf, gradient: (leaf, gradient) if isinstance(leaf, Shard) else None,
        trainable,
        gradients,
        is_leaf=lambda leaf: isinstance(leaf, Shard),
    )
    return jax.tree.leaves(pairs, is_leaf=lambda leaf: isinstance(leaf, tuple))


def _total(values: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of what leaves layers beside their outputs, by name."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in values for name in one):
        total[name] = functools.reduce(operator.add, [one[name] for one in values if name in one])
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(static: _Static, trainables, frozens, x, layout, keys, sums):
    """(layer_output of the last layer, {name: sum over the layers} of what leaves them beside it); sums: see
    run_stack, a state a layer."""
    aux = []
    gathered = _first_gathered(trainables, frozens)
    for index, layer in enumerate(static.layers):
        weights = with_whole((trainables[index], frozens[index]), gathered)
        arguments = (*weights, x, layout, _layer_key(keys, index), (), _shards_of(trainables, frozens, index + 1))
        x, found, _, gathered = layer_forward(layer.graph, layer.spec, static.aux, *arguments, tile=layer.tile)
        aux.append(found)
    return x, _total(aux)


def _stack_fwd(static: _Static, trainables, frozens, x, layout, keys, sums):
    kept, hosted, aux, whole = [], [], [], []
    names, leaving = (), ()  # of the layer before: they go to the host while this layer computes
    last = len(static.layers) - 1
    coming = _first_gathered(trainables, frozens)
    for index, layer in enumerate(static.layers):
        wanted = layer.kept + layer.in_fp8 + layer.offloaded + static.aux
        gathered, gathers = coming, _shards_of(trainables, frozens, index + 1)
        weights = with_whole((trainables[index], frozens[index]), gathered)
        arguments = (*weights, x, layout, _layer_key(keys, index), leaving, gathers)
        x, residuals, copies, coming = layer_forward(
            layer.graph, layer.spec, wanted, *arguments, tile=layer.tile, in_fp8=layer.in_fp8
        )
        whole.append(gathered if static.stays_whole(index) else [])
        aux.append({name: residuals.pop(name) for name in static.aux if name in residuals})
        if index:
            hosted.append(dict(zip(names, copies, strict=True)))
        # The backward begins with the last layer: its residuals would come back at once.
        names = tuple(name for name in layer.offloaded if name in residuals) if index < last else ()
        block = nnx.merge(layer.graph, *weights)
        leaving = cut([residuals[name] for name in names], _work(block.segments(), block, x))
        kept.append({name: value for name, value in residuals.items() if name not in names})
    return (x, _total(aux)), (trainables, frozens, whole, kept, [*hosted, {}], layout, keys, sums)


def _stack_bwd(static: _Static, residuals, gradient):
    dx, daux = gradient  # of a sum over the layers: the same for each of them
    trainables, frozens, whole_weights, kept, hosted, layout, keys, sums = residuals
    gradients: list[Any] = [None] * len(kept)
    arrived, scatters, gathered = (), [], []

    def settle(index, parts):
        """The gradients of a layer, each device's parts of them in place, are added to their sums."""
        places = iter(parts)
        gradients[index] = jax.tree.map(
            lambda shard, gradient: next(places) if isinstance(shard, Shard) else gradient,
            trainables[index],
            gradients[index],
            is_leaf=lambda leaf: isinstance(leaf, Shard),
        )
        if sums is not None:
            with jax.named_scope("accumulate"):
                gradients[index] = jax.tree.map(jnp.add, sums[index], gradients[index])

    for index in range(len(kept) - 1, -1, -1):
        layer = static.layers[index]
        saved = {**kept[index]}
        saved |= {name: join(pieces) for name, pieces in zip(hosted[index], arrived, strict=True)}
        # Ties this layer's work to its gradient: else XLA shares recomputed values with the forward and keeps them. So
        # it does with trained weights in the compute dtype: 26 MB a layer of adapters on a 30B model's experts.
        gathered = whole_weights[index] if static.stays_whole(index) else gathered
        whole, frozen = with_whole((trainables[index], frozens[index]), gathered)
        # Where memory is short these are tied too: a plan counts none of what is made of them.
        free = {name: saved.pop(name) for name in layer.free if name in kept[index] and not static.short}
        saved, dx, trainable = optimization_barrier((saved, dx, whole))
        coming = tuple(hosted[index - 1].values()) if index else ()
        gradients[index], dx, arrived, gathered, parts = layer_backward(
            layer.graph,
            layer.spec,
            trainable if static.short else whole,
            frozen,
            {**saved, **free},
            dx,
            layout,
            _layer_key(keys, index),
            coming,
            [] if static.stays_whole(index - 1) else _shards_of(trainables, frozens, index - 1),
            scatters,
            tile=layer.tile,
            daux={name: daux[name] for name in static.aux if name in layer.aux},
        )
        if scatters:
            settle(index + 1, parts)
        scatters = _with_gradients(trainables[index], gradients[index])
        if not scatters:
            settle(index, ())
        if index and static.short:
            # Where memory is short: otherwise XLA puts off the products of adapter gradients, which nothing waits for,
            # and keeps their large operands. An 8B LoRA step of 16 layers took 21 GB for 13.
            gradients[index], dx = optimization_barrier((gradients[index], dx))
            scatters = _with_gradients(trainables[index], gradients[index])
    if scatters:
        settle(0, [scatter(*pair) for pair in scatters])
    trained = tuple(gradients)
    # Gradients that were added to sums are their cotangent, in their dtype; none are left for the tensors.
    return (trained, None, dx, None, None, None) if sums is None else (None, None, dx, None, None, trained)


_stack.defvjp(_stack_fwd, _stack_bwd)


@jax.custom_vjp
def _not_differentiated(frozens):
    return frozens


def _differentiated(frozens):
    """The rule for a gradient of `Frozen` tensors: the stack makes none, and zeros would look like one."""
    leaves = jax.tree_util.tree_leaves_with_path(frozens)
    names = [f"layers{jax.tree_util.keystr(path)}" for path, leaf in leaves if leaf.perturbed]
    raise TypeError(
        f"a gradient is asked for of {names[0]} and {len(names) - 1} more frozen tensors, which get none: "
        "differentiate with respect to what trains (nnx.split(model, nnx.Param, ...)), or use a model without adapters"
    )


_not_differentiated.defvjp(_differentiated, lambda _, cotangents: (cotangents,), symbolic_zeros=True)


def run_stack(
    layers,
    specs: tuple[LayerSpec, ...],
    x: jax.Array,
    layout: PackedLayout,
    plan: ResidualPlan | None = None,
    dropout_key: jax.Array | None = None,
    gradient_sums=None,
    aux: tuple[str, ...] = (),
) -> tuple[jax.Array, dict[str, Any]]:
    """(what the layers make of x [B, T, hidden], {name: sum over the layers} of what leaves them beside it).

    Differentiable with respect to x and to the layers' `nnx.Param`s, and not to `Frozen` tensors.

    Args:
      layers: Blocks. specs: one LayerSpec each.
      layout: with the rotary tables that the specs name.
      plan: what becomes of the residuals; everything is kept by default.
      dropout_key: draws the adapters' dropout masks; None means no dropout.
      gradient_sums: {layer's index: state like that of its `nnx.Param`s}, sums that gradients are added to, layer by
        layer, so that no layer's gradients wait for the others'. Its cotangent is then sums and gradients; the
        `nnx.Param`s get none.
      aux: names of what else is wanted of the layers that have it, such as router_sums.
    Raises:
      ValueError: a plan of another depth, or of residuals that no layer has; tiles that do not divide the rows, or are
        asked for beside dropout; a name of `aux` that no layer has. TypeError: a gradient by a `Frozen` tensor.
    """
    plan = plan or ResidualPlan.uniform(KEEP, len(layers))
    if len(plan.layers) != len(layers):
        raise ValueError(f"the residual plan has {len(plan.layers)} layers, the model {len(layers)}")
    known = [residual.name for residual in residuals_of(layers)]
    for name in {name for layer in plan.layers for name in layer}:
        if name not in known:
            raise ValueError(unknown_residual(name, known))
    for name in aux:
        if not any(name in layer.aux for layer in layers):
            raise ValueError(f"no layer of this model makes {name}")
    if plan.tile_tokens is not None:
        if x.shape[1] % plan.tile_tokens:
            raise ValueError(
                f"the residual plan's tile_tokens = {plan.tile_tokens} does not divide {x.shape[1]} tokens"
            )
        if dropout_key is not None:
            raise ValueError("a tiled MLP has no dropout: leave tile_tokens out of the residual plan")
    splits = [nnx.split(layer, nnx.Param, ...) for layer in layers]
    described = tuple(
        _describe(layer, split[0], spec, layer_plan, plan.tile_tokens)
        for layer, split, spec, layer_plan in zip(layers, splits, specs, plan.layers, strict=True)
    )
    keys = None if dropout_key is None else jax.random.split(dropout_key, len(layers))
    if gradient_sums is not None:  # a layer of which nothing trains is not in it
        gradient_sums = tuple(gradient_sums.get(index, nnx.State({})) for index in range(len(layers)))
    short = any(layer != KEEP for layer in plan.layers)
    static = _Static(described, aux, short, max(plan.whole_weights, 1))
    frozens = _not_differentiated(tuple(s[2] for s in splits))
    return _stack(static, tuple(s[1] for s in splits), frozens, x, layout, keys, gradient_sums)


def _describe(block: Block, graph, spec: LayerSpec, plan: LayerPlan, tile: int | None) -> _Layer:
    residuals = block.residuals()
    inside = tiled_residuals(block.segments())
    dropped = plan.named("recompute", residuals)
    tiled = bool(inside) and set(inside) <= set(dropped)
    kept, in_fp8, offloaded = (plan.named(how, residuals) for how in ("keep", "fp8", "offload"))
    return _Layer(graph, spec, kept, in_fp8, offloaded, tuple(block.aux), tile if tiled else None, block.order.free)
