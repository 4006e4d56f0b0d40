"""Quantised weights in checkpoints: finds their tensors by name, reads them and plans how they are written, by each
format's layouts (pallas/formats/layout.py).
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
from jaxtune.pallas.formats.layout import FileTensor, Found


@dataclasses.dataclass(frozen=True)
class StoredEntry(headers.TensorEntry):
    """A quantised weight in files, [out, in] or an experts' [E, rows, in]: in pieces, one matrix for each expert and
    projection, or whole in gpt-oss's files.

    `shape` is the decoded weight's in the model, [E, in, out] for gpt-oss's experts. `dtype`, `file` and `offset` are
    the first codes', `size_bytes` is the sum over all tensors.
    """

    layout: Layout  # how its format stores it
    pieces: tuple[Found, ...]  # the matrices in files that are its rows in order; one, unless experts are in pieces

    @property
    def format_name(self) -> str:
        """A key of FORMATS, such as "nf4"."""
        return format_of(self.layout).name


def gather(entries: Mapping[str, headers.TensorEntry]) -> dict[str, headers.TensorEntry]:
    """A checkpoint's entries with the tensors of each quantised weight combined to a StoredEntry, and tensors of no
    weight removed. Reads only small tensors that say how others are stored. Raises ValueError for tensors that are
    missing or do not fit, or scales without codes.
    """
    left_out = tuple(key for layout in layouts() for key in layout.left_out)
    whole = {name: entry for name, entry in entries.items() if not name.endswith(left_out)}
    for layout in layouts():
        modules: dict[str, dict[str, str]] = {}
        for name, entry in whole.items():
            found = None if isinstance(entry, StoredEntry) else layout.key_of(name)
            if found is not None:
                modules.setdefault(found[0], {})[found[1]] = name
        for module, names in modules.items():
            tensors = {key: whole[name] for key, name in names.items()}
            if layout.claims(tensors):
                for name in names.values():
                    del whole[name]
                whole[module + layout.weight] = _entry(layout, module + layout.weight, tensors)
    for name, entry in whole.items():
        if not isinstance(entry, StoredEntry):
            _require_owned(name, entry)
    return whole


def _require_owned(name: str, entry: headers.TensorEntry) -> None:
    """Raises ValueError for a tensor that only accompanies codes, which are missing."""
    kinds = [each for each in layouts() if (found := each.key_of(name)) is not None and found[1] in each.others]
    if kinds:
        codes = " or ".join(dict.fromkeys(each.codes_dtype for each in kinds))
        raise ValueError(f"{entry.file}: {name} is there, but no weight in {codes} beside it")


def _entry(layout: Layout, name: str, tensors: Mapping[str, headers.TensorEntry]) -> StoredEntry:
    """tensors: {the layout's key, such as ".weight_scale": entry}."""
    found = layout.describe(name, tensors, lambda key: shards.read_bytes(tensors[key]))
    for key, part in tensors.items():
        if key not in layout.raw:
            headers.check_size(part)
    first = tensors[layout.codes]
    total = sum(part.size_bytes for part in tensors.values())
    return StoredEntry(name, first.dtype, found.shape, first.file, first.offset, total, layout, (found,))


def stacked(name: str, parts: Sequence[headers.TensorEntry], shape: tuple[int, ...], per_expert: int) -> StoredEntry:
    """The entry of an expert matrix (E, rows, in) that files store as quantised matrices.

      parts: by rows.
      per_expert: matrices an expert: 2 for gate_up_proj, 1 for down_proj.

    Raises ValueError for different formats or shapes, or blocks that cannot form one tensor.
    """
    packed = [part for part in parts if isinstance(part, StoredEntry)]
    first = parts[0]
    if len(packed) < len(parts) or len({part.layout for part in packed}) > 1:
        kinds = sorted({part.format_name if isinstance(part, StoredEntry) else part.dtype for part in parts})
        raise ValueError(f"{first.file}: {name}: its experts' matrices are stored in different formats: {kinds}")
    require_alike(parts)
    layout, pieces = packed[0].layout, tuple(piece for part in packed for piece in part.pieces)
    if (problem := layout.joining(pieces, per_expert)) is not None:
        raise ValueError(f"{first.file}: {name}: {problem}")
    total = sum(part.size_bytes for part in parts)
    return StoredEntry(name, first.dtype, shape, first.file, first.offset, total, layout, pieces)


def require_alike(parts: Sequence[headers.TensorEntry]) -> None:
    """Raises ValueError unless all are matrices of one shape and dtype."""
    first = parts[0]
    for part in parts:
        if (part.shape, part.dtype) != (first.shape, first.dtype) or len(part.shape) != 2:
            raise ValueError(
                f"{part.file}: {part.name} is {part.dtype}{list(part.shape)}, "
                f"{first.name} {first.dtype}{list(first.shape)}"
            )


def read(entry: StoredEntry, dtype_name: str) -> tuple[Stored, Digest]:
    """(the weight with numpy leaves, the digest of its tensors); experts are joined to [E, rows, in]. dtype_name: the
    model's, to which the weight is decoded if its file names no other. Raises ValueError for impossible values, or a
    file that ends early.
    """
    layout, weights, digests = entry.layout, [], []
    for found in entry.pieces:
        headers: Mapping = found.tensors
        arrays = {k: shards.read_bytes(h) if k in layout.raw else shards.read_tensor(h) for k, h in headers.items()}
        digests.append([Digest.of(label, arrays[key]) for label, key in layout.digested(found)])
        weights.append(layout.read(found, arrays, dtype_name))
    if len(entry.pieces[0].shape) == len(entry.shape):  # one matrix, or all experts in one piece
        return weights[0], Digest.joined(digests[0])
    if layout.digests_pieces:
        digest = Digest.joined(map(Digest.joined, digests))
    else:
        digest = Digest.joined(part for parts in digests for part in parts)
    return type(weights[0]).joined(weights, entry.shape), digest


def group(name: str, weight: Stored, make: Callable[[], Stored], pieces: tuple[int, Iterable] | None) -> Group:
    """Plans how a quantised weight is written; values are computed later, one weight at a time. Warns for experts if
    the layout has an expert_note.

      weight: may have jax.ShapeDtypeStructs.
      make: returns it with numbers; called for writing, and before that once if the header needs one (NF4) and `weight`
      lacks it or is cut.
      pieces: for experts [E, rows, in], as pieces_of returns them; None: a single matrix.

    Raises ValueError for blocks that cross from one piece into the next.
    """
    layout = format_of(weight).layout(weight)
    if pieces is None:
        return Group(make, (Piece(_named(layout, name, weight, layout.header_number(weight, make))),))
    rows, places = pieces
    if (problem := layout.splitting(weight, rows)) is not None:
        raise ValueError(f"save_pretrained: {name} {problem}: use dequantize first (jaxtune.models.files.quant)")
    if layout.expert_note is not None:
        warnings.warn(layout.expert_note, stacklevel=4)
    found, header_number = [], None
    for number, (piece, expert, start) in enumerate(places):
        cut = functools.partial(_piece, expert=expert, start=start, rows=rows)
        shapes = jax.eval_shape(cut, weight)
        header_number = layout.header_number(shapes, make) if number == 0 else header_number
        found.append(Piece(_named(layout, piece, shapes, header_number), cut))
    return Group(make, tuple(found))


def _piece(whole: Stored, expert: int, start: int, rows: int) -> Stored:
    return whole.piece(expert, start, rows)


def _named(layout: Layout, name: str, weight: Stored, number: float | None) -> dict[str, FileTensor]:
    """{name in the file: FileTensor}. number: of Layout.header_number; one for all pieces of an experts' weight."""
    module = name.removesuffix(layout.weight)
    return {module + key: tensor for key, tensor in layout.tensors(weight, number).items()}
