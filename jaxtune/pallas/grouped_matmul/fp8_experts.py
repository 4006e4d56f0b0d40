"""Products of rows sorted by expert with experts' weights in FP8, which are multiplied without decoding them:
`product`, which grouped_matmul and the products of jaxtune.pallas.routing call with `fp8`.

As in quant_matmul/fp8_product.py, both operands are e4m3 and sums are float32. A weight is [E, A, B], and a product
sums along B in the forward, along A for the gradient of the rows (or the reverse). If each row of an expert's matrix,
an index along A, or the whole matrix has a scale, the scales multiply the result of a sum along B. In a sum along A
they are factors of the summed axis; each sorted row belongs to one expert and is multiplied by them before it is
rounded. Scales of 128 x 128 numbers are inside both sums. Tensor cores accept e4m3 with the summed axis contiguous
only, so for a sum along A the codes are transposed first, in each product (two bytes per weight), unless the weight has
them transposed beside it (FP8.transposed).

fp8_rounding.py rounds the rows, which it can gather from the tokens; where it refuses, XLA does. On Hopper
fp8_mosaic.py multiplies. On other GPUs that multiply in FP8, and where that kernel refuses, fp8_triton.py does.
Elsewhere, and if that refuses too, rows are rounded all the same, and their decoded values are multiplied in x's dtype.
The results then differ only by the rounding to that dtype, without a gain in speed.
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
    """The grouped product in FP8: x, rounded to e4m3 here, times each expert's weight -> [rows, n] in x's dtype.
    api._product calls it with `fp8`: in the forward, and for the gradient of x, with the result's gradient as x.

    Args:
      x: rows [rows, K] sorted as `groups` says, or [T, K] with `tokens`.
      weight: the experts' weights, [E, n, K] (contract = 2) or [E, K, n] (contract = 1).
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      contract: the axis of the weight that is summed over, 1 or 2.
      extra: None, or (u [rows, r], l [E, n, r] or [E, r, n]), whose product is added: an adapter's, whose scale is in u
        and which is not rounded to e4m3.
      tokens: int32[rows], the row of x for each sorted row, T for an empty one; None: x is sorted already.
      plain: a function with the arguments and the result of reference.product, which multiplies arrays in 16 or 32
        bits; it is used if no FP8 kernel supports the call, or "reference" is requested.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call.
    Raises:
      ValueError: the requested implementation is unknown or refuses the call.
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
    """Says where the scales of `weight` [E, A, B] enter a product that sums over its axis `contract`. Returns (factors
    float32[E, K], by which rows of x are multiplied before they are rounded, or None; scales float32, by which the
    kernel multiplies its sums, or None). `_by_kernel` and `_by_reference` call it.

    Scales of rows or of whole matrices are one of the two. If the sum is along B (contract = 2), they multiply the
    results, as scales [E, n]; if it is along A (contract = 1), they are the factors. Scales of 128 x 128 numbers are
    always returned as scales, [E, ceil(n / 128), ceil(K / 128)], which the kernel applies within its sum.
    """
    scales = weight.scales.astype(jnp.float32)
    if fp8_product.in_blocks(weight):
        return None, scales if contract == 2 else scales.mT
    scales = jnp.broadcast_to(scales[..., 0], weight.shape[:2])
    return (None, scales) if contract == 2 else (scales, None)


def _rounded(x, factors, groups: Groups, tokens, blocks: bool) -> tuple[jax.Array, jax.Array]:
    """Rounds rows of x to FP8 in plain JAX. Returns (codes e4m3[rows, K], float32 scales by which the codes are
    multiplied again, [rows, 1], or [rows, ceil(K / 128)] with `blocks`). `_by_reference` calls it, and so does
    `_by_kernel` where the kernels of fp8_rounding.py refuse.

    Args:
      x: the sorted rows [rows, K], or [T, K] with `tokens`.
      factors: float32[E, K], by which rows of each expert are multiplied first: the scales of the weights along K,
        which cannot be applied after a sum along K (from `_scales`). None: by nothing.
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      tokens: int32[rows], the row of x for each sorted row; None: x is sorted.
      blocks: True: each 128 numbers of a row get a scale. False: each row gets one scale.
    """
    rows = reference.rows_of(x, tokens)
    if factors is not None:
        wide = reference.tiled(rows, groups).astype(jnp.float32) * reference.per_tile(factors, groups)[:, None]
        rows = wide.reshape(rows.shape)
    return fp8_product.rounded(rows, blocks)


