"""Log-probabilities of the reference model, with which preference objectives compare those of the trained model. With
the option precompute_ref_log_probs they are computed once for all rows, and stored beside the token cache for later
runs.

`fill_reference` reads them from the stored file (`_path`, `_read`), or computes them by a pass over the rows
(`_computed`, `values_of_rows`). The name of a stored file is a hash of the rows, of every byte of the base model and of
the formats in which it computes, and the file ends with a checksum (`_checksum`). `first_check` checks them by the
metrics of the first step, also if they are computed in each step: a new adapter changes nothing yet, so the model must
give the answers the same log-probabilities as the reference (`_disagreement`)."""

from __future__ import annotations

import copy
import hashlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.system.files import atomic_write
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import Batches, Rows
from jaxtune.train.data.cache import cache_folder, note_use
from jaxtune.train.data.pairs import PackedPairs
from jaxtune.train.display.monitor import TrainingStopped
from jaxtune.train.objectives.preference import DPO, Referenced
from jaxtune.train.program.programs import Engine


def fill_reference(
    rows: PackedPairs,
    objective: Any,
    engine: Engine,
    config: TrainConfig,
    base: str | None,
    trainable: nnx.State,
    frozen: nnx.State,
    say: Callable[[str], None],
    trained: bool = False,
) -> None:
    """Fills `rows.reference`, float32[documents], in place if any value is not computed yet (NaN): from a file beside
    the token cache, or by a pass of the reference over the rows, whose result is then stored in such a file. All values
    are then replaced, also those that were not NaN. Nothing is done if the array is None or has no NaN. If the file
    cannot be written, a line says so and the run continues. In a run of several processes all of them call this; unless
    each can read the file, all take part in the pass, and the first process stores the result. The Trainer calls it for
    training rows and held-out rows before the first step, or for held-out rows alone before it only evaluates.

    Args:
      rows: the packed pairs.
      objective: an objective whose method `reference` computes them for a batch (`preference.Referenced`); not used if
        there is nothing to compute.
      engine: compiles and runs the pass.
      config: the run's config.
      base: a digest of the base model's weights; None: it is not known, and no file is read or written.
      trainable, frozen: the two parts of the model's state (nnx.State) as placed on the devices: the tensors that are
        trained, and the others.
      say: a function that shows a line to the user.
      trained: whether the weights that would be the reference have made steps; then only the file has its values.
    Raises:
      ValueError: the file is missing, and the reference has `trained`.
    """
    if rows.reference is None or not np.isnan(rows.reference).any():
        return
    path = None if base is None else _path(rows, config, base)
    found = None if path is None else _read(path, rows.reference.shape, say)
    if None in processes.all_of(None if found is None else True):  # all processes compute, or none does
        found = None
    if found is None and trained:
        raise ValueError(
            "the log-probabilities of the model before its first step, the reference, are not stored any more, and it "
            "has trained since: begin the run anew, or evaluate within it (evaluation.every_steps, at_start, at_end)"
        )
    if found is None:
        say(f"log-probabilities of the reference: one pass over {len(rows):,} rows")
        found = _computed(rows, objective, engine, trainable, frozen)
        if path is not None and processes.first():
            file = io.BytesIO()
            np.save(file, found)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, file.getvalue() + _checksum(path, file.getvalue()))
            except OSError as error:  # a shared cache may be another user's
                say(f"they are not stored for other runs: data.cache_dir={path.parent} cannot be written ({error})")
    else:
        if path is not None:
            note_use(path)
        say(f"log-probabilities of the reference: {path}")
    rows.reference[:] = found


def unwritten(sets: Sequence[PackedPairs], config: TrainConfig) -> tuple[Path, int] | None:
    """(the folder, the bytes) of the files with values that `fill_reference` has yet to compute; None if there are
    none."""
    arrays = [rows.reference for rows in sets if rows.reference is not None and np.isnan(rows.reference).any()]
    return (cache_folder(config.data.cache_dir), sum(array.nbytes for array in arrays)) if arrays else None


