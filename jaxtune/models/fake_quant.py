"""Fake quantisation for quantisation-aware training (QAT): rounds weights, and in some formats activations, to values
that a low-bit format can represent.

The forward uses the rounded numbers; in the backward the gradient passes unchanged to what was rounded
(straight-through, arXiv 1308.3432, 1712.05877). With an adapter the merged weight is rounded, as it is in a deployed
model. The adapter's gradients are then those of the adapter without rounding, for which no dense gradient of the merged
weight is needed. `ROUNDINGS` declares the formats: how each rounds weights and activations. `FakeQuant` is the grid of
one run or model; linears and experts round by it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from jaxtune.models.gguf_grids import q8_0_codes, signed_codes
from jaxtune.pallas import formats
from jaxtune.pallas.format_names import QAT_GROUPS, qat_group_size
from jaxtune.pallas.formats.division import divide
from jaxtune.pallas.formats.float16 import as_float16


def int4(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to symmetric int4: each group of a row is a scale times integers from -8 to 7.

    The scale is max(max(w) / 7, -min(w) / 8), the smallest one that clips nothing, rounded to `dtype`; codes are
    rounded to nearest even. The result has the weight's shape. These are the values of W4A16 formats (GPTQ and
    compressed-tensors, symmetric; torchao's SYMMETRIC_NO_CLIPPING_ERR): a kernel that multiplies code and scale in
    `dtype` computes with exactly them.

    It has no straight-through gradient; callers add it, such as `straight_through`.

    Args:
      weight: [..., out, in], of any floating-point dtype.
      group_size: how many consecutive weights of a row share a scale; it must divide `in`, and is not None.
      dtype: the name of the dtype of the scales and of the result, such as "bfloat16".
    """
    assert group_size is not None
    groups = _blocks(weight, group_size)
    scale = int4_scales(groups, dtype).astype(jnp.float32)
    return (int4_codes(groups, scale) * scale).astype(dtype).reshape(weight.shape)


def int4_scales(groups: jax.Array, dtype: str) -> jax.Array:
    """The scales with which a weight is rounded to int4, [..., out, n, 1] in `dtype`, one for each group of a row; 0
    for a group of zeros. The export of int4 weights calls it too, so that it writes what training computed with.
    groups: float32[..., out, n, group], the weight, each row of which is divided into n groups. dtype: the name of the
    scales' dtype."""
    # XLA may or may not turn a division by a constant into a product; a product is the same in every program.
    seventh = np.float32(1 / 7)
    scale = jnp.maximum(groups.max(-1, keepdims=True) * seventh, -groups.min(-1, keepdims=True) / 8)
    return scale.astype(dtype)


def int4_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The codes of a weight that is rounded to int4: whole numbers from -8 to 7, as float32[..., out, n, group], of
    which code * scale is the rounded weight; the export of int4 weights stores them. groups: the weight in n groups a
    row, of the same shape. scale: float32[..., out, n, 1], the scales of the groups, from int4_scales; a scale of 0
    gives codes of 0 for a group of zeros."""
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -8, 7)


def int8(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to symmetric int8, integers from -127 to 127 times a scale; the result has its
    shape.

    Without groups, these are the values of the declared format int8, which has a scale for each row. With groups, the
    scale is the group's largest magnitude / 127, rounded to `dtype`, and codes are rounded to nearest even. It has no
    straight-through gradient; callers add it, such as `straight_through`.

    Args:
      weight: [..., out, in], of any floating-point dtype.
      group_size: how many consecutive weights of a row share a scale, which must divide `in`; None: all of the row.
      dtype: the name of the dtype of the result, and of the scales of groups.
    """
    if group_size is None:
        return _as_declared("int8", weight, None, dtype)
    groups = _blocks(weight, group_size)
    scale = int8_scales(groups, dtype).astype(jnp.float32)
    return (int8_codes(groups, scale) * scale).astype(dtype).reshape(weight.shape)


