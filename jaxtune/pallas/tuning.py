"""Measured block sizes of kernels: an entry for each op, shape bucket and dtype, one file for each kind of GPU.

The user's own measurements (`jaxtune tune` writes them) go first if they were made with the installed jaxlib; then
those packaged in `tuned/`, files of the same form (`jaxtune tune --output` writes them); where there is neither, a
kernel takes its heuristic. A user's file that is damaged or holds something else costs a line in the log, no more: the
next measurement writes it anew.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import math
import os
import re
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

_COMPILERS = 8
_LARGEST_ERROR = 0.02
_forced: contextvars.ContextVar[Mapping[str, Mapping[str, Any]]] = contextvars.ContextVar(
    "forced", default=MappingProxyType({})
)


@contextlib.contextmanager
def forced(op: str, blocks: Mapping[str, Any]):
    """Lets an op take these blocks whatever was measured, in this thread: to measure or to check them."""
    token = _forced.set({**_forced.get(), op: blocks})
    try:
        yield
    finally:
        _forced.reset(token)


def tuned(op: str, bucket: str, dtype, kind_of_blocks: type | None = None) -> dict[str, Any] | None:
    """The best blocks measured for an op on the GPU to lower for, or None for the op's heuristic.

    Args:
      bucket: what of the shapes the blocks depend on, such as "head_dim=128".
      kind_of_blocks: the dataclass that they are to fill; an entry that does not is ignored.
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
    """Times every candidate on this machine's GPU and keeps the fastest.

    Args:
      candidates: blocks to try. One that does not compile or run, or whose result is wrong, is passed over.
      prepare: compiles the op with the blocks in force and gives a function that runs it once; called by several
        threads.
      wrong: why a result is not the op's, or None.
      say: gets a line for each candidate: its blocks before it runs, the rest after.
      path: the file that keeps it; the user's cache unless another is named. A cache that cannot be written is said in
        the log, and the entry comes back all the same.
    Returns:
      the entry {"blocks": the fastest, "milliseconds": its time, "tried": [[blocks, milliseconds or why not], ...]}.
    Raises:
      RuntimeError: no candidate runs, or there is no GPU. OSError: the named file cannot be written.
    """
    kind = dispatch.device_kind()
    if kind is None:
        raise RuntimeError(f"{op}: there is no GPU here to measure blocks on")

    def compiled(blocks):
        with forced(op, blocks):
            return prepare()

    best, best_ms, tried = None, math.inf, []
    with ThreadPoolExecutor(_COMPILERS) as pool:
        waiting = [pool.submit(compiled, blocks) for blocks in candidates]
        wait(waiting)  # nothing compiles while another one is timed
    for blocks, program in zip(candidates, waiting, strict=True):
        words = f"{op}, {bucket}: " + ", ".join(f"{name} {value}" for name, value in blocks.items())
        say(f"{words}: ")  # a kernel that hangs is the one named last
        milliseconds = math.inf
        try:
            run = program.result()
            problem = wrong(run())
            if problem is None:
                milliseconds = _milliseconds(run)
        except Exception as error:  # does not fit this GPU: that is what is being found out
            problem = f"{type(error).__name__}: {str(error)[:120]}"
        tried.append([dict(blocks), problem or round(milliseconds, 4)])
        say(f"{problem or f'{milliseconds:.4f} ms'}\n")
        if milliseconds < best_ms:
            best, best_ms = dict(blocks), milliseconds
    if best is None:
        raise RuntimeError(f"{op}, {bucket}: no candidate runs on {kind}: {tried}")
    entry = {"blocks": best, "milliseconds": round(best_ms, 4), "tried": tried}
    try:
        _store(path or cache_file(kind), kind, _key(op, bucket, dtype), entry)
    except OSError as error:
        if path is not None:
            raise
        logger.warning("%s: what was measured is not kept: %s", cache_file(kind), error)
    return entry


def as_the_first() -> Callable[[Any], str | None]:
    """A `wrong` for `measure`: the first candidate that runs, which should be known to be right, is what results are
    compared with; an error of 2 % by the norm (see dispatch.first_use) is one."""
    right: list[Any] = []

    @jax.jit
    def errors(got, want):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        pairs = [(g.astype(jnp.float32), w.astype(jnp.float32)) for g, w in pairs]
        return [jnp.linalg.norm(g - w) / jnp.linalg.norm(w) for g, w in pairs]

    def wrong(result):
        if not right:
            right.append(result)
        worst = max(float(error) for error in errors(result, right[0]))
        return None if worst <= _LARGEST_ERROR else f"differs from the first blocks' result by {worst:.3g}"

    return wrong


def cache_file(kind: str) -> Path:
    """Where the user's measurements of a kind of GPU are kept; JAXTUNE_TUNING_DIR names another folder."""
    folder = os.environ.get("JAXTUNE_TUNING_DIR") or Path.home() / ".cache" / "jaxtune" / "tuning"
    return Path(folder) / _file_name(kind)


def _file_name(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()) + ".json"


def _key(op: str, bucket: str, dtype) -> str:
    return f"{op}, {bucket}, {jax.numpy.dtype(dtype).name}"


@functools.cache
def _entries(kind: str, cache: str) -> dict[str, Any]:
    packaged = resources.files("jaxtune.pallas") / "tuned" / _file_name(kind)
    entries = json.loads(packaged.read_text(encoding="utf-8"))["entries"] if packaged.is_file() else {}
    return {**entries, **_own(Path(cache))}


def _own(path: Path) -> dict[str, Any]:
    """The entries of a user's file that were measured with this jaxlib; none of a file that is not one of ours."""
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
    """Whether it is an entry as `measure` makes them; blocks are whole numbers and switches."""
    blocks = entry.get("blocks") if isinstance(entry, dict) else None
    return isinstance(blocks, dict) and all(isinstance(value, int | str) for value in blocks.values())


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def _store(path: Path, kind: str, key: str, entry: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_own(path), key: entry}
    record = {"device": kind, "jaxlib": metadata.version("jaxlib"), "entries": entries}
    atomic_write(path, json.dumps(record, indent=1) + "\n")
    _entries.cache_clear()


def _milliseconds(run: Callable[[], Any], rounds: int = 5, runs: int = 4) -> float:
    """The fastest of `rounds` means over `runs` queued together."""
    for _ in range(2):
        jax.block_until_ready(run())
    best = math.inf
    for _ in range(rounds):
        begun = time.perf_counter()
        results = [run() for _ in range(runs)]
        jax.block_until_ready(results[-1])
        best = min(best, (time.perf_counter() - begun) / runs * 1e3)
    return best
