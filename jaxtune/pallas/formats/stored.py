"""The interface of all quantised weights (Stored), and the function `dense`, which gives the array of a weight that
may be quantised."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.meshes import on_any_mesh


class Stored:
    """A quantised tensor: a pytree whose leaves are the arrays that are stored.

    A format is a frozen dataclass with `shape`, `dtype_name`, `problem`, `cut` and `_decode`, and with `encode` if
    weights are quantised here. The other methods have defaults for arrays whose first axes are those of the tensor. A
    tensor of experts is [E, out, in].
    """

    shape: tuple[int, ...]  # of the tensor
    dtype_name: str  # the dtype that `decode` gives by default
    shared: ClassVar[tuple[str, ...]] = ()  # names of arrays of which every part of a divided tensor needs the whole
    # the value of model.compute with which products use this format without decoding, by their own kernels
    # (quant_matmul/as_stored.py); None: products decode it
    compute: ClassVar[str | None] = None

    @property
    def dtype(self) -> np.dtype:
        """The dtype that `decode` gives by default."""
        return jnp.dtype(self.dtype_name)

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes that are stored."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @staticmethod
    def encode(array: jax.Array) -> Stored:
        """Quantises an array [..., out, in]; the stored bytes are the same on every device. Each format implements
        it."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """The reason why the arrays cannot be those of a tensor of this shape (dtypes or shapes do not fit), or None.
        `decode` and the operations refuse such a weight."""
        raise NotImplementedError

    def cut(self, axis: int) -> int | None:
        """The number of consecutive indices along `axis` that must stay in one part when the tensor is divided over
        devices or written in pieces, so that no block of quantisation is cut. None means that the tensor cannot be
        divided along this axis. `divided` and `piece` use it."""
        raise NotImplementedError

    def divided(self, axis: int, parts: int) -> tuple[int | None, ...] | None:
        """The axis along which each leaf is divided if the tensor is divided into `parts` equal parts along `axis`, for
        the sharding of a model's weights.

        The entries are in the order of the leaves; an entry is None for an array that each part needs whole (`shared`).
        None instead of the tuple means that the tensor cannot be divided like this: not along this axis, or not into
        whole blocks.
        """
        whole_blocks = self.cut(axis)
        if whole_blocks is None or self.shape[axis] % (whole_blocks * parts):
            return None
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        arrays = [f.name for f in fields if not f.metadata.get("static") and getattr(self, f.name) is not None]
        return tuple(None if name in self.shared else axis for name in arrays)

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """One tensor of this shape [E, rows, columns] from pieces [., columns] that are its rows in order, as a
        checkpoint stores experts one by one; the leaves are numpy arrays."""
        structure = jax.tree.structure(pieces[0])
        leaves = [np.concatenate(parts) for parts in zip(*map(jax.tree.leaves, pieces), strict=True)]
        return jax.tree.unflatten(structure, [leaf.reshape(shape[0], -1, *leaf.shape[1:]) for leaf in leaves])

    def piece(self, index: int, start: int, rows: int) -> Self:
        """Rows `start` to before `start + rows` of matrix `index` of a tensor [E, ., columns], as a tensor [rows,
        columns]: the inverse of `joined`, for writing experts one by one."""
        high = self.cut(1) or rows  # how many rows share an entry of an array that has fewer rows

        def rows_of(array: jax.Array) -> jax.Array:
            if array.shape[1] == 1:
                return array[index]
            each = 1 if array.shape[1] == self.shape[1] else high
            return array[index, start // each : start // each - (-rows // each)]

        return jax.tree.map(rows_of, self)

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> Stored:
        """A weight of this shape with random numbers, in the format of this one and with the same optional parts, on
        which a kernel is compared with its reference at its first use. draw: numpy's generator, from which the numbers
        come."""
        return self.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16))

    @property
    def kind(self) -> str:
        """A phrase that identifies the weights for which a kernel that decodes them is compiled, and checked at its
        first use on a GPU (dispatch.first_use), only once: the format's name, and what else changes the kernel, such as
        quantised absmax."""
        return type(self).__name__

    def product_time(self, as_stored: bool, device: str) -> float:
        """The measured time of a product of many tokens with this weight, as a multiple of the time of a 16-bit
        product: 1 for formats that are decoded, because decoding is counted separately (`decoded_share`). The planner
        forecasts the time of a step with it.

        Args:
          as_stored: whether the product uses the format without decoding (`compute`).
          device: the device's name, such as "NVIDIA H200".
        """
        del as_stored, device
        return 1.0

    def decoded_share(self, as_stored: bool) -> float:
        """How many times a product in one direction, forward or backward, on average of both, writes the decoded
        tensor, or a copy of it, to memory: 1 if products decode it. The planner forecasts the time of a step with it.

        as_stored: whether products use the format without decoding (`compute`).
        """
        del as_stored
        return 1.0

    @on_any_mesh
    def decode(self, dtype=None) -> jax.Array:
        """The tensor in `dtype`, a floating-point dtype (by default that of `dtype_name`).

        Raises:
          ValueError: the arrays do not fit each other. TypeError: another kind of dtype.
        """
        op = f"{type(self).__name__}.decode"
        if (problem := self.problem()) is not None:
            raise ValueError(f"{op}: {problem}")
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{op}: dtype is {jnp.dtype(dtype)}; it must be a float dtype")
        return self._decode(dtype)

    def _decode(self, dtype) -> jax.Array:
        """The decoded tensor in `dtype`, or in that of `dtype_name` if it is None: what `decode` does once it has
        checked the arrays and the dtype. Each format implements it."""
        raise NotImplementedError


def dense(weight: jax.Array | Stored, dtype=None) -> jax.Array:
    """A weight as an array: an array unchanged, a quantised weight decoded to `dtype` (by default its `dtype_name`)."""
    return weight.decode(dtype) if isinstance(weight, Stored) else weight
