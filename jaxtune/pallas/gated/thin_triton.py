"""`gated_thin`, `gated_thin_backward` and `rounded_gradients` by Triton kernels. `refusal` says which calls they cannot
compute on this GPU.

Their time is that of reading and writing memory, so neither array of activation(gate) * up is read again for a thin
product, nor are gradients that are rounded to e4m3. In the forward a program has a range of rows, and keeps their sums
over all columns in registers. In the backward, whose sums are over rows, it has a block of columns and a range of rows,
and XLA adds up what the ranges wrote, in one order. `rounded_gradients` has sums over columns too, which XLA adds up
over the blocks. Tiles of gate and up are read ahead into shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.gated.triton import ACTIVATIONS

_LARGEST_RANK = 32


class Tile(NamedTuple):
    """How a kernel divides its work."""

    rows: int  # of a tile
    columns: int  # of a tile
    warps: int  # of a program
    stages: int  # tiles in shared memory: those that are read while one is used, and that one
    programs: int = 0  # of the backward: for each multiprocessor, at most, if a program has more than one tile


def tile(width: int, result: str) -> Tile:
    """The Tile of `gated_thin` for a thin array of `width` columns and this `result`, on the GPU that is compiled for.
    A result in e4m3 needs 128 columns."""
    if dispatch.compute_capability() == (9, 0):
        return Tile(32, 128, 4, 3) if width == 16 else Tile(16, 128, 4, 4)
    return Tile(16, 128, 4, 2) if result == "e4m3" else Tile(32, 64, 4, 2)  # several fit the memory of a small GPU


def backward_tile() -> Tile:
    """The Tile of `gated_thin_backward` on the GPU that is compiled for."""
    return Tile(16, 128, 4, 3, 16) if dispatch.compute_capability() == (9, 0) else Tile(32, 64, 4, 2, 8)


def rounded_tile() -> Tile:
    """The Tile of `rounded_gradients` on the GPU that is compiled for. Codes need 128 columns."""
    return Tile(16, 128, 4, 3, 12) if dispatch.compute_capability() == (9, 0) else Tile(16, 128, 4, 2, 8)


def refusal(gate, rank: int, activation: str) -> str | None:
    """The reason why no kernel can compute a call, or None: a GPU that does not run Triton kernels, jax-triton that is
    not installed, another dtype than bfloat16 and float16, another activation than "silu" and "gelu_tanh", a number of
    columns that is no multiple of 8, or a rank of more than 32. A call is also refused if the check at first use on
    this GPU found that results differ from those of plain JAX. gate: [tokens, I]. rank: of the thin array. activation:
    a key of reference.ACTIVATIONS."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    reason = unsupported(gate.dtype, gate.shape[1], rank, activation)
    return reason or _first_use(jnp.dtype(gate.dtype), width_of(rank), activation)


