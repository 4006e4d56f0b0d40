"""Triton kernels for the operations of a decoding step: `products`, `gated_product`, `activated`, `added_norm` and
`placed`. They run on NVIDIA GPUs of compute capability 8.0 and higher. `products` and `gated_product` run on Hopper
only, because they were not measured on other GPUs. api.py calls these functions. experts_triton.py has the operations
of experts. A function whose name ends in `_refusal` returns the reason why a kernel does not support a call, or None.

A program of a product multiplies a tile of a weight's rows, the left side of the tensor cores' product, by rows of x,
the right side. Up to 128 rows of x are one right side, so that each weight is read once. If the weights of `products`
have too few rows to occupy the multiprocessors, the columns that are summed over are divided into splits. The function
that takes the partial sums adds them in order. So a product needs no second kernel, and the bits of a row's result do
not depend on the other rows. The kernels' bodies are in triton_kernels.py, which imports triton and is imported only
when a kernel runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.quant_matmul import LoraWeights

# The most rows of x that a product may have: with more it is bound by multiplications, and XLA's is the right choice.
MOST_ROWS = 128
# The most rows of a product of several weights, which XLA multiplies apart and concatenates, or of a small one, whose
# columns XLA divides, to add up the sums in a kernel of its own; and the most numbers of a small weight.
MOST_ROWS_OF_OTHERS, _SMALL = 256, 6144 * 4096
MOST_RANK = 64  # of an adapter: with a larger one the kernels' sums do not fit the registers
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}  # the numbers of the kernels for activations
_DTYPES = (jnp.bfloat16, jnp.float16)
_SHARED_BYTES = 227 * 1024  # of a program's shared memory on Hopper
_CORES = 132  # multiprocessors of a Hopper GPU
_BLOCK = 2048  # numbers of gate and up that a program of `activated` reads
_ENOUGH = 96  # programs that occupy them well enough: fewer splits are less to add


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among the programs of a kernel: each program multiplies one tile of rows of the weight
    by all rows of x (in experts_triton.py, by those of the tokens that chose its expert), and reads both in steps along
    the columns. The ones that are used were measured on an H200."""

    rows: int  # the number of rows of the weight that a program multiplies; in a gated product, of gate and of up each
    depth: int  # the number of columns that are read in one step
    warps: int  # the number of warps of a program
    stages: int  # how many steps are read ahead
    tokens: int = MOST_ROWS_OF_OTHERS  # the most rows of x that a program multiplies


# Of products, and of gated products with many and with few rows of the weights, as measured on an H200.
_PLAIN, _GATED, _GATED_FEW = Tile(64, 128, 4, 4), Tile(128, 64, 8, 4), Tile(64, 64, 8, 4)
# Of products of 17 to 64 rows of x, for which a further step fits the shared memory.
_AHEAD = Tile(64, 128, 4, 5)
# Of products of up to 16 rows of x whose programs have a multiprocessor each and leave some of them idle.
_FAR_AHEAD = Tile(64, 128, 4, 8)
# Of products of more than 128 rows of x, which are bound by what multiprocessors read from the L2 cache: a program of
# 128 x 128 reads less than one of 64 x 256. And of those whose weights such tiles do not divide.
_MANY, _MANY_UNEVEN = Tile(128, 64, 8, 6, 128), Tile(64, 64, 4, 4)
# Of products with adapters of more than 64 rows of x: larger tiles read and multiply by A half as often.
_ADAPTED = Tile(128, 64, 8, 6)


def padded(rows: int) -> int:
    """The number of rows of x that the tensor cores multiply if x has `rows` rows: the next power of two, at least 16.
    It is the kernels' compile-time constant TOKENS: rows beyond those of x are 0 and are not stored. The kernels are
    compiled for the exact number of rows, COUNT, too. Ranks of adapters are rounded up in the same way
    (`padded_rank`)."""
    return max(16, 1 << (rows - 1).bit_length())


def padded_rank(loras: Sequence[LoraWeights | None]) -> int:
    """The rank that the tensor cores multiply for the adapters `loras` of a product's weights: the next power of two
    from the largest of their ranks, at least 16; 0 if there are none. It is the kernel's compile-time constant RANK,
    beside the exact ranks and the scales, for which it is compiled too."""
    most = max((lora.a.shape[0] for lora in loras if lora is not None), default=0)
    return padded(most) if most else 0


def most_rows(weights: Sequence, loras: Sequence) -> int:
    """The most rows of x that the kernel of products multiplies by these weights with these adapters: 256
    (MOST_ROWS_OF_OTHERS) without adapters for several weights, or for one of at most 25 million numbers (_SMALL), else
    128 (MOST_ROWS)."""
    others = len(weights) > 1 or weights[0].size <= _SMALL
    return MOST_ROWS_OF_OTHERS if others and not padded_rank(loras) else MOST_ROWS


