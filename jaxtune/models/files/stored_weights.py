"""Quantised weights in checkpoints: finds their tensors by name, reads them and plans how they are written, by each
format's layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from jaxtune.models.files import headers, shards
from jaxtune.models.files.digests import Digest
from jaxtune.models.files.file_plan import Group, Piece
from jaxtune.pallas.formats import Layout, Stored, format_of, layouts
from jaxtune.pallas.formats.layout import FileTensor, FoundWeight


@dataclasses.dataclass(frozen=True)
class StoredEntry(headers.TensorEntry):
    """A quantised weight in files, [out, in] or an experts' [E, rows, in]: in pieces, one matrix for each expert and
    projection, or whole in gpt-oss's files. `shape` is the decoded weight's. `dtype`, `file` and `offset` are the first
    codes'.
    """

    layout: Layout  # how its format stores it
    pieces: tuple[
        FoundWeight, ...
    ]  # the matrices in files that are its rows in order; one, unless experts are in pieces

    @property
    def format_name(self) -> str:
        """A key of FORMATS, such as "nf4"."""
        return format_of(self.layout).name


def gather(entries: Mapping[str, headers.TensorEntry]) -> dict[str, headers.TensorEntry]:
    """A checkpoint's entries with the tensors of each quantised weight combined to a StoredEntry. Reads only small
    tensors that say how others are stored. Raises ValueError for tensors that are missing or do not fit.
    """
    left_out = tuple(key for layout in layouts() for key in layout.ignored_keys)
    result = {name: entry for name, entry in entries.items() if not name.endswith(left_out)}
    for layout in layouts():
        modules: dict[str, dict[str, str]] = {}
        for name, entry in result.items():
            module_and_key = None if isinstance(entry, StoredEntry) else layout.key_of(name)
            if module_and_key is not None:
                modules.setdefault(module_and_key[0], {})[module_and_key[1]] = name
        for module, names in modules.items():
            tensors = {key: result[name] for key, name in names.items()}
            if layout.claims(tensors):
                for name in names.values():
                    del result[name]
                result[module + layout.weight] = _entry(layout, module + layout.weight, tensors)
    for name, entry in result.items():
        if not isinstance(entry, StoredEntry):
            _require_owned(name, entry)
    return result


def _require_owned(name: str, entry: headers.TensorEntry) -> None:
    """Raises ValueError for a tensor that only accompanies codes, which are missing."""
    kinds = [
        layout
        for layout in layouts()
        if (module_and_key := layout.key_of(name)) is not None and module_and_key[1] in layout.scale_keys
    ]
    if kinds:
        codes = " or ".join(dict.fromkeys(layout.codes_dtype for layout in kinds))
        raise ValueError(f"{entry.file}: {name} is there, but no weight in {codes} beside it")


def _entry(layout: Layout, name: str, tensors: Mapping[str, headers.TensorEntry]) -> StoredEntry:
    """tensors: {the layout's key, such as ".weight_scale": entry}."""
    description = layout.describe(name, tensors, lambda key: shards.read_bytes(tensors[key]))
    for key, tensor in tensors.items():
        if key not in layout.raw:
            headers.check_size(tensor)
    first = tensors[layout.codes]
    total = sum(tensor.size_bytes for tensor in tensors.values())
    return StoredEntry(name, first.dtype, description.shape, first.file, first.offset, total, layout, (description,))


def stacked(name: str, entries: Sequence[headers.TensorEntry], shape: tuple[int, ...], per_expert: int) -> StoredEntry:
    """The entry of an expert matrix that files store as quantised matrices. Raises ValueError for different formats or
    shapes, or blocks that cannot form one tensor.

      name: of the matrix, for errors.
      entries: of its pieces, by expert and row.
      shape: (E, rows, in) of the matrix.
      per_expert: matrices an expert: 2 for gate_up_proj, 1 for down_proj.
    """
    packed = [entry for entry in entries if isinstance(entry, StoredEntry)]
    first = entries[0]
    if len(packed) < len(entries) or len({entry.layout for entry in packed}) > 1:
        kinds = sorted({entry.format_name if isinstance(entry, StoredEntry) else entry.dtype for entry in entries})
        raise ValueError(f"{first.file}: {name}: its experts' matrices are stored in different formats: {kinds}")
    require_alike(entries)
    layout, pieces = packed[0].layout, tuple(piece for entry in packed for piece in entry.pieces)
    if (problem := layout.joining(pieces, per_expert)) is not None:
        raise ValueError(f"{first.file}: {name}: {problem}")
    total = sum(entry.size_bytes for entry in entries)
    return StoredEntry(name, first.dtype, shape, first.file, first.offset, total, layout, pieces)


def require_alike(entries: Sequence[headers.TensorEntry]) -> None:
    """Raises ValueError unless all are matrices of one shape and dtype."""
    first = entries[0]
    for entry in entries:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype) or len(entry.shape) != 2:
            raise ValueError(
                f"{entry.file}: {entry.name} is {entry.dtype}{list(entry.shape)}, "
                f"{first.name} {first.dtype}{list(first.shape)}"
            )


