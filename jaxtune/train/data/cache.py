"""The token cache: documents as flat, memory-mapped files, built once for each input.

A folder of the cache is named by a hash of all that decides its content: the rows, the tokenizer, the options,
and the source of this code. It is written beside its place and renamed into it, so a folder that exists is
whole; sizes and checksums are verified on opening all the same, and a damaged folder is built anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtune.train.data.packing import Documents
from jaxtune.train.data.reading import Source
from jaxtune.train.data.workers import Chunk

FIELDS = {"tokens": np.int32, "mask": np.uint8, "lengths": np.int64, "trained": np.int64, "origins": np.int64}
ABANDONED_SECONDS = 24 * 3600
OFFENDERS = 10  # bad rows that are named; the rest are counted


@dataclasses.dataclass
class Summary:
    """What became of the rows, before packing.

    rows: read. documents: made. bad_rows: left out as bad; `offenders` names the first, as "file:line: reason".
    untrained: left out because no token of theirs is trained on; `untrained_first` names the first.
    responses, ended: responses found, and those that train a token which ends the turn. tokens, trained_tokens:
    sums over the documents. max_token: the largest token id.
    """

    rows: int = 0
    documents: int = 0
    bad_rows: int = 0
    offenders: list[str] = dataclasses.field(default_factory=list)
    untrained: int = 0
    untrained_first: list[str] = dataclasses.field(default_factory=list)
    responses: int = 0
    ended: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    max_token: int = -1

    def add(self, chunk: Chunk) -> None:
        self.rows += chunk.rows
        self.documents += len(chunk.lengths)
        self.bad_rows += len(chunk.problems)
        self.offenders += [f"{place}: {why}" for place, why in chunk.problems[: OFFENDERS - len(self.offenders)]]
        self.untrained += len(chunk.untrained)
        self.untrained_first += chunk.untrained[: OFFENDERS - len(self.untrained_first)]
        self.responses += chunk.responses
        self.ended += chunk.ended
        self.tokens += len(chunk.tokens)
        self.trained_tokens += int(chunk.trained.sum())
        self.max_token = max(self.max_token, int(chunk.tokens.max(initial=-1)))

    def __str__(self) -> str:
        text = f"{self.rows:,} rows, {self.documents:,} documents"
        if self.bad_rows:
            text += f"; {self.bad_rows:,} bad rows left out, first {self.offenders[0]}"
        if self.untrained:
            text += f"; {self.untrained:,} rows without a trained token left out, first {self.untrained_first[0]}"
        if self.ended < self.responses:
            text += f"; {self.responses - self.ended:,} of {self.responses:,} responses train no end of turn"
        return text


class _Store:
    """Takes chunks in order; the fields grow in files of `folder`, or in memory without one."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.parts: dict[str, list[np.ndarray]] = {name: [] for name in FIELDS}
        self.streams: dict[str, BinaryIO] = {}
        if folder is not None:
            for name in FIELDS:
                self.streams[name] = open(folder / f"{name}.bin", "wb")  # noqa: SIM115 (closed in `close`)
        self.checksums = dict.fromkeys(FIELDS, 0)
        self.files: dict[str, int] = {}
        self.summary = Summary()

    def add(self, chunk: Chunk) -> None:
        origins = [(self.files.setdefault(file, len(self.files)), number) for file, number in chunk.origins]
        arrays = {name: getattr(chunk, name) for name in FIELDS if name != "origins"}
        arrays["origins"] = np.array(origins, np.int64).reshape(-1, 2)
        for name, array in arrays.items():
            array = np.ascontiguousarray(array, FIELDS[name])
            if self.streams:
                data = array.tobytes()
                self.streams[name].write(data)
                self.checksums[name] = zlib.crc32(data, self.checksums[name])
            else:
                self.parts[name].append(array)
        self.summary.add(chunk)

    def finish(self) -> None:
        """Writes what says how to read the files; with it the folder is whole."""
        assert self.folder is not None
        sizes = {name: stream.tell() for name, stream in self.streams.items()}
        for stream in self.streams.values():
            stream.close()  # here the last bytes are written, or a full disk shows
        meta = {
            "bytes": sizes,
            "crc32": self.checksums,
            "files": list(self.files),
            "summary": dataclasses.asdict(self.summary),
        }
        (self.folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    def close(self) -> None:
        """Gives the files back, whatever their state; `finish` closes them for good."""
        for stream in self.streams.values():
            with contextlib.suppress(OSError):
                stream.close()

    def documents(self) -> Documents:
        return _documents({name: np.concatenate(parts) for name, parts in self.parts.items()}, list(self.files))


def _documents(fields: dict[str, np.ndarray], files: list[str]) -> Documents:
    lengths = np.array(fields["lengths"])
    return Documents(
        tokens=fields["tokens"],
        mask=fields["mask"],
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        trained=np.array(fields["trained"]),
        origins=np.array(fields["origins"]).reshape(-1, 2),
        files=tuple(files),
    )


def collect(chunks: Iterable[Chunk]) -> tuple[Documents, Summary]:
    """Documents in memory, for rows that have no identity to cache them by."""
    store = _Store(None)
    for chunk in chunks:
        store.add(chunk)
    if not store.parts["tokens"]:
        return Documents.gather([]), store.summary
    return store.documents(), store.summary


def open_or_build(
    folder: Path, build: Callable[[], Iterable[Chunk]], say: Callable[[str], None] = print
) -> tuple[Documents, Summary, bool]:
    """The documents of a cache folder, built first where it does not stand or is damaged.

    Returns:
        Memory-mapped documents, the summary of their rows, and whether the folder was there.

    Raises:
        ValueError: the cache folder cannot be written; whatever `build` raises. No half-written folder stays.
    """
    if folder.is_dir():
        try:
            return (*_open(folder), True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"token cache {folder} is damaged ({error}); it is built anew")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ValueError(f"data.cache_dir={folder.parent} cannot be written ({error}); set another") from None
    try:
        documents, summary = _write(temporary, build)
        if not summary.documents:  # nothing to map, and the caller will refuse it
            return documents, summary, False
        _commit(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return (*_open(folder), False)


def _write(folder: Path, build: Callable[[], Iterable[Chunk]]) -> tuple[Documents, Summary]:
    store = _Store(folder)
    try:
        for chunk in build():
            with _disk_errors(folder.parent):
                store.add(chunk)
        with _disk_errors(folder.parent):
            store.finish()
    finally:
        store.close()
    return Documents.gather([]), store.summary


@contextlib.contextmanager
def _disk_errors(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the token cache cannot be written ({error}); free space at data.cache_dir={parent}"
        ) from None


def _commit(temporary: Path, folder: Path) -> None:
    """Renames a finished folder into its place; another run may have been first, and then its folder stays."""
    if folder.is_dir():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            _open(folder)
            return
        shutil.rmtree(folder)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _open(folder: Path) -> tuple[Documents, Summary]:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    fields = {}
    for name, dtype in FIELDS.items():
        path = folder / f"{name}.bin"
        size = path.stat().st_size
        if size != meta["bytes"][name]:
            raise ValueError(f"{path.name} has {size} bytes, not {meta['bytes'][name]}")
        fields[name] = np.memmap(path, dtype, mode="r")
        if _checksum(path) != meta["crc32"][name]:
            raise ValueError(f"the checksum of {path.name} is wrong")
    return _documents(fields, meta["files"]), Summary(**meta["summary"])


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as stream:
        while block := stream.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _remove_abandoned(parent: Path) -> None:
    """Temporary folders of runs that were killed: those nobody has touched for a day."""
    for folder in parent.glob(".*-*"):
        with contextlib.suppress(OSError):
            if folder.is_dir() and time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


# --- keys


def default_folder() -> Path:
    """JAXTUNE_CACHE, or ~/.cache/jaxtune/tokens."""
    set_folder = os.environ.get("JAXTUNE_CACHE")
    return Path(set_folder).expanduser() if set_folder else Path.home() / ".cache" / "jaxtune" / "tokens"


def cache_key(sources: list[Source], tokenizer: Any, options: dict[str, Any]) -> str | None:
    """A name for what these rows become, 32 hex digits; None where a source has no identity."""
    if any(source.identity is None for source in sources):
        return None
    parts = [source.identity() for source in sources if source.identity is not None]
    parts += [tokenizer_fingerprint(tokenizer), json.dumps(options, sort_keys=True, default=str), _code_fingerprint()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of all of a tokenizer that decides tokens: its model, special tokens and chat template."""
    backend = tokenizer.backend_tokenizer.to_str()
    parts = [type(tokenizer).__name__, backend, repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _code_fingerprint() -> str:
    """A hash of the source of this folder's files that turn rows into tokens: no version to forget."""
    here = Path(__file__).parent
    names = ("reading.py", "formats.py", "templates.py", "markers.py", "workers.py", "cache.py")
    return hashlib.blake2b(b"".join((here / name).read_bytes() for name in names), digest_size=16).hexdigest()
