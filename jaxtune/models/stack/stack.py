"""Runs the layers of a decoder, forward and backward, and places their residuals by plan.

A layer is a chain of segments between named residuals. A plan keeps a residual in device memory, keeps it in e4m3,
offloads it to pinned host memory and copies it back one layer ahead of its use, or recomputes it from earlier segments.
The backward is written by hand (a custom_vjp around the whole stack); it calls jax.vjp on a segment at its saved
inputs, or the segment's own backward.

Layers are unrolled in one jitted step. A scan costs 7 % on an H200 (8B shape) for copies into stacked buffers, and
slices of a stacked host buffer do not overlap with compute. Layers of one kind are traced once, but compiled each.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.lax import optimization_barrier

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT, Block
from jaxtune.models.layers.gradients import added, pulled_back, with_zeros
from jaxtune.models.layers.segment import Context, Segment, multiplications
from jaxtune.models.linear import not_differentiated
from jaxtune.models.placement.collectives import CollectiveSchedule
from jaxtune.models.placement.gathers import first_gathered, scatter, shards_of_layer, with_gradients
from jaxtune.models.placement.partition import Shard, with_whole
from jaxtune.models.placement.streams import Arrivals, with_arrived
from jaxtune.models.placement.transfers import TransferSchedule, copies_start_at_once, cut, join
from jaxtune.models.stack.residual_plan import KEEP, ResidualPlan, residuals_of, unknown_residual
from jaxtune.models.stack.stack_layers import (
    UNTUNED,
    StackProgram,
    describe_layer,
    require_given,
    total_over_layers,
)
from jaxtune.models.stack.stack_norms import NormsApart
from jaxtune.models.stack.stack_segments import (
    low_rank_of,
    pullback_of_segment,
    run_segment,
    scope_of,
    without_gradient,
)
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.quant_matmul import in_e4m3


def _barrier(backward_order, saved_inputs, doutputs, total):
    """The arguments unchanged, but XLA uses none before all are computed, so that a recomputed segment waits for its
    gradient.
    """
    if backward_order.weights_first:
        return optimization_barrier((saved_inputs, doutputs, total))
    return *optimization_barrier((saved_inputs, doutputs)), total


def _differentiable(names, gradients, names_without_gradient: Collection[str]) -> dict[str, jax.Array]:
    """{name: gradient} of a segment's inputs, without float0 (of integers) and names in `names_without_gradient`."""
    named = zip(names, gradients, strict=True)
    return {
        name: value for name, value in named if value.dtype != jax.dtypes.float0 and name not in names_without_gradient
    }


def _differentiated_at_once(segment: Segment, backward_order) -> bool:
    at_once = backward_order.derivatives_at_once or segment.derivative_bytes is not None
    return at_once and segment.differentiable and segment.backward is None


def _work(segments, block: Block, x: jax.Array, backward: bool = False) -> list[float]:
    """Each segment's duration for x [B, T, hidden], as multiplications that large products do in that time."""
    rows, length = x.shape[:2]
    return [multiplications(segment, block, rows * length, length, backward) for segment in segments]


