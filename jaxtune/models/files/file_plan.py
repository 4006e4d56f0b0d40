"""What files hold of a model, known by shape before any of it is made, and made one tensor of the model at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtune.models.placement import partition
from jaxtune.pallas.formats.layout import FileTensor


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tensors of a file, by name, that are made together. cut: what they are made of, of the model's tensor."""

    tensors: Mapping[str, FileTensor]
    cut: Callable[[Any], Any] = lambda value: value


@dataclasses.dataclass(frozen=True)
class Group:
    """What files hold of one tensor of a model. make: gives that tensor, an array or one in few bits."""

    make: Callable[[], Any]
    pieces: tuple[Piece, ...]

    @property
    def tensors(self) -> dict[str, FileTensor]:
        return {name: tensor for piece in self.pieces for name, tensor in piece.tensors.items()}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """The same, with other names in files."""
        pieces = [Piece({rename(key): part for key, part in each.tensors.items()}, each.cut) for each in self.pieces]
        return Group(self.make, tuple(pieces))

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array in host memory) of each tensor, in order. The model's tensor is made when the first is asked
        for, and let go with the last: whoever uses one at a time has one at a time."""
        value = self.make()
        for number, piece in enumerate(self.pieces):
            part = piece.cut(value)
            if number == len(self.pieces) - 1:
                value = None
            for count, (name, tensor) in enumerate(piece.tensors.items(), 1):
                array = np.asarray(partition.on_host(tensor.of(part)), order="C")
                if count == len(piece.tensors):
                    part = None
                if array.shape != tuple(tensor.shape) or array.dtype != tensor.dtype:
                    meant, found = f"{tensor.dtype.name}{tensor.shape}", f"{array.dtype.name}{array.shape}"
                    raise ValueError(f"{name}: planned as {meant}, found {found}")
                yield name, array


Planned = dict[str, Group]


def one(name: str, shape: Iterable[int], dtype: Any, make: Callable[[], Any], of: Callable[[Any], Any]) -> Group:
    """The Group of a tensor that is one tensor of a file, too."""
    return Group(make, (Piece({name: FileTensor(tuple(shape), np.dtype(dtype), of)}),))


def size_bytes(planned: Planned) -> int:
    """Bytes of the tensors, and room for the other files."""
    return sum(group.size_bytes for group in planned.values()) + (16 << 20)
