"""MXFP4, the format in which gpt-oss is published: blocks of 32 four-bit numbers that share a power of two.

Numbers are e2m1 and scales e8m0 (OCP Microscaling Formats v1.0). A byte has two numbers, the first in the low nibble.
Loading decodes weights to the compute dtype, and an export encodes them again; but with model.load_in "mxfp4" gpt-oss's
experts stay as they are stored, and train through adapters.
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
    FoundWeight,
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
    """A tensor [..., n] in MXFP4, n in blocks of 32. A number is TABLE[code] * 2^(scale - 127).

    gpt-oss's files have experts as [E, out, in], and its models as [E, in, out]. A `swapped` weight has the files'
    arrays and the models' shape, so that neither changes.
    """

    codes: jax.Array  # uint8[..., n / 2], two codes each, the first in the low four bits
    scales: jax.Array  # uint8[..., n / 32], the exponents of two, with a bias of 127 (e8m0)
    # the dtype that `decode` gives by default
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))
    # whether the arrays are those of the tensor with its last two axes swapped: blocks are then along the last but one
    swapped: bool = dataclasses.field(default=False, metadata=dict(static=True))

    row_block = BLOCK

    @staticmethod
    def from_blocks(blocks: jax.Array, scales: jax.Array, dtype_name: str = "bfloat16") -> MXFP4:
        """The weight [..., n] of the arrays of gpt-oss's checkpoint.

          blocks: uint8[..., n / 32, 16], two codes in a byte.
          scales: uint8[..., n / 32], exponents.
        Raises:
          TypeError, ValueError: other dtypes, or shapes that do not fit each other.
          dtype_name: to which it is decoded by default.
        """
        check = Arguments("MXFP4.from_blocks")
        check.array("scales", scales, "...", jnp.uint8)
        check.array("blocks", blocks, " ".join(map(str, (*scales.shape, BLOCK // 2))), jnp.uint8)
        return MXFP4(blocks.reshape(*scales.shape[:-1], -1), scales, dtype_name)

    @staticmethod
    def encode(tensor: jax.Array) -> MXFP4:
        """Quantises float[..., n], n a multiple of 32 (else ValueError); exact if its numbers are MXFP4 numbers
        already.

        A block's scale is the one of two powers of two with the smaller sum of squared errors: the specification's,
        with which numbers above 6 times the scale are clipped, or twice that. The first wins if the sums are equal or
        overflow float32. Scales are from 2^-126 to 2^125. Numbers are rounded to nearest, ties to even, and must be
        finite.
        """
        if tensor.ndim < 1 or tensor.shape[-1] % BLOCK:
            raise ValueError(f"MXFP4.encode: the last axis of {list(tensor.shape)} is not a multiple of {BLOCK}")
        codes, scales = _encode(tensor)
        return MXFP4(codes, scales, str(tensor.dtype))

    @staticmethod
    def encode_activations(x: jax.Array) -> MXFP4:
        """Quantises float[..., n], n a multiple of 32, by compressed-tensors' rule for dynamic scales
        (generate_mx_scales).

        With p the power of two at or below the block's largest magnitude, a scale is p/4, or p/2 if that magnitude is
        at least 1.75 p. So the largest number is below 7 times its scale, and is clipped to 6 times it. Ties go to
        even. Scales are from 2^-126 (also of zeros) to 2^125, so that no number becomes infinite.
        """
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
        bits = jax.lax.bitcast_convert_type(jnp.abs(blocks).max(-1, keepdims=True), jnp.int32)
        # Adding a quarter of the mantissa's range changes the exponent where the mantissa is 1.75 or more.
        biased = jnp.clip((bits + (1 << 21) >> 23) - 2, 1, 252)
        scales = jax.lax.bitcast_convert_type(biased << 23, jnp.float32)
        size = jnp.minimum(to_e2m1(jnp.abs(blocks) / scales), LARGEST)  # the division by a power of two is exact
        return MXFP4(packed_e2m1(size, jnp.signbit(blocks), x.shape), biased[..., 0].astype(jnp.uint8), str(x.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (*self.codes.shape[:-1], 2 * self.codes.shape[-1])
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape

    @property
    def unswapped(self) -> MXFP4:
        return dataclasses.replace(self, swapped=False)

    def problem(self) -> str | None:
        expected = (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK // 2)
        if tuple(self.codes.shape) != expected:
            return f"codes are {list(self.codes.shape)}; scales {list(self.scales.shape)} ask for {list(expected)}"
        if (str(self.codes.dtype), str(self.scales.dtype)) != ("uint8", "uint8"):
            return f"codes are {self.codes.dtype} and scales {self.scales.dtype}; both must be uint8"
        return None

    def block_length(self, axis: int) -> int | None:
        return BLOCK if axis == self.ndim - (2 if self.swapped else 1) else 1

    def shard_axes(self, axis: int, shards: int) -> tuple[int | None, ...] | None:
        axes = super().shard_axes(axis, shards)
        if axes is None or not self.swapped or axis < self.ndim - 2:
            return axes
        return (2 * self.ndim - 3 - axis,) * len(axes)

    def largest(self) -> jax.Array:
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, LARGEST_CODES)).decode("float32")

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> MXFP4:
        codes = draw.integers(0, 256, (*shape[:-1], shape[-1] // 2))
        scales = draw.integers(120, 124, (*shape[:-1], shape[-1] // BLOCK))
        return MXFP4(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """Exact if the dtype can represent the numbers; infinite beyond float32's range; zero below 2^-126."""
        with jax.named_scope("dequantise"):
            nibbles = unpacked(self.codes).astype(jnp.int32).reshape(*self.scales.shape, BLOCK)
            size, sign = nibbles & 7, nibbles >> 3 << 31
            exponent = (size >> 1) + self.scales.astype(jnp.int32)[..., None] - 1
            fraction = jnp.where(size > 1, size & 1, 0) << 22
            bits = jnp.where(exponent < 255, exponent << 23 | fraction, 255 << 23)
            bits = jnp.where((size > 0) & (exponent > 0), bits, 0) | sign
            wide = jax.lax.bitcast_convert_type(bits, jnp.float32)
            numbers = wide.astype(dtype or self.dtype).reshape(*self.codes.shape[:-1], -1)
            return numbers.swapaxes(-1, -2) if self.swapped else numbers


