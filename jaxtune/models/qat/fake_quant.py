"""Fake quantisation for quantisation-aware training (QAT): rounds weights, and in some formats activations, to values
that a low-bit format can represent. The gradient passes unchanged to what was rounded (straight-through, arXiv
1308.3432, 1712.05877), or only to numbers within the grid's range (clipped, arXiv 1805.06085). With an adapter the
merged weight is rounded, as in a deployed model. The functions that round have no straight-through gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models import values
from jaxtune.models.qat import rounded_inputs
from jaxtune.models.qat.gguf_grids import q8_0_codes, signed_codes
from jaxtune.models.qat.rounded_inputs import between, within_stored
from jaxtune.pallas import formats
from jaxtune.pallas.format_names import QAT_GROUPS, qat_group_size
from jaxtune.pallas.formats.float16 import as_float16

# The key of a file's record of a grid that has the observed scales of activations, {name of a linear: scale}.
INPUT_SCALES = "input_global_scales"

# The values of qat.gradients.
STRAIGHT_THROUGH, CLIPPED = "straight_through", "clipped"


def int4(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to symmetric int4, in the weight's shape: each group of a row is a scale in
    `dtype` times integers from -8 to 7.

    The scale max(max(w) / 7, -min(w) / 8) clips nothing; codes round to nearest even. These are the values of W4A16
    formats (GPTQ, compressed-tensors; torchao's SYMMETRIC_NO_CLIPPING_ERR).

      weight: an array, not quantised.
      group_size: must divide `in`; not None.
      dtype: of scales and result.
    """
    assert group_size is not None
    groups = _blocks(weight, group_size)
    scale = int4_scales(groups, dtype).astype(jnp.float32)
    return (int4_codes(groups, scale) * scale).astype(dtype).reshape(weight.shape)


def int4_scales(groups: jax.Array, dtype: str) -> jax.Array:
    """The int4 scales [..., out, n, 1] in `dtype` of groups float32[..., out, n, group]; 0 for a group of zeros."""
    # XLA may or may not turn a division by a constant into a product; a product is the same in every program.
    seventh = np.float32(1 / 7)
    scale = jnp.maximum(groups.max(-1, keepdims=True) * seventh, -groups.min(-1, keepdims=True) / 8)
    return scale.astype(dtype)


def int4_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The int4 codes of `groups`: whole numbers from -8 to 7 as float32[..., out, n, group]; 0 where the scale is 0."""
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -8, 7)


def int8(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to symmetric int8, in the weight's shape: integers from -127 to 127 times a scale.

    weight: an array, not quantised.
    group_size: None: the values of the declared format int8, one scale a row. Otherwise it must divide `in`; a scale is
      the group's largest magnitude / 127, rounded to `dtype`, and codes round to nearest even.
    dtype: of scales and result.
    """
    if group_size is None:
        return _as_declared("int8", weight, None, dtype)
    groups = _blocks(weight, group_size)
    scale = int8_scales(groups, dtype).astype(jnp.float32)
    return (int8_codes(groups, scale) * scale).astype(dtype).reshape(weight.shape)


def int8_scales(groups: jax.Array, dtype: str) -> jax.Array:
    """The scales [..., out, n, 1] in `dtype` of groups float32[..., out, n, group]: largest magnitude / 127."""
    return (jnp.abs(groups).max(-1, keepdims=True) * np.float32(1 / 127)).astype(dtype)


def int8_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The int8 codes of `groups`: whole numbers from -127 to 127 as float32[..., out, n, group]; 0 where the scale is
    0.
    """
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -127, 127)


def _blocks(weight: jax.Array, group_size: int | None) -> jax.Array:
    """[..., out, in] -> float32[..., out, groups, group_size]."""
    assert group_size is not None
    return weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group_size)


def q4_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] to GGUF's Q4_0: a float16 scale times whole numbers from -8 to 7.

    In float32 it equals the gguf package's quantize and dequantize. In 16 bits scales have five significant bits, so
    that every product is exact in `dtype` and a file has the same numbers.

      group_size: 32, the block; must divide `in`.
      dtype: "float32" or a 16-bit dtype, of the result.
    """
    scales, codes = signed_codes(_blocks(weight, group_size), 8, dtype)
    return (as_float16(scales) * (codes - 8)).astype(dtype).reshape(weight.shape)


