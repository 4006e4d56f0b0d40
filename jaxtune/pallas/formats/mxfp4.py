"""MXFP4, the format in which gpt-oss is published: blocks of 32 four-bit numbers that share a power of two.

Numbers are e2m1 and scales e8m0 (OCP Microscaling Formats v1.0). A byte has two numbers, the first in the low nibble.
The format is read and written, in gpt-oss's layout and in that of compressed-tensors. Weights are decoded to the
compute dtype when they are loaded, and an export encodes them again; but gpt-oss's experts stay as they are stored, and
train through adapters, if model.load_in is "mxfp4". Quantisation-aware training rounds to the format too.

MXFP4 is the class of weights, with `encode` (weights) and `encode_activations`; `to_e2m1` rounds numbers to e2m1, also
for NVFP4. Published describes gpt-oss's checkpoints and CompressedTensors those of other models; FORMAT declares the
format to jaxtune.pallas.formats.
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
    check_weights,
    file_tensor,
)
from jaxtune.pallas.formats.stored import Stored

BLOCK = 32  # numbers that share a scale
LARGEST, LARGEST_CODES = 6.0, 0x77  # the largest number of e2m1, and a byte with two codes of it
NAN_SCALE = 255  # the scale that is no power of two but NaN
# The 16 numbers of e2m1, by their codes.
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4(Stored):
    """A tensor [..., n] in MXFP4 whose last axis, a multiple of 32, is divided into blocks. Each number has a code of
    four bits, an index into TABLE, the 16 numbers of e2m1; each block of 32 has a scale in e8m0. A number of the tensor
    is TABLE[code] * 2^(scale - 127). The class implements the interface of quantised weights, Stored.

    gpt-oss's files have experts as [E, out, in], and its models as [E, in, out]. A weight that is `swapped` has the
    arrays of the former and the shape of the latter, so that neither the file's bytes nor the model change."""

    codes: jax.Array  # uint8[..., n / 2], two codes each, the first in the low four bits
    scales: jax.Array  # uint8[..., n / 32], the exponents of two, with a bias of 127 (e8m0)
    # the dtype that `decode` gives by default
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))
    # whether the arrays are those of the tensor with its last two axes swapped: blocks are then along the last but one
    swapped: bool = dataclasses.field(default=False, metadata=dict(static=True))

    row_block = BLOCK

    @staticmethod
    def from_blocks(blocks: jax.Array, scales: jax.Array, dtype_name: str = "bfloat16") -> MXFP4:
        """Makes the weight [..., n] from the arrays of gpt-oss's checkpoint. Benchmarks and tests call it.

        Args:
          blocks: uint8[..., n / 32, 16], the codes of each block of 32 numbers, two in a byte.
          scales: uint8[..., n / 32], the exponent of each block.
          dtype_name: the dtype that the weight's `decode` returns by default.
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

        A block's scale is one of two powers of two, that with the smaller sum of squared errors: the one that the
        specification gives, with which numbers above 6 times the scale are clipped to it, or twice that power. Where
        both sums are equal, or overflow float32, it is the first. Scales are from 2^-126 to 2^125. Numbers are rounded
        to nearest, ties to even, and must be finite. Exports to MXFP4 and quantisation-aware training call it.

        Raises:
          ValueError: the last axis is not a multiple of 32.
        """
        if tensor.ndim < 1 or tensor.shape[-1] % BLOCK:
            raise ValueError(f"MXFP4.encode: the last axis of {list(tensor.shape)} is not a multiple of {BLOCK}")
        codes, scales = _encode(tensor)
        return MXFP4(codes, scales, str(tensor.dtype))

    @staticmethod
    def encode_activations(x: jax.Array) -> MXFP4:
        """Quantises activations x, float[..., n], n a multiple of 32, by compressed-tensors' rule for dynamic scales
        (generate_mx_scales): with p the power of two at or below the block's largest magnitude, a scale is p/4, or p/2
        if that magnitude is at least 1.75 p. So the largest number is below 7 times its scale, and is clipped to 6
        times it at most. Numbers are rounded to nearest, ties to even. The scale of zeros, and of numbers below 2^-124,
        is 2^-126, and none is above 2^125, so that no number becomes infinite. Quantisation-aware training rounds
        activations so."""
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
        bits = jax.lax.bitcast_convert_type(jnp.abs(blocks).max(-1, keepdims=True), jnp.int32)
        # Adding a quarter of the mantissa's range changes the exponent where the mantissa is 1.75 or more.
        biased = jnp.clip((bits + (1 << 21) >> 23) - 2, 1, 252)
        scales = jax.lax.bitcast_convert_type(biased << 23, jnp.float32)
        size = jnp.minimum(to_e2m1(jnp.abs(blocks) / scales), LARGEST)  # the division by a power of two is exact
        return MXFP4(_packed(size, blocks, x.shape), biased[..., 0].astype(jnp.uint8), str(x.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor, [..., n], or [..., n, rows] if the weight is `swapped`."""
        shape = (*self.codes.shape[:-1], 2 * self.codes.shape[-1])
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape

    @property
    def unswapped(self) -> MXFP4:
        """For a `swapped` weight: an MXFP4 with the same arrays that is not swapped. Its shape has the last two axes in
        the other order, and its blocks are along the last axis. Grouped products multiply by it (Stored.unswapped)."""
        return dataclasses.replace(self, swapped=False)

    def problem(self) -> str | None:
        """Returns the reason why codes and scales cannot belong to one tensor (shapes that do not fit each other, or a
        dtype other than uint8), or None. `decode` and the operations refuse such a weight with this reason."""
        wanted = (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK // 2)
        if tuple(self.codes.shape) != wanted:
            return f"codes are {list(self.codes.shape)}; scales {list(self.scales.shape)} ask for {list(wanted)}"
        if (str(self.codes.dtype), str(self.scales.dtype)) != ("uint8", "uint8"):
            return f"codes are {self.codes.dtype} and scales {self.scales.dtype}; both must be uint8"
        return None

    def cut(self, axis: int) -> int | None:
        """The number of consecutive indices along `axis` (not negative) that must stay in one part when the tensor is
        divided or written in pieces: 32 along the last axis (the last but one if the weight is `swapped`), so that no
        block is cut, and 1 along the others. It is never None: every axis can be divided. `divided` asks it, and
        exports that write experts as matrices do (Stored.piece)."""
        return BLOCK if axis == self.ndim - (2 if self.swapped else 1) else 1

    def divided(self, axis: int, parts: int) -> tuple[int | None, ...] | None:
        """The axis along which codes and scales are divided if the tensor is divided into `parts` equal parts along
        `axis`, or None if that would cut a block (Stored.divided). Of a weight that is `swapped`, the arrays have the
        last two axes in the other order."""
        found = super().divided(axis, parts)
        if found is None or not self.swapped or axis < self.ndim - 2:
            return found
        return (2 * self.ndim - 3 - axis,) * len(found)

    def largest(self) -> jax.Array:
        """The largest magnitude that each number of the tensor could have with its scale, float32 in the tensor's
        shape. Quantisation-aware training with clipped gradients compares weights and activations with it
        (Stored.largest)."""
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, LARGEST_CODES)).decode("float32")

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> MXFP4:
        """Makes a weight of this shape in MXFP4 with random codes and scales, on which a kernel that decodes MXFP4 (of
        quant_matmul or grouped_matmul) is compared with the plain JAX implementation at its first use. draw: numpy's
        generator, from which the numbers come. The method is not static only because other formats need the weight's
        options; nothing of this weight is used."""
        codes = draw.integers(0, 256, (*shape[:-1], shape[-1] // 2))
        scales = draw.integers(120, 124, (*shape[:-1], shape[-1] // BLOCK))
        return MXFP4(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor in `dtype` (None: dtype_name), exact if the dtype can represent the numbers, and infinite
        beyond float32's range.

        Numbers below 2^-126 become zero. A scale of 255, NaN in e8m0, is not treated as NaN: numbers of its block
        become infinite where their codes stand for 1 or more. The layouts' `read` refuses such a scale, and the loader
        of checkpoints refuses decoded numbers that are not finite. A number's exponent is the sum of its code's and its
        scale's exponents; it is assembled from bits, without a table or a power.
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
            numbers = wide.astype(dtype or self.dtype).reshape(*self.codes.shape[:-1], -1)
            return numbers.swapaxes(-1, -2) if self.swapped else numbers


def to_e2m1(size: jax.Array) -> jax.Array:
    """Rounds magnitudes, `size` float32 of any shape and not negative, to the nearest number of e2m1, the four-bit
    float of MXFP4 and NVFP4, whose encoders call it. Returns these numbers in float32, not their codes. Above 6, the
    largest number, they are rounded to multiples of 2; callers clip to 6 before or afterwards. The numbers of e2m1 are
    0.5 apart below 2, 1 apart below 4 and 2 apart above; ties go to the even code, as jnp.round has them."""
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.round(size / step) * step


@jax.jit
def _encode(tensor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises a tensor [..., n], n a multiple of 32, and returns (codes uint8[..., n / 2], scales uint8[..., n /
    32]). It is the jitted computation of MXFP4.encode, which checks the shape before."""
    blocks = tensor.astype(jnp.float32).reshape(*tensor.shape[:-1], -1, BLOCK)
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    exponent = jnp.clip(jnp.frexp(largest)[1] - 3, -126, 124)  # 6 is the largest number: 1.5 times 2 to the 2

    def rounded(exponent):
        size = jnp.minimum(to_e2m1(jnp.abs(blocks) * jnp.exp2(-exponent.astype(jnp.float32))), LARGEST)
        error = jnp.square(size * jnp.exp2(exponent.astype(jnp.float32)) - jnp.abs(blocks)).sum(-1, keepdims=True)
        return size, error

    (low, low_error), (high, high_error) = rounded(exponent), rounded(exponent + 1)
    better = high_error < low_error
    size, exponent = jnp.where(better, high, low), jnp.where(better, exponent + 1, exponent)
    return _packed(size, blocks, tensor.shape), (exponent[..., 0] + 127).astype(jnp.uint8)


def _packed(size: jax.Array, blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The codes of numbers that were rounded to e2m1, two in a byte: uint8[..., n / 2], the first of two in the low
    four bits. MXFP4.encode_activations and `_encode` call it. size: float32[..., n / 32, 32], the rounded magnitudes in
    units of the scale. blocks: the numbers before rounding, of the same shape, which give the signs. shape: of the
    tensor, (..., n)."""
    code = jnp.searchsorted(jnp.asarray(TABLE[:8]), size).astype(jnp.uint8)
    code = (code | (jnp.signbit(blocks).astype(jnp.uint8) << 3)).reshape(*shape[:-1], -1, 2)
    return code[..., 0] | code[..., 1] << 4


# ---- in checkpoints


class Published(Layout):
    """The layout of gpt-oss's published checkpoints, by which jaxtune/models/files reads and writes them.

    For the array NAME [E, in, out] of a layer's experts in the model, a file has `NAME_blocks` uint8[E, out, in / 32,
    16], the codes, and `NAME_scales` uint8[E, out, in / 32]. They are decoded when they are loaded, or stay as they are
    with model.load_in = "mxfp4"; `jaxtune export --to mxfp4` writes them for gpt-oss, and save_pretrained for a model
    that has them. The attributes and methods are explained in Layout.
    """

    title = "gpt-oss's in MXFP4"
    codes = "_blocks"
    codes_dtype = "U8"
    others = ("_scales",)
    weight = ""
    decoded_on_load = True
    kept_on_request = True
    whole_experts = True
    families = ("gpt_oss",)

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "mxfp4". The planner learns by it that weights are decoded on loading; the loader finds weights
        by `claims` (Layout.recognises)."""
        return settings.get("quant_method") == "mxfp4"

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, are experts in this layout: there is a tensor of blocks. If the
        scales are missing, `describe` raises. The loader calls it to find the quantised weights among a checkpoint's
        tensors."""
        return self.codes in tensors

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the experts' array that two tensors store, from their headers alone, which it checks, so that the
        loader knows the shape before it reads any data. Returns a Found with the shape of the model's array, [E, in,
        out]; the tensors are [E, out, in / 32, 16] and [E, out, in / 32].

        Args:
          name: the name of the experts' array in the model.
          tensors: {"_blocks": header of the codes, "_scales": header of the scales}.
          read: a function that returns a tensor's bytes; it is not called, because the headers say everything.
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
        """Makes the quantised experts of a layer, an MXFP4 of the model's shape [E, in, out] that is `swapped`, from
        the content of their two tensors, whose arrays are its leaves. The loader of checkpoints calls it.

        Args:
          found: what `describe` returned.
          arrays: {"_blocks": the codes, "_scales": the scales}.
          dtype_name: the dtype that the model computes in, to which the weight is decoded by default.
        Raises:
          ValueError: a scale is 255, which is NaN in e8m0 (OCP Microscaling Formats v1.0, 5.4.1).
        """
        scales = _checked_scales(found, "_scales", arrays)
        leaves: list = [arrays["_blocks"].reshape(*scales.shape[:-1], -1), scales]
        return MXFP4(*leaves, dtype_name=dtype_name, swapped=True)

    def encode(self, array: jax.Array) -> MXFP4:
        """Quantises the experts' array of a model, [E, in, out], `in` a multiple of 32, in the order in which files
        have it; the result is `swapped`. Plans take its shapes, and the export of gpt-oss writes its numbers."""
        return dataclasses.replace(MXFP4.encode(array.swapaxes(1, 2)), swapped=True)

    def digested(self, found: Found) -> list[tuple[str, str]]:
        """(label, key) of blocks and scales of `found`, in the order in which the digest of the base model, by which
        adapters recognise it, includes them. The label is the name that enters the digest: that of the experts' array,
        and "scales"."""
        return [(found.name, "_blocks"), ("scales", "_scales")]

    def can_store(self, weight: Stored) -> bool:
        """Whether `weight` is `swapped`, as the experts of a gpt-oss model are that keeps them in MXFP4. Weights of
        other models are written in the next layout."""
        return weight.swapped

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """Describes the tensors of a file that store `weight`, experts [E, in, out] that are `swapped`, {key, such as
        "_scales": FileTensor}. A FileTensor has a shape, a dtype, and a function that later takes the same weight with
        its arrays and returns the array to write. A file's header is written before the weights have been quantised, so
        `weight` may contain shapes and dtypes (jax.ShapeDtypeStruct) instead of arrays. number: the number that some
        layouts put into the header, from `header_number`; this layout has none and ignores it."""
        count, in_size, out_size = weight.shape
        byte, blocks = np.dtype(np.uint8), (count, out_size, in_size // BLOCK, BLOCK // 2)
        return {
            "_blocks": FileTensor(blocks, byte, lambda packed: packed.codes.reshape(blocks)),
            "_scales": FileTensor(blocks[:3], byte, lambda packed: packed.scales),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of config.json, a copy of that of the published gpt-oss, which names
        the modules that stay in 16 bits. The arguments weights, plain and dtype, which other layouts need, are not
        used. `jaxtune export --to mxfp4` writes the entry with a gpt-oss model."""
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def _checked_scales(found: Found, key: str, arrays: Arrays) -> np.ndarray:
    """The scales that a checkpoint has for a weight: arrays[key], which must be powers of two. The `read` of both
    layouts calls it.

    Args:
      found: the weight, from whose headers the error takes the file and the tensor's name.
      key: that of the scales' tensor, such as ".weight_scale".
      arrays: the content of the weight's tensors, by key.
    Raises:
      ValueError: a scale is 255, which is NaN in e8m0 (OCP Microscaling Formats v1.0, 5.4.1).
    """
    scales, header = np.asarray(arrays[key]), found.tensors[key]
    if (wrong := scales == NAN_SCALE).any():
        first = list(map(int, np.unravel_index(wrong.argmax(), wrong.shape)))
        raise ValueError(
            f"{header.file}: {header.name}{first} is {NAN_SCALE}, which is NaN in MXFP4, as {wrong.sum():,} of its "
            f"{wrong.size:,} scales are; fetch or write the checkpoint again"
        )
    return scales


class CompressedTensors(Layout):
    """The layout of compressed-tensors' `mxfp4-pack-quantized`, in which models other than gpt-oss are published and
    written.

    The tensors are `X.weight_packed` uint8[out, in / 2] and `X.weight_scale` uint8[out, in / 32], in e8m0. They are
    always decoded when they are loaded. The attributes and methods are explained in Layout.
    """

    title = "MXFP4 of compressed-tensors (mxfp4-pack-quantized)"
    codes = ".weight_packed"
    codes_dtype = "U8"
    others = (".weight_scale",)
    decoded_on_load = True

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "compressed-tensors" and the format is "mxfp4-pack-quantized". The planner learns by it that
        weights are decoded on loading; the loader finds weights by `claims` (Layout.recognises)."""
        return (settings.get("quant_method"), settings.get("format")) == ("compressed-tensors", "mxfp4-pack-quantized")

    def check(self, settings: Settings) -> None:
        """Raises ValueError, with key and value, if `settings`, a quantization_config that `recognises` accepts, has a
        setting that is not supported. Supported are weights that are symmetric floats of 4 bits in groups of 32,
        without a quantised key/value cache; a key that is missing is taken to have that value, and settings of
        activations are ignored. The loader calls it before it reads any tensor."""
        check_weights(settings, {"num_bits": 4, "type": "float", "group_size": BLOCK, "symmetric": True})

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, are a weight of this layout: `.weight_packed` has the dtype U8,
        and so has `.weight_scale`, unless it is missing, for which `describe` raises. The scales of NVFP4, whose codes
        have the same name, are in e4m3. The loader calls it to find the quantised weights among a checkpoint's
        tensors."""
        scales = tensors.get(".weight_scale")
        return super().claims(tensors) and (scales is None or scales.dtype == "U8")

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the weight that a module's tensors store, from their headers alone. Returns a Found with its name,
        headers and shape [out, in]. The loader calls it before it reads the tensors' content.

        Args:
          name: the weight's name in the model.
          tensors: {".weight_packed": header of the codes, ".weight_scale": header of the scales}.
          read: a function that returns a tensor's bytes; it is not called, because the headers say everything.
        Raises:
          ValueError: the scales are missing, their shape does not fit the codes, or the codes are no matrix.
        """
        codes, scales = tensors[self.codes], tensors.get(".weight_scale")
        wanted = [codes.shape[0], 2 * codes.shape[1] // BLOCK] if len(codes.shape) == 2 else None
        if scales is None or wanted is None or list(scales.shape) != wanted or 2 * codes.shape[1] % BLOCK:
            got = "is missing" if scales is None else f"is {scales.dtype}{list(scales.shape)}"
            raise ValueError(
                f"{codes.file}: {name}: .weight_scale {got}; codes U8{list(codes.shape)} in blocks of {BLOCK} need "
                f"U8{wanted or '[out, in / 32]'}"
            )
        return Found(name, tensors, (codes.shape[0], 2 * codes.shape[1]))

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> MXFP4:
        """Makes the quantised weight of one matrix, with numpy arrays as leaves, from the content of its two tensors.
        The loader of checkpoints calls it.

        Args:
          found: what `describe` returned.
          arrays: {".weight_packed": the codes, ".weight_scale": the scales}.
          dtype_name: the dtype that the model computes in, to which the weight is decoded by default.
        Raises:
          ValueError: a scale is 255, which is NaN in e8m0 (OCP Microscaling Formats v1.0, 5.4.1).
        """
        leaves: list = [arrays[self.codes], _checked_scales(found, ".weight_scale", arrays)]
        return MXFP4(*leaves, dtype_name=dtype_name)

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """Describes the tensors of a file that store `weight`, an MXFP4 [out, in], {key, such as ".weight_scale":
        FileTensor}. A FileTensor has a shape, a dtype, and a function that later takes the same weight with its arrays
        and returns the array to write. A file's header is written before the weights have been quantised, so `weight`
        may contain shapes and dtypes (jax.ShapeDtypeStruct) instead of arrays. number: the number that some layouts put
        into the header, from `header_number`; this layout has none and ignores it."""
        assert isinstance(weight, MXFP4)
        return {
            self.codes: file_tensor(weight.codes, lambda w: w.codes),
            ".weight_scale": file_tensor(weight.scales, lambda w: w.scales),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of the config.json of a checkpoint whose weights are stored in this
        layout, with activations in 16 bits; `rounding_activations` adds those in MXFP4. The exports mxfp4 and
        mxfp4-mxfp4 write the entry; a model that is saved has no weights in MXFP4.

        Args:
          weights: not used.
          plain: the names of the linears that are not quantised.
          dtype: not used.
        """
        group = {
            "targets": ["Linear"],
            "weights": _NUMBER | {"dynamic": False},
            "input_activations": None,
            "output_activations": None,
            "format": "mxfp4-pack-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": plain,
        }

    def rounding_activations(self, config: Config) -> Config:
        """The entry quantization_config, `config`, for servers that round activations to MXFP4 too (compressed-tensors'
        scheme MXFP4, W4A4), with dynamic scales of blocks of 32 numbers; `config` is not changed. The export
        mxfp4-mxfp4 calls it, whether or not the model was trained with activations rounded to MXFP4."""
        said: Config = config["config_groups"]
        inputs = _NUMBER | {"dynamic": True}
        return config | {"config_groups": {name: group | {"input_activations": inputs} for name, group in said.items()}}


# How compressed-tensors describes the numbers of MXFP4 in config.json.
_NUMBER = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": BLOCK,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}


FORMAT = Format(
    name="mxfp4",
    title="in four bits (MXFP4)",
    kinds=(MXFP4,),
    layouts=(Published(), CompressedTensors()),
    export=Export("mxfp4", keeps=SERVED_IN_16_BITS),
)