def rows_refusal(count: int, dtype, weights: Sequence, least: int = 1, most: int = MOST_ROWS) -> str | None:
    """The reason why no kernel of a product supports `count` rows of `dtype` and these weights on this GPU, whatever
    the weights' sizes, or None: no Hopper GPU or no jax-triton, another dtype than 16-bit floats, a weight of another
    dtype than the rows, or other counts than `least` to `most`. `products_refusal` and experts_triton.py ask it
    first."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dispatch.compute_capability() != (9, 0):
        return "measured on Hopper alone (compute capability 9.0)"
    if dtype not in _DTYPES or any(weight.dtype != dtype for weight in weights):
        return f"x in {dtype}, weights in {', '.join(str(weight.dtype) for weight in weights)}; one of 16 bits"
    if not least <= count <= most:
        return f"{count} rows; from {least} to {most}"
    return None


def products_refusal(x, weights: Sequence, loras: Sequence[LoraWeights | None], most: int = MOST_ROWS) -> str | None:
    """The reason why the kernels of `products` and `gated_product` do not support a call on this GPU, or None: a reason
    of `rows_refusal`, more than three weights, adapters of a rank above 64, or sizes that tiles do not divide
    (multiples of 64 rows and of 128 columns). x: [N, in]. weights: each [out_i, in]. loras: the adapter of each weight
    or None; empty if there are none. most: the most rows of x."""
    reason = rows_refusal(len(x), x.dtype, weights, most=most)
    if reason is not None:
        return reason
    if len(weights) > 3:
        return f"{len(weights)} weights; up to 3"
    if padded_rank(loras) > MOST_RANK:
        return f"adapters of rank {max(lora.a.shape[0] for lora in loras if lora is not None)}; up to {MOST_RANK}"
    if x.shape[1] % _PLAIN.depth or any(weight.shape[0] % _PLAIN.rows for weight in weights):
        sizes = ", ".join(str(weight.shape) for weight in weights)
        return f"weights {sizes}; multiples of {_PLAIN.rows} rows and {_PLAIN.depth} columns"
    return None


def _splits(inner: int, programs: int) -> int:
    """For `products`: the number of splits, ranges of the columns that different programs sum over, of a product, from
    1 to 8. It is the smallest number that gives enough programs to occupy the multiprocessors, or else the largest, of
    those by which splits are equal and have two steps of columns (128 each) or more; 1 is always allowed. Enough
    programs are 96 (_ENOUGH).

    Args:
      inner: the number of columns that are summed over.
      programs: the number of programs of one split, which is the number of tiles of the weights' rows.
    """
    steps = inner // _PLAIN.depth
    fitting = [n for n in range(1, 9) if steps % n == 0 and (n == 1 or steps // n >= 2)]
    return next((n for n in fitting if n * programs >= _ENOUGH), fitting[-1])


def splits_of_many(x, weights: Sequence, loras: Sequence[LoraWeights | None]) -> int:
    """The number of splits, ranges of the columns that are summed apart, of a product of `products` that XLA multiplies
    because x [N, in] has too many rows for the kernel: 1, 2, 4 or 8. On a Hopper GPU it is the smallest of them with
    which tiles of 128 x 128 of the product occupy the multiprocessors. XLA would divide it in the same way, but add the
    partial sums up in a kernel of its own, where `added_norm` adds them on its way. It is 1 for several weights, and
    with adapters. weights: each [out_i, in]. loras: the adapter of each weight or None; empty if there are none."""
    if dispatch.compute_capability() != (9, 0) or x.dtype not in _DTYPES or len(x) <= MOST_ROWS:
        return 1
    if len(weights) > 1 or padded_rank(loras):
        return 1
    tiles = -(-len(x) // 128) * -(-weights[0].shape[0] // 128)
    fitting = [n for n in (1, 2, 4, 8) if x.shape[1] % (n * _PLAIN.depth) == 0] or [1]
    return next((n for n in fitting if n * tiles >= _ENOUGH), fitting[-1])


def _stages(tile: Tile, tokens: int, weights: int, rank: int) -> int:
    """How many steps a product with adapters reads ahead: those of `tile`, or fewer if the buffers of all these steps
    would not fit the shared memory, but at least 2. `_multiplied` calls it.

    Args:
      tile: how the product is divided among programs.
      tokens: the rows of x, padded.
      weights: how many weights each program multiplies, 1, or 2 of a gated product.
      rank: that of the adapters, padded.
    """
    step = (weights * (tile.rows + rank) + tokens) * tile.depth * 2  # bytes
    return max(n for n in range(2, tile.stages + 1) if n == 2 or n * step <= _SHARED_BYTES)


def _multiplied(x, weights: Sequence, loras: Sequence, tile: Tile, splits: int, activation: int, width: int, dtype):
    """Runs the kernel of products (triton_kernels.product_kernel), for `products` and `gated_product`. Returns [splits,
    N, width] in `dtype`.

    Args:
      x: [N, in].
      weights: one to three, each [out_i, in]; with an activation those of gate and up.
      loras: the adapter of each weight, or None; empty if there are none.
      tile: how the work is divided among programs.
      splits: the number of ranges of columns that are summed separately.
      activation: 0: the result is the products side by side. 1 (silu) or 2 (gelu_tanh): it is activation(gate) * up.
      width: the number of columns of the result.
      dtype: of the result.
    """
    from jaxtune.pallas.few_rows import triton_kernels

    (count, inner), padding = x.shape, 3 - len(weights)
    tokens = min(padded(count), tile.tokens)
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    rank = padded_rank(loras)
    stages = _stages(tile, padded(count), 2 if activation else 1, rank) if rank else tile.stages
    sides, settings = [], {}
    for name, lora in zip(("first", "second", "third"), (*loras, None, None, None), strict=False):
        settings[f"{name.upper()}_RANK"] = 0 if lora is None else lora.a.shape[0]
        settings[f"{name.upper()}_SCALE"] = 1.0 if lora is None else float(lora.scale)
        if not rank:
            settings |= {f"{name}_a": None, f"{name}_b": None}
        else:
            sides += [x, x] if lora is None else [lora.a.astype(x.dtype), lora.b.astype(x.dtype)]
    (out,) = compat.triton_graph_call(
        triton_kernels.product_kernel,
        (x, *weights, *(weights[0],) * padding, *sides),
        (jax.ShapeDtypeStruct((splits, count, width), dtype),),
        (width // tile.rows, splits, -(-count // tokens)),
        warps=tile.warps,
        stages=stages,
        COUNT=count,
        INNER=inner,
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=tokens,
        SPLITS=splits,
        ACTIVATION=activation,
        STAGES=stages,
        RANK=rank,
        **settings,
    )
    return out


def product_tile(x, weights: Sequence, loras: Sequence[LoraWeights | None]) -> Tile:
    """How a product of `products` is divided among programs: by the number of rows of x [N, in], by the rows of the
    weights, each [out_i, in], and by whether there are adapters (`loras`, empty if not)."""
    count, whole = len(x), all(weight.shape[0] % _MANY.rows == 0 for weight in weights)
    if count > MOST_ROWS:
        return _MANY if whole else _MANY_UNEVEN
    if padded(count) > 64:
        return _ADAPTED if padded_rank(loras) and whole else _PLAIN
    if padded(count) > 16:
        return _AHEAD
    programs = sum(weight.shape[0] for weight in weights) // _PLAIN.rows
    return _FAR_AHEAD if _ENOUGH <= programs <= _CORES and not padded_rank(loras) else _PLAIN


def products(x, weights, loras=()):
    """Multiplies x [N, in] by the transposes of `weights`, each [out_i, in], with their adapters `loras` (one for each
    weight or None, or none at all), by one kernel. Returns partial sums float32[splits, N, sum of out_i], or [1, N, sum
    of out_i] in x's dtype if there is one split; their sum over the splits is the products side by side.
    `products_refusal` says which calls are supported."""
    width = sum(weight.shape[0] for weight in weights)
    tile = product_tile(x, weights, loras)
    splits = _splits(x.shape[1], width // tile.rows * -(-len(x) // tile.tokens))
    return _multiplied(x, weights, loras, tile, splits, 0, width, x.dtype if splits == 1 else jnp.float32)


def gated_refusal(x, weights: Sequence, loras: Sequence[LoraWeights | None], activation: str) -> str | None:
    """The reason why the kernel of `gated_product` does not support a call on this GPU, or None: another activation
    than "silu" and "gelu_tanh", or a reason of `products_refusal`. x: [N, in]. weights: (gate, up), [out, in] each.
    loras: the adapter of each or None; empty if there are none. activation: its name."""
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    return products_refusal(x, weights, loras)


def gated_tile(rows: int) -> Tile:
    """How a gated product is divided among programs, by the rows of each of its weights."""
    return _GATED_FEW if rows % _GATED.rows or rows // _GATED.rows < _ENOUGH else _GATED


def gated_product(x, gate, up, activation, loras=()):
    """Computes activation(x gate^T) * (x up^T), [N, out] in x's dtype, by one kernel. x is [N, in], gate and up are
    [out, in], with the adapters `loras` (of gate and up, each may be None; or none at all); activation is "silu" or
    "gelu_tanh". Its argument, its result and x up^T are rounded to x's dtype, as in plain JAX. `gated_refusal` says
    which calls are supported."""
    rows, tile = gate.shape[0], gated_tile(gate.shape[0])
    return _multiplied(x, (gate, up), loras, tile, 1, ACTIVATIONS[activation], rows, x.dtype)[0]


def activated_refusal(gate, activation: str) -> str | None:
    """Returns the reason why the kernel of `activated` does not support a call on this GPU, or None if it does. Reasons
    are a GPU on which Triton kernels do not run, another dtype than bfloat16 and float16, and another activation than
    "silu" and "gelu_tanh".

    Args:
      gate: [N, out], as an array or as a shape.
      activation: its name.
    """
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if gate.dtype not in _DTYPES:
        return f"dtype {gate.dtype}"
    return None if activation in ACTIVATIONS else f"activation {activation}"


def activated(gate, up, activation):
    """Computes activation(gate) * up by one kernel: the second half of a gated product whose products XLA multiplies.
    gate, up: [N, out] of 16 bits. activation: "silu" or "gelu_tanh". It rounds as `gated_product` does."""
    from jaxtune.pallas.few_rows import triton_kernels

    (out,) = compat.triton_graph_call(
        triton_kernels.activated_kernel,
        (gate, up),
        [jax.ShapeDtypeStruct(gate.shape, gate.dtype)],
        (-(-gate.size // _BLOCK),),
        warps=4,
        stages=1,
        BLOCK=_BLOCK,
        SIZE=gate.size,
        ACTIVATION=ACTIVATIONS[activation],
    )
    return out


def added_norm_refusal(x) -> str | None:
    """The reason why the kernel of `added_norm` does not support x [N, hidden] on this GPU, or None: no GPU on which
    Triton kernels run, another dtype than 16-bit floats, or more than 16,384 columns, because a program holds a whole
    row."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype}"
    return None if x.shape[1] <= 16384 else f"{x.shape[1]} numbers; up to 16,384"


