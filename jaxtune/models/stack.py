"""Runs the layers of a decoder, forward and backward, and places their residuals by plan.

A layer is a chain of segments between named residuals, as its block declares them (models/layers). A plan says for each
residual whether it is kept in device memory, offloaded to pinned host memory and copied back one layer ahead of its
use, recomputed by running earlier segments again, or kept rounded to e4m3. The backward is written by hand (a
custom_vjp around the whole stack). It calls jax.vjp on a segment at its saved inputs, or the segment's own backward.

`run_stack` is what the decoder calls. The programs of one layer are `layer_forward` and `layer_backward`, of which
`_stack` and its rules `_stack_fwd` and `_stack_bwd` make the whole stack.

The layers are unrolled in one jitted step. On an H200, 8B shape, a scan costs 7 % for copying residuals into stacked
buffers, and slices of one stacked host buffer do not overlap with compute; separate buffers do. The layer functions are
module-level and jitted, so layers of one kind are traced once; XLA still compiles each layer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.lax import optimization_barrier

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT, Block
from jaxtune.models.layers.segment import Context, Segment, multiplications
from jaxtune.models.linear import not_differentiated
from jaxtune.models.placement.collectives import CollectiveSchedule
from jaxtune.models.placement.gathers import first_gathered, scatter, shards_of_layer, with_gradients
from jaxtune.models.placement.partition import Shard, with_whole
from jaxtune.models.placement.transfers import TransferSchedule, copies_start_at_once, cut, join
from jaxtune.models.residual_plan import KEEP, ResidualPlan, residuals_of, unknown_residual
from jaxtune.models.stack_layers import (
    UNTUNED,
    StackProgram,
    described,
    require_given,
    total_over_layers,
)
from jaxtune.models.stack_norms import NormsApart
from jaxtune.models.stack_segments import low_rank_of, pullback_of_segment, run_segment, scope_of, without_gradient
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.quant_matmul import in_e4m3


def _barrier(order, saved_inputs, doutputs, total):
    """Returns (saved_inputs, doutputs, total) unchanged, but such that XLA uses none of them before all are computed.
    So what a segment's derivative computes again takes no memory before the segment's gradient arrives.

    Args:
      order: the layer's BackwardOrder (segment.py). total is tied to the others only if its weights_first is True.
      saved_inputs: {name: value} that the segment's derivative reads, but not order.shared, which need not wait.
      doutputs: the gradients of the segment's outputs.
      total: the sum of the weight gradients of the segments after this one; None if there are none yet.
    """
    if order.weights_first:
        return optimization_barrier((saved_inputs, doutputs, total))
    return *optimization_barrier((saved_inputs, doutputs)), total


def _differentiable(names, gradients, inside: Collection[str]) -> dict[str, jax.Array]:
    """{name: gradient} of a segment's inputs, without those that are never used: those of integers, which are of dtype
    float0, and of the names `inside`. names, gradients: of the inputs, in the same order. `layer_backward` adds up what
    is left."""
    named = zip(names, gradients, strict=True)
    return {name: value for name, value in named if value.dtype != jax.dtypes.float0 and name not in inside}


def _differentiated_at_once(segment: Segment, order) -> bool:
    """Whether a segment that layer_backward runs again is differentiated when it runs, and not when its gradient
    arrives. order: the layer's BackwardOrder."""
    at_once = order.derivatives_at_once or segment.derivative_bytes is not None
    return at_once and segment.differentiable and segment.backward is None


def _work(segments, block: Block, x: jax.Array, backward: bool = False) -> list[float]:
    """The durations of the segments, by which the schedules distribute copies and collectives and `cut` sizes slices,
    each as the number of multiplications that large products do in that time.

    segments: of the block. x: [B, T, hidden], the layer's input; only its rows and length are read. backward: True: the
    durations of their derivatives; False: of their forwards."""
    rows, length = x.shape[:2]
    return [multiplications(segment, block, rows * length, length, backward) for segment in segments]


