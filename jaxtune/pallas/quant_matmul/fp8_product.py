"""Products with weights in FP8 as they are stored: e4m3 times e4m3, summed in float32.

The other operand (activations or gradients) is rounded to e4m3: each row by its own largest magnitude, or, for a weight
with scales of 128 x 128 numbers, each 128 numbers of a row by their own largest. Scales of the weight's rows are
outside of the sum in the forward, x W^T. In the backward, dy W, they are factors of the summed axis, and the
gradient is multiplied by them before it is rounded. Scales of 128 x 128 are inside both sums, of 128 products each.

The backward multiplies the gradients of all weights that share x, side by side, by these weights stacked: one product,
in which the sum over the weights takes no pass over memory. It needs the codes transposed, because tensor cores accept
e4m3 with the summed axis contiguous only. The transposed copy is made in each step (two bytes per weight, about 6 ms of
an 8B step on an H200), unless the weights have their codes transposed beside them (FP8.transposed, another 7 GB). The
kernel for Hopper then reads those of all weights where they are; elsewhere they are joined.

fp8_rounding.py rounds on GPUs that multiply in FP8 (compute capability 8.9 and later). On Hopper fp8_mosaic.py
multiplies. On the others XLA uses the vendor's product for scales by rows, and fp8_triton.py multiplies blocks. Where a
kernel refuses a call, and on a CPU, XLA computes the same: for blocks by a loop over products.

`operand`, `forward` and `backward` are the functions that as_stored.py describes, and `in_blocks` is its `kind`.
`forward` and `backward` call `multiply`, which chooses the implementation; `by_kernel` calls a kernel, for
grouped_matmul too. `rounded` rounds rows in plain JAX, and `side_by_side` those of several arrays, by the kernel where
it can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import LARGEST, ROW, TILE, scale_of
from jaxtune.pallas.gated import reference, thin, thin_triton
from jaxtune.pallas.normed_heads import inverse_rms, normed
from jaxtune.pallas.quant_matmul import fp8_gradients, fp8_mosaic, fp8_normed, fp8_rounding, fp8_triton, low_rank
from jaxtune.pallas.quant_matmul.fp8_plain import by_blocks, by_rows, whole_blocks
from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK, LEAST_CAPABILITY

_KERNELS = {"mosaic": fp8_mosaic.product, "triton": fp8_triton.product}
_LEAST_ROWS = 512  # that are rounded by a kernel
_NO_SCALE = 1e-30  # replaces a weight's scale of zero, by which an adapter's operand is divided

# A product u side^T that is added to another: (u [n, r], side [columns, r]).
More = tuple[jax.Array, jax.Array]


class NormRounding(NamedTuple):
    """The settings of an RMS norm (normed_stream)."""

    eps: float  # added to the mean square
    offset: float  # added to the weight, if float32 is True
    float32: bool  # whether the product with the weight is computed in float32


def in_blocks(weight: FP8) -> bool:
    """Returns True if the weight has a scale for each 128 x 128 numbers, and False if it has one for each row or for
    the whole matrix. In the first case partial sums over 128 products must be scaled one by one; in the second the
    whole sum is. It is also the function `kind` that as_stored.py asks for: weights with equal values share the rounded
    x, and one product of their gradients."""
    return weight.block == TILE


kind = in_blocks  # see as_stored.py


def rounded(rows: jax.Array, blocks: bool = False) -> tuple[jax.Array, jax.Array]:
    """Rounds rows [n, k] to e4m3: (codes e4m3[n, k], scales float32), where code times scale is the rounded number. If
    `blocks` is False, each row has a scale, [n, 1], its largest magnitude over 448; if True, each 128 numbers of a row
    have one, [n, ceil(k / 128)]. A row or run of zeros has scale 1. Where numbers are not finite, the scale is not
    finite either. It is plain JAX, which the kernels of fp8_rounding.py replace where they can."""
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
    """Puts the rows of several arrays [n, k_i] side by side, multiplies them by `factors`, and rounds them to e4m3:
    (codes e4m3[n, K], scales float32[n, 1], or with `blocks` [n, K / 128]). K is the sum of k_i; with `blocks` zeros
    fill each array's part up to a multiple of 128, so that each block of 128 numbers belongs to only one array. The
    backward needs it for the gradients of all weights that share x, which are then multiplied by the weights in one
    product. `operand` calls it for x alone.

    Args:
      arrays: [n, k_i] each, of one dtype.
      factors: float32[sum of k_i], the factor of each column (scales of the weights); None, as with `blocks`: no
        factors.
      blocks: True: each 128 numbers of a row have a scale; False: a row has one.
      implementation: "reference" for XLA; any other value, also None, for the Triton kernel if it can
        (`by_rounding_kernel`), else XLA.
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
    """Whether the kernels of fp8_rounding.py round a call, and not XLA. Fewer than 512 rows, as in steps of generation,
    are left to XLA, because calls of these kernels are no nodes of CUDA graphs. `side_by_side` asks it, and
    grouped_matmul's fp8_experts.py.

    Args:
      rows: the number of rows of the result.
      widths: the columns of each of the arrays whose rows are side by side.
      dtype: of the arrays.
      blocks: True: each 128 numbers of a row have a scale; False: a row has one.
      implementation: "reference" for XLA; any other value, also None, for a kernel if it can.
    """

    def refusal():
        return fp8_rounding.refusal(widths, dtype, blocks) or _first_rounding(dtype, blocks)

    wanted = "reference" if implementation == "reference" or rows < _LEAST_ROWS else None
    return dispatch.choose("to_fp8", {"triton": refusal, "reference": lambda: None}, wanted) == "triton"


