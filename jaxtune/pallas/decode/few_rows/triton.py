"""Triton kernels for the operations of a decoding step, from compute capability 8.0 on; products on Hopper only.

A program of a product multiplies a tile of a weight's rows by up to 128 rows of x, so that each weight is read once.
Weights with too few rows to occupy the multiprocessors are divided into splits of the summed columns; whoever takes the
partial sums adds them in order, and a row's bits depend on no other row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, one_order, targets
from jaxtune.pallas.decode.few_rows.shards import whole_shape
from jaxtune.pallas.quant_matmul import LoraWeights
from jaxtune.pallas.quant_matmul.few_sizes import ENOUGH, NUMBERS, fewest_splits, padded
from jaxtune.pallas.quant_matmul.few_thin import MOST_RANK, gates_of, padded_rank
from jaxtune.pallas.quant_matmul.fp8_few import BLOCK, Coded, coded_types

# The most rows of x that a product may have: with more it is bound by multiplications, and XLA's is the right choice.
MOST_ROWS = 128
# The most rows of a product of several weights, which XLA multiplies apart and concatenates, or of a small one, whose
# columns XLA divides, to add up the sums in a kernel of its own; and the most numbers of a small weight.
MOST_ROWS_OF_OTHERS, _SMALL = 256, 6144 * 4096
_MOST_GATED = 64 * MOST_RANK  # rows times rank of a gated product with adapters' gates: more spill
_DTYPES = (jnp.bfloat16, jnp.float16)
_SHARED_BYTES = 227 * 1024  # of a program's shared memory on Hopper
_MULTIPROCESSORS = 132  # multiprocessors of a Hopper GPU
_BLOCK = 2048  # numbers of gate and up that a program of `activated` reads
# Up to so many rows of x, a product of at least so many programs is as fast undivided, if it is read far enough ahead.
_UNDIVIDED_ROWS, _UNDIVIDED = 32, 64


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among programs: each multiplies rows of the weight by all rows of x, in steps of
    columns.
    """

    rows: int  # the number of rows of the weight that a program multiplies; in a gated product, of gate and of up each
    depth: int  # the number of columns that are read in one step
    warps: int  # the number of warps of a program
    stages: int  # how many steps are read ahead
    tokens: int = MOST_ROWS_OF_OTHERS  # the most rows of x that a program multiplies


# Of products, and of gated products with many and with few rows of the weights, as measured on an H200.
_PLAIN, _GATED, _GATED_FEW = Tile(64, 128, 4, 4), Tile(128, 64, 8, 4), Tile(64, 64, 8, 4)
# Of products of 17 to 64 rows of x, for which a further step fits the shared memory.
_AHEAD = Tile(64, 128, 4, 5)
# Of undivided products of up to 16 rows of x whose programs have a multiprocessor each, and of up to 32 rows whose
# programs leave many multiprocessors idle.
_FAR_AHEAD = Tile(64, 128, 4, 8)
# Of products of more than 128 rows of x, which are bound by what multiprocessors read from the L2 cache: a program of
# 128 x 128 reads less than one of 64 x 256. And of those whose weights such tiles do not divide.
_MANY, _MANY_UNEVEN = Tile(128, 64, 8, 6, 128), Tile(64, 64, 4, 4)
# Of products with adapters of more than 64 rows of x, and of fewer if such tiles occupy all multiprocessors: larger
# tiles read and multiply by A half as often.
_ADAPTED, _ADAPTED_WIDE = Tile(128, 64, 8, 6), Tile(128, 64, 4, 4)
# Of up to 128 rows of x and columns that are no multiple of 128, such as hidden sizes of 576 and 960.
_SHALLOW = Tile(64, 64, 4, 6)
# From so many columns on an odd number of 64s has kernels. XLA multiplies fewer as fast, and nearer to training.
_ODD_COLUMNS = 512


def reads_shards(x) -> bool:
    """Whether a step of a product reads columns of one shard alone, whatever the tile."""
    return x.shape[-1] % _PLAIN.depth == 0


