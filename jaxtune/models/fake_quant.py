"""Fake quantisation for quantisation-aware training (QAT): rounds weights, and in some formats activations, to values
that a low-bit format can represent.

The forward uses the rounded numbers; in the backward the gradient passes unchanged to what was rounded
(straight-through, arXiv 1308.3432, 1712.05877), or only to the numbers within the grid's range (clipped: the
gradient of rounding and clipping, arXiv 1805.06085). With an adapter the merged weight is rounded, as it is in a
deployed model; qat_gradients.py has the gradients of products with it. `ROUNDINGS` declares the formats, each a
Rounding: how it rounds weights (`int4`, `int8`, `q4_0`, `q8_0`, or `_as_declared` for stored formats) and activations,
and its range (functions in `_within_`). `int4_scales` and `int4_codes` are for exports too. `FakeQuant` is the grid of
one run or model; linears and experts round by it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models import rounded_inputs, values
from jaxtune.models.gguf_grids import q8_0_codes, signed_codes
from jaxtune.models.rounded_inputs import between, within_stored
from jaxtune.pallas import formats
from jaxtune.pallas.format_names import QAT_GROUPS, qat_group_size
from jaxtune.pallas.formats.float16 import as_float16

# The key of a file's record of a grid that has the observed scales of activations, {name of a linear: scale}.
INPUT_SCALES = "input_global_scales"

# The values of qat.gradients.
STRAIGHT_THROUGH, CLIPPED = "straight_through", "clipped"


def int4(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to symmetric int4: each group of a row is a scale times integers from -8 to 7.

    The scale is max(max(w) / 7, -min(w) / 8), the smallest one that clips nothing, rounded to `dtype`; codes are
    rounded to nearest even. The result has the weight's shape. These are the values of W4A16 formats (GPTQ and
    compressed-tensors, symmetric; torchao's SYMMETRIC_NO_CLIPPING_ERR): a kernel that multiplies code and scale in
    `dtype` computes with exactly them.

    Quantisation-aware training rounds weights by it. It has no straight-through gradient; callers add it, such as
    `straight_through`.

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
    """The scales with which a weight is rounded to int4 codes from -8 to 7, [..., out, n, 1] in `dtype`: of each group
    of a row the larger of max / 7 and -min / 8; 0 for a group of zeros, which int4_codes gives codes of 0. The export
    of int4 weights recovers the scales by it from the rounded weights (export/w4a16.py). groups: float32[..., out, n,
    group], the weight, each row of which is divided into n groups. dtype: the name of the scales' dtype."""
    # XLA may or may not turn a division by a constant into a product; a product is the same in every program.
    seventh = np.float32(1 / 7)
    scale = jnp.maximum(groups.max(-1, keepdims=True) * seventh, -groups.min(-1, keepdims=True) / 8)
    return scale.astype(dtype)


def int4_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The codes of a weight that is rounded to int4: whole numbers from -8 to 7, as float32[..., out, n, group], of
    which code * scale, cast to the grid's dtype, is the rounded weight; the export of int4 weights stores them. groups:
    the weight in n groups a row, of the same shape. scale: float32[..., out, n, 1], the scales of the groups, from
    int4_scales; a scale of 0 gives codes of 0."""
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -8, 7)


def int8(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to symmetric int8, integers from -127 to 127 times a scale; the result has its
    shape.

    Without groups, these are the values of the declared format int8, which has a scale for each row. With groups, the
    scale is the group's largest magnitude / 127, rounded to `dtype`, and codes are rounded to nearest even.
    Quantisation-aware training rounds weights by it. It has no straight-through gradient; callers add it, such as
    `straight_through`.

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
    """The scales with which `int8` rounds a weight in groups, [..., out, n, 1] in `dtype`, one for each group: its
    largest magnitude / 127, so 0 for a group of zeros. No export calls it, because no quantised format that is exported
    has int8 in groups. groups: float32[..., out, n, group], the weight in n groups a row. dtype: the name of the
    scales' dtype."""
    return (jnp.abs(groups).max(-1, keepdims=True) * np.float32(1 / 127)).astype(dtype)