def read(entry: StoredEntry, dtype_name: str) -> tuple[Stored, Digest]:
    """(the weight with numpy leaves, the digest of its tensors); experts are joined to [E, rows, in]. dtype_name: to
    which the weight is decoded if its file names no other. Raises ValueError for impossible values, or a file that ends
    early.
    """
    layout, weights, digests = entry.layout, [], []
    for piece in entry.pieces:
        headers: Mapping = piece.tensors
        arrays = {k: shards.read_bytes(h) if k in layout.raw else shards.read_tensor(h) for k, h in headers.items()}
        digests.append([Digest.of(label, arrays[key]) for label, key in layout.digested(piece)])
        weights.append(layout.read(piece, arrays, dtype_name))
    if len(entry.pieces[0].shape) == len(entry.shape):  # one matrix, or all experts in one piece
        return weights[0], Digest.joined(digests[0])
    if layout.digests_pieces:
        digest = Digest.joined(map(Digest.joined, digests))
    else:
        digest = Digest.joined(tensor_digest for piece_digests in digests for tensor_digest in piece_digests)
    return type(weights[0]).joined(weights, entry.shape), digest


def group(name: str, weight: Stored, make: Callable[[], Stored], pieces: tuple[int, Iterable] | None) -> Group:
    """Plans how a quantised weight is written; values are computed later, one weight at a time. Warns for experts if
    the layout has an expert_note.

      name: the weight's in the model by Hugging Face's names; pieces of experts have their own.
      weight: may have jax.ShapeDtypeStructs.
      make: returns it with numbers; also called once for the header if that needs one (NF4).
      pieces: for experts [E, rows, in], as pieces_of returns them; None: a single matrix.

    Raises ValueError for blocks that cross from one piece into the next.
    """
    layout = format_of(weight).layout(weight)
    if pieces is None:
        return Group(make, (Piece(_named(layout, name, weight, layout.header_number(weight, make))),))
    rows, cuts = pieces
    if (problem := layout.splitting(weight, rows)) is not None:
        raise ValueError(f"save_pretrained: {name} {problem}: use dequantize first (jaxtune.models.files.quant)")
    if layout.expert_note is not None:
        warnings.warn(layout.expert_note, stacklevel=4)
    file_pieces, header_number = [], None
    for number, (piece, expert, start) in enumerate(cuts):
        cut_piece = functools.partial(_piece, expert=expert, start=start, rows=rows)
        shapes = jax.eval_shape(cut_piece, weight)
        header_number = layout.header_number(shapes, make) if number == 0 else header_number
        file_pieces.append(Piece(_named(layout, piece, shapes, header_number), cut_piece))
    return Group(make, tuple(file_pieces))


def _piece(experts: Stored, expert: int, start: int, rows: int) -> Stored:
    return experts.piece(expert, start, rows)


def _named(layout: Layout, name: str, weight: Stored, number: float | None) -> dict[str, FileTensor]:
    """number: of Layout.header_number."""
    module = name.removesuffix(layout.weight)
    return {module + key: tensor for key, tensor in layout.tensors(weight, number).items()}
