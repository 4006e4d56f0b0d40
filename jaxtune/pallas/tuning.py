"""Measured block sizes of kernels: an entry for each op, shape bucket and dtype, one file for each kind of GPU.

The user's own measurements (`jaxtune tune` writes them) go first if they were made with the installed jaxlib; then
those packaged in `tuned/`, files of the same form (`jaxtune tune --output` writes them); where there is neither, a
kernel takes its heuristic.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
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

from jaxtune.files import atomic_write
from jaxtune.pallas import dispatch

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


def tuned(op: str, bucket: str, dtype) -> dict[str, Any] | None:
    """The best blocks measured for an op on the GPU to lower for, or None for the op's heuristic.

    bucket: what of the shapes the blocks depend on, such as "head_dim=128".
    """
    if op in _forced.get():
        return dict(_forced.get()[op])
    kind = dispatch.device_kind()
    if kind is None:
        return None
    entry = _entries(kind, str(cache_file(kind))).get(_key(op, bucket, dtype))
    return dict(entry["blocks"]) if entry else None


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
      path: the file that keeps it; the user's cache unless another is named.
    Returns:
      the entry {"blocks": the fastest, "milliseconds": its time, "tried": [[blocks, milliseconds or why not], ...]}.
    Raises:
      RuntimeError: no candidate runs, or there is no GPU.
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
    _store(path or cache_file(kind), kind, _key(op, bucket, dtype), entry)
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
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    return record["entries"] if record["jaxlib"] == metadata.version("jaxlib") else {}


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
