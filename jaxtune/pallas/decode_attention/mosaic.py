"""Decode attention as Pallas Mosaic GPU kernels for Hopper: one over splits of the keys, and one that combines the
splits. `decode` calls them, `refusal` says which calls they cannot compute, and `variant` names how they divide the
work.

XLA writes the splits (splits.py) into a table (`work_of`), the longest first, and each multiprocessor runs one program
that works through its share of it. Splits of which their row sees no key are skipped, and of the others only the tiles
of keys from the first to the last with a visible key are read (in a ring, some between them may have none). The second
kernel combines the splits of each row in order.

All query heads of a KV head are rows of one tensor-core tile of 64, most of which are unused: the products take a third
of the time that reading the cache takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel, mosaic_types, persistent, tuning
from jaxtune.pallas.decode_attention import mosaic_kernels
from jaxtune.pallas.decode_attention.mosaic_kernels import LINE, MOST_HEADS
from jaxtune.pallas.decode_attention.mosaic_lanes import TILE
from jaxtune.pallas.decode_attention.splits import (
    MASKED,
    SPLIT,
    live_tiles,
    log2_sinks,
    newest_of,
    order_of,
    seen_of,
)
from jaxtune.pallas.dispatch import compute_capability


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the kernel over splits divides its work: those of HEURISTIC, unless tuning.py has others (`blocks_of`)."""

    step: int  # keys of a tile; the bits of results depend on it
    stages: int  # tiles of keys, and of values, that are being copied for a worker at a time
    workers: int  # warpgroups of a program, each of which works alone with slots of its own

    def as_dict(self) -> dict[str, Any]:
        """{field: value} of all fields, as tuning.py stores blocks; `variant` names the blocks of a check by it."""
        return dataclasses.asdict(self)


# By head dim, where nothing has been tuned.
HEURISTIC = {64: Blocks(64, 4, 3), 96: Blocks(64, 3, 3), 128: Blocks(64, 3, 2), 256: Blocks(64, 3, 1)}


def blocks_of(dim: int, dtype) -> Blocks:
    """How the kernel over splits divides its work for a head dim (a key of HEURISTIC) and a dtype: as HEURISTIC says;
    within tuning.forced, by which the benchmark tries others, as given there. An entry in a file of measurements for
    the GPU would come before HEURISTIC, but nothing in jaxtune writes one for this kernel, and none is packaged."""
    found = tuning.tuned("decode attention", f"head_dim={dim}", dtype, Blocks)
    return Blocks(**found) if found else HEURISTIC[dim]


def refusal(query, keys) -> str | None:
    """Returns the reason why these kernels cannot compute a call with such arrays, or None: no Hopper GPU (where they
    are not interpreted), another dtype than 16 bits or a cache in another one, a head dim other than 64, 96, 128 and
    256, more than 64 query heads for a key head, or a capacity of the cache that is no whole number of tiles
    (Blocks.step keys). query is [B, heads, D], keys [B, kv_heads, capacity, D]; only shapes and dtypes are used."""
    if gpu_kernel.interpreter() is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
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
    """The blocks of the kernel for such a query, as a string, which api.py asks for. It becomes a part of the name of
    the check at first use, because a kernel with other blocks is compiled anew and must be checked again. Of query [B,
    heads, D], only the head dim and the dtype matter."""
    return str(blocks_of(query.shape[-1], query.dtype).as_dict())


def work_of(lengths, capacity: int, window: int | None, step: int):
    """The work of the kernels, as tables. It depends only on the arguments here and not on queries or keys, so that XLA
    computes it once for all layers of the same window and capacity.

    Args:
      lengths: int32[B], tokens of each row.
      capacity: of the cache, in keys of a row.
      window: how many keys a token sees, of a sliding window; None: all.
      step: keys of a tile.
    Returns:
      table: int32[B * splits, 6], the longest splits first: row, split, first tile, tiles, index of the row's newest
        key, and how many tokens its newest one may see (seen_of), which can be more than the capacity.
      lines: int32[1], how many lines of the table have tiles.
      order: int32[B, splits], the order in which the splits of a row are combined: those that have tiles, ascending,
        before the others.
      count: int32[B], how many of them have tiles.
    """
    first, tiles = live_tiles(lengths, capacity, window, step)
    row, split = (jax.lax.broadcasted_iota(jnp.int32, tiles.shape, axis) for axis in (0, 1))
    of_row = (newest_of(lengths, capacity), seen_of(lengths, window))
    columns = (row, split, first, tiles, *(jnp.broadcast_to(each[:, None], tiles.shape) for each in of_row))
    table = jnp.stack(columns, -1).reshape(tiles.size, -1)
    table = table[jnp.argsort(-tiles.reshape(-1), stable=True)]
    return table, (tiles > 0).sum(dtype=jnp.int32)[None], *order_of(tiles)


