"""Checkpoints that are atomic and verified; Orbax writes the arrays.

    folder/
      run.lock                the run that uses the folder: pid, host, start time
      step_00000100/          a complete checkpoint: it gets this name last
        arrays/               Orbax (OCDBT, zarr, uncompressed)
        meta.json             step, the mapping `meta` given to `save`, shape and dtype of every array
        manifest.json         bytes and CRC-32 of every file above; written last, as the commit mark
      .tmp_step_00000200/     a save in progress, or the leftover of a dead run, which the next start removes

A save copies device arrays to the host, returns, and finishes in a thread. Before a resume every checksum is compared.
Each process writes and reads its own devices' shards; the first does all else.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.system.disk import lacks_room
from jaxtune.system.files import atomic_write, discard, put, put_back, remove_temporary
from jaxtune.system.sealed import read_manifest, write_manifest
from jaxtune.train.folder import array_files
from jaxtune.train.folder.folder_lock import FolderLock

logger = logging.getLogger(__name__)

ARRAYS, META, MANIFEST = "arrays", "meta.json", "manifest.json"  # files of a checkpoint
FORMAT = 1

_FEW_BYTES, _LEAF_BYTES = 2**20, 2**12  # of a checkpoint, and of each array in it: names, shapes, unfilled blocks
_STEP_NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read, or is another run's; the message says what to do."""


class NoRoom(CheckpointError):
    """The disk has too little room; all processes raise it alike."""


