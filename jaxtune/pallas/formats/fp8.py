"""FP8: weights in e4m3 (OCP 8-bit Floating Point Specification) whose blocks share a scale.

A block is a row (jaxtune's choice for 16-bit weights; compressed-tensors calls it a channel), 128 x 128 numbers (as
Qwen and DeepSeek publish their models), or the whole matrix. A number is its code times its block's scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments, describe
from jaxtune.pallas.fitted import Fitted
from jaxtune.pallas.formats.division import divide
from jaxtune.pallas.formats.layout import FLOATS as FILE_FLOATS
from jaxtune.pallas.formats.layout import (
    SERVED_IN_16_BITS,
    Arrays,
    Config,
    Export,
    FileTensor,
    Format,
    FoundWeight,
    Header,
    Headers,
    Layout,
    Read,
    Settings,
    file_tensor,
)
from jaxtune.pallas.formats.stored import Stored
from jaxtune.pallas.meshes import on_any_mesh

LARGEST = 448.0  # the largest number of e4m3
LEAST_SCALE = float(np.finfo(np.float32).tiny)  # smaller numbers are zero on some devices, which would divide by it
# The time of an FP8 product, with the rounding of the other operand, over that of a 16-bit product: (with a scale per
# row, with a scale per 128 x 128 numbers).
_PRODUCT_TIME = Fitted({("H200", "mosaic"): ((0.56, 0.72), "two steps of the 8B shape")})
# (rows, columns) of a block; None: all of the matrix.
Block = tuple[int | None, int | None]
ROW, TILE, MATRIX = (1, None), (128, 128), (None, None)
_KINDS: dict[Block, str] = {ROW: "each row", TILE: "each 128 x 128 numbers", MATRIX: "the matrix"}  # in messages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8(Stored):
    """A tensor [..., out, in] in e4m3 with a scale for each block; a number is its code times its block's scale."""

    codes: jax.Array  # float8_e4m3fn[..., out, in]
    # float of 16 or 32 bits, [..., blocks along out, blocks along in]; the last block along an axis may be shorter
    scales: jax.Array
    # (rows, columns) that share a scale; None stands for all of them: ROW is (1, None), TILE is (128, 128), and MATRIX
    # is (None, None)
    block: Block = dataclasses.field(default=ROW, metadata=dict(static=True))
    # the dtype that `decode` gives by default
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))
    # None, or the codes once more, float8_e4m3fn[..., in, out], for products that sum along `out`, which otherwise copy
    # the codes transposed. Only frozen weights of a run's programs have them, if its plan says so; no file does
    transposed: jax.Array | None = None

    compute = "fp8"  # the value of model.compute with which products multiply the codes without decoding them
    scale_axes = (-1,)  # of a scale for each row, as `encode` makes by default; `rescaled` allows no other

    @staticmethod
    @on_any_mesh
    def encode(array: jax.Array | np.ndarray, block: Block = ROW) -> FP8:
        """Quantises an array [..., out, in] in bfloat16, float16 or float32; the bytes are equal on every device.

        A block's scale is its largest magnitude over 448 in float32, at least 2^-126, and 1 for a block of zeros.
        Numbers below 2^-126, which are zero on some devices, become zero. Scaled numbers are rounded to nearest.
        Numbers that are not finite give a scale that is not finite.

          block: ROW, TILE (smaller at the end of an axis that 128 does not divide) or MATRIX.
        Raises:
          TypeError: another dtype.
          ValueError: fewer than two axes, no element, or another block.
        """
        check = Arguments("FP8.encode")
        check.array("array", array, "... out in", FLOATS)
        if not array.size:
            raise ValueError(f"FP8.encode: array has the shape {array.shape}; it must have an element at least")
        if block not in (ROW, TILE, MATRIX):
            raise ValueError(f"FP8.encode: block = {block}: must be one of {ROW}, {TILE}, {MATRIX}")
        return _encode(jnp.asarray(array), block)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def problem(self) -> str | None:
        if str(self.codes.dtype) != "float8_e4m3fn" or self.codes.ndim < 2:
            return f"codes are {describe(self.codes)}; they must be float8_e4m3fn[..., out, in]"
        expected = (*self.shape[:-2], *scale_shape(self.shape, self.block))
        if tuple(self.scales.shape) != expected or not jnp.issubdtype(self.scales.dtype, jnp.floating):
            return (
                f"scales are {describe(self.scales)}; shape {self.shape} in blocks of {self.block} asks for {expected}"
            )
        if self.transposed is not None:
            shape, codes = (*self.shape[:-2], *self.shape[:-3:-1]), self.transposed
            if (tuple(codes.shape), codes.dtype) != (shape, self.codes.dtype):
                return f"transposed codes are {describe(codes)}; they must be float8_e4m3fn{list(shape)}"
        return None

    def with_transposed(self, make: Callable = jnp.matrix_transpose) -> FP8:
        return dataclasses.replace(self, transposed=make(self.codes))

    def largest(self) -> jax.Array:
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, LARGEST)).decode("float32")

    def block_length(self, axis: int) -> int | None:
        return 1 if axis < self.ndim - 2 else self.block[axis - self.ndim + 2]

    def rescaled(self, factor: np.ndarray) -> FP8:
        """As Stored.rescaled; only for a scale for each row (asserted)."""
        assert self.block == ROW
        return dataclasses.replace(self, scales=jnp.asarray(np.float32(np.float64(self.scales) * factor)))

    def product_time(self, as_stored: bool, device: str) -> float:
        """As Stored.product_time: measured, below 1, for products in FP8. A device that was not measured gets the
        H200's numbers.
        """
        return _PRODUCT_TIME.of("mosaic", device)[self.block == TILE] if as_stored else 1.0

    def decoded_share(self, as_stored: bool) -> float:
        """As Stored.decoded_share: nothing is decoded for products in FP8, but the codes of experts [E, out, in] are
        transposed in one of the two directions, which moves as many bytes.
        """
        return 1.0 if not as_stored else 0.5 if self.ndim == 3 else 0.0

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        with jax.named_scope("dequantise"):
            return (self.codes.astype(jnp.float32) * self.scales_of_numbers()).astype(dtype or self.dtype)

    def scales_of_numbers(self) -> jax.Array:
        """The scale of each number, float32: [..., out, 1] with a scale for each row, [..., 1, 1] for the matrix, and
        [..., out, in], each repeated 128 times along both axes, for TILE.
        """
        scales = self.scales.astype(jnp.float32)
        for axis, size in zip((-2, -1), self.block, strict=True):
            if size is not None and size > 1:
                scales = jnp.repeat(scales, size, axis=axis)
                scales = jax.lax.slice_in_dim(scales, 0, self.shape[axis], axis=scales.ndim + axis)
        return scales


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """(blocks along out, blocks along in) of a tensor [..., out, in]; a last block that is not full counts.

    block: (rows, columns) that share a scale; None: all of them.
    """
    along = [1 if size is None else -(-length // size) for length, size in zip(shape[-2:], block, strict=True)]
    return along[0], along[1]


def scale_of(largest: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales that are safe to divide by: at least LEAST_SCALE, and 1 for blocks of zeros (largest below LEAST_SCALE).
    NaN stays.

      largest: float32, the largest magnitude of each block.
      scale: float32 of the same shape, `largest` / 448, divided exactly or multiplied by the reciprocal.
    """
    return jnp.where(largest < LEAST_SCALE, 1.0, jnp.where(scale < LEAST_SCALE, LEAST_SCALE, scale))


@functools.partial(jax.jit, static_argnums=1)
def _encode(array: jax.Array, block: Block) -> FP8:
    """Quantises [..., out, in] with one scale for each block; the last blocks of an axis may be smaller."""
    wide = array.astype(jnp.float32)
    wide = jnp.where(jnp.abs(wide) < LEAST_SCALE, jnp.copysign(jnp.zeros_like(wide), wide), wide)
    rows, columns = (length if size is None else size for length, size in zip(wide.shape[-2:], block, strict=True))
    out, in_ = scale_shape(wide.shape, block)
    padding = [(0, 0)] * (wide.ndim - 2) + [(0, out * rows - wide.shape[-2]), (0, in_ * columns - wide.shape[-1])]
    magnitudes = jnp.abs(jnp.pad(wide, padding) if any(map(any, padding)) else wide)
    largest = magnitudes.reshape(*wide.shape[:-2], out, rows, in_, columns).max((-3, -1))
    scales = scale_of(largest, divide(largest, jnp.full_like(largest, LARGEST)))
    stored = FP8(jnp.zeros(array.shape, jnp.float8_e4m3fn), scales, block, array.dtype.name)
    scaled = divide(wide, jnp.broadcast_to(stored.scales_of_numbers(), wide.shape))
    # Clipped, because a rounded scale may be slightly too small, and a number above 448 would become NaN.
    codes = jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return dataclasses.replace(stored, codes=codes)


# ---- in checkpoints

_ADVICE = "use the 16-bit original, or a checkpoint of one of these kinds"


class FP8Files(Layout):
    """The layout of FP8 checkpoints: codes in F8_E4M3 in `X.weight`, and one tensor of scales, of two kinds.

    - `quant_method: fp8` (Qwen, DeepSeek): `X.weight_scale_inv` has a scale for each 128 x 128 numbers or, in files
      that are read, one for the matrix. Despite its name, codes are multiplied by it.
    - `quant_method: compressed-tensors` with `format: float-quantized` (vLLM's llm-compressor): `X.weight_scale` has
      one for each row ("channel"), for the matrix ("tensor") or, in files that are read, for each 128 x 128 numbers
      ("block").

    The written entry tells servers such as vLLM to quantise activations too, with scales computed while they serve;
    checkpoints that do not say so are read too.
    """

    title = "FP8 (quant_method fp8, or compressed-tensors' float-quantized)"
    codes = ".weight"
    codes_dtype = "F8_E4M3"
    scale_keys = (".weight_scale_inv", ".weight_scale")

    def recognises(self, settings: Settings) -> bool:
        method, kind = settings.get("quant_method"), settings.get("format")
        return method == "fp8" or (method == "compressed-tensors" and kind == "float-quantized")

    def check(self, settings: Settings) -> None:
        """As Layout.check. Supported are e4m3 with a scale for each row, 128 x 128 numbers (compressed-tensors' block
        size is left to `describe`) or the matrix, and activation scales that are dynamic or missing; of
        compressed-tensors no quantised key/value cache, and no quantization_status but "compressed".
        """
        method = settings.get("quant_method")
        if method == "fp8":
            supported = {"activation_scheme": ("dynamic", None), "fmt": ("e4m3", None)}
            size = settings.get("weight_block_size")
            if size is not None and list(size) != list(TILE):
                raise ValueError(f"config.json: quantization_config.weight_block_size = {size}: must be {list(TILE)}")
        else:
            supported = {"kv_cache_scheme": (None,), "quantization_status": ("compressed", None)}
            for name, group in (settings.get("config_groups") or {}).items():
                _check_group(f"config_groups.{name}", group)
        for key, values in supported.items():
            if settings.get(key) not in values:
                raise ValueError(
                    f"config.json: quantization_config.{key} = {settings.get(key)!r}: of {method!r} only "
                    f"{values[0]!r} is supported; {_ADVICE}"
                )

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        """As Layout.describe, from headers alone: `details` is the block, which follows from the key and the shape of
        the scales. ValueError unless there is exactly one fitting tensor of scales and the codes are a matrix.
        """
        codes = tensors[self.codes]
        keys = [key for key in self.scale_keys if key in tensors]
        if len(keys) != 1:
            module = name.removesuffix(self.weight)
            raise ValueError(
                f"{codes.file}: {name} is stored as {codes.dtype} and has {len(keys)} scales; it must have one of "
                f"{', '.join(module + key for key in self.scale_keys)}"
            )
        scales, block = tensors[keys[0]], None
        if len(codes.shape) == 2:
            # A small matrix can be a single block of 128 x 128, which differs from a scale for the matrix in its name.
            shapes: dict[Block, tuple] = {MATRIX: ((), (1,)), TILE: (scale_shape(codes.shape, TILE),)}
            if keys[0] == ".weight_scale":
                shapes = {MATRIX: ((), (1,), (1, 1)), ROW: ((codes.shape[0], 1), (codes.shape[0],))} | shapes
            block = next((kind for kind, accepted in shapes.items() if scales.shape in accepted), None)
        if block is None or scales.dtype not in FILE_FLOATS:
            raise ValueError(
                f"{scales.file}: {scales.name} is {scales.dtype}{list(scales.shape)}, which is no scale of {name} "
                f"{list(codes.shape)}: it must be a float for the matrix, for each row, or for each 128 x 128 numbers"
            )
        return FoundWeight(name, tensors, codes.shape, block)

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> FP8:
        """As Layout.read. ValueError for a scale that is out of range in `dtype_name` (`_check_scales`)."""
        codes, (key,) = arrays[self.codes], [key for key in self.scale_keys if key in arrays]
        block: Any = weight.details
        _check_scales(weight.tensors[key], arrays[key].astype(np.float32), codes, block, dtype_name)
        leaves: list[Any] = [codes, arrays[key].reshape(scale_shape(codes.shape, block))]
        return FP8(*leaves, block=block, dtype_name=dtype_name)

    def joining(self, pieces: Sequence[FoundWeight], per_expert: int) -> str | None:
        first, rows = pieces[0], pieces[0].shape[0]
        kinds = {(p.details, *(h.dtype for key, h in p.tensors.items() if key != self.codes)) for p in pieces}
        if len(kinds) > 1:
            return "the scales of its experts' matrices are of different kinds"
        if per_expert > 1 and (first.details == MATRIX or (first.details == TILE and rows % TILE[0])):
            return (
                f"{first.name} has {rows} rows in FP8 blocks that would run into those of the matrix beside it: such "
                "experts can only be loaded from 16 bits"
            )
        return None

    def differing(self, weights: Sequence[Stored]) -> str | None:
        """As Layout.differing: `config` writes the kind of block of the first weight, and servers read all weights by
        it.
        """
        blocks = {weight.block for weight in weights if isinstance(weight, FP8)}
        kinds = [words for block, words in _KINDS.items() if block in blocks]
        return f"FP8 weights have scales for {' and others for '.join(kinds)}" if len(kinds) > 1 else None

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        assert isinstance(weight, FP8)
        shape = (1,) if weight.block == MATRIX else tuple(weight.scales.shape)
        scales = FileTensor(shape, np.dtype(weight.scales.dtype), lambda w: w.scales.reshape(shape))
        key = ".weight_scale_inv" if weight.block == TILE else ".weight_scale"
        return {self.codes: file_tensor(weight.codes, lambda w: w.codes), key: scales}

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """As Layout.config: the entry of `quant_method: fp8` if the first weight's scales are for 128 x 128 numbers,
        else of compressed-tensors.
        """
        first = weights[0]
        assert isinstance(first, FP8)
        if first.block == TILE:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(TILE),
                "modules_to_not_convert": plain,
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        strategy = "tensor" if first.block == MATRIX else "channel"
        group = {
            "targets": ["Linear"],
            "weights": number | {"strategy": strategy, "dynamic": False},
            "input_activations": number | {"strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": plain,
        }


def _check_group(where: str, group: Any) -> None:
    """ValueError unless an entry of config_groups describes symmetric floats of 8 bits, with scales computed while
    serving.
    """
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    rules: list[tuple[str, Any, tuple]] = [
        ("weights.type", weights.get("type"), ("float",)),
        ("weights.num_bits", weights.get("num_bits"), (8,)),
        ("weights.strategy", weights.get("strategy"), ("channel", "tensor", "block")),
        ("weights.symmetric", weights.get("symmetric", True), (True,)),
        ("input_activations.dynamic", inputs.get("dynamic", True), (True,)),
    ]
    for key, value, allowed in rules:
        if value not in allowed:
            raise ValueError(
                f"config.json: quantization_config.{where}.{key} = {value!r}: must be "
                f"{' or '.join(map(repr, allowed))}; {_ADVICE}"
            )


def _check_scales(entry: Header, scales: np.ndarray, codes: np.ndarray, block: Block, dtype_name: str) -> None:
    """ValueError for a finite scale, float32 in the file's shape, that is negative, below 2^-126 or too large for
    `dtype_name`.
    """
    largest_scale = min(float(jnp.finfo(dtype_name).max), float(np.finfo(np.float32).max)) / LARGEST
    wrong = np.isfinite(scales) & ~((scales >= LEAST_SCALE) & (scales <= largest_scale))
    zeros = wrong & (scales == 0)
    if zeros.any():
        sizes: Any = codes.view(np.uint8) & 0x7F  # without their signs
        where: Any = zeros.reshape(scale_shape(codes.shape, block))
        if not (np.asarray(FP8(sizes, where, block).scales_of_numbers()) * sizes).any():
            wrong &= ~zeros
    if wrong.any():
        values = ", ".join(f"{value:.4g}" for value in np.unique(scales[wrong])[:4])
        raise ValueError(
            f"{entry.file}: {entry.name}: {wrong.sum()} of {wrong.size} scales cannot be right ({values}): in "
            f"{dtype_name} a scale must be from {LEAST_SCALE:.4g} to {largest_scale:.4g}, or 0 of numbers that are "
            f"all 0; fetch the file again{', or load in bfloat16' if dtype_name == 'float16' else ''}"
        )


FORMAT = Format(
    name="fp8",
    title="in eight bits (FP8)",
    kinds=(FP8,),
    layouts=(FP8Files(),),
    flag="load_in_fp8",
    export=Export("fp8", keeps=SERVED_IN_16_BITS),
)