def added_norm(x, parts, weight, *, eps, offset, float32):
    """Adds a product, given as partial sums, to the residual stream, by one kernel, of which each program computes one
    row. Returns (the sum, its RMS norm), both [N, hidden] in x's dtype.

    Args:
      x: [N, hidden], the residual stream.
      parts: [splits, N, hidden], the partial sums of the product.
      weight: [hidden], that of the norm.
      eps: the number that the RMS norm adds to the mean square.
      offset: the number that it adds to its weight; it is ignored if float32 is False.
      float32: True: normed numbers times the weight are rounded once, to x's dtype. False: the normed numbers and the
        weight are rounded first, and the product again.
    """
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


def placed_refusal(keys) -> str | None:
    """The reason why the kernel of `placed` does not support a call on this GPU, or None: no GPU on which Triton
    kernels run, a cache in another dtype than 16-bit floats, or a head dim that is no power of two from 32 to 512.
    keys: the cache of keys, [N, kv_heads, capacity, D]."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if keys.dtype not in _DTYPES:
        return f"a cache of {keys.dtype}"
    dim = keys.shape[3]
    if dim & (dim - 1) or not 32 <= dim <= 512:
        return f"head dim {dim}; powers of two from 32 to 512"
    return None


def placed(parts, keys, values, positions, table, norms, *, eps, offset, float32):
    """Norms and rotates the queries and keys of one new token in each of N sequences, and writes its keys and values
    into the caches, by one kernel that changes the caches in place; each program computes one head of one sequence.
    Returns (query [N, heads, D] in the caches' dtype, the cache of keys, the cache of values). XLA copies a cache
    before if the program reads the old one again, or if it is an argument of the jitted function that is not donated.

    Args:
      parts: [splits, N, (heads + 2 kv_heads) D], the partial sums of query, key and value side by side.
      keys, values: the caches, [N, kv_heads, capacity, D]. A token is written at its position modulo capacity.
      positions: int32[N], the position of each new token in its sequence; for a negative one nothing is written into
        the caches, but the query is returned all the same.
      table: (cos, sin) of the rotation's angles, float32[N, D / 2]; None: no rotation.
      norms: the weights [D] of the RMS norms of the query and the key; None: no norms.
      eps: the number that the norms add to the mean square.
      offset: the number that they add to their weights; it is ignored if float32 is False.
      float32: True: normed numbers times the weight are rounded once, to the caches' dtype. False: the normed numbers
        and the weight are rounded first, and the product again.
    """
    from jaxtune.pallas.few_rows import triton_kernels

    splits, count, width = parts.shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = width // dim - 2 * kv_heads
    weights = (parts, parts) if norms is None else norms
    cos, sin = (parts, parts) if table is None else table
    query, keys, values = compat.triton_graph_call(
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
    return query, keys, values