def unsupported(dtype, size: int, rank: int, activation: str) -> str | None:
    """The reason of `refusal` that does not depend on this machine, or None. The planner asks it when it plans for
    another GPU. dtype, size: of gate, and its number of columns. rank, activation: those of `refusal`."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if size % 8:
        return f"{size} columns, no multiple of 8"
    return f"rank {rank}, more than {_LARGEST_RANK}" if rank > _LARGEST_RANK else None


def width_of(rank: int) -> int:
    """The number of columns with which the kernels multiply a thin array of this rank."""
    return max(16, 1 << (rank - 1).bit_length())


def _first_use(dtype, width: int, activation: str) -> str | None:
    """The reason why this GPU must not run the kernels for such calls, or None: it compares a small case of both with
    plain JAX in float32, once for each kind of call (dispatch.first_use)."""
    from jaxtune.pallas.gated import reference

    def compare():
        keys = jax.random.split(jax.random.key(0), 5)
        gate, up, dgated = (2 * jax.random.normal(key, (333, 1352)) for key in keys[:3])
        a, dinner = (jax.random.normal(key, shape) for key, shape in zip(keys[3:], ((width, 1352), (333, width))))
        gate, up, dgated, a, dinner = (array.astype(dtype) for array in (gate, up, dgated, a, dinner))

        def both(gate, up, dgated, a, dinner):
            """The results of both kernels."""
            forward = gated_thin(gate, up, a, activation, "gated")
            return *forward, *gated_thin_backward(gate, up, dgated, dinner, activation)

        def exact(gate, up, dgated, a, dinner):
            """The same of plain JAX."""
            forward = reference.gated_thin(gate, up, a, activation)
            return *forward, *reference.gated_thin_backward(gate, up, dgated, dinner, activation)

        wide = (array.astype(jnp.float32) for array in (gate, up, dgated, a, dinner))
        return jax.jit(both)(gate, up, dgated, a, dinner), dispatch.exactly(exact)(*wide)

    return dispatch.first_use("gated_thin", "triton", f"{dtype}, {width} columns, {activation}", compare)


def gated_thin(gate, up, a, activation: str, result: str) -> tuple[jax.Array, ...]:
    """(what `result` names, activation(gate) * up times a^T [tokens, r] in gate's dtype) by the kernel. `refusal` says
    which calls are supported.

    Args:
      gate, up, activation: those of thin.gated_thin.
      a: [r, I] in gate's dtype.
      result: the results before the last. "gated": activation(gate) * up [tokens, I] in gate's dtype. "e4m3": two, its
        codes [tokens, I] and their scales float32[tokens, I / 128, rounded up], for each 128 numbers of a row, as
        fp8_product.rounded has them. "none": none.
    """
    from jaxtune.pallas.gated import thin_kernels

    (tokens, size), rank = gate.shape, a.shape[0]
    width = width_of(rank)
    shape = tile(width, result)
    wide, scales = jax.ShapeDtypeStruct((1,), gate.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)  # not written
    if result != "none":
        wide = jax.ShapeDtypeStruct(gate.shape, jnp.float8_e4m3fn if result == "e4m3" else gate.dtype)
    if result == "e4m3":
        scales = jax.ShapeDtypeStruct((-(-size // 128), tokens), jnp.float32)
    found, scales, inner = compat.triton_call(
        thin_kernels.gated_thin_kernel,
        (gate, up, a),
        [wide, scales, jax.ShapeDtypeStruct((tokens, rank), gate.dtype)],
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
    return {"gated": (found, inner), "e4m3": (found, scales.T, inner), "none": (inner,)}[result]


def gated_thin_backward(gate, up, dgated, dinner, activation: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the gradients of gate and up [tokens, I] in gate's dtype, dinner^T (activation(gate) * up) float32[r, I]) by the
    kernel. The first two take the memory of gate and up if nothing else reads these; otherwise XLA copies them first.
    The arguments are those of thin.gated_thin_backward; `refusal` says which calls are supported."""
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
    """How a backward divides an array [tokens, size]: (blocks of columns, ranges of rows, tiles of a range)."""
    tiles, blocks = -(-tokens // shape.rows), -(-size // shape.columns)
    ranges = min(tiles, max(1, dispatch.multiprocessors() * shape.programs // blocks))
    steps = -(-tiles // ranges)
    return blocks, -(-tiles // steps), steps


def rounded_gradients(
    gate, up, dgated, dinner, inners: Sequence[jax.Array], bs: Sequence[jax.Array], activation: str, shape: Tile
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array, list[jax.Array]]:
    """Computes the backward of an MLP's gated activation by a kernel that rounds the gradients of gate and up to e4m3.
    It is for weights of gate and up that are multiplied by such gradients and have adapters. The kernel does not write
    the gradients in 16 bits. Instead, it also computes the products of them that the adapters need. `refusal`, called
    with the largest of the ranks, says which calls are supported.

    Args:
      gate, up, dgated, dinner, activation: those of thin.gated_thin_backward.
      inners: for gate and for up the low-rank input of its adapter, [tokens, r] in gate's dtype.
      bs: for gate and for up its adapter's B, float[I, r]; it is rounded to gate's dtype.
      shape: how the kernel divides its work: rounded_tile().
    Returns:
      (the gradients of gate and up, side by side, rounded to e4m3 with a scale for each 128 numbers of a row, as
      fp8_product.side_by_side has them: codes [tokens, K] and scales float32[tokens, K / 128];
      the gradient of gate times B and that of up times B, side by side, [tokens, sum of ranks] in gate's dtype;
      dinner^T (activation(gate) * up), float32[r, I];
      for gate and up the transposed gradient times the low-rank input, float32[I, r]).
      Products are those of gradients, and of an activation, that are rounded to gate's dtype, with float32 sums.
    """
    from jaxtune.pallas.gated import thin_kernels

    tokens, size = gate.shape
    ranks = [part.shape[1] for part in (dinner, *inners)]
    rank = max(ranks)
    blocks, ranges, steps = _divided(tokens, size, shape)

    def lines(parts):
        """Transposes arrays [n, r] and stacks them: [parts, the largest rank, n]; fewer ranks are filled up."""
        return jnp.stack([jnp.pad(part.astype(gate.dtype).T, ((0, rank - part.shape[1]), (0, 0))) for part in parts])

    codes, scales, parts, da, *dbs = compat.triton_call(
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
    thin = parts.sum(0).astype(gate.dtype).reshape(tokens, 2 * rank)
    if ranks[1] + ranks[2] < 2 * rank:
        thin = jnp.concatenate([thin[:, : ranks[1]], thin[:, rank : rank + ranks[2]]], axis=1)
    dbs = [db.sum(0)[:, :r] for db, r in zip(dbs, ranks[1:], strict=True)]
    return (codes, scales.T), thin, da.sum(0)[: ranks[0]], dbs