def saved_steps(folder: Path) -> list[int]:
    """Steps with a checkpoint in `folder`, ascending; files are not checked, no lock is needed."""
    if not folder.is_dir():
        return []
    matches = (_STEP_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


class Checkpointer:
    """Saves and restores the checkpoints of one run; a context that holds the folder's lock. All count as proven but
    the last saved (proven=False) or restored, until `confirm`; `reject` removes it.

      keep: newest proven checkpoints that stay, at least 1.

    `best`: steps of ever better evaluations, of which the newest proven one stays. ValueError if the folder is not
    writable or in use.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 2):
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._lock = FolderLock(self.folder) if processes.first() else None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._damaged: set[int] = set()
        self.best: list[int] = []
        self._unproven: int | None = None
        self._orbax: Any = None  # created at the first save, as importing Orbax takes half a second
        if processes.first():
            self._remove_leftovers()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def steps(self) -> list[int]:
        return saved_steps(self.folder)

    def latest(self) -> int | None:
        """The newest step with a checkpoint, perhaps damaged, or None."""
        return max(self.steps(), default=None)

    # ---- writing

    def save(self, step: int, state: Any, meta: Mapping[str, Any], proven: bool = True) -> None:
        """Starts a save, which a thread finishes; returns once arrays are on the host and may be donated. First waits
        for the last save and raises its error.

          state: pytree of jax.Array (any sharding, PRNG keys too) or numpy arrays.
          meta: JSON values.
          proven: False: until `confirm` or the next save no older checkpoint goes.

        CheckpointError without room or if something cannot be stored; no file stays.
        """
        self.wait()
        arrays, described = _describe(state)
        record = {"format": FORMAT, "step": step, "meta": meta, "arrays": described}
        try:
            record_text = json.dumps(record, indent=1)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta of step {step} is not JSON-able: {error}") from None
        if lacking := processes.of_first(lambda: self.lacks_room(state, len(record_text))):
            raise NoRoom(f"no room to save step {step}: {lacking}")
        temporary = self.folder / f".tmp_{_name(step)}"
        try:
            if processes.first():
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
            if self._orbax is not None and processes.count() > 1:
                self._orbax.close()
                self._orbax = None
            if self._orbax is None:
                self._orbax = array_files.saver()
            import orbax.checkpoint as ocp

            self._orbax.save(temporary / ARRAYS, args=ocp.args.PyTreeSave(arrays))
        except Exception as error:
            self._fail(step, temporary, error)
            self.wait()
        self._unproven = None if proven else step
        self._thread = threading.Thread(target=self._finish, args=(step, temporary, record_text), name="checkpoint")
        self._thread.start()

    def lacks_room(self, state: object, record_bytes: int = 0) -> str | None:
        """What a checkpoint of `state` (arrays or shapes) needs and the disk has, if that is too little."""
        return lacks_room(self.folder, checkpoint_bytes(state) + record_bytes)

    def unlock(self) -> None:
        """For a process that ends without `close`."""
        if self._lock is not None:
            self._lock.release()

    def wait(self) -> None:
        """Waits for the save in progress; raises the error of a failed save, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def confirm(self) -> None:
        """The last state is good: older checkpoints go. Call it after every good step; nothing happens while that save
        is in progress.
        """
        if self._unproven is not None and (self._thread is None or not self._thread.is_alive()):
            newest, self._unproven = self._unproven, None
            self._purge(newest)

    def reject(self) -> None:
        """Removes the last checkpoint, if it is unproven and another undamaged one exists. Waits as `wait`."""
        self.wait()
        other_steps = [step for step in self.steps() if step != self._unproven and step not in self._damaged]
        if self._unproven in self.steps() and other_steps:
            path = self.folder / _name(self._unproven)
            logger.warning("removing %s, whose steps were not finite; step %d is the newest now", path, other_steps[-1])
            self._remove(path)
            self._unproven = None

    def close(self) -> None:
        """Waits for the save in progress, and releases the lock."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None
            if self._lock is not None:
                self._lock.release()

    def _finish(self, step: int, temporary: Path, record_text: str) -> None:
        """A save's thread: metadata, manifest, final name. Errors are kept for `wait`."""
        try:
            self._orbax.wait_until_finished()  # in the first process this waits until all have written
            if not processes.first():
                return
            atomic_write(temporary / META, record_text)
            write_manifest(temporary, MANIFEST, {"step": step})
            put(temporary, self.folder / _name(step))  # in place of one of an abandoned or damaged run
        except Exception as error:
            self._fail(step, temporary, error)
            return
        self._purge(step)

    def _fail(self, step: int, temporary: Path, error: Exception) -> None:
        if processes.first():
            shutil.rmtree(temporary, ignore_errors=True)
        last = self.latest()
        status = "there is no complete checkpoint" if last is None else f"the last complete checkpoint is step {last}"
        self._error = CheckpointError(f"saving step {step} to {self.folder} failed: {error}; {status}")
        self._error.__cause__ = error

    def _purge(self, newest: int) -> None:
        """Keeps, up to `newest`, the last `keep` proven undamaged checkpoints, the best and an unproven one."""
        self._damaged.discard(newest)
        steps = self.steps()
        usable = [step for step in steps if step <= newest and step not in self._damaged]
        proven = [step for step in usable if step != self._unproven]
        kept_steps = {*proven[-self.keep :], *[step for step in proven if step in self.best][-1:]}
        kept_steps |= {step for step in usable if step == self._unproven}
        for step in steps:
            if step in kept_steps:
                continue
            path = self.folder / _name(step)
            if step > newest and processes.first():
                logger.warning("removing %s: this run went back to before it", path)
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """In the first process; errors are logged."""
        if not processes.first():
            return
        try:
            discard(path)
        except OSError as error:
            logger.warning("old checkpoint %s could not be removed: %s", path, error)

    def _remove_leftovers(self) -> None:
        remove_temporary(self.folder)
        for path in self.folder.iterdir():
            try:
                if path.name.startswith(".old_step_"):  # as a version before replaced one
                    put_back(path, self.folder / path.name[5:])
                elif path.name.startswith(".tmp_step_"):
                    logger.warning("removing %s, an incomplete save of a run that died", path)
                    shutil.rmtree(path)
            except OSError as error:
                logger.warning("incomplete checkpoint %s could not be removed: %s", path, error)

    # ---- reading

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        check: Callable[[dict[str, Any]], None] | None = None,
        partial: bool = False,
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, state, meta); unproven until `confirm`. Collective.

          step: None: the newest intact one; damaged ones are logged. A given step is never replaced.
          like: pytree of arrays or jax.ShapeDtypeStruct; without a sharding a leaf is uncommitted, a numpy leaf numpy.
          None: nested dicts of numpy arrays.
          check: gets meta before arrays are read; may raise, or fill in `like`.
          partial: `like` has only some arrays.

        CheckpointError if none is intact, `like` does not fit, or the last save failed.
        """
        self.wait()
        intact_step = processes.of_first(lambda: self._intact(step))
        path = self.folder / _name(intact_step)
        if check is not None:
            check(_record(path)["meta"])
        self._unproven = intact_step
        return intact_step, *_read(path, like, partial)

    def _intact(self, step: int | None) -> int:
        """The newest intact step, or `step`; damaged ones are logged."""
        damaged: list[str] = []
        if not (candidates := self.steps()[::-1] if step is None else [step]):
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        for candidate in candidates:
            path = self.folder / _name(candidate)
            problem = find_damage(path)
            if problem is None:
                if damaged:
                    logger.warning("resuming from step %d instead", candidate)
                return candidate
            logger.error("checkpoint %s is damaged and cannot be used: %s", path, problem)
            damaged.append(f"{path.name}: {problem}")
            self._damaged.add(candidate)
        raise CheckpointError(f"no intact checkpoint in {self.folder}: " + "; ".join(damaged))


# ---- the parts of a save


def _name(step: int) -> str:
    return f"step_{step:08d}"


def checkpoint_bytes(state: object) -> int:
    """The most bytes of a checkpoint of `state` (arrays or shapes), with Orbax's metadata and padding."""
    leaves = jax.tree.leaves(state)
    count = sum(x.size * (8 if _is_key(x) else jnp.dtype(x.dtype).itemsize) for x in leaves)
    return count + count // 20 + _FEW_BYTES + _LEAF_BYTES * len(leaves)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """{"a/b": leaf} of a pytree. CheckpointError for names that are empty, not unique or have a "/"."""
    named = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path_parts = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        name = "/".join(path_parts)
        if not path_parts or name in named or any("/" in path_part or not path_part for path_part in path_parts):
            raise CheckpointError(
                f"state has no usable name for the leaf {path_parts}: names must be unique, without '/'"
            )
        named[name] = leaf
    return named


