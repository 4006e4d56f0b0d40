"""Runs consecutive tokenwise segments of a layer, such as those of an MLP, over tiles of tokens, one tile at a time, so
that the values that they pass to each other exist for one tile only. A segment is one step of a layer's computation
(segment.py), and is tokenwise if it computes each token from that token alone. This saves memory with long rows, at the
cost of computing each tile again in the backward. `in_tiles` puts such a joined segment into a layer's chain, and
`tiled_residuals` names the values that then exist for one tile only."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.layers.segment import Context, Segment, multiplications


def tiled_residuals(segments: tuple[Segment, ...]) -> tuple[str, ...]:
    """Names of the values that neighbouring tokenwise segments of a layer pass to each other, such as an MLP's gate and
    up, in the runs that `_chains` finds; () if it finds none. segments: the layer's chain.

    If these segments run over tiles, the values exist for one tile only. So tiles are possible only under a plan that
    recomputes all of them in the backward. A plan may keep or offload them: then `described` (models/stack_layers.py)
    runs the segments whole, without an error, and the planner forecasts them so."""
    return tuple(name for chain in _chains(segments) for s in chain for name in s.outputs if s is not chain[-1])


def _chains(segments: tuple[Segment, ...]) -> list[tuple[Segment, ...]]:
    """Finds the runs of consecutive tokenwise segments in a layer's chain, `segments`, that can run over tiles; [] if
    there is none. Each run has at least two segments, its last segment has a single output, and no segment outside the
    run reads a value that is passed within it. `in_tiles` joins these runs, and `tiled_residuals` names their values.
    """
    runs = [tuple(run) for tokenwise, run in itertools.groupby(segments, lambda s: s.tokenwise) if tokenwise]

    def closed(run: tuple[Segment, ...]) -> bool:
        """Whether a run of segments can be joined: it has several, one output, and passes no value to others but
        that."""
        inside = {name for segment in run[:-1] for name in segment.outputs}
        read = {name for segment in segments if segment not in run for name in segment.reads}
        return len(run) > 1 and len(run[-1].outputs) == 1 and inside.isdisjoint(read)

    return [run for run in runs if closed(run)]


def in_tiles(module: nnx.Module, segments: tuple[Segment, ...], tile: int) -> tuple[Segment, ...]:
    """Returns a layer's chain of segments in which each run of consecutive tokenwise segments that `_chains` finds is
    replaced by one segment that runs over tiles; a chain without such runs is returned unchanged. Block.segments calls
    it under a plan that has tiles.

    Args:
      module: the block of the segments, from whose matrices the duration of the joined segment is computed (_joined).
      segments: the chain.
      tile: tokens of each row in a tile; it divides the rows' length. The gradients of weights are summed tile by tile.
    """
    for chain in _chains(segments):
        first = segments.index(chain[0])
        segments = (*segments[:first], _joined(module, chain, tile), *segments[first + len(chain) :])
    return segments


def _joined(module: nnx.Module, chain: tuple[Segment, ...], tile: int) -> Segment:
    """Joins a chain of tokenwise segments to one segment that runs them tile by tile. Its backward computes each tile
    again, because the values inside the chain are not kept.

    Args:
      module: the block of the segments, from whose matrices the duration of the new segment is computed. By it the
        stack distributes copies and collectives over segments; the planner's forecasts do not read it.
      chain: consecutive tokenwise segments, as `_chains` finds them. The last value that they read from outside has the
        shape of their output, which overwrites it (the residual stream to which the output is added).
      tile: tokens of each row in a tile; it divides the rows' length.
    """
    made = {name for segment in chain for name in segment.outputs}
    reads = tuple(dict.fromkeys(name for segment in chain for name in segment.reads if name not in made))

    def whole(module, context: Context, *inputs: jax.Array) -> jax.Array:
        """Runs the chain on whole inputs or tiles of them, in the order of `reads`; returns its output."""
        values = dict(zip(reads, inputs, strict=True))
        for segment in chain:
            with jax.named_scope(segment.name):
                outputs = segment.run(module, context, *(values[name] for name in segment.reads))
            values |= zip(segment.outputs, outputs, strict=True)
        return outputs[0]

    def run(module, context: Context, *inputs: jax.Array):
        """The `run` of the new segment: its output, computed tile by tile, in a tuple."""

        # The output overwrites the last input, which the chain's end adds to.
        def one(_, piece, *others):
            """The step of `_over_tiles`: from tiles of the last input (`piece`) and the others, the tile of the
            output."""
            return None, (whole(module, context, *others, piece),)

        return _over_tiles(one, None, inputs[-1:], inputs[:-1], tile)[1]

    def backward(module_of, trainable, context: Context, inputs, outputs, gradients):
        """The Backward of the new segment: runs each tile again, and differentiates it."""
        del outputs

        def one(total, doutput, *pieces):
            """The step of `_over_tiles`: adds a tile's weight gradients to `total`; returns (total, input
            gradients)."""
            pieces = pieces[len(others) :]
            _, pullback = jax.vjp(lambda t, *pieces: whole(module_of(t), context, *pieces), trainable, *pieces)
            dtrainable, *dpieces = pullback(doutput)
            return jax.tree.map(jnp.add, total, dtrainable), (dpieces[-1], *dpieces[:-1])

        zeros, *others = jax.tree.map(jnp.zeros_like, (trainable, *inputs[:-1]))
        total, (dlast, *dothers) = _over_tiles(one, zeros, (gradients[0], *others), inputs, tile)
        return total, (*dothers, dlast)

    def work(tokens: int, length: int, backward: bool) -> float:
        """The new segment's Segment.multiplications: those of the chain, twice in the backward, which also
        recomputes."""
        once = sum(multiplications(segment, module, tokens, length) for segment in chain)
        return 2 * once if backward else once

    return Segment("tiles", reads, chain[-1].makes, run, backward=backward, scoped=False, multiplications=work)


def _over_tiles(step, sums, arrays: tuple[jax.Array, ...], beside: tuple[jax.Array, ...], tile: int):
    """Runs `step` for each tile of the second axis and overwrites `arrays` with its results: (the last sums, arrays).
    The forward and the backward of a joined segment (`_joined`) call it.

    It is a lax.fori_loop and no lax.scan, because a scan stacks its outputs in new arrays, and XLA then keeps inputs
    and outputs in memory until the backward.

    Args:
      step: (sums, tiles of `arrays`, tiles of `beside`) -> (sums, tuple of new tiles of `arrays`); each tile is an
        argument of its own.
      sums: a pytree that each step updates, such as the sums of the weights' gradients; None in the forward.
      arrays: [B, T, ...], overwritten in place.
      beside: [B, T, ...], only read.
      tile: tokens of a tile, which divides T, so that the steps cover all tokens in order.
    """

    def one(index, state):
        """Runs `step` for tile number `index`; state: (sums, arrays), which it returns changed."""
        sums, arrays = state
        pieces = [jax.lax.dynamic_slice_in_dim(a, index * tile, tile, axis=1) for a in (*arrays, *beside)]
        sums, replacing = step(sums, *pieces)
        return sums, tuple(
            jax.lax.dynamic_update_slice_in_dim(array, piece, index * tile, axis=1)
            for array, piece in zip(arrays, replacing, strict=True)
        )

    return jax.lax.fori_loop(0, arrays[0].shape[1] // tile, one, (sums, arrays))
