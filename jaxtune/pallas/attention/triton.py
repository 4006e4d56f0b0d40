"""Packed attention as Triton kernels, for NVIDIA GPUs since Ampere (compute capability 8.0).

A tile of queries visits keys from its first token's lower bound to its own last token; a tile of keys visits queries up
to its last token's upper bound; bounds never fall along a row. Blocks start at the bound itself, so a tile within one
document has no masked block there. dq has one kernel, dk and dv another, which visits all query heads of its key head:
every sum has a fixed order, bitwise deterministic without atomics.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, one_order, targets
from jaxtune.pallas.attention.layout import PackedLayout


@dataclasses.dataclass(frozen=True)
class Tile:
    """In the forward and dq a program has a tile of `queries` and visits blocks of `keys`; in dk and dv the reverse."""

    queries: int  # queries at a time
    keys: int  # keys at a time
    warps: int  # warps of a program
    stages: int  # Triton's num_stages: blocks of the visited side that are loaded at a time


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of the three kernels for one width of blocks on one kind of GPU."""

    forward: Tile  # of the forward
    query: Tile  # of dq
    key: Tile  # of dk and dv


# {shared memory of one block in KB: {width: tiles}}. Compute capability 9.0 has 227 KB, 8.0 and 8.7 have 163, 8.6,
# 8.9 and 12.x have 99. Measured on an H200: those for 227 directly; the others in code for 8.6 (mma.sync), with the
# number of blocks on a multiprocessor that an A100's and a 4090's shared memory allows. Those of 256 were not measured,
# but chosen to fit and to spill little.
TILES = {
    227: {
        64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 3)),
        128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
        256: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2)),
        512: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    },
    163: {
        64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        128: Tiles(Tile(128, 32, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        256: Tiles(Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
        512: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    },
    99: {
        64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        128: Tiles(Tile(128, 32, 4, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
        256: Tiles(Tile(64, 32, 4, 2), Tile(64, 16, 8, 2), Tile(16, 64, 8, 2)),
        512: Tiles(Tile(64, 16, 8, 2), Tile(32, 16, 8, 1), Tile(32, 16, 8, 2)),
    },
}
LEAST, MOST = 64, 512  # head dims


def width(dim: int) -> int:
    """Columns of the kernels' blocks for a head dim from 64 to 512: the next power of two. Columns from the head dim on
    are zeros.
    """
    return 1 << (dim - 1).bit_length()


def tiles(dim: int) -> Tiles:
    """Tiles for a head dim from 64 to 512 on the GPU compiled for. A GPU not in _SHARED_MEMORY_KB gets those for 99 KB,
    which fit everywhere.
    """
    return TILES[targets.shared_memory_kb()][width(dim)]


def refusal(query, layout: PackedLayout, *, window, soft_cap, sinks) -> str | None:
    """Why these kernels cannot or should not compute a call, or None. Whole rows with a head dim above 256 are refused,
    as XLA makes their gradients faster.
    """
    if not layout.causal:  # runs are not: they only move the bounds
        return "tokens that see later ones"
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype}"
    dim = query.shape[-1]
    if dim % 8 or not LEAST <= dim <= MOST:
        return f"head dim {dim}; multiples of 8 from {LEAST} to {MOST}"
    if width(dim) == MOST and layout.max_documents == 1:
        return f"head dim {dim} on whole rows, of which XLA makes the gradients faster"
    return None


def _call(
    kernel,
    tile: Tile,
    program_tokens: int,
    grid_heads: int,
    arguments,
    out_types,
    key,
    runs: bool,
    *,
    scale,
    window,
    soft_cap,
    apart: bool | None = None,
):
    """Runs a kernel of triton_kernels.py and returns its outputs. ValueError unless scale is above 0.

    program_tokens: tile.queries in the forward and dq, tile.keys in dk and dv.
    grid_heads: query heads in the forward and dq, key heads in dk and dv.
    arguments: input arrays, query first.
    runs: whether `ends` has bounds of runs behind those of documents (`_ends`).
    apart: of the forward.
    """
    if not scale > 0:
        raise ValueError(f"attention: the Triton kernels need scale > 0, not {scale}; pass implementation='reference'")
    rows, length, heads, dim = arguments[0].shape
    more: dict = {} if apart is None else {"APART": apart}
    return compat.triton_call(
        kernel,
        arguments,
        out_types,
        (grid_heads, math.ceil(length / program_tokens), rows),
        warps=tile.warps,
        stages=tile.stages,
        LENGTH=length,
        HEADS=heads,
        KV_HEADS=key.shape[2],
        DIM=dim,
        WIDTH=width(dim),
        SCALE=float(scale),
        CAP=float(soft_cap or 0.0),
        WINDOW=int(window or 0),
        QUERIES=tile.queries,
        KEYS=tile.keys,
        RUNS=runs,
        **more,
    )


def _ends(layout: PackedLayout, bound: str) -> jax.Array:
    """doc_end, or with runs int32[2, B, T]: doc_end, and this bound of the runs."""
    return layout.doc_end if layout.runs is None else jnp.stack([layout.doc_end, getattr(layout.runs, bound)])


def forward(query, key, value, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_forward: (out, lse); lse is 0 at padding, too. ValueError unless scale is above 0."""
    from jaxtune.pallas.attention import triton_kernels

    rows, length, heads, dim = query.shape
    tile = tiles(dim).forward
    apart = one_order.is_exact() and layout.max_documents != 1
    if apart and (window is not None or layout.runs is not None):
        raise ValueError("attention: exact: windows, or tokens that see later ones, in rows of several documents")
    sinks = jnp.full(heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out, lse = _call(
        triton_kernels.forward_kernel,
        tile,
        tile.queries,
        heads,
        (query, key, value, layout.doc_start, _ends(layout, "end"), sinks),
        (jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)),
        key,
        layout.runs is not None,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        apart=apart,
    )
    return out, lse


def backward(query, key, value, out, lse, dout, layout, *, scale, window=None, soft_cap=None, sinks=None):
    """As api.attention_backward: (dquery, dkey, dvalue, dsinks). ValueError unless scale is above 0."""
    from jaxtune.pallas.attention import triton_kernels

    heads, dim = query.shape[2:]
    options = dict(scale=scale, window=window, soft_cap=soft_cap)
    like_query, like_key, like_value = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, value))
    tile = tiles(dim).query
    dquery, delta = _call(
        triton_kernels.query_kernel,
        tile,
        tile.queries,
        heads,
        (query, key, value, out, dout, lse, layout.doc_start, _ends(layout, "end")),
        (like_query, jax.ShapeDtypeStruct(lse.shape, jnp.float32)),
        key,
        layout.runs is not None,
        **options,
    )
    tile = tiles(dim).key
    dkey, dvalue = _call(
        triton_kernels.key_kernel,
        tile,
        tile.keys,
        key.shape[2],
        (query, key, value, dout, lse, delta, _ends(layout, "start")),
        (like_key, like_value),
        key,
        layout.runs is not None,
        **options,
    )
    dsinks = None
    if sinks is not None:
        real = jnp.arange(query.shape[1]) < layout.doc_end
        share = jnp.where(real[:, None], jnp.exp(sinks.astype(jnp.float32)[:, None] - lse), 0.0)
        dsinks = -(share * delta).sum((0, 2)).astype(sinks.dtype)
    return dquery, dkey, dvalue, dsinks