def most_rows(weights: Sequence, loras: Sequence) -> int:
    """Most rows of x of a product: 256 without adapters for several weights or one of at most 25 million numbers, else
    128.
    """
    several_or_small = len(weights) > 1 or weights[0].size <= _SMALL
    return MOST_ROWS_OF_OTHERS if several_or_small and not padded_rank(loras) else MOST_ROWS


def rows_refusal(count: int, dtype, weights: Sequence, fewest: int = 1, most: int = MOST_ROWS) -> str | None:
    """Why no kernel of a product supports from `fewest` to `most` rows and these weights' dtypes, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.measured(targets.HOPPER)) is not None:
        return reason
    if dtype not in _DTYPES or any(weight.dtype != dtype for weight in weights):
        return f"x in {dtype}, weights in {', '.join(str(weight.dtype) for weight in weights)}; one of 16 bits"
    if not fewest <= count <= most:
        return f"{count} rows; from {fewest} to {most}"
    return None


def products_refusal(x, weights: Sequence, loras: Sequence[LoraWeights | None], most: int = MOST_ROWS) -> str | None:
    """Why the kernels of products do not support a call on this GPU, or None."""
    count, columns = whole_shape(x, 2).shape
    reason = rows_refusal(count, x.dtype, weights, most=most)
    if reason is not None:
        return reason
    if len(weights) > 3:
        return f"{len(weights)} weights; up to 3"
    if padded_rank(loras) > MOST_RANK:
        return f"adapters of rank {max(lora.a.shape[0] for lora in loras if lora is not None)}; up to {MOST_RANK}"
    if any(weight.shape[0] % _PLAIN.rows for weight in weights) or columns % _depth(columns):
        sizes = ", ".join(str(weight.shape) for weight in weights)
        return (
            f"weights {sizes}; multiples of {_PLAIN.rows} rows and of {_PLAIN.depth} columns, or of {_SHALLOW.depth} "
            f"from {_ODD_COLUMNS} on"
        )
    return None


def _depth(columns: int) -> int:
    """Columns in steps of which they are divided."""
    return _SHALLOW.depth if columns % _PLAIN.depth and columns >= _ODD_COLUMNS else _PLAIN.depth


def _undivided(count: int, loras: Sequence[LoraWeights | None], programs: int) -> bool:
    """Whether a product of `count` rows of x is one sum over ascending columns, as training's is."""
    return count <= _UNDIVIDED_ROWS and programs >= _UNDIVIDED and not padded_rank(loras)


