"""Files that are checked when they are read. A sealed one ends with a checksum of its name and content; a folder has a
manifest of its files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Buffer, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from jaxtune.system.files import atomic_write, read_plain

_FORMAT = 1  # of manifests
_SEAL_BYTES = 16
_BLOCK_BYTES = 1 << 24
_BROKEN = "its checksum is not that of its name and content"


class Entry(TypedDict):
    """What tells that a file is as it was written."""

    bytes: int
    crc32: str
    """Eight hexadecimal digits."""


def checksum(pieces: Iterable[Buffer]) -> bytes:
    """XXH3-128 of the joined pieces. It finds accidental changes only, at the speed of memory."""
    import xxhash

    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def crc32(pieces: Iterable[Buffer], start: int = 0) -> int:
    """CRC-32 of the joined pieces. start: that of what comes before them. It finds accidental changes only, at 4 GB/s a
    core where SHA-256 runs at 1.7.
    """
    for piece in pieces:
        start = zlib.crc32(piece, start)
    return start


def sealed(name: str, content: bytes) -> bytes:
    """The bytes of a sealed file: the content, and a checksum of it and the file's name."""
    return content + checksum([name.encode(), content])


def unsealed(name: str, data: bytes) -> bytes:
    """The content of a sealed file's bytes. Raises ValueError if they are damaged or another file's."""
    content = data[:-_SEAL_BYTES]
    if data[-_SEAL_BYTES:] != checksum([name.encode(), content]):
        raise ValueError(_BROKEN)
    return content


def seal(file: BinaryIO, name: str) -> None:
    """Seals an open file, whose name will be `name`. Raises OSError."""
    size = file.seek(0, os.SEEK_END)
    file.write(checksum(_blocks(file, name, size)))


def require_sealed(path: Path) -> None:
    """Raises ValueError if a sealed file is damaged or another's, and OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END) - _SEAL_BYTES
        if checksum(_blocks(file, path.name, size)) != file.read():
            raise ValueError(_BROKEN)


def seal_of(path: Path) -> str | None:
    """A sealed file's checksum in hexadecimal digits, unverified; None if it is unreadable."""
    try:
        with open(path, "rb") as file:
            file.seek(-_SEAL_BYTES, os.SEEK_END)
            return file.read().hex()
    except OSError:
        return None


def _blocks(file: BinaryIO, name: str, size: int) -> Iterator[bytes]:
    """The name and the first `size` bytes of an open file."""
    yield name.encode()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        yield block
        size -= len(block)


def write_manifest(folder: Path, name: str, record: Mapping[str, Any], durable: bool = True) -> None:
    """Writes a JSON file into a folder with a record, a format and size and CRC-32 of every file. Raises OSError.
    durable: of `atomic_write`.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): entry for path, entry in fingerprints(paths).items()}
    atomic_write(
        folder / name, json.dumps({"format": _FORMAT, **record, "files": files}, indent=1) + "\n", durable=durable
    )


def read_manifest(folder: Path, name: str) -> dict[str, Any]:
    """The record of `write_manifest`, with its "files". Raises ValueError unless every one of them is as it was
    written, or OSError; other files are ignored.
    """
    try:
        record = json.loads(read_plain(folder / name))
        if record["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, found {record['format']}")
        files = {
            key: Entry(bytes=int(entry["bytes"]), crc32=str(entry["crc32"])) for key, entry in record["files"].items()
        }
        if strange := [key for key in files if Path(key).is_absolute() or ".." in Path(key).parts or "\0" in key]:
            raise ValueError(f"it lists {strange[0]!r}, which is not a file of the folder")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{name}: unreadable ({type(error).__name__}: {error})") from None
    if problem := _damage(folder, files):
        raise ValueError(problem)
    return {**record, "files": files}


def _damage(folder: Path, files: Mapping[str, Entry]) -> str | None:
    for name, entry in files.items():  # sizes first, because that is cheap
        if not (folder / name).is_file():
            return f"{name}: the file is missing, expected {entry['bytes']:,} bytes"
        if (size := (folder / name).stat().st_size) != entry["bytes"]:
            return f"{name}: expected {entry['bytes']:,} bytes, found {size:,}"
    actual = fingerprints(folder / name for name in files)
    for name, entry in files.items():
        if (digits := actual[folder / name]["crc32"]) != entry["crc32"]:
            return f"{name}: expected CRC-32 {entry['crc32']}, found {digits}"
    return None


def fingerprints(paths: Iterable[Path]) -> dict[Path, Entry]:
    """{path: Entry}, in order, read by eight threads. Raises OSError."""
    paths = list(paths)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(paths, pool.map(_fingerprint, paths), strict=True))


def _fingerprint(path: Path) -> Entry:
    buffer = memoryview(bytearray(2**22))
    with open(path, "rb", buffering=0) as file:
        digest = crc32(buffer[:count] for count in iter(lambda: file.readinto(buffer), 0))
        return Entry(bytes=file.tell(), crc32=f"{digest:08x}")
