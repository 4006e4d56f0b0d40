"""How checkpoints store the matrices of a layer's experts.

Here, and in transformers 5's classes, gate_up_proj and down_proj hold those of all experts. Checkpoints on the hub
hold a linear for each expert and matrix (Qwen3-MoE, Mixtral under names of its own), or all experts in MXFP4 (gpt-oss
as published): 32 numbers of four bits along the input dimension share a scale, a power of two (OCP Microscaling Formats
v1.0; e2m1 numbers, e8m0 scales, two numbers a byte, the first in the low nibble).

In four bits the hub holds what bitsandbytes makes of a linear for each expert and matrix, as transformers 4 saves and
loads it. (Transformers 5 has experts as parameters, which its bitsandbytes leaves alone; there is no four-bit file of
gpt-oss's, which were never linears.) A layer's experts are one tensor here: its blocks do not run from one expert into
the next where an expert's matrix is whole blocks, and then its bytes are those of the pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.families.common import ExpertFiles
from jaxtune.models.files import fp8_files, quant, shards
from jaxtune.models.files.digests import Digest
from jaxtune.models.files.file_plan import FileTensor, Piece
from jaxtune.pallas.formats import FP8, MXFP4, FourBit, mxfp4
from jaxtune.pallas.formats.four_bit import BLOCK, NESTED_BLOCK

_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclasses.dataclass(frozen=True)
class StackedEntry(shards.TensorEntry):
    """A tensor that lies in pieces, one after the other: `file` and `offset` are the first one's."""

    parts: tuple[shards.TensorEntry, ...]


@dataclasses.dataclass(frozen=True)
class StackedPackedEntry(shards.TensorEntry):
    """A tensor that lies in four-bit pieces, one after the other; `size_bytes` is the sum of theirs."""

    parts: tuple[quant.PackedEntry, ...]


@dataclasses.dataclass(frozen=True)
class MXFP4Entry(shards.TensorEntry):
    """A tensor [E, in, out] that lies in MXFP4 as [E, out, in]; `size_bytes` is the sum of its parts'."""

    blocks: shards.TensorEntry  # uint8[E, out, in / 32, 16]
    scales: shards.TensorEntry  # uint8[E, out, in / 32]


def gather_experts(
    entries: Mapping[str, shards.TensorEntry], files: ExpertFiles | None, num_experts: int
) -> dict[str, shards.TensorEntry]:
    """The entries, with the pieces of each experts' matrix in one entry under the name that it has here.

    Raises:
      ValueError: a piece that is missing or does not fit the others.
    """
    if files is None:
        return _gather_mxfp4(entries)
    renamed = {name.replace(f".{files.module}.", ".mlp."): entry for name, entry in entries.items()}
    pattern = re.compile(rf"(.+\.mlp\.experts)\.(\d+)\.({files.gate}|{files.up}|{files.down})\.weight")
    groups: dict[str, dict[tuple[int, str], shards.TensorEntry]] = {}
    whole = dict(renamed)
    for name in renamed:
        if match := pattern.fullmatch(name):
            kind = "down_proj" if match[3] == files.down else "gate_up_proj"
            groups.setdefault(f"{match[1]}.{kind}", {})[int(match[2]), match[3]] = whole.pop(name)
    for name, pieces in groups.items():
        matrices = (files.down,) if name.endswith("down_proj") else (files.gate, files.up)
        first = next(iter(pieces.values()))
        if num_experts * len(matrices) > 2 * len(pieces):  # not one piece missing: another number of experts
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
        packed = tuple(part for part in parts if isinstance(part, quant.PackedEntry))
        if packed and len({getattr(part, "quant_type", None) for part in parts}) > 1:
            raise ValueError(
                f"{first.file}: {name}: of its experts' matrices some are in four bits, or of another type"
            )
        in_fp8 = tuple(part for part in parts if isinstance(part, fp8_files.FP8Entry))
        for part in parts:
            if not packed and not isinstance(part, fp8_files.FP8Entry):
                shards.check_entry(part)
            if (part.shape, part.dtype) != (first.shape, first.dtype) or len(part.shape) != 2:
                raise ValueError(
                    f"{part.file}: {part.name} is {part.dtype}{list(part.shape)}, "
                    f"{first.name} {first.dtype}{list(first.shape)}"
                )
        rows, columns = first.shape
        if packed and rows * columns % BLOCK:
            raise ValueError(
                f"{first.file}: {first.name} {list(first.shape)} is not whole blocks of {BLOCK} four-bit numbers: "
                "experts like that can only be loaded from 16 bits"
            )
        fields = (
            name,
            first.dtype,
            (num_experts, len(matrices) * rows, columns),
            parts[0].file,
            parts[0].offset,
            sum(part.size_bytes for part in parts),
        )
        if in_fp8:
            whole[name] = fp8_files.stacked(fields, in_fp8, len(matrices))
        else:
            whole[name] = StackedPackedEntry(*fields, packed) if packed else StackedEntry(*fields, parts)
    return whole