def splits_of_many(x, weights: Sequence, loras: Sequence[LoraWeights | None]) -> int:
    """Splits (1, 2, 4 or 8) of a product that XLA multiplies: the fewest with which tiles of 128 x 128 occupy a Hopper
    GPU; 1 for several weights or with adapters.
    """
    if targets.here() is not targets.HOPPER or x.dtype not in _DTYPES or len(x) <= MOST_ROWS:
        return 1
    if len(weights) > 1 or padded_rank(loras) or one_order.is_exact():
        return 1
    tiles = -(-len(x) // 128) * -(-weights[0].shape[0] // 128)
    fitting = [n for n in (1, 2, 4, 8) if x.shape[1] % (n * _PLAIN.depth) == 0] or [1]
    return next((n for n in fitting if n * tiles >= ENOUGH), fitting[-1])


def _stages(tile: Tile, tokens: int, weights: int, rank: int) -> int:
    """Steps that a product with adapters reads ahead: as many as fit shared memory, at least 2."""
    step = (weights * (tile.rows + rank) + tokens) * tile.depth * 2  # bytes
    return max(n for n in range(2, tile.stages + 1) if n == 2 or n * step <= _SHARED_BYTES)


def _multiplied(x, weights: Sequence, loras: Sequence, tile: Tile, splits: int, activation: int, width: int, dtype):
    """Runs product_kernel: [splits, N, width] in `dtype`; activation: 0: products side by side, 1:
    silu, 2: gelu_tanh.
    """
    from jaxtune.pallas.decode.few_rows import triton_kernels

    (count, inner), padding = whole_shape(x, 2).shape, 3 - len(weights)
    tokens = min(padded(count), tile.tokens)
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    rank = padded_rank(loras)
    stages = _stages(tile, padded(count), 2 if activation else 1, rank) if rank else tile.stages
    gates, adapter_arrays, settings = gates_of(loras, count), [], {}
    for name, lora in zip(("first", "second", "third"), (*loras, None, None, None), strict=False):
        settings[f"{name.upper()}_RANK"] = 0 if lora is None else lora.a.shape[0]
        settings[f"{name.upper()}_SCALE"] = 1.0 if lora is None else float(lora.scale)
        if not gates:
            settings |= {f"{name}_gate": None}
        if not rank:
            settings |= {f"{name}_a": None, f"{name}_b": None}
        else:
            adapter_arrays += [x, x] if lora is None else [lora.a.astype(x.dtype), lora.b.astype(x.dtype)]
    (out,) = compat.triton_graph_call(
        triton_kernels.product_kernel,
        (x, *weights, *(weights[0],) * padding, *adapter_arrays, *gates),
        (jax.ShapeDtypeStruct((splits, count, width), dtype),),
        (width // tile.rows, splits, -(-count // tokens)),
        warps=tile.warps,
        stages=stages,
        COUNT=count,
        INNER=inner,
        SHARD=x.shape[-1],
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
        GATED=int(bool(gates)),
        **settings,
    )
    return out


def product_tile(x, weights: Sequence, loras: Sequence[LoraWeights | None]) -> Tile:
    """The sizes of a program's tile, measured for such numbers of rows and sizes of weights."""
    count, divisible = len(x), all(weight.shape[0] % _MANY.rows == 0 for weight in weights)
    if count > MOST_ROWS:
        return _MANY if divisible else _MANY_UNEVEN
    width = sum(weight.shape[0] for weight in weights)
    if padded_rank(loras) and divisible and (padded(count) > 64 or width // _ADAPTED_WIDE.rows >= _MULTIPROCESSORS):
        return _ADAPTED if padded(count) > 64 else _ADAPTED_WIDE
    if _depth(x.shape[1]) == _SHALLOW.depth:
        return _SHALLOW
    if padded(count) > 64:
        return _PLAIN
    programs = width // _PLAIN.rows
    most = _MULTIPROCESSORS if padded(count) == 16 else ENOUGH - 1
    if _undivided(count, loras, programs) and programs <= most:
        return _FAR_AHEAD
    return _AHEAD if padded(count) > 16 else _PLAIN


def products(x, weights, loras=()):
    """As api.products, for one to three weights of 16 bits; only if `products_refusal` is None."""
    return products_in(product_tile(whole_shape(x, 2), weights, loras), one_order.is_exact(), x, weights, loras)


def products_in(tile: Tile, in_one_order: bool, x, weights, loras=()):
    """`products` by programs of a tile, as one sum each if `in_one_order`."""
    width = sum(weight.shape[0] for weight in weights)
    count, inner = whole_shape(x, 2).shape
    programs = width // tile.rows * -(-count // tile.tokens)
    divided = not (in_one_order or _undivided(count, loras, programs))
    splits = fewest_splits(inner // _depth(inner), programs) if divided else 1
    return _multiplied(x, weights, loras, tile, splits, 0, width, x.dtype if splits == 1 else jnp.float32)


def gated_refusal(x, weights: Sequence, loras: Sequence[LoraWeights | None], activation: str) -> str | None:
    """Why the kernel of `gated_product` does not support a call, or None. weights: (gate, up)."""
    if activation not in NUMBERS:
        return f"activation {activation}"
    rank = padded_rank(loras)
    if any(lora is not None and lora.gate is not None for lora in loras) and padded(len(x)) * rank > _MOST_GATED:
        return f"adapters of several models, of rank {rank}, for {len(x)} rows"
    return products_refusal(x, weights, loras)


def gated_tile(rows: int) -> Tile:
    return _GATED_FEW if rows % _GATED.rows or rows // _GATED.rows < ENOUGH else _GATED


def gated_product(x, gate, up, activation, loras=()):
    """As api.gated_product; only if `gated_refusal` is None."""
    rows, tile = gate.shape[0], gated_tile(gate.shape[0])
    return _multiplied(x, (gate, up), loras, tile, 1, NUMBERS[activation], rows, x.dtype)[0]


def activated_refusal(gate, activation: str) -> str | None:
    """Why the kernel of `activated` does not support a call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if gate.dtype not in _DTYPES:
        return f"dtype {gate.dtype}"
    return None if activation in NUMBERS else f"activation {activation}"


def activated(gate, up, activation):
    """activation(gate) * up of one shape, 16 bits; only if `activated_refusal` is None."""
    from jaxtune.pallas.decode.few_rows import triton_kernels

    (out,) = compat.triton_graph_call(
        triton_kernels.activated_kernel,
        (gate, up),
        [jax.ShapeDtypeStruct(gate.shape, gate.dtype)],
        (-(-gate.size // _BLOCK),),
        warps=4,
        stages=1,
        BLOCK=_BLOCK,
        SIZE=gate.size,
        ACTIVATION=NUMBERS[activation],
    )
    return out


def added_norm_refusal(x) -> str | None:
    """Why the kernel of `added_norm` does not support a call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype}"
    return None if x.shape[1] <= 16384 else f"{x.shape[1]} numbers; up to 16,384"


def added_norm(x, partial_sums, weight, blocks=None, *, eps, offset, float32):
    """As api.added_norm, or with `blocks` api.added_norm_coded."""
    from jaxtune.pallas.decode.few_rows import triton_kernels

    (count, size), rounds = x.shape, blocks is not None
    results = compat.triton_graph_call(
        triton_kernels.added_norm_kernel,
        (x, partial_sums, weight),
        [*[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2, *(coded_types(count, size, bool(blocks)) if rounds else ())],
        (count,),
        warps=one_order.triton.norm_warps(size),
        stages=1,
        COUNT=count,
        SIZE=size,
        SHARD=partial_sums.shape[-1],
        WIDTH=1 << (size - 1).bit_length(),
        SPLITS=partial_sums.shape[0],
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
        ROUNDS=int(rounds),
        BLOCK=BLOCK if blocks else 0,
        **({} if rounds else {"codes": None, "scales": None}),
    )
    added, normed, *coded = results
    return (added, normed, Coded(*coded)) if rounds else (added, normed)


def placed_refusal(keys, dtype=None) -> str | None:
    """Why the kernel of `placed` does not support a call, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    in_fp8 = keys.dtype == jnp.float8_e4m3fn
    dtype = jnp.dtype(dtype or keys.dtype)
    if dtype not in _DTYPES or not (in_fp8 or keys.dtype == dtype):
        return f"a cache of {keys.dtype}, queries in {dtype}"
    if in_fp8 and (reason := targets.fp8_refusal()) is not None:
        return reason
    dim = keys.shape[3]
    if dim & (dim - 1) or not 32 <= dim <= 512:
        return f"head dim {dim}; powers of two from 32 to 512"
    return None


def placed(partial_sums, keys, values, positions, table, norms, dtype=None, *, eps, offset, float32):
    """As api.placed."""
    from jaxtune.pallas.decode.few_rows import triton_kernels

    splits, count, width = partial_sums.shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = width // dim - 2 * kv_heads
    weights = (partial_sums, partial_sums) if norms is None else norms
    cos, sin = (partial_sums, partial_sums) if table is None else table
    query, keys, values = compat.triton_graph_call(
        triton_kernels.placed_kernel,
        (partial_sums, *weights, cos, sin, positions, keys, values),
        [jax.ShapeDtypeStruct((count, heads, dim), dtype or keys.dtype)]
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
