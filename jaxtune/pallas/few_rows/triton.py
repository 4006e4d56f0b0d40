"""The operations of a decoding step as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and higher.

Products read each weight once, in tiles of its rows, which are the left side of the tensor cores' product, and all rows
of x, which are the right side. Where a weight has too few rows for all multiprocessors, its columns are divided into
splits, and whoever reads the partial sums adds them in order: so a product needs no second pass, and a row's bits do
not depend on the other rows. The bodies are in triton_kernels.py, which imports triton and is imported when it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch

# Rows of x that a product may have: a single one is a product with a vector, and more than the most make the product
# bound by multiplications; both are the vendor's.
LEAST_ROWS, MOST_ROWS = 2, 128
_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
_DTYPES = (jnp.bfloat16, jnp.float16)
_ENOUGH = 96  # programs that occupy the 132 multiprocessors of a Hopper GPU well enough: fewer splits are less to add


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among programs."""

    rows: int  # of the weight, of a program
    depth: int  # columns that are read at a time
    warps: int
    stages: int  # reads on their way


# Of products, and of gated products with many and with few rows of the weights, as measured on an H200.
_PLAIN, _GATED, _GATED_FEW = Tile(64, 128, 4, 4), Tile(128, 64, 8, 4), Tile(64, 64, 8, 4)


def padded(rows: int) -> int:
    """The rows of x that the tensor cores multiply: a power of two, at least 16."""
    return max(16, 1 << (rows - 1).bit_length())