def int8_scales(groups: jax.Array, dtype: str) -> jax.Array:
    """The scales with which a weight is rounded to int8 in groups, [..., out, n, 1] in `dtype`, one for each group: its
    largest magnitude / 127, so 0 for a group of zeros. groups: float32[..., out, n, group], the weight in n groups a
    row. dtype: the name of the scales' dtype."""
    return (jnp.abs(groups).max(-1, keepdims=True) * np.float32(1 / 127)).astype(dtype)


def int8_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The codes of a weight that is rounded to int8 in groups: whole numbers from -127 to 127, as float32[..., out, n,
    group], of which code * scale is the rounded weight. groups: the weight, of the same shape. scale: float32[..., out,
    n, 1], from int8_scales; where it is 0, the codes are 0."""
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -127, 127)


def _blocks(weight: jax.Array, group_size: int | None) -> jax.Array:
    """Divides the rows of a weight [..., out, in] into blocks of neighbouring weights: float32[..., out, blocks of a
    row, group_size]. group_size must divide `in`. None fails an assertion: it stands for formats that fix their own
    blocks, and they do not call this function."""
    assert group_size is not None
    return weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group_size)


def q4_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to what blocks of GGUF's type Q4_0 contain: a scale, which is a float16 number,
    times whole numbers from -8 to 7. In float32 it equals the gguf package's quantize and dequantize; in 16 bits scales
    have five significant bits, with which every product is exact in `dtype`, so that a file contains the same numbers.
    It has no straight-through gradient; callers add it, such as `straight_through`.

    Args:
      weight: [..., out, in], of any floating-point dtype.
      group_size: 32, the size of a block; it must divide `in`.
      dtype: of the result.
    """
    scales, codes = signed_codes(_blocks(weight, group_size), 8, dtype)
    return (as_float16(scales) * (codes - 8)).astype(dtype).reshape(weight.shape)


def q8_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to what blocks of GGUF's type Q8_0 contain: a scale, which is a float16 number,
    times whole numbers from -127 to 127. In float32 it equals the gguf package's quantize and dequantize; in 16 bits
    scales are powers of two, with which every product is exact in `dtype`, so that a file contains the same numbers. It
    has no straight-through gradient; callers add it, such as `straight_through`.

    Args:
      weight: [..., out, in], of any floating-point dtype.
      group_size: 32, the size of a block; it must divide `in`.
      dtype: of the result.
    """
    scales, codes = q8_0_codes(_blocks(weight, group_size), dtype)
    return (as_float16(scales) * codes).astype(dtype).reshape(weight.shape)


def _as_declared(format: str, weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to the values of a declared format of quantised weights (a key of
    formats.FORMATS): encodes it from float32 and decodes it to `dtype`, in the weight's shape. So training rounds as a
    checkpoint in the format does. It has no straight-through gradient; callers add it, such as `straight_through`.
    group_size: None, because these formats have blocks of their own."""
    del group_size
    return formats.FORMATS[format].encode(weight.astype(jnp.float32)).decode(dtype)


def int8_by_token(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in] to symmetric int8 with one scale for each token (each vector of the last axis):
    integers from -128 to 127 times its largest magnitude / 127.5, computed in float32. This is compressed-tensors'
    definition for W4A8 (dynamic, by token). The result has x's dtype. `_rounded_inputs` adds the straight-through
    gradient."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(-1, keepdims=True)
    scale = divide(largest, jnp.full_like(largest, 127.5))
    scale = jnp.where(scale == 0, jnp.finfo(jnp.float32).eps, scale)
    codes = jnp.clip(jnp.round(divide(wide, jnp.broadcast_to(scale, wide.shape))), -128, 127)
    return (codes * scale).astype(x.dtype)


