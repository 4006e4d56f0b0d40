"""FP8: weights in e4m3 (OCP 8-bit Floating Point Specification) whose blocks share a scale.

A block is a row (which jaxtune uses for 16-bit weights, and which compressed-tensors calls a channel), 128 x 128
numbers (as Qwen and DeepSeek publish their models), or the whole matrix. A number is its code times the scale of its
block.

FP8 is the class of weights, with `FP8.encode`; `scale_shape` says how many scales a tensor has, and `scale_of` makes
scales safe to divide by. FP8Files describes how checkpoints store them, and FORMAT declares the format to
jaxtune.pallas.formats.
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
    Found,
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
    """A weight tensor [..., out, in] in e4m3 (8 bits for each number) with a scale for each block of numbers: a number
    of the tensor is its code times the scale of its block. It implements the interface of quantised weights, Stored.
    `encode` and FP8Files.read make weights; quant_matmul.in_e4m3 stores activations in it too."""

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
        """Quantises an array [..., out, in] in bfloat16, float16 or float32 on its device; the bytes are equal on every
        device. Loading with model.load_in "fp8" and exports call it, and quantisation-aware training, which also rounds
        activations with it.

        A block's scale is its largest magnitude over 448 in float32, at least 2^-126, and 1 for a block of zeros.
        Numbers whose magnitude is below 2^-126, which are zero on some devices, become zero. Scaled numbers are rounded
        to nearest. Numbers that are not finite give a scale that is not finite.

        Args:
          array: the tensor.
          block: (rows, columns) of the numbers that share a scale: ROW (1, None), one for each row; TILE (128, 128), of
            which the last ones along an axis are smaller where 128 does not divide its size; or MATRIX (None, None),
            one for each matrix.
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
        """The shape of the decoded tensor, [..., out, in], which is also that of its codes."""
        return tuple(self.codes.shape)

    def problem(self) -> str | None:
        """Returns the reason why the arrays cannot belong to one tensor, or None. The reason is that codes or scales
        have another dtype, that the codes have fewer than two axes, or that the scales' shape does not fit the codes'
        shape and `block`. `decode` and the operations refuse such a weight with this reason."""
        if str(self.codes.dtype) != "float8_e4m3fn" or self.codes.ndim < 2:
            return f"codes are {describe(self.codes)}; they must be float8_e4m3fn[..., out, in]"
        wanted = (*self.shape[:-2], *scale_shape(self.shape, self.block))
        if tuple(self.scales.shape) != wanted or not jnp.issubdtype(self.scales.dtype, jnp.floating):
            return f"scales are {describe(self.scales)}; shape {self.shape} in blocks of {self.block} asks for {wanted}"
        if self.transposed is not None:
            shape, codes = (*self.shape[:-2], *self.shape[:-3:-1]), self.transposed
            if (tuple(codes.shape), codes.dtype) != (shape, self.codes.dtype):
                return f"transposed codes are {describe(codes)}; they must be float8_e4m3fn{list(shape)}"
        return None

    def with_transposed(self, make: Callable = jnp.matrix_transpose) -> FP8:
        """The same weight with a copy of its codes transposed beside it, which `make` returns, so that no product
        copies them; or, if that returns None, without one (Stored.with_transposed)."""
        return dataclasses.replace(self, transposed=make(self.codes))

    def largest(self) -> jax.Array:
        """The largest magnitude that each number of the tensor could have with its scale, float32 in the tensor's
        shape. Quantisation-aware training with clipped gradients compares weights and activations with it
        (Stored.largest)."""
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, LARGEST)).decode("float32")

    def cut(self, axis: int) -> int | None:
        """The number of consecutive indices along `axis` that must stay in one part when the tensor is divided over
        devices (Stored.divided) or written in pieces (Stored.piece), so that no block is cut: the block's size along
        `out` or `in`, and 1 along leading axes. None means that the tensor cannot be divided along this axis, because
        one block spans all of it (`in` with a scale for each row, both axes with one scale for the matrix)."""
        axis = axis % self.ndim
        return 1 if axis < self.ndim - 2 else self.block[axis - self.ndim + 2]

    def rescaled(self, factor: np.ndarray) -> FP8:
        """The same codes with scales multiplied by `factor`, float64[..., out, 1]; the weight must have a scale for
        each row (asserted), and the result's scales are float32. An export calls it so that weights which training
        rounded to this format decode to exactly the same 16-bit numbers (Stored.rescaled)."""
        assert self.block == ROW
        return dataclasses.replace(self, scales=jnp.asarray(np.float32(np.float64(self.scales) * factor)))

    def product_time(self, as_stored: bool, device: str) -> float:
        """The measured time of a product of many tokens with this weight, as a multiple of the time of a 16-bit
        product, for the planner's forecast of a step.

        Args:
          as_stored: True: the product multiplies the codes in FP8, and the result is a measured number below 1, which
            differs between scales for 128 x 128 blocks and others. False: the product decodes the weight first and
            multiplies in 16 bits; the result is 1.
          device: the device's name, such as "NVIDIA H200"; one that was not measured gets the numbers of the H200.
        """
        return _PRODUCT_TIME.of("mosaic", device)[self.block == TILE] if as_stored else 1.0

    def decoded_share(self, as_stored: bool) -> float:
        """How many times a product in one direction (forward or backward), on average of both, writes the decoded
        tensor or a copy of its codes to memory, for the planner's forecast of a step.

        as_stored: False: the product decodes the weight first, and the result is 1. True: the product multiplies the
        codes in FP8 and decodes nothing. The result is then 0 for a matrix, and 0.5 for experts [E, out, in], whose
        codes are transposed in one of the two directions; that moves as many bytes as decoding. What a plan saves that
        keeps them transposed is subtracted from the whole step (planning/forecasts.codes_seconds).
        """
        return 1.0 if not as_stored else 0.5 if self.ndim == 3 else 0.0

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor [..., out, in] in `dtype`, or in that of dtype_name if it is None: each code times the
        scale of its block in float32, then cast."""
        with jax.named_scope("dequantise"):
            return (self.codes.astype(jnp.float32) * self.scales_of_numbers()).astype(dtype or self.dtype)

    def scales_of_numbers(self) -> jax.Array:
        """The scale of each number of the tensor, float32, in a shape that broadcasts to [..., out, in]: [..., out, 1]
        with a scale for each row, [..., 1, 1] with one for the matrix, and [..., out, in], each scale repeated 128
        times along both axes, with one for each 128 x 128 numbers. Encoding divides by it, decoding multiplies, and
        `_check_scales` finds by it the codes of each scale."""
        scales = self.scales.astype(jnp.float32)
        for axis, size in zip((-2, -1), self.block, strict=True):
            if size is not None and size > 1:
                scales = jnp.repeat(scales, size, axis=axis)
                scales = jax.lax.slice_in_dim(scales, 0, self.shape[axis], axis=scales.ndim + axis)
        return scales


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """(blocks along out, blocks along in) of a tensor whose shape is [..., out, in]: the last two axes of its scales. A
    last block that is not full counts too. `encode`, FP8.problem and the functions that read and check files need it.
    block: (rows, columns) that share a scale; None in place of a number stands for all rows or all columns."""
    along = [1 if size is None else -(-whole // size) for whole, size in zip(shape[-2:], block, strict=True)]
    return along[0], along[1]


def scale_of(largest: jax.Array, scale: jax.Array) -> jax.Array:
    """Makes the scales of blocks safe to divide by: returns `scale`, but at least LEAST_SCALE (2^-126, below which some
    devices take a number for zero), and 1 for blocks of zeros, whose largest magnitude is below LEAST_SCALE. FP8.encode
    calls it, and so do the functions and kernels that round activations.

    Args:
      largest: float32, the largest magnitude of each block.
      scale: float32 of the same shape: `largest` over 448, the largest number of e4m3; FP8.encode divides exactly, and
        kernels multiply by the reciprocal. NaN stays NaN.
    """
    return jnp.where(largest < LEAST_SCALE, 1.0, jnp.where(scale < LEAST_SCALE, LEAST_SCALE, scale))


@functools.partial(jax.jit, static_argnums=1)
def _encode(array: jax.Array, block: Block) -> FP8:
    """Quantises an array [..., out, in] to FP8 with a scale for each `block`, (rows, columns). It is the jitted
    computation of FP8.encode, which checks its arguments before."""
    wide = array.astype(jnp.float32)
    wide = jnp.where(jnp.abs(wide) < LEAST_SCALE, jnp.copysign(jnp.zeros_like(wide), wide), wide)
    rows, columns = (whole if size is None else size for whole, size in zip(wide.shape[-2:], block, strict=True))
    out, in_ = scale_shape(wide.shape, block)
    short = [(0, 0)] * (wide.ndim - 2) + [(0, out * rows - wide.shape[-2]), (0, in_ * columns - wide.shape[-1])]
    magnitudes = jnp.abs(jnp.pad(wide, short) if any(map(any, short)) else wide)
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
    """The layout of FP8 checkpoints, by which jaxtune/models/files reads and writes them: codes in F8_E4M3 in
    `X.weight`, with one tensor of scales beside them, of two kinds.

    - `quant_method: fp8` (Qwen, DeepSeek): `X.weight_scale_inv` has a scale for each 128 x 128 numbers or, in files
      that are read, one for the whole matrix, by which, despite its name, the codes are multiplied.
    - `quant_method: compressed-tensors` with `format: float-quantized` (vLLM's llm-compressor): `X.weight_scale` has
      one for each row ("channel"), for the whole matrix ("tensor") or, in files that are read, for each 128 x 128
      numbers ("block").

    The entry that is written with either kind tells servers such as vLLM to quantise activations too, with scales
    computed while they serve; checkpoints that do not say so are read too. The attributes and methods are explained in
    Layout.
    """

    title = "FP8 (quant_method fp8, or compressed-tensors' float-quantized)"
    codes = ".weight"
    codes_dtype = "F8_E4M3"
    others = (".weight_scale_inv", ".weight_scale")

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "fp8", or "compressed-tensors" with the format "float-quantized". The planner learns a
        checkpoint's format by it; the loader finds weights by `claims` (Layout.recognises)."""
        method, kind = settings.get("quant_method"), settings.get("format")
        return method == "fp8" or (method == "compressed-tensors" and kind == "float-quantized")

    def check(self, settings: Settings) -> None:
        """Raises ValueError, with key and value, if `settings`, a quantization_config that `recognises` accepts, has a
        setting that is not supported. Supported are weights in e4m3 with a scale for each row, each 128 x 128 numbers
        or the matrix, and activation scales that are computed while serving ("dynamic") or missing. Of
        compressed-tensors the size of blocks is not checked here but by `describe`, and a quantised key/value cache and
        a quantization_status other than "compressed" are refused too; of "fp8" these are not looked for. The loader
        calls it before it reads any tensor."""
        method = settings.get("quant_method")
        if method == "fp8":
            known = {"activation_scheme": ("dynamic", None), "fmt": ("e4m3", None)}
            size = settings.get("weight_block_size")
            if size is not None and list(size) != list(TILE):
                raise ValueError(f"config.json: quantization_config.weight_block_size = {size}: must be {list(TILE)}")
        else:
            known = {"kv_cache_scheme": (None,), "quantization_status": ("compressed", None)}
            for name, group in (settings.get("config_groups") or {}).items():
                _check_group(f"config_groups.{name}", group)
        for key, values in known.items():
            if settings.get(key) not in values:
                raise ValueError(
                    f"config.json: quantization_config.{key} = {settings.get(key)!r}: of {method!r} only "
                    f"{values[0]!r} is supported; {_ADVICE}"
                )

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the weight that a module's tensors store, from their headers alone. Returns a Found whose `details`
        is the block, (rows, columns), that shares a scale; it follows from the key and the shape of the tensor of
        scales. The loader calls it before it reads the tensors' content.

        Args:
          name: the weight's name in the model.
          tensors: {key, such as ".weight_scale": header}.
          read: a function that returns a tensor's bytes; it is not called, because the headers say everything.
        Raises:
          ValueError: there is not exactly one tensor of scales, or its shape or dtype does not fit the codes, or the
            codes are no matrix.
        """
        codes = tensors[self.codes]
        keys = [key for key in self.others if key in tensors]
        if len(keys) != 1:
            module = name.removesuffix(self.weight)
            raise ValueError(
                f"{codes.file}: {name} is stored as {codes.dtype} and has {len(keys)} scales; it must have one of "
                f"{', '.join(module + key for key in self.others)}"
            )
        scales, block = tensors[keys[0]], None
        if len(codes.shape) == 2:
            # A small matrix can be a single block of 128 x 128, which differs from a scale for the matrix in its name.
            shapes: dict[Block, tuple] = {MATRIX: ((), (1,)), TILE: (scale_shape(codes.shape, TILE),)}
            if keys[0] == ".weight_scale":
                shapes = {MATRIX: ((), (1,), (1, 1)), ROW: ((codes.shape[0], 1), (codes.shape[0],))} | shapes
            block = next((kind for kind, known in shapes.items() if scales.shape in known), None)
        if block is None or scales.dtype not in FILE_FLOATS:
            raise ValueError(
                f"{scales.file}: {scales.name} is {scales.dtype}{list(scales.shape)}, which is no scale of {name} "
                f"{list(codes.shape)}: it must be a float for the matrix, for each row, or for each 128 x 128 numbers"
            )
        return Found(name, tensors, codes.shape, block)

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> FP8:
        """Makes the quantised weight of one matrix, with numpy arrays as leaves, from the content of its tensors. The
        loader of checkpoints calls it.

        Args:
          found: what `describe` returned for the weight.
          arrays: {key: array}, the content of the tensors in `found`.
          dtype_name: the dtype that the model computes in, to which the weight is decoded by default.
        Raises:
          ValueError: a scale is out of range (`_check_scales`): negative, below 2^-126 unless it is 0 and so are its
            block's codes, or so large that 448 times it is not finite in `dtype_name`.
        """
        codes, (key,) = arrays[self.codes], [key for key in self.others if key in arrays]
        block: Any = found.details
        _check_scales(found.tensors[key], arrays[key].astype(np.float32), codes, block, dtype_name)
        leaves: list[Any] = [codes, arrays[key].reshape(scale_shape(codes.shape, block))]
        return FP8(*leaves, block=block, dtype_name=dtype_name)

    def joining(self, pieces: Sequence[Found], per_expert: int) -> str | None:
        """The reason why the matrices of a layer's experts, which a checkpoint stores one by one, cannot become one
        tensor [E, out, in], or None if they can. The reason is that their scales differ in block or dtype, or, if an
        expert has several matrices, that a block would cross from one into the next: each matrix has one scale, or 128
        x 128 blocks and rows that are no multiple of 128. The loader refuses the checkpoint with this reason.

        Args:
          pieces: the matrices, as `describe` found them, in the order of their rows in the tensor.
          per_expert: how many consecutive ones are the rows of one expert, such as 2 for gate and up.
        """
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
        """The reason why a single quantization_config cannot describe all of `weights`, which is that their scales are
        for blocks of different kinds; None if it can. `config` writes the kind of the first one's, by which servers
        read all of them. Saving and exporting a model fails with the reason."""
        blocks = {weight.block for weight in weights if isinstance(weight, FP8)}
        kinds = [words for block, words in _KINDS.items() if block in blocks]
        return f"FP8 weights have scales for {' and others for '.join(kinds)}" if len(kinds) > 1 else None

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """Describes the tensors of a file that store `weight`, {key, such as ".weight_scale": FileTensor}. A FileTensor
        has a shape, a dtype, and a function that later takes the same weight with its arrays and returns the array to
        write. A file's header is written before the weights have been quantised, so `weight` may contain shapes and
        dtypes (jax.ShapeDtypeStruct) instead of arrays. number: the number that some layouts put into the header, from
        `header_number`; this layout has none and ignores it."""
        assert isinstance(weight, FP8)
        shape = (1,) if weight.block == MATRIX else tuple(weight.scales.shape)
        scales = FileTensor(shape, np.dtype(weight.scales.dtype), lambda w: w.scales.reshape(shape))
        key = ".weight_scale_inv" if weight.block == TILE else ".weight_scale"
        return {self.codes: file_tensor(weight.codes, lambda w: w.codes), key: scales}

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of the config.json of a checkpoint whose weights are stored in this
        layout: that of `quant_method: fp8` if scales are for 128 x 128 numbers, else that of compressed-tensors. The
        entry is written with a model that is saved or exported.

        Args:
          weights: the weights in FP8; the blocks of the first one decide. If others have other blocks, the model cannot
            be saved (`differing`).
          plain: the names of the linears that are not quantised.
          dtype: not used.
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
    """Raises ValueError unless `group`, an entry of compressed-tensors' config_groups, describes weights that can be
    read: symmetric floats of 8 bits with a scale for each row, block (of any size, which FP8Files.describe checks) or
    matrix, and activation scales that are computed while serving, if it names activations. FP8Files.check calls it for
    each group. where: the entry's path in quantization_config, for the message."""
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    wanted: list[tuple[str, Any, tuple]] = [
        ("weights.type", weights.get("type"), ("float",)),
        ("weights.num_bits", weights.get("num_bits"), (8,)),
        ("weights.strategy", weights.get("strategy"), ("channel", "tensor", "block")),
        ("weights.symmetric", weights.get("symmetric", True), (True,)),
        ("input_activations.dynamic", inputs.get("dynamic", True), (True,)),
    ]
    for key, value, allowed in wanted:
        if value not in allowed:
            raise ValueError(
                f"config.json: quantization_config.{where}.{key} = {value!r}: must be "
                f"{' or '.join(map(repr, allowed))}; {_ADVICE}"
            )


def _check_scales(entry: Header, scales: np.ndarray, codes: np.ndarray, block: Block, dtype_name: str) -> None:
    """Raises ValueError if a finite scale is out of range, as in a damaged file: negative, below 2^-126, or so large
    that 448 times it, the largest number that its block can have, would not be finite. A scale of 0 is allowed for a
    block whose codes are all 0. Scales that are not finite are ignored here, because the loader refuses them.
    FP8Files.read calls it.

    Args:
      entry: the header of the scales' tensor, for the message.
      scales: float32, in the shape that the file has.
      codes: float8_e4m3fn[out, in].
      block: (rows, columns) that share a scale.
      dtype_name: the dtype that the model computes in, in which 448 times a scale must be finite.
    """
    most = min(float(jnp.finfo(dtype_name).max), float(np.finfo(np.float32).max)) / LARGEST
    wrong = np.isfinite(scales) & ~((scales >= LEAST_SCALE) & (scales <= most))
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
            f"{dtype_name} a scale must be from {LEAST_SCALE:.4g} to {most:.4g}, or 0 of numbers that are "
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
