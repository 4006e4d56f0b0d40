"""Measured block sizes of kernels, an entry for each operation, dtype and class of shapes, a file for each kind of GPU.
The user's (`jaxtune tune`) come first if they were made with the installed jaxlib, then those packaged in `tuned/`;
without either a kernel chooses by a rule.
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

from jaxtune.pallas import targets
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
    """A context in which `tuned` returns these blocks ({field: value}) for the operation, in this thread."""
    token = _forced.set({**_forced.get(), op: blocks})
    try:
        yield
    finally:
        _forced.reset(token)


def tuned(op: str, bucket: str, dtype, kind_of_blocks: type | None = None) -> dict[str, Any] | None:
    """The fastest measured block sizes on the GPU that is compiled for, or None; within `forced` those given there.

    op, bucket: such as "attention forward", and the class of shapes, such as "head_dim=128".
    kind_of_blocks: the dataclass of the sizes; an entry that does not fit it is ignored with a warning.
    dtype: of the operands.
    """
    if op in _forced.get():
        return dict(_forced.get()[op])
    kind = targets.device_kind()
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


def state() -> tuple:
    """All block sizes that `tuned` may return now."""
    kind = targets.device_kind()
    return dict(_forced.get()), {} if kind is None else _entries(kind, str(cache_file(kind)))


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
    """Times an operation with every candidate of block sizes on this GPU, stores the fastest, and returns {"blocks",
    "milliseconds", "tried": [[blocks, milliseconds or why not], ...]}.

      prepare: compiles the operation within `forced`, and returns a function that runs it once. Several threads call
        it; all compile before the first runs.
      wrong: a candidate's result -> why it is wrong, or None; called in order.
      say: gets text for the user.
      path: None: the user's cache, whose errors are only logged.
      op, bucket, dtype: the entry's key: operation, class of shapes, dtype of the operands.
      candidates: {field of the blocks: value} each.

    Raises RuntimeError if no candidate runs or there is no GPU, OSError for `path`.
    """
    kind = targets.device_kind()
    if kind is None:
        raise RuntimeError(f"{op}: there is no GPU here to measure blocks on")

    def compiled(blocks):
        with forced(op, blocks):
            return prepare()

    attempts: list[list] = []
    running: dict[int, Callable] = {}  # {index of the candidate: its program}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        waiting = [pool.submit(compiled, blocks) for blocks in candidates]
        wait(waiting)  # nothing compiles while another one is timed
    named = [
        f"{op}, {bucket}: " + ", ".join(f"{name} {value}" for name, value in candidate.items())
        for candidate in candidates
    ]
    for index, (blocks, program) in enumerate(zip(candidates, waiting, strict=True)):
        say(f"{named[index]}: ")  # printed first, so that a kernel that hangs is known
        try:
            run = program.result()
            problem = wrong(jax.block_until_ready(run()))
            if problem is None:
                running[index] = run
        except Exception as error:  # a candidate that does not fit this GPU is skipped
            problem = f"{type(error).__name__}: {str(error)[:120]}"
        attempts.append([dict(blocks), problem])
        say(f"{problem or 'runs'}\n")
    if not running:
        raise RuntimeError(f"{op}, {bucket}: no candidate runs on {kind}: {attempts}")
    for index, milliseconds in zip(running, _milliseconds(list(running.values())), strict=True):
        attempts[index][1] = round(milliseconds, 4)
        say(f"{named[index]}: {milliseconds:.4f} ms\n")
    best, best_ms = min((attempts[index] for index in running), key=lambda candidate: candidate[1])
    entry = {"blocks": dict(best), "milliseconds": best_ms, "tried": attempts}
    try:
        _store(path or cache_file(kind), kind, _key(op, bucket, dtype), entry)
    except OSError as error:
        if path is not None:
            raise
        logger.warning("%s: what was measured is not kept: %s", cache_file(kind), error)
    return entry


def as_the_first() -> Callable[[Any], str | None]:
    """A `wrong` for `measure`: the first finite result is taken as right, later ones are wrong if an array's relative
    error in the norm exceeds 2 %. So the first candidate should be known to be right.
    """
    right: list[Any] = []

    @jax.jit
    def errors(actual, expected):
        pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
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
    """The user's file for a kind of GPU, such as "NVIDIA H200", in $JAXTUNE_TUNING_DIR or ~/.cache/jaxtune/tuning."""
    folder = os.environ.get("JAXTUNE_TUNING_DIR") or Path.home() / ".cache" / "jaxtune" / "tuning"
    return Path(folder) / _file_name(kind)


def _file_name(kind: str) -> str:
    """nvidia_h200.json for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()) + ".json"


def _key(op: str, bucket: str, dtype) -> str:
    """Such as "attention forward, head_dim=128, bfloat16"."""
    return f"{op}, {bucket}, {jax.numpy.dtype(dtype).name}"


@functools.cache
def _entries(kind: str, cache: str) -> dict[str, Any]:
    """{key: entry} of a kind of GPU, the user's before packaged ones; cached until `_store`."""
    packaged = resources.files("jaxtune.pallas") / "tuned" / _file_name(kind)
    entries = json.loads(packaged.read_text(encoding="utf-8"))["entries"] if packaged.is_file() else {}
    return {**entries, **_own(Path(cache))}


def _own(path: Path) -> dict[str, Any]:
    """{key: entry} of the user's file, without what cannot be read; empty for another jaxlib."""
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
    blocks = entry.get("blocks") if isinstance(entry, dict) else None
    return isinstance(blocks, dict) and all(isinstance(value, int | str) for value in blocks.values())


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def _store(path: Path, kind: str, key: str, entry: dict[str, Any]) -> None:
    """Adds or replaces an entry, and drops those of another jaxlib, with whose compiler other blocks may be faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_own(path), key: entry}
    record = {"device": kind, "jaxlib": metadata.version("jaxlib"), "entries": entries}
    atomic_write(path, json.dumps(record, indent=1) + "\n")
    _entries.cache_clear()


def _milliseconds(programs: Sequence[Callable[[], Any]], rounds: int = 6, runs: int = 4) -> list[float]:
    """Medians over rounds; programs take turns back and forth, as a GPU's clock falls while it works."""
    samples: list[list[float]] = [[] for _ in programs]
    for number in range(rounds + 1):
        for index in range(len(programs))[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            results = [programs[index]() for _ in range(runs)]
            jax.block_until_ready(results[-1])
            samples[index].append((time.perf_counter() - start) / runs * 1e3)
    return [statistics.median(times[1:]) for times in samples]