def int8_by_token_asymmetric(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in] to int8 with one scale and one zero point for each token (each vector of the last
    axis), as torchao's Int8DynamicActivationInt4WeightConfig does: the scale is (max - min) / 255, where min is at most
    0 and max at least 0, and the zero point -128 - round(min / scale). Computed in float32; the result has x's dtype.
    `_rounded_inputs` adds the straight-through gradient."""
    wide = x.astype(jnp.float32)
    low = jnp.minimum(wide.min(-1, keepdims=True), 0)
    high = jnp.maximum(wide.max(-1, keepdims=True), 0)
    scale = jnp.maximum(divide(high - low, jnp.full_like(low, 255)), jnp.finfo(jnp.float32).eps)
    zero = jnp.clip(-128 - jnp.round(divide(low, scale)), -128, 127)
    # torchao multiplies by the reciprocal of the scale.
    inverse = divide(jnp.ones_like(scale), scale)
    codes = jnp.clip(jnp.round(wide * inverse) + zero, -128, 127)
    return ((codes - zero) * scale).astype(x.dtype)


def fp8_by_token(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in] to e4m3 with one float32 scale for each token (each vector of the last axis), its
    largest magnitude / 448, as servers do with FP8 checkpoints whose activation scales are dynamic. The result has x's
    dtype. `_rounded_inputs` adds the straight-through gradient."""
    return formats.FP8.encode(x.reshape(-1, x.shape[-1])).decode(x.dtype).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How quantisation-aware training rounds the numbers of a format. ROUNDINGS has one for each format; their
    functions have no straight-through gradient, which callers add."""

    # (weight [..., out, in], group_size or None, the dtype's name) -> rounded weight of the same shape in that dtype
    weights: Callable[[jax.Array, int | None, str], jax.Array]
    block: int = 1  # without groups, how many consecutive weights of a row the format has in a block
    # activations [..., in] -> the same rounded, in their dtype; None: activations are not rounded
    activations: Callable[[jax.Array], jax.Array] | None = None
    # the values of `jaxtune export --to`, beside 16-bit ones, whose formats store the rounded weights exactly
    exports: tuple[str, ...] = ()
    outtype: str | None = None  # the quantised type of GGUF files, a value of --outtype, that stores them exactly


ROUNDINGS = {
    "int4": Rounding(int4, exports=("w4a16",)),
    "int8-int4": Rounding(int4, activations=int8_by_token, exports=("w4a8", "w4a16")),
    "int8-int4-asymmetric": Rounding(int4, activations=int8_by_token_asymmetric, exports=("w4a16",)),
    "int8": Rounding(int8, exports=("int8",)),
    "fp8": Rounding(functools.partial(_as_declared, "fp8"), activations=fp8_by_token, exports=("fp8",)),
    "nvfp4": Rounding(functools.partial(_as_declared, "nvfp4"), block=16, exports=("nvfp4",)),
    "mxfp4": Rounding(functools.partial(_as_declared, "mxfp4"), block=32, exports=("mxfp4",)),
    "q4_0": Rounding(q4_0, outtype="q4_0"),
    "q8_0": Rounding(q8_0, outtype="q8_0"),
}
assert ROUNDINGS.keys() == QAT_GROUPS.keys()


@dataclasses.dataclass(frozen=True)
class FakeQuant:
    """The grid (format, groups, dtype) to which QAT rounds the weights of linears, and how it rounds their inputs;
    immutable and hashable. `round` rounds a weight, `round_inputs` activations, `fits` says which weights can be
    rounded, and `represented_by` in which dtypes they can be saved. Raises ValueError for a format or group size that
    is not supported."""

    format: str  # key of ROUNDINGS
    group_size: int | None  # how many consecutive weights of a row share a scale; None: as many as the format says
    dtype: str  # its name, of the rounded values and of scales of groups, whatever dtype computes with them
    inputs: bool = True  # False: activations are not rounded, also where the format rounds them

    def __post_init__(self):
        if self.format not in ROUNDINGS:
            raise ValueError(f"qat format {self.format!r} is not supported; supported: {', '.join(ROUNDINGS)}")
        if problem := qat_group_size(self.format, self.group_size):
            raise ValueError(f"qat group_size {self.group_size}: {problem}")

    @classmethod
    def of_record(cls, where: str, record: Any) -> FakeQuant:
        """Returns the grid that a file records as an object with format, group_size and dtype, as `record` writes it.
        The loaders of model folders and of adapters call it. Its `inputs` is True, because that is not recorded.

        Args:
          where: the file and key, for errors.
          record: that object, as JSON has it; group_size may be missing or null.

        Raises:
          ValueError: no such object, a grid that is not supported, or a dtype that models do not have.
        """
        if not isinstance(record, Mapping) or not all(isinstance(record.get(key), str) for key in ("format", "dtype")):
            raise ValueError(f"{where} = {record!r}: must be an object with format, group_size and dtype")
        if record["dtype"] not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"{where}: dtype = {record['dtype']!r} is none of bfloat16, float16 and float32")
        try:
            return cls(record["format"], record.get("group_size"), record["dtype"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def record(self) -> dict[str, str | int | None]:
        """What files record of the grid, of which `of_record` makes it again: format, group_size and dtype, without
        `inputs`."""
        return {"format": self.format, "group_size": self.group_size, "dtype": self.dtype}

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.format}{groups}, {self.dtype}"

    @property
    def rounds_inputs(self) -> bool:
        """Whether activations are rounded before they are multiplied by rounded weights: if the format rounds them and
        `inputs` is True."""
        return self.inputs and ROUNDINGS[self.format].activations is not None

    @property
    def exports(self) -> tuple[str, ...]:
        """The values of `jaxtune export --to` whose formats store the grid's numbers exactly, beside 16-bit ones, such
        as ("w4a16",); () for int8 in groups, q4_0 and q8_0, of which GGUF files store the last two (`outtype`). Exports
        of such a model to other quantised formats are refused."""
        grouped = self.group_size is not None and self.format == "int8"  # a scale for each group, not each row
        return () if grouped else ROUNDINGS[self.format].exports

    @property
    def outtype(self) -> str | None:
        """The quantised type of GGUF files (a value of `jaxtune export --outtype`) that stores the grid's numbers
        exactly; None if there is none."""
        return ROUNDINGS[self.format].outtype

    def represented_by(self, dtype: str) -> bool:
        """Whether a dtype (its name) represents every value of the grid exactly, so that rounded weights can be stored
        in it. Saving, exporting and training refuse another."""
        return jnp.promote_types(self.dtype, dtype) == dtype

    def fits(self, in_size: int) -> bool:
        """Whether in_size, the input size of a linear, is a multiple of the numbers that share a scale: the group size,
        or else the format's block. QAT does not round a linear for which it is not."""
        return in_size % (self.group_size or ROUNDINGS[self.format].block) == 0

    def round(self, weight: jax.Array) -> jax.Array:
        """Rounds a weight [..., out, in] to the grid; the result has its shape and the grid's dtype. It adds no
        straight-through gradient; `straight_through` does."""
        with jax.named_scope("fake_quantise"):
            return ROUNDINGS[self.format].weights(weight, self.group_size, self.dtype)

    def round_inputs(self, x: jax.Array) -> jax.Array:
        """Rounds activations [..., in] as the format does before a product, in their dtype; the gradient passes
        unchanged. If `rounds_inputs` is False, x itself is returned."""
        return _rounded_inputs(self, x) if self.rounds_inputs else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_inputs(spec: FakeQuant, x: jax.Array) -> jax.Array:
    """The activations x [..., in] rounded as the format of `spec` does, in their dtype. In the backward, the gradient
    of the result is passed unchanged to x."""
    activations = ROUNDINGS[spec.format].activations
    assert activations is not None
    with jax.named_scope("fake_quantise"):
        return activations(x)


