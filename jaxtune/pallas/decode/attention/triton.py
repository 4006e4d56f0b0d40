"""Decode attention as Triton kernels, from compute capability 8.0 on. A cache of at most WHOLE keys takes one kernel;
for a longer one a kernel runs over splits of the keys (flash-decoding) and another combines them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, targets
from jaxtune.pallas.decode.attention.splits import live_tiles, log2_sinks, order_of


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile sizes for one number of columns (`width` of the head dim)."""

    step: int  # keys of a tile
    warps: int  # warps of a program
    stages: int  # Triton's num_stages: tiles that are being copied at a time


# By `width` of the head dim. Two stages of keys and values fit the 99 KB of shared memory of every GPU.
TILES = {64: Tile(64, 4, 3), 128: Tile(64, 4, 2), 256: Tile(32, 4, 2), 512: Tile(16, 4, 2)}
# The longest cache whose rows are one program for each KV head. Longer ones are divided into splits.
WHOLE = 1024
# Tiles of that kernel.
WHOLE_TILES = {64: Tile(64, 4, 3), 128: Tile(32, 4, 4), 256: Tile(32, 4, 2), 512: Tile(16, 4, 2)}


def width(dim: int) -> int:
    """Columns of the kernels' blocks: the next power of two, at least 64. Only keys of TILES are supported."""
    return max(64, 1 << (dim - 1).bit_length())


def refusal(query, keys) -> str | None:
    """Why these kernels cannot compute such a call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    if keys.dtype != query.dtype and (reason := targets.fp8_refusal()) is not None:
        return reason
    dim = query.shape[-1]
    if dim % 16 or width(dim) not in TILES:
        return f"head dim {dim}; multiples of 16 up to {max(TILES)}"
    if keys.shape[2] % TILES[width(dim)].step:
        return f"capacity {keys.shape[2]}, no multiple of {TILES[width(dim)].step}"
    return None


def variant(query) -> str:
    """The split kernel's tiles as a string, which names the check at first use."""
    return str(TILES[width(query.shape[-1])])


def decode(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.decode_attention, for 16-bit queries; only if `refusal` is None."""
    from jaxtune.pallas.decode.attention import triton_kernels

    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    tile, group = TILES[width(dim)], heads // kv_heads
    if capacity <= WHOLE:
        return _decode_whole(query, keys, values, lengths, scale, window, soft_cap, sinks)
    first, tiles = live_tiles(lengths, capacity, window, tile.step)
    splits = tiles.shape[1]
    call = functools.partial(
        compat.triton_call,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SPLITS=splits,
        DIM=dim,
        GROUP=max(16, 1 << (group - 1).bit_length()),
        WIDTH=width(dim),
    )
    split_outputs, lses = call(
        triton_kernels.decode_split_kernel,
        (query, keys, values, lengths, first, tiles),
        [
            jax.ShapeDtypeStruct((rows, kv_heads, splits, group, dim), np.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, splits, group), np.float32),
        ],
        (splits, kv_heads, rows),
        warps=tile.warps,
        stages=tile.stages,
        CAPACITY=capacity,
        WINDOW=int(window or 0),
        SCALE=float(scale),
        CAP=float(soft_cap or 0.0),
        STEP=tile.step,
    )
    (out,) = call(
        triton_kernels.decode_combine_kernel,
        (split_outputs, lses, *order_of(tiles), log2_sinks(sinks, heads)),
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
        (kv_heads, rows),
        warps=4,
        stages=2,
    )
    return out


def _decode_whole(query, keys, values, lengths, scale, window, soft_cap, sinks):
    """Decode attention by one kernel, for caches so short that a second one would cost more than splits gain."""
    from jaxtune.pallas.decode.attention import triton_kernels

    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    tile = WHOLE_TILES[width(dim)]
    (out,) = compat.triton_graph_call(
        triton_kernels.decode_whole_kernel,
        (query, keys, values, lengths, log2_sinks(sinks, heads)),
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
        (kv_heads, rows),
        warps=tile.warps,
        stages=tile.stages,
        HEADS=heads,
        KV_HEADS=kv_heads,
        CAPACITY=capacity,
        DIM=dim,
        WINDOW=int(window or 0),
        SCALE=float(scale),
        CAP=float(soft_cap or 0.0),
        STEP=tile.step,
        GROUP=max(16, 1 << (heads // kv_heads - 1).bit_length()),
        WIDTH=width(dim),
        STAGES=tile.stages,
    )
    return out
