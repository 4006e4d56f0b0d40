"""Measured block sizes of kernels (the sizes by which a kernel divides its work): `measure` finds them, with
`as_the_first` as a check of the results; `tuned` looks them up, `forced` sets them. There is an entry for each
operation, dtype and class of shapes, in one file for each kind of GPU (`cache_file` is the path of the user's).

The user's own measurements (written by `jaxtune tune`) are used first if they were made with the installed jaxlib; then
those packaged in `tuned/`, files of the same format (written by `jaxtune tune --output` or by benchmarks), of any
jaxlib. Without either a kernel chooses its sizes by a rule. A user's file that is damaged or contains something else
only causes a line in the log; the next measurement replaces it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import metadata, resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.system.files import atomic_write, read_plain

logger = logging.getLogger(__name__)

_COMPILERS = 8  # threads that compile candidates
_LARGEST_ERROR = 0.02  # the largest relative error, in the norm, of a candidate that is right
# {operation: {field of its blocks: value}}, within `forced`
_forced: contextvars.ContextVar[Mapping[str, Mapping[str, Any]]] = contextvars.ContextVar(
    "forced", default=MappingProxyType({})
)


@contextlib.contextmanager
def forced(op: str, blocks: Mapping[str, Any]):
    """A context in which `tuned` returns the given block sizes for the operation named `op`, for every dtype and class
    of shapes, whatever was measured; it holds for this thread. Measurements, checks at the first use and tests trace a
    kernel in it to run it with certain sizes. blocks: {field of the operation's dataclass of block sizes: value}."""
    token = _forced.set({**_forced.get(), op: blocks})
    try:
        yield
    finally:
        _forced.reset(token)


def tuned(op: str, bucket: str, dtype, kind_of_blocks: type | None = None) -> dict[str, Any] | None:
    """The fastest block sizes that were measured for an operation on the GPU that is compiled for, {field: value}. None
    if nothing was measured, the kind of GPU is not known (as within dispatch.compile_for), or the entry has other
    fields; the operation then chooses its sizes by a rule. Within `forced`, it returns the sizes given there, unchecked
    and for every bucket and dtype. Kernels call it while they are traced.

    Args:
      op: the name of the operation, such as "attention forward".
      bucket: names the class of shapes that share an entry, such as "head_dim=128".
      dtype: of the operands.
      kind_of_blocks: the dataclass that the caller makes from the sizes; an entry from which it cannot be made, because
        fields are missing or unknown, is ignored, with a warning. None: this is not checked.
    """
    if op in _forced.get():
        return dict(_forced.get()[op])
    kind = dispatch.device_kind()
    if kind is None:
        return None
    path, key = cache_file(kind), _key(op, bucket, dtype)
    entry = _entries(kind, str(path)).get(key)
    if entry is None:
        return None
    if kind_of_blocks is not None:
        try:
            kind_of_blocks(**entry["blocks"])
        except TypeError as error:
            _say_once(f"{path}: the blocks of {key!r} are ignored: {error}")
            return None
    return dict(entry["blocks"])


def measure(
    op: str,
    bucket: str,
    dtype,
    candidates: Sequence[Mapping[str, Any]],
    prepare: Callable[[], Callable[[], Any]],
    *,
    wrong: Callable[[Any], str | None] = lambda result: None,
    say: Callable[[str], None] = lambda text: None,
    path: Path | None = None,
) -> dict[str, Any]:
    """Times an operation with every candidate of block sizes on this machine's GPU, and stores the fastest. `jaxtune
    tune` and the benchmark of quant_matmul call it.

    Args:
      op: the name of the operation.
      bucket: names the class of shapes that share the entry, such as "head_dim=128".
      dtype: the operands' dtype.
      candidates: the block sizes to try, each {field: value}. One that does not compile or run, or whose result is
        wrong, is skipped.
      prepare: a function without arguments that compiles the operation, with the candidate's sizes (it is called within
        `forced`), and returns a function that runs it once and returns its result. Several threads call it, at the same
        time; all candidates are compiled before the first one runs.
      wrong: a function of a candidate's result that returns why it is wrong, or None if it is right; by default all are
        right. It is called in the order of the candidates.
      say: is called with text for the user: a candidate's sizes before it runs, then that it runs or why it is skipped;
        at the end the times.
      path: the file that stores the result; None: the user's cache. If the cache cannot be written, this is logged, and
        the entry is returned all the same.
    Returns:
      the entry {"blocks": the fastest, "milliseconds": its time, "tried": [[blocks, milliseconds or why not], ...]}.
    Raises:
      RuntimeError: no candidate runs and is right, or there is no GPU.
      OSError: the given file cannot be written.
    """
    kind = dispatch.device_kind()
    if kind is None:
        raise RuntimeError(f"{op}: there is no GPU here to measure blocks on")

    def compiled(blocks):
        with forced(op, blocks):
            return prepare()

    tried: list[list] = []
    running: dict[int, Callable] = {}  # {index of the candidate: its program}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        waiting = [pool.submit(compiled, blocks) for blocks in candidates]
        wait(waiting)  # nothing compiles while another one is timed
    named = [f"{op}, {bucket}: " + ", ".join(f"{name} {value}" for name, value in each.items()) for each in candidates]
    for index, (blocks, program) in enumerate(zip(candidates, waiting, strict=True)):
        say(f"{named[index]}: ")  # printed first, so that a kernel that hangs is known
        try:
            run = program.result()
            problem = wrong(jax.block_until_ready(run()))
            if problem is None:
                running[index] = run
        except Exception as error:  # a candidate that does not fit this GPU is skipped
            problem = f"{type(error).__name__}: {str(error)[:120]}"
        tried.append([dict(blocks), problem])
        say(f"{problem or 'runs'}\n")
    if not running:
        raise RuntimeError(f"{op}, {bucket}: no candidate runs on {kind}: {tried}")
    for index, milliseconds in zip(running, _milliseconds(list(running.values())), strict=True):
        tried[index][1] = round(milliseconds, 4)
        say(f"{named[index]}: {milliseconds:.4f} ms\n")
    best, best_ms = min((tried[index] for index in running), key=lambda each: each[1])
    entry = {"blocks": dict(best), "milliseconds": best_ms, "tried": tried}
    try:
        _store(path or cache_file(kind), kind, _key(op, bucket, dtype), entry)
    except OSError as error:
        if path is not None:
            raise
        logger.warning("%s: what was measured is not kept: %s", cache_file(kind), error)
    return entry


def as_the_first() -> Callable[[Any], str | None]:
    """Returns a function for the argument `wrong` of `measure`. It takes a candidate's result, and returns why that is
    wrong, or None. The first finite result that it gets is kept and taken as right, so the first candidate should be
    one that is known to be right and to run; a later result is wrong if the relative error of one of its arrays against
    the first one's exceeds 2 % in the norm. A result that is not finite is wrong."""
    right: list[Any] = []

    @jax.jit
    def errors(got, want):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        pairs = [(g.astype(jnp.float32), w.astype(jnp.float32)) for g, w in pairs]
        tiny = jnp.finfo(jnp.float32).tiny  # of an array of zeros
        return jnp.stack([jnp.linalg.norm(g - w) / jnp.maximum(jnp.linalg.norm(w), tiny) for g, w in pairs])

    def wrong(result):
        worst = float(errors(result, right[0] if right else result).max())  # NaN if a number is not finite
        if worst <= _LARGEST_ERROR:
            right.extend([] if right else [result])
            return None
        return f"differs from the first blocks' result by {worst:.3g}" if right else "has numbers that are not finite"

    return wrong


def cache_file(kind: str) -> Path:
    """The path of the file with the user's measurements for a kind of GPU, such as "NVIDIA H200". It is in
    ~/.cache/jaxtune/tuning, or in the folder that the environment variable JAXTUNE_TUNING_DIR names. `measure` writes
    the file, unless it is given another path, and `tuned` reads it."""
    folder = os.environ.get("JAXTUNE_TUNING_DIR") or Path.home() / ".cache" / "jaxtune" / "tuning"
    return Path(folder) / _file_name(kind)


def _file_name(kind: str) -> str:
    """The name of the JSON file with the measurements for a kind of GPU, such as nvidia_h200.json for "NVIDIA H200".
    `cache_file` and `_entries` use it for the user's file and the packaged one, which have the same name in different
    folders."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()) + ".json"


def _key(op: str, bucket: str, dtype) -> str:
    """The key under which `measure` stores an entry in a file of measurements and `tuned` looks it up, such as
    "attention forward, head_dim=128, bfloat16". op: the name of the operation; bucket: the class of shapes that share
    the entry; dtype: of the operands."""
    return f"{op}, {bucket}, {jax.numpy.dtype(dtype).name}"


@functools.cache
def _entries(kind: str, cache: str) -> dict[str, Any]:
    """{key: entry} of all measurements for a kind of GPU, packaged ones and the user's; where both have a key, the
    user's entry is used. kind: such as "NVIDIA H200"; cache: the path of the user's file. Files are read once, and
    again after `_store` has written one."""
    packaged = resources.files("jaxtune.pallas") / "tuned" / _file_name(kind)
    entries = json.loads(packaged.read_text(encoding="utf-8"))["entries"] if packaged.is_file() else {}
    return {**entries, **_own(Path(cache))}


def _own(path: Path) -> dict[str, Any]:
    """{key: entry} of the user's file of measurements at `path`. Empty if the file does not exist, if its entries were
    made with another jaxlib, or if it cannot be read or is not one of jaxtune's. Entries without block sizes are left
    out. A warning is logged in each of these cases, except for a missing file and another jaxlib. `_entries` calls it
    for look-ups, and `_store` for the entries that it keeps."""
    try:
        record = json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _say_once(f"{path}: these measured block sizes are ignored: {type(error).__name__}: {error}")
        return {}
    if not isinstance(record, dict) or not isinstance(record.get("entries"), dict):
        _say_once(f"{path}: ignored: it holds no measured block sizes")
        return {}
    if record.get("jaxlib") != metadata.version("jaxlib"):
        return {}
    good = {key: entry for key, entry in record["entries"].items() if _is_entry(entry)}
    if len(good) < len(record["entries"]):
        _say_once(f"{path}: {len(record['entries']) - len(good)} entries are ignored: they hold no blocks")
    return good


def _is_entry(entry: Any) -> bool:
    """Whether a value from a user's file, which can contain anything, is an entry as `measure` makes them: a dictionary
    with "blocks", whose values are integers, booleans or strings. `_own` drops all other values."""
    blocks = entry.get("blocks") if isinstance(entry, dict) else None
    return isinstance(blocks, dict) and all(isinstance(value, int | str) for value in blocks.values())


@functools.cache
def _say_once(text: str) -> None:
    """Logs a warning, once for each text, because every look-up of the same entry would repeat it."""
    logger.warning(text)


def _store(path: Path, kind: str, key: str, entry: dict[str, Any]) -> None:
    """Adds an entry with this key, or replaces it, in the file `path` of measurements for a kind of GPU. Entries that
    were measured with another jaxlib are dropped, because its compiler may be faster with other block sizes, and so is
    everything else that `_own` ignores. Raises OSError if the file cannot be written. `measure` calls it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_own(path), key: entry}
    record = {"device": kind, "jaxlib": metadata.version("jaxlib"), "entries": entries}
    atomic_write(path, json.dumps(record, indent=1) + "\n")
    _entries.cache_clear()


def _milliseconds(programs: Sequence[Callable[[], Any]], rounds: int = 6, runs: int = 4) -> list[float]:
    """Times `programs`, functions that launch a compiled program once and return its arrays, in milliseconds, which
    `measure` compares. They take turns, because a GPU's clock falls while it works: the first of those that are timed
    one after another would seem the fastest. In each round every program is launched `runs` times back to back, and the
    mean of these is taken; every second round goes through them in the opposite order. The results are the medians of
    `rounds` rounds, after one that is not timed."""
    found: list[list[float]] = [[] for _ in programs]
    for number in range(rounds + 1):
        for index in range(len(programs))[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            results = [programs[index]() for _ in range(runs)]
            jax.block_until_ready(results[-1])
            found[index].append((time.perf_counter() - started) / runs * 1e3)
    return [statistics.median(times[1:]) for times in found]
