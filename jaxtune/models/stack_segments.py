"""Runs one segment of a layer, forward or for its derivative, for the stack's programs of a layer (stack.py). Both give
and take the segment's low-rank inputs, the products of its linears' inputs with the adapters' A, which a backward need
not compute again where the forward kept them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

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
    segment: Segment, block: Block, context: Context, values, given=None
) -> tuple[tuple, dict[str, low_rank.Made]]:
    """Runs a segment of the block in its profiling scope: (one result for each of the segment's outputs, {the name of
    its low-rank inputs: these}, which is empty if it has none).

    Args:
      segment, block: the segment, and the block that it is of.
      context: the layer's spec, the batch's layout and the segment's dropout key.
      values: one for each of the segment's reads.
      given: its low-rank inputs if an earlier run computed them; None: they are computed.
    """
    with scope_of(segment), low_rank.kept(given) as made:
        outputs = segment.run(block, context, *values)
    return outputs, {low_rank_inputs(segment): tuple(made)} if jax.tree.leaves(made) else {}


def pullback_of_segment(
    block_of, trainable, segment: Segment, context: Context, inputs, given=None
) -> tuple[tuple, Callable]:
    """Runs a segment for its derivative: (outputs, the function from the outputs' gradients to the tuple of the
    gradients of the trainable tensors and of each input), where the segment has no Backward of its own.

    Args:
      block_of: builds the block from trainable tensors.
      trainable: the block's trainable tensors.
      segment, context, inputs: the segment, what its `run` receives beside values, and the values that it reads.
      given: its low-rank inputs if an earlier run computed them; None: they are computed.
    """

    def run(trainable, *values):
        """The segment as a function of the trainable tensors and its inputs."""
        return tuple(run_segment(segment, block_of(trainable), context, values, given)[0])

    return jax.vjp(run, trainable, *inputs)
