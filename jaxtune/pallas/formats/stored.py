"""What every format of weights in few bits is to those who use one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.meshes import on_any_mesh


class Stored:
    """A tensor in few bits: a pytree, whose arrays are the leaves.

    A format is a frozen dataclass with `shape`, `dtype_name` (the dtype that `decode` gives by default), `problem`,
    `cut` and `_decode`; one that is made here has `encode`, too.
    """

    shape: tuple[int, ...]
    dtype_name: str
    shared: ClassVar[tuple[str, ...]] = ()  # names of arrays that every part of a divided tensor has whole

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
