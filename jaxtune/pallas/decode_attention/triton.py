"""Decode attention as Triton kernels, for NVIDIA GPUs of compute capability 8.0 (Ampere) and higher. `decode` calls
them, `refusal` says which calls they cannot compute, and `variant` names their tiles, for the kernels' check at first
use. A row has one new token.

A cache of at most WHOLE keys takes one kernel, in which a program has one KV head of one row. For a longer cache one
kernel runs over splits of the keys (flash-decoding) and one combines them: a program has one split of one KV head of
one row, and ends at once if the row does not see the split. The bodies are in triton_kernels.py, which imports triton
and is imported when it is used.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.decode_attention.splits import live_tiles, log2_sinks, order_of


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile sizes for one number of columns (`width` of the head dim), of the kernel over splits (TILES) or of the
    one over whole caches (WHOLE_TILES)."""

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
    """Returns the number of columns that the kernels use for a head dim: the next power of two, at least 64, because
    Triton's blocks have no other sizes. Columns past the head dim are zeros. Only numbers for which TILES has tiles are
    supported."""
    return max(64, 1 << (dim - 1).bit_length())


def refusal(query, keys) -> str | None:
    """Returns the reason, in words, why these kernels cannot compute a call with such arrays, or None if they can: no
    GPU that runs Triton kernels, another dtype than 16-bit floats, an FP8 cache on a GPU below compute capability 8.9,
    a head dim that is no multiple of 16 or above 512, or a capacity that is no whole number of tiles. query is [B,
    heads, D], keys [B, kv_heads, capacity, D]; only shapes and dtypes are used."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    capability = dispatch.compute_capability()
    if keys.dtype != query.dtype and (capability is None or capability < (8, 9)):
        return f"a cache of {keys.dtype} needs compute capability 8.9"
    dim = query.shape[-1]
    if dim % 16 or width(dim) not in TILES:
        return f"head dim {dim}; multiples of 16 up to {max(TILES)}"
    if keys.shape[2] % TILES[width(dim)].step:
        return f"capacity {keys.shape[2]}, no multiple of {TILES[width(dim)].step}"
    return None


def variant(query) -> str:
    """Returns the tile sizes of the kernel over splits for such a query, as a string, which api.py asks for, also for
    short caches. It becomes a part of the name of the check at first use, so that kernels with other tiles are checked
    separately. A change of TILES or WHOLE_TILES repeats the check also without it, because a stored pass is named by
    the kernels' source too (dispatch.py). Of query [B, heads, D], only the head dim matters."""
    return str(TILES[width(query.shape[-1])])


def decode(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """The Triton implementation of decode_attention: returns the attention of the newest token of each row over its
    cache, [B, heads, D] in query's dtype. A cache of at most WHOLE keys takes one kernel, a longer one a kernel over
    splits of the keys and one that combines them. An empty row gives 0. `refusal` says which calls are supported.

    Args:
      query: [B, heads, D], of the newest tokens.
      keys, values: the caches, [B, kv_heads, capacity, D], in query's dtype or float8_e4m3fn. The token at position p
        is at index p % capacity.
      lengths: int32[B], tokens of each row with the newest one.
      scale: factor on query . key.
      window: how many tokens the newest one sees, itself included; None: all.
      soft_cap: scores s become cap * tanh(s / cap); None: no cap.
      sinks: float[heads], an extra logit per head that has no value; None: none.
    """
    from jaxtune.pallas.decode_attention import triton_kernels

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
    parts, lses = call(
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
        (parts, lses, *order_of(tiles), log2_sinks(sinks, heads)),
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
        (kv_heads, rows),
        warps=4,
        stages=2,
    )
    return out


def _decode_whole(query, keys, values, lengths, scale, window, soft_cap, sinks):
    """Computes decode attention for caches of at most WHOLE keys by one kernel, whose programs each take all keys of a
    row and KV head; no second kernel has to combine splits, which would cost more than dividing the keys gains. The
    kernel becomes a node of XLA's CUDA graph. Returns [B, heads, D] in query's dtype. The arguments (query, keys,
    values, lengths, scale, window, soft_cap, sinks) are those of `decode`, which describes them."""
    from jaxtune.pallas.decode_attention import triton_kernels

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
