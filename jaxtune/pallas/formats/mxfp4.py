"""MXFP4, the format in which gpt-oss is published: blocks of 32 four-bit numbers that share a power of two.

Numbers are e2m1 and scales e8m0 (OCP Microscaling Formats v1.0). A byte has two numbers, the first in the low nibble.
The format is read and written, but no model trains over it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import Arguments
from jaxtune.pallas.formats.layout import (
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
)
from jaxtune.pallas.formats.stored import Stored

BLOCK = 32  # numbers that share a scale
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4(Stored):
    """A tensor [..., n] in MXFP4 whose last axis, a multiple of 32, is divided into blocks.

    A number is TABLE[code] * 2^(scale - 127).
    """

    codes: jax.Array  # uint8[..., n / 2], two numbers each
    scales: jax.Array  # uint8[..., n / 32]
    # the dtype that `decode` gives by default
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))

    @staticmethod
    def from_blocks(blocks: jax.Array, scales: jax.Array, dtype_name: str = "bfloat16") -> MXFP4:
        """The tensor of a checkpoint's blocks uint8[..., n / 32, 16] and scales uint8[..., n / 32]. dtype_name: the
        dtype that its `decode` gives by default.

        Raises:
          TypeError, ValueError: other dtypes, or shapes that do not fit each other.
        """
        check = Arguments("MXFP4.from_blocks")
        check.array("scales", scales, "...", jnp.uint8)
        check.array("blocks", blocks, " ".join(map(str, (*scales.shape, BLOCK // 2))), jnp.uint8)
        return MXFP4(blocks.reshape(*scales.shape[:-1], -1), scales, dtype_name)

    @staticmethod
    def encode(tensor: jax.Array) -> MXFP4:
        """Quantises a tensor float[..., n], n a multiple of 32; exact if its numbers are MXFP4 numbers already.

        A block's scale is the power of two that the specification gives, with which numbers above 6 times the scale are
        clipped, or twice that, whichever has the smaller sum of squared errors. Numbers are rounded to nearest, ties to
        even, and must be finite.

        Raises:
          ValueError: the last axis is not a multiple of 32.
        """
        if tensor.ndim < 1 or tensor.shape[-1] % BLOCK:
            raise ValueError(f"MXFP4.encode: the last axis of {list(tensor.shape)} is not a multiple of {BLOCK}")
        codes, scales = _encode(tensor)
        return MXFP4(codes, scales, str(tensor.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def problem(self) -> str | None:
        """The reason why the arrays cannot belong to one tensor, or None."""
        wanted = (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK // 2)
        if tuple(self.codes.shape) != wanted:
            return f"codes are {list(self.codes.shape)}; scales {list(self.scales.shape)} ask for {list(wanted)}"
        if (str(self.codes.dtype), str(self.scales.dtype)) != ("uint8", "uint8"):
            return f"codes are {self.codes.dtype} and scales {self.scales.dtype}; both must be uint8"
        return None

    def cut(self, axis: int) -> int | None:
        """The number of consecutive indices along `axis` (not negative) that must stay in one part when the tensor is
        divided over devices or written in pieces: 32 along the last axis, so that no block is cut, and 1 along the
        others. It is never None: every axis can be divided."""
        return BLOCK if axis == self.ndim - 1 else 1

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> MXFP4:
        """A weight of this shape with random codes and scales, on which a kernel that decodes MXFP4 is compared with
        its reference at its first use. draw: numpy's generator, from which the numbers come. Of this weight itself
        nothing is used."""
        codes = draw.integers(0, 256, (*shape[:-1], shape[-1] // 2))
        scales = draw.integers(120, 124, (*shape[:-1], shape[-1] // BLOCK))
        return MXFP4(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor in `dtype` (None: dtype_name), exact if the dtype can represent the scales.

        Numbers below 2^-126 become zero. A number's exponent is the sum of its code's and its scale's exponents; it is
        assembled from bits, without a table or a power.
        """
        with jax.named_scope("dequantise"):
            nibbles = (self.codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
            nibbles = nibbles.astype(jnp.int32).reshape(*self.scales.shape, BLOCK)
            size, sign = nibbles & 7, nibbles >> 3 << 31
            exponent = (size >> 1) + self.scales.astype(jnp.int32)[..., None] - 1
            fraction = jnp.where(size > 1, size & 1, 0) << 22
            bits = jnp.where(exponent < 255, exponent << 23 | fraction, 255 << 23)
            bits = jnp.where((size > 0) & (exponent > 0), bits, 0) | sign
            wide = jax.lax.bitcast_convert_type(bits, jnp.float32)
            return wide.astype(dtype or self.dtype).reshape(self.shape)


@jax.jit
def _encode(tensor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(codes uint8[..., n / 2], scales uint8[..., n / 32]) of a tensor [..., n] whose n is a multiple of 32: what
    MXFP4.encode does once it has checked the shape, as one jitted function."""
    blocks = tensor.astype(jnp.float32).reshape(*tensor.shape[:-1], -1, BLOCK)
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    exponent = jnp.clip(jnp.frexp(largest)[1] - 3, -126, 124)  # 6 is the largest number: 1.5 times 2 to the 2

    def rounded(exponent):
        size = jnp.abs(blocks) * jnp.exp2(-exponent.astype(jnp.float32))
        # Numbers lie 0.5 apart below 2, 1 below 4 and 2 above; ties go to the even code, as jnp.round has them.
        step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
        size = jnp.minimum(jnp.round(size / step) * step, 6.0)
        error = jnp.square(size * jnp.exp2(exponent.astype(jnp.float32)) - jnp.abs(blocks)).sum(-1, keepdims=True)
        return size, error

    (low, low_error), (high, high_error) = rounded(exponent), rounded(exponent + 1)
    better = high_error < low_error
    size, exponent = jnp.where(better, high, low), jnp.where(better, exponent + 1, exponent)
    code = jnp.searchsorted(jnp.asarray(TABLE[:8]), size).astype(jnp.uint8)
    code = (code | (jnp.signbit(blocks).astype(jnp.uint8) << 3)).reshape(*tensor.shape[:-1], -1, 2)
    return code[..., 0] | code[..., 1] << 4, (exponent[..., 0] + 127).astype(jnp.uint8)


# ---- in checkpoints


class Published(Layout):
    """The layout of gpt-oss as it is published.

    For the experts NAME [E, in, out] of a layer there are `NAME_blocks` uint8[E, out, in / 32, 16] and `NAME_scales`
    uint8[E, out, in / 32]. They are decoded on loading.
    """

    title = "gpt-oss's in MXFP4"
    codes = "_blocks"
    codes_dtype = "U8"
    others = ("_scales",)
    weight = ""
    decoded_on_load = True
    families = ("gpt_oss",)

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "mxfp4"."""
        return settings.get("quant_method") == "mxfp4"

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, are experts in this layout: there is a tensor of blocks. If its
        scales are missing, `describe` says so."""
        return self.codes in tensors

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the experts that two tensors store, from their headers alone. The shape of the result is that of
        the model's array, [E, in, out], while the tensors are [E, out, in / 32, .].

        Args:
          name: the name of the experts' array in the model.
          tensors: {key: header}, of blocks and scales.
          read: not used.
        Raises:
          ValueError: the scales are missing, or dtypes or shapes do not fit each other.
        """
        blocks, scales = (tensors.get(key) for key in ("_blocks", "_scales"))
        assert blocks is not None
        where = f"{blocks.file}: {name}"
        if scales is None:
            raise ValueError(f"{where}_blocks is there, but {name}_scales is missing")
        if (blocks.dtype, scales.dtype) != ("U8", "U8") or blocks.shape != (*scales.shape, BLOCK // 2):
            shapes = f"blocks {blocks.dtype}{list(blocks.shape)} do not fit scales {scales.dtype}{list(scales.shape)}"
            raise ValueError(f"{where}: {shapes}")
        experts, out_size, groups = scales.shape
        return Found(name, tensors, (experts, groups * BLOCK, out_size))

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> MXFP4:
        """The experts of a layer as MXFP4 [E, out, in], in which order the checkpoint has them; `decoded` swaps the
        axes.

        Args:
          found: from `describe`; not used.
          arrays: {key: array}, the content of the tensors that it found.
          dtype_name: the dtype that the model computes in, to which the weight is decoded.
        """
        return MXFP4.from_blocks(jnp.asarray(arrays["_blocks"]), jnp.asarray(arrays["_scales"]), dtype_name)

    def decoded(self, weight: Stored, dtype: str) -> jax.Array:
        """The experts' array that the model has, [E, in, out] in `dtype`, of a weight that is stored as [E, out, in].
        No model keeps MXFP4, so the loader calls it for every weight. It is exact in dtypes that can represent the
        scales."""
        assert isinstance(weight, MXFP4)
        return _decoded(weight, dtype)

    def digested(self, found: Found) -> list[tuple[str, str]]:
        """(label, key) of blocks and scales of `found`, in the order in which the digest of the base model, by which
        adapters recognise it, includes them. The label is the name that enters the digest: that of the experts' array,
        and "scales"."""
        return [(found.name, "_blocks"), ("scales", "_scales")]

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """The tensors of a file that store this weight, {key: FileTensor}. A FileTensor has the shape, the dtype, and a
        function that takes the computed weight and returns the array to be written; headers are written before the
        weights are computed, so the leaves of `weight` may be shapes alone. number is not used."""
        count, out_size, in_size = weight.shape
        byte, blocks = np.dtype(np.uint8), (count, out_size, in_size // BLOCK, BLOCK // 2)
        return {
            "_blocks": FileTensor(blocks, byte, lambda packed: packed.codes.reshape(blocks)),
            "_scales": FileTensor(blocks[:3], byte, lambda packed: packed.scales),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """The entry quantization_config of config.json, that of the published gpt-oss, whatever weights, plain and
        dtype are."""
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}


@functools.partial(jax.jit, static_argnums=1)
def _decoded(weight: MXFP4, dtype: str) -> jax.Array:
    """A weight [E, out, in] decoded to `dtype` and transposed to [E, in, out], in one compiled program, so that the
    decoded array is not written twice."""
    return weight.decode(dtype).swapaxes(1, 2)


FORMAT = Format(
    name="mxfp4",
    title="in four bits (MXFP4)",
    kinds=(MXFP4,),
    layouts=(Published(),),
    export=Export("mxfp4", "gpt-oss as it is published"),
)
