"""Translates between a model's expert matrices and the way checkpoints store them: `gather_experts` and `read_stacked`
when a model is loaded; when it is saved, `pieces_of` names the tensors of files, and `split_experts` plans how a matrix
that is not quantised is written to them (stored_weights.group plans quantised ones).

A model here, like transformers 5's classes, has one gate_up_proj and one down_proj with the matrices of all experts.
Checkpoints on the hub have one linear per expert and matrix (Qwen3-MoE, and Mixtral under other names), or all experts
in MXFP4 (gpt-oss as published). Quantised experts are stored as one linear per expert and matrix too, as transformers 4
saves and vLLM loads them. They become one tensor here, which requires that no quantisation block crosses from one
linear into the next. (Transformers 5 has experts as parameters, which its bitsandbytes integration does not quantise.)
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

_FUSED = re.compile(r"(model\.layers\.\d+\.(?:mlp\.)?experts)\.(gate_up_proj|down_proj)")


@dataclasses.dataclass(frozen=True)
class StackedEntry(headers.TensorEntry):
    """An expert matrix [E, rows, in] of the model, not quantised, that files store as one tensor for each expert and
    matrix (gate, up or down). gather_experts makes it, so that the loader handles the matrix like one tensor. The
    concatenated bytes of the parts are its bytes, which read_stacked reads. `name` and `shape` are the model's, `file`
    and `offset` are those of the first tensor, and `size_bytes` is the sum."""

    parts: tuple[headers.TensorEntry, ...]  # the tensors by expert; of each expert, gate is before up


def gather_experts(
    entries: Mapping[str, headers.TensorEntry], files: ExpertFiles | None, num_experts: int
) -> dict[str, headers.TensorEntry]:
    """Combines the entries of single experts' matrices to one entry for each expert matrix [E, rows, in] of the model,
    under the model's name for it: a StackedEntry, or a StoredEntry if they are quantised. The loader calls it for a
    mixture of experts. Returns {name: entry} with these and all other entries of the checkpoint. In all names, the
    family's module of experts (such as block_sparse_moe) is replaced by the model's, mlp; the entries of tensors that
    are not combined keep the files' names in `name`.

    Args:
      entries: {name: entry} of the files' tensors, with those of each quantised weight combined
        (stored_weights.gather).
      files: how the family names the matrices of single experts in files; None: the family's files store all experts of
        a layer in one tensor, and nothing is combined or renamed.
      num_experts: the number of experts of each layer, by the config.
    Raises:
      ValueError: the matrix of an expert is missing, is one too many, does not fit the others, or cannot be read
        (headers.check_entry).
    """
    if files is None:
        return dict(entries)
    module = f".{files.module}." if files.module else ".mlp."
    renamed = {name.replace(module, ".mlp."): entry for name, entry in entries.items()}
    pattern = re.compile(rf"(.+\.experts)\.(\d+)\.({files.gate}|{files.up}|{files.down})\.weight")
    groups: dict[str, dict[tuple[int, str], headers.TensorEntry]] = {}
    whole = dict(renamed)
    for name in renamed:
        if match := pattern.fullmatch(name):
            kind = "down_proj" if match[3] == files.down else "gate_up_proj"
            groups.setdefault(f"{match[1]}.{kind}", {})[int(match[2]), match[3]] = whole.pop(name)
    for name, pieces in groups.items():
        matrices = (files.down,) if name.endswith("down_proj") else (files.gate, files.up)
        first = next(iter(pieces.values()))
        if num_experts * len(matrices) > 2 * len(pieces):  # with over half missing, the number of experts is wrong
            raise ValueError(
                f"{first.file}: {name}: config.json says {num_experts} experts, and there are {len(pieces)} pieces"
            )
        wanted = [(expert, matrix) for expert in range(num_experts) for matrix in matrices]
        if set(pieces) != set(wanted):
            odd = sorted(set(pieces) ^ set(wanted))
            raise ValueError(
                f"{first.file}: {name} of {num_experts} experts: pieces missing or too many: "
                + ", ".join(f"{expert}.{matrix}" for expert, matrix in odd[:8])
            )
        parts = tuple(pieces[key] for key in wanted)
        rows, columns = parts[0].shape[0], parts[0].shape[-1]
        shape = (num_experts, len(matrices) * rows, columns)
        if any(isinstance(part, StoredEntry) for part in parts):
            whole[name] = stored_weights.stacked(name, parts, shape, len(matrices))
            continue
        for part in parts:
            headers.check_entry(part)
        stored_weights.require_alike(parts)
        size = sum(part.size_bytes for part in parts)
        whole[name] = StackedEntry(name, first.dtype, shape, parts[0].file, parts[0].offset, size, parts)
    return whole


def read_stacked(entry: StackedEntry, start: int, stop: int) -> np.ndarray:
    """The bytes of a stacked tensor (`entry`), counted over all its parts, from `start` to before `stop`: uint8[stop -
    start]. The loader reads and digests an expert matrix by it. Raises ValueError if a file ends early."""
    data, at = np.empty(stop - start, np.uint8), 0
    for part in entry.parts:
        first, last = max(start, at), min(stop, at + part.size_bytes)
        if first < last:
            data[first - start : last - start] = shards.read_bytes(part, first - at, last - at)
        at += part.size_bytes
    return data


class ExpertPiece(NamedTuple):
    """One tensor of a checkpoint's files that is a part of the model's expert matrix [E, rows, in]: the gate, up or
    down matrix of one expert. pieces_of makes the pieces, and returns how many rows each has. They are written when a
    model is saved."""

    name: str  # the name of the tensor in files
    expert: int  # the expert's index, from 0 to before E
    start: int  # the first of its rows in that expert's matrix [rows, in]; it is not 0 for the up matrix


def pieces_of(name: str, shape: tuple[int, ...], files: ExpertFiles) -> tuple[int, list[ExpertPiece]]:
    """The tensors in which files store an expert matrix, one for each expert and matrix (gate, up or down): (the number
    of rows of each, the tensors in the order of experts and rows). When a model is saved or exported, split_experts
    calls it for a matrix that is not quantised, and hf.py for a quantised one, which stored_weights.group then divides
    by the result. Another name than that of an expert matrix fails an assertion.

    name: the model's name of the matrix, such as model.layers.0.mlp.experts.gate_up_proj. shape: its shape, (E, rows,
    in). files: how the family names experts in files.
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
    """The Pieces (file_plan.py) as which an expert matrix [E, rows, in] that is not quantised is written to files: one
    for each expert and matrix (gate, up or down), which is one tensor of the files, as published checkpoints have them.

    Args:
      name: Hugging Face's name of the matrix of all experts.
      value: the matrix, of which only the shape is used; the Pieces later cut and cast the matrix that they are given.
      dtype: of the tensors in files.
      files: how the family names experts in files.
    """
    rows, pieces = pieces_of(name, value.shape, files)
    shape = (rows, value.shape[2])

    def tensor(expert: int, at: int) -> FileTensor:
        """The FileTensor of the rows from `at` on of one expert's matrix, cut from the whole matrix and cast."""
        return FileTensor(shape, np.dtype(dtype), lambda whole: whole[expert, at : at + rows].astype(dtype))

    return tuple(Piece({piece.name: tensor(piece.expert, piece.start)}) for piece in pieces)