def int8_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The codes of a weight that `int8` rounds in groups: whole numbers from -127 to 127, as float32[..., out, n,
    group], of which code * scale, cast to the grid's dtype, is the rounded weight. groups: the weight, of the same
    shape. scale: float32[..., out, n, 1], from int8_scales; where it is 0, the group has only zeros, or numbers too
    small for a scale in that dtype, and the codes are 0."""
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
    Quantisation-aware training rounds by it. It has no straight-through gradient; callers add it, such as
    `straight_through`.

    Args:
      weight: [..., out, in], of any floating-point dtype.
      group_size: 32, the size of a block; it must divide `in`, and is not None.
      dtype: the name of the result's dtype, in which the products of scale and code must be exact.
    """
    scales, codes = signed_codes(_blocks(weight, group_size), 8, dtype)
    return (as_float16(scales) * (codes - 8)).astype(dtype).reshape(weight.shape)


def q8_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to what blocks of GGUF's type Q8_0 contain: a scale, which is a float16 number,
    times whole numbers from -127 to 127. In float32 it equals the gguf package's quantize and dequantize; in 16 bits
    scales are powers of two, with which every product is exact in `dtype`, so that a file contains the same numbers.
    Quantisation-aware training rounds by it. It has no straight-through gradient; callers add it, such as
    `straight_through`.

    Args:
      weight: [..., out, in], of any floating-point dtype.
      group_size: 32, the size of a block; it must divide `in`, and is not None.
      dtype: the name of the result's dtype, in which the products of scale and code must be exact.
    """
    scales, codes = q8_0_codes(_blocks(weight, group_size), dtype)
    return (as_float16(scales) * codes).astype(dtype).reshape(weight.shape)


def _as_declared(format: str, weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to the values of a declared format of quantised weights (a key of
    formats.FORMATS): encodes it from float32 and decodes it to `dtype`, in the weight's shape. So training rounds as a
    checkpoint in the format does. It has no straight-through gradient; callers add it, such as `straight_through`.
    group_size: None, because these formats have blocks of their own. dtype: the name of the result's dtype."""
    del group_size
    return formats.FORMATS[format].encode(weight.astype(jnp.float32)).decode(dtype)


# ---- the ranges, beyond which numbers are clipped