def _contexts(block: Block, spec: LayerSpec, layout: PackedLayout, key) -> Callable[[Segment, Any], tuple]:
    """A function (segment, values) -> (Context with the segment's own dropout key, values), by which masks are not
    drawn early.
    """
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
    returned_names: tuple[str, ...],
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
    to_device=(),
):
    """Runs one layer, while it copies residuals of the layer before to the host and brings weights of later ones.
    Returns (layer_output, {name: value} for the wanted names, copies of `to_host`, `gathers` whole, copies of
    `to_device`).

      graph, trainable, frozen: the layer's Block, for nnx.merge.
      spec: the layer's kind: its parts, window and rotary base.
      returned_names: names of residuals and auxiliary values; the layer may lack some.
      layer_input: [B, T, hidden].
      layout: documents and rotary tables of the rows.
      key: draws the adapters' dropout masks; None: no dropout.
      to_host: Pieces (arrays cut into slices) of the previous layer's residuals.
      gathers: Shards (this device's parts) of weights that the next layer needs whole.
      tile: tokens of each row that tokenwise segments process at a time; None: whole rows.
      in_fp8: those of `returned_names` that are returned rounded to e4m3.
      taken: {name: value} that the layer takes from outside (Block.takes); None: nothing.
      to_device: weights of later layers on the host.
    """
    with jax.named_scope("layer"), copies_start_at_once():
        block = nnx.merge(graph, trainable, frozen)
        segments = block.segments(tile, aux=returned_names)
        context_of = _contexts(block, spec, layout, key)
        values: dict[str, Any] = {LAYER_INPUT: layer_input, **(taken or {})}
        work = _work(segments, block, layer_input)
        copies = TransferSchedule(to_host, work, jax.memory.Space.Host)
        arrivals = TransferSchedule(to_device, work, jax.memory.Space.Device)
        collectives = CollectiveSchedule(gathers, (), work)
        for stage, segment in enumerate(segments):
            inputs = arrivals.start(stage, copies.start(stage, [values[name] for name in segment.reads]))
            context, inputs = context_of(segment, collectives.start(stage, inputs))
            outputs, low_rank = run_segment(segment, block, context, inputs)
            outputs = collectives.finish(stage, arrivals.finish(stage, copies.finish(stage, outputs)))
            values |= {**dict(zip(segment.outputs, outputs, strict=True)), **low_rank}
        returned = {name: values[name] for name in returned_names if name in values}
        output = values[LAYER_OUTPUT]
        rounded = {name: in_e4m3(returned[name]) for name in in_fp8 if name in returned}
        if rounded:  # before the next layer begins; otherwise XLA may keep the values before rounding
            rounded, output = optimization_barrier((rounded, output))
        return output, returned | rounded, copies.arrays, collectives.gathered, arrivals.arrays


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
    dother_outputs=None,
):
    """Runs the backward of a layer, with the copies and collectives of its neighbours. Returns (gradients of trainable;
    of layer_input; {value taken: gradient}; to_device copied; gathers whole; Shards of sums).

      graph, trainable, frozen: the layer's Block, for nnx.merge.
      spec: the layer's kind: its parts, window and rotary base.
      saved: {name: value} of residuals, arrays or FP8, and of what the layer takes; missing ones are recomputed.
      doutput: layer_output's gradient, [B, T, hidden].
      layout, key, tile: those of the layer's forward.
      to_device: what is on the host, a tree: Pieces of the residuals of the layer that is next in the backward, and
        weights of later ones.
      gathers: Shards of the weights that it needs whole.
      scatters: pairs (Shard, gradient of the whole tensor), to be summed over devices.
      dother_outputs: {name: gradient} of auxiliary values and of what later layers took; None: there are none.
    """
    values, pullbacks, block = dict(saved), {}, nnx.merge(graph, trainable, frozen)
    norms_apart = NormsApart(block, doutput, tile, tuple(dother_outputs or {}), saved)
    segments, backward_order = norms_apart.segments, block.order
    context_of = _contexts(block, spec, layout, key)
    recomputed = [s for s in segments[:-1] if not s.aux and any(name not in values for name in s.outputs)]
    backward_segments, names_without_gradient = (
        norms_apart.differentiated[::-1],
        without_gradient(segments, norms_apart.differentiated),
    )
    work = [*_work(recomputed, block, doutput), *_work(backward_segments, block, doutput, backward=True)]
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
            for stage, segment in enumerate(recomputed):
                inputs = start(stage, norms_apart.values(segment, values))
                context, inputs = context_of(segment, inputs)
                if _differentiated_at_once(segment, backward_order):
                    outputs, pullbacks[segment.name] = pullback_of(segment, context, inputs)
                else:
                    outputs, low_rank = run_segment(segment, block, context, inputs)
                    values |= low_rank
                values = {**dict(zip(segment.outputs, finish(stage, outputs), strict=True)), **values}
        with jax.named_scope("backward"):
            gradients, total = {LAYER_OUTPUT: doutput, **(dother_outputs or {})}, None
            for stage, segment in enumerate(backward_segments, len(recomputed)):
                doutputs = tuple(gradients[name] for name in segment.outputs if name in gradients)
                saved_inputs = {
                    name: values[name] for name in norms_apart.saved(segment) if name not in backward_order.shared
                }
                saved_inputs, doutputs, total = _barrier(backward_order, saved_inputs, doutputs, total)
                read = values | start(
                    stage, {name: (values | saved_inputs)[name] for name in norms_apart.saved(segment)}
                )
                inputs = norms_apart.values(segment, read)
                context, doutputs = context_of(segment, doutputs)
                if segment.backward is not None:
                    outputs = tuple(values.get(name) for name in segment.outputs)
                    with scope_of(segment):
                        gradient_pair = segment.backward(block_of, trainable, context, tuple(inputs), outputs, doutputs)
                    dtrainable, dinputs = gradient_pair
                else:
                    operands = low_rank_of(segment, segments, values), norms_apart.factors(segment, read)
                    pullback = pullbacks.get(segment.name) or pullback_of(segment, context, inputs, *operands)[1]
                    dtrainable, *dinputs = pulled_back(pullback, doutputs)
                total = added(total, dtrainable)
                for name, value in finish(
                    stage, _differentiable(segment.reads, dinputs, names_without_gradient)
                ).items():
                    gradients[name] = gradients[name] + value if name in gradients else value
                total = norms_apart.added(segment, block_of, trainable, values | saved_inputs, gradients, total)
        dtaken = {name: gradients[name] for name in block.takes}
        total = None if total is None else with_zeros(total, trainable)
        return total, gradients[LAYER_INPUT], dtaken, copies.arrays, collectives.gathered, collectives.scattered


