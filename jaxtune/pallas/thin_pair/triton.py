"""The two thin products of an adapter's backward, or of several that share x, by a Triton kernel. A program multiplies
one block of columns by a range of rows, tile after tile: it keeps one product's sums over these rows in registers, and
of the other writes each tile's sum over its columns. XLA adds up what the programs wrote, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.ranges import firsts_of, ranges_of
from jaxtune.pallas.thin_pair import reference

_LARGEST_RANK = 32
_OUTPUTS = 3  # that share x: query, key and value
_WIDE = 8192  # numbers of an output from which on a program takes more columns


class Tile(NamedTuple):
    """How the kernel divides its work."""

    rows: int  # of a tile
    columns: int  # of a program
    warps: int  # of a program
    stages: int  # tiles in shared memory: those that are read while one is multiplied, and that one
    programs: int  # for each multiprocessor, at most, if a program has more than one tile


def tile(width: int, out: int) -> Tile:
    """The Tile for thin arrays of `width` columns and outputs of `out` numbers on the GPU compiled for."""
    if targets.here() is not targets.HOPPER:
        return Tile(64, 4096 // max(width, 16), 4, 2, 4)  # tiles are read to registers, by several programs at a time
    if width == 16:
        return Tile(64, 256 if out < _WIDE else 512, 4, 3, 1)
    return Tile(64, 256, 8, 3, 1)


def refusal(dout, b) -> str | None:
    """Why the kernel cannot compute a call, or None; it may run its check at first use."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dout.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dout.dtype}"
    out, rank = b.shape
    if out % 8:
        return f"an output of {out} numbers, no multiple of 8"
    if rank > _LARGEST_RANK:
        return f"rank {rank}, more than {_LARGEST_RANK}"
    # Neither the columns nor the rows of a case are a multiple of the tile's.
    sizes = (_WIDE + 8 if out >= _WIDE else 1352,)
    return _first_use(jnp.dtype(dout.dtype), jnp.dtype(b.dtype), rank, sizes)


def refusal_of_several(douts: Sequence, bs: Sequence) -> str | None:
    """As `refusal`, of one call for several outputs."""
    if len(douts) > _OUTPUTS:
        return f"{len(douts)} outputs, more than {_OUTPUTS}"
    if len({(b.shape[1], b.dtype) for b in bs}) > 1:
        return "adapters of several ranks or dtypes"
    reasons = (refusal(*pair) for pair in zip(douts, bs, strict=True))
    reason = next((reason for reason in reasons if reason is not None), None)
    return reason or _first_use(jnp.dtype(douts[0].dtype), jnp.dtype(bs[0].dtype), bs[0].shape[1], (584, 192, 264))


def _first_use(dtype, b_dtype, rank: int, sizes: tuple[int, ...]) -> str | None:
    """sizes: of outputs; the tile depends on whether one is at least _WIDE."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 2 * len(sizes) + 1)
        inner = jax.random.normal(keys[-1], (333, rank * len(sizes))).astype(dtype)
        douts = [jax.random.normal(key, (333, size)).astype(dtype) for key, size in zip(keys, sizes)]
        bs = [
            jax.random.normal(key, (size, rank)).astype(b_dtype)
            for key, size in zip(keys[len(sizes) :], sizes, strict=False)
        ]

        def exact(douts, inner, bs):
            inners = jnp.split(inner, len(sizes), axis=1)
            dinners, dbs = zip(*map(reference.thin_pair, douts, bs, inners), strict=True)
            return jnp.concatenate(dinners, axis=1), *dbs

        dinner, dbs = jax.jit(thin_pairs)(douts, inner, bs)
        bs = [b.astype(dtype) for b in bs]
        operands = jax.tree.map(lambda array: array.astype(jnp.float32), (douts, inner, bs))
        return (dinner, *dbs), dispatch.exactly(exact)(*operands)

    kind = f"{dtype}, {b_dtype}, rank {rank}, outputs of {sizes}"
    return dispatch.first_use("thin_pair", "triton", kind, compare)


def thin_pair(dout, inner, b) -> tuple[jax.Array, jax.Array]:
    """(dout b [tokens, r] in dout's dtype, dout^T inner float32[out, r]).

    dout, inner, b: [tokens, out] and [tokens, r] of 16 bits, [out, r].
    """
    dinner, [db] = thin_pairs([dout], inner, [b])
    return dinner, db


def thin_pairs(douts: list[jax.Array], inner, bs: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """(dout_i b_i side by side [tokens, outputs r] in their dtype, dout_i^T inner_i float32[out_i, r] each).

    douts, bs: lists of [tokens, out_i] of 16 bits, [out_i, r], up to three. inner: [tokens, outputs r], side by side.
    """
    from jaxtune.pallas.thin_pair import kernels

    widths, tokens, rank = tuple(dout.shape[1] for dout in douts), len(douts[0]), bs[0].shape[1]
    width = max(16, 1 << (rank - 1).bit_length())
    shape = tile(width, max(widths))
    counts = [-(-out // shape.columns) for out in widths]
    ranges, steps = ranges_of(-(-tokens // shape.rows), sum(counts), shape.programs)
    places, first_blocks = firsts_of(widths), firsts_of(counts)
    unused = _OUTPUTS - len(douts)
    products, dbs = compat.triton_call(
        kernels.thin_pair_kernel,
        (*douts, *douts[:1] * unused, *bs, *bs[:1] * unused, inner),
        [
            jax.ShapeDtypeStruct((sum(counts), tokens, rank), jnp.float32),
            jax.ShapeDtypeStruct((ranges, sum(widths), rank), jnp.float32),
        ],
        (sum(counts), ranges),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=tokens,
        WIDTHS=widths,
        PLACES=places,
        FIRST=first_blocks,
        TOTAL=sum(widths),
        RANK=rank,
        WIDTH=width,
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        STEPS=steps,
    )
    dtype, sums = douts[0].dtype, dbs.sum(0)
    if len(douts) == 1:
        return products.sum(0).astype(dtype), [sums]
    blocks = zip(first_blocks, counts, strict=True)
    dinner = jnp.concatenate([products[first : first + count].sum(0) for first, count in blocks], axis=1)
    return dinner.astype(dtype), [sums[first : first + out] for first, out in zip(places, widths, strict=True)]
