"""NVFP4: blocks of 16 four-bit numbers (e2m1) that share a scale in e4m3, and one float32 scale for the tensor.

A number is TABLE[code] times its block's scale, divided by the tensor's scale (compressed-tensors, whose files contain
448 * 6 / the largest magnitude) or multiplied by it (nvidia-modelopt, whose files contain the inverse). The scale stays
as the file has it, so that a weight is written again byte for byte.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments, describe
from jaxtune.pallas.formats.division import divide
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
from jaxtune.pallas.formats.mxfp4 import LARGEST, LARGEST_CODES, TABLE, packed_e2m1, to_e2m1, unpacked
from jaxtune.pallas.formats.stored import Stored
from jaxtune.pallas.meshes import on_any_mesh

BLOCK = 16  # numbers that share a scale
_LARGEST_SCALE, _LARGEST_BITS = 448.0, 0x7E  # the largest number of e4m3, and its byte
# The number of each byte in e4m3, for kernels that look up a block's scale by its stored byte.
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
# The scale of a block of zeros, and of activations whose scale would round to zero, as in compressed-tensors; that of
# weights becomes the least that e4m3 has.
_SCALE_OF_ZEROS, _LEAST_SCALE = 0.125, 2.0**-9
_LARGEST_TENSOR_SCALE = 2.0**100  # so that its products and quotients with scales of blocks are finite and normal
# A block's largest number is mapped to 6 to 4: by e4m3's scale for 6, or by one that is up to so many numbers larger.
_STEPS = 6
_UNITS = 1024  # of errors, which are summed as whole numbers: the sum is the same in any order, so on every device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4(Stored):
    """A tensor [..., out, in] in NVFP4, `in` in blocks of 16. A number is TABLE[code] times its block's scale, divided
    or multiplied by tensor_scale.
    """

    codes: jax.Array  # uint8[..., out, in / 2], two codes each, the first in the low four bits
    scales: jax.Array  # float8_e4m3fn[..., out, in / 16], one for each block
    # float32[..., 1, 1], one for each matrix; or float32[..., out, 1], one for each row, of experts [E, out, in] whose
    # matrices were quantised and stored separately
    tensor_scale: jax.Array
    # the scale of the whole tensor with which servers quantise activations, as the file has it, in the shape of
    # tensor_scale; None if the file has none. It is kept only to be written to files again: products here do not use it
    input_scale: jax.Array | None = None
    # True: scales are divided by tensor_scale (compressed-tensors); False: multiplied by it (nvidia-modelopt)
    divides: bool = dataclasses.field(default=True, metadata=dict(static=True))
    # the dtype that `decode` gives by default
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))

    scale_axes = (-2, -1)
    row_block = BLOCK

    @staticmethod
    @on_any_mesh
    def encode(array: jax.Array | np.ndarray) -> NVFP4:
        """Quantises an array [..., out, in] in bfloat16, float16 or float32 (`divides` is True). The tensor's scale is
        compressed-tensors'; a block's is the one of least squared error of those that map its largest number to 6 to 4.
        The bytes are equal on every device. Numbers of a decoded weight stay on its grid.

        Raises:
          TypeError: another dtype.
          ValueError: fewer than two axes, no element, or rows that are not whole blocks.
        """
        check = Arguments("NVFP4.encode")
        check.array("array", array, "... out in", FLOATS)
        if not array.size or array.shape[-1] % BLOCK:
            raise ValueError(
                f"NVFP4.encode: array has the shape {tuple(array.shape)}; the last axis must be a multiple of {BLOCK}"
            )
        return _encode(jnp.asarray(array), None, False)

    @staticmethod
    def encode_activations(x: jax.Array, scale: jax.Array) -> NVFP4:
        """Quantises float[..., tokens, n], n a multiple of 16, under an observed scale of the whole tensor, by
        compressed-tensors' rule for `dynamic: local`. Scales of blocks follow from their largest magnitudes. A block
        with a number beyond 448 * 6 / scale gets the scale 448, and such numbers become that bound.

          scale: float32[], `global_scale` of the largest observed magnitude (input_global_scale in files).
        """
        return _encode(x, jnp.broadcast_to(scale, (*x.shape[:-2], 1, 1)), False)

    @staticmethod
    def global_scale(largest: jax.Array) -> jax.Array:
        """448 * 6 / largest, float32, the scale of a whole tensor (compressed-tensors' generate_gparam of float32): a
        block's largest scale becomes the largest number of e4m3. It is 1 for zeros, and at most 2^100.

          largest: float32, the largest magnitude of each tensor, whatever dtype its numbers have.
        """
        least = jnp.float32(LARGEST * _LARGEST_SCALE / _LARGEST_TENSOR_SCALE)
        bounded = jnp.maximum(largest, least)
        inverse = divide(jnp.ones_like(bounded), bounded)  # as torch divides a number by a tensor
        return jnp.where(largest == 0, 1.0, inverse * (LARGEST * _LARGEST_SCALE))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def kind(self) -> str:
        return "NVFP4" if self.divides else "NVFP4, multiplied"

    def problem(self) -> str | None:
        rows, numbers = self.shape[:-1], self.shape[-1]
        if str(self.codes.dtype) != "uint8" or self.codes.ndim < 2 or numbers % BLOCK:
            return f"codes are {describe(self.codes)}; they must be uint8[..., out, in / 2], and in whole blocks"
        if str(self.scales.dtype) != "float8_e4m3fn" or tuple(self.scales.shape) != (*rows, numbers // BLOCK):
            return f"scales are {describe(self.scales)}; they must be float8_e4m3fn{[*rows, numbers // BLOCK]}"
        for name in ("tensor_scale", "input_scale"):
            array, shapes = getattr(self, name), [(*rows[:-1], count, 1) for count in (1, rows[-1])]
            if array is not None and (str(array.dtype) != "float32" or tuple(array.shape) not in shapes):
                return f"{name} is {describe(array)}; it must be float32{list(shapes[0])} or {list(shapes[1])}"
        return None

    def block_length(self, axis: int) -> int | None:
        return BLOCK if axis == self.ndim - 1 else 1

    def rescaled(self, factor: np.ndarray) -> NVFP4:
        scale = np.float64(self.tensor_scale)
        return dataclasses.replace(
            self, tensor_scale=jnp.asarray(np.float32(scale / factor if self.divides else scale * factor))
        )

    def of_numbers(self, numbers: jax.Array) -> NVFP4:
        """As Stored.of_numbers: a block of 1, 2 and 4 scales is one of 1.5, 3 and 6 scales two thirds as large, too."""
        blocks = (*self.scales.shape, BLOCK)
        wrong = (self.decode(numbers.dtype) != numbers).reshape(blocks).any(-1)
        other = _encode(numbers, None, True)
        codes = jnp.where(jnp.repeat(wrong, BLOCK // 2, axis=-1), other.codes, self.codes)
        return dataclasses.replace(self, codes=codes, scales=jnp.where(wrong, other.scales, self.scales))

    def with_input_scale(self, scale: float) -> NVFP4:
        """As Stored.with_input_scale; `scale` is `global_scale`'s, not inverted, because encoded weights have `divides`
        True.
        """
        input_scale = jnp.full((*self.shape[:-2], 1, 1), scale, jnp.float32)
        return dataclasses.replace(self, input_scale=input_scale)

    def largest(self) -> jax.Array:
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, LARGEST_CODES)).decode("float32")

    def shard_axes(self, axis: int, shards: int) -> tuple[int | None, ...] | None:
        """As Stored.shard_axes. The scales of the tensor and of activations are divided only if they have an entry for
        each index of the axis, such as each expert; otherwise each device has all of them.
        """
        axes = super().shard_axes(axis, shards)
        if axes is None:
            return None
        tensor_scale_axis = axis if self.tensor_scale.shape[axis] == self.shape[axis] else None
        return (
            axis,
            axis,
            *(tensor_scale_axis for scale in (self.tensor_scale, self.input_scale) if scale is not None),
        )

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """As Stored.joined. Matrices that were quantised separately have different tensor scales, so the result has one
        for each row, [E, rows, 1]. Scales of activations are joined likewise, or dropped if some matrices have none.
        """
        if len({piece.input_scale is None for piece in pieces}) > 1:
            pieces = [dataclasses.replace(piece, input_scale=None) for piece in pieces]

        def by_rows(piece, scale):
            return None if scale is None else np.broadcast_to(np.asarray(scale), (piece.shape[0], 1))

        wide = [
            dataclasses.replace(
                piece,
                tensor_scale=by_rows(piece, piece.tensor_scale),
                input_scale=by_rows(piece, piece.input_scale),
            )
            for piece in pieces
        ]
        return super().joined(wide, shape)

    def piece(self, index: int, start: int, rows: int) -> Self:
        """As Stored.piece, with the tensor and input scales of the first row, [1, 1]: rows that are written as one
        matrix were quantised with one scale.
        """
        matrix = super().piece(index, start, rows)
        input_scale = None if matrix.input_scale is None else matrix.input_scale[:1]
        return dataclasses.replace(matrix, tensor_scale=matrix.tensor_scale[:1], input_scale=input_scale)

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> NVFP4:
        encoded = NVFP4.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16))
        scale = encoded.tensor_scale if self.divides else 1.0 / encoded.tensor_scale
        return dataclasses.replace(encoded, tensor_scale=scale, divides=self.divides)

    def block_scales(self) -> jax.Array:
        """The factor of each block's numbers, float32[..., out, in / 16]: its scale divided or multiplied by
        tensor_scale.
        """
        return _times_tensor_scale(self.scales.astype(jnp.float32), self.tensor_scale, self.divides)

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        with jax.named_scope("dequantise"):
            # Computed separately: fused with the numbers, XLA would compute each block's scale 16 times.
            scales = jax.lax.optimization_barrier(self.block_scales())
            nibbles = unpacked(self.codes)
            values = jnp.asarray(TABLE).at[nibbles].get(mode="promise_in_bounds").reshape(*scales.shape, BLOCK)
            return (values * scales[..., None]).astype(dtype or self.dtype).reshape(self.shape)


def _times_tensor_scale(scales: jax.Array, tensor_scale: jax.Array, divides: bool) -> jax.Array:
    """The factor of each block's numbers, float32[..., out, in / 16]; tensor_scale is [..., 1 or out, 1]."""
    tensor_scales = jnp.broadcast_to(tensor_scale, scales.shape)
    return divide(scales, tensor_scales) if divides else scales * tensor_scales


@functools.partial(jax.jit, static_argnums=2)
def _encode(array: jax.Array, tensor_scale: jax.Array | None, largest: bool) -> NVFP4:
    """Quantises [..., out, in], whose rows are whole blocks. largest: of equally good scales of a block, not the least.

    tensor_scale: float32[..., 1, 1]; None: from the largest number, and scales of blocks are `_fitted`.
    """
    wide, fitted = array.astype(jnp.float32), tensor_scale is None
    if tensor_scale is None:
        tensor_scale = NVFP4.global_scale(jnp.abs(wide).max((-2, -1), keepdims=True))
    blocks = wide.reshape(*wide.shape[:-1], -1, BLOCK)
    magnitude = jnp.abs(blocks).max(-1)
    sixth = divide(magnitude, jnp.full_like(magnitude, LARGEST))
    scales = jnp.minimum(sixth * tensor_scale, _LARGEST_SCALE).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    least = jnp.where(magnitude > 0, _LEAST_SCALE, _SCALE_OF_ZEROS) if fitted else _SCALE_OF_ZEROS
    scales = jnp.where(scales == 0, least, scales).astype(jnp.float8_e4m3fn)
    if fitted:
        scales = _fitted(jnp.abs(blocks), scales, tensor_scale, largest)
    block_factors = _times_tensor_scale(scales.astype(jnp.float32), tensor_scale, True)[..., None]
    scaled = divide(blocks, jnp.broadcast_to(block_factors, blocks.shape))
    size = to_e2m1(jnp.minimum(jnp.abs(scaled), LARGEST))
    codes = packed_e2m1(size, scaled < 0, array.shape)
    return NVFP4(codes, scales, tensor_scale, None, True, array.dtype.name)


def _fitted(sizes: jax.Array, scales: jax.Array, tensor_scale: jax.Array, largest: bool) -> jax.Array:
    """For each block its scale or the larger one, of `_STEPS`, with the least sum of squared errors; of several the
    least or the `largest`.

    sizes: float32[..., out, in / 16, 16], the magnitudes of numbers.
    scales: float8_e4m3fn[..., out, in / 16], that map the largest number of each block to 6.
    """
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)

    def tried(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = jnp.maximum(bits, jnp.minimum(bits + step, _LARGEST_BITS)).astype(jnp.uint8)
        scale = jax.lax.bitcast_convert_type(found, jnp.float8_e4m3fn).astype(jnp.float32)
        inverse = divide(jnp.broadcast_to(tensor_scale, scale.shape), scale)[..., None]
        scaled = sizes * inverse
        rounded = to_e2m1(jnp.minimum(scaled, LARGEST))
        error = jnp.round(scaled * _UNITS).astype(jnp.int32) - (rounded * _UNITS).astype(jnp.int32)
        return found, jnp.square(error).sum(-1).astype(jnp.float32) * jnp.square(scale)

    def better(index: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found, error = tried(index)
        is_better = error <= best[1] if largest else error < best[1]
        return jnp.where(is_better, found, best[0]), jnp.minimum(error, best[1])

    best, _ = jax.lax.fori_loop(1, _STEPS + 1, better, tried(jnp.int32(0)))
    return jax.lax.bitcast_convert_type(best, jnp.float8_e4m3fn)


# ---- in checkpoints


class _Files(Layout):
    """What both layouts share; `scale_keys`: of the blocks' scales, the tensor's, and that of activations."""

    divides: bool  # whether files in this layout have tensor scales by which scales are divided (NVFP4.divides)
    scalar: tuple[int, ...]  # the shape of the tensor's scale in files that are written, (1,) or ()

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        codes = tensors[self.codes]
        rows, pairs = codes.shape if len(codes.shape) == 2 else (0, 0)
        where = f"{codes.file}: {name}"
        scales_key, tensor_scale_key, _ = self.scale_keys
        expected: dict[str, tuple[str, tuple]] = {scales_key: ("F8_E4M3", ((rows, 2 * pairs // BLOCK),))}
        expected |= dict.fromkeys(self.scale_keys[1:], ("F32", ((), (1,))))
        for key, (dtype, shapes) in expected.items():
            header = tensors.get(key)
            if header is None and key not in (scales_key, tensor_scale_key):
                continue
            if header is None or header.dtype != dtype or header.shape not in shapes or not rows or 2 * pairs % BLOCK:
                flaw = "is missing" if header is None else f"is {header.dtype}{list(header.shape)}"
                raise ValueError(
                    f"{where}: {key} {flaw}; codes {codes.dtype}{list(codes.shape)} in blocks of {BLOCK} need "
                    f"{dtype}{list(shapes[0])}"
                )
        return FoundWeight(name, tensors, (rows, 2 * pairs))

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> NVFP4:
        """As Layout.read. ValueError unless the scales of the tensor and of activations, if any, are positive and
        finite.
        """
        scales_key, tensor_scale_key, input_scale_key = self.scale_keys
        leaves: list = [arrays[self.codes], arrays[scales_key]]
        for key in (tensor_scale_key, input_scale_key):
            value = arrays[key].reshape(1, 1) if key in arrays else None
            if value is not None and not (np.isfinite(value) & (value > 0)).all():
                raise ValueError(
                    f"{weight.where}: {key} is {value.item():.4g}; it must be positive: fetch the file again"
                )
            leaves.append(value)
        return NVFP4(*leaves, divides=self.divides, dtype_name=dtype_name)

    def can_store(self, weight: Stored) -> bool:
        """Whether `divides` is the layout's: the tensor's scale is written unchanged, and readers divide or multiply by
        it.
        """
        return isinstance(weight, NVFP4) and weight.divides == self.divides

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        assert isinstance(weight, NVFP4)
        scales_key, tensor_scale_key, input_scale_key = self.scale_keys
        shape, float32 = self.scalar, np.dtype(np.float32)
        entries = {
            self.codes: file_tensor(weight.codes, lambda w: w.codes),
            scales_key: file_tensor(weight.scales, lambda w: w.scales),
            tensor_scale_key: FileTensor(shape, float32, lambda w: w.tensor_scale.reshape(shape)),
        }
        if weight.input_scale is not None:
            entries[input_scale_key] = FileTensor(shape, float32, lambda w: w.input_scale.reshape(shape))
        return entries


class CompressedTensors(_Files):
    """The layout of compressed-tensors' `nvfp4-pack-quantized`, also for weights that jaxtune quantises to NVFP4.

    The tensors are `X.weight_packed` uint8[out, in / 2], `X.weight_scale` e4m3[out, in / 16], `X.weight_global_scale`
    float32[1], by which scales are divided, and, if activations are quantised too, `X.input_global_scale` float32[1].
    """

    title = "NVFP4 of compressed-tensors (nvfp4-pack-quantized)"
    codes = ".weight_packed"
    codes_dtype = "U8"
    scale_keys = (".weight_scale", ".weight_global_scale", ".input_global_scale")
    divides = True
    scalar = (1,)

    def recognises(self, settings: Settings) -> bool:
        return (settings.get("quant_method"), settings.get("format")) == ("compressed-tensors", "nvfp4-pack-quantized")

    def check(self, settings: Settings) -> None:
        check_weights(settings, {"num_bits": 4, "type": "float", "group_size": BLOCK, "symmetric": True})

    def claims(self, tensors: Headers) -> bool:
        return super().claims(tensors) and ".weight_global_scale" in tensors

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """As Layout.config; activations are quantised if every weight has a scale of activations."""
        number = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": BLOCK}
        number |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        inputs = all(isinstance(weight, NVFP4) and weight.input_scale is not None for weight in weights)
        group = {
            "targets": ["Linear"],
            "weights": number | {"dynamic": False},
            "input_activations": number | {"dynamic": "local"} if inputs else None,
            "output_activations": None,
            "format": "nvfp4-pack-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": plain,
        }


class ModelOpt(_Files):
    """The layout of nvidia-modelopt's export for Hugging Face (`quant_method: modelopt`, `quant_algo: NVFP4`).

    The tensors are `X.weight` uint8[out, in / 2], `X.weight_scale` e4m3[out, in / 16], `X.weight_scale_2` float32[], by
    which scales are multiplied, and, if activations are quantised too, `X.input_scale` float32[]. `X.k_scale` and
    `X.v_scale`, for FP8 key/value caches, are left out, so that adapters fit the model with and without them.
    """

    title = "NVFP4 of nvidia-modelopt"
    codes = ".weight"
    codes_dtype = "U8"
    scale_keys = (".weight_scale", ".weight_scale_2", ".input_scale")
    ignored_keys = (".k_scale", ".v_scale")
    divides = False
    scalar = ()

    def recognises(self, settings: Settings) -> bool:
        algorithms = ("NVFP4", "W4A16_NVFP4")
        return settings.get("quant_method") == "modelopt" and settings.get("quant_algo") in algorithms

    def claims(self, tensors: Headers) -> bool:
        return super().claims(tensors) and ".weight_scale_2" in tensors

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """As Layout.config; quant_algo says that activations are quantised if every weight has a scale of them."""
        number = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
        inputs = all(isinstance(weight, NVFP4) and weight.input_scale is not None for weight in weights)
        group: Config = {"input_activations": number} if inputs else {}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
            "config_groups": {"group_0": group | {"weights": number, "targets": ["Linear"]}},
            "ignore": plain,
        }


FORMAT = Format(
    name="nvfp4",
    title="in four bits (NVFP4)",
    kinds=(NVFP4,),
    layouts=(CompressedTensors(), ModelOpt()),
    export=Export("nvfp4", keeps=SERVED_IN_16_BITS),
)