def _gather_mxfp4(entries: Mapping[str, shards.TensorEntry]) -> dict[str, shards.TensorEntry]:
    whole = dict(entries)
    for key, blocks in entries.items():
        name = key.removesuffix("_blocks")
        if name == key or not _FUSED.fullmatch(name):
            continue
        scales = entries.get(f"{name}_scales")
        where = f"{blocks.file}: {name}"
        if scales is None:
            raise ValueError(f"{where}_blocks is there, but {name}_scales is missing")
        if (blocks.dtype, scales.dtype) != ("U8", "U8") or blocks.shape != (*scales.shape, mxfp4.BLOCK // 2):
            shapes = f"blocks {blocks.dtype}{list(blocks.shape)} do not fit scales {scales.dtype}{list(scales.shape)}"
            raise ValueError(f"{where}: {shapes}")
        for part in (blocks, scales):
            if part.size_bytes != np.prod(part.shape, dtype=np.int64):
                raise ValueError(f"{part.file}: {part.name} {list(part.shape)} has {part.size_bytes} bytes")
        experts, out_size, groups = scales.shape
        shape = (experts, groups * mxfp4.BLOCK, out_size)
        size = blocks.size_bytes + scales.size_bytes
        del whole[f"{name}_blocks"], whole[f"{name}_scales"]
        whole[name] = MXFP4Entry(name, "U8", shape, blocks.file, blocks.offset, size, blocks, scales)
    return whole


def read_stacked(entry: StackedEntry, start: int, stop: int) -> np.ndarray:
    """uint8[stop - start]: the tensor's bytes from `start` to before `stop`."""
    data, at = np.empty(stop - start, np.uint8), 0
    for part in entry.parts:
        first, last = max(start, at), min(stop, at + part.size_bytes)
        if first < last:
            data[first - start : last - start] = shards.read_bytes(part, first - at, last - at)
        at += part.size_bytes
    return data


def read_packed_experts(entry: StackedPackedEntry) -> tuple[FourBit, Digest]:
    """(the tensor, its leaves numpy arrays; the digest of all its pieces). The values are exactly those of the pieces.

    Pieces that were doubly quantised each for itself have an offset each: their absmax are then kept in float32.
    """
    pieces, digests = zip(*map(quant.read_packed, entry.parts), strict=True)
    first, whole_groups = pieces[0], pieces[0].size % (BLOCK * NESTED_BLOCK) == 0
    nested = (None, None, None)
    if whole_groups and all(piece.offset is not None and piece.offset == first.offset for piece in pieces):
        absmax = np.concatenate([piece.absmax for piece in pieces])
        nested = (np.concatenate([piece.nested_absmax for piece in pieces]), first.nested_map, first.offset)
    else:
        absmax = np.concatenate([np.asarray(piece.block_absmax()) for piece in pieces])
    codes = np.concatenate([piece.codes for piece in pieces])
    whole = type(first)(codes, absmax, *nested, shape=entry.shape, dtype_name=first.dtype_name)
    return whole, Digest.joined(digests)


def read_mxfp4(entry: MXFP4Entry, dtype) -> tuple[jax.Array, Digest]:
    """([E, in, out] in dtype, the digest). Exact in every dtype that holds the scales."""
    blocks, scales = (shards.read_bytes(part).reshape(part.shape) for part in (entry.blocks, entry.scales))
    digest = Digest.joined((Digest.of(entry.name, blocks), Digest.of("scales", scales)))
    return _decode_mxfp4(blocks, scales, jnp.dtype(dtype).name), digest


@functools.partial(jax.jit, static_argnums=2)
def _decode_mxfp4(blocks: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
    """blocks uint8[E, out, in / 32, 16], scales uint8[E, out, in / 32] -> [E, in, out] in dtype."""
    return MXFP4.from_blocks(blocks, scales, dtype).decode().swapaxes(1, 2)


def _pieces(name: str, shape: tuple[int, ...], files: ExpertFiles) -> tuple[int, list[tuple[str, int, int]]]:
    """(rows of a piece, [(its tensor's name, expert, the piece's first row of that expert's)]), in order."""
    match = _FUSED.fullmatch(name)
    assert match is not None
    prefix = match[1].replace(".mlp.", f".{files.module}.")
    matrices = (files.down,) if match[2] == "down_proj" else (files.gate, files.up)
    rows = shape[1] // len(matrices)
    return rows, [
        (f"{prefix}.{expert}.{matrix}.weight", expert, index * rows)
        for expert in range(shape[0])
        for index, matrix in enumerate(matrices)
    ]


def split_experts(name: str, value: jax.Array, dtype, files: ExpertFiles) -> tuple[Piece, ...]:
    """What a checkpoint stores for an experts' matrix, of which no more than the shape need be known."""
    rows, pieces = _pieces(name, value.shape, files)
    shape = (rows, value.shape[2])

    def tensor(expert: int, at: int) -> FileTensor:
        return FileTensor(shape, np.dtype(dtype), lambda whole: whole[expert, at : at + rows].astype(dtype))

    return tuple(Piece({piece: tensor(expert, at)}) for piece, expert, at in pieces)


def split_packed_experts(
    name: str, value: FourBit | FP8, files: ExpertFiles | None, make: Callable[[], Any]
) -> tuple[Piece, ...]:
    """As split_experts, of a matrix in four bits or in FP8: the bytes that it has.

    Pieces that are not whole groups of doubly quantised absmax have theirs in float32.

    Args:
      make: gives the matrix.
    Raises:
      ValueError: files have no place for it, or its blocks run across the pieces.
    """
    if files is None:
        raise ValueError(
            f"save_pretrained: {name} is quantised, and no checkpoint of this family stores its experts so: "
            "use dequantize first (jaxtune.models.files.quant)"
        )
    rows, pieces = _pieces(name, value.shape, files)
    if isinstance(value, FP8):
        return fp8_files.split_experts(value, rows, pieces)
    size = rows * value.shape[2]
    if size % BLOCK:
        raise ValueError(
            f"save_pretrained: {name} is in four bits, and its pieces of {rows} x {value.shape[2]} are not whole "
            f"blocks of {BLOCK}: use dequantize first (jaxtune.models.files.quant)"
        )
    again = value.offset is not None and size % (BLOCK * NESTED_BLOCK) != 0
    weight: FourBit = jax.eval_shape(_singly_quantised, value) if again else value
    # Numbers of the tensor for one entry of each array.
    numbers = {"codes": 2, "absmax": BLOCK, "nested_absmax": BLOCK * NESTED_BLOCK}

    def part(whole: FourBit, field: str, number: int) -> jax.Array:
        count = size // numbers[field]
        return jax.lax.dynamic_slice_in_dim(getattr(whole, field), number * count, count)

    def first(whole: FourBit) -> FourBit:
        cut = {field: part(whole, field, 0) for field in numbers if getattr(whole, field) is not None}
        return dataclasses.replace(whole, **cut, shape=(rows, whole.shape[2]))

    offset = quant.offset_of(weight, make)
    tensors: dict[str, FileTensor] = {}
    for suffix, (shape, dtype, of) in quant.checkpoint_tensors("", jax.eval_shape(first, weight), offset).items():
        field = suffix.removeprefix(".") or "codes"
        for number, (piece, _, _) in enumerate(pieces):

            def own(whole: FourBit, field=field, number=number, shape=shape) -> jax.Array:
                return part(whole, field, number).reshape(shape)

            tensors[piece + suffix] = FileTensor(shape, dtype, own if field in numbers else of)
    return (Piece(tensors, _singly_quantised if again else _as_it_is),)


def _as_it_is(weight: FourBit) -> FourBit:
    return weight


def _singly_quantised(weight: FourBit) -> FourBit:
    """The weight with its absmax in float32."""
    return dataclasses.replace(weight, absmax=weight.block_absmax(), nested_absmax=None, nested_map=None, offset=None)