def _computed(rows: PackedPairs, objective: Any, engine: Engine, trainable: nnx.State, frozen: nnx.State) -> np.ndarray:
    """Computes the reference's log-probabilities of all rows by one pass over them on the devices. Returns
    float32[documents], a numpy array with the sum over each document's answer, 0 for pairs that are left out.
    `fill_reference` calls it if no stored file has them.

    Args:
      rows: the packed pairs.
      objective: its method `reference` computes those of a batch.
      engine: compiles and runs the pass.
      trainable, frozen: the two parts of the model's state (nnx.State) as placed on the devices.
    """
    plain = copy.copy(rows)
    plain.reference = None
    program = engine.compile_of_rows(objective.reference, trainable, frozen, plain)
    found = np.zeros(len(rows.documents), np.float32)
    for numbers, sums in values_of_rows(engine, program, trainable, frozen, plain):
        for slot, row in enumerate(numbers.tolist()):
            pairs = np.asarray(rows.pairs(row))
            found[2 * pairs[:, None] + np.arange(2)] = sums[slot][: len(pairs)]
    return found


def values_of_rows(
    engine: Engine, program: jax.stages.Compiled, trainable: nnx.State, frozen: nnx.State, rows: Rows
) -> Iterator[tuple[np.ndarray, Any]]:
    """Runs a program over all packed rows in order, one batch after another, while the devices compute the next batch.
    Yields, for each batch, (numbers of its rows int[n], the program's result as numpy arrays); the result's first
    dimension may be longer than n, because the last batch is filled up. In a run of several processes, all of them must
    consume it to the end. `_computed` and the pass that stores a teacher's log-probabilities (stored_teachers.py) run
    their programs by it.

    Args:
      engine: places the batches on the devices.
      program: the compiled program of `engine.compile_of_rows` for these rows.
      trainable, frozen: the two parts of the model's state (nnx.State) that the program takes.
      rows: the packed rows, at least one.
    """
    batches, waiting = Batches(rows, engine.rows, order="given"), None
    for step in range(batches.steps_per_epoch):
        values = program(trainable, frozen, engine.place(batches.batch_at(step)))
        if waiting is not None:
            yield waiting[0], jax.tree.map(partition.on_host, waiting[1])
        waiting = batches.rows_at(step), values
    assert waiting is not None
    yield waiting[0], jax.tree.map(partition.on_host, waiting[1])


def _path(rows: PackedPairs, config: TrainConfig, base: str) -> Path:
    """The path of the file with the reference's log-probabilities of these rows, in the folder of token caches. Its
    name is a hash of the rows, the base model and the formats it computes in, so that those of other rows or of another
    model are never read.

    Args:
      rows: the packed pairs. The tokens and masks of their whole documents are hashed, and the number of tokens that
        truncation leaves of each.
      config: the run's config, of which the formats and the precision in which the model computes are hashed.
      base: a digest of the base model's weights.
    """
    documents, model = rows.documents, config.model
    made = hashlib.blake2b(repr((base, model.load_in, model.compute, config.precision)).encode(), digest_size=16)
    for part in (documents.tokens, documents.mask, documents.starts, rows.kept):
        made.update(np.ascontiguousarray(part).tobytes())
    return cache_folder(config.data.cache_dir) / f"reference_{made.hexdigest()}.npy"


def _checksum(path: Path, content: bytes) -> bytes:
    """The checksum of the stored file `path`, 16 bytes at its end. It covers the file's name too, so that a file that
    was renamed is not accepted. content: the bytes before the checksum, those of a .npy file."""
    return xxhash.xxh3_128(path.name.encode() + content).digest()


