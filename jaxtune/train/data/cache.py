"""The token cache: documents as flat, memory-mapped files, built once for each input.

A folder of the cache is named by a hash of all that decides its content: the rows, the tokenizer, the options,
and the source of this code. It is written beside its place and renamed into it, so a folder that exists is
whole; sizes and checksums are verified on opening all the same, and a damaged folder is built anew.

Several users may share a cache. Its folders have the permissions that the umask leaves; one that another user keeps
to himself, or that cannot be replaced, is left alone and built under a name of one's own beside it. What a folder says
of its tokens is counted again in the tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydantic

from jaxtune.system.files import atomic_write, read_plain, unfinished_name, writing
from jaxtune.system.terminal import printable
from jaxtune.train.data.packing import Documents
from jaxtune.train.data.reading import Source
from jaxtune.train.data.workers import Chunk

FIELDS = {"tokens": np.int32, "mask": np.uint8, "lengths": np.int64, "trained": np.int64, "origins": np.int64}
ABANDONED_SECONDS = 24 * 3600
OFFENDERS = 10  # bad rows that are named; the rest are counted
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # what opening a damaged folder raises


@dataclasses.dataclass
class Summary:
    """What became of the rows, before packing.

    rows: read. documents: made. bad_rows: left out as bad; `offenders` names the first, as "file:line: reason".
    untrained: left out because no token of theirs is trained on; `untrained_first` names the first.
    special: rows whose messages hold special tokens or markers; `special_first` names the first, as "file:line: what".
    left_out: rows of which the template does not write all; `left_out_first` names the first, as "file:line: what".
    responses, ended: responses found, and those that train a token which ends the turn. masked: tokens that
    data.mask_spans took out. unread: the first columns that hold something, and are not read. cut: rows that were cut
    before they were tokenised whole. tokens, trained_tokens: sums over the documents. max_token: the largest token id.
    """

    rows: int = 0
    documents: int = 0
    bad_rows: int = 0
    offenders: list[str] = dataclasses.field(default_factory=list)
    untrained: int = 0
    untrained_first: list[str] = dataclasses.field(default_factory=list)
    special: int = 0
    special_first: list[str] = dataclasses.field(default_factory=list)
    left_out: int = 0
    left_out_first: list[str] = dataclasses.field(default_factory=list)
    responses: int = 0
    ended: int = 0
    masked: int = 0
    unread: list[str] = dataclasses.field(default_factory=list)
    cut: int = 0
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
        self.special += len(chunk.special)
        self.special_first += [
            f"{place}: {what}" for place, what in chunk.special[: OFFENDERS - len(self.special_first)]
        ]
        self.left_out += len(chunk.left_out)
        self.left_out_first += [
            f"{place}: {what}" for place, what in chunk.left_out[: OFFENDERS - len(self.left_out_first)]
        ]
        self.responses += chunk.responses
        self.ended += chunk.ended
        self.masked += chunk.masked
        new = [printable(name) for name in chunk.unread if printable(name) not in self.unread]
        self.unread += new[: OFFENDERS - len(self.unread)]
        self.cut += chunk.cut
        self.tokens += len(chunk.tokens)
        self.trained_tokens += int(chunk.trained.sum())
        self.max_token = max(self.max_token, int(chunk.tokens.max(initial=-1)))

    def __str__(self) -> str:
        return "; ".join([f"{self.rows:,} rows, {self.documents:,} documents", *self.warnings()])

    def warnings(self) -> list[str]:
        """What somebody who gave these rows should know, a sentence each."""
        found = []
        if self.bad_rows:
            found.append(f"{self.bad_rows:,} bad rows left out, first {'; '.join(self.offenders[:3])}")
        if self.untrained:
            found.append(f"{self.untrained:,} rows without a trained token left out, first {self.untrained_first[0]}")
        if self.unread:
            more = ", ..." * (len(self.unread) == OFFENDERS)
            found.append(f"columns that are not read: {', '.join(self.unread)}{more}")
        if self.special:
            found.append(
                f"{self.special:,} rows hold special tokens or markers in their own text, first {self.special_first[0]}"
                "; the model reads them as control tokens, and responses were found by the template's turns alone"
            )
        if self.left_out:
            found.append(
                f"{self.left_out:,} rows hold what the chat template does not write, so that it is not trained on, "
                f"first {self.left_out_first[0]}; set data.template to one that writes it"
            )
        if self.ended < self.responses:
            found.append(f"{self.responses - self.ended:,} of {self.responses:,} responses train no end of turn")
        return found


@dataclasses.dataclass(frozen=True)
class _Meta:
    """meta.json: bytes and CRC-32 of each field's file, the files that rows came from, and the summary."""

    bytes: dict[str, int]
    crc32: dict[str, int]
    files: list[str]
    summary: Summary


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
                with writing(self.streams[name].name, len(data)):
                    self.streams[name].write(data)
                self.checksums[name] = zlib.crc32(data, self.checksums[name])
            else:
                self.parts[name].append(array)
        self.summary.add(chunk)

    def finish(self) -> None:
        """Writes what says how to read the files; with it the folder is whole."""
        assert self.folder is not None
        sizes = {name: stream.tell() for name, stream in self.streams.items()}
        for name, stream in self.streams.items():
            with writing(stream.name, sizes[name]):
                stream.close()  # here the last bytes are written, or a full disk shows
        meta = _Meta(sizes, self.checksums, list(self.files), self.summary)
        atomic_write(self.folder / "meta.json", json.dumps(dataclasses.asdict(meta)), durable=False)

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
    for place in (_own_name(folder), folder):
        if os.path.isdir(place):
            try:
                return (*_open(place), True)
            except PermissionError:
                say(f"token cache {place} is another user's and cannot be read; it is built beside it")
            except DAMAGE as error:
                say(f"token cache {place} is damaged ({error}); it is built anew")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        temporary = unfinished_name(folder)
        temporary.mkdir()
    except OSError as error:
        raise ValueError(f"data.cache_dir={folder.parent} cannot be written ({error}); set another") from None
    try:
        documents, summary = _write(temporary, build)
        if not summary.documents:  # nothing to map, and the caller will refuse it
            return documents, summary, False
        with _disk_errors(folder.parent):
            place = _commit(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return (*_open(place), False)


def _own_name(folder: Path) -> Path:
    """Where this user's folder stands while another user's has the name."""
    return folder.with_name(f"{folder.name}-{os.getuid()}")


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


def _commit(temporary: Path, folder: Path) -> Path:
    """Renames a finished folder into its place, and returns where it is. Another run may have been first, and then
    its folder stays; where another user's stands in the way, it gets a name of our own."""
    for place in (folder, _own_name(folder)):
        if os.path.isdir(place):
            try:
                _open(place)
                return place
            except PermissionError:
                continue
            except DAMAGE:
                shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(temporary, place)
            return place
    raise OSError(f"{folder} and {_own_name(folder).name} stand in the way and cannot be replaced")


def _open(folder: Path) -> tuple[Documents, Summary]:
    """Raises `PermissionError`, or one of `DAMAGE`."""
    meta = _read_meta(folder / "meta.json")
    fields = {}
    for name, dtype in FIELDS.items():
        path = folder / f"{name}.bin"
        size = path.stat().st_size
        if size != meta.bytes[name]:
            raise ValueError(f"{path.name} has {size} bytes, not {meta.bytes[name]}")
        fields[name] = np.memmap(path, dtype, mode="r")
        if _checksum(path) != meta.crc32[name]:
            raise ValueError(f"the checksum of {path.name} is wrong")
    documents = _documents(fields, meta.files)
    _require_sound(documents, meta.summary)
    return documents, meta.summary


def _read_meta(file: Path) -> _Meta:
    try:
        return pydantic.TypeAdapter(_Meta).validate_json(read_plain(file), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{file.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _require_sound(documents: Documents, summary: Summary) -> None:
    """Whoever wrote a folder also wrote its checksums: what must be so is looked for in the arrays themselves."""
    lengths, trained = documents.lengths, documents.trained
    if lengths.min() < 0 or lengths.sum() != len(documents.tokens) or len(documents.mask) != len(documents.tokens):
        raise ValueError("its documents do not add up to its tokens")
    if len(trained) != len(lengths) or documents.origins is None or len(documents.origins) != len(lengths):
        raise ValueError("its fields are of different lengths")
    there = lengths > 0  # a pair may lack one of its answers
    starts = documents.starts[there]
    counted = np.add.reduceat(documents.mask, starts, dtype=np.int64) - documents.mask[starts]
    right = np.array_equal(counted, trained[there]) and not trained[~there].any()
    if documents.mask.max() > 1 or not right or counted.min() < 1:
        raise ValueError("its counts of trained tokens are wrong")
    if documents.tokens.min() < 0 or int(documents.tokens.max()) != summary.max_token:
        raise ValueError("its largest token id is wrong")
    if documents.origins[:, 0].min() < 0 or documents.origins[:, 0].max() >= len(documents.files):
        raise ValueError("its documents come from files that it does not name")
    sums = (len(lengths), len(documents.tokens), int(trained.sum()))
    if (
        sums != (summary.documents, summary.tokens, summary.trained_tokens)
        or not 0 <= summary.ended <= summary.responses
    ):
        raise ValueError("its summary is not that of its documents")
    for count, first in (
        (summary.bad_rows, summary.offenders),
        (summary.untrained, summary.untrained_first),
        (summary.special, summary.special_first),
        (summary.left_out, summary.left_out_first),
    ):
        if len(first) != min(count, OFFENDERS):
            raise ValueError("its summary names other rows than it counts")


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as stream:
        while block := stream.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _remove_abandoned(parent: Path) -> None:
    """Temporary folders of runs that were killed: those nobody has touched for a day."""
    for folder in parent.glob(".*.tmp"):
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
    names = ("reading", "row_files", "formats", "templates", "markers", "tokenizing", "spans", "workers", "cache")
    return hashlib.blake2b(b"".join((here / f"{name}.py").read_bytes() for name in names), digest_size=16).hexdigest()
