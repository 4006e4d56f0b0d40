"""The interface of all quantised weights (Stored), and the function `dense`, which returns the array of a weight that
may be quantised."""

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
    """The interface of quantised tensors. A Stored is a pytree whose leaves are the arrays that are stored, such as
    codes and scales. Models have it in place of an array [..., out, in]; a tensor of experts is [E, out, in]. Code that
    plans memory or files' headers uses objects with jax.ShapeDtypeStruct in place of the leaves.

    A format is a frozen dataclass with `shape`, `dtype_name`, `problem` (why the arrays do not fit each other), `cut`
    (how many consecutive indices may not be separated) and `_decode` (the decoded array), and with `encode` if jaxtune
    quantises weights to it. Most other methods have defaults, for arrays whose first axes are those of the tensor:
    `divided` says how the tensor is divided over devices; `joined` and `piece` make a tensor of experts from matrices
    that files have one by one, and cut one out; `random_like` and `kind` are for the check of a kernel at its first
    use; `product_time` and `decoded_share` are for the planner's forecasts; `with_transposed` is for a run's frozen
    weights. Without defaults are `rescaled`, `with_input_scale` and `largest`, for quantisation-aware training and the
    export of its models; a format implements those that it needs. Code that needs the numbers calls `decode`, which
    checks the arrays before `_decode`."""

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
        """The dtype named by `dtype_name`, which `decode` returns by default; to code that asks an array for its dtype,
        the weight has this one."""
        return jnp.dtype(self.dtype_name)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the decoded tensor, as an array has it: 2 for a matrix, 3 for the experts'
        matrices."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the decoded tensor, as an array has it, whatever number of bytes stores them."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the arrays that are stored, codes and scales and, for some formats, tables. Tests read
        it; the planner counts bytes from the shapes of the leaves (planning/sizes.py)."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @staticmethod
    def encode(array: jax.Array) -> Stored:
        """Quantises an array [..., out, in] and returns it as this format's Stored; the stored bytes are the same on
        every device. Each format to which jaxtune quantises weights implements it; others raise NotImplementedError. It
        is called for model.load_in, exports and quantisation-aware training (Format.encode)."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """Returns the reason why the arrays cannot be those of one tensor of this shape (dtypes or shapes do not fit
        each other), or None. `decode` and the operations refuse such a weight with this reason. Each format implements
        it."""
        raise NotImplementedError

    def cut(self, axis: int) -> int | None:
        """The number of consecutive indices along `axis` (of the decoded tensor, counted from 0) that must stay in one
        part when the tensor is divided over devices or written in pieces, so that no block of quantisation is cut. None
        means that the tensor cannot be divided along this axis. `divided` and `piece` use it. Each format implements
        it."""
        raise NotImplementedError

    def divided(self, axis: int, parts: int) -> tuple[int | None, ...] | None:
        """The axis along which each leaf is divided if the tensor is divided into `parts` equal parts along `axis`, for
        the sharding of a model's weights over devices. axis: of the decoded tensor, counted from 0.

        The entries are in the order of the leaves; an entry is None for an array that is not divided, because each part
        needs all of it (`shared`). Returns None instead of the tuple if the tensor cannot be divided like this: not
        along this axis, or not without cutting a block of quantisation.
        """
        whole_blocks = self.cut(axis)
        if whole_blocks is None or self.shape[axis] % (whole_blocks * parts):
            return None
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        arrays = [f.name for f in fields if not f.metadata.get("static") and getattr(self, f.name) is not None]
        return tuple(None if name in self.shared else axis for name in arrays)

    @property
    def unswapped(self) -> Stored:
        """The same arrays as the tensor with its last two axes swapped, of a weight that is `swapped`: [E, out, in] of
        one that is [E, in, out]. Grouped products multiply by it, as their kernels decode arrays in their own order. A
        format with `swapped` implements it."""
        raise NotImplementedError

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """Makes one tensor of experts from quantised matrices that a checkpoint stores one by one, without decoding
        them. The caller has checked that this is possible (Layout.joining). The leaves are numpy arrays. The loader of
        checkpoints calls it.

        Args:
          pieces: the matrices [., columns], whose rows in this order are those of expert 0, expert 1, ...; an expert
            may have several, such as gate and up.
          shape: the result's, [E, rows, columns].
        """
        structure = jax.tree.structure(pieces[0])
        leaves = [np.concatenate(parts) for parts in zip(*map(jax.tree.leaves, pieces), strict=True)]
        return jax.tree.unflatten(structure, [leaf.reshape(shape[0], -1, *leaf.shape[1:]) for leaf in leaves])

    def piece(self, index: int, start: int, rows: int) -> Self:
        """Cuts the rows from `start` to before `start + rows` out of the matrix number `index` of this tensor of
        experts [E, ., columns], and returns them as a tensor [rows, columns], which is written to a file by itself. The
        rows must begin with a whole block of quantisation. It is the inverse of `joined`."""
        high = self.cut(1) or rows  # how many rows share an entry of an array that has fewer rows

        def rows_of(array: jax.Array) -> jax.Array:
            if array.shape[1] == 1:
                return array[index]
            each = 1 if array.shape[1] == self.shape[1] else high
            return array[index, start // each : start // each - (-rows // each)]

        return jax.tree.map(rows_of, self)

    def rescaled(self, factor: np.ndarray) -> Self:
        """The same codes with another float32 scale, so that every number is multiplied by `factor`. An export calls it
        for a model that was trained with rounding to this format: the model has the products of codes and scales
        rounded to 16 bits, and `encode` computes slightly different scales from these. The export computes a factor
        with which the codes decode to exactly the same 16-bit numbers (export/grids.py). Formats with `scale_axes`
        implement it; others raise NotImplementedError.

        factor: float64, of the decoded tensor's shape but with 1 along `scale_axes`."""
        raise NotImplementedError

    def with_input_scale(self, scale: float) -> Self:
        """The same weight with a scale of activations, which files store beside it and by which servers round what they
        multiply by it. An export calls it for a model that was trained with such a scale. NVFP4 implements it; other
        formats raise NotImplementedError. scale: the number that the files store."""
        raise NotImplementedError

    def largest(self) -> jax.Array:
        """The largest magnitude that each number of the tensor could have with its scale, float32 in the tensor's
        shape. Quantisation-aware training that clips gradients compares weights, and activations that it encoded, with
        it: those beyond it get no gradient. Formats that it rounds to implement it; others raise NotImplementedError.
        """
        raise NotImplementedError

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> Stored:
        """Makes a weight of this shape with random numbers, in the format of this weight and with the same options,
        such as quantised absmax. A kernel that decodes the format is compared with the plain JAX implementation on it,
        at its first use on a GPU. By default normally distributed numbers in bfloat16 are encoded. draw: numpy's
        generator, from which the numbers come."""
        return self.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16))

    # a copy of the codes with the last two axes swapped, beside them; None if the weight has none (`with_transposed`)
    transposed: jax.Array | None = None

    def with_transposed(self, make: Callable = jnp.matrix_transpose) -> Self:
        """The same weight with its codes transposed beside them (`transposed`), so that products which take them as
        they are stored (`compute`) need no copy for a sum along the other axis. A run calls it for frozen weights
        (models/placement/transposed_codes.py). By default it returns the weight itself, of a format whose products need
        no such copy; FP8 implements it. make: a function of the codes that makes the copy; a result of None takes it
        away."""
        del make
        return self

    @property
    def kind(self) -> str:
        """A phrase that is the same for all weights that a decoding kernel treats alike: the format's name, and what
        else changes the kernel, such as quantised absmax. A kernel is compared with the plain JAX implementation once
        for each phrase (dispatch.first_use), at its first use on a GPU. By default it is the name of the class."""
        return type(self).__name__

    def product_time(self, as_stored: bool, device: str) -> float:
        """The measured time of a product of many tokens with this weight, as a multiple of the time of a 16-bit
        product. By default it is 1, for formats that are decoded, because decoding is counted separately
        (`decoded_share`). Only FP8, the one format with `compute`, implements it. The planner forecasts the time of a
        step with it.

        Args:
          as_stored: True: the product uses the format without decoding it, by a kernel for it (`compute`). False: the
            product decodes the weight first.
          device: the device's name, such as "NVIDIA H200".
        """
        del as_stored, device
        return 1.0

    def decoded_share(self, as_stored: bool) -> float:
        """How many times a product in one direction, forward or backward, on average of both, writes the decoded
        tensor, or a copy of it, to memory: by default 1, because each product decodes the weight again. Only FP8, the
        one format with `compute`, implements it. The planner forecasts the time of a step with it.

        as_stored: True: the products use the format without decoding it, by a kernel for it (`compute`). False: they
        decode it.
        """
        del as_stored
        return 1.0

    @on_any_mesh
    def decode(self, dtype=None) -> jax.Array:
        """Returns the decoded tensor in `dtype`, a floating-point dtype; None means that of `dtype_name`.

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
        """The program, a function of (this weight, dtype), that `decode` calls; None where a format has none of its
        own. An export compiles it ahead, for weights with shapes in place of arrays."""
        program = type(self)._decode
        return program if isinstance(program, jax.stages.Wrapped) else None

    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor in `dtype`, or in that of `dtype_name` if it is None. It is the computation of `decode`,
        which checks the arrays and the dtype before. Each format implements it."""
        raise NotImplementedError


def dense(weight: jax.Array | Stored, dtype=None) -> jax.Array:
    """The array of a weight that may be quantised, for code that computes with the numbers themselves, such as merging
    adapters and exports: an array is returned unchanged, whatever `dtype` is, and a Stored is decoded to `dtype` (None:
    its `dtype_name`), with the errors of Stored.decode."""
    return weight.decode(dtype) if isinstance(weight, Stored) else weight
