"""A plan of tensors for files: shapes are known first, because a header precedes its data; each value is computed when
it is written, because the tensors of a changed model do not all fit in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtune.models.placement.host_pieces import Array
from jaxtune.pallas.formats.layout import FileTensor


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tensors of a file that are computed from one section of the model's tensor, such as one expert, which is cut once
    for its codes and its scales.
    """

    # {name in the file: its FileTensor: the shape, the dtype, and the function that computes it from the part}
    tensors: Mapping[str, FileTensor]
    # takes the model's tensor and returns the part from which these tensors are computed
    cut: Callable[[Any], Any] = lambda value: value


@dataclasses.dataclass(frozen=True)
class Group:
    """The tensors of files for one tensor of the model."""

    make: Callable[[], Any]  # computes the model's tensor, an array or quantised
    pieces: tuple[Piece, ...]  # the tensors of files, in order

    @property
    def tensors(self) -> dict[str, FileTensor]:
        """{name in the file: tensor} in the order in which they are written."""
        return {name: tensor for piece in self.pieces for name, tensor in piece.tensors.items()}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """A new group with `rename` (old name -> new) applied to the names in files."""
        pieces = [
            Piece({rename(key): tensor for key, tensor in piece.tensors.items()}, piece.cut) for piece in self.pieces
        ]
        return Group(self.make, tuple(pieces))

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yields (name, array) in order. The model's tensor is computed with the first and released with the last, so
        that one is in memory at a time. All processes must iterate.
        """
        value = self.make()
        for number, piece in enumerate(self.pieces):
            section = piece.cut(value)
            if number == len(self.pieces) - 1:
                value = None
            for count, (name, tensor) in enumerate(piece.tensors.items(), 1):
                array = tensor.array_of(section)
                if count == len(piece.tensors):
                    section = None
                yield name, array
                del array


Planned = dict[str, Group]  # by the model's tensor names, in the order in which they are written


def single_tensor_group(
    name: str, shape: Iterable[int], dtype: Any, make: Callable[[], Any], compute: Callable[[Any], Any]
) -> Group:
    """The Group of a model's tensor that is one tensor of a file.

    name: of the tensor in the file.
    shape, dtype: of the array to write.
    make: returns the model's tensor.
    compute: the model's tensor -> the array to write.
    """
    return Group(make, (Piece({name: FileTensor(tuple(shape), np.dtype(dtype), compute)}),))


BESIDE_BYTES = 16 << 20  # room for config, tokenizer and headers


def size_bytes(planned: Planned) -> int:
    """Bytes that the files need on disk, with BESIDE_BYTES."""
    return sum(group.size_bytes for group in planned.values()) + BESIDE_BYTES
