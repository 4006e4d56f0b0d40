"""A teacher's largest log-probabilities, stored before a run that distils them: the teacher is not in memory then.

They are computed by one pass of the teacher over the run's rows (objective.teacher_top_k) or read from a file that
another program wrote (objective.teacher_logprobs), and kept in a file beside the token cache, which a run maps into
memory. The name of that file is a hash of the rows and of the teacher or the other file; the file ends with a checksum.
If the teacher has no `digest` by which a later run would recognise it, the values are only in memory.

`StoredTeacher` does this for a Trainer. `_stored` gives it an array to fill, mapped from such a file (`_written`) or in
memory; `_read` maps a file that is there; `_checksum` computes a checksum, and `_sum_of` reads one. In `_writable` an
OSError becomes a ConfigError."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import xxhash
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import Pretrained
from jaxtune.models.placement import partition
from jaxtune.system import processes, shared_folders
from jaxtune.system.files import create_temporary, fingerprints, remove_left
from jaxtune.system.terminal import say
from jaxtune.train.config import ConfigError, TrainConfig
from jaxtune.train.data.batches import Batch, BatchSource
from jaxtune.train.data.cache import cache_folder, note_use
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.teacher_files import open_file
from jaxtune.train.data.teacher_values import TaughtRows, TeacherValues
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.references import values_of_rows
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
from jaxtune.train.program.loss import Forward
from jaxtune.train.program.programs import Engine
from jaxtune.train.program.trained_model import TrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SUM = 16  # bytes of the checksum at the end of a stored file


class StoredTeacher:
    """The stored log-probabilities of a run's teacher. The Trainer of each run makes it, trains the model that
    `student` returns, without the teacher, and has it give the run's rows places for the values (`attach`) and fill
    these before the first step (`fill`). Checkpoints record `digest`, so that no run is resumed with another teacher;
    `described` and `phases` are for what the run prints. With another objective, or a teacher that runs beside the
    student, nothing is stored, and arguments are returned unchanged. A teacher that is to be loaded is opened when
    `digest` or `fill` first needs it; making the object raises none of its errors.

    Args:
      objective: the run's.
      config: the run's.
      student: the model that trains. The teacher that was attached to it in Python is taken; without one, that which
        the objective names is loaded when it is needed.
      tokenizer: the student's.
    Raises:
      ConfigError: objective.teacher_top_k is not from 1 to the vocabulary's size, or objective.teacher_logprobs cannot
        be read.
    """

    def __init__(self, objective: Objective, config: TrainConfig, student: Decoder, tokenizer: PreTrainedTokenizerFast):
        self._objective = objective if isinstance(objective, Distill) and objective.offline else None
        self._config, self._tokenizer = config, tokenizer
        self._teacher, self._vocab_size = student.teacher, student.config.vocab_size
        self._file = None
        self._was_read = False  # whether all values were found in files, so that there was no pass
        if self._objective is None:
            return
        # Only shapes, because the trainer frees the student's arrays.
        self._student = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), nnx.state(without_teacher(student))
        )
        k = self._objective.teacher_top_k
        if self._objective.teacher_logprobs is not None:
            self._file = open_file(self._objective.teacher_logprobs, say)
        elif k is not None and not 0 < k <= self._vocab_size:
            raise ConfigError(
                f"objective.teacher_top_k = {k}: must be from 1 to {self._vocab_size:,}, the vocabulary's size"
            )

    @property
    def k(self) -> int:
        """The number of tokens whose log-probabilities are stored for each trained token: objective.teacher_top_k, or
        the most that the file objective.teacher_logprobs has for a token (fewer leave places unused). It must only be
        asked for if something is stored. Places for the values have this size; it also goes into what the run prints,
        and, without a file, into `digest`."""
        assert self._objective is not None
        return self._file.k if self._file is not None else self._objective.teacher_top_k or 0

    @functools.cached_property
    def digest(self) -> str | None:
        """Identifies the teacher's weights and how its log-probabilities are computed (dtype, format of the weights, k
        and temperature), or the file that has them. None if nothing is stored, or the teacher was attached in Python
        and its weights have no digest (`Decoder.base_digest`). A run records it in checkpoints, so that it is not
        resumed with another teacher, and it goes into the name of the stored file. Raises what `_opened` raises, and
        OSError if the teacher's files cannot be read."""
        if self._objective is None:
            return None
        if self._file is not None:
            return self._file.digest
        config = self._config
        load_in = config.model.load_in if self._is_base else config.objective.teacher_load_in
        how = (config.computes_in, load_in, self.k, self._objective.temperature)
        if self._teacher is not None:
            of_weights = self._teacher.base_digest
            if of_weights is None:
                return None
        else:
            folder = self._opened.folder
            files = [*folder.glob("*.safetensors"), folder / "config.json"]
            found = fingerprints(sorted(files))
            of_weights = repr([(path.name, *sorted(mark.items())) for path, mark in found.items()])
        return hashlib.sha256(repr((of_weights, *how)).encode()).hexdigest()

    @property
    def _is_base(self) -> bool:
        """Whether the teacher is the model that trains with its adapter off: log-probabilities are stored, no teacher
        was attached, and objective.teacher is "base" or None. `digest` then takes the weights' format from
        model.load_in. It is also True, without a meaning, if a file has the log-probabilities. Nothing else depends on
        it."""
        return self._objective is not None and self._teacher is None and self._objective.teacher in (None, BASE)

    @functools.cached_property
    def _opened(self) -> Pretrained:
        """The checkpoint of the teacher that the objective names, or that of the base, opened once; its weights are not
        read yet. `digest` and `fill` use it if no teacher was attached in Python and no file has the log-probabilities.

        Raises:
          ConfigError: the teacher is the base, which has random weights; it is an adapter; or its tokenizer or
            vocabulary is not the student's.
          ValueError, OSError: the checkpoint cannot be opened.
        """
        assert self._objective is not None
        path, load_in = of_pass(self._config, self._objective.teacher)
        opened = Pretrained(path, self._config.dtype, load_in)
        require_same_tokens(self._tokenizer, opened)
        if opened.config.vocab_size != self._vocab_size:
            raise ConfigError(
                f"objective.teacher = {path!r}: its vocabulary has {opened.config.vocab_size:,} entries and the "
                f"student's {self._vocab_size:,}; take a teacher of the student's vocabulary"
            )
        return opened

    # ---- the rows

    def attach(
        self, train: TokenDataset | BatchSource, held_out: TokenDataset | None
    ) -> tuple[TokenDataset | BatchSource, TokenDataset | None]:
        """(train, held_out), the run's rows of training and of evaluation, as copies with places for the teacher's
        log-probabilities in their batches. The values are not there yet: `fill` sets them later. The Trainer calls it
        when it has read the rows. The arguments themselves if nothing is stored. held_out: None if there are no such
        rows, and then the second result is None.

        Raises:
          ConfigError: the training rows are streamed, mixed or made during the run, or the file lacks some of the rows.
        """
        if self._objective is None:
            return train, held_out
        if not isinstance(train, TokenDataset):
            key = "teacher_top_k" if self._file is None else "teacher_logprobs"
            raise ConfigError(
                f"objective.{key}: the rows of data.train are streamed, mixed or made during the run, and "
                "log-probabilities are stored for rows that are known before it; read them all (data.streaming=false, "
                "one set)"
            )
        return self._attached(train, "data.train"), held_out and self._attached(held_out, "data.eval")

    def _attached(self, rows: TokenDataset, what: str) -> TokenDataset:
        """A copy of `rows` with places for the log-probabilities, which are not known yet (its field `teacher`, a
        TeacherValues); `attach` makes one of each data set. what: the config's key of the rows, for messages. Raises
        ConfigError if a file is given and lacks some of the rows."""
        # Rows that are evaluated with packing=step may be longer than data.length.
        whole = rows.overflow != "truncate" or (rows.packing == "step" and what != "data.train")
        values = TeacherValues(rows.documents, None if whole else rows.length, self.k)
        if self._file is not None:
            self._file.require_all(values, what)
        return dataclasses.replace(rows, teacher=values)

    def student(self, model: Decoder) -> Decoder:
        """The model that trains: `model` itself if nothing is stored, else `model` without the teacher that was
        attached to it, so that the teacher's weights do not take memory during the run."""
        return model if self._objective is None else without_teacher(model)

    def described(self, model: Decoder, objective: Objective) -> list[str]:
        """The lines that a run prints about its teacher: where the stored log-probabilities are from. If nothing is
        stored, they are those that `teachers.described` makes of `model` and `objective`, which are not used otherwise.
        The Trainer prints them among the lines that describe the run."""
        if self._objective is None:
            return described(model, objective)
        if self._file is not None:
            return [f"teacher: up to {self.k:,} log-probabilities a token from {self._file.path}"]
        name = self._objective.teacher or "as it was given"
        return [f"teacher: {name}, of which {self.k:,} log-probabilities a token are stored before the run"]

    # ---- the values

    def fill(self, sets: Sequence[TokenDataset | None], engine: Engine, say: Callable[[str], None] = say) -> None:
        """Fills in, in place, the log-probabilities of those data sets that lack them: from files beside the token
        cache; or from the file objective.teacher_logprobs; or by a pass of the teacher, which is loaded for it and
        freed, unless it was attached in Python. What was not in the cache is then stored there, if `digest` is not
        None, else only in memory. Nothing is done if no set lacks them. In a run of several processes all must call
        this, and all take part in the pass unless each has the same files. The Trainer calls it before the first step
        and before evaluations.

        Args:
          sets: the run's rows, as `attach` returned them, or None for one that is missing.
          engine: of the run; the teacher computes on its mesh and with rows of its batches.
          say: shows a line to the user.
        Raises:
          ConfigError: the cache cannot be written; a process does not see the file that another one wrote; values in
            objective.teacher_logprobs are no distributions; `_opened` raises it; or the teacher's weights do not fit
            the device.
          OutOfDeviceMemory: the pass ran out of device memory.
          ValueError: the processes of the run have different teachers, or the checkpoint cannot be loaded.
        """
        lacking = [data.rows for data in sets if data is not None and data.teacher and data.teacher.stored is None]
        lacking = [rows for rows in lacking if isinstance(rows, TaughtRows)]
        if not lacking:
            return
        processes.require_same({"the teacher's log-probabilities": self.digest}, "give all of them the same teacher")
        needed = [rows for rows in lacking if not self._found(rows, say)]
        self._was_read = not needed
        if not needed:
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
            for rows in needed:
                with _stored(self._path(rows), rows.values) as array:
                    compute(rows, array)

    def unwritten(self, sets: Sequence[TokenDataset | None]) -> tuple[Path, int] | None:
        """(the folder, the bytes) of the files that `fill` has yet to write for the run's rows; None if there are
        none."""
        taught = [data.rows for data in sets if data is not None and data.teacher and data.teacher.stored is None]
        sizes = {
            path: rows.values.total * TeacherValues.entry(rows.values.k).itemsize
            for rows in taught
            if isinstance(rows, TaughtRows) and (path := self._path(rows)) is not None and not path.exists()
        }
        return (next(iter(sizes)).parent, sum(sizes.values())) if sizes else None

    def phases(self, engine: Engine) -> list[Phase]:
        """The pass of the teacher, with the memory that it needs, for the table of a run's phases, in which users see
        what will fit; [] if there is none. A pass is listed until `fill` has found that it is not needed, because files
        have all values. engine: of the run."""
        passes = self._objective is not None and self._file is None and not self._was_read
        return [self._pass(engine).phase] if passes else []

    def _pass(self, engine: Engine) -> TeacherPass:
        """The pass of the teacher as a TeacherPass: what its memory depends on, by which it is planned before the
        teacher's weights are loaded. `fill` runs the pass by it, and `phases` takes its memory from it. engine: of the
        run."""
        assert self._objective is not None
        batches, name = engine.batches, self._objective.teacher
        config = dataclasses.replace(self._config, rows_per_step=batches.rows_per_step)
        of_run = (config, partition.MeshShape.of(engine.mesh), batches.length, engine.planner.device)
        return TeacherPass(*of_run, self._student, self._teacher, name)

    def _found(self, rows: TaughtRows, say: Callable[[str], None]) -> bool:
        """Whether each process of the run has the same stored file with the values of these rows; `rows.values.stored`
        is then set to the values, mapped from the file, else to None. `fill` obtains values only for sets where this is
        False. All processes must call it. say: shows a line to the user."""
        path = self._path(rows)
        found = None if path is None else _read(path, rows.values, say)
        sums = processes.all_of(None if path is None or found is None else _sum_of(path))
        there = None not in sums and len(set(sums)) == 1
        rows.values.stored = found if there else None
        if there and path is not None:
            note_use(path)
        return there

    def _reading(self) -> Callable[[TaughtRows, np.ndarray | None], None]:
        """A function (rows, array) that reads the values of rows from the file that the objective names
        (teacher_logprobs) into an array, in place; with None in place of an array it does nothing. `fill` calls it
        where there is such a file, and otherwise the function that `_teaching` returns."""
        assert self._file is not None
        file = self._file

        def compute(rows: TaughtRows, array: np.ndarray | None) -> None:
            """Reads the teacher's values of `rows` from the file into `array`, in place; None: another process has the
            array, and nothing is read."""
            if array is not None:
                file.read(rows.values, self._vocab_size, array)

        return compute

    def _teaching(
        self, engine: Engine, planned: TeacherPass, say: Callable[[str], None]
    ) -> Callable[[TaughtRows, np.ndarray | None], None]:
        """A function (rows, array) that computes the values of rows by a pass of the teacher, and writes them into the
        array, in place. The teacher is loaded here, unless it was attached in Python. All processes must call it, and
        then the function; with None in place of an array the process only takes part. If the compiled pass needs too
        much memory, it is compiled again with a smaller plan. The array has one entry for each trained token
        (`TeacherValues.entry`), with the k most probable tokens and their log-probabilities.

        Args:
          engine: of the run; the pass has its mesh and its batches.
          planned: the pass, which has its config and makes its planner.
          say: shows a line to the user for each set of rows.
        """
        assert self._objective is not None
        shape = partition.MeshShape.of(engine.mesh)
        teacher = self._teacher or load_teacher(self._opened, mesh=engine.mesh if shape.parts > 1 else None)
        assert teacher is not None
        config = planned.own_config
        model = TrainedModel(teacher, config, self._teacher is not None, None)
        planner = planned.planner(model.prepared)
        program = dataclasses.replace(engine.program, graph=model.graph, noise_alpha=None)
        own = Engine(program, None, planner, engine.mesh, engine.batches, config, None)
        k, temperature = self.k, self._objective.temperature
        trainable, frozen = model.weights(own)

        def of_batch(teacher: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array]:
            """(token ids, log-probabilities) [rows, length, k] of the most probable next tokens at each position of
            `batch`, by `teacher`, which `forward` runs. It is compiled."""
            return forward.top_k(teacher, forward.frozen(teacher, batch), k, temperature)

        def compute(rows: TaughtRows, array: np.ndarray | None) -> None:
            """Prints a line, computes the teacher's values of `rows` by a pass over them, and writes them into `array`,
            in place; None: this process only takes part in the pass."""
            say(f"log-probabilities of the teacher: one pass over {len(rows):,} rows")
            plain = rows.alone()
            compiled = own.compile_of_rows(of_batch, trainable, frozen, plain)
            while planner.smaller(compiled):
                own.follow_plan()
                compiled = own.compile_of_rows(of_batch, trainable, frozen, plain)
            for numbers, (ids, log_probs) in values_of_rows(own, compiled, trainable, frozen, plain):
                if array is None:
                    continue
                for slot, row in enumerate(numbers.tolist()):
                    rows.take(row, ids[slot], log_probs[slot], array)

        return compute

    def _path(self, rows: TaughtRows) -> Path | None:
        """The path of the file with the values of these rows, in the folder of token caches, whether it is there or
        not; None if `digest` is None, so that the values are not stored in a file. Its name is a hash of all that the
        values depend on: the digest, k, the tokens and masks of the documents, and how long documents are cut: the
        number of tokens to which they are truncated, or, for a pass with data.overflow="split", the length of the
        pieces."""
        if self.digest is None:
            return None
        documents, config, values = rows.documents, self._config, rows.values
        cut = rows.length if config.data.overflow == "split" and self._file is None else None
        made = hashlib.blake2b(repr((self.digest, values.k, values.limit, cut)).encode(), digest_size=16)
        for part in (documents.tokens, documents.mask, documents.starts, documents.lengths):
            made.update(np.ascontiguousarray(part).tobytes())
        return cache_folder(config.data.cache_dir) / f"teacher_{made.hexdigest()}.npy"


