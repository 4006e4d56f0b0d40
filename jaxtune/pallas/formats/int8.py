"""int8 with a scale per row: the weights of LLM.int8() (arXiv 2208.07339), as bitsandbytes stores them.

A weight is its code times the largest magnitude of its row, divided by 127. In its forward pass LLM.int8() also
quantises activations, and multiplies columns with outliers in 16 bits. That is not done here: weights are decoded for
each product, forward and backward, as bitsandbytes does for gradients.

Int8 is the class of weights, with `Int8.encode`. LLMInt8 describes how checkpoints store them, and FORMAT declares the
format to jaxtune.pallas.formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.formats.division import divide
from jaxtune.pallas.formats.float16 import as_float16
from jaxtune.pallas.formats.layout import (
    SERVED_IN_16_BITS,
    Arrays,
    Config,
    Export,
    FileTensor,
    Format,
    Found,
    Headers,
    Layout,
    Read,
    Settings,
    file_tensor,
)
from jaxtune.pallas.formats.stored import Stored

_LARGEST = 127  # the code of a row's largest magnitude
_BY_ROWS = np.zeros((), np.uint8)  # bitsandbytes' weight_format for codes in row-major order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Stored):
    """A weight tensor [..., out, in] in int8 with a scale for each row: a number is code * absmax / 127, absmax being
    the largest magnitude of its row. It implements the interface of quantised weights, Stored."""

    codes: jax.Array  # int8[..., out, in]
    absmax: jax.Array  # float32[..., out], the largest magnitude of each row, which bitsandbytes calls SCB
    dtype_name: str = dataclasses.field(metadata=dict(static=True))  # the dtype that `decode` gives by default

    scale_axes = (-1,)

    @staticmethod
    def encode(array: jax.Array) -> Int8:
        """Quantises an array [..., out, in] of floats to an Int8, whose `decode` returns the array's dtype by default.
        Numbers are rounded to float16 first, and then to the nearest code, with the largest magnitude of each row at
        127; a row of zeros has absmax 0. The bytes equal those of bitsandbytes on a CPU. Loading with model.load_in
        "int8", exports, and quantisation-aware training in int8 by rows call it.

        Rows with numbers beyond float16's range, for which bitsandbytes stores infinity, are quantised from float32.
        """
        codes, absmax = _encode(jnp.asarray(array))
        return Int8(codes, absmax, str(array.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor, [..., out, in], which is also that of its codes."""
        return tuple(self.codes.shape)

    def problem(self) -> str | None:
        """Returns the reason why the arrays cannot belong to one tensor (absmax has not one number for each row of the
        codes), or None. Dtypes are not checked. `decode` and the operations refuse such a weight with this reason."""
        if self.absmax.shape == self.shape[:-1]:
            return None
        return f"absmax is {list(self.absmax.shape)}; codes of {list(self.shape)} need {list(self.shape[:-1])}"

    def cut(self, axis: int) -> int:
        """The number of consecutive indices along `axis` that must stay in one part when the tensor is divided over
        devices or written in pieces: 1 along every axis, because a part of a row can be decoded by the scale of the
        whole row. Stored.piece calls it; `divided` of this class does not."""
        return 1

    def rescaled(self, factor: np.ndarray) -> Int8:
        """The same codes with the largest magnitudes, absmax, multiplied by `factor`, float64[..., out, 1]. An export
        calls it so that weights which training rounded to this format decode to exactly the same 16-bit numbers,
        although `encode` computes slightly different scales from them (Stored.rescaled)."""
        return dataclasses.replace(self, absmax=jnp.asarray(np.float32(np.float64(self.absmax) * factor[..., 0])))

    def largest(self) -> jax.Array:
        """The largest magnitude that each number of the tensor could have with its scale, float32 in the tensor's
        shape. Quantisation-aware training with clipped gradients compares weights with it (Stored.largest)."""
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, _LARGEST)).decode("float32")

    def divided(self, axis: int, parts: int) -> tuple[int | None, ...] | None:
        """The axes along which (codes, absmax) are divided if the tensor is divided into `parts` equal parts along
        `axis`, for the sharding of a model's weights.

        Along `out` or a leading axis both are divided. Along `in`, which cuts every row, only the codes are, and each
        part keeps all of absmax: (axis, None). Returns None instead of the tuple if the size of the axis is not a
        multiple of `parts`.
        """
        if self.shape[axis] % parts:
            return None
        axis = axis % self.ndim
        return (axis, None if axis == self.ndim - 1 else axis)

    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor [..., out, in] in `dtype`, or in that of dtype_name if it is None: (code * absmax) * (1 /
        127) in float32, the order of bitsandbytes, so that the result is the same, then cast."""
        numbers = self.codes * self.absmax[..., None] * np.float32(1 / _LARGEST)  # in bitsandbytes' order
        return numbers.astype(dtype or self.dtype)


@jax.jit
def _encode(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises an array [..., out, in] and returns (codes int8[..., out, in], absmax float32[..., out], the largest
    magnitude of each row). The numbers of a row are rounded to float16 first, if none of that row is beyond float16's
    range. It is the jitted computation of Int8.encode."""
    exact = array.astype(jnp.float32)
    half = as_float16(exact)  # bitsandbytes quantises weights that were rounded so
    numbers = jnp.where(jnp.isfinite(half).all(-1, keepdims=True), half, exact)
    absmax = jnp.abs(numbers).max(-1, keepdims=True)
    factor = jnp.where(absmax > 0, divide(jnp.ones_like(absmax), absmax) * _LARGEST, 0)  # rounded twice, as torch does
    return jnp.round(numbers * factor).astype(jnp.int8), absmax[..., 0]


