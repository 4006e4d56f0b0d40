"""The two thin products of an adapter's backward by a Triton kernel. A program multiplies one block of columns by a
range of rows, tile after tile: it keeps one product's sums over these rows in registers, and of the other writes each
tile's sum over its columns. XLA adds up what the programs wrote, in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.thin_pair import reference

_LARGEST_RANK = 32
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
    if dispatch.compute_capability() != (9, 0):
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
    return _first_use(jnp.dtype(dout.dtype), jnp.dtype(b.dtype), rank, out >= _WIDE)


def _first_use(dtype, b_dtype, rank: int, wide: bool) -> str | None:
    """wide: at least _WIDE outputs, for which the tile is another."""
    size = _WIDE + 8 if wide else 1352

    def compare():
        keys = jax.random.split(jax.random.key(0), 3)
        dout, inner = (jax.random.normal(key, (333, n)).astype(dtype) for key, n in zip(keys, (size, rank)))
        b = jax.random.normal(keys[2], (size, rank)).astype(b_dtype)
        kernel_results = jax.jit(thin_pair)(dout, inner, b)
        exact = (dout.astype(jnp.float32), b.astype(dtype).astype(jnp.float32), inner.astype(jnp.float32))
        return kernel_results, dispatch.exactly(reference.thin_pair)(*exact)

    kind = f"{dtype}, {b_dtype}, rank {rank}{', wide' if wide else ''}"
    return dispatch.first_use("thin_pair", "triton", kind, compare)


def thin_pair(dout, inner, b) -> tuple[jax.Array, jax.Array]:
    """(dout b [tokens, r] in dout's dtype, dout^T inner float32[out, r]).

    dout, inner, b: [tokens, out] and [tokens, r] of 16 bits, [out, r].
    """
    from jaxtune.pallas.thin_pair import kernels

    (tokens, out), rank = dout.shape, b.shape[1]
    width = max(16, 1 << (rank - 1).bit_length())
    shape = tile(width, out)
    tiles, blocks = -(-tokens // shape.rows), -(-out // shape.columns)
    ranges = min(tiles, max(1, dispatch.multiprocessors() * shape.programs // blocks))
    steps = -(-tiles // ranges)
    ranges = -(-tiles // steps)
    dinner, db = compat.triton_call(
        kernels.thin_pair_kernel,
        (dout, b, inner),
        [
            jax.ShapeDtypeStruct((blocks, tokens, rank), jnp.float32),
            jax.ShapeDtypeStruct((ranges, out, rank), jnp.float32),
        ],
        (blocks, ranges),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=tokens,
        OUT=out,
        RANK=rank,
        WIDTH=width,
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        STEPS=steps,
    )
    return dinner.sum(0).astype(dout.dtype), db.sum(0)
