"""Captures a profile."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtune.system.files import atomic_write

# Files of a profile's folder: the trace, which contains the optimised HLO of every program that ran; versions, device
# and meta as JSON; and the HLO of the given programs as text.
TRACE_FILE = "trace.xplane.pb.gz"
RECORD_FILE = "profile.json"
HLO_FOLDER = "hlo"
_FORMAT = 1
_SCRATCH = ".trace-"  # how the folder's name begins in which the profiler writes; a killed process leaves it there


@contextlib.contextmanager
def capture(
    folder: str | Path, meta: Mapping[str, Any] | None = None, programs: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Traces a `with` block into a folder for `show`: `with capture("profiles/a"): run_three_steps()`.

    Devices are waited for before and after the block. An earlier capture in the folder is replaced at the end, and
    stays if the block raises. ValueError: the folder has other files, meta is no JSON, or another trace is running.

    Args:
      folder: new, empty, or with an earlier capture.
      meta: JSON values; "tokens_per_step" gives tokens per second and scales comparisons, "what" heads the tables.
      programs: {name: jax.stages.Compiled}, whose HLO text is written to hlo/NAME.txt.gz.
    """
    import jax

    folder = Path(folder)
    _check_folder(folder)
    try:
        json.dumps(meta or {})
    except TypeError as error:
        raise ValueError(f"meta must hold what JSON can hold: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        _settle()
        try:
            jax.profiler.start_trace(scratch, profiler_options=options)
        except RuntimeError as error:
            raise ValueError(f"cannot capture: {error}") from error
        start_time = time.perf_counter()
        try:
            yield
            _settle()
        finally:
            seconds = time.perf_counter() - start_time
            jax.profiler.stop_trace()
        xplane_files = sorted(Path(scratch).rglob("*.xplane.pb"))
        if not xplane_files:
            raise ValueError("the profiler wrote no XPlane file")
        _remove_capture(folder)
        with xplane_files[-1].open("rb") as source, gzip.open(folder / TRACE_FILE, "wb", compresslevel=6) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    record = {"format": _FORMAT, "seconds": seconds, "meta": dict(meta or {}), **_environment()}
    if programs:
        record["memory"] = {name: _write_program(folder, name, program) for name, program in programs.items()}
    atomic_write(folder / RECORD_FILE, json.dumps(record, indent=2))


def _check_folder(folder: Path) -> None:
    """ValueError if the folder is a file, or has files of names that `capture` does not give."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder for the profile")
    foreign = (
        [
            path.name
            for path in folder.iterdir()
            if path.name not in (TRACE_FILE, RECORD_FILE, HLO_FOLDER) and not path.name.startswith(_SCRATCH)
        ]
        if folder.exists()
        else []
    )
    if foreign:
        raise ValueError(f"{folder} holds other files ({', '.join(sorted(foreign)[:3])}): give a new folder")


def _remove_capture(folder: Path) -> None:
    shutil.rmtree(folder / HLO_FOLDER, ignore_errors=True)
    (folder / RECORD_FILE).unlink(missing_ok=True)
    (folder / TRACE_FILE).unlink(missing_ok=True)


def _settle() -> None:
    """Waits for side effects and every live array, so that a trace has its block's work only."""
    import jax

    jax.effects_barrier()
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def _environment() -> dict[str, Any]:
    """What profile.json records about this process; "peak_memory_bytes" is since the process began."""
    import platform
    from importlib import metadata

    import jax

    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "jaxtune", "flax", "optax"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    devices = jax.local_devices()
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    return {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "backend": jax.default_backend(),
        "peak_memory_bytes": max(peaks),
        "versions": versions,
    }


def _write_program(folder: Path, name: str, program: Any) -> dict[str, int]:
    """Writes a program's HLO text, for people, and returns the compiler's memory analysis."""
    (folder / HLO_FOLDER).mkdir(exist_ok=True)
    with gzip.open(folder / HLO_FOLDER / f"{name}.txt.gz", "wt", encoding="utf-8", compresslevel=6) as sink:
        sink.write(program.as_text())
    analysis = program.memory_analysis()
    keys = (
        "argument_size_in_bytes",
        "output_size_in_bytes",
        "temp_size_in_bytes",
        "alias_size_in_bytes",
        "host_temp_size_in_bytes",
    )
    return {key.replace("_size_in_", "_"): int(getattr(analysis, key, 0) or 0) for key in keys}
