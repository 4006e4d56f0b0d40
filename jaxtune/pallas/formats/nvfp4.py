"""NVFP4: blocks of 16 four-bit numbers (e2m1) that share a scale in e4m3, and one float32 scale for the tensor.

A number is TABLE[code] times the scale of its block, divided by the tensor's scale (compressed-tensors, whose files
contain 448 * 6 / the largest magnitude) or multiplied by it (nvidia-modelopt, whose files contain the inverse). The
scale is kept as the file has it, so that a weight is written again byte for byte.

NVFP4 is the class of weights, with `encode` (weights) and `encode_activations`; `global_scale` computes a tensor's
scale for both. CompressedTensors and ModelOpt, whose base is _Files, describe the two kinds of checkpoints; FORMAT
declares the format to jaxtune.pallas.formats.
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
    Found,
    Headers,
    Layout,
    Read,
    Settings,
    check_weights,
    file_tensor,
)
from jaxtune.pallas.formats.mxfp4 import LARGEST, LARGEST_CODES, TABLE, to_e2m1
from jaxtune.pallas.formats.stored import Stored
from jaxtune.pallas.meshes import on_any_mesh

BLOCK = 16  # numbers that share a scale
_LARGEST_SCALE = 448.0  # the largest number of e4m3
# The number of each byte in e4m3, for kernels that look up a block's scale by its stored byte.
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_SCALE_OF_ZEROS = 0.125  # the scale of a block whose scale would round to zero, as in compressed-tensors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4(Stored):
    """A tensor [..., out, in] in NVFP4 whose last axis is divided into blocks of 16. Each number has a code of four
    bits, an index into TABLE, the 16 numbers of e2m1; each block has a scale in e4m3, which is divided or multiplied by
    tensor_scale. A number of the tensor is TABLE[code] times that quotient or product. The class implements the
    interface of quantised weights, Stored."""

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
        """Quantises an array [..., out, in] in bfloat16, float16 or float32 on its device, as compressed-tensors does:
        the scales of the result are divided by tensor_scale (`divides` is True). Scales follow from the largest
        magnitudes of blocks and of each matrix. The result's `decode` gives the array's dtype by default. The bytes are
        equal on every device. Loading with model.load_in "nvfp4", exports and quantisation-aware training call it.

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
        return _encode(jnp.asarray(array), None)

    @staticmethod
    def encode_activations(x: jax.Array, scale: jax.Array) -> NVFP4:
        """Quantises activations x, float[..., tokens, n], n a multiple of 16, under a scale of the whole tensor that
        was observed before, by compressed-tensors' rule for `dynamic: local`. The scales of blocks follow from their
        largest magnitudes as those of weights do. A block with a number beyond 448 * 6 / scale gets the largest scale,
        448, and such numbers become that bound. Quantisation-aware training rounds activations so.

        scale: float32[], what files call input_global_scale (`global_scale` of the largest magnitude that was
        observed); the tensor_scale of the result, by which the scales of blocks are divided."""
        return _encode(x, jnp.broadcast_to(scale, (*x.shape[:-2], 1, 1)))

    @staticmethod
    def global_scale(largest: jax.Array, dtype) -> jax.Array:
        """The scale of a whole tensor, float32 in the shape of `largest`, as compressed-tensors computes it
        (generate_gparam): 448 * 6 / the largest magnitude, so that the largest scale of a block is the largest number
        of e4m3. It is 1 for zeros and where it would be infinite in `dtype`. `encode` gets the scale of weights by it,
        and quantisation-aware training that of activations.

        largest: float32, the largest magnitude of each tensor. dtype: that of the tensor's numbers, to which both
        1 / largest and the result are rounded."""
        largest = jnp.maximum(largest, jnp.finfo(dtype).tiny)
        inverse = _rounded(divide(jnp.ones_like(largest), largest), dtype)  # as torch divides a number by a tensor
        scale = _rounded(inverse * (LARGEST * _LARGEST_SCALE), dtype)
        return jnp.where(jnp.isfinite(scale), scale, 1.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor, [..., out, in]."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def kind(self) -> str:
        """A phrase that names the format and whether its scales are divided or multiplied by the tensor's scale.
        Kernels that decode are compared with the plain JAX implementation once for each phrase (dispatch.first_use), at
        their first use on a GPU."""
        return "NVFP4" if self.divides else "NVFP4, multiplied"

    def problem(self) -> str | None:
        """Returns the reason why the arrays cannot belong to one tensor (a wrong dtype, rows that are not whole blocks,
        or scales whose shape does not fit the codes), or None. `decode` and the operations refuse such a weight with
        this reason."""
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

    def cut(self, axis: int) -> int | None:
        """The number of consecutive indices along `axis` that must stay in one part when the tensor is divided over
        devices or written in pieces: 16 along the last axis, so that no block is cut, and 1 along the others. It is
        never None: every axis can be divided."""
        return BLOCK if axis % self.ndim == self.ndim - 1 else 1

    def rescaled(self, factor: np.ndarray) -> NVFP4:
        """The same codes and scales of blocks with another scale of each matrix, so that numbers are multiplied by
        `factor`, float64[..., 1, 1]. An export calls it so that weights which training rounded to this format decode to
        exactly the same 16-bit numbers (Stored.rescaled)."""
        whole = np.float64(self.tensor_scale)
        return dataclasses.replace(
            self, tensor_scale=jnp.asarray(np.float32(whole / factor if self.divides else whole * factor))
        )

    def with_input_scale(self, scale: float) -> NVFP4:
        """The same weight with `scale` as its scale of activations: input_scale is float32[..., 1, 1], `scale`
        everywhere. An export calls it for a model that was trained with rounded activations
        (Stored.with_input_scale). scale: as `global_scale` computes it, because encoded weights have `divides` True; it
        is not inverted here."""
        of_inputs = jnp.full((*self.shape[:-2], 1, 1), scale, jnp.float32)
        return dataclasses.replace(self, input_scale=of_inputs)

    def largest(self) -> jax.Array:
        """The largest magnitude that each number of the tensor could have with its scale, float32 in the tensor's
        shape. Quantisation-aware training that clips gradients finds by it the weights and activations beyond their
        range, which get no gradient (Stored.largest)."""
        return dataclasses.replace(self, codes=jnp.full_like(self.codes, LARGEST_CODES)).decode("float32")

    def divided(self, axis: int, parts: int) -> tuple[int | None, ...] | None:
        """The axis along which each leaf (codes, scales, tensor_scale, and input_scale if there is one, in this order)
        is divided if the tensor is divided into `parts` equal parts along `axis`, for the sharding of a model's
        weights.

        Codes and scales are always divided. The scales of the tensor and of the activations, which have one shape, are
        divided only if they have an entry for each index of the axis, such as one for each expert or, of experts that
        were stored one by one, for each row. Otherwise their entries in the tuple are None, and each part has all of
        them. Returns None instead of the tuple if the size is not a multiple of `parts` or the parts would cut a block.
        """
        cut = super().divided(axis, parts)
        if cut is None:
            return None
        of_tensor = axis if self.tensor_scale.shape[axis] == self.shape[axis] else None
        return (axis, axis, *(of_tensor for scale in (self.tensor_scale, self.input_scale) if scale is not None))

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """Makes one tensor of experts from quantised matrices that a checkpoint stores one by one; the leaves are numpy
        arrays. The loader of checkpoints calls it.

        Matrices that were quantised separately have different tensor scales, so the result has a tensor scale for each
        row, [E, rows, 1], that of the matrix from which the row comes. Scales of activations are joined likewise, or
        dropped if some matrices have none.

        Args:
          pieces: the matrices [., columns], whose rows in this order are those of expert 0, expert 1, ...
          shape: the result's, [E, rows, columns].
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
        """Cuts the rows from `start` to before `start + rows` out of the matrix number `index` of this tensor of
        experts [E, ., columns], and returns them as a tensor [rows, columns], which is written to a file by itself. It
        gets the tensor scale of its first row, [1, 1], and likewise the input scale if there is one, because the rows
        that are written as one matrix were also quantised with one tensor scale."""
        part = super().piece(index, start, rows)
        whole = None if part.input_scale is None else part.input_scale[:1]
        return dataclasses.replace(part, tensor_scale=part.tensor_scale[:1], input_scale=whole)

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> NVFP4:
        """Makes a weight of this shape in NVFP4 with random numbers, whose scales are divided or multiplied by the
        tensor's scale as those of this weight are. A kernel that decodes NVFP4 is compared with the plain JAX
        implementation on it, at its first use. draw: numpy's generator, from which the numbers come."""
        found = NVFP4.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16))
        scale = found.tensor_scale if self.divides else 1.0 / found.tensor_scale
        return dataclasses.replace(found, tensor_scale=scale, divides=self.divides)

    def block_scales(self) -> jax.Array:
        """float32[..., out, in / 16]: the factor by which the numbers of each block are multiplied, which is the
        block's scale divided by the tensor's scale, or multiplied by it if `divides` is False. `_decode` multiplies by
        it; kernels that decode compute it themselves."""
        return _times_tensor_scale(self.scales.astype(jnp.float32), self.tensor_scale, self.divides)

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor [..., out, in] in `dtype`, or in that of dtype_name if it is None: each code's number in
        TABLE times the factor of its block (`block_scales`) in float32, then cast."""
        with jax.named_scope("dequantise"):
            # Computed separately: fused with the numbers, XLA would compute each block's scale 16 times.
            scales = jax.lax.optimization_barrier(self.block_scales())
            nibbles = (self.codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
            values = jnp.asarray(TABLE).at[nibbles].get(mode="promise_in_bounds").reshape(*scales.shape, BLOCK)
            return (values * scales[..., None]).astype(dtype or self.dtype).reshape(self.shape)


def _times_tensor_scale(scales: jax.Array, tensor_scale: jax.Array, divides: bool) -> jax.Array:
    """The factor by which the numbers of each block are multiplied, float32[..., out, in / 16]. Decoding
    (NVFP4.block_scales) and encoding (`_encode`) compute it so.

    Args:
      scales: float32[..., out, in / 16], the scales of the blocks.
      tensor_scale: float32[..., 1 or out, 1].
      divides: True: scales are divided by tensor_scale (compressed-tensors). False: they are multiplied by it
        (nvidia-modelopt).
    """
    whole = jnp.broadcast_to(tensor_scale, scales.shape)
    return divide(scales, whole) if divides else scales * whole


def _rounded(value: jax.Array, dtype) -> jax.Array:
    """Rounds `value`, float32 of any shape, to the numbers of `dtype`, and returns them as float32.
    NVFP4.global_scale and `_encode` round quotients so, because compressed-tensors computes them in the dtype of the
    numbers that it quantises."""
    return value.astype(dtype).astype(jnp.float32)


@jax.jit
def _encode(array: jax.Array, tensor_scale: jax.Array | None) -> NVFP4:
    """Quantises an array [..., out, in], whose rows must be whole blocks. It is the jitted computation of NVFP4.encode,
    which checks the argument before, and of NVFP4.encode_activations. The result has `divides` True and the array's
    dtype as dtype_name. tensor_scale: float32[..., 1, 1], the scale of each matrix; None: it follows from the matrix's
    largest magnitude (NVFP4.global_scale)."""
    wide = array.astype(jnp.float32)
    if tensor_scale is None:
        tensor_scale = NVFP4.global_scale(jnp.abs(wide).max((-2, -1), keepdims=True), array.dtype)
    blocks = wide.reshape(*wide.shape[:-1], -1, BLOCK)
    magnitude = jnp.abs(blocks).max(-1)
    sixth = _rounded(divide(magnitude, jnp.full_like(magnitude, LARGEST)), array.dtype)
    scales = jnp.minimum(sixth * tensor_scale, _LARGEST_SCALE).astype(jnp.float8_e4m3fn)
    scales = jnp.where(scales.astype(jnp.float32) == 0, _SCALE_OF_ZEROS, scales.astype(jnp.float32))
    scales = scales.astype(jnp.float8_e4m3fn)
    each = _times_tensor_scale(scales.astype(jnp.float32), tensor_scale, True)[..., None]
    scaled = divide(blocks, jnp.broadcast_to(each, blocks.shape))
    size = to_e2m1(jnp.minimum(jnp.abs(scaled), LARGEST))
    code = jnp.searchsorted(jnp.asarray(TABLE[:8]), size).astype(jnp.uint8)
    code = (code | ((scaled < 0).astype(jnp.uint8) << 3)).reshape(*array.shape[:-1], -1, 2)
    return NVFP4(code[..., 0] | code[..., 1] << 4, scales, tensor_scale, None, True, array.dtype.name)


# ---- in checkpoints


class _Files(Layout):
    """The base of the layouts of both kinds of checkpoints in NVFP4, CompressedTensors and ModelOpt, which differ in
    the names of tensors, in the shape of the tensor's scale, and in whether scales are divided or multiplied by it. A
    subclass sets the attributes and implements `recognises`, `claims` and `config`. Those that are not explained here
    are explained in Layout.

    `others` are, in this order, the keys of the scales of blocks, of the tensor's scale, and of the scale of
    activations, which may be missing.
    """

    divides: bool  # whether files in this layout have tensor scales by which scales are divided (NVFP4.divides)
    scalar: tuple[int, ...]  # the shape of the tensor's scale in files that are written, (1,) or ()

    def describe(self, name: str, tensors: Headers, read: Read) -> Found:
        """Describes the weight that a module's tensors store, from their headers alone. Returns a Found with its name,
        headers and shape [out, in]. The loader calls it before it reads the tensors' content.

        Args:
          name: the weight's name in the model.
          tensors: {key, such as ".weight_scale": header}.
          read: a function that returns a tensor's bytes; it is not called, because the headers say everything.
        Raises:
          ValueError: the codes are no matrix whose rows are whole blocks, the blocks' or the tensor's scale is missing,
            or a scale has another dtype or shape than the codes need.
        """
        codes = tensors[self.codes]
        rows, pairs = codes.shape if len(codes.shape) == 2 else (0, 0)
        where = f"{codes.file}: {name}"
        scales, of_tensor, _ = self.others
        wanted: dict[str, tuple[str, tuple]] = {scales: ("F8_E4M3", ((rows, 2 * pairs // BLOCK),))}
        wanted |= dict.fromkeys(self.others[1:], ("F32", ((), (1,))))
        for key, (dtype, shapes) in wanted.items():
            part = tensors.get(key)
            if part is None and key not in (scales, of_tensor):
                continue
            if part is None or part.dtype != dtype or part.shape not in shapes or not rows or 2 * pairs % BLOCK:
                got = "is missing" if part is None else f"is {part.dtype}{list(part.shape)}"
                raise ValueError(
                    f"{where}: {key} {got}; codes {codes.dtype}{list(codes.shape)} in blocks of {BLOCK} need "
                    f"{dtype}{list(shapes[0])}"
                )
        return Found(name, tensors, (rows, 2 * pairs))

    def read(self, found: Found, arrays: Arrays, dtype_name: str) -> NVFP4:
        """Makes the quantised weight of one matrix, with numpy arrays as leaves, from the content of its tensors. The
        loader of checkpoints calls it.

        Args:
          found: what `describe` returned for the weight.
          arrays: {key: array}, the content of the tensors in `found`.
          dtype_name: the dtype that the model computes in, to which the weight is decoded by default.
        Raises:
          ValueError: the scale of the tensor or of the activations is not positive and finite. A missing scale of
            activations is no error: the weight's input_scale is then None.
        """
        scales, of_tensor, of_inputs = self.others
        leaves: list = [arrays[self.codes], arrays[scales]]
        for key in (of_tensor, of_inputs):
            value = arrays[key].reshape(1, 1) if key in arrays else None
            if value is not None and not (np.isfinite(value) & (value > 0)).all():
                raise ValueError(
                    f"{found.where}: {key} is {value.item():.4g}; it must be positive: fetch the file again"
                )
            leaves.append(value)
        return NVFP4(*leaves, divides=self.divides, dtype_name=dtype_name)

    def can_store(self, weight: Stored) -> bool:
        """Whether `weight` can be written in this layout. It must be an NVFP4 whose `divides` is that of the layout,
        because the tensor's scale is written unchanged and the program that reads the file divides or multiplies by
        it."""
        return isinstance(weight, NVFP4) and weight.divides == self.divides

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        """Describes the tensors of a file that store `weight`, an NVFP4 [out, in] with one tensor scale (the scale of
        activations only if the weight has one), {key, such as ".weight_scale": FileTensor}. A FileTensor has a shape, a
        dtype, and a function that later takes the same weight with its arrays and returns the array to write. A file's
        header is written before the weights have been quantised, so `weight` may contain shapes and dtypes
        (jax.ShapeDtypeStruct) instead of arrays. The code that writes checkpoints calls it. number: the number that
        some layouts put into the header, from `header_number`; this layout has none and ignores it."""
        assert isinstance(weight, NVFP4)
        scales, of_tensor, of_inputs = self.others
        shape, one = self.scalar, np.dtype(np.float32)
        found = {
            self.codes: file_tensor(weight.codes, lambda w: w.codes),
            scales: file_tensor(weight.scales, lambda w: w.scales),
            of_tensor: FileTensor(shape, one, lambda w: w.tensor_scale.reshape(shape)),
        }
        if weight.input_scale is not None:
            found[of_inputs] = FileTensor(shape, one, lambda w: w.input_scale.reshape(shape))
        return found


class CompressedTensors(_Files):
    """The layout of compressed-tensors' `nvfp4-pack-quantized`, which llm-compressor writes; also that of weights that
    jaxtune itself quantises to NVFP4.

    The tensors are `X.weight_packed` uint8[out, in / 2], `X.weight_scale` e4m3[out, in / 16], `X.weight_global_scale`
    float32[1], by which scales are divided, and, if activations are quantised too, `X.input_global_scale` float32[1].
    The attributes and methods are explained in Layout and _Files.
    """

    title = "NVFP4 of compressed-tensors (nvfp4-pack-quantized)"
    codes = ".weight_packed"
    codes_dtype = "U8"
    others = (".weight_scale", ".weight_global_scale", ".input_global_scale")
    divides = True
    scalar = (1,)

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "compressed-tensors" and the format is "nvfp4-pack-quantized". The loader of checkpoints calls
        it to find a checkpoint's layout (Layout.recognises)."""
        return (settings.get("quant_method"), settings.get("format")) == ("compressed-tensors", "nvfp4-pack-quantized")

    def check(self, settings: Settings) -> None:
        """Raises ValueError, with key and value, if `settings`, a quantization_config that `recognises` accepts, has a
        setting that is not supported. Supported are weights that are symmetric floats of 4 bits in groups of 16,
        without a quantised key/value cache; a setting that is missing is accepted, and activations are not looked at.
        The loader calls it before it reads any tensor."""
        check_weights(settings, {"num_bits": 4, "type": "float", "group_size": BLOCK, "symmetric": True})

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, are a weight of this layout: `.weight_packed` has the dtype U8,
        and the tensor's scale `.weight_global_scale` is beside it. The loader calls it to find the quantised weights
        among a checkpoint's tensors."""
        return super().claims(tensors) and ".weight_global_scale" in tensors

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of the config.json of a checkpoint whose weights are stored in this
        layout. The entry is written with a model that is saved or exported.

        Args:
          weights: all weights in NVFP4; input_activations is set if each of them has a scale of activations.
          plain: the names of the linears that are not quantised.
          dtype: not used.
        """
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
    which scales are multiplied, and, if activations are quantised too, `X.input_scale` float32[]. Files may also have
    `X.k_scale` and `X.v_scale`, for FP8 key/value caches, beside quantised or plain weights. jaxtune leaves them out
    (`left_out`), so that adapters fit the model with and without them. The attributes and methods are explained in
    Layout and _Files.
    """

    title = "NVFP4 of nvidia-modelopt"
    codes = ".weight"
    codes_dtype = "U8"
    others = (".weight_scale", ".weight_scale_2", ".input_scale")
    left_out = (".k_scale", ".v_scale")
    divides = False
    scalar = ()

    def recognises(self, settings: Settings) -> bool:
        """Whether `settings`, the quantization_config of a config.json, says that weights are stored in this layout:
        quant_method is "modelopt" and quant_algo is "NVFP4" or, if activations are not quantised, "W4A16_NVFP4". The
        loader of checkpoints calls it to find a checkpoint's layout (Layout.recognises)."""
        algorithms = ("NVFP4", "W4A16_NVFP4")
        return settings.get("quant_method") == "modelopt" and settings.get("quant_algo") in algorithms

    def claims(self, tensors: Headers) -> bool:
        """Whether a module's tensors, {key: header}, are a weight of this layout: `.weight` has the dtype U8, and the
        tensor's scale `.weight_scale_2` is beside it. The loader calls it to find the quantised weights among a
        checkpoint's tensors."""
        return super().claims(tensors) and ".weight_scale_2" in tensors

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """Returns the entry quantization_config of the config.json of a checkpoint whose weights are stored in this
        layout. The entry is written with a model that is saved or exported.

        Args:
          weights: all weights in NVFP4; quant_algo says that activations are quantised if each of them has a scale of
            activations.
          plain: the names of the linears that are not quantised.
          dtype: not used.
        """
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
