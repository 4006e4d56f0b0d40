"""Gated activations and thin products by Triton kernels.

Their time is that of memory, so neither activation(gate) * up nor gradients rounded to e4m3 are read again for a thin
product. In the forward a program keeps a range of rows' sums over all columns in registers. In the backward, which sums
over rows, it has a block of columns and a range of rows, and XLA adds up what the programs wrote, in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.gated.triton import ACTIVATIONS
from jaxtune.pallas.ranges import ranges_of

_LARGEST_RANK = 32


class Tile(NamedTuple):
    """How a kernel divides its work."""

    rows: int  # of a tile
    columns: int  # of a tile
    warps: int  # of a program
    stages: int  # tiles in shared memory: those that are read while one is used, and that one
    programs: int = 0  # of the backward: for each multiprocessor, at most, if a program has more than one tile


def tile(width: int, result: str) -> Tile:
    """The Tile of `gated_thin` for a thin array of `width` columns on the GPU compiled for; e4m3 needs 128 columns."""
    if targets.here() is targets.HOPPER:
        return Tile(32, 128, 4, 3) if width == 16 else Tile(16, 128, 4, 4)
    return Tile(16, 128, 4, 2) if result == "e4m3" else Tile(32, 64, 4, 2)  # several fit the memory of a small GPU


def backward_tile() -> Tile:
    return Tile(16, 128, 4, 3, 16) if targets.here() is targets.HOPPER else Tile(32, 64, 4, 2, 8)


def rounded_tile() -> Tile:
    """The Tile of `rounded_gradients` on the GPU compiled for; codes need 128 columns."""
    return Tile(16, 128, 4, 3, 12) if targets.here() is targets.HOPPER else Tile(16, 128, 4, 2, 8)


def refusal(gate, rank: int, activation: str) -> str | None:
    """Why the kernels cannot compute a call, or None; it may run their check at first use."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    reason = unsupported(gate.dtype, gate.shape[1], rank, activation)
    return reason or _first_use(jnp.dtype(gate.dtype), width_of(rank), activation)