def _rounded_by_kernel(arrays, factors, blocks: bool) -> tuple[jax.Array, jax.Array]:
    """What `side_by_side` returns, by the kernel; it calls it on each device."""
    codes, scales = fp8_rounding.rounded(arrays, factors, blocks=blocks)
    return codes, scales.T if blocks else scales[:, None]


def operand(x: jax.Array, blocks: bool, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Rounds x [n, k] to e4m3 for the forward: (codes e4m3[n, k], scales float32[n, 1], or with `blocks` [n, ceil(k /
    128)]). quant_matmul calls it once for all weights of a call whose scales are of the same kind, and `forward` takes
    the result; api.in_e4m3 calls it too. blocks: True if these weights have scales of 128 x 128 numbers, False if not
    (`in_blocks`). implementation: "reference" for XLA; any other value, also None, for the Triton kernel if it can,
    else XLA."""
    codes, scales = side_by_side([x], None, blocks, implementation)
    return codes[:, : x.shape[1]], scales


def gated_operand(
    gate: jax.Array, up: jax.Array, a: jax.Array, activation: str, blocks: bool, implementation: str | None = None
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Rounds x = activation(gate) * up for the forward, and multiplies it, not rounded to e4m3, by an adapter's A:
    (`operand` of x, x a^T [n, r] in gate's dtype). With `blocks` a kernel computes both without writing x. gated_matmul
    calls it.

    Args:
      gate, up: [n, k].
      a: [r, k].
      activation: a key of pallas.gated.ACTIVATIONS, such as "silu".
      blocks: True if the weight has scales of 128 x 128 numbers, False if not (`in_blocks`).
      implementation: that of `operand`.
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
    """Computes the backward of an MLP's gated activation, up to the product with the weights of gate and up. With
    `blocks` a kernel rounds the gradients of gate and up for that product and multiplies them by the thin arrays of
    their adapters, where `backward` and the adapters would read both again; it does not write them in 16 bits.
    gated_mlp calls it.

    Args:
      gate, up, dgated, dinner, activation: those of pallas.gated.gated_thin_backward.
      adapters: for gate and for up (the low-rank input of its adapter [n, r] in gate's dtype, its B float[k, r]); None
        if the gradients themselves are needed.
      blocks: True if the weights of gate and up have scales of 128 x 128 numbers, False if not (`in_blocks`).
      implementation: that of `operand`.
    Returns:
      ((the gradient of gate, that of up), dinner^T (activation(gate) * up) float32[r, k], None), or where the kernel
      runs ((None, None), the same, (the gradients of gate and up as `backward` takes them rounded; their products with
      the B's, side by side, [n, sum of ranks] in gate's dtype; for each its transpose times the low-rank input,
      float32[k, r])).
    """
    inners, bs = zip(*adapters, strict=True) if adapters is not None else ((), ())
    rank, op = max(part.shape[1] for part in (dinner, *inners)), "gated_gradients_to_fp8"
    blocks = blocks and adapters is not None
    if _rounds_gated(op, _first_gradients, gate, rank, activation, blocks, implementation):
        coded, products, da, dbs = thin.rounded_gradients(gate, up, dgated, dinner, inners, bs, activation)
        return (None, None), da, (coded, products, dbs)
    *gradients, da = thin.gated_thin_backward(gate, up, dgated, dinner, activation)
    return tuple(gradients), da, None


def _rounds_gated(
    op: str, first_use: Callable, gate, rank: int, activation: str, blocks: bool, implementation: str | None
) -> bool:
    """Whether a kernel of pallas/gated/thin_triton.py rounds what it computes to e4m3.

    Args:
      op: the name under which the choice is recorded.
      first_use: the check of the kernel at its first use.
      gate: [n, k].
      rank: of the adapters with whose thin arrays the kernel multiplies, the largest.
      activation, blocks, implementation: those of gated_operand and gated_gradients.
    """
    if not blocks or implementation == "reference" or not thin.is_large(*gate.shape):
        return False

    def refusal():
        capability = dispatch.compute_capability()
        if capability is not None and capability < LEAST_CAPABILITY:
            return "needs a GPU that has e4m3 (compute capability 8.9)"
        reason = thin_triton.refusal(gate, rank, activation)
        return reason or first_use(gate.dtype, thin_triton.width_of(rank), activation)

    return dispatch.choose(op, {"triton": refusal, "reference": lambda: None}, None) == "triton"


def rounded_gradients(
    douts: Sequence[jax.Array],
    inner: jax.Array,
    bs: Sequence[jax.Array],
    blocks: bool,
    implementation: str | None = None,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, list[jax.Array]] | None:
    """Rounds the gradients of outputs that share x, each of which has an adapter, as `backward` takes them rounded, and
    multiplies them by what the adapters have, by a kernel that reads each gradient once. Returns None where no kernel
    computes all this. The backward of quant_matmul calls it, and that of gated_matmul.

    Args:
      douts: [n, out_i] each.
      inner: the low-rank inputs of the adapters, side by side, [n, sum of ranks].
      bs: the B's of the adapters, float[out_i, r_i].
      blocks: True if the weights have scales of 128 x 128 numbers, False if not (`in_blocks`): then the result is None.
      implementation: that of `operand`.
    Returns:
      None, or (codes and scales as `side_by_side` has them; the gradients times the B's, [n, sum of ranks]; for each
      output its transposed gradient times its low-rank input, float32[out_i, r_i]).
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
    """Norms x [n, k], rounds the normed x for the forward, and multiplies it by adapters' A, by a kernel that writes no
    normed x: (`operand` of it, its product with a^T [n, r] in x's dtype beside the factors of x's rows, or None).
    `normed_refusal` says which calls are supported. normed_matmul calls it.

    Args:
      x: bfloat16[n, k].
      weight: float[k], the norm's.
      rounding: the norm's settings.
      a: float[r, k], the A's of all adapters; None: there are none.
      blocks: True if the weights have scales of 128 x 128 numbers, False if not (`in_blocks`).
    """
    if rounding.float32:
        factors = rounding.offset + weight.astype(jnp.float32)
    else:
        factors = weight.astype(x.dtype)
    with jax.named_scope("to_fp8"):
        run = meshes.on_each_device(fp8_normed.normed, rows=1)
        codes, scales, of_rows, inner = run(x, factors, a, rounding.eps, blocks)
    return (codes, scales), None if inner is None else low_rank.OfNormed(inner, of_rows)


def normed_refusal(x, rank: int, blocks: bool) -> str | None:
    """The reason why no kernel can compute a call of `normed_operand`, or None. x: [n, k], as an array or as a shape.
    rank: the sum of the adapters' ranks, 0 without one. blocks: that of `normed_operand`."""
    return fp8_normed.refusal(x, rank) or _first_normed(fp8_normed.width_of(rank), blocks)


def forward(
    coded: tuple[jax.Array, jax.Array], weight: FP8, more: More | None, dtype, implementation: str | None = None
) -> jax.Array:
    """Multiplies rounded activations by a weight: x W^T in `dtype`, [n, out], plus an adapter's product. A row of x
    that is not finite makes only that row of the result not finite. The forward of quant_matmul calls it for weights in
    FP8 (as_stored.py).

    Args:
      coded: (codes e4m3[n, in], scales), which operand(x, in_blocks(weight)) returns: scales must be of the weight's
        kind, float32[n, 1], or for a weight with scales of 128 x 128 numbers float32[n, ceil(in / 128)].
      weight: [out, in].
      more: None, or an adapter's two operands (u [n, r], b [out, r]), whose product u b^T is added.
      dtype: of the result.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call (see `multiply`).
    """
    scales = weight.scales.astype(jnp.float32)
    if not in_blocks(weight):
        scales = jnp.broadcast_to(scales.reshape(-1), weight.shape[:1])
    return multiply(coded, [weight.codes], scales, more, dtype, in_blocks(weight), implementation)


def backward(
    douts: Sequence[jax.Array],
    weights: Sequence[FP8],
    more: More | None,
    dtype,
    implementation: str | None = None,
    coded: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The gradient of x: the sum of dy W over the weights, plus the adapters' product, [n, in] in `dtype`. dy is
    rounded to e4m3 first; unless scales are of blocks, it is multiplied by the scales of the weight's rows before. The
    backward of quant_matmul calls it for weights in FP8 (as_stored.py).

    Args:
      douts: dy [n, out_i] of each weight, not rounded yet.
      weights: each [out_i, in]; `in_blocks` is the same for all.
      more: None, or the adapters' two operands (u [n, r], a [in, r]), whose product u a^T is added.
      dtype: of the result.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call (see `multiply`).
      coded: dy of all weights rounded, side by side, if gated_gradients or rounded_gradients has done so; `douts` are
        then not read. None: it is rounded here.
    """
    blocks = in_blocks(weights[0])
    if blocks:  # each weight's blocks start at its own first row
        coded = side_by_side(douts, None, blocks, implementation) if coded is None else coded
        scales = jnp.concatenate([weight.scales for weight in weights]).astype(jnp.float32).T
    else:
        each = [jnp.broadcast_to(w.scales.astype(jnp.float32).reshape(-1), w.shape[:1]) for w in weights]
        coded, scales = side_by_side(douts, jnp.concatenate(each), blocks, implementation), None
    return multiply(coded, _sides(weights, blocks), scales, more, dtype, blocks, implementation)


def _sides(weights: Sequence[FP8], blocks: bool) -> Sequence[jax.Array]:
    """The transposed codes of weights that share x, as `multiply` takes them in the backward: those of each weight,
    e4m3[in, out_i], if all have them beside them, else one array of all, which is copied here. With `blocks` each out_i
    is padded to a multiple of 128."""

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
    more: More | None,
    dtype,
    blocks: bool,
    implementation: str | None,
) -> jax.Array:
    """The product over k of two operands in e4m3, times their scales: dtype[n, columns], summed in float32. The forward
    calls it with a weight's codes, the backward with the transposed codes of several weights.

    Args:
      coded: (codes e4m3[n, k], scales float32[n, 1], or with `blocks` [n, ceil(k / 128)]), from `rounded`.
      sides: e4m3[columns, k_i], the codes of the other operand, in arrays that are side by side along k.
      side_scale: the scales of the other operand: float32[columns], or None for no scales; with `blocks`
        float32[ceil(columns / 128), ceil(k / 128)].
      more: None, or two further operands (u [n, r], v [columns, r]), whose product u v^T is added. A kernel adds that
        of their first 64 columns, and XLA that of the others; with "reference" XLA adds all.
      dtype: of the result.
      blocks: True if each 128 numbers along k have a scale, by which sums over 128 are multiplied; False if a whole row
        has one, by which the result is multiplied.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call; without `blocks`
        "triton" is used only if it is requested.
    Raises:
      ValueError: the requested implementation refuses the call.
    """
    codes, scale = coded
    sizes = (codes.shape[0], codes.shape[1], sides[0].shape[0])
    rank = min(more[0].shape[1], fp8_mosaic.RANKS[-1]) if more is not None else 0  # that of the kernels' part

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
        return out if more is None else out + _thin(*more)
    run = meshes.on_each_device(_with_wide_adapter, rows=3)
    u, add = more if more is not None else (None, None)
    return run(codes, scale, u, add, sides, side_scale, dtype, blocks, name)


def _with_wide_adapter(codes, scale, u, add, sides, side_scale, dtype, blocks, name: str):
    """What `by_kernel` computes, dtype[n, columns], for an adapter of any rank: of more than 64 columns of u and add,
    the kernel takes the first 64, and XLA adds the product of the others to the kernel's result, in one more pass over
    it. The sum of several adapters' ranks is that large in the backward of weights that share x. `multiply` calls it on
    each device.

    Args:
      codes, scale: e4m3[n, k] and its scales, float32[n, 1], or with `blocks` [n, ceil(k / 128)].
      u, add: two operands of an adapter, [n, r] and [columns, r], whose product u add^T is added; None and None: none.
      sides, side_scale: the other operand, e4m3[columns, k_i] side by side, and its scales, float32[columns] or None
        for no scales, or with `blocks` float32[columns / 128, k / 128].
      dtype: of the result.
      blocks: True if each 128 numbers along k have a scale, False if a whole row has one.
      name: the kernel, "mosaic" or "triton".
    """
    most, rest = fp8_mosaic.RANKS[-1], None
    if u is not None and u.shape[1] > most:
        rest = u[:, most:], add[:, most:]
        u, add = u[:, :most], add[:, :most]
    out = by_kernel(codes, scale, u, add, sides, side_scale, dtype, blocks, name)
    return out if rest is None else out + _thin(*rest)


def _thin(u: jax.Array, side: jax.Array) -> jax.Array:
    """The product of an adapter's two operands (`more` of `multiply`), u [n, r] side [columns, r]^T: [n, columns] in
    u's dtype. In the forward `side` is LoRA's B; in the backward it is the transpose of A, and u is dy B. XLA adds it
    to a product that no kernel computes, and to a kernel's what the adapter has beyond the columns that the kernel
    takes. float32 is multiplied in full float32."""
    precision = jax.lax.Precision.HIGHEST if u.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    numbers = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(u, side.astype(u.dtype), numbers, precision=precision, preferred_element_type=u.dtype)


def by_kernel(codes, scale, u, add, sides, side_scale, dtype, blocks, name: str, tiles=None):
    """The product over k of two operands in e4m3, times their scales, by one of our kernels, fp8_mosaic.product or
    fp8_triton.product: dtype[n, columns]. It brings operands and scales into the form that they take: scales without an
    axis of one, or with `blocks` those of `codes` transposed; without `blocks` ones for a side_scale of None, and 1e-30
    for a scale of zero of the other operand; and the adapter's operands in bfloat16, padded to 16, 32 or 64 columns
    and, without `blocks`, divided by the scales by which the kernel multiplies everything at the end. grouped_matmul
    calls it too, for rows that are sorted by expert.

    Args:
      codes, scale: e4m3[n, k] and its scales, float32[n, 1], or with `blocks` [n, ceil(k / 128)], from `rounded`.
      u, add: two operands of an adapter, [n, r] and [columns, r], r at most 64, whose product u add^T is added; None
        and None for no such product. u may have more columns, of zeros, which change nothing.
      sides, side_scale: the codes of the other operand, a tuple of arrays [columns, k_i] that are side by side along k
        (for "triton" and with `tiles` of one), and its scales, float32[columns] or None for no scales, or with `blocks`
        float32[columns / 128, k / 128].
      dtype: of the result.
      blocks: True if each 128 numbers along k have a scale, False if a whole row has one.
      name: the kernel, "mosaic" or "triton".
      tiles: None; or for rows that are sorted by expert two int32[n / 128], the expert of each 128 rows and how many of
        these are not empty. Then add, sides and side_scale have a leading axis of experts.
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
        wanted = fp8_mosaic.filled_rank(add.shape[-1])
        u = u[:, :wanted]
        if not blocks:  # the adapter's product is scaled with the rest at the end
            u, add = u.astype(jnp.float32) / scale[:, None], add.astype(jnp.float32) / side_scale[..., None]

        def filled(array):
            return jnp.pad(array.astype(jnp.bfloat16), [(0, 0)] * (array.ndim - 1) + [(0, wanted - array.shape[-1])])

        extra = filled(u), filled(add)
    side = sides if name == "mosaic" else sides[0]
    return _KERNELS[name](codes, side, scale, side_scale, extra, tiles, dtype=dtype, in_blocks=blocks)


def _first_use(name: str, blocks: bool, dtype, rank: int, whole: bool) -> str | None:
    """Compares the kernel `name` with an exact product on a small case, in which the rows of the last tile overlap
    those before, at the first use for each combination of arguments; Mosaic's also with the other operand in two
    arrays, if `whole`. Returns the reason, in words, why this GPU must
    not run the kernel, or None if the two agree. Without a GPU nothing is compared, and the result is None. `multiply`
    calls it before it chooses the kernel.

    Args:
      name: "mosaic" or "triton".
      blocks: True if each 128 numbers along k have a scale, False if a whole row has one.
      dtype: of the result.
      rank: of the adapter, 0 without one. Ranks that are padded to the same number of columns share a check.
      whole: whether 128 divides the summed axis. If it does not, the kernel has another swizzle, and another check.
    """
    filled, width = fp8_mosaic.filled_rank(rank) if rank else 0, 1024 if whole else 960

    def compare():
        keys = jax.random.split(jax.random.key(0), 4)
        x, weight = (jax.random.normal(key, shape) for key, shape in zip(keys, ((296, width), (512, width))))
        u = add = None
        if filled:
            u, add = (jax.random.normal(key, (n, filled), dtype) * 8 for key, n in zip(keys[2:], (296, 512)))
        stored, (codes, scale) = FP8.encode(weight, TILE if blocks else ROW), rounded(x, blocks)
        side_scale = stored.scales if blocks else stored.scales[:, 0]
        run = jax.jit(by_kernel, static_argnums=(6, 7, 8))
        cases = [[stored.codes]]
        if whole and name == "mosaic":
            cases.append([stored.codes[:, :256], stored.codes[:, 256:]])
        got = [run(codes, scale, u, add, sides, side_scale, dtype, blocks, name) for sides in cases]

        def exact(codes, scale, stored, u, add):
            wide = codes.astype(jnp.float32) * (jnp.repeat(scale, BLOCK, axis=1) if blocks else scale)
            with jax.default_matmul_precision("highest"):
                want = wide @ stored.decode(jnp.float32).T
                if u is not None and add is not None:
                    want += u.astype(jnp.float32) @ add.astype(jnp.float32).T
            return want

        return got, [dispatch.exactly(exact)(codes, scale, stored, u, add)] * len(got)

    call = f"{'blocks' if blocks else 'rows'}, {jnp.dtype(dtype)}, {filled} columns of an adapter, K of {width}"
    return dispatch.first_use("fp8_matmul", name, call, compare)


def _first_rounding(dtype, blocks: bool) -> str | None:
    """Compares the kernel of fp8_rounding.py with `rounded` for arrays of `dtype`, at the first use for each dtype and
    kind of scales. Returns the reason, in words, why this GPU must not run the kernel, or None if the two agree.
    Without a GPU nothing is compared, and the result is None. `by_rounding_kernel` asks it. There is a case for each
    way in which the kernel divides its work.

    Args:
      dtype: bfloat16 or float16, the dtypes that the kernels support.
      blocks: True: each 128 numbers of a row have a scale; False: a row has one.
    """

    def compare():
        got, wanted = [], []
        for total, parts in ((1544, 1), (6144, 3), *(() if blocks else ((11264, 1), (20480, 2), (40960, 2)))):
            x = jax.random.normal(jax.random.key(0), (333, total), dtype)
            factors = None if blocks else jax.random.uniform(jax.random.key(1), (total,), jnp.float32, 0.5, 2.0)
            arrays = tuple(jnp.split(x, parts, axis=1))
            codes, scales = jax.jit(_rounded_by_kernel, static_argnums=2)(arrays, factors, blocks)
            want, of_rows = rounded(x if factors is None else x.astype(jnp.float32) * factors, blocks)
            for result, (all_codes, all_scales) in ((got, (codes, scales)), (wanted, (want, of_rows))):
                if blocks:
                    all_scales = jnp.repeat(all_scales, BLOCK, axis=1)[:, :total]
                result.append(all_codes[:, :total].astype(jnp.float32) * all_scales)
        return got, wanted

    kind = f"{jnp.dtype(dtype)}, {'blocks' if blocks else 'rows'}"
    return dispatch.first_use("to_fp8", "triton", kind, compare)


def _decoded(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The numbers that codes [n, k] with scales [n, ceil(k / 128)] stand for. Checks at first use call it outside of
    the programs that round, as XLA leaves out a conversion to e4m3 that is followed by one back to float32."""
    return codes.astype(jnp.float32) * jnp.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]]


def _rounded_alone(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `rounded` returns with `blocks`, by a program of its own, for checks at first use."""
    return dispatch.exactly(functools.partial(rounded, blocks=True))(rows)


def _first_gated(dtype, width: int, activation: str) -> str | None:
    """Compares the kernel of pallas/gated/thin_triton.py, as `gated_operand` calls it, with plain JAX, at the first use
    for each combination of arguments. Returns the reason, in words, why this GPU must not run the kernel, or None if
    the two agree. Without a GPU nothing is compared, and the result is None. dtype: of gate. width: the columns with
    which the kernel multiplies A. activation: its name."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 3)
        gate, up = (2 * jax.random.normal(key, (333, 1352)).astype(dtype) for key in keys[:2])
        a = jax.random.normal(keys[2], (width, 1352)).astype(dtype)

        def exact(gate, up, a):
            """The activation, rounded to `dtype`, and the product in plain JAX."""
            gate, up, a = (each.astype(jnp.float32) for each in (gate, up, a))
            x, inner = reference.gated_thin(gate, up, a, activation)
            return x.astype(dtype), inner

        def by_kernel(gate, up, a):
            """Codes, scales and the product."""
            return thin_triton.gated_thin(gate, up, a, activation, "e4m3")

        codes, scales, inner = jax.jit(by_kernel)(gate, up, a)
        x, wanted = dispatch.exactly(exact)(gate, up, a)
        return (_decoded(codes, scales), inner), (_decoded(*_rounded_alone(x)), wanted)

    return dispatch.first_use("gated_to_fp8", "triton", f"{dtype}, {width} columns, {activation}", compare)


def _first_gradients(dtype, width: int, activation: str) -> str | None:
    """Compares the kernel of the backward, as `gated_gradients` calls it, with plain JAX, as `_first_gated` does, whose
    arguments it has. Its codes and products are compared with those of the gradients of the kernel that does not round
    them to e4m3, which has a check of its own: where two gradients differ in their last digit, codes may differ by a
    sixteenth."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 8)
        gate, up, dgated = (2 * jax.random.normal(key, (333, 1352)).astype(dtype) for key in keys[:3])
        dinner, *inners = (jax.random.normal(key, (333, width)).astype(dtype) for key in keys[3:6])
        bs = [jax.random.normal(key, (1352, width)).astype(dtype) for key in keys[6:]]

        def exact(gradients, inners, bs):
            """The products with the adapters' thin arrays in plain JAX."""
            gradients, inners, bs = jax.tree.map(lambda each: each.astype(jnp.float32), (gradients, inners, bs))
            thins = [reference.thin_product(*pair, (1, 0), jnp.float32) for pair in zip(gradients, bs, strict=True)]
            dbs = [reference.thin_product(*pair, (0, 0), jnp.float32) for pair in zip(gradients, inners, strict=True)]
            return jnp.concatenate(thins, axis=1), dbs

        apart = functools.partial(thin_triton.gated_thin_backward, activation=activation)
        *gradients, da = jax.jit(apart)(gate, up, dgated, dinner)
        shape = thin_triton.rounded_tile()._replace(programs=0)  # one program for all rows, which reads tiles ahead
        run = functools.partial(thin_triton.rounded_gradients, activation=activation, shape=shape)
        coded, *found = jax.jit(run)(gate, up, dgated, dinner, inners, bs)
        products, dbs = dispatch.exactly(exact)(gradients, inners, bs)
        wide = jnp.concatenate([whole_blocks(each, 1) for each in gradients], axis=1)
        want = products, da, *dbs, _decoded(*_rounded_alone(wide))
        return [*jax.tree.leaves(found), _decoded(*coded)], want

    kind = f"{dtype}, {width} columns, {activation}"
    return dispatch.first_use("gated_gradients_to_fp8", "triton", kind, compare)


def _first_normed(width: int, blocks: bool) -> str | None:
    """Compares the kernel of fp8_normed.py with plain JAX at the first use for each combination of arguments. Returns
    the reason, in words, why this GPU must not run the kernel, or None if the two agree. Without a GPU nothing is
    compared, and the result is None. width: the columns with which the kernel multiplies the A's, or 0. blocks: that of
    `normed_operand`."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 3)
        x = (2 * jax.random.normal(keys[0], (333, 2304))).astype(jnp.bfloat16)
        weight = jax.random.uniform(keys[1], (2304,), jnp.float32, 0.5, 1.5)
        a = jax.random.normal(keys[2], (width, 2304)) if width else None

        def decoded(codes, scales, of_rows, inner):
            """The numbers that codes and scales stand for, and what is not rounded to e4m3."""
            wide = codes.astype(jnp.float32) * (jnp.repeat(scales, BLOCK, axis=1) if blocks else scales)
            return (wide, of_rows) if inner is None else (wide, of_rows, inner)

        def exact(x, weight, a):
            """Computes the kernel's results before they are rounded, in plain JAX and float32. Returns (the normed x
            [333, 2304]; the reciprocal root mean square of each row of x [333, 1]; the product of the normed x and a^T
            [333, width], or None if a is None)."""
            wide = normed(x.astype(jnp.float32), weight, 1e-6, 0.0, True)
            return wide, inverse_rms(x, 1e-6), None if a is None else _thin(wide, a)

        got = jax.jit(fp8_normed.normed, static_argnums=(3, 4))(x, weight, a, 1e-6, blocks)
        wide, of_rows, inner = dispatch.exactly(exact)(x, weight, a)
        # Not in one program: XLA leaves out a conversion to e4m3 that is followed by one back to float32.
        return decoded(*got), decoded(*rounded(wide, blocks), of_rows, inner)

    call = f"{width} columns, {'blocks' if blocks else 'rows'}"
    return dispatch.first_use("normed_to_fp8", "triton", call, compare)
