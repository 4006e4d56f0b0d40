"""What every format of weights in few bits is to those who use one."""

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
    """A tensor in few bits: a pytree, whose arrays are the leaves.

    A format is a frozen dataclass with `shape`, `dtype_name`, `problem`, `cut` and `_decode`, and with `encode` where
    weights are made here. The other methods have defaults for arrays whose first axes are those of the tensor.

    Attributes:
      dtype_name: the dtype that `decode` gives by default.
      shared: the names of arrays that every part of a divided tensor has whole.
      compute: the value of model.compute under which products take this format as it is stored, by kernels of its own
        (quant_matmul/as_stored.py); None: products decode it.
    """

    shape: tuple[int, ...]
    dtype_name: str
    shared: ClassVar[tuple[str, ...]] = ()
    compute: ClassVar[str | None] = None

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype_name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @staticmethod
    def encode(array: jax.Array) -> Stored:
        """An array [..., out, in] in this format; the bytes are the same on every device."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """Why the parts are not those of a tensor of this shape, or None."""
        raise NotImplementedError

    def cut(self, axis: int) -> int | None:
        """How it divides: into parts of multiples of so many indices along an axis, each of whole blocks; None: not
        along this axis."""
        raise NotImplementedError

    def divided(self, axis: int, parts: int) -> tuple[int | None, ...] | None:
        """Of each array, in the order of the leaves, the axis that it is cut along where the tensor is cut into equal
        parts along `axis`, or None if each part needs it whole. None alone: the blocks allow no such cut."""
        whole_blocks = self.cut(axis)
        if whole_blocks is None or self.shape[axis] % (whole_blocks * parts):
            return None
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        arrays = [f.name for f in fields if not f.metadata.get("static") and getattr(self, f.name) is not None]
        return tuple(None if name in self.shared else axis for name in arrays)

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """One tensor of this shape [E, rows, columns], of pieces [., columns] that are its rows in order. Leaves are
        numpy arrays."""
        structure = jax.tree.structure(pieces[0])
        leaves = [np.concatenate(parts) for parts in zip(*map(jax.tree.leaves, pieces), strict=True)]
        return jax.tree.unflatten(structure, [leaf.reshape(shape[0], -1, *leaf.shape[1:]) for leaf in leaves])

    def piece(self, index: int, start: int, rows: int) -> Self:
        """Of a tensor [E, ., columns] the rows from `start` on of one matrix: [rows, columns]."""
        high = self.cut(1) or rows  # rows that share an entry of an array which has fewer rows

        def rows_of(array: jax.Array) -> jax.Array:
            if array.shape[1] == 1:
                return array[index]
            each = 1 if array.shape[1] == self.shape[1] else high
            return array[index, start // each : start // each - (-rows // each)]

        return jax.tree.map(rows_of, self)

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> Stored:
        """Random numbers of this shape, stored as this weight is: for the check of a kernel at its first use."""
        return self.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16))

    @property
    def kind(self) -> str:
        """What of a weight makes a kernel that decodes it another one, in words."""
        return type(self).__name__

    def product_time(self, as_stored: bool, device: str) -> float:
        """The time of a product of many tokens on a device of this name, over that of an array in 16 bits; measured.
        as_stored: as `compute` has it, else decoded before it."""
        del as_stored, device
        return 1.0

    def decoded_share(self, as_stored: bool) -> float:
        """How many times each direction writes the tensor decoded, or copies it: 1 where products decode it."""
        del as_stored
        return 1.0

    @on_any_mesh
    def decode(self, dtype=None) -> jax.Array:
        """The tensor in `dtype`, a float one (by default that of `dtype_name`).

        Raises:
          ValueError: the parts do not fit together. TypeError: dtype is no float dtype.
        """
        op = f"{type(self).__name__}.decode"
        if (problem := self.problem()) is not None:
            raise ValueError(f"{op}: {problem}")
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{op}: dtype is {jnp.dtype(dtype)}; it must be a float dtype")
        return self._decode(dtype)

    def _decode(self, dtype) -> jax.Array:
        raise NotImplementedError


def dense(weight: jax.Array | Stored, dtype=None) -> jax.Array:
    """A weight as an array: an array as it is, one in few bits decoded to `dtype` (by default that it came in)."""
    return weight.decode(dtype) if isinstance(weight, Stored) else weight
