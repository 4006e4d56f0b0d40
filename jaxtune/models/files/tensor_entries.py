"""Matches the tensors of a checkpoint's files with those that a model needs, by name, shape and dtype."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxtune.models.files import headers, shards
from jaxtune.models.files.expert_files import StackedEntry
from jaxtune.models.files.stored_weights import StoredEntry

logger = logging.getLogger(__name__)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


def dtype_name(dtype) -> str:
    """The name of a dtype in which a model is to compute. Raises ValueError unless it is one of COMPUTE_DTYPES."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(COMPUTE_DTYPES)}")
    return name


def weight_name(module: str) -> str:
    """The tensor name of a matrix, by its name in lora.matrices."""
    return module if ".experts." in module else f"{module}.weight"


def is_kept_packed(entry: headers.TensorEntry, load_in: str | None) -> bool:
    """Whether a quantised weight can stay quantised. Loading decodes others, such as gpt-oss's MXFP4 experts, unless
    `load_in` names their format.
    """
    if not isinstance(entry, StoredEntry):
        return False
    requested = entry.layout.kept_on_request and load_in == entry.format_name
    return requested or not entry.layout.decoded_on_load


def listed(names: Iterable[str]) -> str:
    """For errors: "a, b and 2 more", at most eight sorted names."""
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_plain(entry: headers.TensorEntry) -> None:
    if isinstance(entry, StoredEntry):
        raise ValueError(f"{entry.file}: {entry.name} is quantised; only linears of layers can be")
    headers.check_entry(entry)


def _same_content(first: headers.TensorEntry, second: headers.TensorEntry) -> bool:
    """Whether shape, dtype and bytes are the same."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return np.array_equal(shards.read_tensor(first).view(np.uint8), shards.read_tensor(second).view(np.uint8))


def _parts(names: Iterable[str], expected: Iterable[str]) -> set[str]:
    """Those of modules and layers that the model has, which may compute something else with them, such as a bias."""
    modules, layers = {name.rpartition(".")[0] for name in expected}, _layers(expected)
    return {name for name in names if name.rpartition(".")[0] in modules or _layers([name]) & layers}


def _layers(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _LAYER.match(name))}


def _note_unread(names: Iterable[str], count: int, folder: Path) -> None:
    """Says which tensors of a checkpoint the model has no place for, as transformers does. count: of its layers."""
    layers = _layers(names)
    if others := {name for name in names if not _LAYER.match(name)}:
        logger.warning("%s: tensors that no part of the model reads are left out: %s", folder, listed(others))
    if layers:
        logger.warning(
            "%s: config.json has num_hidden_layers = %d, so layers %s of its files are left out",
            folder,
            count,
            ", ".join(map(str, sorted(layers))),
        )


def _renaming(missing: Set[str], unexpected: Set[str]) -> str | None:
    """What makes the names of the files those of the model, if one prefix does."""
    for prefix in ("model.", "language_model."):
        if missing & {prefix + name for name in unexpected}:
            return f"the names lack {prefix!r}, as AutoModel saves them: save the model with AutoModelForCausalLM"
    name = next(iter(sorted(missing)), "")
    for longer in sorted(unexpected):
        if name and longer.endswith("." + name):
            prefix = longer.removesuffix(name)
            return f"the names begin with {prefix!r}, as a wrapper saves them: save the model within it"
    return None


def match(expected_shapes: Mapping[str, tuple[int, ...]], entries: dict, tied: bool, folder: Path) -> dict:
    """{name: entry} of every tensor that the model needs, in the order of `expected_shapes`.

      expected_shapes: {name: shape} of the model's tensors.
      entries: {name: entry} of the files.
      tied: the head is the embedding; a separate one is read and must equal it, or stands for a missing embedding.
      folder: of the checkpoint, for errors.

    Tensors of modules and layers that the model lacks are left out with a warning. Raises ValueError for tensors that
    are missing, unexpected in a module or layer of the model, of another shape or not readable, or a tied head that
    differs.
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
    missing, unexpected = set(expected_shapes) - set(entries), set(entries) - set(expected_shapes)
    if not missing and not (parts := _parts(unexpected, expected_shapes)):
        _note_unread(unexpected, len(_layers(expected_shapes)), folder)
        unexpected = set()
    elif not missing:
        unexpected = parts
    if missing:
        problems.append(f"missing: {listed(missing)}")
    if unexpected:
        problems.append(f"unexpected: {listed(unexpected)}")
    shapes = [
        f"{name} {list(entries[name].shape)} (expected {list(shape)})"
        for name, shape in expected_shapes.items()
        if name in entries and entries[name].shape != shape
    ]
    if shapes:
        problems.append(f"of another shape: {listed(shapes)}")
    if problems:
        words, fix = "; ".join(problems), _renaming(missing, unexpected) or "fetch it or them again"
        raise ValueError(f"{folder}: the weights do not fit config.json; tensors {words}: {fix}")
    for name in expected_shapes:
        if not isinstance(entries[name], StoredEntry | StackedEntry):
            headers.check_entry(entries[name])
    return {name: entries[name] for name in expected_shapes}
