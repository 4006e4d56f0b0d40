"""int8 with a scale per row: the weights of LLM.int8() (arXiv 2208.07339), as bitsandbytes stores them.

A weight is its code times its row's largest magnitude / 127. In its forward pass LLM.int8() also quantises activations,
and multiplies columns with outliers in 16 bits. Here weights are decoded for each product instead, forward and
backward, as bitsandbytes does for gradients.
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
    FoundWeight,
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
    """A tensor [..., out, in] in int8 with a scale for each row: a number is code * absmax / 127."""

    codes: jax.Array  # int8[..., out, in]
    absmax: jax.Array  # float32[..., out], the largest magnitude of each row, which bitsandbytes calls SCB
    dtype_name: str = dataclasses.field(metadata=dict(static=True))  # the dtype that `decode` gives by default

    scale_axes = (-1,)

    @staticmethod
    def encode(array: jax.Array) -> Int8:
        """Quantises an array [..., out, in] of floats; the bytes equal bitsandbytes' on a CPU.

        Numbers are rounded to float16 first, and then to the nearest code, with the largest magnitude of each row at
        127; a row of zeros has absmax 0. Rows with numbers beyond float16's range, for which bitsandbytes stores
        infinity, are quantised from float32.
        """
        codes, absmax = _encode(jnp.asarray(array))
        return Int8(codes, absmax, str(array.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def problem(self) -> str | None:
        """As Stored.problem; dtypes are not checked."""
        if self.absmax.shape == self.shape[:-1]:
            return None
        return f"absmax is {list(self.absmax.shape)}; codes of {list(self.shape)} need {list(self.shape[:-1])}"

    def block_length(self, axis: int) -> int:
        """As Stored.block_length: 1, because a part of a row is decoded by the whole row's scale."""
        return 1

    def rescaled(self, factor: np.ndarray) -> Int8:
        return dataclasses.replace(self, absmax=jnp.asarray(np.float32(np.float64(self.absmax) * factor[..., 0])))

    def largest(self) -> jax.Array:
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, _LARGEST)).decode("float32")

    def shard_axes(self, axis: int, shards: int) -> tuple[int | None, ...] | None:
        """As Stored.shard_axes; along `in`, which cuts every row, each device keeps all of absmax: (axis, None)."""
        if self.shape[axis] % shards:
            return None
        return (axis, None if axis == self.ndim - 1 else axis)

    def _decode(self, dtype) -> jax.Array:
        numbers = self.codes * self.absmax[..., None] * np.float32(1 / _LARGEST)  # in bitsandbytes' order
        return numbers.astype(dtype or self.dtype)


@jax.jit
def _encode(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(codes int8[..., out, in], absmax float32[..., out], rounded to float16 within its range)."""
    exact = array.astype(jnp.float32)
    half = as_float16(exact)  # bitsandbytes quantises weights that were rounded so
    numbers = jnp.where(jnp.isfinite(half).all(-1, keepdims=True), half, exact)
    absmax = jnp.abs(numbers).max(-1, keepdims=True)
    factor = jnp.where(absmax > 0, divide(jnp.ones_like(absmax), absmax) * _LARGEST, 0)  # rounded twice, as torch does
    return jnp.round(numbers * factor).astype(jnp.int8), absmax[..., 0]


class LLMInt8(Layout):
    """The layout of bitsandbytes' checkpoints with `load_in_8bit`.

    The tensors are `X.weight` int8[out, in], `X.SCB` float32[out], the largest magnitudes of the rows, and
    `X.weight_format` uint8[], the order of the codes: 0, or missing, for row-major order.
    """

    title = "bitsandbytes' in eight bits (LLM.int8)"
    codes = ".weight"
    codes_dtype = "I8"
    scale_keys = (".SCB", ".weight_format")
    expert_note = (
        "experts in int8 are written as the linears of transformers 4, which jaxtune loads again and transformers 5 "
        "does not: it has no experts in int8 (dequantize writes 16 bits)"
    )

    def recognises(self, settings: Settings) -> bool:
        eight_bit = settings.get("load_in_8bit", settings.get("_load_in_8bit"))
        return settings.get("quant_method") == "bitsandbytes" and bool(eight_bit)

    def claims(self, tensors: Headers) -> bool:
        """As Layout.claims; `.SCB` or `.weight_format`, which a plain weight lacks, must be beside the codes."""
        return super().claims(tensors) and any(key in tensors for key in self.scale_keys)

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        """As Layout.describe. ValueError, too, for codes that are no matrix or not in row-major order."""
        codes, absmax, order = (tensors.get(key) for key in (self.codes, *self.scale_keys))
        assert codes is not None
        module, rows = name.removesuffix(self.weight), list(codes.shape[:1])
        if len(codes.shape) != 2:
            raise ValueError(f"{codes.file}: {name} is I8{list(codes.shape)}; it must be a matrix")
        if absmax is None or (absmax.dtype, list(absmax.shape)) != ("F32", rows):
            flaw = "is missing" if absmax is None else f"is {absmax.dtype}{list(absmax.shape)}"
            raise ValueError(f"{codes.file}: {module}.SCB {flaw}; {name} needs F32{rows}: fetch or save it again")
        if order is not None and read(".weight_format").tobytes() != _BY_ROWS.tobytes():
            raise ValueError(
                f"{codes.file}: {module}.weight_format is not 0 in one byte: the codes are in a GPU's own order, which "
                "old versions of bitsandbytes wrote; load it with bitsandbytes and save it again"
            )
        return FoundWeight(name, tensors, codes.shape)

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> Int8:
        """As Layout.read. ValueError for a negative absmax."""
        absmax = arrays[".SCB"]
        if (absmax < 0).any():
            raise ValueError(f"{weight.where}: SCB has {absmax.min():.4g}; magnitudes are not negative: fetch it again")
        leaves: list = [arrays[self.codes], absmax]
        return Int8(*leaves, dtype_name=dtype_name)

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """As Layout.tensors; `number` is not used."""
        assert isinstance(weight, Int8)
        return {
            self.codes: file_tensor(weight.codes, lambda w: w.codes),
            ".SCB": file_tensor(weight.absmax, lambda w: w.absmax),
            ".weight_format": file_tensor(_BY_ROWS, lambda w: _BY_ROWS),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """As Layout.config. plain: names of the linears that are not quantised; the others are not used."""
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
