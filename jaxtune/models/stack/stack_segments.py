"""Runs one segment of a layer, forward or for its derivative. Low-rank inputs, the products of its linears' inputs with
the adapters' A, need not be computed again where the forward kept them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxtune.models.layers.block import Block
from jaxtune.models.layers.segment import Context, Segment
from jaxtune.models.stack.stack_layers import low_rank_inputs
from jaxtune.pallas.quant_matmul import low_rank


def scope_of(segment: Segment) -> contextlib.AbstractContextManager:
    """The segment's name in profiles, if it is `scoped`."""
    return jax.named_scope(segment.name) if segment.scoped else contextlib.nullcontext()


def run_segment(
    segment: Segment, block: Block, context: Context, values, kept_low_rank=None, factored_inputs=()
) -> tuple[tuple, dict[str, low_rank.LowRankInputs]]:
    """(one result for each of the segment's outputs, {name: its low-rank inputs}, empty if it has none).

    segment: of the block.
    block: the layer's, with its weights.
    context: layout and dropout key for the segment.
    values: one for each of the segment's reads.
    kept_low_rank: low-rank inputs of an earlier run; None: they are computed.
    factored_inputs: pairs of one of `values`, the very array, and its Factors (low_rank.py): the norm's input and
      factors of which that value is the product.
    """
    with scope_of(segment), low_rank.collected(kept_low_rank, factored_inputs) as low_rank_values:
        outputs = segment.run(block, context, *values)
    return outputs, {low_rank_inputs(segment): tuple(low_rank_values)} if jax.tree.leaves(low_rank_values) else {}


def differentiated(segments: Sequence[Segment], saved: Mapping) -> tuple[Segment, ...]:
    """The segments that a layer's backward differentiates, in the order of the forward. A segment with a
    joined_with_previous must follow a differentiable one (IndexError if none is before it). Both become the joined
    segment if the outputs of the one before are saved as arrays. Where they are recomputed or in FP8, memory is short,
    and the joined segment needs more, so both stay.

      segments: of the layer, in order.
      saved: {name: residual} that the backward has.
    """
    chain: list[Segment] = []
    for segment in segments:
        if segment.joined_with_previous is not None and all(
            isinstance(saved.get(n), jax.Array) for n in chain[-1].outputs
        ):
            chain[-1] = segment.joined_with_previous
        elif segment.differentiable:
            chain.append(segment)
    return tuple(chain)


def without_gradient(segments: Sequence[Segment], back: Sequence[Segment]) -> set[str]:
    """The names of values for which the backward computes no gradient: outputs of integers, and those of a segment that
    a joined one stands for.

      segments: of the layer, in order.
      back: those that the backward differentiates (`differentiated`).
    """
    return {name for s in segments for name in s.outputs} - {name for s in back for name in s.outputs}


def low_rank_of(segment: Segment, segments: Sequence[Segment], values: Mapping) -> tuple | None:
    """The low-rank inputs of a segment that the backward differentiates; None if some are missing.

    segment: one of `differentiated`, which may stand for two.
    segments: of the layer, in order.
    values: {name: value} of the layer.
    """
    pairs = itertools.pairwise(segments)
    covered = next((pair for pair in pairs if pair[1].joined_with_previous is segment), (segment,))
    names = [low_rank_inputs(covered_segment) for covered_segment in covered]
    if any(name not in values for name in names):
        return None
    return tuple(value for name in names for value in values[name])


def pullback_of_segment(
    block_of, trainable, segment: Segment, context: Context, inputs, kept_low_rank=None, factors=()
) -> tuple[tuple, Callable]:
    """(outputs, the function from their gradients to those of the trainable tensors and of each input).

    block_of: trainable tensors -> the layer's Block.
    trainable: the layer's trainable tensors.
    segment: of this block.
    context: layout and dropout key for the segment.
    inputs: one for each of the segment's reads.
    kept_low_rank: low-rank inputs of an earlier run; None: they are computed.
    factors: for each input its Factors (as in factored_inputs of `run_segment`) or None; (): there are none.
    """

    def run(trainable, *values):
        factored_inputs = [pair for pair in zip(values, factors, strict=bool(factors)) if pair[1] is not None]
        return tuple(run_segment(segment, block_of(trainable), context, values, kept_low_rank, factored_inputs)[0])

    return jax.vjp(run, trainable, *inputs)
