"""Log-probabilities of the reference, computed once for all rows, and kept beside the tokens for other runs of them."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtune import processes
from jaxtune.files import atomic_write
from jaxtune.models import partition
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import Batches
from jaxtune.train.data.cache import default_folder
from jaxtune.train.data.pairs import PackedPairs
from jaxtune.train.programs import Engine


def look_up(
    rows: PackedPairs,
    objective: Any,
    engine: Engine,
    config: TrainConfig,
    base: str | None,
    trainable: Any,
    frozen: Any,
    tell: Callable[[str], None],
) -> None:
    """Fills rows.reference in place where it is waited for: from a file beside the token cache, or by a pass over the
    rows.

    Args:
      objective: has `reference`. base: the fingerprint of the model's weights; None keeps no file.
    """
    if rows.reference is None or not np.isnan(rows.reference).any():
        return
    path = None if base is None else _path(rows, config, base)
    found = None if path is None else _read(path, rows.reference.shape)
    if None in processes.all_of(None if found is None else True):  # all of them compute, or none
        found = None
    if found is None:
        tell(f"log-probabilities of the reference: one pass over {len(rows):,} rows")
        found = _computed(rows, objective, engine, trainable, frozen)
        if path is not None and processes.first():
            file = io.BytesIO()
            np.save(file, found)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, file.getvalue())
            except OSError as error:  # a cache that others filled may be theirs to write
                tell(f"they are not kept for other runs: data.cache_dir={path.parent} cannot be written ({error})")
    else:
        tell(f"log-probabilities of the reference: {path}")
    rows.reference[:] = found


def _computed(rows: PackedPairs, objective: Any, engine: Engine, trainable: Any, frozen: Any) -> np.ndarray:
    """float32[documents]; 0 of those that are left out."""
    plain = copy.copy(rows)
    plain.reference = None
    batches = Batches(plain, engine.rows, shuffle=False)
    program = engine.compile_of_rows(objective.reference, trainable, frozen, plain)
    found, waiting = np.zeros(len(rows.documents), np.float32), None

    def take(numbers: np.ndarray, values: jax.Array) -> None:
        for row, sums in zip(numbers, partition.on_host(values), strict=False):
            pairs = np.asarray(rows.pairs(int(row)))
            found[2 * pairs[:, None] + np.arange(2)] = sums[: len(pairs)]

    for step in range(batches.steps_per_epoch):
        values = program(trainable, frozen, engine.place(batches.batch_at(step)))
        if waiting is not None:
            take(*waiting)
        waiting = batches.rows_at(step), values
    assert waiting is not None
    take(*waiting)
    return found


def _path(rows: PackedPairs, config: TrainConfig, base: str) -> Path:
    """By the tokens as they are cut, what of them is an answer, and how the model computes."""
    documents, model = rows.documents, config.model
    made = hashlib.blake2b(repr((base, model.load_in, model.compute, config.precision)).encode(), digest_size=16)
    for part in (documents.tokens, documents.mask, documents.starts, rows.kept):
        made.update(np.ascontiguousarray(part).tobytes())
    folder = default_folder() if config.data.cache_dir is None else Path(config.data.cache_dir).expanduser()
    return folder / f"reference_{made.hexdigest()}.npy"


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 and np.isfinite(found).all() else None