def _contexts(block: Block, spec: LayerSpec, layout: PackedLayout, key) -> Callable[[Segment, Any], tuple]:
    """Returns a function (segment, values) -> (the segment's Context, the values) for the segments of a layer; the
    context has the segment's own dropout key.

    The dropout keys are the same however the layer is tiled and whichever auxiliary values it computes; segments that
    exist only for these get none. A mask is drawn only when the values are there; otherwise XLA draws the masks of all
    layers at once, or keeps the forward's.

    Args:
      block: the layer.
      spec, layout: the layer's LayerSpec and the batch's document boundaries and rotary tables, for every context.
      key: the layer's dropout key; None: no dropout.
    """
    names = [segment.name for segment in block.segments()]
    keys = {} if key is None else dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def context_of(segment: Segment, values):
        """(the segment's Context, `values`), where the dropout key, if there is one, is tied to the values."""
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
    to_host=(),
    gathers=(),
    tile=None,
    in_fp8: tuple[str, ...] = (),
    taken=None,
):
    """Runs the forward of one layer, and at the same time copies residuals of the layer before to the host and gathers
    weights of the next layer. _stack, _stack_fwd and generation call it; the planner traces it.

    Args:
      graph, trainable, frozen: the layer's Block, as nnx.merge takes it.
      spec: the layer's LayerSpec.
      wanted: names of the residuals, and of the auxiliary values, that are returned; names that the layer does not have
        are ignored.
      layer_input: [B, T, hidden].
      layout, key: the batch's document boundaries and rotary tables, and the layer's dropout key or None.
      to_host: Pieces (arrays cut into slices) of the previous layer's residuals, which are copied to the host
        meanwhile.
      gathers: Shards (this device's parts) of weights that the next layer needs whole.
      tile: tokens of each row that tokenwise segments process at a time; None: whole rows.
      in_fp8: those of the wanted names whose values are returned rounded to e4m3, as FP8 (in_e4m3).
      taken: {name: value} of what the layer takes from outside (Block.takes); None: nothing.
    Returns:
      (layer_output, {name: value} for the wanted names, copies of `to_host`, `gathers` whole)
    """
    with jax.named_scope("layer"), copies_start_at_once():
        block = nnx.merge(graph, trainable, frozen)
        segments = block.segments(tile, aux=wanted)
        context_of = _contexts(block, spec, layout, key)
        values: dict[str, Any] = {LAYER_INPUT: layer_input, **(taken or {})}
        work = _work(segments, block, layer_input)
        copies = TransferSchedule(to_host, work, jax.memory.Space.Host)
        collectives = CollectiveSchedule(gathers, (), work)
        for stage, segment in enumerate(segments):
            inputs = collectives.start(stage, copies.start(stage, [values[name] for name in segment.reads]))
            context, inputs = context_of(segment, inputs)
            outputs, low_rank = run_segment(segment, block, context, inputs)
            outputs = collectives.finish(stage, copies.finish(stage, outputs))
            values |= {**dict(zip(segment.outputs, outputs, strict=True)), **low_rank}
        found = {name: values[name] for name in wanted if name in values}
        output = values[LAYER_OUTPUT]
        rounded = {name: in_e4m3(found[name]) for name in in_fp8 if name in found}
        if rounded:  # before the next layer begins; otherwise XLA may keep the values before rounding
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
    to_device=(),
    gathers=(),
    scatters=(),
    tile=None,
    dothers=None,
):
    """Runs the backward of a layer, with the copies and collectives of its neighbours; _stack_bwd calls it.

    Args:
      graph, spec, trainable, frozen, layout, key, tile: the arguments that the layer's forward had (layer_forward).
      saved: {name: value} of residuals, arrays or FP8, and of what the layer takes; missing residuals are recomputed.
      doutput, dothers: layer_output's gradient; {name: gradient} of auxiliary values and of what later layers took.
      to_device, gathers: Pieces of residuals that are copied to the device, and Shards, for the layer that is next.
      scatters: pairs (Shard, gradient of the whole tensor) of the layer that ran before, to be summed over devices.
    Returns:
      (gradients of trainable; of layer_input; {value taken: gradient}; to_device copied; gathers whole; Shards of sums)
    """
    values, pullbacks, block = dict(saved), {}, nnx.merge(graph, trainable, frozen)
    norms = NormsApart(block, doutput, tile, tuple(dothers or {}), saved)
    segments, order = norms.segments, block.order
    context_of = _contexts(block, spec, layout, key)
    again = [s for s in segments[:-1] if not s.aux and any(name not in values for name in s.outputs)]
    back, inside = norms.differentiated[::-1], without_gradient(segments, norms.differentiated)
    work = [*_work(again, block, doutput), *_work(back, block, doutput, backward=True)]
    copies = TransferSchedule(to_device, work, jax.memory.Space.Device, last_is_thin=True)
    collectives = CollectiveSchedule(gathers, scatters, work)

    def start(stage, values):
        return collectives.start(stage, copies.start(stage, values))

    def finish(stage, values):
        return collectives.finish(stage, copies.finish(stage, values))

    block_of = functools.partial(_block_of, graph, frozen)
    pullback_of = functools.partial(pullback_of_segment, block_of, trainable)
    with jax.named_scope("layer"), copies_start_at_once():
        with jax.named_scope("recompute"):
            for stage, segment in enumerate(again):
                inputs = start(stage, norms.values(segment, values))
                context, inputs = context_of(segment, inputs)
                if _differentiated_at_once(segment, order):
                    outputs, pullbacks[segment.name] = pullback_of(segment, context, inputs)
                else:
                    outputs, low_rank = run_segment(segment, block, context, inputs)
                    values |= low_rank
                values = {**dict(zip(segment.outputs, finish(stage, outputs), strict=True)), **values}
        with jax.named_scope("backward"):
            gradients, total = {LAYER_OUTPUT: doutput, **(dothers or {})}, None
            for stage, segment in enumerate(back, len(again)):
                doutputs = tuple(gradients[name] for name in segment.outputs if name in gradients)
                saved_inputs = {name: values[name] for name in norms.saved(segment) if name not in order.shared}
                saved_inputs, doutputs, total = _barrier(order, saved_inputs, doutputs, total)
                read = values | start(stage, {name: (values | saved_inputs)[name] for name in norms.saved(segment)})
                inputs = norms.values(segment, read)
                context, doutputs = context_of(segment, doutputs)
                if segment.backward is not None:
                    outputs = tuple(values.get(name) for name in segment.outputs)
                    with scope_of(segment):
                        found = segment.backward(block_of, trainable, context, tuple(inputs), outputs, doutputs)
                    dtrainable, dinputs = found
                else:
                    given = low_rank_of(segment, segments, values), norms.factors(segment, read)
                    pullback = pullbacks.get(segment.name) or pullback_of(segment, context, inputs, *given)[1]
                    dtrainable, *dinputs = pullback(doutputs)
                if dtrainable is not None:
                    total = dtrainable if total is None else jax.tree.map(jnp.add, total, dtrainable)
                for name, value in finish(stage, _differentiable(segment.reads, dinputs, inside)).items():
                    gradients[name] = gradients[name] + value if name in gradients else value
                total = norms.added(segment, block_of, trainable, values | saved_inputs, gradients, total)
        dtaken = {name: gradients[name] for name in block.takes}
        return total, gradients[LAYER_INPUT], dtaken, copies.arrays, collectives.gathered, collectives.scattered


