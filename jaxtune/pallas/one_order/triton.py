"""The operations of sums.py as Triton kernels, for Hopper.

Any tile of a product gives its sums the same bits: the tensor cores add a step's 16 columns to one accumulator, in
ascending order (measured on an H200: eight tilings, mma and wgmma alike). So a program is divided as its rows need.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
MOST_RANK = 128
# Rows up to which an operation is a node of a CUDA graph, as those of decoding steps are. Of more, a program does not
# contain the assembly once for each layer.
_FEW = 1024
_LEVELS = 10  # 2 to this many numbers are read at a time by a program of `activated`, twice as many by one of a row


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among programs."""

    tokens: int  # rows of x of a program
    rows: int  # of the weight
    depth: int  # columns of a step
    warps: int
    stages: int  # steps in flight


def refusal(dtype) -> str | None:
    """Why this GPU has no such kernels for a model that computes in dtype, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.measured(targets.HOPPER)) is not None:
        return reason
    return None if dtype == jnp.bfloat16 else f"products in {jnp.dtype(dtype).name}; measured in bfloat16 alone"


def _call(rows: int):
    return compat.triton_graph_call if rows <= _FEW else compat.triton_call


def tile_of(count: int, out: int) -> Tile:
    """Of a product of x [count, in] with a weight [out, in]."""
    if out <= 64:
        width = max(32, 1 << (out - 1).bit_length())
        return Tile(64 if count > 8192 else 16, width, 128, 4, 4)
    if count <= 128:
        tokens = max(16, 1 << (count - 1).bit_length())
        return Tile(tokens, 64 if out >= 8192 else 32, 128, 4, 4)
    programs = -(-count // 128) * -(-out // 256)
    if programs < targets.multiprocessors():
        return Tile(64, 128, 64, 4, 4)
    return Tile(128, 256, 64, 8, 4)


def product(x, weight, adapter, dtype) -> jax.Array:
    """[N, out] in `dtype`, as sums.adapted.

    x: [N, in] of 16 bits. weight: [out, in], cast to x's dtype.
    adapter: (x A^T times its scale [N, r], B [out, r]), then `dtype` is x's; or None.
    """
    weight = weight.astype(x.dtype)
    if adapter is not None:
        adapter = adapter[0], adapter[1].astype(x.dtype)
    tile = tile_of(len(x), len(weight))

    def compare():
        sizes = (tile.tokens + 5, 200), (tile.rows + 24, 200), (tile.tokens + 5, 7), (tile.rows + 24, 7)
        keys = jax.random.split(jax.random.key(0), len(sizes))
        small = [jax.random.normal(key, size).astype(x.dtype) for key, size in zip(keys, sizes, strict=True)]
        kernel = jax.jit(lambda x, w, u, b: _product(x, w, (u, b), tile=tile, dtype=x.dtype))
        plain = dispatch.exactly(lambda x, w, u, b: jnp.dot(x, w.T) + jnp.dot(u, b.T))
        return [kernel(*small)], [plain(*(array.astype(jnp.float32) for array in small))]

    _checked("product", f"{x.dtype}, {tile}", compare)
    return _product(x, weight, adapter, tile=tile, dtype=dtype)


def _checked(op: str, call: str, compare) -> None:
    """ValueError if the kernel fails its check at first use: nothing else adds up in its order."""
    dispatch.choose(op, {"one order": lambda: dispatch.first_use(op, "one order", call, compare)}, None)


def _product(x, weight, adapter, *, tile: Tile, dtype):
    from jaxtune.pallas.one_order import kernels

    (count, columns), out = x.shape, len(weight)
    rank = 0 if adapter is None else adapter[0].shape[1]
    if rank > MOST_RANK:
        raise ValueError(f"exact: an adapter of rank {rank}; up to {MOST_RANK}")
    inner, b = (x, weight) if adapter is None else adapter
    [result] = _call(count)(
        kernels.product_kernel,
        (x, weight, inner, b),
        [jax.ShapeDtypeStruct((count, out), dtype)],
        (-(-count // tile.tokens) * -(-out // tile.rows),),
        warps=tile.warps,
        stages=tile.stages,
        COUNT=count,
        OUT=out,
        COLUMNS=columns,
        RANK=rank,
        THIN=max(16, 1 << max(rank - 1, 0).bit_length()),
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        BAND=8,
        STAGES=tile.stages,
    )
    return result


def activated(gate, up, activation: str) -> jax.Array:
    """activation(gate) * up in their dtype, in float32, rounded once. activation: "silu" or "gelu_tanh"."""
    return _activated(gate, up, None, gate.shape, 0, activation)


def activated_halves(gate_up, activation: str) -> jax.Array:
    """`activated` of both halves of the columns of gate_up [N, 2 I]: [N, I]."""
    return _of_halves(gate_up, None, activation)


def weighted_rows(gate_up, weights, activation: str) -> jax.Array:
    """`activated_halves`, times float32[N] weights of rows before it is rounded."""
    return _of_halves(gate_up, weights, activation)


def _of_halves(gate_up, weights, activation: str) -> jax.Array:
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    return _activated(gate_up, gate_up, weights, (rows, columns), columns, activation)


def _activated(gate, up, weights, shape, columns: int, activation: str) -> jax.Array:
    from jaxtune.pallas.one_order import kernels

    size = math.prod(shape)
    [out] = _call(size // shape[-1])(
        kernels.gated_kernel,
        (gate, up, gate if weights is None else weights),
        [jax.ShapeDtypeStruct(shape, gate.dtype)],
        (-(-size >> _LEVELS),),
        warps=4,
        stages=1,
        SIZE=size,
        COLUMNS=columns,
        WEIGHTED=int(weights is not None),
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=1 << _LEVELS,
    )
    return out


def norm_warps(size: int) -> int:
    """Warps of a program of added_norm_kernel, for rows of `size` numbers; they decide the order of its sum."""
    return 8 if size > 2048 else 4


def normed(x, weight, eps: float, offset: float, float32: bool) -> jax.Array:
    """The RMS norm of x [..., size] over its last axis, by the kernel of decoding steps."""
    from jaxtune.pallas.decode.few_rows import triton_kernels

    size = x.shape[-1]
    rows = x.reshape(-1, size)
    _, out, *_ = _call(len(rows))(
        triton_kernels.added_norm_kernel,
        (rows, rows, weight),
        [jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((1,), rows.shape, (1,), (1,))],  # three are not written
        (len(rows),),
        warps=norm_warps(size),
        stages=1,
        COUNT=len(rows),
        SIZE=size,
        SHARD=size,
        WIDTH=1 << (size - 1).bit_length(),
        SPLITS=0,
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
        ROUNDS=0,
        BLOCK=0,
    )
    return out.reshape(x.shape)


def heads(x, weight, cos, sin, eps: float, offset: float, float32: bool) -> jax.Array:
    """The heads x [B, T, heads, D], normed with weight [D] unless it is None, and rotated by float32[B, T, D / 2]."""
    from jaxtune.pallas.one_order import kernels

    rows, length, count, dim = x.shape
    [out] = _call(rows * length)(
        kernels.heads_kernel,
        (x, cos if weight is None else weight, cos, sin),
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        (rows * length, count),
        warps=1,
        stages=1,
        HEADS=count,
        DIM=dim,
        NORMS=int(weight is not None),
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
    )
    return out


def log_probabilities(logits, tokens, temperature, size: int) -> tuple[jax.Array, jax.Array]:
    """As sums.log_probabilities."""
    from jaxtune.pallas.one_order import kernels

    rows, width = logits.shape
    of_tokens, log_sums = _call(rows)(
        kernels.log_probability_kernel,
        (logits, tokens, jnp.asarray(temperature, jnp.float32)),
        [jax.ShapeDtypeStruct(tokens.shape, jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        (rows,),
        warps=8,
        stages=1,
        STRIDE=width,
        SIZE=size,
        BLOCK=2 << _LEVELS,
        LEVELS=_LEVELS + 1,
        COUNT=tokens.shape[1],
    )
    return of_tokens, log_sums
