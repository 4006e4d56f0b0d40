"""Decode attention as Pallas Mosaic GPU kernels for Hopper: one over splits of the keys, one that combines the splits.

Each multiprocessor runs one program over its share of a table of splits, the longest first. All query heads of a KV
head are rows of one tensor-core tile of 64, mostly unused: the products take a third of the time of the cache's reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import gpu_kernel, mosaic_types, persistent, tuning
from jaxtune.pallas.decode.attention import mosaic_kernels
from jaxtune.pallas.decode.attention.mosaic_kernels import LINE, MOST_HEADS
from jaxtune.pallas.decode.attention.mosaic_lanes import TILE
from jaxtune.pallas.decode.attention.splits import (
    MASKED,
    SPLIT,
    live_tiles,
    log2_sinks,
    newest_of,
    order_of,
    seen_of,
)
from jaxtune.pallas.mosaic_modules import plgpu


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the kernel over splits divides its work."""

    step: int  # keys of a tile; the bits of results depend on it
    stages: int  # tiles of keys, and of values, that are being copied for a worker at a time
    workers: int  # warpgroups of a program, each of which works alone with slots of its own

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# By head dim, where nothing has been tuned.
HEURISTIC = {64: Blocks(64, 4, 3), 96: Blocks(64, 3, 3), 128: Blocks(64, 3, 2), 256: Blocks(64, 3, 1)}


def blocks_of(dim: int, dtype) -> Blocks:
    """HEURISTIC's blocks, or those forced or measured."""
    measured = tuning.tuned("decode attention", f"head_dim={dim}", dtype, Blocks)
    return Blocks(**measured) if measured else HEURISTIC[dim]


def refusal(query, keys) -> str | None:
    """Why these kernels cannot compute such a call, or None."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    if keys.dtype != query.dtype:
        return f"a cache of {keys.dtype}"
    if query.shape[-1] not in HEURISTIC:
        return f"head dim {query.shape[-1]}; there are {', '.join(map(str, HEURISTIC))}"
    if query.shape[1] // keys.shape[1] > TILE:
        return f"{query.shape[1] // keys.shape[1]} query heads a key/value head; at most {TILE}"
    step = blocks_of(query.shape[-1], query.dtype).step
    if keys.shape[2] % step:
        return f"capacity {keys.shape[2]}, no multiple of {step}"
    return None


def variant(query) -> str:
    """The blocks as a string, which names the check at first use."""
    return str(blocks_of(query.shape[-1], query.dtype).as_dict())


def work_of(lengths, capacity: int, window: int | None, step: int):
    """The kernels' work, as tables that layers of the same window and capacity share.

    Returns (table int32[B * splits, 6], the longest splits first: row, split, first tile, tiles, index of the row's
    newest key, tokens that the newest may see (seen_of); int32[1], lines with tiles; order and count of order_of).

      lengths: int32[B], tokens of each row, 0 for none. step: keys of a tile.
      window: tokens that the newest sees, itself included; None: all.
    """
    first, tiles = live_tiles(lengths, capacity, window, step)
    row, split = (jax.lax.broadcasted_iota(jnp.int32, tiles.shape, axis) for axis in (0, 1))
    row_columns = (newest_of(lengths, capacity), seen_of(lengths, window))
    columns = (row, split, first, tiles, *(jnp.broadcast_to(column[:, None], tiles.shape) for column in row_columns))
    table = jnp.stack(columns, -1).reshape(tiles.size, -1)
    table = table[jnp.argsort(-tiles.reshape(-1), stable=True)]
    return table, (tiles > 0).sum(dtype=jnp.int32)[None], *order_of(tiles)


def _split(query, keys, values, table, lines, blocks: Blocks, scale, soft_cap):
    """Attention over each split alone: (float32[B, kv_heads, splits, padded heads, D], its log-sum-exps in log2).

    query: [B, kv_heads, padded heads, D], rows of zeros last.
    """
    rows, kv_heads, heads, dim = query.shape
    splits = -(-keys.shape[2] // SPLIT)
    slots = blocks.workers * blocks.stages
    row_bytes = 128 if dim * keys.dtype.itemsize % 128 == 0 else 64  # heads of 96 have rows of 192 bytes
    ring = mosaic_types.smem((slots, blocks.step, dim), keys.dtype, row_bytes)
    outputs = [(rows, kv_heads, splits, heads, dim), (rows, kv_heads, splits, heads)]
    return gpu_kernel.kernel(
        functools.partial(
            mosaic_kernels.split_kernel,
            blocks=blocks,
            scale=scale,
            soft_cap=soft_cap,
            interpreted=gpu_kernel.interpreter() is not None,
        ),
        "decode_attention",
        gpu_kernel.interpreter(),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outputs],
        grid=(persistent.cores(),),
        grid_names=("program",),
        num_threads=blocks.workers,
        thread_name="wg",
        scratch_types=[
            ring,
            ring,
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(query, keys, values, table, lines)


def _combine(split_outputs, lse, order, count, sinks, group: int, dtype):
    """[B, kv_heads, group, D] in dtype; sinks: float32[kv_heads, padded heads] in log2, MASKED for none."""
    rows, kv_heads, splits, padded, dim = split_outputs.shape
    heads = min(group, MOST_HEADS)
    programs = -(-group // heads)
    lines = programs * -(-heads * dim // LINE)
    out = gpu_kernel.kernel(
        functools.partial(mosaic_kernels.combine_kernel, heads=heads, dim=dim),
        "decode_attention_combine",
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct((rows, kv_heads, lines, LINE), dtype),
        grid=(rows, kv_heads, programs),
        grid_names=("row", "kv_head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(split_outputs.reshape(rows, kv_heads, splits, padded * dim // LINE, LINE), lse, order, count, sinks)
    return out.reshape(rows, kv_heads, -1)[..., : group * dim].reshape(rows, kv_heads, group, dim)


def decode(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.decode_attention, for 16-bit queries; only if `refusal` is None."""
    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    blocks = blocks_of(dim, query.dtype)
    table, lines, order, count = work_of(lengths, capacity, window, blocks.step)
    # Heads are padded to whole lines of partial results, and many heads to whole programs.
    padding = -group % (MOST_HEADS if group > MOST_HEADS else LINE // math.gcd(LINE, dim))
    grouped = jnp.pad(query.reshape(rows, kv_heads, group, dim), ((0, 0), (0, 0), (0, padding), (0, 0)))
    split_outputs, lse = _split(grouped, keys, values, table, lines, blocks, scale, soft_cap)
    sinks = jnp.pad(log2_sinks(sinks, heads).reshape(kv_heads, group), ((0, 0), (0, padding)), constant_values=MASKED)
    return _combine(split_outputs, lse, order, count, sinks, group, query.dtype).reshape(query.shape)