def _smem(shape, dtype):
    """Describes a shared-memory buffer of this shape and dtype for TMA and tensor cores, one of a kernel's
    scratch_types, swizzled as tensor cores read it: in pieces of 128 bytes if a row consists of such pieces, otherwise
    (rows of 96 numbers) of 64 bytes."""
    row_bytes = 128 if shape[-1] * jnp.dtype(dtype).itemsize % 128 == 0 else 64
    return plgpu.SMEM(shape, dtype, transforms=mosaic_types.tiled(dtype, row_bytes))


def _split(query, keys, values, table, lines, blocks: Blocks, scale, soft_cap):
    """Runs the kernel over splits, the first of the two: attention over each split of the keys alone, one persistent
    program for each multiprocessor.

    Args:
      query: [B, kv_heads, padded heads, D], the query heads of each KV head, with rows of zeros behind them.
      keys, values: the caches, [B, kv_heads, capacity, D].
      table, lines: from work_of.
      blocks: how the work is divided.
      scale, soft_cap: the factor on scores, and their soft cap or None.
    Returns:
      (float32[B, kv_heads, splits, padded heads, D], each split's output, normalised by the split's own sum of weights;
        float32[B, kv_heads, splits, padded heads], the log-sum-exps in units of log2). The memory of splits without
        visible keys is not written.
    """
    rows, kv_heads, heads, dim = query.shape
    splits = -(-keys.shape[2] // SPLIT)
    slots = blocks.workers * blocks.stages
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
            _smem((slots, blocks.step, dim), keys.dtype),
            _smem((slots, blocks.step, dim), keys.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(query, keys, values, table, lines)


def _combine(parts, lse, order, count, sinks, group: int, dtype):
    """Runs the kernel that combines the splits, the second of the two, and returns the output of the attention, [B,
    kv_heads, group, D] in dtype.

    Args:
      parts, lse: the outputs and log-sum-exps of splits, from _split.
      order, count: from work_of: int32[B, splits], a row's splits, those with visible keys first; int32[B], how many
        those are.
      sinks: float32[kv_heads, padded heads], in units of log2; MASKED for none.
      group: the number of query heads of a KV head.
      dtype: the dtype of the result.
    """
    rows, kv_heads, splits, padded, dim = parts.shape
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
    )(parts.reshape(rows, kv_heads, splits, padded * dim // LINE, LINE), lse, order, count, sinks)
    return out.reshape(rows, kv_heads, -1)[..., : group * dim].reshape(rows, kv_heads, group, dim)


def decode(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """The Mosaic implementation of decode_attention: returns the attention of the newest token of each row over its
    cache, [B, heads, D] in query's dtype. An empty row gives 0. `refusal` says which calls are supported.

    Args:
      query: [B, heads, D], of the newest tokens.
      keys, values: the caches, [B, kv_heads, capacity, D] in query's dtype. The token at position p is at index p %
        capacity.
      lengths: int32[B], tokens of each row with the newest one.
      scale: factor on query . key.
      window: how many tokens the newest one sees, itself included; None: all.
      soft_cap: scores s become cap * tanh(s / cap); None: no cap.
      sinks: float[heads], an extra logit per head that has no value; None: none.
    """
    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    blocks = blocks_of(dim, query.dtype)
    table, lines, order, count = work_of(lengths, capacity, window, blocks.step)
    # Heads are padded to whole lines of partial results, and many heads to whole programs.
    padding = -group % (MOST_HEADS if group > MOST_HEADS else LINE // math.gcd(LINE, dim))
    grouped = jnp.pad(query.reshape(rows, kv_heads, group, dim), ((0, 0), (0, 0), (0, padding), (0, 0)))
    parts, lse = _split(grouped, keys, values, table, lines, blocks, scale, soft_cap)
    sinks = jnp.pad(log2_sinks(sinks, heads).reshape(kv_heads, group), ((0, 0), (0, padding)), constant_values=MASKED)
    return _combine(parts, lse, order, count, sinks, group, query.dtype).reshape(query.shape)
