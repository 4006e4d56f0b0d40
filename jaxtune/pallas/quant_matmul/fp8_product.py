"""Products with weights in FP8 as they are stored: e4m3 times e4m3, summed in float32.

The other operand is rounded to e4m3: each row by its largest magnitude, or, for a weight with scales of 128 x 128
numbers, each 128 numbers of a row. Scales of the weight's rows are factors of the summed axis in the backward, dy W,
and multiply dy before it is rounded.

The backward multiplies the gradients of all weights that share x, side by side, by these weights stacked, so that their
sum takes no pass over memory. Tensor cores accept e4m3 with the summed axis contiguous only: each step copies the codes
transposed (about 6 ms of an 8B step on an H200), unless the weights have them (FP8.transposed, another 7 GB).

`blocks`: each 128 numbers have a scale, not each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes, targets
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import LARGEST, ROW, TILE, scale_of
from jaxtune.pallas.gated import reference, thin, thin_triton
from jaxtune.pallas.normed_heads import inverse_rms, normed
from jaxtune.pallas.quant_matmul import fp8_gradients, fp8_mosaic, fp8_normed, fp8_rounding, fp8_triton, low_rank
from jaxtune.pallas.quant_matmul.fp8_plain import by_blocks, by_rows, whole_blocks
from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK

_KERNELS = {"mosaic": fp8_mosaic.product, "triton": fp8_triton.product}
_LEAST_ROWS = 512  # that are rounded by a kernel
_NO_SCALE = 1e-30  # replaces a weight's scale of zero, by which an adapter's operand is divided

# A product u side^T that is added to another: (u [n, r], side [columns, r]).
AdapterOperands = tuple[jax.Array, jax.Array]


class NormRounding(NamedTuple):
    """The settings of an RMS norm (normed_stream)."""

    eps: float  # added to the mean square
    offset: float  # added to the weight, if float32 is True
    float32: bool  # whether the product with the weight is computed in float32


def in_blocks(weight: FP8) -> bool:
    """Whether the weight has a scale for each 128 x 128 numbers, by which sums over 128 are multiplied."""
    return weight.block == TILE


kind = in_blocks  # see as_stored.py


def rounded(rows: jax.Array, blocks: bool = False) -> tuple[jax.Array, jax.Array]:
    """(codes e4m3[n, k], scales float32[n, 1], or with `blocks` [n, ceil(k / 128)]) of rows [n, k], in plain JAX. A
    scale is the largest magnitude over 448, 1 for zeros, and not finite where numbers are not.
    """
    wide = rows.astype(jnp.float32)
    if blocks:
        count, width = rows.shape
        wide = jnp.pad(wide, ((0, 0), (0, -width % BLOCK))).reshape(count, -1, BLOCK)
    largest = jnp.abs(wide).max(axis=-1, keepdims=True)
    scale = scale_of(largest, largest * jnp.float32(1 / LARGEST))  # not a division, which XLA may do as this
    codes = jnp.clip(wide / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    if blocks:
        return codes.reshape(count, -1)[:, :width], scale[..., 0]
    return codes, scale


def side_by_side(
    arrays: Sequence[jax.Array], factors: jax.Array | None, blocks: bool = False, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The rows of several arrays [n, k_i] side by side, times `factors` float32[sum of k_i], rounded: (codes e4m3[n,
    K], scales float32[n, 1], or with `blocks` [n, K / 128]). With `blocks` there are no factors, and each array's
    columns are padded to a multiple of 128.

      implementation: "reference": XLA rounds; any other or None: a kernel where one can.
    """
    with jax.named_scope("to_fp8"):
        widths = [array.shape[1] for array in arrays]
        if not by_rounding_kernel(len(arrays[0]), widths, arrays[0].dtype, blocks, implementation):
            if blocks:
                arrays = [whole_blocks(array, 1) for array in arrays]
            wide = jnp.concatenate([array.astype(jnp.float32) for array in arrays], axis=1)
            return rounded(wide if factors is None else wide * factors, blocks)
        return meshes.on_each_device(_rounded_by_kernel, rows=1)(tuple(arrays), factors, blocks)


