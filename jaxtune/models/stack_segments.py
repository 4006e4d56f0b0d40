"""Runs one segment of a layer, forward or for its derivative, for the stack's programs of a layer (stack.py). Both give
and take the segment's low-rank inputs, the products of its linears' inputs with the adapters' A, which a backward need
not compute again where the forward kept them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxtune.models.layers.block import Block
from jaxtune.models.layers.segment import Context, Segment
from jaxtune.models.stack_layers import low_rank_inputs
from jaxtune.pallas.quant_matmul import low_rank


def scope_of(segment: Segment) -> contextlib.AbstractContextManager:
    """The context in which `run_segment` and layer_backward trace a segment and its own backward: its kernels get the
    segment's name in profiles, or none if the segment is not `scoped`."""
    return jax.named_scope(segment.name) if segment.scoped else contextlib.nullcontext()


def run_segment(
    segment: Segment, block: Block, context: Context, values, given=None, normed=()
) -> tuple[tuple, dict[str, low_rank.Made]]:
    """Runs a segment of the block in its profiling scope: (one result for each of the segment's outputs, {the name of
    its low-rank inputs: these}, which is empty if it has none).

    Args:
      segment, block: the segment, and the block that it is of.
      context: the layer's spec, the batch's layout and the segment's dropout key.
      values: one for each of the segment's reads.
      given: its low-rank inputs if an earlier run computed them; None: they are computed.
      normed: pairs of one of `values` and its Factors (low_rank.py).
    """
    with scope_of(segment), low_rank.kept(given, normed) as made:
        outputs = segment.run(block, context, *values)
    return outputs, {low_rank_inputs(segment): tuple(made)} if jax.tree.leaves(made) else {}


def differentiated(segments: Sequence[Segment], saved: Mapping) -> tuple[Segment, ...]:
    """The segments that a layer's backward differentiates, in the order of the forward: those of the chain that are
    differentiable. The Segment.with_before of one stands for it and the one before it if the outputs of the one before
    are saved as arrays. Where they are recomputed or in FP8, memory is short, and it needs more.

    segments: the layer's chain. saved: {name: value} of residuals, arrays or FP8."""
    found: list[Segment] = []
    for segment in segments:
        if segment.with_before is not None and all(isinstance(saved.get(n), jax.Array) for n in found[-1].outputs):
            found[-1] = segment.with_before
        elif segment.differentiable:
            found.append(segment)
    return tuple(found)


def without_gradient(segments: Sequence[Segment], back: Sequence[Segment]) -> set[str]:
    """Returns the names of a layer's values for which the backward computes no gradient. They are the outputs of
    segments that are not differentiated: those of integers, and those for which Segment.with_before stands.

    segments: the layer's chain. back: the segments that are differentiated, from `differentiated`."""
    return {name for s in segments for name in s.outputs} - {name for s in back for name in s.outputs}


def low_rank_of(segment: Segment, segments: Sequence[Segment], values: Mapping) -> tuple | None:
    """The low-rank inputs of a segment that a layer's backward differentiates, or None if not all of them are there.

    Args:
      segment: one of those that `differentiated` returns.
      segments: the layer's chain.
      values: {name: value} of the layer.
    """
    pairs = itertools.pairwise(segments)
    parts = next((pair for pair in pairs if pair[1].with_before is segment), (segment,))
    names = [low_rank_inputs(part) for part in parts]
    if any(name not in values for name in names):
        return None
    return tuple(made for name in names for made in values[name])


def pullback_of_segment(
    block_of, trainable, segment: Segment, context: Context, inputs, given=None, factors=()
) -> tuple[tuple, Callable]:
    """Runs a segment for its derivative: (outputs, the function from the outputs' gradients to the tuple of the
    gradients of the trainable tensors and of each input), where the segment has no Backward of its own.

    Args:
      block_of: builds the block from trainable tensors.
      trainable: the block's trainable tensors.
      segment, context, inputs: the segment, what its `run` receives beside values, and the values that it reads.
      given: its low-rank inputs if an earlier run computed them; None: they are computed.
      factors: for each of the inputs its Factors (low_rank.py) or None; (): there are none.
    """

    def run(trainable, *values):
        """The segment as a function of the trainable tensors and its inputs."""
        normed = [pair for pair in zip(values, factors, strict=bool(factors)) if pair[1] is not None]
        return tuple(run_segment(segment, block_of(trainable), context, values, given, normed)[0])

    return jax.vjp(run, trainable, *inputs)
