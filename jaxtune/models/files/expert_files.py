"""Translates between a model's expert matrices and the way checkpoints store them. A model, like transformers 5's
classes, has one gate_up_proj and one down_proj of all experts. Checkpoints have one linear per expert and matrix
(Qwen3-MoE, Mixtral, and quantised experts as vLLM loads them), or all experts in MXFP4 (gpt-oss).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxtune.models.families.common import ExpertFiles
from jaxtune.models.files import headers, shards, stored_weights
from jaxtune.models.files.file_plan import FileTensor, Piece
from jaxtune.models.files.stored_weights import StoredEntry

_FUSED = re.compile(r"(model\.layers\.\d+\.(?:\w+\.)?experts)\.(gate_up_proj|down_proj)")


@dataclasses.dataclass(frozen=True)
class StackedEntry(headers.TensorEntry):
    """An unquantised expert matrix [E, rows, in] whose bytes are those of its tensors, one for each expert and matrix.
    `file` and `offset` are the first one's.
    """

    parts: tuple[headers.TensorEntry, ...]  # the tensors by expert; of each expert, gate is before up


def gather_experts(
    entries: Mapping[str, headers.TensorEntry], files: ExpertFiles | None, num_experts: int
) -> dict[str, headers.TensorEntry]:
    """{name: entry} of a checkpoint with one StackedEntry, or StoredEntry if quantised, for each of the model's expert
    matrices. In keys the family's module of experts becomes `mlp`.

      entries: of the files, quantised weights combined (stored_weights.gather).
      files: the family's names; None: its files store a layer's experts in one tensor, and nothing changes.
      num_experts: of each layer.

    Raises ValueError if an expert's matrix is missing, one too many, does not fit or cannot be read.
    """
    if files is None:
        return dict(entries)
    module = f".{files.module}." if files.module else ".mlp."
    renamed = {name.replace(module, ".mlp."): entry for name, entry in entries.items()}
    pattern = re.compile(rf"(.+\.experts)\.(\d+)\.({files.gate}|{files.up}|{files.down})\.weight")
    groups: dict[str, dict[tuple[int, str], headers.TensorEntry]] = {}
    result = dict(renamed)
    for name in renamed:
        if match := pattern.fullmatch(name):
            kind = "down_proj" if match[3] == files.down else "gate_up_proj"
            groups.setdefault(f"{match[1]}.{kind}", {})[int(match[2]), match[3]] = result.pop(name)
    for name, pieces in groups.items():
        matrices = (files.down,) if name.endswith("down_proj") else (files.gate, files.up)
        first = next(iter(pieces.values()))
        if num_experts * len(matrices) > 2 * len(pieces):  # with over half missing, the number of experts is wrong
            raise ValueError(
                f"{first.file}: {name}: config.json says {num_experts} experts, and there are {len(pieces)} pieces"
            )
        expected_keys = [(expert, matrix) for expert in range(num_experts) for matrix in matrices]
        if set(pieces) != set(expected_keys):
            odd = sorted(set(pieces) ^ set(expected_keys))
            raise ValueError(
                f"{first.file}: {name} of {num_experts} experts: pieces missing or too many: "
                + ", ".join(f"{expert}.{matrix}" for expert, matrix in odd[:8])
            )
        matrix_entries = tuple(pieces[key] for key in expected_keys)
        rows, columns = matrix_entries[0].shape[0], matrix_entries[0].shape[-1]
        shape = (num_experts, len(matrices) * rows, columns)
        if any(isinstance(matrix_entry, StoredEntry) for matrix_entry in matrix_entries):
            result[name] = stored_weights.stacked(name, matrix_entries, shape, len(matrices))
            continue
        for matrix_entry in matrix_entries:
            headers.check_entry(matrix_entry)
        stored_weights.require_alike(matrix_entries)
        size = sum(matrix_entry.size_bytes for matrix_entry in matrix_entries)
        result[name] = StackedEntry(
            name, first.dtype, shape, matrix_entries[0].file, matrix_entries[0].offset, size, matrix_entries
        )
    return result


def read_stacked(entry: StackedEntry, start: int, stop: int) -> np.ndarray:
    """The bytes of an expert matrix, uint8, from `start` to before `stop`. Raises ValueError if a file ends early.

    entry: the tensors that make up the matrix, in order.
    start, stop: bytes from the first expert's first number.
    """
    data, offset = np.empty(stop - start, np.uint8), 0
    for tensor in entry.parts:
        first, last = max(start, offset), min(stop, offset + tensor.size_bytes)
        if first < last:
            data[first - start : last - start] = shards.read_bytes(tensor, first - offset, last - offset)
        offset += tensor.size_bytes
    return data


class ExpertPiece(NamedTuple):
    """A tensor of files that is the gate, up or down matrix of one expert in [E, rows, in]."""

    name: str  # the name of the tensor in files
    expert: int  # the expert's index, from 0 to before E
    start: int  # the first of its rows in that expert's matrix [rows, in]; it is not 0 for the up matrix


def pieces_of(name: str, shape: tuple[int, ...], files: ExpertFiles) -> tuple[int, list[ExpertPiece]]:
    """(rows of each, the tensors in which files store an expert matrix, by expert and row).

    name: the model's, such as model.layers.0.mlp.experts.gate_up_proj.
    shape: (E, rows, in) of the matrix.
    files: the family's names.
    """
    match = _FUSED.fullmatch(name)
    assert match is not None
    prefix = match[1].replace(".mlp.", f".{files.module}.")
    matrices = (files.down,) if match[2] == "down_proj" else (files.gate, files.up)
    rows = shape[1] // len(matrices)
    return rows, [
        ExpertPiece(f"{prefix}.{expert}.{matrix}.weight", expert, index * rows)
        for expert in range(shape[0])
        for index, matrix in enumerate(matrices)
    ]


def split_experts(name: str, value: jax.Array, dtype, files: ExpertFiles) -> tuple[Piece, ...]:
    """The Pieces in which an unquantised expert matrix is written, one tensor for each expert and matrix.

    name: the model's, such as model.layers.0.mlp.experts.gate_up_proj.
    value: [E, rows, in]; only the shape is used.
    dtype: in which the pieces are written.
    files: the family's names.
    """
    rows, pieces = pieces_of(name, value.shape, files)
    shape = (rows, value.shape[2])

    def tensor(expert: int, start: int) -> FileTensor:
        """One expert's rows from `start` on, cast."""
        return FileTensor(shape, np.dtype(dtype), lambda matrix: matrix[expert, start : start + rows].astype(dtype))

    return tuple(Piece({piece.name: tensor(piece.expert, piece.start)}) for piece in pieces)
