"""Matches the tensors of a checkpoint's files with the tensors that a model needs, by name and shape, and refuses files
that lack one, have one that the model does not need or one of another shape, or store one in another dtype than 16- or
32-bit floats or a known quantised format (`match`). Passthrough tensors, such as a vision tower's, were taken out
before (passthrough.divide), and a separate head that equals a tied embedding is accepted (`_same_content`). The other
functions serve the loader (models/hf.py) too: `dtype_name` checks the dtype that a user asks for, `weight_name` gives
the name of a matrix's tensor, `is_kept_packed` says whether a tensor can stay quantised in the model, and `listed`
joins names for errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxtune.models.files import headers, shards
from jaxtune.models.files.expert_files import StackedEntry
from jaxtune.models.files.stored_weights import StoredEntry

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


def dtype_name(dtype) -> str:
    """The name of a dtype, such as "bfloat16", in which a model is to compute. The loader calls it first, so that a
    wrong dtype is refused before files are read. dtype: the dtype or its name, as a user passes it.

    Raises:
      ValueError: a dtype that models cannot compute in; they can in those of COMPUTE_DTYPES (bfloat16, float16,
        float32).
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(COMPUTE_DTYPES)}")
    return name


def weight_name(module: str) -> str:
    """The tensor name of a matrix's weight, from the name that lora.matrices gives the matrix: a linear's module name
    gets ".weight", and the name of an expert matrix is its tensor's already. The loader finds by it the tensors that
    can be quantised."""
    return module if ".experts." in module else f"{module}.weight"


def is_kept_packed(entry: headers.TensorEntry, load_in: str | None) -> bool:
    """Whether `entry`, a tensor of a checkpoint's files, is a quantised weight in a form that can stay quantised in the
    model. False for plain tensors, and for quantised weights that loading decodes, such as gpt-oss's experts in MXFP4,
    unless `load_in`, the format that the loader is asked for, is that one (Layout.kept_on_request). The loader asks
    it, and decodes quantised routers all the same."""
    if not isinstance(entry, StoredEntry):
        return False
    asked = entry.layout.kept_on_request and load_in == entry.format_name
    return asked or not entry.layout.decoded_on_load


def listed(names: Iterable[str]) -> str:
    """The first eight of the sorted names, separated by commas, and how many more there are ("a, b and 2 more"), for
    error messages."""
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_plain(entry: headers.TensorEntry) -> None:
    """Raises ValueError unless `entry`, a tied embedding's or head's in files, can be read as a tensor that is not
    quantised: `match` compares the two by their bytes."""
    if isinstance(entry, StoredEntry):
        raise ValueError(f"{entry.file}: {entry.name} is quantised; only linears of layers can be")
    headers.check_entry(entry)


def _same_content(first: headers.TensorEntry, second: headers.TensorEntry) -> bool:
    """Whether the tensors of two entries of files, `first` and `second`, neither of them quantised, have the same
    shape, dtype and bytes. Both are read whole unless shape or dtype differ; ValueError if a file ends early. `match`
    compares a tied head with the embedding by it."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return np.array_equal(shards.read_tensor(first).view(np.uint8), shards.read_tensor(second).view(np.uint8))


def match(wanted: Mapping[str, tuple[int, ...]], entries: dict, tied: bool, folder: Path) -> dict:
    """Finds the entry of every tensor that the model needs: {name: entry}, in the order of `wanted`. The loader calls
    it before it reads the tensors, so that wrong files are refused at once. Only a head that is tied, and separate in
    the files, is read here, with the embedding. `wanted` and `entries` are not changed.

    Args:
      wanted: {name: shape} of the model's tensors.
      entries: {name: entry (TensorEntry, or StoredEntry or StackedEntry for several tensors of files that make one
        tensor of the model)} of the files' tensors, under the model's names.
      tied: True: the model's head is its embedding. A separate head in the files must equal it, or is taken for the
        embedding if the files have none. False: the head is a tensor of its own.
      folder: the checkpoint's folder, for errors.
    Raises:
      ValueError: tensors that are missing, unexpected or of another shape, all in one list; a separate head that
        differs from the embedding, in dtype too, or is quantised, although the two are tied; or a tensor that is
        neither quantised nor of 16- or 32-bit floats, or whose size does not fit its shape.
    """
    entries = dict(entries)
    if tied and "lm_head.weight" in entries:
        head = entries.pop("lm_head.weight")
        embedding = entries.setdefault("model.embed_tokens.weight", head)
        for entry in (embedding, head):
            _check_plain(entry)
        if embedding is not head and not _same_content(embedding, head):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                'model.embed_tokens.weight; set "tie_word_embeddings": false in config.json to keep both'
            )
    problems = []
    if missing := set(wanted) - set(entries):
        problems.append(f"missing: {listed(missing)}")
    if unexpected := set(entries) - set(wanted):
        problems.append(f"unexpected: {listed(unexpected)}")
    shapes = [
        f"{name} {list(entries[name].shape)} (expected {list(shape)})"
        for name, shape in wanted.items()
        if name in entries and entries[name].shape != shape
    ]
    if shapes:
        problems.append(f"of another shape: {listed(shapes)}")
    if problems:
        raise ValueError(f"{folder}: the weights do not fit config.json; tensors {'; '.join(problems)}")
    for name in wanted:
        if not isinstance(entries[name], StoredEntry | StackedEntry):
            headers.check_entry(entries[name])
    return {name: entries[name] for name in wanted}
