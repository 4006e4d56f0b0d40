"""A teacher's largest log-probabilities, stored before a distillation, so that no teacher is in memory.

They come from a pass over the rows (teacher_top_k) or another program's file (teacher_logprobs), and are mapped from a
file beside the token cache, named by a hash of rows and teacher, with a checksum. Without a digest of the teacher they
stay in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import Pretrained
from jaxtune.models.placement import partition
from jaxtune.system import processes, shared_folders
from jaxtune.system.disk import note_use
from jaxtune.system.files import new_file, remove_temporary
from jaxtune.system.sealed import fingerprints, seal, seal_of
from jaxtune.system.terminal import say
from jaxtune.train.config import ConfigError, DataConfig, ModelConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.data.batches import Batch, BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.tokens.cache import cache_folder, disk_errors
from jaxtune.train.data.tokens.documents import identity
from jaxtune.train.data.tokens.teacher_files import open_file
from jaxtune.train.data.tokens.teacher_values import TaughtRows, TeacherValues
from jaxtune.train.engine.programs import Engine
from jaxtune.train.engine.trained_model import TrainedModel
from jaxtune.train.objectives.checkpoints import Checkpoint
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.objective import Objective, TeacherColumn
from jaxtune.train.objectives.teachers import (
    BASE,
    described,
    load_teacher,
    of_pass,
    require_same_tokens,
    without_teacher,
)
from jaxtune.train.planning.phases import Phase, phase
from jaxtune.train.planning.teacher_pass import TeacherPass
from jaxtune.train.references.references import read_values, values_of_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class StoredTeacher:
    """The stored log-probabilities of a run: train `student`, `attach` places to the rows, `fill` them before the first
    step. With another objective, or a teacher that runs beside, arguments come back unchanged.

    A teacher is opened when `digest` or `fill` needs it. Raises ConfigError for teacher_top_k beyond the vocabulary, or
    an unreadable teacher_logprobs.

      student: a teacher attached to it is taken; else the one that the objective names.
      base: of the student. load_in: the format of a named teacher.
      planned: the plan of a pass over `rows_per_step` rows of a `shape` and so on, fields of TeacherPass.
    """

    def __init__(
        self,
        objective: Objective,
        student: Decoder,
        tokenizer: PreTrainedTokenizerFast,
        base: ModelConfig,
        load_in: str | None,
        precision: Precision,
        data: DataConfig,
        planned: Callable[..., TeacherPass],
    ):
        column = objective.needs_rows_before
        self._column = column if isinstance(column, TeacherColumn) else None
        self._tokenizer, self._base, self._load_in = tokenizer, Checkpoint(base, precision), load_in
        self._data, self._planned = data, planned
        self._teacher, self._vocab_size = student.teacher, student.config.vocab_size
        self._file = None
        self._was_read = False  # whether all values were found in files, so that there was no pass
        if self._column is None:
            return
        # Only shapes, because the trainer frees the student's arrays.
        self._student = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), nnx.state(without_teacher(student))
        )
        k = self._column.top_k
        if self._column.file is not None:
            self._file = open_file(self._column.file, say)
        elif k is not None and not 0 < k <= self._vocab_size:
            raise ConfigError(
                f"objective.teacher_top_k = {k}: must be from 1 to {self._vocab_size:,}, the vocabulary's size"
            )

    @property
    def k(self) -> int:
        """Tokens stored for each trained token; only if something is stored."""
        assert self._column is not None
        return self._file.k if self._file is not None else self._column.top_k or 0

    @functools.cached_property
    def digest(self) -> str | None:
        """Identifies the teacher's weights and formats, or the file; None if nothing is stored or the weights have no
        digest. Raises OSError, and errors of opening.
        """
        if self._column is None:
            return None
        if self._file is not None:
            return self._file.digest
        if self._teacher is not None:
            of_weights, source = self._teacher.base_digest, self._teacher.source
            if of_weights is None:
                return None
            positions = () if source is None or source.positions is None else (source.positions,)
            how = (self._base.precision.computes_in, self._load_in, *positions)
        else:
            folder, how = self._opened.folder, self._checkpoint.key
            files = [*folder.glob("*.safetensors"), folder / "config.json"] if folder.is_dir() else [folder]
            marks = fingerprints(sorted(files))
            of_weights = repr([(path.name, *sorted(mark.items())) for path, mark in marks.items()])
        how = (*how[:2], self.k, self._column.temperature, *how[2:])
        return hashlib.sha256(repr((of_weights, *how)).encode()).hexdigest()

    @property
    def _is_base(self) -> bool:
        """Whether the teacher is the trained model with its adapter off."""
        return self._column is not None and self._teacher is None and self._column.teacher in (None, BASE)

    @property
    def _checkpoint(self) -> Checkpoint:
        """The teacher's, of one that is not attached. ConfigError."""
        assert self._column is not None
        return of_pass(self._column.teacher, self._load_in, self._base)

    @functools.cached_property
    def _opened(self) -> Pretrained:
        """The named teacher's or the base's checkpoint, without weights. ConfigError, ValueError, OSError."""
        assert self._column is not None
        opened = self._checkpoint.open()
        if self._is_base:  # whatever tokenizer made the rows
            return opened
        require_same_tokens(self._tokenizer, opened)
        if opened.config.vocab_size != self._vocab_size:
            raise ConfigError(
                f"objective.teacher = {self._column.teacher!r}: its vocabulary has {opened.config.vocab_size:,} "
                f"entries and the student's {self._vocab_size:,}; take a teacher of the student's vocabulary"
            )
        return opened

    # ---- the rows

    def attach(
        self, train: TokenDataset | BatchSource, held_out: TokenDataset | None
    ) -> tuple[TokenDataset | BatchSource, TokenDataset | None]:
        """(train, held_out) as copies with places for the values, which `fill` sets. Raises ConfigError for rows
        that the file lacks.
        """
        if self._column is None:
            return train, held_out
        assert isinstance(train, TokenDataset), "run_rows refuses others (needs_rows_before)"
        return self._attached(train, "data.train"), held_out and self._attached(held_out, "data.eval")

    def attach_further(self, sets: Mapping[str, TokenDataset]) -> list[TokenDataset]:
        """The sets; ConfigError if they need a teacher's values, which are stored for data.train and data.eval."""
        if sets and self._column is not None:
            raise ConfigError(
                f"{self._column.key}: further sets of held-out rows ({', '.join(sets)}) have no stored values; give one"
            )
        return list(sets.values())

    def _attached(self, rows: TokenDataset, rows_key: str) -> TokenDataset:
        """A copy of `rows` with places for the values. rows_key: the config key of the rows."""
        # Rows that are evaluated with packing=step may be longer than data.length.
        is_whole = rows.overflow != "truncate" or (rows.unit.counts_examples and rows_key != "data.train")
        values = TeacherValues(rows.documents, None if is_whole else rows.length, self.k)
        if self._file is not None:
            self._file.require_all(values, rows_key)
        return dataclasses.replace(rows, teacher=values)

    def student(self, model: Decoder) -> Decoder:
        """The model without an attached teacher, if values are stored."""
        return model if self._column is None else without_teacher(model)

    def described(self, model: Decoder, objective: Objective) -> list[str]:
        if self._column is None:
            return described(model, objective)
        if self._file is not None:
            return [f"teacher: up to {self.k:,} log-probabilities a token from {self._file.path}"]
        name = self._column.teacher or "as it was given"
        return [f"teacher: {name}, of which {self.k:,} log-probabilities a token are stored before the run"]

    # ---- the values

    def fill(self, sets: Sequence[TokenDataset | None], engine: Engine, say: Callable[[str], None] = say) -> None:
        """Fills missing values in place: from stored files, the objective's file, or a pass of the teacher, which is
        loaded and freed; new ones are stored if there is a digest. Collective.

        Raises ConfigError for an unwritable or unseen cache, invalid distributions or a teacher that does not fit;
        OutOfDeviceMemory; ValueError for different or unloadable teachers.

          sets: the rows of training and evaluation; None: there are none. engine: compiles and runs the pass. say:
          prints a line.
        """
        lacking = [data.rows for data in sets if data is not None and data.teacher and data.teacher.stored is None]
        lacking = [rows for rows in lacking if isinstance(rows, TaughtRows)]
        if not lacking:
            return
        processes.require_same({"the teacher's log-probabilities": self.digest}, "give all of them the same teacher")
        missing = [rows for rows in lacking if not self._found(rows, say)]
        self._was_read = not missing
        if not missing:
            return
        with contextlib.ExitStack() as stack:
            if self._file is None:
                planned = self._pass(engine)
                for line in planned.warnings():
                    say(line)
                stack.enter_context(phase(planned.phase.name, planned.phase.remedy))
                compute = self._teaching(engine, planned, say)
            else:
                compute = self._reading()
            for rows in missing:
                with _stored(self._path(rows), rows.values) as array:
                    compute(rows, array)

    def unwritten(self, sets: Sequence[TokenDataset | None]) -> tuple[Path, int] | None:
        """(Folder, bytes) of files that `fill` has yet to write; None without any."""
        taught = [data.rows for data in sets if data is not None and data.teacher and data.teacher.stored is None]
        sizes = {
            path: rows.values.total * TeacherValues.entry(rows.values.k).itemsize
            for rows in taught
            if isinstance(rows, TaughtRows) and (path := self._path(rows)) is not None and not path.exists()
        }
        return (next(iter(sizes)).parent, sum(sizes.values())) if sizes else None

    def phases(self, engine: Engine) -> list[Phase]:
        """The teacher's pass with its memory, until `fill` found it unneeded; else []."""
        passes = self._column is not None and self._file is None and not self._was_read
        return [self._pass(engine).phase] if passes else []

    def _pass(self, engine: Engine) -> TeacherPass:
        assert self._column is not None
        batches, name = engine.batches, self._column.teacher
        of_run = (batches.rows_per_step, partition.MeshShape.of(engine.mesh), batches.length, engine.planner.device)
        return self._planned(*of_run, self._student, self._teacher, name)

    def _found(self, rows: TaughtRows, say: Callable[[str], None]) -> bool:
        """Whether every process has the same stored file, which is then mapped to `rows.values.stored`. Collective."""
        path = self._path(rows)
        shape, entry = (rows.values.total,), TeacherValues.entry(rows.values.k)
        stored = None if path is None else read_values(path, shape, entry, say)
        sums = processes.all_of(None if path is None or stored is None else seal_of(path))
        is_same = None not in sums and len(set(sums)) == 1
        rows.values.stored = stored if is_same else None
        if is_same and path is not None:
            note_use(path)
            say(f"log-probabilities of the teacher: {path}")
        return is_same

    def _reading(self) -> Callable[[TaughtRows, np.ndarray | None], None]:
        """A function (rows, array) that reads values from the objective's file into the array; None does nothing."""
        assert self._file is not None
        file = self._file

        def compute(rows: TaughtRows, array: np.ndarray | None) -> None:
            if array is not None:
                file.read(rows.values, self._vocab_size, array)

        return compute

    def _teaching(
        self, engine: Engine, planned: TeacherPass, say: Callable[[str], None]
    ) -> Callable[[TaughtRows, np.ndarray | None], None]:
        """A function (rows, array) that computes values by a pass into the array; None only takes part. Collective."""
        assert self._column is not None
        shape = partition.MeshShape.of(engine.mesh)
        teacher, precision = self._teacher, Precision(self._base.precision.computes_in)
        if teacher is None:
            loaded = load_teacher(self._opened, mesh=engine.mesh if shape.shard_count > 1 else None)
            assert loaded is not None
            teacher, precision = self._checkpoint.computing(loaded), self._checkpoint.precision
        model = TrainedModel(teacher, precision, None, 0, self._teacher is not None, None)
        planner = planned.planner(model.prepared)
        program = dataclasses.replace(engine.program, graph=model.graph, noise_alpha=None)
        pass_engine = Engine(program, None, planner, engine.mesh, engine.batches, deterministic=engine.deterministic)
        k, temperature = self.k, self._column.temperature
        trainable, frozen = model.weights(pass_engine)

        def of_batch(teacher: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array]:
            """(ids, log-probabilities) [rows, length, k] of the most probable next tokens; compiled."""
            return forward.top_k(teacher, forward.frozen(teacher, batch), k, temperature)

        def compute(rows: TaughtRows, array: np.ndarray | None) -> None:
            say(f"log-probabilities of the teacher: one pass over {len(rows):,} rows")
            plain = rows.alone()
            compiled = pass_engine.compile_of_rows(of_batch, trainable, frozen, plain)
            while planner.smaller(compiled):
                pass_engine.follow_plan()
                compiled = pass_engine.compile_of_rows(of_batch, trainable, frozen, plain)
            for numbers, (ids, log_probs) in values_of_rows(pass_engine, compiled, trainable, frozen, plain):
                if array is None:
                    continue
                for slot, row in enumerate(numbers.tolist()):
                    rows.take(row, ids[slot], log_probs[slot], array)

        return compute

    def _path(self, rows: TaughtRows) -> Path | None:
        """The file of these rows' values, named by digest, k, tokens and masks; None without a digest."""
        if self.digest is None:
            return None
        documents, values = rows.documents, rows.values
        piece_length = rows.length if self._data.overflow == "split" and self._file is None else None
        about = (self.digest, values.k, values.limit, piece_length)
        return cache_folder(self._data.cache_dir) / f"teacher_{identity(documents, documents.lengths, about)}.npy"