def unsupported(dtype, size: int, rank: int, activation: str) -> str | None:
    """Why no GPU can run the kernels for such a call, or None. size: gate's columns. rank: of the adapter.

    dtype: of gate. activation: a key of ACTIVATIONS.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if size % 8:
        return f"{size} columns, no multiple of 8"
    return f"rank {rank}, more than {_LARGEST_RANK}" if rank > _LARGEST_RANK else None


def width_of(rank: int) -> int:
    """Columns with which the kernels multiply a thin array of this rank."""
    return max(16, 1 << (rank - 1).bit_length())


def _first_use(dtype, width: int, activation: str) -> str | None:
    from jaxtune.pallas.gated import reference

    def compare():
        keys = jax.random.split(jax.random.key(0), 5)
        gate, up, dgated = (2 * jax.random.normal(key, (333, 1352)) for key in keys[:3])
        a, dinner = (jax.random.normal(key, shape) for key, shape in zip(keys[3:], ((width, 1352), (333, width))))
        gate, up, dgated, a, dinner = (array.astype(dtype) for array in (gate, up, dgated, a, dinner))

        def by_kernels(gate, up, dgated, a, dinner):
            forward = gated_thin(gate, up, a, activation, "gated")
            return *forward, *gated_thin_backward(gate, up, dgated, dinner, activation)

        def exact(gate, up, dgated, a, dinner):
            forward = reference.gated_thin(gate, up, a, activation)
            return *forward, *reference.gated_thin_backward(gate, up, dgated, dinner, activation)

        float32_operands = (array.astype(jnp.float32) for array in (gate, up, dgated, a, dinner))
        return jax.jit(by_kernels)(gate, up, dgated, a, dinner), dispatch.exactly(exact)(*float32_operands)

    return dispatch.first_use("gated_thin", "triton", f"{dtype}, {width} columns, {activation}", compare)


def gated_thin(gate, up, a, activation: str, result: str) -> tuple[jax.Array, ...]:
    """(what `result` names, activation(gate) * up times a^T [tokens, r] in gate's dtype).

    a: [r, I] in gate's dtype.
    result: "gated": activation(gate) * up; "e4m3": its codes and scales float32[tokens, I / 128, rounded up], as
      fp8_product.rounded has them; "none".
    gate, up: [tokens, I] of 16 bits. activation: "silu" or "gelu_tanh".
    """
    from jaxtune.pallas.gated import thin_kernels

    (tokens, size), rank = gate.shape, a.shape[0]
    width = width_of(rank)
    shape = tile(width, result)
    result_type, scales = jax.ShapeDtypeStruct((1,), gate.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)  # not written
    if result != "none":
        result_type = jax.ShapeDtypeStruct(gate.shape, jnp.float8_e4m3fn if result == "e4m3" else gate.dtype)
    if result == "e4m3":
        scales = jax.ShapeDtypeStruct((-(-size // 128), tokens), jnp.float32)
    gated, scales, inner = compat.triton_call(
        thin_kernels.gated_thin_kernel,
        (gate, up, a),
        [result_type, scales, jax.ShapeDtypeStruct((tokens, rank), gate.dtype)],
        (-(-tokens // shape.rows),),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=tokens,
        SIZE=size,
        RANK=rank,
        WIDTH=width,
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        ACTIVATION=ACTIVATIONS[activation],
        RESULT=("none", "gated", "e4m3").index(result),
    )
    return {"gated": (gated, inner), "e4m3": (gated, scales.T, inner), "none": (inner,)}[result]


def gated_thin_backward(gate, up, dgated, dinner, activation: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As thin.gated_thin_backward, in place, for 16 bits."""
    from jaxtune.pallas.gated import thin_kernels

    (tokens, size), rank = gate.shape, dinner.shape[1]
    shape = backward_tile()
    blocks, ranges, steps = _divided(tokens, size, shape)
    like = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    dgate, dup, da = compat.triton_call(
        thin_kernels.gated_thin_backward_kernel,
        (gate, up, dgated, dinner),
        [like, like, jax.ShapeDtypeStruct((ranges, rank, size), jnp.float32)],
        (blocks, ranges),
        warps=shape.warps,
        stages=shape.stages,
        aliases={0: 0, 1: 1},
        ROWS=tokens,
        SIZE=size,
        RANK=rank,
        WIDTH=width_of(rank),
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        STEPS=steps,
        ACTIVATION=ACTIVATIONS[activation],
    )
    return dgate, dup, da.sum(0)


def _divided(tokens: int, size: int, shape: Tile) -> tuple[int, int, int]:
    blocks = -(-size // shape.columns)
    return blocks, *ranges_of(-(-tokens // shape.rows), blocks, shape.programs)


def rounded_gradients(
    gate, up, dgated, dinner, inners: Sequence[jax.Array], bs: Sequence[jax.Array], activation: str, shape: Tile
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array, list[jax.Array]]:
    """Backward of an MLP's gated activation whose gradients of gate and up are rounded to e4m3 and not written in 16
    bits; the kernel computes the adapters' products with them, too. Products are of numbers rounded to gate's dtype,
    with float32 sums.

    Returns (codes [tokens, K] and scales float32[tokens, K / 128] of both gradients side by side, as
    fp8_product.side_by_side has them; gradients of gate and up times their B, side by side, [tokens, sum of ranks] in
    gate's dtype; dinner^T (activation(gate) * up) float32[r, I]; for gate and up the transposed gradient times the
    low-rank input, float32[I, r]).

      inners: low-rank inputs of gate's and up's adapters, [tokens, r] in gate's dtype.
      bs: their B's, float[I, r], rounded to gate's dtype.
      gate, up, dgated: [tokens, I] of 16 bits. dinner: [tokens, r], gradient of down's low-rank input.
      shape: the Tile, of 128 columns.
    """
    from jaxtune.pallas.gated import thin_kernels

    tokens, size = gate.shape
    ranks = [thin_array.shape[1] for thin_array in (dinner, *inners)]
    rank = max(ranks)
    blocks, ranges, steps = _divided(tokens, size, shape)

    def lines(arrays):
        """Transposes and stacks arrays [n, r]: [arrays, the largest rank, n], zeros for missing ranks."""
        return jnp.stack(
            [jnp.pad(array.astype(gate.dtype).T, ((0, rank - array.shape[1]), (0, 0))) for array in arrays]
        )

    codes, scales, block_products, da, *dbs = compat.triton_call(
        thin_kernels.rounded_gradients_kernel,
        (gate, up, dgated, lines((dinner, *inners)), lines(bs)),
        [
            jax.ShapeDtypeStruct((tokens, 2 * blocks * shape.columns), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((2 * blocks, tokens), jnp.float32),
            jax.ShapeDtypeStruct((blocks, tokens, 2, rank), jnp.float32),
            jax.ShapeDtypeStruct((ranges, rank, size), jnp.float32),
            *[jax.ShapeDtypeStruct((ranges, size, rank), jnp.float32)] * 2,
        ],
        (blocks, ranges),
        warps=shape.warps,
        stages=shape.stages,
        ROWS=tokens,
        SIZE=size,
        RANK=rank,
        WIDTH=width_of(rank),
        BLOCK=shape.rows,
        COLUMNS=shape.columns,
        STEPS=steps,
        ACTIVATION=ACTIVATIONS[activation],
    )
    thin = block_products.sum(0).astype(gate.dtype).reshape(tokens, 2 * rank)
    if ranks[1] + ranks[2] < 2 * rank:
        thin = jnp.concatenate([thin[:, : ranks[1]], thin[:, rank : rank + ranks[2]]], axis=1)
    dbs = [db.sum(0)[:, :r] for db, r in zip(dbs, ranks[1:], strict=True)]
    return (codes, scales.T), thin, da.sum(0)[: ranks[0]], dbs