def _block_of(graph: nnx.GraphDef, frozen, trainable) -> Block:
    """`trainable` is last, so that the others can be bound and the block differentiated by it."""
    return nnx.merge(graph, trainable, frozen)


def _layer_key(keys, index):
    return None if keys is None else keys[index]


# For a stack outside of any program, in which each layer is a program of its own that runs a few times.
_untuned_layer_forward = jax.jit(
    inspect.unwrap(layer_forward),
    static_argnums=(0, 1, 2),
    static_argnames=("tile", "in_fp8"),
    compiler_options=UNTUNED,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(static: StackProgram, trainables, frozens, x, layout, keys, gradient_sums, decoder_inputs):
    """Runs all layers without saving residuals: (last layer_output, {name: sum over the layers} of
    auxiliary values).
    """
    aux, layer_values = [], {}
    gathered, arrivals = first_gathered(trainables, frozens), Arrivals(frozens)
    for index, layer in enumerate(static.layers):
        frozen = with_arrived(frozens[index], arrivals.take(index))
        weights = with_whole((trainables[index], frozen), gathered)
        arguments = (*weights, x, layout, _layer_key(keys, index), (), shards_of_layer(trainables, frozens, index + 1))
        x, residuals, _, gathered, copies = (layer_forward if isinstance(x, Tracer) else _untuned_layer_forward)(
            layer.graph,
            layer.spec,
            static.aux + tuple(layer.gives),
            *arguments,
            tile=layer.tile,
            taken=layer.taken(decoder_inputs[index], layer_values),
            to_device=arrivals.beside(index),
        )
        arrivals.arrive(index, copies)
        layer_values |= {name: residuals[residual] for residual, name in layer.gives.items()}
        aux.append({name: residuals[name] for name in static.aux if name in residuals})
    return x, total_over_layers(aux)


def _stack_fwd(static: StackProgram, trainables, frozens, x, layout, keys, gradient_sums, decoder_inputs):
    """Keeps residuals by plan, and copies a layer's offloaded ones to the host while the next layer runs."""
    resident, hosted, aux, whole_weights, taken_by_layer, layer_values = [], [], [], [], [], {}
    names, to_host = (), ()  # residuals of the layer before, which are copied to the host while this layer computes
    last = len(static.layers) - 1
    next_weights, arrivals, arrived = first_gathered(trainables, frozens), Arrivals(frozens), []
    for index, layer in enumerate(static.layers):
        returned_names = layer.kept + layer.in_fp8 + layer.offloaded + static.aux
        gathered, gathers = next_weights, shards_of_layer(trainables, frozens, index + 1)
        arrived = arrivals.take(index)
        weights = with_whole((trainables[index], with_arrived(frozens[index], arrived)), gathered)
        arguments = (*weights, x, layout, _layer_key(keys, index), to_host, gathers)
        taken_by_layer.append(layer.taken(decoder_inputs[index], layer_values))
        x, residuals, copies, next_weights, of_later = layer_forward(
            layer.graph,
            layer.spec,
            returned_names,
            *arguments,
            tile=layer.tile,
            in_fp8=layer.in_fp8,
            taken=taken_by_layer[index],
            to_device=arrivals.beside(index),
        )
        arrivals.arrive(index, of_later)
        layer_values |= {name: residuals[residual] for residual, name in layer.gives.items()}
        whole_weights.append(gathered if static.stays_whole(index) else [])
        aux.append({name: residuals.pop(name) for name in static.aux if name in residuals})
        if index:
            hosted.append(dict(zip(names, copies, strict=True)))
        # The backward begins with the last layer, whose residuals would be copied back at once.
        names = tuple(name for name in layer.offloaded if name in residuals) if index < last else ()
        block = nnx.merge(layer.graph, *weights)
        to_host = cut([residuals[name] for name in names], _work(block.segments(), block, x))
        resident.append({name: value for name, value in residuals.items() if name not in names})
    return (x, total_over_layers(aux)), (
        trainables,
        frozens,
        arrived,
        whole_weights,
        resident,
        [*hosted, {}],
        taken_by_layer,
        layout,
        keys,
        gradient_sums,
    )


def _stack_bwd(static: StackProgram, residuals, gradient):
    """Runs the layers' backwards from the last to the first, each with the copies and collectives of its neighbours."""
    dx, daux = gradient  # daux is of sums over the layers, so it is the gradient of each layer's value
    trainables, frozens, arrived, whole_weights, resident, hosted, taken_by_layer, layout, keys, gradient_sums = (
        residuals
    )
    arrivals, last = Arrivals(frozens[::-1], arrived), len(resident) - 1
    gradients: list[Any] = [None] * len(resident)
    ddecoder_inputs: list[dict[str, jax.Array]] = [{} for _ in resident]
    dlayer_values: dict[
        str, jax.Array
    ] = {}  # gradients of what earlier layers give, summed over the layers that took it
    reloaded, scatters, gathered = (), [], []

    def add_to_sums(index, shards):
        """Puts a layer's scattered `shards` in place of its Shards' gradients, and adds its gradients to their sums."""
        remaining_shards = iter(shards)
        gradients[index] = jax.tree.map(
            lambda shard, gradient: next(remaining_shards) if isinstance(shard, Shard) else gradient,
            trainables[index],
            gradients[index],
            is_leaf=lambda leaf: isinstance(leaf, Shard),
        )
        if gradient_sums is not None:
            with jax.named_scope("accumulate"):
                gradients[index] = jax.tree.map(jnp.add, gradient_sums[index], gradients[index])

    for index in range(len(resident) - 1, -1, -1):
        layer = static.layers[index]
        saved = {**resident[index], **taken_by_layer[index]}
        saved |= {name: join(pieces) for name, pieces in zip(hosted[index], reloaded, strict=True)}
        # Ties this layer's work to its gradient; otherwise XLA shares recomputed values with the forward and keeps
        # them. The same holds for trained weights in the compute dtype: 26 MB a layer of adapters on a 30B's experts.
        gathered = whole_weights[index] if static.stays_whole(index) else gathered
        frozen = with_arrived(frozens[index], arrivals.take(last - index))
        gathered_trainable, frozen = with_whole((trainables[index], frozen), gathered)
        # If memory is short these are tied too, because a plan does not count what is computed from them.
        untied = {
            name: saved.pop(name) for name in layer.free if name in resident[index] and not static.memory_is_short
        }
        saved, dx, trainable = optimization_barrier((saved, dx, gathered_trainable))
        to_device = tuple(hosted[index - 1].values()) if index else (), arrivals.beside(last - index)
        dother_outputs = {name: daux[name] for name in static.aux if name in layer.aux}
        dother_outputs |= {
            residual: dlayer_values.pop(name) for residual, name in layer.gives.items() if name in dlayer_values
        }
        gradients[index], dx, dtaken, (reloaded, copies), gathered, scattered = layer_backward(
            layer.graph,
            layer.spec,
            trainable if static.memory_is_short else gathered_trainable,
            frozen,
            {**saved, **untied},
            dx,
            layout,
            _layer_key(keys, index),
            to_device,
            [] if static.stays_whole(index - 1) else shards_of_layer(trainables, frozens, index - 1),
            scatters,
            tile=layer.tile,
            dother_outputs=dother_outputs,
        )
        arrivals.arrive(last - index, copies)
        for name, value in dtaken.items():
            if name not in layer.shared:
                ddecoder_inputs[index][name] = value
            else:
                dlayer_values[name] = dlayer_values[name] + value if name in dlayer_values else value
        if scatters:
            add_to_sums(index + 1, scattered)
        scatters = with_gradients(trainables[index], gradients[index])
        if not scatters:
            add_to_sums(index, ())
        if index and static.memory_is_short:
            # If memory is short: otherwise XLA puts off the products of adapter gradients, which nothing waits for, and
            # keeps their large operands. An 8B LoRA step of 16 layers took 21 GB instead of 13.
            gradients[index], dx = optimization_barrier((gradients[index], dx))
            scatters = with_gradients(trainables[index], gradients[index])
    if scatters:
        add_to_sums(0, [scatter(*pair) for pair in scatters])
    trained = tuple(gradients)
    # Gradients that were added to sums are returned as the sums' cotangent, and the tensors get none.
    middle = (None, dx, None, None)
    return (
        (trained, *middle, None, tuple(ddecoder_inputs))
        if gradient_sums is None
        else (None, *middle, trained, tuple(ddecoder_inputs))
    )


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
    layer_inputs: Sequence[Mapping[str, jax.Array]] | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """Runs all layers of a decoder, with residuals placed by `plan`: (the last layer's output, {name: sum over the
    layers} of auxiliary values). Differentiable by x, `layer_inputs` and `nnx.Param`s; TypeError for `Frozen` tensors.

      layers, specs: the Blocks, and the LayerSpec of each.
      x: [B, T, hidden], the first layer's input.
      layout: documents and rotary tables of the rows, for all layers.
      plan: where each layer's residuals are until the backward; None: everything is kept in device memory.
      dropout_key: draws the adapters' dropout masks; None: no dropout.
      gradient_sums: {layer's index: state like that of its `nnx.Param`s}, to which gradients are added layer by layer,
        so that no layer's gradients wait for the others'. Its cotangent is sums plus gradients; the `nnx.Param`s get
        none. None: these get their gradients.
      aux: names of auxiliary values, such as router_sums.
      layer_inputs: for each layer {name: value} of what it takes and no earlier layer gives (Block.takes); None:
        nothing.

    Raises ValueError for a plan that does not fit, tiles that do not divide the rows or go with dropout, a name in
    `aux` that no layer has, or a layer that takes what nothing gives.
    """
    plan = plan or ResidualPlan.uniform(KEEP, len(layers))
    if len(plan.layers) != len(layers):
        raise ValueError(f"the residual plan has {len(plan.layers)} layers, the model {len(layers)}")
    residual_names = [residual.name for residual in residuals_of(layers)]
    for name in {name for layer in plan.layers for name in layer}:
        if name not in residual_names:
            raise ValueError(unknown_residual(name, residual_names))
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
    layer_inputs = tuple(map(dict, layer_inputs or [{}] * len(layers)))
    memory_is_short = any(layer != KEEP for layer in plan.layers)
    layers_of_program = tuple(
        describe_layer(layer, split[0], spec, layer_plan, plan.tile_tokens, tuple(decoder_values))
        for layer, split, spec, layer_plan, decoder_values in zip(
            layers, splits, specs, plan.layers, layer_inputs, strict=True
        )
    )
    require_given(layers_of_program)
    keys = None if dropout_key is None else jax.random.split(dropout_key, len(layers))
    if gradient_sums is not None:  # it has no entry for a layer without trained tensors
        gradient_sums = tuple(gradient_sums.get(index, nnx.State({})) for index in range(len(layers)))
    static = StackProgram(layers_of_program, aux, memory_is_short, max(plan.whole_weights, 1))
    frozens = not_differentiated(tuple(s[2] for s in splits))
    return _stack(static, tuple(s[1] for s in splits), frozens, x, layout, keys, gradient_sums, layer_inputs)


def run_in_parts(
    ends: Sequence[int],
    between: Callable[[jax.Array, int], jax.Array],
    layers,
    specs: tuple[LayerSpec, ...],
    x: jax.Array,
    layout: PackedLayout,
    plan: ResidualPlan | None = None,
    dropout_key: jax.Array | None = None,
    gradient_sums=None,
    aux: tuple[str, ...] = (),
    layer_inputs: Sequence[Mapping[str, jax.Array]] | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """run_stack with x = between(x, i) behind the first ends[i] layers. Layers of different parts exchange nothing.

    ends: ascending; (): run_stack itself. The other arguments and the errors are run_stack's.
    """
    if not ends:
        return run_stack(layers, specs, x, layout, plan, dropout_key, gradient_sums, aux, layer_inputs)
    plan, values = plan or ResidualPlan.uniform(KEEP, len(layers)), []
    if len(plan.layers) != len(layers):
        raise ValueError(f"the residual plan has {len(plan.layers)} layers, the model {len(layers)}")
    for section, (start, end) in enumerate(itertools.pairwise((0, *ends, len(layers)))):
        if section:
            x = between(x, section - 1)
        if start == end:
            continue
        part_layers = list(layers)[start:end]
        part_plan = dataclasses.replace(
            plan, layers=plan.layers[start:end], whole_weights=max(plan.whole_weights - (len(layers) - end), 0)
        )
        sums = gradient_sums
        if sums is not None:
            sums = {index - start: state for index, state in sums.items() if start <= index < end}
        x, part_values = run_stack(
            part_layers,
            specs[start:end],
            x,
            layout,
            part_plan,
            None if dropout_key is None else jax.random.fold_in(dropout_key, section),
            sums,
            tuple(name for name in aux if any(name in layer.aux for layer in part_layers)),
            None if layer_inputs is None else layer_inputs[start:end],
        )
        values.append(part_values)
    return x, total_over_layers(values)