def _describe(state: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """({name: array for Orbax}, {name: entry of meta.json}). Empty arrays are only described; keys become uint32."""
    import tensorstore

    arrays, described = {}, {}
    for name, x in _named_leaves(state).items():
        if isinstance(x, np.generic):
            x = np.asarray(x)
        if not isinstance(x, jax.Array | np.ndarray):
            raise CheckpointError(f"state[{name}] is a {type(x).__name__}, not an array; plain values belong into meta")
        described[name] = {"shape": list(x.shape), "dtype": str(x.dtype)}
        if x.size == 0:
            continue  # Orbax cannot store an empty array, and its description is enough
        if _is_key(x):
            described[name]["key_impl"] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        try:
            tensorstore.dtype(x.dtype.name)
        except (TypeError, ValueError):
            raise CheckpointError(
                f"state[{name}] has dtype {x.dtype}, which cannot be stored; pack it into uint8"
            ) from None
        arrays[name] = x if isinstance(x, jax.Array) else np.array(x)  # a copy, because the caller may change its array
    if not arrays:
        raise CheckpointError("state holds no array: there is nothing to save")
    return arrays, described


# ---- the parts of a restore


def _record(path: Path) -> dict[str, Any]:
    """A checkpoint's record, checked for what restoring it reads. CheckpointError."""
    try:
        record = json.loads((path / META).read_text(encoding="utf-8"))
        if record["format"] != FORMAT or record["step"] != int(path.name.removeprefix("step_")):
            raise ValueError(f"it is of format {record['format']!r} and step {record['step']!r}")
        if not isinstance(record["meta"], dict):
            raise ValueError("its meta is not a mapping")
        for entry in record["arrays"].values():
            jnp.dtype(entry["dtype"]) if "key_impl" not in entry else str(entry["key_impl"])
            if not all(type(size) is int and size >= 0 for size in entry["shape"]):
                raise ValueError(f"a shape is {entry['shape']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / META} is not a checkpoint's ({type(error).__name__}: {error})") from None
    return record


def _read(path: Path, like: Any, partial: bool = False) -> tuple[Any, dict[str, Any]]:
    """(state, meta) of a checkpoint folder, whose checksums are checked already."""
    import orbax.checkpoint as ocp

    record = _record(path)
    described = record["arrays"]
    if like is None:
        targets = dict.fromkeys(described)
    else:
        targets = _named_leaves(like)
        _check_fits(path, described, targets, partial)

    item, restore_args, arrays = {}, {}, {}
    for name, leaf in targets.items():
        if 0 in described[name]["shape"]:
            arrays[name] = _empty(described[name], leaf)
            continue
        item[name] = jax.ShapeDtypeStruct((), jnp.float32)  # only the name counts; shapes and dtypes are those on disk
        sharding = None if "key_impl" in described[name] else _committed_sharding(leaf)
        if sharding is None:
            restore_args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            restore_args[name] = ocp.ArrayRestoreArgs(sharding=sharding)
    try:
        largest = max((_bytes(described[name]) for name in item), default=0)
        with array_files.reader(largest) as reader:
            request = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=partial)
            arrays |= reader.restore(path / ARRAYS, args=request)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / ARRAYS} cannot be read ({type(error).__name__}: {error})") from error
    for name in item:
        _require_described(path, name, arrays[name], described[name])
    leaves = {name: _place(arrays[name], described[name], targets[name], like is None) for name in targets}

    if like is not None:
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves.values()), record["meta"]
    nested: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested, record["meta"]