def q8_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight to GGUF's Q8_0, in the weight's shape: a float16 scale times whole numbers from -127 to 127; in
    16 bits scales are powers of two, so that every product is exact in `dtype`.

      weight: [..., out, in].
      group_size: 32, the block; must divide `in`.
      dtype: "float32" or a 16-bit dtype, of the result.
    """
    scales, codes = q8_0_codes(_blocks(weight, group_size), dtype)
    return (as_float16(scales) * codes).astype(dtype).reshape(weight.shape)


def _as_declared(format: str, weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Rounds a weight [..., out, in] as a checkpoint in the format does; the format fixes its own blocks."""
    del group_size
    return formats.FORMATS[format].encode(weight.astype(jnp.float32)).decode(dtype)


# ---- the ranges, beyond which numbers are clipped: each a bool array, True within


def _within_int4(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Only a scale that was rounded down to 16 bits leaves numbers outside."""
    groups = _blocks(weight, group_size)
    scale = int4_scales(groups, dtype).astype(jnp.float32)
    return between(groups, -8 * scale, 7 * scale).reshape(weight.shape)


def _within_int8(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """Only a scale that was rounded down to 16 bits leaves numbers outside."""
    if group_size is None:
        return _within_declared("int8", weight, None, dtype)
    groups = _blocks(weight, group_size)
    largest = 127 * int8_scales(groups, dtype).astype(jnp.float32)
    return between(groups, -largest, largest).reshape(weight.shape)


def _within_q4_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """The range ends at 7 scales opposite the block's largest number; beside it only a scale rounded down leaves any
    outside.
    """
    blocks = _blocks(weight, group_size)
    scales = as_float16(signed_codes(blocks, 8, dtype)[0])
    ends = -8 * scales, 7 * scales
    return between(blocks, jnp.minimum(*ends), jnp.maximum(*ends)).reshape(weight.shape)


def _within_q8_0(weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    """All numbers are within, except where float16 rounds scales down."""
    blocks = _blocks(weight, group_size)
    largest = 127 * as_float16(q8_0_codes(blocks, dtype)[0])
    return between(blocks, -largest, largest).reshape(weight.shape)


def _within_declared(format: str, weight: jax.Array, group_size: int | None, dtype: str) -> jax.Array:
    del group_size, dtype
    return within_stored(formats.FORMATS[format].encode(weight.astype(jnp.float32)), weight)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How QAT rounds the numbers of a format. The functions have no straight-through gradient."""

    # (weight [..., out, in], group_size or None, the dtype's name) -> rounded weight of the same shape in that dtype
    weights: Callable[[jax.Array, int | None, str], jax.Array]
    # (the same) -> bool in the weight's shape: False where it is outside the grid's range, so that it is clipped
    in_range: Callable[[jax.Array, int | None, str], jax.Array]
    block: int = 1  # without groups, how many consecutive weights of a row the format has in a block
    # activations [..., in], and the linear's observed scale float32[] if `observed` is not None -> the same rounded, in
    # their dtype; None: activations are not rounded
    activations: Callable[..., jax.Array] | None = None
    # (the same) -> bool in their shape, as `within` for weights; None: activations are not rounded
    inputs_within: Callable[..., jax.Array] | None = None
    # (the largest magnitude of a linear's inputs, float32[]) -> the scale float32[] under which its activations are
    # rounded, observed once; None: scales follow from the activations themselves
    observed: Callable[[jax.Array], jax.Array] | None = None
    # the values of `jaxtune export --to`, beside 16-bit ones, whose formats store the rounded weights exactly
    exports: tuple[str, ...] = ()
    outtype: str | None = None  # the quantised type of GGUF files, a value of --outtype, that stores them exactly


def _declared(format: str) -> Rounding:
    """The Rounding of a declared format, which rounds weights alone and is exported under its own name."""
    weights, within = (functools.partial(function, format) for function in (_as_declared, _within_declared))
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
        observed=formats.NVFP4.global_scale,
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
    """The grid to which QAT rounds the weights of linears and experts, and how it rounds their inputs; immutable and
    hashable. Raises ValueError for a format or group size that is not supported.
    """

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
        if self.format not in ROUNDINGS:
            raise ValueError(f"qat format {self.format!r} is not supported; supported: {', '.join(ROUNDINGS)}")
        if problem := qat_group_size(self.format, self.group_size):
            raise ValueError(f"qat group_size {self.group_size}: {problem}")

    @classmethod
    def of_record(cls, where: str, record: Any) -> FakeQuant:
        """The grid of a record in a file (`record`); `inputs` and `gradients` are not recorded.

          where: the file and key, for errors.

        Raises ValueError for an object of another form, an unsupported grid or dtype, or a scale that is not positive.
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
        """What files record of the grid: {"format", "group_size" (may be None), "dtype"}, and "input_global_scales":
        {name of a linear: observed scale of its activations} if there are any.
        """
        scales = {INPUT_SCALES: dict(self.input_scales)} if self.input_scales else {}
        return {"format": self.format, "group_size": self.group_size, "dtype": self.dtype, **scales}

    def __str__(self) -> str:
        """For messages, such as "int4 in groups of 32, bfloat16"."""
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.format}{groups}, {self.dtype}"

    @property
    def clips(self) -> bool:
        """Whether numbers outside the grid's range get no gradient."""
        return self.gradients == CLIPPED

    @property
    def grid(self) -> FakeQuant:
        """The grid with `inputs`, `gradients` and `input_scales` at their defaults: equal grids round weights alike."""
        return FakeQuant(self.format, self.group_size, self.dtype)

    @property
    def rounds_inputs(self) -> bool:
        """Whether activations are rounded too."""
        return self.inputs and ROUNDINGS[self.format].activations is not None

    @property
    def exports(self) -> tuple[str, ...]:
        """The values of `jaxtune export --to`, beside 16-bit ones, whose formats store the grid's numbers exactly; ()
        for int8 in groups, q4_0 and q8_0.
        """
        grouped = self.group_size is not None and self.format == "int8"  # a scale for each group, not each row
        return () if grouped else ROUNDINGS[self.format].exports

    @property
    def outtype(self) -> str | None:
        """The value of `jaxtune export --outtype` (GGUF) that stores the grid's numbers exactly, or None."""
        return ROUNDINGS[self.format].outtype

    def represented_by(self, dtype: str) -> bool:
        """Whether `dtype` represents every number of the grid's dtype exactly."""
        return jnp.promote_types(self.dtype, dtype) == dtype

    def fits(self, in_size: int) -> bool:
        """Whether the input size of a linear is a multiple of the numbers that share a scale; QAT leaves other linears
        alone.
        """
        return in_size % (self.group_size or ROUNDINGS[self.format].block) == 0

    def round(self, weight: jax.Array) -> jax.Array:
        """Rounds a weight [..., out, in] whose `in` the grid `fits`: the same shape in the grid's dtype, without a
        straight-through gradient.
        """
        with jax.named_scope("fake_quantise"):
            return ROUNDINGS[self.format].weights(weight, self.group_size, self.dtype)

    def in_range(self, weight: jax.Array) -> jax.Array:
        """bool in the weight's shape: which numbers are in the grid's range."""
        with jax.named_scope("fake_quantise"):
            return ROUNDINGS[self.format].in_range(weight, self.group_size, self.dtype)

    @property
    def observes(self) -> bool:
        """Whether the format rounds activations under a scale that is observed once for each linear, whatever `inputs`
        says.
        """
        return ROUNDINGS[self.format].observed is not None

    def round_inputs(self, x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        """Rounds activations [..., in] in their dtype if `rounds_inputs`, else returns x. The gradient passes
        unchanged, or if gradients are clipped, within the range.

          scale: float32[], the linear's observed scale, which gets no gradient; None unless the format `observes`.
        """
        return _rounded_inputs(self, x, scale) if self.rounds_inputs else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_inputs(spec: FakeQuant, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    activations = ROUNDINGS[spec.format].activations
    assert activations is not None and (scale is not None) == spec.observes
    with jax.named_scope("fake_quantise"):
        return activations(x) if scale is None else activations(x, scale)


def _rounded_inputs_fwd(spec: FakeQuant, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    inputs_within = ROUNDINGS[spec.format].inputs_within if spec.clips else None
    if inputs_within is None:
        return _rounded_inputs(spec, x, scale), None
    return _rounded_inputs(spec, x, scale), inputs_within(x) if scale is None else inputs_within(x, scale)


_rounded_inputs.defvjp(
    _rounded_inputs_fwd, lambda spec, within, dx: (dx if within is None else jnp.where(within, dx, 0), None)
)
