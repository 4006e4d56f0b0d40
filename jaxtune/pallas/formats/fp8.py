"""Weights in eight bits: e4m3 numbers (OCP 8-bit Floating Point Specification) whose blocks share a scale.

A block is a row (what jaxtune makes of 16-bit weights, and compressed-tensors calls a channel), 128 x 128 numbers (as
Qwen and DeepSeek publish theirs), or the whole matrix. A number is its code times the scale of its block.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments, describe
from jaxtune.pallas.formats.division import divide
from jaxtune.pallas.formats.stored import Stored
from jaxtune.pallas.meshes import on_any_mesh

LARGEST = 448.0  # of e4m3
LEAST_SCALE = float(np.finfo(np.float32).tiny)  # devices may take what is smaller for zero, and would divide by it
# (rows, columns) of a block; None: all there are.
Block = tuple[int | None, int | None]
ROW, TILE, MATRIX = (1, None), (128, 128), (None, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8(Stored):
    """A tensor [..., out, in] in e4m3; a pytree, whose arrays are the leaves.

    Attributes:
      codes: float8_e4m3fn[..., out, in]. scales: a float of 16 or 32 bits, [..., blocks along out, blocks along in]; a
        last block along an axis may be shorter.
      block: (rows, columns) that share a scale, None for all: ROW, TILE or MATRIX.
      dtype_name: the dtype that `decode` gives by default.
    """

    codes: jax.Array
    scales: jax.Array
    block: Block = dataclasses.field(default=ROW, metadata=dict(static=True))
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))

    @staticmethod
    @on_any_mesh
    def encode(array: jax.Array | np.ndarray, block: Block = ROW) -> FP8:
        """Quantises [..., out, in] in bfloat16, float16 or float32, on the device that it lies on; the bytes are the
        same on every one.

        A block's scale is its largest magnitude over 448, in float32, at least 2^-126, and 1 for a block of zeros.
        Numbers below 2^-126, which are zero to some devices, are zero. Numbers that are not finite make a scale that is
        not.

        Raises:
          TypeError: array is none of these. ValueError: it has fewer than two axes, or no element; another block.
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
        wanted = (*self.shape[:-2], *scale_shape(self.shape, self.block))
        if tuple(self.scales.shape) != wanted or not jnp.issubdtype(self.scales.dtype, jnp.floating):
            return f"scales are {describe(self.scales)}; shape {self.shape} in blocks of {self.block} asks for {wanted}"
        return None

    def cut(self, axis: int) -> int | None:
        """In whole blocks; leading axes anywhere."""
        axis = axis % self.ndim
        return 1 if axis < self.ndim - 2 else self.block[axis - self.ndim + 2]

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """Code times scale in float32, then cast."""
        with jax.named_scope("dequantise"):
            return (self.codes.astype(jnp.float32) * self.scales_of_numbers()).astype(dtype or self.dtype)

    def scales_of_numbers(self) -> jax.Array:
        """float32, for each number that of its block; axes of one block are left for broadcasting."""
        scales = self.scales.astype(jnp.float32)
        for axis, size in zip((-2, -1), self.block, strict=True):
            if size is not None and size > 1:
                scales = jnp.repeat(scales, size, axis=axis)
                scales = jax.lax.slice_in_dim(scales, 0, self.shape[axis], axis=scales.ndim + axis)
        return scales


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """(blocks along out, blocks along in) of a tensor [..., out, in]."""
    along = [1 if size is None else -(-whole // size) for whole, size in zip(shape[-2:], block, strict=True)]
    return along[0], along[1]


def scale_of(largest: jax.Array, scale: jax.Array) -> jax.Array:
    """The scale of numbers up to `largest`, given what 448 takes to that; one that is NaN stays so."""
    return jnp.where(largest < LEAST_SCALE, 1.0, jnp.where(scale < LEAST_SCALE, LEAST_SCALE, scale))


@functools.partial(jax.jit, static_argnums=1)
def _encode(array: jax.Array, block: Block) -> FP8:
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
    # A rounded scale may be a little low, and a number above 448 would be NaN.
    codes = jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return dataclasses.replace(stored, codes=codes)