def _require_described(path: Path, name: str, array: np.ndarray | jax.Array, description: dict[str, Any]) -> None:
    """CheckpointError if shape or dtype is not meta.json's; of a key only the leading shape is known."""
    shape, is_key = tuple(description["shape"]), "key_impl" in description
    stored = tuple(array.shape[: len(shape)] if is_key else array.shape)
    if stored != shape or (not is_key and str(array.dtype) != description["dtype"]):
        raise CheckpointError(
            f"{path / ARRAYS} is damaged: {name} is {array.dtype}{list(stored)}, and {META} says "
            f"{description['dtype']}{list(shape)}; remove that folder, and the run continues from an earlier one"
        )


def _bytes(description: dict[str, Any]) -> int:
    """A PRNG key counts 8 bytes, the fewest that one has."""
    size = 8 if "key_impl" in description else jnp.dtype(description["dtype"]).itemsize
    return math.prod(description["shape"]) * size


def _empty(description: dict[str, Any], leaf: Any) -> np.ndarray | jax.Array:
    """Orbax cannot store arrays of size 0."""
    empty = np.empty(description["shape"], jnp.dtype(description["dtype"]))
    sharding = _committed_sharding(leaf)
    return empty if sharding is None else partition.put(empty, sharding)


def _committed_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return getattr(leaf, "sharding", None)


def _place(array: Any, description: dict[str, Any], leaf: Any, as_numpy: bool) -> Any:
    """A restored array as a leaf like `leaf`, placed if that is not committed."""
    if impl := description.get("key_impl"):
        key = jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
        sharding = _committed_sharding(leaf)
        return key if sharding is None else jax.device_put(key, sharding)
    if as_numpy or isinstance(leaf, np.ndarray | np.generic) or isinstance(array, jax.Array):
        return array
    return jnp.asarray(array)


def _check_fits(path: Path, described: dict[str, dict[str, Any]], targets: dict[str, Any], partial: bool) -> None:
    """CheckpointError with the differences between a checkpoint's arrays and a run's."""
    problems = [f"{name}: not in the checkpoint" for name in targets if name not in described]
    if not partial:
        problems += [f"{name}: in the checkpoint, not in this run" for name in described if name not in targets]
    for name in targets.keys() & described.keys():
        saved = (tuple(described[name]["shape"]), described[name]["dtype"])
        current = (tuple(targets[name].shape), str(targets[name].dtype))
        if saved != current:
            problems.append(f"{name}: saved as {saved[1]}{list(saved[0])}, this run has {current[1]}{list(current[0])}")
    if problems:
        omitted = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"{path} does not fit this run: " + "; ".join(sorted(problems)[:8]) + omitted)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, in words; None if every file of its manifest has its size and checksum.
    Reads every byte; unlisted files are ignored.
    """
    if not path.is_dir():
        return "there is no such checkpoint"
    try:
        return None if META in read_manifest(path, MANIFEST)["files"] else f"{MANIFEST}: does not list {META}"
    except FileNotFoundError:
        return f"{MANIFEST}: the file is missing"
    except OSError as error:
        return f"unreadable ({error})"
    except ValueError as error:
        return str(error)