def _by_reference(x, weight: FP8, groups: Groups, contract: int, extra, tokens, plain: Callable = reference.product):
    """The grouped product in FP8 in plain JAX: used if no FP8 kernel supports the call or "reference" is requested, and
    compared with such a kernel at its first use. Rows are rounded to FP8 all the same, and their decoded values, in x's
    dtype, are multiplied by the decoded weight, or by its codes alone if its scales are factors of the rows
    (`_scales`). The results, [rows, n] in x's dtype, differ from those of the kernels only by the rounding to that
    dtype. It is slower than they are.

    Args:
      x: rows [rows, K] sorted as `groups` says, or [T, K] with `tokens`.
      weight: the experts' weights, [E, n, K] (contract = 2) or [E, K, n] (contract = 1).
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      contract: the axis of the weight that is summed over, 1 or 2.
      extra: None, or (u [rows, r], l [E, n, r] or [E, r, n]), whose product is added: an adapter's.
      tokens: int32[rows], the row of x for each sorted row, T for an empty one; None: x is sorted already.
      plain: a function with the arguments and the result of reference.product, which multiplies.
    """
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
# if the codes are widened again. The programs of a run are compiled without that (train/program/programs.py).
# Autotuning is off, as in dispatch.exactly.
_exact = jax.jit(
    _by_reference,
    static_argnums=3,
    compiler_options={"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0},
)


def _by_kernel(x, weight: FP8, groups: Groups, contract: int, extra, tokens, name: str):
    """The grouped product by an FP8 kernel: [rows, n] in x's dtype. It rounds the rows first, and copies the weight's
    codes transposed if contract is 1 and the weight has no such copy, because the kernels sum over the last axis.

    Args:
      x: rows [rows, K] sorted as `groups` says, or [T, K] with `tokens`.
      weight: the experts' weights, [E, n, K] (contract = 2) or [E, K, n] (contract = 1).
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      contract: the axis of the weight that is summed over, 1 or 2.
      extra: None, or (u [rows, r], l [E, n, r] or [E, r, n]), whose product is added: an adapter's.
      tokens: int32[rows], the row of x for each sorted row, T for an empty one; None: x is sorted already.
      name: the kernel's name, "mosaic" or "triton".
    """
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


def _first_use(name: str, blocks: bool, dtype, rank: int, whole: bool) -> str | None:
    """Compares an FP8 kernel with plain JAX on a small random case, once on each kind of GPU. `product` asks it.
    Returns the reason why this GPU must not run it, or None, also if nothing is compared in this call, as without a GPU
    (dispatch.first_use). The case is computed with contract = 2, as the forward needs it, and with contract = 1, as the
    gradient of x does; with sorted rows and with rows gathered from tokens; and with an adapter unless `rank` is 0.

    Args:
      name: the kernel's name, "mosaic" or "triton".
      blocks: True: the weight has a scale for each 128 x 128 numbers. False: one for each row; kernels take a
        scale for the whole matrix as one for each row too.
      dtype: the compute dtype, in which rows are before they are rounded.
      rank: the adapter's; the case has as many columns as the kernel pads it to. 0: no adapter.
      whole: True: the length of the summed axis is a multiple of 128. False: it is not, and the kernel's steps along it
        are shorter, in another layout in shared memory.
    """
    filled = fp8_mosaic.filled_rank(rank) if rank else 0
    sizes, shape, count = (200, 0, 1, 128), (4, 512, 768) if whole else (4, 576, 960), 150

    def compare():
        draw = np.random.default_rng(0)
        groups = groups_of(jnp.asarray(sizes, jnp.int32), sum(sizes))
        occupied = np.concatenate([np.arange(-(-n // TILE_ROWS) * TILE_ROWS) < n for n in sizes])
        occupied = np.pad(occupied, (0, groups.rows - occupied.size))
        tokens = jnp.asarray(np.where(occupied, draw.integers(0, count, groups.rows), count), jnp.int32)
        weight = FP8.encode(draw.standard_normal(shape).astype(np.float32), TILE if blocks else ROW)
        got, want = [], []
        for contract in (2, 1):
            x = jnp.asarray(draw.standard_normal((count, shape[contract])), dtype)
            extra = exact = None
            if filled:
                u = jnp.asarray(draw.standard_normal((groups.rows, filled)) * occupied[:, None], dtype)
                side = draw.standard_normal((shape[0], shape[3 - contract], filled))
                extra = (u, jnp.asarray(side if contract == 2 else side.swapaxes(1, 2), dtype))
                exact = tuple(part.astype(jnp.float32) for part in extra)
            for rows, their in ((x, tokens), (reference.rows_of(x, tokens), None)):
                run = jax.jit(_by_kernel, static_argnums=(3, 6))
                got.append(run(rows, weight, groups, contract, extra, their, name))
                wide = rows.astype(jnp.float32)
                want.append(_exact(wide, weight, groups, contract, exact, their))
        return got, want

    call = f"{'blocks' if blocks else 'rows'}, {jnp.dtype(dtype)}, {filled} columns of an adapter, K of {shape[1:]}"
    return dispatch.first_use("fp8_matmul of experts", name, call, compare)
