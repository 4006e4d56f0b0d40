"""Rounds the gradients of outputs to e4m3, for weights with scales of 128 x 128, and multiplies them by the adapters'
thin arrays, by a Triton kernel that reads each gradient once. A program has a block of columns of one output and a
range of rows; XLA adds up the blocks, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.gated.thin_triton import width_of
from jaxtune.pallas.quant_matmul import fp8_rounding
from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK
from jaxtune.pallas.ranges import firsts_of, ranges_of
from jaxtune.pallas.thin_pair import reference
from jaxtune.pallas.thin_pair.triton import Tile

_ARRAYS = 4  # outputs that share x
_LARGEST_RANK = 32


def tile() -> Tile:
    """The fastest Tile measured on Hopper; other GPUs were not measured. Its columns must be a multiple of 128."""
    return Tile(64, 256, 8, 3, 2) if targets.here() is targets.HOPPER else Tile(32, 128, 4, 2, 4)


def refusal(widths: Sequence[int], ranks: Sequence[int], dtype) -> str | None:
    """Why the kernel cannot round outputs of these widths and multiply them for adapters of these ranks, or None."""
    reason = fp8_rounding.refusal(widths, dtype, True)
    if reason is not None:
        return reason
    odd = next((width for width in widths if width % BLOCK), None)
    if odd is not None:
        return f"an output of {odd} numbers, no multiple of {BLOCK}"
    if max(ranks) > _LARGEST_RANK:
        return f"rank {max(ranks)}, more than {_LARGEST_RANK}"
    return _first_use(jnp.dtype(dtype), width_of(max(ranks)), len(widths) > 1)


def _first_use(dtype, width: int, several: bool) -> str | None:
    """One program computes all rows of a block of columns, so that a tile overwritten too early shows."""
    widths = (384, 128) if several else (256,)

    def compare():
        keys = iter(jax.random.split(jax.random.key(0), 2 * len(widths) + 1))
        douts = [jax.random.normal(next(keys), (717, size)).astype(dtype) for size in widths]
        bs = [jax.random.normal(next(keys), (size, width)).astype(dtype) for size in widths]
        inner = jax.random.normal(next(keys), (717, width * len(widths))).astype(dtype)

        def by_kernel(douts, inner, bs):
            return rounded_pair(douts, inner, bs, tile()._replace(programs=0))

        def exact(douts, inner, bs):
            douts, inner, bs = jax.tree.map(lambda array: array.astype(jnp.float32), (douts, inner, bs))
            inners = jnp.split(inner, len(bs), axis=1)
            thins, dbs = zip(*map(reference.thin_pair, douts, bs, inners), strict=True)
            return jnp.concatenate(thins, axis=1), *dbs

        (codes, scales), products, dbs = jax.jit(by_kernel)(douts, inner, bs)
        expected_codes, expected_scales = jax.jit(lambda *arrays: fp8_rounding.rounded(arrays, None, blocks=True))(
            *douts
        )
        results = codes.astype(jnp.float32), scales, products, *dbs
        return results, (
            expected_codes.astype(jnp.float32),
            expected_scales.T,
            *dispatch.exactly(exact)(douts, inner, bs),
        )

    kind = f"{dtype}, {width} columns, {'several outputs' if several else 'an output'}"
    return dispatch.first_use("gradients_to_fp8", "triton", kind, compare)


def rounded_pair(
    douts: Sequence[jax.Array], inner: jax.Array, bs: Sequence[jax.Array], shape: Tile
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, list[jax.Array]]:
    """(codes [tokens, sum of out_i] and scales float32[tokens, sum of out_i / 128], side by side; the unrounded
    gradients times the B's, [tokens, sum of ranks]; each transposed gradient times its low-rank input, float32[out_i,
    r_i]). Only if `refusal` is None.

      douts: [tokens, out_i] of 16 bits each.
      inner: low-rank inputs, side by side.
      bs: float[out_i, r_i] each.
      shape: the sizes of a program's tile.
    """
    from jaxtune.pallas.quant_matmul import fp8_gradients_kernels as kernels

    dtype, tokens = douts[0].dtype, len(douts[0])
    widths, ranks = zip(*(b.shape for b in bs), strict=True)
    total, rank = sum(widths), max(ranks)
    counts = [-(-width // shape.columns) for width in widths]  # blocks of columns
    ranges, steps = ranges_of(-(-tokens // shape.rows), sum(counts), shape.programs)
    first_columns, firsts, thins = map(firsts_of, (widths, counts, ranks))
    sides = jnp.concatenate([jnp.pad(b.astype(dtype), ((0, 0), (0, rank - b.shape[1]))) for b in bs])
    codes, scales, block_products, dbs = compat.triton_call(
        kernels.rounded_pair_kernel,
        (*douts, *[douts[0]] * (_ARRAYS - len(douts)), inner, sides),
        [
            jax.ShapeDtypeStruct((tokens, total), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((total // BLOCK, tokens), jnp.float32),
            jax.ShapeDtypeStruct((sum(counts), tokens, rank), jnp.float32),
            jax.ShapeDtypeStruct((ranges, total, rank), jnp.float32),
        ],
        (sum(counts), ranges),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=tokens,
        WIDTHS=widths,
        PLACES=first_columns,
        FIRST=firsts,
        TOTAL=total,
        RANKS=ranks,
        THINS=thins,
        JOINED=sum(ranks),
        RANK=rank,
        WIDTH=width_of(rank),
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        STEPS=steps,
    )
    products = [
        block_products[start : start + count].sum(0)[:, :r]
        for start, count, r in zip(firsts, counts, ranks, strict=True)
    ]
    total_dbs = dbs.sum(0)
    dbs = [total_dbs[start : start + width, :r] for start, width, r in zip(first_columns, widths, ranks, strict=True)]
    return (codes, scales.T), jnp.concatenate(products, axis=1).astype(dtype), dbs