def _within_int4(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """The function `within` of the Rounding of int4, for clipped gradients, which pass only to numbers in the range.
    Returns a bool array of the shape of `weight` [..., out, in]: whether each number is between -8 and 7 times its
    scale. Only a scale that was rounded down to 16 bits leaves numbers outside. group_size: how many consecutive
    weights of a row share a scale, not None. dtype: the name of the scales' dtype."""
    groups = _blocks(weight, group_size)
    scale = int4_scales(groups, dtype).astype(jnp.float32)
    return between(groups, -8 * scale, 7 * scale).reshape(weight.shape)


def _within_int8(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """The function `within` of the Rounding of int8, for clipped gradients, which pass only to numbers in the range.
    Returns a bool array of the shape of `weight` [..., out, in]: whether each number is between -127 and 127 times its
    scale. Only a scale that was rounded down to 16 bits leaves numbers outside. group_size: how many consecutive
    weights of a row share a scale; None: all of the row. dtype: the name of the dtype of groups' scales; it is not used
    if group_size is None."""
    if group_size is None:
        return _within_declared("int8", weight, None, dtype)
    groups = _blocks(weight, group_size)
    largest = 127 * int8_scales(groups, dtype).astype(jnp.float32)
    return between(groups, -largest, largest).reshape(weight.shape)


def _within_q4_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """The function `within` of the Rounding of q4_0, for clipped gradients, which pass only to numbers in the range.
    Returns a bool array of the shape of `weight` [..., out, in]: whether each number is between -8 and 7 times its
    scale, which may be negative. The range ends at 7 scales on the side opposite the block's largest number; on that
    number's own side only a scale that was rounded down leaves numbers outside. group_size: 32, the size of a block,
    not None. dtype: the name of the dtype that represents scale times code exactly."""
    blocks = _blocks(weight, group_size)
    scales = as_float16(signed_codes(blocks, 8, dtype)[0])
    ends = -8 * scales, 7 * scales
    return between(blocks, jnp.minimum(*ends), jnp.maximum(*ends)).reshape(weight.shape)


def _within_q8_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """The function `within` of the Rounding of q8_0, for clipped gradients, which pass only to numbers in the range.
    Returns a bool array of the shape of `weight` [..., out, in]: whether each number is between -127 and 127 times its
    scale. All are, except where float16 rounds scales down. group_size: 32, the size of a block, not None. dtype: the
    name of the dtype that represents scale times code exactly."""
    blocks = _blocks(weight, group_size)
    largest = 127 * as_float16(q8_0_codes(blocks, dtype)[0])
    return between(blocks, -largest, largest).reshape(weight.shape)


def _within_declared(format: str, weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """The function `within` of the Rounding of a declared format (a key of formats.FORMATS), for clipped gradients,
    which pass only to numbers in the range. Returns a bool array of the shape of `weight` [..., out, in]: whether each
    number's magnitude is at most the largest that the format has with the scale of the number's block. group_size
    (None) and dtype are not used, because the format fixes its blocks and scales; Rounding.within takes them for every
    format."""
    del group_size, dtype
    return within_stored(formats.FORMATS[format].encode(weight.astype(jnp.float32)), weight)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How quantisation-aware training rounds the numbers of a format. ROUNDINGS has one for each format, and
    its keys must be those of format_names.QAT_GROUPS. The functions have no straight-through gradient; callers add
    it."""

    # (weight [..., out, in], group_size or None, the dtype's name) -> rounded weight of the same shape in that dtype
    weights: Callable[[jax.Array, int | None, str], jax.Array]
    # (the same) -> bool in the weight's shape: False where it is outside the grid's range, so that it is clipped
    within: Callable[[jax.Array, int | None, str], jax.Array]
    block: int = 1  # without groups, how many consecutive weights of a row the format has in a block
    # activations [..., in], and the linear's observed scale float32[] if `observed` is not None -> the same rounded, in
    # their dtype; None: activations are not rounded
    activations: Callable[..., jax.Array] | None = None
    # (the same) -> bool in their shape, as `within` for weights; None: activations are not rounded
    inputs_within: Callable[..., jax.Array] | None = None
    # (the largest magnitude of a linear's inputs, float32[], and the name of their dtype) -> the scale float32[] under
    # which its activations are rounded, observed once; None: scales follow from the activations themselves
    observed: Callable[[jax.Array, str], jax.Array] | None = None
    # the values of `jaxtune export --to`, beside 16-bit ones, whose formats store the rounded weights exactly
    exports: tuple[str, ...] = ()
    outtype: str | None = None  # the quantised type of GGUF files, a value of --outtype, that stores them exactly


def _declared(format: str) -> Rounding:
    """Makes the Rounding of a declared format (a key of formats.FORMATS) for ROUNDINGS: its weights alone are rounded,
    and it is exported under its own name."""
    weights, within = (functools.partial(each, format) for each in (_as_declared, _within_declared))
    return Rounding(weights, within, block=formats.FORMATS[format].kinds[0].row_block, exports=(format,))


_INT4 = Rounding(int4, _within_int4, exports=("w4a16",))
_NVFP4, _MXFP4 = _declared("nvfp4"), _declared("mxfp4")
ROUNDINGS = {
    "int4": _INT4,
    "int8-int4": dataclasses.replace(
        _INT4,
        activations=rounded_inputs.int8_by_token,
        inputs_within=rounded_inputs.within_int8_by_token,
        exports=("w4a8", "w4a16"),
    ),
    "int8-int4-asymmetric": dataclasses.replace(
        _INT4,
        activations=rounded_inputs.int8_by_token_asymmetric,
        inputs_within=rounded_inputs.within_int8_by_token_asymmetric,
    ),
    "int8": Rounding(int8, _within_int8, exports=("int8",)),
    "fp8": dataclasses.replace(
        _declared("fp8"), activations=rounded_inputs.fp8_by_token, inputs_within=rounded_inputs.within_fp8_by_token
    ),
    "nvfp4": _NVFP4,
    "nvfp4-nvfp4": dataclasses.replace(
        _NVFP4,
        activations=rounded_inputs.nvfp4_activations,
        inputs_within=rounded_inputs.within_nvfp4_activations,
        observed=rounded_inputs.nvfp4_scale,
        exports=("nvfp4-nvfp4", "nvfp4"),
    ),
    "mxfp4": _MXFP4,
    "mxfp4-mxfp4": dataclasses.replace(
        _MXFP4,
        activations=rounded_inputs.mxfp4_activations,
        inputs_within=rounded_inputs.within_mxfp4_activations,
        exports=("mxfp4-mxfp4", "mxfp4"),
    ),
    "q4_0": Rounding(q4_0, _within_q4_0, outtype="q4_0"),
    "q8_0": Rounding(q8_0, _within_q8_0, outtype="q8_0"),
}
assert ROUNDINGS.keys() == QAT_GROUPS.keys()


@dataclasses.dataclass(frozen=True)
class FakeQuant:
    """The grid (format, groups, dtype) to which QAT rounds the weights of linears and experts, and how it rounds their
    inputs; immutable and hashable. `round` rounds a weight, `round_inputs` activations, `fits` says which weights can
    be rounded, and `represented_by` in which dtypes they can be saved. Raises ValueError for a format or group size
    that is not supported."""

    format: str  # key of ROUNDINGS
    group_size: int | None  # how many consecutive weights of a row share a scale; None: as many as the format says
    dtype: str  # its name, of the rounded values and of scales of groups, whatever dtype computes with them
    # False: activations are not rounded, also where the format rounds them. Only the check of a merge sets it so.
    inputs: bool = True
    # where the gradient of what is rounded passes: "straight_through" (everywhere) or "clipped" (within the range)
    gradients: str = STRAIGHT_THROUGH
    # pairs (name of a linear, scale), the scales under which activations were rounded in the training of a model whose
    # weights are on the grid, or of an adapter; of formats that observe them, and only in the grid that files record
    input_scales: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        """Raises ValueError for a format that is not in ROUNDINGS, or a group size that the format does not have."""
        if self.format not in ROUNDINGS:
            raise ValueError(f"qat format {self.format!r} is not supported; supported: {', '.join(ROUNDINGS)}")
        if problem := qat_group_size(self.format, self.group_size):
            raise ValueError(f"qat group_size {self.group_size}: {problem}")

    @classmethod
    def of_record(cls, where: str, record: Any) -> FakeQuant:
        """Returns the grid that a file records as an object with format, group_size and dtype, as `record` writes it.
        The loaders of model folders and of adapters call it. The grid's `inputs` is True and its gradients are
        straight-through, because these are not recorded.

        Args:
          where: the file and key, for errors.
          record: that object, as JSON has it; group_size may be missing or null.

        Raises:
          ValueError: no such object, a grid that is not supported, a dtype that models do not have, or a scale of
            activations that is not a positive number.
        """
        if not isinstance(record, Mapping) or not all(isinstance(record.get(key), str) for key in ("format", "dtype")):
            raise ValueError(f"{where} = {record!r}: must be an object with format, group_size and dtype")
        if record["dtype"] not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"{where}: dtype = {record['dtype']!r} is none of bfloat16, float16 and float32")
        scales = record.get(INPUT_SCALES, {})
        values.mapping(f"{where}: {INPUT_SCALES}", scales)
        for name, scale in scales.items():
            values.positive(f"{where}: {INPUT_SCALES}: {name}", scale)
        pairs = tuple(sorted((name, float(scale)) for name, scale in scales.items()))
        try:
            return cls(record["format"], record.get("group_size"), record["dtype"], input_scales=pairs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def record(self) -> dict[str, str | int | dict[str, float] | None]:
        """What files record of the grid, of which `of_record` makes it again: {"format": ..., "group_size": ... (which
        may be None), "dtype": ...}, and "input_global_scales": {name of a linear: observed scale
        of its activations} if there are any. `inputs` and `gradients` are no part of it."""
        scales = {INPUT_SCALES: dict(self.input_scales)} if self.input_scales else {}
        return {"format": self.format, "group_size": self.group_size, "dtype": self.dtype, **scales}

    def __str__(self) -> str:
        """The grid in words for messages, such as "int4 in groups of 32, bfloat16"."""
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.format}{groups}, {self.dtype}"

    @property
    def clips(self) -> bool:
        """Whether numbers outside the grid's range get no gradient (`gradients` is "clipped"), as opposed to the
        straight-through gradient of all numbers. Linears and experts choose by it how they differentiate, and a run's
        report says it."""
        return self.gradients == CLIPPED

    @property
    def grid(self) -> FakeQuant:
        """The grid alone, with `inputs`, `gradients` and `input_scales` at their defaults: two runs of QAT with equal
        grids round weights alike. A run's report compares by it the grid of the adapter that it is given with
        its own, and observed_inputs.recorded makes a record's grid from it, to which it adds the observed scales."""
        return FakeQuant(self.format, self.group_size, self.dtype)

    @property
    def rounds_inputs(self) -> bool:
        """Whether activations are rounded before they are multiplied by rounded weights: if the format rounds them and
        `inputs` is True. `round_inputs` goes by it, and a run's report says it."""
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
        exactly, such as "q4_0"; None if there is none. Exports to GGUF in another quantised type are refused."""
        return ROUNDINGS[self.format].outtype

    def represented_by(self, dtype: str) -> bool:
        """Whether a dtype (its name) represents every number of the grid's dtype exactly, so that rounded weights can
        be stored in it. Saving, exporting and training refuse another."""
        return jnp.promote_types(self.dtype, dtype) == dtype

    def fits(self, in_size: int) -> bool:
        """Whether in_size, the input size of a linear, is a multiple of the numbers that share a scale: the group size,
        or else the format's block, 1 where a whole row shares a scale. QAT does not round a linear for which it is
        not."""
        return in_size % (self.group_size or ROUNDINGS[self.format].block) == 0

    def round(self, weight: jax.Array) -> jax.Array:
        """Rounds a weight [..., out, in], whose `in` the grid `fits`, to the grid; the result has its shape and the
        grid's dtype. Forward passes of QAT call it, and so do the functions that round weights for good at its end
        (round_to_grid, the merge of an adapter). It adds no straight-through gradient; `straight_through` does."""
        with jax.named_scope("fake_quantise"):
            return ROUNDINGS[self.format].weights(weight, self.group_size, self.dtype)

    def within(self, weight: jax.Array) -> jax.Array:
        """Returns a bool array of the shape of `weight` [..., out, in]: whether each number is in the grid's range,
        between the least and the largest number with its scale. If gradients are clipped, others get none: backward
        rules (qat_gradients.py) ask it."""
        with jax.named_scope("fake_quantise"):
            return ROUNDINGS[self.format].within(weight, self.group_size, self.dtype)

    @property
    def observes(self) -> bool:
        """Whether the format rounds activations under a scale that is observed once for each linear
        (models/observed_inputs.py), whatever `inputs` says. A new run observes the scales before its first step, by a
        forward pass over that step's rows, unless the model has them already; records have them."""
        return ROUNDINGS[self.format].observed is not None

    def round_inputs(self, x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        """Rounds activations [..., in] as the format does before a product, in their dtype, for linears and experts in
        QAT; the gradient passes unchanged, or if gradients are clipped, where they are in the format's range. If
        `rounds_inputs` is False, x itself is returned. scale: float32[], the linear's observed scale
        (Linear.input_scale), of formats that observe it (`observes`), and None of others; no gradient passes to it."""
        return _rounded_inputs(self, x, scale) if self.rounds_inputs else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_inputs(spec: FakeQuant, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Rounds the activations x [..., in] as the format of `spec`, one that rounds activations, does, and returns them
    in their dtype. The backward passes the gradient to x unchanged. If `spec` clips gradients, it is zero where x is
    outside the range. scale: the observed one, float32[], or None, as the format needs it; it gets no gradient.
    FakeQuant.round_inputs calls it."""
    activations = ROUNDINGS[spec.format].activations
    assert activations is not None and (scale is not None) == spec.observes
    with jax.named_scope("fake_quantise"):
        return activations(x) if scale is None else activations(x, scale)


def _rounded_inputs_fwd(spec: FakeQuant, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The forward rule of `_rounded_inputs`, whose arguments are the grid `spec`, the activations x and their observed
    scale: (its result, where x is in the range, bool in its shape; None if gradients are not clipped)."""
    within = ROUNDINGS[spec.format].inputs_within if spec.clips else None
    if within is None:
        return _rounded_inputs(spec, x, scale), None
    return _rounded_inputs(spec, x, scale), within(x) if scale is None else within(x, scale)


_rounded_inputs.defvjp(
    _rounded_inputs_fwd, lambda spec, within, dx: (dx if within is None else jnp.where(within, dx, 0), None)
)
