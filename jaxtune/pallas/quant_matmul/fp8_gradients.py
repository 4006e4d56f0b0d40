"""x"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.gated.thin_triton import Tile, width_of

_ARRAYS = 4
BLOCK = 128


def tile() -> Tile:
    return Tile(64, 128, 4, 3, 4)


def rounded_pair(arrays: Sequence[jax.Array], inner, bs, shape: Tile, form: int = 1):
    from jaxtune.pallas.quant_matmul import fp8_gradients_kernels as kernels

    dtype, tokens = arrays[0].dtype, len(arrays[0])
    widths, ranks = zip(*(b.shape for b in bs), strict=True)
    rank = max(ranks)
    counts = [-(-width // shape.columns) for width in widths]
    tiles = -(-tokens // shape.rows)
    ranges = min(tiles, max(1, dispatch.multiprocessors() * shape.programs // sum(counts)))
    steps = -(-tiles // ranges)
    ranges = -(-tiles // steps)
    places, firsts, thins = (tuple(sum(of[:index]) for index in range(len(of))) for of in (widths, counts, ranks))
    sides = jnp.concatenate([jnp.pad(b.astype(dtype), ((0, 0), (0, rank - b.shape[1]))) for b in bs])
    codes, scales, parts, dbs = compat.triton_call(
        kernels.rounded_pair_kernel,
        (*arrays, *[arrays[0]] * (_ARRAYS - len(arrays)), inner, sides),
        [
            jax.ShapeDtypeStruct((tokens, sum(widths)), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((sum(widths) // BLOCK, tokens), jnp.float32),
            jax.ShapeDtypeStruct((sum(counts), tokens, rank), jnp.float32),
            jax.ShapeDtypeStruct((ranges, sum(widths), rank), jnp.float32),
        ],
        (sum(counts), ranges),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=tokens,
        WIDTHS=widths,
        PLACES=places,
        FIRST=firsts,
        TOTAL=sum(widths),
        RANKS=ranks,
        THINS=thins,
        JOINED=sum(ranks),
        RANK=rank,
        WIDTH=width_of(rank),
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        STEPS=steps,
        FORM=form,
    )
    dinners = [
        parts[at : at + count, :, :r].sum(0).astype(dtype) for at, count, r in zip(firsts, counts, ranks, strict=True)
    ]
    dbs = dbs.sum(0)
    dbs = [dbs[at : at + width, :r] for at, width, r in zip(places, widths, ranks, strict=True)]
    return (codes, scales.T), jnp.concatenate(dinners, axis=1), dbs