def to_e2m1(size: jax.Array) -> jax.Array:
    """Rounds magnitudes (float32) to the nearest number of e2m1, ties to the even code; returns numbers, not codes.
    Numbers above 6, the largest, become multiples of 2: clip to 6 before or afterwards.

    The numbers of e2m1 are 0.5 apart below 2, 1 apart below 4 and 2 apart above.
    """
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.round(size / step) * step


@jax.jit
def _encode(tensor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(codes uint8[..., n / 2], scales uint8[..., n / 32])."""
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
    return packed_e2m1(size, jnp.signbit(blocks), tensor.shape), (exponent[..., 0] + 127).astype(jnp.uint8)


def packed_e2m1(size: jax.Array, negative: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The codes of a tensor of this shape, uint8[..., n / 2], two in a byte, the first in the low four bits.

    size: magnitudes in units of the scale, float32 numbers of e2m1, in blocks.
    negative: bool, in the shape of `size`.
    """
    code = jnp.searchsorted(jnp.asarray(TABLE[:8]), size).astype(jnp.uint8)
    code = (code | (negative.astype(jnp.uint8) << 3)).reshape(*shape[:-1], -1, 2)
    return code[..., 0] | code[..., 1] << 4


def unpacked(codes: jax.Array) -> jax.Array:
    """The two codes of each byte, uint8[..., n / 2, 2]."""
    return (codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15


# ---- in checkpoints


class Published(Layout):
    """The layout of gpt-oss's published checkpoints.

    For a layer's experts NAME [E, in, out] in the model, a file has `NAME_blocks` uint8[E, out, in / 32, 16], the
    codes, and `NAME_scales` uint8[E, out, in / 32].
    """

    title = "gpt-oss's in MXFP4"
    codes = "_blocks"
    codes_dtype = "U8"
    scale_keys = ("_scales",)
    weight = ""
    decoded_on_load = True
    kept_on_request = True
    whole_experts = True
    families = ("gpt_oss",)

    def recognises(self, settings: Settings) -> bool:
        return settings.get("quant_method") == "mxfp4"

    def claims(self, tensors: Headers) -> bool:
        """As Layout.claims: there is a tensor of blocks. If the scales are missing, `describe` raises."""
        return self.codes in tensors

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        """As Layout.describe, from headers alone. ValueError for scales that are missing or do not fit the blocks."""
        blocks, scales = (tensors.get(key) for key in ("_blocks", "_scales"))
        assert blocks is not None
        where = f"{blocks.file}: {name}"
        if scales is None:
            raise ValueError(f"{where}_blocks is there, but {name}_scales is missing")
        if (blocks.dtype, scales.dtype) != ("U8", "U8") or blocks.shape != (*scales.shape, BLOCK // 2):
            shapes = f"blocks {blocks.dtype}{list(blocks.shape)} do not fit scales {scales.dtype}{list(scales.shape)}"
            raise ValueError(f"{where}: {shapes}")
        experts, out_size, groups = scales.shape
        return FoundWeight(name, tensors, (experts, groups * BLOCK, out_size))

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> MXFP4:
        """As Layout.read: the result is `swapped`. ValueError for a scale of 255, NaN in e8m0."""
        scales = _checked_scales(weight, "_scales", arrays)
        leaves: list = [arrays["_blocks"].reshape(*scales.shape[:-1], -1), scales]
        return MXFP4(*leaves, dtype_name=dtype_name, swapped=True)

    def encode(self, array: jax.Array) -> MXFP4:
        """Quantises the model's experts [E, in, out], `in` a multiple of 32; the result is `swapped`."""
        return dataclasses.replace(MXFP4.encode(array.swapaxes(1, 2)), swapped=True)

    def digested(self, weight: FoundWeight) -> list[tuple[str, str]]:
        return [(weight.name, "_blocks"), ("scales", "_scales")]

    def can_store(self, weight: Stored) -> bool:
        """Whether `weight` is `swapped`, as gpt-oss's experts are."""
        return weight.swapped

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        count, in_size, out_size = weight.shape
        byte, blocks = np.dtype(np.uint8), (count, out_size, in_size // BLOCK, BLOCK // 2)
        return {
            "_blocks": FileTensor(blocks, byte, lambda packed: packed.codes.reshape(blocks)),
            "_scales": FileTensor(blocks[:3], byte, lambda packed: packed.scales),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """The entry of the published gpt-oss, which names the modules that stay in 16 bits; no argument is used."""
        unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": unquantised}


def _checked_scales(weight: FoundWeight, key: str, arrays: Arrays) -> np.ndarray:
    """arrays[key], a weight's scales; ValueError if one is 255, NaN in e8m0 (OCP Microscaling Formats v1.0, 5.4.1)."""
    scales, header = np.asarray(arrays[key]), weight.tensors[key]
    if (wrong := scales == NAN_SCALE).any():
        first = list(map(int, np.unravel_index(wrong.argmax(), wrong.shape)))
        raise ValueError(
            f"{header.file}: {header.name}{first} is {NAN_SCALE}, which is NaN in MXFP4, as {wrong.sum():,} of its "
            f"{wrong.size:,} scales are; fetch or write the checkpoint again"
        )
    return scales


class CompressedTensors(Layout):
    """The layout of compressed-tensors' `mxfp4-pack-quantized`, in which models other than gpt-oss are published.

    The tensors are `X.weight_packed` uint8[out, in / 2] and `X.weight_scale` uint8[out, in / 32], in e8m0.
    """

    title = "MXFP4 of compressed-tensors (mxfp4-pack-quantized)"
    codes = ".weight_packed"
    codes_dtype = "U8"
    scale_keys = (".weight_scale",)
    decoded_on_load = True

    def recognises(self, settings: Settings) -> bool:
        return (settings.get("quant_method"), settings.get("format")) == ("compressed-tensors", "mxfp4-pack-quantized")

    def check(self, settings: Settings) -> None:
        check_weights(settings, {"num_bits": 4, "type": "float", "group_size": BLOCK, "symmetric": True})

    def claims(self, tensors: Headers) -> bool:
        """As Layout.claims; `.weight_scale` must be U8 or missing (then `describe` raises): NVFP4's codes have the same
        name, and its scales are in e4m3.
        """
        scales = tensors.get(".weight_scale")
        return super().claims(tensors) and (scales is None or scales.dtype == "U8")

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        """As Layout.describe, from headers alone. ValueError for scales that are missing or do not fit the codes."""
        codes, scales = tensors[self.codes], tensors.get(".weight_scale")
        expected = [codes.shape[0], 2 * codes.shape[1] // BLOCK] if len(codes.shape) == 2 else None
        if scales is None or expected is None or list(scales.shape) != expected or 2 * codes.shape[1] % BLOCK:
            flaw = "is missing" if scales is None else f"is {scales.dtype}{list(scales.shape)}"
            raise ValueError(
                f"{codes.file}: {name}: .weight_scale {flaw}; codes U8{list(codes.shape)} in blocks of {BLOCK} need "
                f"U8{expected or '[out, in / 32]'}"
            )
        return FoundWeight(name, tensors, (codes.shape[0], 2 * codes.shape[1]))

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> MXFP4:
        """As Layout.read. ValueError for a scale of 255, NaN in e8m0."""
        leaves: list = [arrays[self.codes], _checked_scales(weight, ".weight_scale", arrays)]
        return MXFP4(*leaves, dtype_name=dtype_name)

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        assert isinstance(weight, MXFP4)
        return {
            self.codes: file_tensor(weight.codes, lambda w: w.codes),
            ".weight_scale": file_tensor(weight.scales, lambda w: w.scales),
        }

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """As Layout.config, with activations in 16 bits; `rounding_activations` changes that."""
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
        """The entry of compressed-tensors' scheme MXFP4 (W4A4), with dynamic scales of blocks of 32; `config` is not
        changed.
        """
        groups: Config = config["config_groups"]
        inputs = _NUMBER | {"dynamic": True}
        return config | {
            "config_groups": {name: group | {"input_activations": inputs} for name, group in groups.items()}
        }


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
