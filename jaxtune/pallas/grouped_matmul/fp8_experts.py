"""Products of rows sorted by expert with experts' weights in FP8, multiplied without decoding them: e4m3 times e4m3,
summed in float32.

A weight is [E, A, B], and a product sums along B in the forward, along A for the gradient of the rows (or the reverse).
Scales of rows (along A) or of the whole matrix multiply a sum along B, and are factors of the summed axis along A: a
sorted row is multiplied by its expert's before it is rounded. Scales of 128 x 128 numbers are inside both sums. Tensor
cores accept e4m3 with the summed axis contiguous only, so a sum along A transposes the codes first, unless the weight
has them transposed (FP8.transposed).

Where no FP8 kernel can multiply, rows are rounded all the same, and their decoded values multiplied, without a gain in
speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.grouped_matmul import reference
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups, groups_of
from jaxtune.pallas.quant_matmul import fp8_mosaic, fp8_product, fp8_rounding, fp8_triton


def product(
    x: jax.Array,
    weight: FP8,
    groups: Groups,
    contract: int,
    extra,
    tokens: jax.Array | None,
    plain: Callable,
    implementation: str | None = None,
) -> jax.Array:
    """`reference.product` of x, rounded to e4m3 here; an adapter (`extra`) is not rounded.

    x: sorted rows [rows, K], or [T, K] with `tokens`.
    plain: as reference.product; multiplies if no FP8 kernel does.
    implementation: "mosaic", "triton", "reference" (ValueError if it refuses) or None.
    weight: FP8 [E, A, B]. groups: Groups of the rows, in tiles of 128. contract: the summed axis, 1 or 2.
    extra: None, or an adapter's (u [rows, r], its B or A). tokens: int32[rows], each row's token, or None.
    """
    blocks, sizes = fp8_product.in_blocks(weight), (weight.shape[contract], weight.shape[3 - contract])
    rank = 0 if extra is None else extra[1].shape[contract]

    def refusal(name: str):
        if groups.tile_rows != TILE_ROWS:
            return f"tiles of {groups.tile_rows} rows, not {TILE_ROWS}"
        if name == "mosaic":
            reason = fp8_mosaic.refusal(groups.rows, *sizes, rank, x.dtype, blocks)
        else:
            reason = fp8_triton.refusal(*sizes, rank, x.dtype, blocks)
        return reason or _first_use(name, blocks, x.dtype, rank, sizes[0] % fp8_product.BLOCK == 0)

    table = {name: functools.partial(refusal, name) for name in ("mosaic", "triton")} | {"reference": lambda: None}
    name = dispatch.choose("fp8_matmul of experts", table, implementation)
    if name == "reference":
        return _by_reference(x, weight, groups, contract, extra, tokens, plain)
    return _by_kernel(x, weight, groups, contract, extra, tokens, name)


def _scales(weight: FP8, contract: int) -> tuple[jax.Array | None, jax.Array | None]:
    """(factors float32[E, K] of the rows, or None; scales of the sums, or None)."""
    scales = weight.scales.astype(jnp.float32)
    if fp8_product.in_blocks(weight):
        return None, scales if contract == 2 else scales.mT
    scales = jnp.broadcast_to(scales[..., 0], weight.shape[:2])
    return (None, scales) if contract == 2 else (scales, None)


def _rounded(x, factors, groups: Groups, tokens, blocks: bool) -> tuple[jax.Array, jax.Array]:
    """(codes e4m3[rows, K], float32 scales [rows, 1] or [rows, ceil(K / 128)]) of the rows times their expert's
    `factors`.
    """
    rows = reference.rows_of(x, tokens)
    if factors is not None:
        wide = reference.tiled(rows, groups).astype(jnp.float32) * reference.per_tile(factors, groups)[:, None]
        rows = wide.reshape(rows.shape)
    return fp8_product.rounded(rows, blocks)


def _by_reference(x, weight: FP8, groups: Groups, contract: int, extra, tokens, plain: Callable = reference.product):
    """`product` in plain JAX."""
    blocks, (factors, _) = fp8_product.in_blocks(weight), _scales(weight, contract)
    with jax.named_scope("to_fp8"):
        codes, scale = _rounded(x, factors, groups, tokens, blocks)
    # Tied to the rows, because XLA would decode weights of later layers early, and keep those of a forward for the
    # backward.
    codes, weight = jax.lax.optimization_barrier((codes, weight))
    if blocks:
        scale = jnp.repeat(scale, fp8_product.BLOCK, axis=1)[:, : codes.shape[1]]
    rows = (codes.astype(jnp.float32) * scale).astype(x.dtype)
    side = weight.decode(x.dtype) if factors is None else weight.codes.astype(x.dtype)
    return plain(rows, side, groups, contract, extra)


# The function with which kernels are compared must round as they do: by default XLA removes a rounding to e4m3 on a GPU
# if the codes are widened again. The programs of a run are compiled without that (train/engine/programs.py).
# Autotuning is off, as in dispatch.exactly.
_exact = jax.jit(
    _by_reference,
    static_argnums=3,
    compiler_options={"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0},
)


def _by_kernel(x, weight: FP8, groups: Groups, contract: int, extra, tokens, name: str):
    """`product` by an FP8 kernel, which sums over the last axis: for contract = 1 the codes are transposed first."""
    blocks, (factors, scales) = fp8_product.in_blocks(weight), _scales(weight, contract)
    with jax.named_scope("to_fp8"):
        if fp8_product.by_rounding_kernel(groups.rows, [x.shape[1]], x.dtype, blocks):
            codes, scale = fp8_rounding.rounded([x], factors, groups.tile_expert, tokens, blocks)
            codes, scale = codes[:, : x.shape[1]], scale.T if blocks else scale[:, None]
        else:
            codes, scale = _rounded(x, factors, groups, tokens, blocks)
    side = weight.codes
    u, add = (None, None) if extra is None else extra
    if contract == 1:
        add = None if add is None else add.mT
        if weight.transposed is None:
            # Tied to the rows, so that the copy is made when they are there, and is neither shared by products nor
            # kept.
            codes, side = jax.lax.optimization_barrier((codes, side))
        side = side.mT if weight.transposed is None else weight.transposed
    tiles = groups.tile_expert, groups.tile_sizes
    return fp8_product.by_kernel(codes, scale, u, add, (side,), scales, x.dtype, blocks, name, tiles)


def _first_use(name: str, blocks: bool, dtype, rank: int, whole_steps: bool) -> str | None:
    """The reason why this GPU must not run an FP8 kernel, or None; whole_steps: whether 128 divides the summed axis."""
    padded_rank = fp8_mosaic.padded_rank(rank) if rank else 0
    sizes, shape, count = (200, 0, 1, 128), (4, 512, 768) if whole_steps else (4, 576, 960), 150

    def compare():
        draw = np.random.default_rng(0)
        groups = groups_of(jnp.asarray(sizes, jnp.int32), sum(sizes))
        occupied = np.concatenate([np.arange(-(-n // TILE_ROWS) * TILE_ROWS) < n for n in sizes])
        occupied = np.pad(occupied, (0, groups.rows - occupied.size))
        tokens = jnp.asarray(np.where(occupied, draw.integers(0, count, groups.rows), count), jnp.int32)
        weight = FP8.encode(draw.standard_normal(shape).astype(np.float32), TILE if blocks else ROW)
        results, expected = [], []
        for contract in (2, 1):
            x = jnp.asarray(draw.standard_normal((count, shape[contract])), dtype)
            extra = exact = None
            if padded_rank:
                u = jnp.asarray(draw.standard_normal((groups.rows, padded_rank)) * occupied[:, None], dtype)
                side = draw.standard_normal((shape[0], shape[3 - contract], padded_rank))
                extra = (u, jnp.asarray(side if contract == 2 else side.swapaxes(1, 2), dtype))
                exact = tuple(operand.astype(jnp.float32) for operand in extra)
            for rows, row_tokens in ((x, tokens), (reference.rows_of(x, tokens), None)):
                run = jax.jit(_by_kernel, static_argnums=(3, 6))
                results.append(run(rows, weight, groups, contract, extra, row_tokens, name))
                wide = rows.astype(jnp.float32)
                expected.append(_exact(wide, weight, groups, contract, exact, row_tokens))
        return results, expected

    call = (
        f"{'blocks' if blocks else 'rows'}, {jnp.dtype(dtype)}, {padded_rank} columns of an adapter, K of {shape[1:]}"
    )
    return dispatch.first_use("fp8_matmul of experts", name, call, compare)