# ---- stored files


@contextlib.contextmanager
def _stored(path: Path | None, values: TeacherValues) -> Iterator[np.ndarray | None]:
    """A context that gives an array to fill with the teacher's values of some rows, one entry for each of
    `values.total` tokens, and on leaving sets `values.stored` to it. If `path` is None, each process gets an array in
    memory. Otherwise it is mapped from the file `path`, which appears complete or not at all: in a run of several
    processes the first one writes the file, and one of each host that does not see it; the others get None, and map the
    file that was written for them. Collective: every process must enter it. Raises ConfigError if the file cannot be
    written, or a process does not find the file that another one wrote for it."""
    if path is None:
        array = np.zeros(values.total, TeacherValues.entry(values.k))
        yield array
        values.stored = array
        return
    with _writable(path.parent):
        if processes.first():
            path.parent.mkdir(parents=True, exist_ok=True)
        writes = shared_folders.writes(path.parent)
    if writes:
        with _written(path, values) as array:
            yield array
    else:
        yield None
    first, *_ = processes.all_of(_sum_of(path) if writes else None)
    if not shared_folders.seen(lambda: _sum_of(path) == first):
        raise ConfigError(
            f"data.cache_dir = {str(path.parent)!r}: process {processes.index()} does not find {path.name} there as "
            "the first process has stored it; set a folder that the processes of a host share"
        )
    values.stored = np.load(path, mmap_mode="r")