class LLMInt8(Layout):
    """The layout of bitsandbytes' checkpoints with `load_in_8bit`, by which jaxtune/models/files reads and writes them.

    The tensors are `X.weight` int8[out, in], `X.SCB` float32[out], the largest magnitudes of the rows, and
    `X.weight_format` uint8[], the order of the codes: 0 for row-major order, which is assumed if it is missing.
    `recognises` decides by a config.json, and `claims` by the tensors of one module. The attributes and methods are
    explained in Layout.
    """

    title = "bitsandbytes' in eight bits (LLM.int8)"
    codes = ".weight"
    codes_dtype = "I8"
    others = (".SCB", ".weight_format")
    expert_note = (
        "experts in int8 are written as the linears of transformers 4, which jaxtune loads again and transformers 5 "
        "does not: it has no experts in int8 (dequantize writes 16 bits)"
    )

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "bitsandbytes", and load_in_8bit, or where it is missing _load_in_8bit, is true. The
        planner learns a checkpoint's format by it; the loader finds weights by `claims` (Layout.recognises)."""
        eight_bit = settings.get("load_in_8bit", settings.get("_load_in_8bit"))
        return settings.get("quant_method") == "bitsandbytes" and bool(eight_bit)

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, are a weight of this layout: `.weight` has the dtype I8, and
        `.SCB` or `.weight_format` is beside it. A plain weight has neither of the two. The loader calls it to find the
        quantised weights among a checkpoint's tensors."""
        return super().claims(tensors) and any(key in tensors for key in self.others)

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the weight that a module's tensors store, from their headers and the one byte of `.weight_format`.
        Returns a Found with its name, headers and shape [out, in]. The loader calls it before it reads the tensors'
        content.

        Args:
          name: the weight's name in the model.
          tensors: {key, such as ".SCB": header}.
          read: takes a tensor's key and returns its bytes.
        Raises:
          ValueError: SCB is missing or does not fit the codes, the codes are no matrix, or they are not in row-major
            order.
        """
        codes, absmax, order = (tensors.get(key) for key in (self.codes, *self.others))
        assert codes is not None
        module, rows = name.removesuffix(self.weight), list(codes.shape[:1])
        if len(codes.shape) != 2:
            raise ValueError(f"{codes.file}: {name} is I8{list(codes.shape)}; it must be a matrix")
        if absmax is None or (absmax.dtype, list(absmax.shape)) != ("F32", rows):
            got = "is missing" if absmax is None else f"is {absmax.dtype}{list(absmax.shape)}"
            raise ValueError(f"{codes.file}: {module}.SCB {got}; {name} needs F32{rows}: fetch or save it again")
        if order is not None and read(".weight_format").tobytes() != _BY_ROWS.tobytes():
            raise ValueError(
                f"{codes.file}: {module}.weight_format is not 0 in one byte: the codes are in a GPU's own order, which "
                "old versions of bitsandbytes wrote; load it with bitsandbytes and save it again"
            )
        return Found(name, tensors, codes.shape)

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> Int8:
        """Makes the quantised weight of one matrix, with numpy arrays as leaves, from the content of its tensors. The
        loader of checkpoints calls it.

        Args:
          found: what `describe` returned for the weight.
          arrays: {key: array}, the content of the tensors in `found`.
          dtype_name: the dtype that the model computes in, to which the weight is decoded by default.
        Raises:
          ValueError: a largest magnitude is negative.
        """
        absmax = arrays[".SCB"]
        if (absmax < 0).any():
            raise ValueError(f"{found.where}: SCB has {absmax.min():.4g}; magnitudes are not negative: fetch it again")
        leaves: list = [arrays[self.codes], absmax]
        return Int8(*leaves, dtype_name=dtype_name)

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """Describes the tensors of a file that store `weight`, {key, such as ".SCB": FileTensor}. A FileTensor has a
        shape, a dtype, and a function that later takes the same weight with its arrays and returns the array to write.
        A file's header is written before the weights have been quantised, so `weight` may contain shapes and dtypes
        (jax.ShapeDtypeStruct) instead of arrays. number: the number that some layouts put into the header, from
        `header_number`; this layout has none and ignores it."""
        assert isinstance(weight, Int8)
        return {
            self.codes: file_tensor(weight.codes, lambda w: w.codes),
            ".SCB": file_tensor(weight.absmax, lambda w: w.absmax),
            ".weight_format": file_tensor(_BY_ROWS, lambda w: _BY_ROWS),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of the config.json of a checkpoint whose weights are stored in this
        layout. The entry is written with a model that is saved or exported.

        Args:
          weights: all weights in this format; the entry does not depend on them.
          plain: the names of the linears that are not quantised.
          dtype: not used.
        """
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,  # of activations, when bitsandbytes serves them: its default
            "llm_int8_skip_modules": plain,
        }


FORMAT = Format(
    name="int8",
    title="in eight bits (int8 by rows)",
    kinds=(Int8,),
    layouts=(LLMInt8(),),
    flag="load_in_8bit",
    export=Export(
        "int8",
        keeps=SERVED_IN_16_BITS,
        without_experts="transformers 5 has no experts in int8, so it could not load the result",
    ),
)