_rounded_inputs.defvjp(lambda spec, x: (_rounded_inputs(spec, x), None), lambda spec, _, dx: (dx,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> jax.Array:
    """A weight [..., out, in] rounded to the grid `spec`, in the weight's own dtype. In the backward, the gradient of
    the result is passed unchanged to the weight, and x gets none. Linears whose weights are trained whole round them so
    in quantisation-aware training.

    x: the activations that the rounded weight will multiply. An optimization barrier makes the rounding depend on them,
    so that forward and backward each round. Otherwise XLA would round once for both, and keep the rounded weight in
    memory in between."""
    weight, _ = optimization_barrier((weight, x))
    return spec.round(weight).astype(weight.dtype)


straight_through.defvjp(
    lambda spec, weight, x: (straight_through(spec, weight, x), None), lambda spec, _, dweight: (dweight, None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapter_gradients(out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Returns `out`, a linear's output [..., out], unchanged. In the backward the adapter's matrices a [r, in] and b
    [out, r] get the gradients that the term `scale b a x` would give, so that the adapter trains although `out` was
    computed from the rounded merged weight. x: [..., in], the linear's input, which gets no gradient here. scale: the
    adapter's scale."""
    del x, a, b, scale
    return out


def _adapter_gradients_bwd(scale, residuals, dout):
    """The backward rule of `adapter_gradients`: (dout itself for out, None for x, the gradients of a and b that the sum
    `scale b a x` would give). residuals: (x, a, b)."""
    x, a, b = residuals
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dy, x = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])

    def product(left, right, dtype=x.dtype):
        return jnp.matmul(left, right, precision=precision, preferred_element_type=dtype)

    inner = product(x, a.astype(x.dtype).T)
    dinner = product(dy, b.astype(x.dtype))
    da, db = product(dinner.T, x, a.dtype), product(dy.T, inner, b.dtype)
    return dout, None, scale * da, scale * db


adapter_gradients.defvjp(lambda out, x, a, b, scale: (out, (x, a, b)), _adapter_gradients_bwd)


@jax.custom_vjp
def gradients_of(out: jax.Array, term: jax.Array) -> jax.Array:
    """Returns the array `out` unchanged. In the backward its gradient is also that of `term`, an array of the same
    shape, whose value is not used. So the adapters of experts get the gradients of the term that they would add,
    although `out` was computed from their rounded merged weights."""
    del term
    return out


gradients_of.defvjp(lambda out, term: (out, None), lambda _, dout: (dout, dout))


@jax.custom_vjp
def magnitude_gradients(out: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Returns `out`, the product [..., out] of x and a rounded merged weight with DoRA, unchanged. In the backward the
    magnitude [out] gets its gradient: the merged weight's rows are proportional to it, and so are the rounded rows,
    because scales are proportional to their largest numbers. A magnitude of 0 gets none."""
    del magnitude
    return out


def _magnitude_gradients_bwd(residuals, dout):
    """The backward rule of `magnitude_gradients`: (dout, the sum of dout * out over tokens divided by the magnitude).
    residuals: (out, magnitude)."""
    out, magnitude = residuals
    sums = (dout.astype(jnp.float32) * out.astype(jnp.float32)).reshape(-1, out.shape[-1]).sum(0)
    return dout, jnp.where(magnitude == 0, 0, sums / jnp.where(magnitude == 0, 1, magnitude)).astype(magnitude.dtype)


magnitude_gradients.defvjp(lambda out, magnitude: (out, (out, magnitude)), _magnitude_gradients_bwd)


def adapter_noise(x: jax.Array, dropped: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """What dropout adds to a product with a rounded merged weight: the adapter's term `scale b a x` with dropout minus
    the term without it, whose mean over masks is zero. [..., out] in x's dtype. The gradients of a and b are those of
    the term with dropout; both x and `dropped` get gradients too.

    x: [..., in], the linear's input. dropped: the same after dropout. a: [r, in]. b: [out, r]. scale: the adapter's."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def term(x, a, b):
        inner = jnp.matmul(x, a.astype(x.dtype).T, precision=precision)
        return scale * jnp.matmul(inner, b.astype(x.dtype).T, precision=precision)

    return term(dropped, a, b) - term(x, *jax.lax.stop_gradient((a, b)))
