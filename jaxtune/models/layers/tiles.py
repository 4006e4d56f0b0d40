"""Runs consecutive tokenwise segments of a layer, such as an MLP's, over tiles of tokens, so that the values between
them exist for one tile only. This saves memory with long rows; the backward computes each tile again.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.layers.gradients import added, pulled_back, zeros_of_read
from jaxtune.models.layers.segment import Context, Segment, multiplications


def tiled_residuals(segments: tuple[Segment, ...]) -> tuple[str, ...]:
    """The values that segments which run as one over tiles pass to each other, such as an MLP's gate and up. Tiles are
    possible only under a plan that recomputes them all.
    """
    return tuple(name for chain in _chains(segments) for s in chain for name in s.outputs if s is not chain[-1])


def _chains(segments: tuple[Segment, ...]) -> list[tuple[Segment, ...]]:
    """The runs of at least two consecutive tokenwise segments with one output, whose inner values no other segment
    reads.
    """
    runs = [tuple(run) for tokenwise, run in itertools.groupby(segments, lambda s: s.tokenwise) if tokenwise]

    def closed(run: tuple[Segment, ...]) -> bool:
        inside = {name for segment in run[:-1] for name in segment.outputs}
        read = {name for segment in segments if segment not in run for name in segment.reads}
        return len(run) > 1 and len(run[-1].outputs) == 1 and inside.isdisjoint(read)

    return [run for run in runs if closed(run)]


def in_tiles(module: nnx.Module, segments: tuple[Segment, ...], tile: int) -> tuple[Segment, ...]:
    """The chain with each run of tokenwise segments that can be joined as one segment over tiles.

    module: the block, whose matrices give the joined segment's duration.
    segments: of a layer, in order.
    tile: tokens of each row, which it divides. Gradients of weights are summed tile by tile.
    """
    for chain in _chains(segments):
        first = segments.index(chain[0])
        segments = (*segments[:first], _joined(module, chain, tile), *segments[first + len(chain) :])
    return segments


def _joined(module: nnx.Module, chain: tuple[Segment, ...], tile: int) -> Segment:
    """One segment that runs `chain` tile by tile, also in the backward; its output overwrites the
    last value it reads.
    """
    inner_names = {name for segment in chain for name in segment.outputs}
    reads = tuple(dict.fromkeys(name for segment in chain for name in segment.reads if name not in inner_names))

    def whole(module, context: Context, *inputs: jax.Array) -> jax.Array:
        values = dict(zip(reads, inputs, strict=True))
        for segment in chain:
            with jax.named_scope(segment.name):
                outputs = segment.run(module, context, *(values[name] for name in segment.reads))
            values |= zip(segment.outputs, outputs, strict=True)
        return outputs[0]

    def run(module, context: Context, *inputs: jax.Array):

        # The output overwrites the last input, which the chain's end adds to.
        def output_tile(_, piece, *other_tiles):
            return None, (whole(module, context, *other_tiles, piece),)

        return _over_tiles(output_tile, None, inputs[-1:], inputs[:-1], tile)[1]

    def backward(module_of, trainable, context: Context, inputs, outputs, gradients):
        del outputs

        def output_tile(trainable, *pieces):
            return whole(module_of(trainable), context, *pieces)

        def gradient_tiles(total, doutput, *pieces):
            pieces = pieces[len(other_zeros) :]
            dtrainable, *dpieces = pulled_back(jax.vjp(output_tile, trainable, *pieces)[1], doutput)
            return added(total, dtrainable), (dpieces[-1], *dpieces[:-1])

        shapes = [jax.ShapeDtypeStruct((x.shape[0], tile, *x.shape[2:]), x.dtype) for x in inputs]
        zeros = zeros_of_read(output_tile, trainable, *shapes)
        other_zeros = jax.tree.map(jnp.zeros_like, inputs[:-1])
        total, (dlast, *dothers) = _over_tiles(gradient_tiles, zeros, (gradients[0], *other_zeros), inputs, tile)
        return total, (*dothers, dlast)

    def work(tokens: int, length: int, backward: bool) -> float:
        once = sum(multiplications(segment, module, tokens, length) for segment in chain)
        return 2 * once if backward else once

    return Segment("tiles", reads, chain[-1].makes, run, backward=backward, scoped=False, multiplications=work)


def _over_tiles(step, sums, arrays: tuple[jax.Array, ...], read_only: tuple[jax.Array, ...], tile: int):
    """Runs `step` for each tile of the second axis and overwrites `arrays` with its results: (the last sums, arrays).

    step: (sums, tiles of `arrays`, tiles of `read_only`) -> (sums, new tiles of `arrays`), each tile an argument.
    arrays, read_only: [B, T, ...]; `tile` divides T.
    """

    def run_tile(index, state):
        sums, arrays = state
        pieces = [jax.lax.dynamic_slice_in_dim(a, index * tile, tile, axis=1) for a in (*arrays, *read_only)]
        sums, replacing = step(sums, *pieces)
        return sums, tuple(
            jax.lax.dynamic_update_slice_in_dim(array, piece, index * tile, axis=1)
            for array, piece in zip(arrays, replacing, strict=True)
        )

    return jax.lax.fori_loop(0, arrays[0].shape[1] // tile, run_tile, (sums, arrays))
