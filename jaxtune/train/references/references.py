"""Log-probabilities of preference objectives' reference model, computed once and stored beside the token cache.

A file's name is a hash of rows, every byte of the base model and its formats; a checksum ends it. They are checked in
the first step: a new adapter changes nothing yet.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.system.disk import note_use
from jaxtune.system.files import new_file
from jaxtune.system.sealed import require_sealed, seal
from jaxtune.train.callbacks import TrainingStopped
from jaxtune.train.config import QatConfig
from jaxtune.train.data.batches import Batches, Rows
from jaxtune.train.data.packing.pairs import PackedPairs
from jaxtune.train.data.tokens.cache import cache_folder
from jaxtune.train.data.tokens.documents import identity
from jaxtune.train.engine.programs import Engine
from jaxtune.train.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that a reference is: its weights, and how they are stored and compute."""

    digest: str | None
    """Of the weights; None: unknown."""
    load_in: str | None
    compute: str | None
    precision: str | Mapping[str, str]


def fill_reference(
    rows: PackedPairs,
    objective: Any,
    engine: Engine,
    cache_dir: str | None,
    base: Base,
    trainable: nnx.State,
    frozen: nnx.State,
    say: Callable[[str], None],
    trained: bool = False,
) -> None:
    """Fills `rows.reference` in place if it has NaN: from a stored file, or by a pass over the rows, whose result is
    stored. An unwritable cache only prints a line. Collective; all take part in the pass unless each can read the file.

    Raises ValueError if the file is missing and the reference has `trained`.

      objective: its `reference` computes a batch.
      base: without a digest no file is used.
      trainable, frozen: state on the devices.
      trained: whether the weights that would be the reference have made steps.
      say: prints a line.
    """
    if rows.reference is None or not np.isnan(rows.reference).any():
        return
    path = None if base.digest is None else _path(rows, cache_dir, base)
    log_probs = None if path is None else read_values(path, rows.reference.shape, np.dtype(np.float32), say)
    if log_probs is not None and not np.isfinite(log_probs).all():
        log_probs = None
    if None in processes.all_of(None if log_probs is None else True):  # all processes compute, or none does
        log_probs = None
    if log_probs is None and trained:
        raise ValueError(
            "the log-probabilities of the model before its first step, the reference, are not stored any more, and it "
            "has trained since: begin the run anew, or evaluate within it (evaluation.every_steps, at_start, at_end)"
        )
    if log_probs is None:
        say(f"log-probabilities of the reference: one pass over {len(rows):,} rows")
        log_probs = _computed(rows, objective, engine, trainable, frozen)
        if path is not None and processes.first():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with new_file(path) as (_, file):
                    np.save(file, log_probs)
                    seal(file, path.name)
            except OSError as error:  # a shared cache may be another user's
                say(f"they are not stored for other runs: data.cache_dir={path.parent} cannot be written ({error})")
    else:
        if path is not None:
            note_use(path)
        say(f"log-probabilities of the reference: {path}")
    rows.reference[:] = log_probs


def unwritten(sets: Sequence[PackedPairs], cache_dir: str | None) -> tuple[Path, int] | None:
    """(Folder, bytes) of values that `fill_reference` has yet to compute; None without any."""
    arrays = [rows.reference for rows in sets if rows.reference is not None and np.isnan(rows.reference).any()]
    return (cache_folder(cache_dir), sum(array.nbytes for array in arrays)) if arrays else None


def _computed(rows: PackedPairs, objective: Any, engine: Engine, trainable: nnx.State, frozen: nnx.State) -> np.ndarray:
    """float32[documents]: each answer's sum under the reference, by a pass; 0 for pairs left out."""
    plain = copy.copy(rows)
    plain.reference = None
    program = engine.compile_of_rows(objective.reference, trainable, frozen, plain)
    log_probs = np.zeros(len(rows.documents), np.float32)
    for numbers, sums in values_of_rows(engine, program, trainable, frozen, plain):
        for slot, row in enumerate(numbers.tolist()):
            pairs = np.asarray(rows.pairs(row))
            log_probs[2 * pairs[:, None] + np.arange(2)] = sums[slot][: len(pairs)]
    return log_probs


def values_of_rows(
    engine: Engine, program: Callable, trainable: nnx.State, frozen: nnx.State, rows: Rows
) -> Iterator[tuple[np.ndarray, Any]]:
    """Runs a program over all rows in batches, with the next one already on the devices: yields (row numbers int[n],
    result as numpy arrays, maybe padded). Every process must consume it to the end.

      program: of `engine.compile_of_rows` for these rows.
      trainable, frozen: states on the devices.
    """
    batches, waiting = Batches(rows, engine.rows, order="given"), None
    for step in range(batches.steps_per_epoch):
        values = program(trainable, frozen, engine.place(batches.batch_at(step)))
        if waiting is not None:
            yield waiting[0], jax.tree.map(partition.on_host, waiting[1])
        waiting = batches.rows_at(step), values
    assert waiting is not None
    yield waiting[0], jax.tree.map(partition.on_host, waiting[1])


def _path(rows: PackedPairs, cache_dir: str | None, base: Base) -> Path:
    """The file of these rows' values, named by tokens, masks, truncation, base model and formats."""
    about = (base.digest, base.load_in, base.compute, base.precision)
    return cache_folder(cache_dir) / f"reference_{identity(rows.documents, rows.kept_lengths, about)}.npy"


def read_values(path: Path, shape: tuple[int, ...], dtype: np.dtype, say: Callable[[str], None]) -> np.ndarray | None:
    """The mapped array of a sealed file; None, to be computed anew, if missing, damaged, or of another shape or dtype.
    say: prints a line.
    """
    try:
        require_sealed(path)
        values = np.load(path, mmap_mode="r")
        if values.shape != shape or values.dtype != dtype:
            raise ValueError("it has another shape")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        say(f"{path} is damaged and not used: {error}")
        return None
    return values


# ---- the first step


def first_check(
    objective: Objective, qat: QatConfig | None, noise_alpha: float | None, rows: Any, fresh: Callable[[], bool]
) -> Callable[[Mapping[str, float]], None]:
    """A function of the first step's metrics that raises TrainingStopped if the reference's log-probabilities are not
    those of the model before training. It does nothing without a reference, or where they may differ: values of the
    data set, a trained adapter, NEFTune, QAT from the first step.

      noise_alpha: of NEFTune.
      rows: before `fill_reference`.
      fresh: whether the adapter was new before the first step.
    """
    stored_reference = getattr(rows, "reference", None)
    computed_here = stored_reference is None or bool(np.isnan(stored_reference).any())
    rounded = qat is not None and qat.start == 0
    if not computed_here or rounded or noise_alpha:
        return lambda line: None

    def check(line: Mapping[str, float]) -> None:
        reason = objective.wrong_start(line) if fresh() else None
        if reason is not None:
            raise TrainingStopped(
                f"step 1: {reason}. The adapter does nothing yet, so that model and reference are the same and must "
                "give the answers the same log-probabilities: the reference's are of other weights or other rows, and "
                "nothing that is learnt from them would mean anything. Remove reference_*.npy from the token cache "
                "(data.cache_dir), and see that nothing changes the model's folder or the rows while a run begins"
            )

    return check
