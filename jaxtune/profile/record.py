"""Captures a profile: `capture` records what the devices do inside a `with` block into a folder, which `show`
(report.py) reads."""

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
    """Traces a `with` block: `with capture("profiles/a"): run_three_steps()`. It writes the trace and a record,
    profile.json, with meta, versions, the device and its peak memory. `show` then reads the folder. A training run with
    `profile.steps` uses it for those steps; other programs may use it too.

    The devices are waited for before and after the block, so that the trace contains the block's work only. Python
    frames are not traced, because tracing them would slow the block. An earlier capture in the folder is replaced when
    the new one is written; it stays if no trace can start, or the block raises an error.

    Args:
      folder: where to write; created if missing.
      meta: any JSON values, stored in the record, or None. Of these, "tokens_per_step" (a number) gives tokens per
        second, and `compare` scales times by it; "what" (a text) is shown above the tables.
      programs: {name: compiled program (jax.stages.Compiled)}, or None. The HLO text of each is written to
        hlo/NAME.txt.gz, its memory analysis into the record.

    Raises:
      ValueError: the folder is a file or has other files, meta is not JSON, no trace can start because another is
        running, or the profiler wrote no file.
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
        began = time.perf_counter()
        try:
            yield
            _settle()
        finally:
            seconds = time.perf_counter() - began
            jax.profiler.stop_trace()
        found = sorted(Path(scratch).rglob("*.xplane.pb"))
        if not found:
            raise ValueError("the profiler wrote no XPlane file")
        _remove_capture(folder)
        with found[-1].open("rb") as source, gzip.open(folder / TRACE_FILE, "wb", compresslevel=6) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    record = {"format": _FORMAT, "seconds": seconds, "meta": dict(meta or {}), **_environment()}
    if programs:
        record["memory"] = {name: _write_program(folder, name, program) for name, program in programs.items()}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2), encoding="utf-8")


def _check_folder(folder: Path) -> None:
    """Checks that a capture can be written into the folder, which need not exist and may have an earlier one.

    Raises:
      ValueError: it is a file, or has files or folders with names that `capture` does not give, which are not to be
        deleted. Only names are compared: `capture` deletes any trace.xplane.pb.gz, profile.json and folder "hlo".
    """
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
    """Removes an earlier capture from the folder, if it has one, when the new trace has been recorded, so that none of
    its files stays beside those of the new one."""
    shutil.rmtree(folder / HLO_FOLDER, ignore_errors=True)
    (folder / RECORD_FILE).unlink(missing_ok=True)
    (folder / TRACE_FILE).unlink(missing_ok=True)


def _settle() -> None:
    """Waits for the devices' work that this process has dispatched, so that a trace has the work of its block and no
    other; `capture` calls it before the trace starts and at the block's end. It waits for JAX's side effects and until
    every live array is computed; work whose results were all deleted is not waited for."""
    import jax

    jax.effects_barrier()
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def _environment() -> dict[str, Any]:
    """What profile.json records about this process, as JSON values: "device" (the kind of its first local device),
    "num_devices" (local ones), "backend", "peak_memory_bytes" (since the process began; the largest of the local
    devices'; 0 where unknown) and "versions" of Python, JAX, jaxtune and related packages. Reports do not read
    "num_devices" and "backend"."""
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
    """Writes the HLO text of a compiled program (jax.stages.Compiled) to hlo/NAME.txt.gz in the folder, where NAME is
    `name`, the program's name in `capture`. Returns the compiler's memory analysis for the record, {"argument_bytes",
    "output_bytes", "temp_bytes", "alias_bytes", "host_temp_bytes": bytes}, 0 where it is unknown. The text is for
    people: jaxtune does not read it, because the trace contains the HLO. The analysis gets into the report's `meta` and
    from there only into its JSON."""
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
