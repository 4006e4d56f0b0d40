"""Segments that run over tiles of tokens, one after the other: what they make inside exists for a tile only."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.layers.segment import Context, Segment, multiplications


def tiled_residuals(segments: tuple[Segment, ...]) -> tuple[str, ...]:
    """Names of what tokenwise segments make for each other: all of it is recomputed where they run over tiles."""
    return tuple(name for chain in _chains(segments) for s in chain for name in s.outputs if s is not chain[-1])


def _chains(segments: tuple[Segment, ...]) -> list[tuple[Segment, ...]]:
    """The runs of tokenwise segments that follow one another, and of which nothing is read outside but the end."""
    runs = [tuple(run) for tokenwise, run in itertools.groupby(segments, lambda s: s.tokenwise) if tokenwise]

    def closed(run: tuple[Segment, ...]) -> bool:
        inside = {name for segment in run[:-1] for name in segment.outputs}
        read = {name for segment in segments if segment not in run for name in segment.reads}
        return len(run) > 1 and len(run[-1].outputs) == 1 and inside.isdisjoint(read)

    return [run for run in runs if closed(run)]


def in_tiles(module: nnx.Module, segments: tuple[Segment, ...], tile: int) -> tuple[Segment, ...]:
    """The chain with each run of tokenwise segments as one that runs over tiles of `tile` tokens of each row. Sums of
    the weights' gradients are then over tiles."""
    for chain in _chains(segments):
        first = segments.index(chain[0])
        segments = (*segments[:first], _joined(module, chain, tile), *segments[first + len(chain) :])
    return segments


def _joined(module: nnx.Module, chain: tuple[Segment, ...], tile: int) -> Segment:
    made = {name for segment in chain for name in segment.outputs}
    reads = tuple(dict.fromkeys(name for segment in chain for name in segment.reads if name not in made))

    def whole(module, context: Context, *inputs: jax.Array) -> jax.Array:
        values = dict(zip(reads, inputs, strict=True))
        for segment in chain:
            with jax.named_scope(segment.name):
                outputs = segment.run(module, context, *(values[name] for name in segment.reads))
            values |= zip(segment.outputs, outputs, strict=True)
        return outputs[0]

    def run(module, context: Context, *inputs: jax.Array):
        # In the place of the last one, which the end adds to.
        def one(_, piece, *others):
            return None, (whole(module, context, *others, piece),)

        return _over_tiles(one, None, inputs[-1:], inputs[:-1], tile)[1]

    def backward(module_of, trainable, context: Context, inputs, outputs, gradients):
        del outputs

        def one(total, doutput, *pieces):
            pieces = pieces[len(others) :]
            _, pullback = jax.vjp(lambda t, *pieces: whole(module_of(t), context, *pieces), trainable, *pieces)
            dtrainable, *dpieces = pullback(doutput)
            return jax.tree.map(jnp.add, total, dtrainable), (dpieces[-1], *dpieces[:-1])

        zeros, *others = jax.tree.map(jnp.zeros_like, (trainable, *inputs[:-1]))
        total, (dlast, *dothers) = _over_tiles(one, zeros, (gradients[0], *others), inputs, tile)
        return total, (*dothers, dlast)

    def work(tokens: int, length: int, backward: bool) -> float:
        once = sum(multiplications(segment, module, tokens, length) for segment in chain)
        return 2 * once if backward else once

    return Segment("tiles", reads, chain[-1].makes, run, backward=backward, scoped=False, multiplications=work)


def _over_tiles(step, carry, arrays: tuple[jax.Array, ...], beside: tuple[jax.Array, ...], tile: int):
    """(the last carry, arrays with every tile replaced), in place: step(carry, tiles of arrays, tiles of `beside`)
    gives (carry, what replaces the tiles). Tiles are of the second axis.

    Not a scan, which stacks what comes out beside what goes in: XLA keeps both until the backward.
    """

    def one(index, state):
        carry, arrays = state
        pieces = [jax.lax.dynamic_slice_in_dim(a, index * tile, tile, axis=1) for a in (*arrays, *beside)]
        carry, replacing = step(carry, *pieces)
        return carry, tuple(
            jax.lax.dynamic_update_slice_in_dim(array, piece, index * tile, axis=1)
            for array, piece in zip(arrays, replacing, strict=True)
        )

    return jax.lax.fori_loop(0, arrays[0].shape[1] // tile, one, (carry, arrays))