def _read(path: Path, shape: tuple[int, ...], say: Callable[[str], None]) -> np.ndarray | None:
    """Reads the float32 array of the stored file `path`, for `fill_reference`. None, and the array is computed anew, if
    there is no such file, or if it is damaged, has another shape than `shape`, or has values that are not finite. say:
    a function that shows a line to the user, called if the file is damaged or cannot be read."""
    try:
        content = path.read_bytes()
        if content[-16:] != _checksum(path, content[:-16]):
            raise ValueError("its checksum is not that of its content")
        found = np.load(io.BytesIO(content[:-16]), allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        say(f"{path} is damaged and not used: {error}")
        return None
    return found if found.shape == shape and found.dtype == np.float32 and np.isfinite(found).all() else None


# ---- the first step


def first_check(
    objective: Any, config: TrainConfig, rows: Any, fresh: Callable[[], bool]
) -> Callable[[Mapping[str, float]], None]:
    """Makes a function that a run calls with the metrics of its first step, {name: value}. The function raises
    TrainingStopped if they show that the reference's log-probabilities are not those of the model before training, but
    those of other weights or rows.

    The function does nothing for an objective without a reference, nor where model and reference may rightly differ: if
    the data set brought log-probabilities of its own, if the adapter has trained before, with noise on the embeddings
    (NEFTune), and with QAT's rounding from the first step on.

    Args:
      objective: the objective of the run; only `preference.Referenced` ones have a reference to check.
      config: the config of the run.
      rows: the training rows (PairDataset), before `fill_reference` fills in their log-probabilities.
      fresh: a function that returns True if the adapter had no effect before the first step, because it was new.
    """
    given = getattr(rows, "reference", None)
    computed_here = given is None or bool(np.isnan(given).any())
    rounded = config.qat is not None and config.qat.start == 0
    if not isinstance(objective, Referenced) or not computed_here or rounded or config.neftune_noise_alpha:
        return lambda line: None
    reference = objective

    def check(line: Mapping[str, float]) -> None:
        """Raises TrainingStopped if `line`, the metrics of a run's first step, shows that the reference's
        log-probabilities are not those of the model before training. It does nothing if the adapter was not new."""
        reason = _disagreement(reference, line) if fresh() else None
        if reason is not None:
            raise TrainingStopped(
                f"step 1: {reason}. The adapter does nothing yet, so that model and reference are the same and must "
                "give the answers the same log-probabilities: the reference's are of other weights or other rows, and "
                "nothing that is learnt from them would mean anything. Remove reference_*.npy from the token cache "
                "(data.cache_dir), and see that nothing changes the model's folder or the rows while a run begins"
            )

    return check


def _disagreement(objective: Referenced, line: Mapping[str, float]) -> str | None:
    """How the first step's metrics show that model and reference differ by more than rounding, in words, with which the
    function of `first_check` stops the run; None if they agree.

    Two programs that compute the same numbers in 16 bits differ by about a hundredth of a nat a token, in any
    direction; log-probabilities of other weights or rows differ by several hundredths of themselves at least. So the
    mean log-ratio of chosen or rejected answers may be 0.25 nats plus a hundredth of their mean log-probability.

    Args:
      objective: its beta divides the metrics of rewards; with DPO's sigmoid loss, the loss, which should be ln 2, is
        checked too.
      line: {name: value} of the metrics: rewards/chosen, rewards/rejected, logps/chosen, logps/rejected and loss.
    """
    slack = {}
    for side in ("chosen", "rejected"):
        moved = line[f"rewards/{side}"] / objective.beta
        slack[side] = 0.25 + 0.01 * abs(line[f"logps/{side}"])
        if abs(moved) > slack[side]:
            return (
                f"rewards/{side} is {line[f'rewards/{side}']:.4g} and not 0: answers are {abs(moved):.4g} nats "
                f"{'more' if moved > 0 else 'less'} likely than the reference says (logps/{side} "
                f"{line[f'logps/{side}']:.4g})"
            )
    if isinstance(objective, DPO) and objective.loss_type == "sigmoid":
        if abs(line["loss"] - math.log(2.0)) > objective.beta * sum(slack.values()) / 2:
            return f"the loss is {line['loss']:.4f} and not ln 2 = {math.log(2.0):.4f}"
    return None