def products_refusal(x, weights: Sequence) -> str | None:
    """The reason why `products` and `gated_product` cannot serve x [N, in] and these weights [out_i, in], or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dispatch.compute_capability() != (9, 0):
        return "measured on Hopper alone (compute capability 9.0)"
    if x.dtype not in _DTYPES or any(weight.dtype != x.dtype for weight in weights):
        return f"x in {x.dtype}, weights in {', '.join(str(weight.dtype) for weight in weights)}; one of 16 bits"
    if not LEAST_ROWS <= x.shape[0] <= MOST_ROWS:
        return f"{x.shape[0]} rows; from {LEAST_ROWS} to {MOST_ROWS}"
    if len(weights) > 3:
        return f"{len(weights)} weights; up to 3"
    if x.shape[1] % _PLAIN.depth or any(weight.shape[0] % _PLAIN.rows for weight in weights):
        sizes = ", ".join(str(weight.shape) for weight in weights)
        return f"weights {sizes}; multiples of {_PLAIN.rows} rows and {_PLAIN.depth} columns"
    return None


def _splits(inner: int, programs: int) -> int:
    """Into how many parts the columns of a product are divided, so that few rows of weights occupy all
    multiprocessors: as few as do, each with two reads or more. inner: the columns. programs: the tiles of the weights'
    rows, each a program in each part."""
    steps = inner // _PLAIN.depth
    fitting = [n for n in range(1, 9) if steps % n == 0 and (n == 1 or steps // n >= 2)]
    return next((n for n in fitting if n * programs >= _ENOUGH), fitting[-1])


def _multiplied(x, weights: Sequence, tile: Tile, splits: int, activation: int, width: int, dtype) -> jax.Array:
    """Runs product_kernel: [splits, N, width] in dtype.

    Args:
      x: [N, in].
      weights: one to three, each [out_i, in]; with an activation those of gate and up.
      tile: how a program reads them.
      splits: parts of the columns, which are summed apart.
      activation: 0: products alone; else the number of the gated product's activation.
      width: columns of the result.
      dtype: of the result.
    """
    from jaxtune.pallas.few_rows import triton_kernels

    (count, inner), padding = x.shape, 3 - len(weights)
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    (out,) = compat.triton_graph_call(
        triton_kernels.product_kernel,
        (x, *weights, *(weights[0],) * padding),
        (jax.ShapeDtypeStruct((splits, count, width), dtype),),
        (width // tile.rows, splits),
        warps=tile.warps,
        stages=tile.stages,
        COUNT=count,
        INNER=inner,
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=padded(count),
        SPLITS=splits,
        ACTIVATION=activation,
        STAGES=tile.stages,
    )
    return out


def products(x, weights):
    """The products of x [N, in] with weights, each [out_i, in], side by side, as `api.products` describes them:
    partial sums, float32[splits, N, sum of out_i], or the products in x's dtype if there is one split."""
    width = sum(weight.shape[0] for weight in weights)
    splits = _splits(x.shape[1], width // _PLAIN.rows)
    return _multiplied(x, weights, _PLAIN, splits, 0, width, x.dtype if splits == 1 else jnp.float32)


def gated_refusal(x, weights: Sequence, activation: str) -> str | None:
    """The reason why `gated_product` cannot serve a call, or None: x is [N, in], weights are those of gate and up,
    [out, in] each, activation its name."""
    if activation not in _ACTIVATIONS:
        return f"activation {activation}"
    return products_refusal(x, weights)


def gated_product(x, gate, up, activation):
    """activation(x gate^T) * (x up^T), [N, out] in x's dtype, by one kernel: x is [N, in], gate and up are [out, in],
    activation is its name. `api.gated_product` describes the roundings."""
    rows = gate.shape[0]
    tile = _GATED if rows % _GATED.rows == 0 and rows // _GATED.rows >= _ENOUGH else _GATED_FEW
    return _multiplied(x, (gate, up), tile, 1, _ACTIVATIONS[activation], rows, x.dtype)[0]


def added_norm_refusal(x) -> str | None:
    """The reason why `added_norm` cannot serve x [N, hidden], or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype}"
    return None if x.shape[1] <= 16384 else f"{x.shape[1]} numbers; up to 16,384"


def added_norm(x, parts, weight, *, eps, offset, float32):
    """(x plus the sum of parts, the RMS norm of that), both [N, hidden] in x's dtype, by one kernel, of which a
    program has one row. x, parts, weight, eps, offset and float32 are the arguments of `api.added_norm`."""
    from jaxtune.pallas.few_rows import triton_kernels

    count, size = x.shape
    added, normed = compat.triton_graph_call(
        triton_kernels.added_norm_kernel,
        (x, parts, weight),
        [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        (count,),
        warps=8 if size > 2048 else 4,
        stages=1,
        COUNT=count,
        SIZE=size,
        WIDTH=1 << (size - 1).bit_length(),
        SPLITS=parts.shape[0],
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
    )
    return added, normed


def placed_refusal(parts, keys, table) -> str | None:
    """The reason why `placed` cannot serve a call with such arrays, or None: keys is a cache [N, kv_heads, capacity,
    D], table (cos, sin) or None; parts is not used."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if keys.dtype not in _DTYPES:
        return f"a cache of {keys.dtype}"
    dim = keys.shape[3]
    if dim & (dim - 1) or not 32 <= dim <= 512:
        return f"head dim {dim}; powers of two from 32 to 512"
    if table is not None and table[0].shape[-1] != dim // 2:
        return f"{2 * table[0].shape[-1]} of {dim} dimensions are rotated"
    return None


def placed(parts, keys, values, positions, table, norms, *, eps, offset, float32):
    """(query, keys, values) as `api.placed` describes them, by one kernel that changes the caches in place; a program
    has one head of one row. parts, keys, values, positions, table, norms, eps, offset and float32 are the arguments of
    `api.placed`."""
    from jaxtune.pallas.few_rows import triton_kernels

    splits, count, width = parts.shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = width // dim - 2 * kv_heads
    weights = (parts, parts) if norms is None else norms
    cos, sin = (parts, parts) if table is None else table
    return compat.triton_graph_call(
        triton_kernels.placed_kernel,
        (parts, *weights, cos, sin, positions, keys, values),
        [jax.ShapeDtypeStruct((count, heads, dim), keys.dtype)]
        + [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values)],
        (heads + 2 * kv_heads, count),
        warps=1,
        stages=1,
        aliases={6: 1, 7: 2},
        COUNT=count,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        CAPACITY=capacity,
        SPLITS=splits,
        NORMS=int(norms is not None),
        ROTATES=int(table is not None),
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
    )
