"""Finds the trace in a folder or file, whichever profiler wrote it, and reads it."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from jaxtune.profile.record import RECORD_FILE, TRACE_FILE
from jaxtune.profile.trace import Trace, TraceError

# Traces by preference: the Chrome trace that jax.profiler writes in addition to its XPlane file says less.
_PATTERNS = ("*.xplane.pb", "*.xplane.pb.gz", "*.pt.trace.json", "*.pt.trace.json.gz", "*.json.gz", "*.json")

# The largest expansion that is accepted. Traces unpack to 5 to 30 times their size, a malicious file to 1,000 times.
_MOST_EXPANSION = 200
_SMALL_BYTES = 16 << 20


def read(path: str | Path) -> Trace:
    """The Trace in a folder that `capture`, jax.profiler or PyTorch's profiler wrote, or in a file, with what `capture`
    recorded beside it. TraceError says why it cannot be read.
    """
    path = Path(path)
    file = _find(path)
    data = _bytes(file)
    if not data:
        raise TraceError(f"{file} is empty: the capture did not finish; record it again")
    try:
        trace = _parse(file, data)
    except TraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A damaged file can make any of the readers fail, in many ways.
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TraceError(f"{file} is damaged ({cause}); record it again") from error
    trace.path = str(path)
    _add_record(trace, file.parent / RECORD_FILE)
    return trace


def _parse(file: Path, data: bytes) -> Trace:
    """A Trace of a file's unpacked bytes, by its name and first byte. A damaged file may raise anything."""
    name = file.name.removesuffix(".gz")
    if name.endswith(".json") or data[:1] in (b"{", b"["):
        from jaxtune.profile.chrome import read_chrome

        return read_chrome(data, str(file))
    if name.endswith(".pb"):
        from jaxtune.profile.xplane import read_xplane

        return read_xplane(data, str(file))
    raise TraceError(f"{file} is no trace: want an XPlane file (*.xplane.pb) or a Chrome trace (*.json), or .gz of one")


def _find(path: Path) -> Path:
    """The trace in a folder: `capture`'s, or the newest file of the first pattern. TraceError if there is none."""
    if path.is_file():
        return path
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    if (path / TRACE_FILE).is_file():
        return path / TRACE_FILE
    for pattern in _PATTERNS:
        candidates = [p for p in path.rglob(pattern) if p.is_file() and p.name != RECORD_FILE]
        if candidates:
            return max(
                candidates, key=lambda p: (p.stat().st_mtime, str(p))
            )  # the latest, as jax.profiler adds a folder for each capture
    contents = ", ".join(sorted(p.name for p in path.iterdir())[:4]) or "nothing"
    raise TraceError(f"{path} holds no trace (*.xplane.pb, *.json), but {contents}")


def _bytes(file: Path) -> bytes:
    """A file's bytes, unpacked. TraceError: damaged, or larger than any trace unpacks, which might fill the memory."""
    with file.open("rb") as source:
        packed = source.read(2) == b"\x1f\x8b"
    if not packed:
        return file.read_bytes()
    most = max(_SMALL_BYTES, file.stat().st_size * _MOST_EXPANSION)
    try:
        with gzip.open(file) as unpacked:
            data = unpacked.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{file} is cut or damaged: {error}; record it again") from error
    if len(data) > most:
        raise TraceError(
            f"{file} is no trace: its {file.stat().st_size:,} bytes unpack to more than {most:,}, and traces grow less "
            f"than {_MOST_EXPANSION} times; unpack it yourself (gunzip) if it is one"
        )
    return data


def _add_record(trace: Trace, file: Path) -> None:
    """Adds profile.json to a trace, in place. TraceError for a damaged file."""
    if not file.is_file():
        return
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        trace.meta = dict(record.get("meta", {}))
        trace.meta.update({key: record[key] for key in ("memory",) if key in record})
        trace.versions |= {str(k): str(v) for k, v in record.get("versions", {}).items()}
        trace.peak_memory_bytes = trace.peak_memory_bytes or int(record.get("peak_memory_bytes") or 0)
        if trace.device in ("", "CPU") and record.get("device"):
            trace.device = str(record["device"])
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise TraceError(f"{file} is damaged: {error}; delete it to read the trace without it") from error
