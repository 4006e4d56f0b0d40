"""Older forms of what a run's folder records, and how each becomes the next.

Records without a version have any of the first forms, so their translations leave alone what has the newer keys. A new
key of the config or axis of the mesh needs none: a record that lacks it is read as having the default.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtune.models.qat.fake_quant import INPUT_SCALES
from jaxtune.train.config.file import config_keys, flat_keys

# The key of a checkpoint's meta that says where its rows continue (BatchSource.position), beside the record.
POSITION = "position"
BESIDE = (POSITION, INPUT_SCALES)  # keys of a checkpoint's meta that are no part of the record
UNRECORDED = "(not recorded)"  # a value that an older version did not write, and that equals any other
# What identifies a run, and was not recorded at first.
_LATER = ("base_digest", "data.columns_crc32", "total_steps")


class NewerVersion(ValueError):
    """A newer jaxtune wrote the record."""


type Flat = dict[str, Any]  # a record by dotted keys, and BESIDE


def _unrecorded(record: Flat) -> Flat:
    """A base was known by a fingerprint alone, rows by their tokens, and nothing said how long the run is."""
    return dict.fromkeys(_LATER, UNRECORDED) | record


def _per_layer_table(record: Flat) -> Flat:
    """Only tables of per-layer embeddings could be on the host."""
    old, new = "numerics.per_layer_embeddings", "numerics.embeddings"
    return {new if key == old else key: value for key, value in record.items()}


def _equal_steps(record: Flat) -> Flat:
    """int4 had equal steps, and kept no usual sizes of gradients."""
    if "sent in int4" in str(record.get("numerics.gradients")):
        return record | {"config.mesh.gradient_sync": "int4 of equal steps"}
    return record


def _lanes(record: Flat) -> Flat:
    """Each device had positions of its own in streamed rows; those of one device continue."""
    position = record.get(POSITION)
    return record | {POSITION: position["0"]} if isinstance(position, dict) and [*position] == ["0"] else record


TRANSLATIONS = (_unrecorded, _per_layer_table, _equal_steps, _lanes)
VERSION = len(TRANSLATIONS)


def translated(meta: Mapping[str, Any]) -> Flat:
    """A record of any version, nested or flat, by the dotted keys of this one; BESIDE stay as they are. ValueError for
    a version that is newer.
    """
    record = flat_keys({key: value for key, value in meta.items() if key not in BESIDE})
    record |= {key: meta[key] for key in BESIDE if key in meta}
    version = record.get("version", 0)
    if type(version) is not int or not 0 <= version <= VERSION:
        raise NewerVersion(
            f"the run's record has version {version!r}, and this jaxtune reads versions up to {VERSION}: continue with "
            "the jaxtune that wrote it, or name another output"
        )
    for translate in TRANSLATIONS[version:]:
        record = translate(record)
    return record | {"version": VERSION}


def section(record: Flat, name: str) -> Flat:
    """What stands below `name`, by keys without it."""
    return {key.removeprefix(f"{name}."): value for key, value in record.items() if key.startswith(f"{name}.")}


def with_defaults(record: Flat, keys: Iterable[str]) -> Flat:
    """`record` with the defaults of config keys among `keys` that it lacks in sections that it has."""
    sections = {key.rpartition(".")[0] for key in record}
    lacking = [key for key in keys if key not in record and key.rpartition(".")[0] in sections]
    return record | {key: _defaults()[key] for key in lacking if key in _defaults()}


@functools.cache
def _defaults() -> Flat:
    """{"config." + dotted key: default}, without keys that must be set."""
    defaults: Flat = {}
    for key in config_keys():
        if key.default != "required":
            try:
                defaults[f"config.{key.name}"] = json.loads(key.default)
            except ValueError:  # a string, which has no quotes there
                defaults[f"config.{key.name}"] = key.default
    return defaults


def older_digested(run: Flat) -> Flat:
    """The values of same_run that the digests of older versions are of."""
    return {key: value for key, value in run.items() if key not in _LATER}