def by_rounding_kernel(
    rows: int, widths: Sequence[int], dtype, blocks: bool, implementation: str | None = None
) -> bool:
    """Whether a kernel rounds, and not XLA. Fewer than 512 rows, as in steps of generation, are left to XLA, because
    these kernels' calls are no nodes of CUDA graphs.

      widths: columns of the arrays that lie side by side. dtype: of them. blocks: each 128 numbers have a scale.
      implementation: "reference": False.
    """

    def refusal():
        return fp8_rounding.refusal(widths, dtype, blocks) or _first_rounding(dtype, blocks)

    requested = "reference" if implementation == "reference" or rows < _LEAST_ROWS else None
    return dispatch.choose("to_fp8", {"triton": refusal, "reference": lambda: None}, requested) == "triton"


def _rounded_by_kernel(arrays, factors, blocks: bool) -> tuple[jax.Array, jax.Array]:
    codes, scales = fp8_rounding.rounded(arrays, factors, blocks=blocks)
    return codes, scales.T if blocks else scales[:, None]


def operand(x: jax.Array, blocks: bool, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """(codes e4m3[n, k], scales float32[n, 1], or with `blocks` [n, ceil(k / 128)]) of x [n, k], for the forward.

    implementation: "reference": XLA rounds; any other or None: a kernel where one can.
    """
    codes, scales = side_by_side([x], None, blocks, implementation)
    return codes[:, : x.shape[1]], scales


def gated_operand(
    gate: jax.Array, up: jax.Array, a: jax.Array, activation: str, blocks: bool, implementation: str | None = None
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """(`operand` of x = activation(gate) * up [n, k]; x a^T [n, r], unrounded). With `blocks` a kernel computes both
    without writing x.

      gate, up, a: [n, k] twice, [r, k]. activation: a key of gated.ACTIVATIONS.
      implementation: "reference": no kernel; any other or None: one where it can.
    """
    if _rounds_gated("gated_to_fp8", _first_gated, gate, len(a), activation, blocks, implementation):
        with jax.named_scope("to_fp8"):
            codes, scales, inner = thin.by_kernel(gate, up, a, activation, "e4m3")
        return (codes, scales), inner
    x, inner = thin.gated_thin(gate, up, a, activation)
    return operand(x, blocks, implementation), inner


def gated_gradients(
    gate: jax.Array,
    up: jax.Array,
    dgated: jax.Array,
    dinner: jax.Array,
    activation: str,
    adapters: Sequence[tuple[jax.Array, jax.Array]] | None,
    blocks: bool,
    implementation: str | None = None,
) -> tuple[tuple, jax.Array, tuple | None]:
    """The backward of an MLP's gated activation: (gradients of gate and up; dinner^T (activation(gate) * up) float32[r,
    k]; None). With `blocks` a kernel may round the gradients instead: ((None, None); the same; (the rounded gradients;
    times the B's, [n, sum of ranks]; each transposed times its low-rank input, float32[k, r])).

      adapters: of gate and up (low-rank input [n, r], B float[k, r]); None if the gradients themselves are needed.
      dgated: gradient of activation(gate) * up, [n, k]. dinner: of down's low-rank input, [n, r].
      gate, up: [n, k]. activation: a key of gated.ACTIVATIONS. blocks: each 128 numbers have a scale.
      implementation: "reference": no kernel rounds; any other or None: one where it can.
    """
    inners, bs = zip(*adapters, strict=True) if adapters is not None else ((), ())
    rank, op = max(array.shape[1] for array in (dinner, *inners)), "gated_gradients_to_fp8"
    blocks = blocks and adapters is not None
    if _rounds_gated(op, _first_gradients, gate, rank, activation, blocks, implementation):
        coded, products, da, dbs = thin.rounded_gradients(gate, up, dgated, dinner, inners, bs, activation)
        return (None, None), da, (coded, products, dbs)
    *gradients, da = thin.gated_thin_backward(gate, up, dgated, dinner, activation)
    return tuple(gradients), da, None


def _rounds_gated(
    op: str, first_use: Callable, gate, rank: int, activation: str, blocks: bool, implementation: str | None
) -> bool:
    """Whether a kernel of pallas/gated/thin_triton.py rounds what it computes to e4m3."""
    if not blocks or implementation == "reference" or not thin.is_large(*gate.shape):
        return False

    def refusal():
        reason = targets.fp8_refusal() or thin_triton.refusal(gate, rank, activation)
        return reason or first_use(gate.dtype, thin_triton.width_of(rank), activation)

    return dispatch.choose(op, {"triton": refusal, "reference": lambda: None}, None) == "triton"


def rounded_gradients(
    douts: Sequence[jax.Array],
    inner: jax.Array,
    bs: Sequence[jax.Array],
    blocks: bool,
    implementation: str | None = None,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, list[jax.Array]] | None:
    """(codes and scales as of `side_by_side`; the gradients times the B's, [n, sum of ranks]; each transposed times its
    low-rank input, float32[out_i, r_i]), by a kernel that reads each gradient once; None where none can, as without
    `blocks`.

      douts: [n, out_i] each. inner: low-rank inputs, side by side. bs: float[out_i, r_i] each.
      blocks: each 128 numbers have a scale. implementation: "reference": None is returned.
    """
    widths, ranks = zip(*(b.shape for b in bs), strict=True)
    if not blocks or implementation == "reference" or not thin.is_large(len(inner), sum(widths)):
        return None

    def refusal():
        dtype = inner.dtype
        return fp8_gradients.refusal(widths, ranks, dtype) or _first_rounding(dtype, blocks)

    table = {"triton": refusal, "reference": lambda: None}
    if dispatch.choose("gradients_to_fp8", table, None) == "reference":
        return None
    run = meshes.on_each_device(fp8_gradients.rounded_pair, rows=2, results=2)
    with jax.named_scope("to_fp8"):
        coded, products, dbs = run(douts, inner, bs, fp8_gradients.tile())
    return coded, products, dbs


def normed_operand(
    x: jax.Array, weight: jax.Array, rounding: NormRounding, a: jax.Array | None, blocks: bool
) -> tuple[tuple[jax.Array, jax.Array], low_rank.OfNormed | None]:
    """(`operand` of the normed x; its product with a^T [n, r] beside the factors of x's rows, or None), by a kernel
    that writes no normed x. Only if `normed_refusal` is None. x: bfloat16[n, k]. rounding: eps and the form of the
    norm.

      weight: [k], the norm's. a: the adapters' A's [r, k], or None. blocks: each 128 numbers have a scale, not each
      row.
    """
    if rounding.float32:
        factors = rounding.offset + weight.astype(jnp.float32)
    else:
        factors = weight.astype(x.dtype)
    with jax.named_scope("to_fp8"):
        run = meshes.on_each_device(fp8_normed.normed, rows=1)
        codes, scales, inverse_rms_of_rows, inner = run(x, factors, a, rounding.eps, blocks)
    return (codes, scales), None if inner is None else low_rank.OfNormed(inner, inverse_rms_of_rows)


def normed_refusal(x, rank: int, blocks: bool) -> str | None:
    """Why no kernel can compute `normed_operand` of x [n, k], or None."""
    return fp8_normed.refusal(x, rank, blocks) or _first_normed(fp8_normed.width_of(rank), blocks, x.shape[1] % BLOCK)


def forward(
    coded: tuple[jax.Array, jax.Array],
    weight: FP8,
    adapter: AdapterOperands | None,
    dtype,
    implementation: str | None = None,
) -> jax.Array:
    """x W^T [n, out] in `dtype`, plus an adapter's product. A row of x that is not finite affects only that row.

    coded: operand(x, in_blocks(weight)).
    weight: [out, in].
    adapter: (u [n, r], b [out, r]), or None. dtype: of the result.
    implementation: "mosaic", "triton", "reference" (ValueError if it refuses), or None.
    """
    scales = weight.scales.astype(jnp.float32)
    if not in_blocks(weight):
        scales = jnp.broadcast_to(scales.reshape(-1), weight.shape[:1])
    return multiply(coded, [weight.codes], scales, adapter, dtype, in_blocks(weight), implementation)


def backward(
    douts: Sequence[jax.Array],
    weights: Sequence[FP8],
    adapter: AdapterOperands | None,
    dtype,
    implementation: str | None = None,
    coded: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The sum of dy W over the weights, plus the adapters' product, [n, in] in `dtype`. douts: dy [n, out_i] of each
    weight, which are of one kind. coded: all dy rounded, side by side, in place of `douts`.

      weights: [out_i, in]. adapter: (u [n, r], a [in, r]), or None. dtype: of the result.
      implementation: "mosaic", "triton", "reference" (ValueError if it refuses), or None.
    """
    blocks = in_blocks(weights[0])
    if blocks:  # each weight's blocks start at its own first row
        coded = side_by_side(douts, None, blocks, implementation) if coded is None else coded
        scales = jnp.concatenate([weight.scales for weight in weights]).astype(jnp.float32).T
    else:
        row_scales = [jnp.broadcast_to(w.scales.astype(jnp.float32).reshape(-1), w.shape[:1]) for w in weights]
        coded, scales = side_by_side(douts, jnp.concatenate(row_scales), blocks, implementation), None
    return multiply(coded, _sides(weights, blocks), scales, adapter, dtype, blocks, implementation)


def _sides(weights: Sequence[FP8], blocks: bool) -> Sequence[jax.Array]:
    """Transposed codes of weights that share x: each weight's e4m3[in, out_i] if all have them, else one
    copy of all.
    """

    def whole(codes, axis):
        return whole_blocks(codes, axis) if blocks else codes

    copies = [weight.transposed for weight in weights if weight.transposed is not None]
    if len(copies) == len(weights):
        return [whole(copy, 1) for copy in copies]
    return [jnp.concatenate([whole(weight.codes, 0) for weight in weights]).T]


def multiply(
    coded: tuple[jax.Array, jax.Array],
    sides: Sequence[jax.Array],
    side_scale: jax.Array | None,
    adapter: AdapterOperands | None,
    dtype,
    blocks: bool,
    implementation: str | None,
) -> jax.Array:
    """The product over k of two operands in e4m3, times their scales: dtype[n, columns], summed in float32.

    coded: (codes e4m3[n, k], scales float32[n, 1], or with `blocks` [n, ceil(k / 128)]).
    sides: e4m3[columns, k_i] each, side by side along k.
    side_scale: float32[columns] or None; with `blocks` [ceil(columns / 128), ceil(k / 128)].
    adapter: (u [n, r], side [columns, r]), or None: u side^T is added. blocks: each 128 numbers have a scale.
    implementation: "mosaic", "triton", "reference" (ValueError if it refuses), or None.
    """
    codes, scale = coded
    sizes = (codes.shape[0], codes.shape[1], sides[0].shape[0])
    rank = min(adapter[0].shape[1], fp8_mosaic.RANKS[-1]) if adapter is not None else 0  # that of the kernels' part

    def first_use(name: str):
        return _first_use(name, blocks, dtype, rank, sizes[1] % BLOCK == 0)

    def mosaic():
        return fp8_mosaic.refusal(*sizes, rank, dtype, blocks) or first_use("mosaic")

    def triton():
        return fp8_triton.refusal(*sizes[1:], rank, dtype, blocks) or first_use("triton")

    if not blocks:
        triton = dispatch.on_request("triton", implementation, "not measured beside the vendor's product", triton)
    table = {"mosaic": mosaic, "triton": triton, "reference": lambda: None}
    name = dispatch.choose("fp8_matmul", table, implementation)
    if len(sides) > 1 and (name != "mosaic" or any(side.shape[1] % BLOCK for side in sides)):
        sides = [jnp.concatenate(sides, axis=1)]
    if name == "reference":
        out = (by_blocks if blocks else by_rows)(codes, scale, sides[0], side_scale, dtype)
        return out if adapter is None else out + _thin(*adapter)
    run = meshes.on_each_device(_with_wide_adapter, rows=3)
    u, add = adapter if adapter is not None else (None, None)
    return run(codes, scale, u, add, sides, side_scale, dtype, blocks, name)


def _with_wide_adapter(codes, scale, u, add, sides, side_scale, dtype, blocks, name: str):
    """`by_kernel` for an adapter of any rank: XLA adds the product of columns after the first 64."""
    kernel_columns, excess = fp8_mosaic.RANKS[-1], None
    if u is not None and u.shape[1] > kernel_columns:
        excess = u[:, kernel_columns:], add[:, kernel_columns:]
        u, add = u[:, :kernel_columns], add[:, :kernel_columns]
    out = by_kernel(codes, scale, u, add, sides, side_scale, dtype, blocks, name)
    return out if excess is None else out + _thin(*excess)


def _thin(u: jax.Array, side: jax.Array) -> jax.Array:
    """u [n, r] side [columns, r]^T in u's dtype; float32 is multiplied in full float32."""
    precision = jax.lax.Precision.HIGHEST if u.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    numbers = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(u, side.astype(u.dtype), numbers, precision=precision, preferred_element_type=u.dtype)


def by_kernel(codes, scale, u, add, sides, side_scale, dtype, blocks, name: str, tiles=None):
    """`multiply` by one of our kernels: a scale of zero of the other operand becomes 1e-30, and the adapter's operands
    become bfloat16, padded to 16, 32 or 64 columns and, without `blocks`, divided by the scales that multiply
    everything at the end.

      codes, scale: e4m3[n, k], float32[n, 1], or with `blocks` [n, ceil(k / 128)].
      u, add: [n, r] and [columns, r], r at most 64, or None.
      sides: e4m3[columns, k_i] each, side by side along k; one for "triton" and with `tiles`.
      side_scale: float32[columns] or None; with `blocks` [ceil(columns / 128), ceil(k / 128)].
      dtype: of the result. blocks: each 128 numbers have a scale. name: "mosaic" or "triton".
      tiles: None, or int32[n / 128] twice: each 128 rows' expert, and its rows that are not empty; add, sides and
      side_scale then have a leading axis of experts.
    """
    if blocks:
        scale = scale.T
    else:
        scale = scale[:, 0]
        if side_scale is None:
            side_scale = jnp.ones(sides[0].shape[:-1], jnp.float32)
        side_scale = jnp.where(side_scale == 0, _NO_SCALE, side_scale)
    extra = None
    if u is not None:
        padded_rank = fp8_mosaic.padded_rank(add.shape[-1])
        u = u[:, :padded_rank]
        if not blocks:  # the adapter's product is scaled with the rest at the end
            u, add = u.astype(jnp.float32) / scale[:, None], add.astype(jnp.float32) / side_scale[..., None]

        def filled(array):
            return jnp.pad(
                array.astype(jnp.bfloat16), [(0, 0)] * (array.ndim - 1) + [(0, padded_rank - array.shape[-1])]
            )

        extra = filled(u), filled(add)
    side = sides if name == "mosaic" else sides[0]
    return _KERNELS[name](codes, side, scale, side_scale, extra, tiles, dtype=dtype, in_blocks=blocks)


def _first_use(name: str, blocks: bool, dtype, rank: int, whole_steps: bool) -> str | None:
    """Compares kernel `name` with an exact product; whole_steps: whether 128 divides the summed axis."""
    padded_rank, width = fp8_mosaic.padded_rank(rank) if rank else 0, 1024 if whole_steps else 960

    def compare():
        keys = jax.random.split(jax.random.key(0), 4)
        x, weight = (jax.random.normal(key, shape) for key, shape in zip(keys, ((296, width), (512, width))))
        u = add = None
        if padded_rank:
            u, add = (jax.random.normal(key, (n, padded_rank), dtype) * 8 for key, n in zip(keys[2:], (296, 512)))
        stored, (codes, scale) = FP8.encode(weight, TILE if blocks else ROW), rounded(x, blocks)
        side_scale = stored.scales if blocks else stored.scales[:, 0]
        run = jax.jit(by_kernel, static_argnums=(6, 7, 8))
        cases = [[stored.codes]]
        if whole_steps and name == "mosaic":
            cases.append([stored.codes[:, :256], stored.codes[:, 256:]])
        results = [run(codes, scale, u, add, sides, side_scale, dtype, blocks, name) for sides in cases]

        def exact(codes, scale, stored, u, add):
            wide = codes.astype(jnp.float32) * (jnp.repeat(scale, BLOCK, axis=1) if blocks else scale)
            with jax.default_matmul_precision("highest"):
                product = wide @ stored.decode(jnp.float32).T
                if u is not None and add is not None:
                    product += u.astype(jnp.float32) @ add.astype(jnp.float32).T
            return product

        return results, [dispatch.exactly(exact)(codes, scale, stored, u, add)] * len(results)

    call = f"{'blocks' if blocks else 'rows'}, {jnp.dtype(dtype)}, {padded_rank} columns of an adapter, K of {width}"
    return dispatch.first_use("fp8_matmul", name, call, compare)


def _first_rounding(dtype, blocks: bool) -> str | None:

    def compare():
        results, expected = [], []
        for total, splits in ((1544, 1), (6144, 3), *(() if blocks else ((11264, 1), (20480, 2), (40960, 2)))):
            x = jax.random.normal(jax.random.key(0), (333, total), dtype)
            factors = None if blocks else jax.random.uniform(jax.random.key(1), (total,), jnp.float32, 0.5, 2.0)
            arrays = tuple(jnp.split(x, splits, axis=1))
            codes, scales = jax.jit(_rounded_by_kernel, static_argnums=2)(arrays, factors, blocks)
            expected_codes, expected_scales = rounded(x if factors is None else x.astype(jnp.float32) * factors, blocks)
            for result, (all_codes, all_scales) in (
                (results, (codes, scales)),
                (expected, (expected_codes, expected_scales)),
            ):
                if blocks:
                    all_scales = jnp.repeat(all_scales, BLOCK, axis=1)[:, :total]
                result.append(all_codes[:, :total].astype(jnp.float32) * all_scales)
        return results, expected

    kind = f"{jnp.dtype(dtype)}, {'blocks' if blocks else 'rows'}"
    return dispatch.first_use("to_fp8", "triton", kind, compare)


def _decoded(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Only outside of programs that round: XLA leaves out a conversion to e4m3 with one back to float32 behind it."""
    return codes.astype(jnp.float32) * jnp.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]]


def _rounded_alone(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`rounded` in blocks by a program of its own (see `_decoded`)."""
    return dispatch.exactly(functools.partial(rounded, blocks=True))(rows)


def _first_gated(dtype, width: int, activation: str) -> str | None:
    """width: columns of the product with A."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 3)
        gate, up = (2 * jax.random.normal(key, (333, 1352)).astype(dtype) for key in keys[:2])
        a = jax.random.normal(keys[2], (width, 1352)).astype(dtype)

        def exact(gate, up, a):
            gate, up, a = (array.astype(jnp.float32) for array in (gate, up, a))
            x, inner = reference.gated_thin(gate, up, a, activation)
            return x.astype(dtype), inner

        def by_kernel(gate, up, a):
            return thin_triton.gated_thin(gate, up, a, activation, "e4m3")

        codes, scales, inner = jax.jit(by_kernel)(gate, up, a)
        x, expected = dispatch.exactly(exact)(gate, up, a)
        return (_decoded(codes, scales), inner), (_decoded(*_rounded_alone(x)), expected)

    return dispatch.first_use("gated_to_fp8", "triton", f"{dtype}, {width} columns, {activation}", compare)


def _first_gradients(dtype, width: int, activation: str) -> str | None:
    """Compares `gated_gradients`' kernel with plain JAX, from gradients that are not rounded."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 8)
        gate, up, dgated = (2 * jax.random.normal(key, (333, 1352)).astype(dtype) for key in keys[:3])
        dinner, *inners = (jax.random.normal(key, (333, width)).astype(dtype) for key in keys[3:6])
        bs = [jax.random.normal(key, (1352, width)).astype(dtype) for key in keys[6:]]

        def exact(gradients, inners, bs):
            gradients, inners, bs = jax.tree.map(lambda array: array.astype(jnp.float32), (gradients, inners, bs))
            thins = [reference.thin_product(*pair, (1, 0), jnp.float32) for pair in zip(gradients, bs, strict=True)]
            dbs = [reference.thin_product(*pair, (0, 0), jnp.float32) for pair in zip(gradients, inners, strict=True)]
            return jnp.concatenate(thins, axis=1), dbs

        unrounded_gradients = functools.partial(thin_triton.gated_thin_backward, activation=activation)
        *gradients, da = jax.jit(unrounded_gradients)(gate, up, dgated, dinner)
        shape = thin_triton.rounded_tile()._replace(programs=0)  # one program for all rows, which reads tiles ahead
        run = functools.partial(thin_triton.rounded_gradients, activation=activation, shape=shape)
        coded, *kernel_products = jax.jit(run)(gate, up, dgated, dinner, inners, bs)
        products, dbs = dispatch.exactly(exact)(gradients, inners, bs)
        wide = jnp.concatenate([whole_blocks(array, 1) for array in gradients], axis=1)
        expected = products, da, *dbs, _decoded(*_rounded_alone(wide))
        return [*jax.tree.leaves(kernel_products), _decoded(*coded)], expected

    kind = f"{dtype}, {width} columns, {activation}"
    return dispatch.first_use("gated_gradients_to_fp8", "triton", kind, compare)


def _first_normed(width: int, blocks: bool, excess: int) -> str | None:
    """width: columns of the product with the A's, or 0. excess: numbers of a row beyond a multiple of 128."""
    size = 2304 + excess

    def compare():
        keys = jax.random.split(jax.random.key(0), 3)
        x = (2 * jax.random.normal(keys[0], (333, size))).astype(jnp.bfloat16)
        weight = jax.random.uniform(keys[1], (size,), jnp.float32, 0.5, 1.5)
        a = jax.random.normal(keys[2], (width, size)) if width else None

        def decoded(codes, scales, row_factors, inner):
            """The numbers that codes and scales stand for, and what is not rounded."""
            wide = codes.astype(jnp.float32) * (jnp.repeat(scales, BLOCK, axis=1) if blocks else scales)
            return (wide, row_factors) if inner is None else (wide, row_factors, inner)

        def exact(x, weight, a):
            wide = normed(x.astype(jnp.float32), weight, 1e-6, 0.0, True)
            return wide, inverse_rms(x, 1e-6), None if a is None else _thin(wide, a)

        results = jax.jit(fp8_normed.normed, static_argnums=(3, 4))(x, weight, a, 1e-6, blocks)
        wide, of_rows, inner = dispatch.exactly(exact)(x, weight, a)
        # Not in one program: XLA leaves out a conversion to e4m3 that is followed by one back to float32.
        return decoded(*results), decoded(*rounded(wide, blocks), of_rows, inner)

    call = f"{width} columns, {'blocks' if blocks else 'rows'}, {size}"
    return dispatch.first_use("normed_to_fp8", "triton", call, compare)
