"""A plan of the tensors that are written to files: their shapes are known first, and each is computed when it is
written. Checkpoints, and models exported as safetensors, are planned so, because a file's header precedes its data, and
the tensors of a changed model do not all fit in memory. A plan (Planned) is a dict of Groups, one for each tensor of
the model and each passthrough tensor. A Group consists of Pieces, a Piece of tensors of a file; `one` makes a Group of
a single tensor, and `size_bytes` adds up a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtune.models.placement.host_pieces import Array
from jaxtune.pallas.formats.layout import FileTensor


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tensors of a file that are computed, one after another, from the same part of one of the model's tensors, such as
    one expert of an expert matrix. A Group consists of pieces, so that such a part is cut only once for its codes and
    its scales."""

    # {name in the file: its FileTensor: the shape, the dtype, and the function that computes it from the part}
    tensors: Mapping[str, FileTensor]
    # takes the model's tensor and returns the part from which these tensors are computed
    cut: Callable[[Any], Any] = lambda value: value


@dataclasses.dataclass(frozen=True)
class Group:
    """All tensors that files contain for one tensor of the model, and how they are computed from it. Saving and
    exporting plan a folder of safetensors files as such groups before they write. A file's header is made from
    `tensors`, and `arrays` then computes the values in the same order."""

    make: Callable[[], Any]  # computes the model's tensor, an array or quantised
    pieces: tuple[Piece, ...]  # the tensors of files, in order

    @property
    def tensors(self) -> dict[str, FileTensor]:
        """{name in the file: tensor} of all pieces, in the order in which they are written."""
        return {name: tensor for piece in self.pieces for name, tensor in piece.tensors.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes that all tensors of the group take in files; the writer divides groups among files by it."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """A new group, the same except that `rename` (old name -> new one) is applied to the names in files, for a text
        model that is written as part of a whole model."""
        pieces = [Piece({rename(key): part for key, part in each.tensors.items()}, each.cut) for each in self.pieces]
        return Group(self.make, tuple(pieces))

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yields (name, array) of each tensor in order.

        The model's tensor is computed when the first array is asked for and released with the last, so that a caller
        that uses one group at a time has one tensor of the model in memory. In a run of several processes all must
        iterate, because each has only parts of a divided tensor.
        """
        value = self.make()
        for number, piece in enumerate(self.pieces):
            part = piece.cut(value)
            if number == len(self.pieces) - 1:
                value = None
            for count, (name, tensor) in enumerate(piece.tensors.items(), 1):
                array = tensor.of(part)
                if count == len(piece.tensors):
                    part = None
                yield name, array
                del array


Planned = dict[str, Group]  # by the model's tensor names, in the order in which they are written


def one(name: str, shape: Iterable[int], dtype: Any, make: Callable[[], Any], of: Callable[[Any], Any]) -> Group:
    """The Group of a model's tensor that is one tensor of a file, as most tensors are that are not quantised; saving
    plans passthrough tensors so too.

    Args:
      name: of the tensor in the file.
      shape, dtype: of the tensor in the file.
      make: computes the model's tensor.
      of: takes the model's tensor and returns the array that is written.
    """
    return Group(make, (Piece({name: FileTensor(tuple(shape), np.dtype(dtype), of)}),))


def size_bytes(planned: Planned) -> int:
    """Bytes that the files of a plan need on disk: those of all tensors, and 16 MiB for config, tokenizer and headers.
    Before weights are written, saving and exporting check that the disk has them (require_space).

    planned: {name of a model's tensor: the Group of the file tensors that are computed from it}."""
    return sum(group.size_bytes for group in planned.values()) + (16 << 20)
