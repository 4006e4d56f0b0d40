"""How fast a file of several GB is written until the disk has it, in several ways, of which models/files/byte_files.py
takes one.

    python benchmarks/train/writes.py --output FILE.json [--folder FOLDER] [--gigabytes 6] [--seconds 200] [--rounds 2]
        [--only WAY ...]

Chunks of 16 MiB are written by threads, beginning at the start of the file. For each of WAYS and each round the record
has the seconds until the last write returned (`written`), until the disk had all (`flushed`), GB/s of the latter, and
GB/s at which eight threads then read the file (`read`). It is written after each; once --seconds are over, no further
one begins. A machine may give memory to the page cache slowly at first: the first round shows that.
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import write
from jaxtune.models.files.byte_files import start_flush

_CHUNK_BYTES = 16 << 20
_FLUSHED_CHUNKS = 16


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to write a file."""

    threads: int = 8
    files: int = 1  # chunks are dealt out to them in turn
    reserved: bool = False  # posix_fallocate first
    direct: bool = False  # O_DIRECT: past the page cache
    # what happens after a chunk's write: "" nothing; "flusher": a thread of its own calls fdatasync for each 256 MiB;
    # "start": the writing thread has the kernel begin to write the chunk to the disk; "each": it calls fdatasync
    then: str = "flusher"


WAYS = {
    "flusher": Way(),
    "start": Way(then="start"),
    "each": Way(then="each"),
    "at the end": Way(then=""),
    "flusher, reserved": Way(reserved=True),
    "start, reserved": Way(then="start", reserved=True),
    "direct": Way(direct=True, then=""),
    "direct, reserved": Way(direct=True, then="", reserved=True),
    "start, 4 files": Way(files=4, then="start"),
    "direct, 4 files": Way(files=4, then="", direct=True),
}


def data_of(size: int) -> mmap.mmap:
    """Random bytes at a page's start, as O_DIRECT wants them."""
    data = mmap.mmap(-1, size)
    data.write(os.urandom(1 << 20) * (size >> 20))
    return data


def measured(way: Way, folder: Path, gigabytes: float) -> dict[str, float]:
    """Writes files in a way and removes them again."""
    data, count = data_of(_CHUNK_BYTES), int(gigabytes * 1e9) // _CHUNK_BYTES
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if way.direct else 0)
    paths = [folder / str(index) for index in range(way.files)]
    begun = time.perf_counter()
    opened = [os.open(path, flags, 0o666) for path in paths]
    flusher = ThreadPoolExecutor(1)
    flushes = []

    def one(index: int) -> None:
        descriptor, at = opened[index % way.files], index // way.files * _CHUNK_BYTES
        done = os.pwrite(descriptor, data, at)
        if done != _CHUNK_BYTES:
            raise OSError(f"{done} of {_CHUNK_BYTES} bytes were written")
        if way.then == "start":
            start_flush(descriptor, at, _CHUNK_BYTES)
        if way.then == "each":
            os.fdatasync(descriptor)
        if way.then == "flusher" and index % _FLUSHED_CHUNKS == _FLUSHED_CHUNKS - 1:
            flushes.append(flusher.submit(os.fdatasync, descriptor))

    for descriptor in opened if way.reserved else ():
        os.posix_fallocate(descriptor, 0, -(-count // way.files) * _CHUNK_BYTES)
    with ThreadPoolExecutor(way.threads) as pool:
        list(pool.map(one, range(count)))
    written = time.perf_counter() - begun
    flusher.shutdown()
    with ThreadPoolExecutor(way.files) as pool:
        list(pool.map(os.fdatasync, opened))
    flushed = time.perf_counter() - begun
    size = count * _CHUNK_BYTES
    rate = read(paths)
    for path, descriptor in zip(paths, opened, strict=True):
        os.close(descriptor)
        path.unlink()
    return {
        "written": round(written, 2),
        "flushed": round(flushed, 2),
        "gb_per_second": round(size / 1e9 / flushed, 2),
        "read": rate,
    }


def read(paths: list[Path]) -> float:
    """GB/s at which eight threads read files, from the page cache if they are there."""
    places = [(path, at) for path in paths for at in range(0, path.stat().st_size, _CHUNK_BYTES)]

    def one(place: tuple[Path, int]) -> int:
        descriptor = os.open(place[0], os.O_RDONLY)
        try:
            return len(os.pread(descriptor, _CHUNK_BYTES, place[1]))
        finally:
            os.close(descriptor)

    begun = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        size = sum(pool.map(one, places))
    return round(size / 1e9 / (time.perf_counter() - begun), 2)


def file_system(folder: Path) -> str:
    """The line of /proc/mounts of the file system that a folder is on."""
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    above = [line for line in lines if folder.resolve().is_relative_to(line.split()[1])]
    return max(above, key=lambda line: len(line.split()[1]))[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    end = time.time() + options.seconds
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    where = {"kernel": platform.release(), "file_system": file_system(folder), "cores": os.cpu_count()}
    record: dict[str, Any] = {"benchmark": "train/writes", "gigabytes": options.gigabytes, **where, "ways": {}}
    for name in options.only * options.rounds:
        if time.time() > end:
            break
        try:
            found: dict[str, Any] = measured(WAYS[name], folder, options.gigabytes)
        except OSError as error:  # such as a file system without O_DIRECT
            found = {"error": str(error)}
        record["ways"].setdefault(name, []).append(found)
        write(options.output, record)
        print(name, found, flush=True)
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