@contextlib.contextmanager
def _written(path: Path, values: TeacherValues) -> Iterator[np.ndarray]:
    """A context that gives an array to fill with the values, mapped from a temporary file beside `path`, whose whole
    size is reserved on the disk. On leaving, the temporary file gets its checksum and is renamed to `path`; after an
    error it is removed. Temporary files of runs that ended are removed first. values: says how many entries the array
    has, and of which dtype. `_stored` enters it in each process that writes the file. Raises ConfigError on entering if
    the file cannot be written."""
    with _writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(".teacher_*.tmp"):
            remove_left(left)
        temporary, descriptor = create_temporary(path)
    try:
        with _writable(path.parent):  # a full disk is an error here
            shape, entry = (values.total,), TeacherValues.entry(values.k)
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=entry, shape=shape)
            os.posix_fallocate(descriptor, 0, os.path.getsize(temporary))
        yield array
        array.flush()
        del array
        with open(temporary, "ab") as file:
            file.write(_checksum(path.name, temporary, os.path.getsize(temporary)))
        os.replace(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """A context in which an OSError becomes a ConfigError that says that `folder`, the token cache, cannot be written.
    `_written` and `_stored` make folders and files in it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"data.cache_dir = {str(folder)!r} cannot be written ({error}); set another") from None


def _sum_of(path: Path) -> str | None:
    """The checksum at the end of the stored file `path`, in hexadecimal digits; None if it cannot be read, as when
    there is none. Processes compare it to see whether they have the same file; `_read` checks whether it is that of the
    content."""
    try:
        with open(path, "rb") as file:
            file.seek(-_SUM, os.SEEK_END)
            return file.read().hex()
    except OSError:
        return None


def _checksum(name: str, path: Path, size: int) -> bytes:
    """The checksum (16 bytes) of the first `size` bytes of the file `path`, whose final name is `name`. The checksum
    covers that name too, so that a file that was renamed is not accepted. `_written` adds it at the file's end, and
    `_read` compares it."""
    made, left = xxhash.xxh3_128(name.encode()), size
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, 1 << 24))):
            made.update(block)
            left -= len(block)
    return made.digest()


def _read(path: Path, values: TeacherValues, say: Callable[[str], None]) -> np.ndarray | None:
    """The values in the stored file `path`, mapped into memory, after its checksum is checked; None, and they are
    computed anew, if there is no such file, or it is damaged, of another shape or dtype, or cannot be read. values:
    says how many entries the array must have, and of which dtype. say: shows a line to the user about a file that is
    used, or that is there and not used."""
    try:
        size = os.path.getsize(path) - _SUM
        with open(path, "rb") as file:
            file.seek(max(size, 0))
            if file.read() != _checksum(path.name, path, size):
                raise ValueError("its checksum is not that of its content")
        found = np.load(path, mmap_mode="r")
        if found.shape != (values.total,) or found.dtype != TeacherValues.entry(values.k):
            raise ValueError("it has another shape")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        say(f"{path} is damaged and not used: {error}")
        return None
    say(f"log-probabilities of the teacher: {path}")
    return found
