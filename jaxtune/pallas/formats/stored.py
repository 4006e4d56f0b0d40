"""The interface of all quantised weights, and `dense`, the array of a weight that may be quantised."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.meshes import on_any_mesh


class Stored:
    """The interface of quantised tensors: a pytree whose leaves are the stored arrays, such as codes and scales. Models
    have it in place of an array [..., out, in], or [E, out, in] of experts. The leaves may be jax.ShapeDtypeStruct
    where code plans memory or files' headers.

    A format is a frozen dataclass with `shape`, `dtype_name`, `problem`, `block_length` and `_decode`, and with
    `encode` if jaxtune quantises to it. Only quantisation-aware training and the export of its models need `rescaled`,
    `with_input_scale` and `largest`. Other methods have defaults, for arrays whose first axes are the tensor's.
    """

    shape: tuple[int, ...]  # of the decoded tensor
    dtype_name: str  # the dtype that `decode` gives by default
    # names of the arrays that are not divided when the tensor is divided over devices, because each device needs all of
    # them, such as a table
    shared: ClassVar[tuple[str, ...]] = ()
    # True: the arrays are those of the tensor with its last two axes swapped. `unswapped`, by which products multiply,
    # is the tensor that they are in their own order
    swapped: bool = False
    # the value of model.compute with which products use this format without decoding, by their own kernels
    # (quant_matmul/as_stored.py; for experts AS_STORED of grouped_matmul/api.py); None: products decode it
    compute: ClassVar[str | None] = None

    # the axes of the tensor along which all numbers share the float32 scale that `rescaled` changes, such as (-1,) for
    # a scale for each row; None: there is no such scale
    scale_axes: ClassVar[tuple[int, ...] | None] = None
    # the size of a block of numbers along the last axis; a tensor whose rows are not whole blocks cannot be quantised
    row_block: ClassVar[int] = 1

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype_name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the decoded tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @staticmethod
    def encode(array: jax.Array) -> Stored:
        """Quantises an array [..., out, in]; the bytes are the same on every device. NotImplementedError for formats to
        which jaxtune does not quantise.
        """
        raise NotImplementedError

    def problem(self) -> str | None:
        """The reason why the arrays cannot be one tensor's (dtypes or shapes that do not fit each other), or None.
        `decode` and products refuse a weight with a reason.
        """
        raise NotImplementedError

    def block_length(self, axis: int) -> int | None:
        """How many consecutive indices along `axis` (of the decoded tensor, from 0) must stay in one shard or piece, so
        that no block is cut. None: the tensor cannot be divided along the axis.
        """
        raise NotImplementedError

    def shard_axes(self, axis: int, shards: int) -> tuple[int | None, ...] | None:
        """The axis along which each leaf, in order, is divided when the tensor is divided into `shards` equal parts
        along `axis` (from 0); an entry is None for a leaf that every device needs whole (`shared`). None: it cannot be
        divided so.
        """
        whole_blocks = self.block_length(axis)
        if whole_blocks is None or self.shape[axis] % (whole_blocks * shards):
            return None
        return tuple(None if name in self.shared else axis for name in self._arrays())

    def _arrays(self) -> dict[str, jax.Array]:
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        named = {f.name: getattr(self, f.name) for f in fields if not f.metadata.get("static")}
        return {name: array for name, array in named.items() if array is not None}

    def cuts_rows(self, shards: int) -> bool:
        """Whether each of `shards` equal parts along the first axis is a tensor of its own (`rows_of`)."""
        axes = self.shard_axes(0, shards)
        pairs = () if axes is None else zip(axes, self._arrays().values(), strict=True)
        return axes is not None and all(axis == 0 or (axis is None and array.size == 1) for axis, array in pairs)

    def rows_of(self, shard: jax.Array, shards: int) -> Self:
        """A part of `cuts_rows` as a tensor. The arrays that `shard_axes` divides are the part's, the others whole.

        shard: int32[], the part's index.
        """
        return self

    @property
    def unswapped(self) -> Stored:
        """The same arrays as a tensor [E, out, in], of a weight [E, in, out] that is `swapped`: kernels decode arrays
        in their own order.
        """
        raise NotImplementedError

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """One tensor of experts from separate matrices, without decoding them; check first that this is possible
        (Layout.joining). The leaves are numpy arrays.

          pieces: matrices [., columns], the rows of expert 0, expert 1, ... in order; an expert may have several, such
          as gate and up.
          shape: of the result, [E, rows, columns].
        """
        structure = jax.tree.structure(pieces[0])
        leaves = [np.concatenate(leaf_pieces) for leaf_pieces in zip(*map(jax.tree.leaves, pieces), strict=True)]
        return jax.tree.unflatten(structure, [leaf.reshape(shape[0], -1, *leaf.shape[1:]) for leaf in leaves])

    def piece(self, index: int, start: int, rows: int) -> Self:
        """The rows from `start` to before `start + rows` of expert `index`, as a tensor [rows, columns]: the inverse of
        `joined`. The rows must begin with a whole block.

          index: the expert. rows: how many.
        """
        rows_per_block = self.block_length(1) or rows  # how many rows share an entry of an array that has fewer rows

        def rows_of(array: jax.Array) -> jax.Array:
            if array.shape[1] == 1:
                return array[index]
            rows_per_entry = 1 if array.shape[1] == self.shape[1] else rows_per_block
            return array[index, start // rows_per_entry : start // rows_per_entry - (-rows // rows_per_entry)]

        return jax.tree.map(rows_of, self)

    def rescaled(self, factor: np.ndarray) -> Self:
        """The same codes with another float32 scale, so that every number is multiplied by `factor`. Only formats with
        `scale_axes`.

        A model that was trained with rounding to this format has products of codes and scales rounded to 16 bits, from
        which `encode` computes slightly different scales. An export computes a factor with which the codes decode to
        exactly the same 16-bit numbers.

          factor: float64, of the decoded tensor's shape but with 1 along `scale_axes`.
        """
        raise NotImplementedError

    def of_numbers(self, numbers: jax.Array) -> Self:
        """The encoded `numbers` of this weight, already on the grid: blocks that decode to other numbers are written in
        the other of two ways that have the same values but for float32's rounding. Itself if there is one way only.
        """
        del numbers
        return self

    def with_input_scale(self, scale: float) -> Self:
        """The same weight with a scale of activations, which files store beside it and servers use to round what they
        multiply. Only NVFP4. scale: as NVFP4.global_scale computes it from the largest activation, not its inverse.
        """
        raise NotImplementedError

    def largest(self) -> jax.Array:
        """The largest magnitude that each number could have with its scale, float32 in the tensor's shape.
        Quantisation-aware training that clips gradients gives none to numbers beyond it.
        """
        raise NotImplementedError

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> Stored:
        """A random weight of this shape with the format and options of this one, such as quantised absmax, on which a
        kernel is compared with plain JAX at its first use.
        """
        return self.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16))

    # a copy of the codes with the last two axes swapped, beside them; None if the weight has none (`with_transposed`)
    transposed: jax.Array | None = None

    def with_transposed(self, make: Callable = jnp.matrix_transpose) -> Self:
        """The same weight with its codes transposed beside them, so that products of stored codes (`compute`) need no
        copy for a sum along the other axis. By default the weight itself, for formats that need no copy.

          make: copies the codes transposed; a result of None removes the copy.
        """
        del make
        return self

    @property
    def kind(self) -> str:
        """A phrase that all weights share that a decoding kernel treats alike: the format, and what else changes the
        kernel, such as quantised absmax. A kernel is compared with plain JAX once for each phrase.
        """
        return type(self).__name__

    def product_time(self, as_stored: bool, device: str) -> float:
        """The measured time of a product of many tokens as a multiple of a 16-bit product's; 1 for formats that are
        decoded, as `decoded_share` counts that.

          as_stored: whether a kernel multiplies the codes undecoded (`compute`).
          device: its name, such as "NVIDIA H200".
        """
        del as_stored, device
        return 1.0

    def decoded_share(self, as_stored: bool) -> float:
        """How many times a product in one direction, on average of forward and backward, writes the decoded tensor or a
        copy to memory: 1, because each product decodes the weight again. as_stored: as of product_time.
        """
        del as_stored
        return 1.0

    @on_any_mesh
    def decode(self, dtype=None) -> jax.Array:
        """The decoded tensor in a floating-point `dtype`; None: `dtype_name`.

        Raises:
          ValueError: the arrays do not fit each other (`problem`).
          TypeError: `dtype` is no floating-point dtype.
        """
        op = f"{type(self).__name__}.decode"
        if (problem := self.problem()) is not None:
            raise ValueError(f"{op}: {problem}")
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{op}: dtype is {jnp.dtype(dtype)}; it must be a float dtype")
        return self._decode(dtype)

    @property
    def decoding(self) -> jax.stages.Wrapped | None:
        """The jitted program (weight, dtype) behind `decode`, which an export compiles ahead; None if a format has
        none.
        """
        program = type(self)._decode
        return program if isinstance(program, jax.stages.Wrapped) else None

    def _decode(self, dtype) -> jax.Array:
        """`decode` after its checks; dtype None: `dtype_name`."""
        raise NotImplementedError


def dense(weight: jax.Array | Stored, dtype=None) -> jax.Array:
    """The array of a weight that may be quantised: an array unchanged, whatever `dtype` is; a Stored decoded to
    `dtype`.
    """
    return weight.decode(dtype) if isinstance(weight, Stored) else weight
