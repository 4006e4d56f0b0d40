"""The token cache: tokenised documents as flat, memory-mapped files, written once for each input, so that later runs
need not tokenise it. `dataset.prepare` uses it. `open_or_build` opens the folder of a set of rows, or builds it first.
`cache_folder` is the folder of all caches, and `cache_key` the name of the set's folder in it, made with a hash of the
tokenizer (`tokenizer_fingerprint`). `collect` keeps the tokens of rows that have no key, such as a list of dicts, in
memory. A `Summary` counts the rows.

A folder of the cache is named by a hash of everything that decides its content: the rows, the tokenizer, the options
and the source of this code. It is written under a temporary name and then renamed, so a folder under its final name is
complete. Sizes and checksums are verified whenever it is opened, and a damaged folder is built again.

Several users may share a cache. Folders get the permissions that the umask allows. Where another user's folder cannot
be read or replaced, it is left as it is, and this user's is built beside it under a name with the user's id. The counts
that a folder records are checked against its tokens, because its checksums come from the same writer.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pydantic

from jaxtune.system.files import atomic_write, read_plain, temporary_path, writing
from jaxtune.system.terminal import printable
from jaxtune.train.data.documents import Documents
from jaxtune.train.data.reading import Source
from jaxtune.train.data.workers import Chunk

# The files NAME.bin of a folder and their dtypes; `Documents` documents the fields.
FIELDS = {"tokens": np.int32, "mask": np.uint8, "lengths": np.int64, "trained": np.int64, "origins": np.int64}
UNUSED_SECONDS = 7 * 24 * 3600  # what a run used since then is never removed to make room
_ENTRY = re.compile(r"[0-9a-f]{32}(-\d+)?|(reference|teacher)_[0-9a-f]+\.npy")
ABANDONED_SECONDS = 24 * 3600  # temporary folders older than this are deleted
_HOME = Path(__file__).parents[3]  # which has the package
_ROOTS = ("jaxtune.train.data.reading", "jaxtune.train.data.workers")
_ROOMS = ("jaxtune.train.data.", "jaxtune.conversations.")  # whose modules decide tokens
_RENDERERS = ("transformers", "tokenizers", "jinja2")  # packages that render and split
OFFENDERS = 10  # the most entries of each list of a Summary, such as the bad rows; further rows are only counted
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # the errors of opening a damaged folder


@dataclasses.dataclass
class Summary:
    """Counts of rows and tokens from reading and tokenising, before packing, by which `dataset.prepare` and a run
    refuse rows or warn about them. They are collected while the rows are tokenised, and stored with their tokens if
    these are cached. Each list has only the first 10 (`OFFENDERS`) of its entries."""

    rows: int = 0
    """Rows read, with those that are left out."""
    documents: int = 0
    """Documents made: one for each usable row, two for a row of a preference or labelled format (one may be empty)."""
    bad_rows: int = 0
    """Rows left out because they cannot be used."""
    offenders: list[str] = dataclasses.field(default_factory=list)
    """The first bad rows, each as "file:line: reason"."""
    untrained: int = 0
    """Rows left out because no token after their first is trained on; of a preference pair, in one of its documents."""
    untrained_first: list[str] = dataclasses.field(default_factory=list)
    """The first rows without a trained token, each as "file:line"."""
    excluded: int = 0
    """Rows left out by a mark beside their conversation, such as weight = 0."""
    excluded_first: list[str] = dataclasses.field(default_factory=list)
    """The first such rows, each as "file:line: weight = 0"."""
    implied: int = 0
    """Pairs without a prompt, whose question is what both answers begin with."""
    special: int = 0
    """Rows whose messages or tools contain, as text that somebody wrote, special tokens or marker strings that only a
    template should write."""
    special_first: list[str] = dataclasses.field(default_factory=list)
    """The first such rows, each as "file:line: the token or marker"."""
    left_out: int = 0
    """Rows of which the chat template does not write everything (such as a thought or the tools), so that it is not
    trained on."""
    left_out_first: list[str] = dataclasses.field(default_factory=list)
    """The first such rows, each as "file:line: what is not written"."""
    responses: int = 0
    """Responses that are trained on, in all documents; with data.train_on=all each document counts as one."""
    ended: int = 0
    """Responses whose trained tokens include one that ends the turn, or that were cut before it."""
    masked: int = 0
    """Tokens of responses that are not trained on because of data.mask_spans."""
    unread: list[str] = dataclasses.field(default_factory=list)
    """The names of columns that have values and that the row format does not read, at most 10 of them."""
    cut: int = 0
    """Documents of which only the beginning was tokenised, because they are long; the rest is beyond data.length."""
    tokens: int = 0
    """Tokens in all documents."""
    trained_tokens: int = 0
    """Trained target tokens in all documents."""
    max_token: int = -1
    """The largest token id; -1 if there is no token."""

    def add(self, chunk: Chunk) -> None:
        """Adds `chunk`, some rows that a worker tokenised, to this summary, in place: its counts are added, and
        `max_token` becomes the larger one. The lists that name rows, such as `offenders`, and `unread`, the list of
        names of columns, get new entries only until they have `OFFENDERS` (10). `_Store.add` calls it."""
        self.rows += chunk.rows
        self.documents += len(chunk.lengths)
        self.bad_rows += len(chunk.problems)
        self.offenders += [f"{place}: {why}" for place, why in chunk.problems[: OFFENDERS - len(self.offenders)]]
        self.untrained += len(chunk.untrained)
        self.untrained_first += chunk.untrained[: OFFENDERS - len(self.untrained_first)]
        self.excluded += len(chunk.excluded)
        self.excluded_first += chunk.excluded[: OFFENDERS - len(self.excluded_first)]
        self.implied += chunk.implied
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
        """The numbers of rows and documents, and the warnings, in one line."""
        return "; ".join([f"{self.rows:,} rows, {self.documents:,} documents", *self.warnings()])

    def warnings(self) -> list[str]:
        """Warnings about these rows to show before training, one sentence each: bad rows, rows without a trained token,
        columns that are not read, special tokens in messages, what the template leaves out, and responses that train no
        end of turn; [] without any. `TokenDataset.warnings` shows them with those of packing."""
        found = []
        if self.bad_rows:
            found.append(f"{self.bad_rows:,} bad rows left out, first {'; '.join(self.offenders[:3])}")
        if self.untrained:
            found.append(f"{self.untrained:,} rows without a trained token left out, first {self.untrained_first[0]}")
        if self.excluded:
            found.append(f"{self.excluded:,} rows left out by their marks, first {self.excluded_first[0]}")
        if self.implied:
            found.append(f"{self.implied:,} pairs have no prompt: their question is what both answers begin with")
        if self.unread:
            more = ", ..." * (len(self.unread) == OFFENDERS)
            found.append(f"columns that are not read: {', '.join(self.unread)}{more}")
        if self.special:
            found.append(
                f"{self.special:,} rows hold special tokens or markers in their own text, first {self.special_first[0]}"
                "; the model reads them as control tokens, and their responses were found by the template's turns"
            )
        if self.left_out:
            found.append(
                f"{self.left_out:,} rows have a part that the chat template does not write, so that it is not trained "
                f"on, first {self.left_out_first[0]}; set data.template to one that writes it"
            )
        if self.ended < self.responses:
            found.append(f"{self.responses - self.ended:,} of {self.responses:,} responses train no end of turn")
        return found


@dataclasses.dataclass(frozen=True)
class _Meta:
    """The content of the meta.json of a cache folder, which is written last, and by which `_open` verifies the folder's
    files and restores what they do not contain."""

    bytes: dict[str, int]
    """{name of an array, a key of `FIELDS`: the size of its file in bytes}."""
    crc32: dict[str, int]
    """{name of an array: the CRC-32 of its file}."""
    files: list[str]
    """The names of the files that rows came from; the array `origins` has indices into this list."""
    summary: Summary
    """The counts of the rows."""


class CachedDocuments(NamedTuple):
    """What `open_or_build` returns to `dataset.prepare`: (documents, summary, was_cached)."""

    documents: Documents
    """The documents, whose tokens and mask are memory-mapped; an empty set if no row was usable."""
    summary: Summary
    """The counts of their rows."""
    was_cached: bool
    """True if the documents were in the cache already, False if they were tokenised now (`TokenDataset.cached`)."""


class _Store:
    """Collects chunks of tokenised rows, in order: `add` appends a chunk's arrays (tokens, mask, lengths, trained and
    origins, as in `Documents`) and adds its counts to `summary`.

    With a folder, an empty one, each array is appended to a file NAME.bin in it. `finish` closes the files and writes
    meta.json (sizes, checksums, names of the rows' files, summary), without which the folder is not complete; `close`
    closes the files, also after a failure. `_write` uses it so. Without a folder (None) the arrays stay in memory, and
    `documents` returns them as Documents, for `collect`; `finish` must not be called then.

    Attributes:
        summary: the Summary, the counts of all rows so far.
    """

    def __init__(self, folder: Path | None):
        """Opens the file of each array in `folder` for writing; None: the arrays stay in memory."""
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
        """Appends the arrays of a chunk of tokenised rows to those collected so far, in the dtypes of `FIELDS`, and
        adds its counts to the summary. Raises OSError if a file cannot be written, as on a full disk."""
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
        """For a store with a folder: closes the files and writes meta.json, which makes the folder complete. Raises
        OSError if a file cannot be written, as on a full disk."""
        assert self.folder is not None
        sizes = {name: stream.tell() for name, stream in self.streams.items()}
        for name, stream in self.streams.items():
            with writing(stream.name, sizes[name]):
                stream.close()  # writes the last bytes; a full disk raises here
        meta = _Meta(sizes, self.checksums, list(self.files), self.summary)
        atomic_write(self.folder / "meta.json", json.dumps(dataclasses.asdict(meta)), durable=False)

    def close(self) -> None:
        """Closes the files, if any, and ignores errors. `_write` calls it in any case, so that none stays open."""
        for stream in self.streams.values():
            with contextlib.suppress(OSError):
                stream.close()

    def documents(self) -> Documents:
        """The documents of all chunks (there must be at least one), for a store in memory. `collect` returns them."""
        return _documents({name: np.concatenate(parts) for name, parts in self.parts.items()}, list(self.files))


def _documents(fields: dict[str, np.ndarray], files: list[str]) -> Documents:
    """The documents of a cache folder (`_open`), or of rows in memory (`_Store.documents`). fields: the flat arrays
    "tokens", "mask", "lengths", "trained" and "origins" of `Documents`; origins may also be flat, as a file has it:
    pairs of (index into `files`, number of the row). files: the names of the files that rows came from. tokens and mask
    may be memory-mapped and are not copied; the others are copied into memory."""
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
    """(documents, summary) of all chunks: the documents in memory, and the counts of their rows. Without a chunk there
    is no document, and all counts are 0. `prepare` calls it for rows that cannot be cached, such as a list of dicts or
    a window of a stream."""
    store = _Store(None)
    for chunk in chunks:
        store.add(chunk)
    if not store.parts["tokens"]:
        return Documents.gather([]), store.summary
    return store.documents(), store.summary


def open_or_build(
    folder: Path, build: Callable[[], Iterable[Chunk]], say: Callable[[str], None] = print
) -> CachedDocuments:
    """Opens the documents of a cache folder (this user's, `_own_name`, if there is one), after building the folder if
    it does not exist, is damaged, or is another user's and cannot be read. Where no folder can be made, the documents
    stay in memory, and a line says so. If `build` makes no document, no folder is
    made, and the result has no documents. Before it builds, it deletes old temporary folders (`_remove_abandoned`).

    Args:
        folder: the folder of these documents; its name is their `cache_key`.
        build: makes the chunks to store; called only if the folder must be built.
        say: called with a line for the user when another user's folder cannot be read, or a folder is damaged and is
            built anew.

    Raises:
        ValueError: the disk is full. What `build` raises passes through. Nothing partial is left.
    """
    for place in (_own_name(folder), folder):
        if os.path.isdir(place):
            try:
                found = CachedDocuments(*_open(place), True)
                note_use(place / "meta.json")
                return found
            except PermissionError:
                say(f"token cache {place} is another user's and cannot be read; it is built beside it")
            except DAMAGE as error:
                say(f"token cache {place} is damaged ({error}); it is built anew")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        _make_room(folder.parent, say)
        temporary = temporary_path(folder)
        temporary.mkdir()
    except OSError as error:
        say(
            f"warning: data.cache_dir={folder.parent} cannot be written ({error}): the tokens are kept in memory, and "
            "made anew by the next run; set another"
        )
        return CachedDocuments(*collect(build()), False)
    try:
        documents, summary = _write(temporary, build)
        if not summary.documents:  # there is nothing to map, and the caller refuses an empty set
            return CachedDocuments(documents, summary, False)
        with _disk_errors(folder.parent):
            place = _commit(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return CachedDocuments(*_open(place), False)


def _own_name(folder: Path) -> Path:
    """The name of this user's folder, for the case that another user's folder has the name `folder` and cannot be used:
    the same name followed by a hyphen and the user's id."""
    return folder.with_name(f"{folder.name}-{os.getuid()}")


def _write(folder: Path, build: Callable[[], Iterable[Chunk]]) -> tuple[Documents, Summary]:
    """Writes all chunks that `build` makes into `folder`, an existing, empty folder, for `open_or_build`, and completes
    it with a meta.json. Returns (a set without documents, which is used only if no row was usable; the counts). Raises
    ValueError if its files cannot be written; what `build` raises passes through. The folder then stays incomplete."""
    with _disk_errors(folder.parent):
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
    """A context that turns an OSError of writing below the folder `parent` into a ValueError that names
    data.cache_dir, so that a user sees which setting to change."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the token cache cannot be written ({error}); free space at data.cache_dir={parent}"
        ) from None


def _commit(temporary: Path, folder: Path) -> Path:
    """Renames the finished folder `temporary` to its final name `folder`, and returns the path that it has then. If
    another run has meanwhile written the same folder, that one is kept and returned; `temporary` then stays, for the
    caller to delete. A damaged folder of that name is deleted first. If another user's folder has the name and cannot
    be read or replaced, this user's id is added to the name (`_own_name`). Raises OSError if neither name can be used.
    """
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
    raise OSError(f"{folder} and {_own_name(folder).name} exist and cannot be replaced")


def _open(folder: Path) -> tuple[Documents, Summary]:
    """(documents, summary) of the cache folder `folder`, for `open_or_build`, and for `_commit` to see whether it is
    damaged: the memory-mapped documents and the counts of their rows, after checking sizes, checksums and counts.
    Raises PermissionError if another user's folder cannot be read, and one of `DAMAGE`, such as ValueError, if the
    folder is damaged."""
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
    """Reads the meta.json of a cache folder (`file`, its path). Raises ValueError if it is not the JSON of a `_Meta`,
    with the name of the first wrong field, or OSError if the file is missing or cannot be read."""
    try:
        return pydantic.TypeAdapter(_Meta).validate_json(read_plain(file), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{file.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _require_sound(documents: Documents, summary: Summary) -> None:
    """Raises ValueError if the arrays of a cache folder's `documents` contradict each other, or the counts that its
    `summary` has of them, or if a list of the summary does not fit its count. Checksums do not show this: whoever wrote
    wrong arrays also wrote their checksums. `_open` calls it."""
    lengths, trained = documents.lengths, documents.trained
    if lengths.min() < 0 or lengths.sum() != len(documents.tokens) or len(documents.mask) != len(documents.tokens):
        raise ValueError("its documents do not add up to its tokens")
    if len(trained) != len(lengths) or documents.origins is None or len(documents.origins) != len(lengths):
        raise ValueError("its fields are of different lengths")
    there = lengths > 0  # a labelled pair has an empty document for the answer that it does not have
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
        (summary.excluded, summary.excluded_first),
        (summary.special, summary.special_first),
        (summary.left_out, summary.left_out_first),
    ):
        if len(first) != min(count, OFFENDERS):
            raise ValueError("its summary names other rows than it counts")


def _checksum(path: Path) -> int:
    """The CRC-32 of the content of the file at `path`, which is compared with that in meta.json. The file is read in
    blocks of 16 MiB, so that it need not fit in memory."""
    value = 0
    with open(path, "rb") as stream:
        while block := stream.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _remove_abandoned(parent: Path) -> None:
    """Deletes the temporary folders that killed runs left in the folder `parent`: those in which nothing was written
    for a day (`ABANDONED_SECONDS`). `open_or_build` calls it before it builds a folder. Errors are ignored, as a folder
    may be another user's."""
    for folder in parent.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - written > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def note_use(file: Path) -> None:
    """Marks a file of the cache folder as used now; another user's may stay as it is."""
    with contextlib.suppress(OSError):
        os.utime(file)


def _make_room(parent: Path, say: Callable[[str], None]) -> None:
    """Removes what no run used for a week, the oldest first, while the cache takes more than the disk has free."""
    entries = []
    for path in parent.iterdir():
        with contextlib.suppress(OSError):
            if _ENTRY.fullmatch(path.name):
                states = [file.stat() for file in (path.iterdir() if path.is_dir() else [path])]
                entries.append((max(state.st_mtime for state in states), sum(s.st_size for s in states), path))
    taken, free = sum(size for _, size, _ in entries), shutil.disk_usage(parent).free
    removed = 0
    for used, size, path in sorted(entries):
        if taken - removed <= free + removed or time.time() - used < UNUSED_SECONDS:
            break
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed += size
    if removed:
        say(f"{parent}: {removed / 1e9:.2f} GB of tokens removed that no run used for a week; the disk was filling up")


# --- keys


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder of token caches: `cache_dir` (data.cache_dir); if it is None, the environment variable JAXTUNE_CACHE,
    or, if that is not set or empty, ~/.cache/jaxtune/tokens. A ~ at its beginning stands for the user's home. It may
    not exist yet. Values of teachers and reference models are stored there too."""
    if cache_dir is None:
        cache_dir = os.environ.get("JAXTUNE_CACHE") or Path("~", ".cache", "jaxtune", "tokens")
    return Path(cache_dir).expanduser()


def cache_key(sources: list[Source], tokenizer: Any, options: dict[str, Any]) -> str | None:
    """The name of the cache folder for these rows, 32 hex digits; None if a source has no identity (such as a list in
    memory).

    It is a hash of the rows, the tokenizer, the options and the source of the code that tokenises. `prepare` computes
    it again after tokenising, to see whether the rows changed. Raises OSError if a file cannot be read.

    Args:
        sources: the sources of the rows; files are read to hash them.
        tokenizer: a fast Hugging Face tokenizer.
        options: everything else that decides which tokens are stored, such as the arguments of `RowEncoder` and the
            text of the template, as values that json.dumps or str can write.
    """
    if any(source.identity is None for source in sources):
        return None
    parts = [source.identity() for source in sources if source.identity is not None]
    parts += [tokenizer_fingerprint(tokenizer), json.dumps(options, sort_keys=True, default=str), _code_fingerprint()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash, 32 hex digits, of the parts of a fast tokenizer that decide the tokens: its class, all of its
    tokenizer.json, its special tokens and its chat template. It goes into `cache_key`, so that a changed tokenizer gets
    another cache; nothing else uses it."""
    backend = tokenizer.backend_tokenizer.to_str()
    parts = [type(tokenizer).__name__, backend, repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@functools.cache
def _code_fingerprint() -> str:
    """A hash, 32 hex digits, of the code that turns rows into stored tokens: this package's source, and the versions of
    others."""
    versions = "".join(f"{name} {metadata.version(name)}\n" for name in _RENDERERS)
    sources = [file.read_bytes() for _, file in sorted(_imported(_ROOTS).items())] + [Path(__file__).read_bytes()]
    return hashlib.blake2b(b"".join([versions.encode(), *sources]), digest_size=16).hexdigest()


def _imported(modules: Iterable[str]) -> dict[str, Path]:
    """{module: its file} of these modules and all that they import, at any depth, from `_ROOMS`."""
    files: dict[str, Path] = {}
    names = list(modules)
    while names:
        name = names.pop()
        file = _HOME.joinpath(*name.split(".")).with_suffix(".py")
        if name in files or not name.startswith(_ROOMS) or not file.is_file():
            continue
        files[name] = file
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:  # a name may be a module or of one
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return files
