"""Quantised weights in checkpoints: finds their tensors by name (`gather`), reads them (`read`) and plans how they are
written (`group`), for loading, saving and exporting; `stacked` combines the entries of single experts' quantised
matrices, and `require_alike` checks that single experts' matrices, quantised or not, have one shape and dtype. A
StoredEntry describes a weight in files.

How each format stores its weights is described by its layouts (jaxtune/pallas/formats/layout.py).
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
    """A quantised weight in files: a matrix [out, in], or an experts' matrix [E, rows, in]. The latter is stored in
    pieces, one matrix (gate, up or down) for each expert, or, in gpt-oss's files, as a whole. It is made from the
    files' headers, before codes and scales are read, so that the loader handles the weight like one tensor.

    `shape` is that of the decoded weight in the model, which for gpt-oss's experts is [E, in, out]. `dtype`, `file` and
    `offset` are those of the first tensor of codes, and `size_bytes` is the sum over all its tensors.
    """

    layout: Layout  # how its format stores it
    pieces: tuple[Found, ...]  # the matrices in files that are its rows in order; one, unless experts are in pieces

    @property
    def format_name(self) -> str:
        """The name of the format in which files store the weight, such as "nf4", a key of FORMATS. The loader refuses a
        model of which weights that stay quantised are in another format than the one that is asked for; whether a
        weight stays so is decided by its layout (is_kept_packed), not by this name."""
        return format_of(self.layout).name


def gather(entries: Mapping[str, headers.TensorEntry]) -> dict[str, headers.TensorEntry]:
    """The entries of a checkpoint ({name: entry}), with all tensors of each quantised weight, such as codes and scales,
    combined to one StoredEntry under the weight's name. Tensors that belong to no weight (Layout.left_out) are removed,
    and other entries stay as they are. The loader sees by it one entry for each weight, whatever its format;
    gather_experts then combines those of single experts. `entries` is not changed. Only the content of small tensors is
    read that say how others are stored.

    Raises:
      ValueError: tensors of a quantised weight that are missing or do not fit each other; a scale, or another tensor
        that accompanies codes, without codes beside it.
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
    """Raises ValueError if a tensor (`entry`), by the end of its name, is a scale or another one that only accompanies
    the codes of a quantised weight. `gather` calls it for all tensors that it could not assign to codes."""
    kinds = [each for each in layouts() if (found := each.key_of(name)) is not None and found[1] in each.others]
    if kinds:
        codes = " or ".join(dict.fromkeys(each.codes_dtype for each in kinds))
        raise ValueError(f"{entry.file}: {name} is there, but no weight in {codes} beside it")


def _entry(layout: Layout, name: str, tensors: Mapping[str, headers.TensorEntry]) -> StoredEntry:
    """Combines the entries of all tensors that store one quantised weight, such as codes and scales, to a StoredEntry,
    for `gather`.

    layout: how the weight's format stores it. name: the weight's name. tensors: {the layout's key of a tensor, which is
    what its name has after the module's, such as ".weight_scale": its entry}.

    Raises:
      ValueError: tensors that are missing or do not fit each other.
    """
    found = layout.describe(name, tensors, lambda key: shards.read_bytes(tensors[key]))
    for key, part in tensors.items():
        if key not in layout.raw:
            headers.check_size(part)
    first = tensors[layout.codes]
    total = sum(part.size_bytes for part in tensors.values())
    return StoredEntry(name, first.dtype, found.shape, first.file, first.offset, total, layout, (found,))


def stacked(name: str, parts: Sequence[headers.TensorEntry], shape: tuple[int, ...], per_expert: int) -> StoredEntry:
    """Combines the entries of an expert matrix [E, rows, in] that files store as quantised matrices, one for each
    expert and projection (gate, up or down): returns the entry of the whole matrix, for gather_experts.

    Args:
      name: the model's name of the expert matrix.
      parts: the entries of the files' matrices, in the order of their rows in the whole one.
      shape: the shape of the whole matrix, (E, rows, in).
      per_expert: how many of these matrices are the rows of one expert: 2 for gate_up_proj, 1 for down_proj.
    Raises:
      ValueError: pieces in different formats, some of them not quantised, of different shapes, or whose blocks cannot
        form one tensor.
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
    """Raises ValueError unless all entries in `parts`, the matrices of single experts that form one expert matrix, are
    matrices of the same shape and dtype. gather_experts calls it for plain ones, and `stacked` for quantised ones."""
    first = parts[0]
    for part in parts:
        if (part.shape, part.dtype) != (first.shape, first.dtype) or len(part.shape) != 2:
            raise ValueError(
                f"{part.file}: {part.name} is {part.dtype}{list(part.shape)}, "
                f"{first.name} {first.dtype}{list(first.shape)}"
            )


def read(entry: StoredEntry, dtype_name: str) -> tuple[Stored, Digest]:
    """Reads a quantised weight from files, when a model is loaded, or when a passthrough tensor is saved in 16 bits:
    (the weight of this entry with numpy arrays as leaves, the digest of all its tensors). An experts' matrix is one
    weight [E, rows, in], joined from its pieces.

    dtype_name: the dtype that the model computes in, to which the weight is decoded if its file names no other.

    Raises:
      ValueError: values that cannot be right, with file and tensor; a file that ends early.
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
    """Plans how a quantised weight is written to files. The returned Group (file_plan.py) lists the tensors to write,
    with names, shapes and dtypes, and computes their values later, one weight at a time. Saving and exporting a model
    calls it for each of its quantised weights (hf.checkpoint_tensors). For experts, a warning is given if the format's
    layout has one (expert_note), such as that transformers 5 cannot load them.

    Args:
      name: the name of the weight's tensor in the model, such as model.layers.0.mlp.up_proj.weight.
      weight: the quantised weight, or the same with jax.ShapeDtypeStruct in place of its arrays: shapes and dtypes are
        enough to plan the files' headers.
      make: a function that returns the quantised weight with its numbers. It is called when the tensors are written;
        before that once, if the layout needs a number of the weight for the header (such as NF4) and `weight` has only
        shapes or is cut into pieces.
      pieces: for a weight [E, rows, in] of all experts: (the number of rows of a piece, the pieces), as
        expert_files.pieces_of returns them. A piece is one matrix (gate, up or down) of one expert, which files store
        as a weight with a name of its own. None: the weight is a single matrix, stored as one.
    Raises:
      ValueError: quantisation blocks that cross from one piece into the next.
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
    """One matrix (gate, up or down) of one expert: the rows from `start` to before `start + rows` of the matrix of the
    expert with the index `expert` in `whole` [E, all rows, in]. It stays quantised, in the same format. `group` cuts by
    it the pieces that files store."""
    return whole.piece(expert, start, rows)


def _named(layout: Layout, name: str, weight: Stored, number: float | None) -> dict[str, FileTensor]:
    """{name in the file: FileTensor} of all tensors in which a file stores a quantised weight, for `group`.

    layout: how files store the weight's format. name: the name of the weight's tensor in the file, such as
    model.layers.0.mlp.up_proj.weight. weight: the quantised weight; shapes and dtypes are enough in place of its
    arrays. number: what Layout.header_number gave for it, a number that must be known before the file's header is
    written (such as NF4's offset of double quantisation); None if the layout needs none. The pieces of an experts'
    weight all have one number, because they are cut from one weight.
    """
    module = name.removesuffix(layout.weight)
    return {module + key: tensor for key, tensor in layout.tensors(weight, number).items()}