def _block_of(graph: nnx.GraphDef, frozen, trainable) -> Block:
    """Builds the Block of a layer: nnx.merge(graph, trainable, frozen). Its argument `trainable` is last, so that
    layer_backward can bind the others (functools.partial) and differentiate by it. frozen: the other tensors."""
    return nnx.merge(graph, trainable, frozen)


def _layer_key(keys, index):
    """The dropout key of layer number `index`: keys[index], or None if `keys` is None (no dropout)."""
    return None if keys is None else keys[index]


_untuned = jax.jit(
    inspect.unwrap(layer_forward),
    static_argnums=(0, 1, 2),
    static_argnames=("tile", "in_fp8"),
    compiler_options=UNTUNED,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(static: StackProgram, trainables, frozens, x, layout, keys, sums, given):
    """Runs all layers without saving residuals: (last layer_output, {name: sum over the layers} of auxiliary values).
    When it is differentiated, `_stack_fwd` and `_stack_bwd` run instead, which save residuals by plan.

    Args:
      static: the layers' static descriptions under the plan, and the wanted auxiliary values.
      x: the first layer's input [B, T, hidden].
      layout: the batch's document boundaries and rotary tables.
      trainables, frozens: for each layer its trained tensors, and its other tensors.
      keys: for each layer its dropout key; None: no dropout.
      sums: for each layer the sums to which its gradients are added (run_stack's gradient_sums); None: there are none.
      given: for each layer {name: value} of what the decoder gives it, {} for most models.
    """
    aux, shared = [], {}
    gathered = first_gathered(trainables, frozens)
    for index, layer in enumerate(static.layers):
        weights = with_whole((trainables[index], frozens[index]), gathered)
        arguments = (*weights, x, layout, _layer_key(keys, index), (), shards_of_layer(trainables, frozens, index + 1))
        taken = layer.taken(given[index], shared)
        x, found, _, gathered = (layer_forward if isinstance(x, Tracer) else _untuned)(
            layer.graph, layer.spec, static.aux + tuple(layer.gives), *arguments, tile=layer.tile, taken=taken
        )
        shared |= {name: found[own] for own, name in layer.gives.items()}
        aux.append({name: found[name] for name in static.aux if name in found})
    return x, total_over_layers(aux)


def _stack_fwd(static: StackProgram, trainables, frozens, x, layout, keys, sums, given):
    """The forward rule of `_stack` (whose arguments these are): (its results, (trainables, frozens, and for each layer
    its gathered weights ([] unless they stay whole), kept residuals, residuals on the host and values taken, then
    layout, keys and sums), which `_stack_bwd` reads). It keeps the layers' residuals by plan (some in FP8), and copies
    the offloaded ones of a layer to the host while the next layer runs; the last layer's stay on the device."""
    kept, hosted, aux, whole, takens, shared = [], [], [], [], [], {}
    names, to_host = (), ()  # residuals of the layer before, which are copied to the host while this layer computes
    last = len(static.layers) - 1
    next_weights = first_gathered(trainables, frozens)
    for index, layer in enumerate(static.layers):
        wanted = layer.kept + layer.in_fp8 + layer.offloaded + static.aux
        gathered, gathers = next_weights, shards_of_layer(trainables, frozens, index + 1)
        weights = with_whole((trainables[index], frozens[index]), gathered)
        arguments = (*weights, x, layout, _layer_key(keys, index), to_host, gathers)
        takens.append(layer.taken(given[index], shared))
        x, residuals, copies, next_weights = layer_forward(
            layer.graph, layer.spec, wanted, *arguments, tile=layer.tile, in_fp8=layer.in_fp8, taken=takens[index]
        )
        shared |= {name: residuals[own] for own, name in layer.gives.items()}
        whole.append(gathered if static.stays_whole(index) else [])
        aux.append({name: residuals.pop(name) for name in static.aux if name in residuals})
        if index:
            hosted.append(dict(zip(names, copies, strict=True)))
        # The backward begins with the last layer, whose residuals would be copied back at once.
        names = tuple(name for name in layer.offloaded if name in residuals) if index < last else ()
        block = nnx.merge(layer.graph, *weights)
        to_host = cut([residuals[name] for name in names], _work(block.segments(), block, x))
        kept.append({name: value for name, value in residuals.items() if name not in names})
    return (x, total_over_layers(aux)), (trainables, frozens, whole, kept, [*hosted, {}], takens, layout, keys, sums)


def _stack_bwd(static: StackProgram, residuals, gradient):
    """The backward rule of `_stack`: runs the layers' backwards from the last to the first, each with the copies and
    collectives of its neighbours at the same time. Returns a gradient or None for each argument after `static`. If
    `_stack` was given `sums`, the gradient of these is the sums plus the gradients of trainables, which get None.

    Args:
      static: the first argument of `_stack`.
      residuals: the second result of `_stack_fwd`.
      gradient: a pair, the gradients of both results of `_stack`.
    """
    dx, daux = gradient  # daux is of sums over the layers, so it is the gradient of each layer's value
    trainables, frozens, whole_weights, kept, hosted, takens, layout, keys, sums = residuals
    gradients: list[Any] = [None] * len(kept)
    dgiven: list[dict[str, jax.Array]] = [{} for _ in kept]
    dshared: dict[str, jax.Array] = {}  # gradients of what earlier layers give, summed over the layers that took it
    reloaded, scatters, gathered = (), [], []

    def add_to_sums(index, parts):
        """Puts a layer's scattered `parts` in place of its Shards' gradients, and adds its gradients to their sums."""
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
        saved = {**kept[index], **takens[index]}
        saved |= {name: join(pieces) for name, pieces in zip(hosted[index], reloaded, strict=True)}
        # Ties this layer's work to its gradient; otherwise XLA shares recomputed values with the forward and keeps
        # them. The same holds for trained weights in the compute dtype: 26 MB a layer of adapters on a 30B's experts.
        gathered = whole_weights[index] if static.stays_whole(index) else gathered
        whole, frozen = with_whole((trainables[index], frozens[index]), gathered)
        # If memory is short these are tied too, because a plan does not count what is computed from them.
        free = {name: saved.pop(name) for name in layer.free if name in kept[index] and not static.short}
        saved, dx, trainable = optimization_barrier((saved, dx, whole))
        to_device = tuple(hosted[index - 1].values()) if index else ()
        dothers = {name: daux[name] for name in static.aux if name in layer.aux}
        dothers |= {own: dshared.pop(name) for own, name in layer.gives.items() if name in dshared}
        gradients[index], dx, dtaken, reloaded, gathered, parts = layer_backward(
            layer.graph,
            layer.spec,
            trainable if static.short else whole,
            frozen,
            {**saved, **free},
            dx,
            layout,
            _layer_key(keys, index),
            to_device,
            [] if static.stays_whole(index - 1) else shards_of_layer(trainables, frozens, index - 1),
            scatters,
            tile=layer.tile,
            dothers=dothers,
        )
        for name, value in dtaken.items():
            if name not in layer.shared:
                dgiven[index][name] = value
            else:
                dshared[name] = dshared[name] + value if name in dshared else value
        if scatters:
            add_to_sums(index + 1, parts)
        scatters = with_gradients(trainables[index], gradients[index])
        if not scatters:
            add_to_sums(index, ())
        if index and static.short:
            # If memory is short: otherwise XLA puts off the products of adapter gradients, which nothing waits for, and
            # keeps their large operands. An 8B LoRA step of 16 layers took 21 GB instead of 13.
            gradients[index], dx = optimization_barrier((gradients[index], dx))
            scatters = with_gradients(trainables[index], gradients[index])
    if scatters:
        add_to_sums(0, [scatter(*pair) for pair in scatters])
    trained = tuple(gradients)
    # Gradients that were added to sums are returned as the sums' cotangent, and the tensors get none.
    others = (None, dx, None, None)
    return (trained, *others, None, tuple(dgiven)) if sums is None else (None, *others, trained, tuple(dgiven))


_stack.defvjp(_stack_fwd, _stack_bwd)


def run_stack(
    layers,
    specs: tuple[LayerSpec, ...],
    x: jax.Array,
    layout: PackedLayout,
    plan: ResidualPlan | None = None,
    dropout_key: jax.Array | None = None,
    gradient_sums=None,
    aux: tuple[str, ...] = (),
    given: Sequence[Mapping[str, jax.Array]] | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """Runs all layers of a decoder on x [B, T, hidden], with residuals placed by `plan` when it is differentiated.
    Decoder.run calls it.

    It is differentiable with respect to x, `given` and the layers' `nnx.Param`s, but not to `Frozen` tensors.

    Args:
      layers, specs: the Blocks, and the LayerSpec of each.
      x: the first layer's input, the tokens' embeddings.
      layout: the batch's document boundaries, and the rotary tables to which the specs refer.
      plan: the placement of the residuals; None: everything is kept.
      dropout_key: draws the adapters' dropout masks; None means no dropout.
      gradient_sums: {layer's index: state like that of its `nnx.Param`s}, sums to which gradients are added layer by
        layer, so that no layer's gradients wait for the others'. Its cotangent is sums plus gradients; the `nnx.Param`s
        get none. A layer without them may be left out. None: the `nnx.Param`s get gradients as usual.
      aux: names of auxiliary values that are wanted of the layers that have them, such as router_sums.
      given: for each layer {name: value} of what it takes and no earlier layer gives (Block.takes); None: nothing.
    Returns:
      (the last layer's output [B, T, hidden], {name: sum over the layers} of auxiliary values)
    Raises:
      ValueError: a plan with another number of layers, a residual that no layer has, or a placement that one cannot
        have; tiles that do not divide the rows, or with dropout; a name in `aux` that no layer has; a layer that takes
        what nothing gives.
      TypeError: a gradient by a `Frozen` tensor.
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
    given = tuple(map(dict, given or [{}] * len(layers)))
    short = any(layer != KEEP for layer in plan.layers)
    layers_of_program = tuple(
        described(layer, split[0], spec, layer_plan, plan.tile_tokens, tuple(own))
        for layer, split, spec, layer_plan, own in zip(layers, splits, specs, plan.layers, given, strict=True)
    )
    require_given(layers_of_program)
    keys = None if dropout_key is None else jax.random.split(dropout_key, len(layers))
    if gradient_sums is not None:  # it has no entry for a layer without trained tensors
        gradient_sums = tuple(gradient_sums.get(index, nnx.State({})) for index in range(len(layers)))
    static = StackProgram(layers_of_program, aux, short, max(plan.whole_weights, 1))
    frozens = not_differentiated(tuple(s[2] for s in splits))
    return _stack(static, tuple(s[1] for s in splits), frozens, x, layout, keys, gradient_sums, given)