# ---- stored files


@contextlib.contextmanager
def _stored(path: Path | None, values: TeacherValues) -> Iterator[np.ndarray | None]:
    """A context with an array [values.total] to fill, which becomes `values.stored`; None in processes that do not
    write. Collective. ConfigError.
    """
    if path is None:
        array = np.zeros(values.total, TeacherValues.entry(values.k))
        yield array
        values.stored = array
        return
    with disk_errors(path.parent):
        if processes.first():
            path.parent.mkdir(parents=True, exist_ok=True)
        writes = shared_folders.must_write(path.parent)
    if writes:
        with _written(path, values) as array:
            yield array
    else:
        yield None
    first, *_ = processes.all_of(seal_of(path) if writes else None)
    if not shared_folders.wait_until_seen(lambda: seal_of(path) == first):
        raise ConfigError(
            f"data.cache_dir = {str(path.parent)!r}: process {processes.index()} does not find {path.name} there as "
            "the first process has stored it; set a folder that the processes of a host share"
        )
    values.stored = np.load(path, mmap_mode="r")


@contextlib.contextmanager
def _written(path: Path, values: TeacherValues) -> Iterator[np.ndarray]:
    """A context with an array mapped from a `new_file` of reserved size, sealed at the end. ConfigError on entering."""
    with contextlib.ExitStack() as stack:
        with disk_errors(path.parent):  # a full disk is an error here
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_temporary(path.parent, "teacher_*")
            temporary, file = stack.enter_context(new_file(path))
            shape, entry = (values.total,), TeacherValues.entry(values.k)
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=entry, shape=shape)
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(temporary))
        yield array
        del array
        seal(file, path.name)
