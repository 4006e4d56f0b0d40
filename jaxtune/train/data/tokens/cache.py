"""The token cache: tokenised documents as memory-mapped files.

A folder's name is a hash of all that decides its content: rows, tokenizer, options and code. It is written under a
temporary name and renamed, so it is complete; sizes and checksums are verified at each opening, and a damaged folder is
built again.

Several users may share a cache: beside another user's unusable folder this user's is built, with the user's id in its
name. Recorded counts are checked against the tokens, since the checksums come from the same writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pydantic

from jaxtune.conversations.reads import Reads, told
from jaxtune.system.disk import free_bytes, note_use, remove_oldest
from jaxtune.system.files import (
    PACKAGE,
    put,
    remove_temporary,
    temporary_folder,
    writing,
)
from jaxtune.system.sealed import read_manifest, write_manifest
from jaxtune.system.terminal import printable
from jaxtune.train.config import ConfigError
from jaxtune.train.data.rows.reading import Source
from jaxtune.train.data.tokens.chunks import Chunk
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.data.tokens.pictures import DocumentPictures, PictureStore, Stamp, stamp_of, stored_pictures

# The files NAME.bin of a folder and their dtypes; `Documents` documents the fields.
FIELDS = {"tokens": np.int32, "mask": np.uint8, "lengths": np.int64, "trained": np.int64, "origins": np.int64}
_META = "meta.json"
UNUSED_SECONDS = 7 * 24 * 3600  # what a run used since then is never removed to make room
_ENTRY = re.compile(r"[0-9a-f]{32}(-\d+)?|(reference|teacher)_[0-9a-f]+\.npy")
ABANDONED_SECONDS = 24 * 3600  # without a write, after which temporary folders are removed
_ROOTS = ("jaxtune.train.data.rows.reading", "jaxtune.train.data.tokens.workers")
_ROOMS = ("jaxtune.train.data.", "jaxtune.conversations.")  # whose modules decide tokens
_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+)?import\s+(\([^)]*\)|.+)$", re.MULTILINE)
_RENDERERS = ("transformers", "tokenizers", "jinja2")  # packages that render and split
MOST_READS = 40  # the most columns and keys of a Summary
OFFENDERS = 10  # the most entries of each list of a Summary, such as the bad rows; further rows are only counted
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # the errors of opening a damaged folder


@dataclasses.dataclass
class Summary:
    """Counts of rows and tokens before packing. Lists have their first 10 entries (`OFFENDERS`)."""

    rows: int = 0
    """Read, with those left out."""
    documents: int = 0
    """One for each usable row, two for a pair or labelled row (one may be empty)."""
    bad_rows: int = 0
    offenders: list[str] = dataclasses.field(default_factory=list)
    """Bad rows, as "file:line: reason"."""
    untrained: int = 0
    """Rows left out without a trained target; of a pair, in one of its documents."""
    untrained_first: list[str] = dataclasses.field(default_factory=list)
    excluded: int = 0
    """Rows left out by a mark beside their conversation."""
    excluded_first: list[str] = dataclasses.field(default_factory=list)
    implied: int = 0
    """Pairs without a prompt, whose question is the answers' common beginning."""
    special: int = 0
    """Rows with special tokens or markers in their own text."""
    special_first: list[str] = dataclasses.field(default_factory=list)
    """As "file:line: what"."""
    left_out: int = 0
    """Rows that the chat template does not write completely."""
    left_out_first: list[str] = dataclasses.field(default_factory=list)
    """As "file:line: what"."""
    stray_thoughts: int = 0
    """Rows whose answers have thoughts among their words."""
    stray_thoughts_first: list[str] = dataclasses.field(default_factory=list)
    responses: int = 0
    """Trained responses; with data.train_on=all one a document."""
    ended: int = 0
    """Responses that train an end of turn, or were cut before it."""
    masked: int = 0
    """Response tokens that data.mask_spans excludes."""
    unread: list[str] = dataclasses.field(default_factory=list)
    """Columns with values that the row format does not read."""
    reads: Reads = dataclasses.field(default_factory=dict)
    """Columns and keys of turns, and as what they are read."""
    cut: int = 0
    """Documents tokenised only in their beginning."""
    tokens: int = 0
    trained_tokens: int = 0
    max_token: int = -1
    """Largest token id; -1 without tokens."""

    def add(self, chunk: Chunk) -> None:
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
            f"{place}: {detail}" for place, detail in chunk.special[: OFFENDERS - len(self.special_first)]
        ]
        self.left_out += len(chunk.left_out)
        self.left_out_first += [
            f"{place}: {detail}" for place, detail in chunk.left_out[: OFFENDERS - len(self.left_out_first)]
        ]
        self.stray_thoughts += len(chunk.stray_thoughts)
        self.stray_thoughts_first += chunk.stray_thoughts[: OFFENDERS - len(self.stray_thoughts_first)]
        self.responses += chunk.responses
        self.ended += chunk.ended
        self.masked += chunk.masked
        new = [printable(name) for name in chunk.unread if printable(name) not in self.unread]
        self.unread += new[: OFFENDERS - len(self.unread)]
        reads = {printable(name): role for name, role in chunk.reads.items()} | self.reads
        self.reads = dict(itertools.islice(reads.items(), MOST_READS))
        self.cut += chunk.cut
        self.tokens += len(chunk.tokens)
        self.trained_tokens += int(chunk.trained.sum())
        self.max_token = max(self.max_token, int(chunk.tokens.max(initial=-1)))

    @property
    def columns(self) -> str:
        """What is read of the rows, and what is not, in words."""
        return told(self.reads, self.unread)

    def with_read(self, name: str, role: str) -> Summary:
        """A copy, of rows of which another reader reads a column too."""
        others = [column for column in self.unread if column != name]
        return dataclasses.replace(self, unread=others, reads={**self.reads, name: role})

    def __str__(self) -> str:
        return "; ".join([f"{self.rows:,} rows, {self.documents:,} documents", *self.warnings()])

    def warnings(self) -> list[str]:
        """Sentences to show before training."""
        sentences = []
        if self.bad_rows:
            sentences.append(f"{self.bad_rows:,} bad rows left out, first {'; '.join(self.offenders[:3])}")
        if self.untrained:
            sentences.append(
                f"{self.untrained:,} rows without a trained token left out, first {self.untrained_first[0]}"
            )
        if self.excluded:
            sentences.append(f"{self.excluded:,} rows left out by their marks, first {self.excluded_first[0]}")
        if self.implied:
            sentences.append(
                f"{self.implied:,} pairs have no prompt: their question is what both answers begin with, if anything"
            )
        if self.unread:
            ellipsis = ", ..." * (len(self.unread) == OFFENDERS)
            sentences.append(f"columns that are not read: {', '.join(self.unread)}{ellipsis}")
        if self.special:
            sentences.append(
                f"{self.special:,} rows hold special tokens or markers in their own text, first {self.special_first[0]}"
                "; the model reads them as control tokens, and their responses were found by the template's turns"
            )
        if self.left_out:
            sentences.append(
                f"{self.left_out:,} rows have a part that the chat template does not write, so that it is not trained "
                f"on, first {self.left_out_first[0]}; set data.template to one that writes it"
            )
        if self.stray_thoughts:
            sentences.append(
                f"{self.stray_thoughts:,} rows have a thought (<think>) at the start of an answer that has no end, or "
                "for which the chat template has no place: it is trained as words, first "
                f"{self.stray_thoughts_first[0]}; "
                "set data.template to one with thoughts if the model is to think"
            )
        if self.ended < self.responses:
            sentences.append(f"{self.responses - self.ended:,} of {self.responses:,} responses train no end of turn")
        return sentences


@dataclasses.dataclass(frozen=True)
class _Meta:
    """What meta.json, written last, has beside the list of files."""

    sources: list[str]
    """Names that `origins` has indices of."""
    summary: Summary
    asked: dict[str, Stamp | None]
    """Of paths at which pictures of rows left out were looked for; None: no file was there."""


class CachedDocuments(NamedTuple):
    """Documents of the cache, and whether they were there before."""

    documents: Documents
    """Memory-mapped; empty if no row was usable."""
    summary: Summary
    was_cached: bool


class _Store:
    """Collects chunks, in files NAME.bin of an empty `folder`, or in memory (None)."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.parts: dict[str, list[np.ndarray]] = {name: [] for name in FIELDS}
        self.streams: dict[str, BinaryIO] = {}
        if folder is not None:
            for name in FIELDS:
                self.streams[name] = open(folder / f"{name}.bin", "wb")  # noqa: SIM115 (closed in `close`)
        self.pictures = PictureStore(folder)
        self.files: dict[str, int] = {}
        self.summary = Summary()
        self.asked: dict[str, Stamp | None] = {}

    def add(self, chunk: Chunk) -> None:
        """Appends a chunk's arrays and counts. Raises OSError, as on a full disk."""
        origins = [(self.files.setdefault(file, len(self.files)), number) for file, number in chunk.origins]
        arrays = {name: getattr(chunk, name) for name in FIELDS if name != "origins"}
        arrays["origins"] = np.array(origins, np.int64).reshape(-1, 2)
        for name, array in arrays.items():
            array = np.ascontiguousarray(array, FIELDS[name])
            if self.streams:
                data = array.tobytes()
                with writing(self.streams[name].name, len(data)):
                    self.streams[name].write(data)
            else:
                self.parts[name].append(array)
        self.pictures.add(len(chunk.lengths), chunk.pictures)
        self.asked |= {path: stamp_of(path) for path in chunk.asked}
        self.summary.add(chunk)

    def finish(self) -> None:
        assert self.folder is not None
        for stream in self.streams.values():
            with writing(stream.name, stream.tell()):
                stream.close()  # writes the last bytes; a full disk raises here
        self.pictures.finish()
        meta = _Meta(list(self.files), self.summary, self.asked)
        write_manifest(self.folder, _META, dataclasses.asdict(meta), durable=False)

    def close(self) -> None:
        for stream in (*self.streams.values(), self.pictures):
            with contextlib.suppress(OSError):
                stream.close()

    def documents(self) -> Documents:
        fields = {name: np.concatenate(arrays) for name, arrays in self.parts.items()}
        return _documents(fields, list(self.files), self.pictures.documents())


def _documents(fields: Mapping[str, np.ndarray], files: list[str], pictures: DocumentPictures | None) -> Documents:
    """Documents of flat arrays by the names of FIELDS; `tokens` and `mask` are not copied. origins may be flat."""
    lengths = np.array(fields["lengths"])
    return Documents(
        tokens=fields["tokens"],
        mask=fields["mask"],
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        trained=np.array(fields["trained"]),
        origins=np.array(fields["origins"]).reshape(-1, 2),
        files=tuple(files),
        pictures=pictures,
    )


def collect(chunks: Iterable[Chunk]) -> tuple[Documents, Summary]:
    """(documents, summary) of all chunks in memory, for rows that cannot be cached."""
    store = _Store(None)
    for chunk in chunks:
        store.add(chunk)
    if not store.parts["tokens"]:
        return Documents.gather([]), store.summary
    return store.documents(), store.summary


def open_or_build(
    folder: Path, build: Callable[[], Iterable[Chunk]], say: Callable[[str], None] = print
) -> CachedDocuments:
    """Opens a cache folder, or builds it if it is missing, damaged, or unreadable as another user's. Without a writable
    folder the documents stay in memory, with a warning. Raises ValueError if the disk is full, and what `build` raises;
    nothing partial is left.

      folder: named by `cache_key`.
      say: takes lines for the user.
    """
    for candidate in (_own_name(folder), folder):
        if os.path.isdir(candidate):
            try:
                cached = CachedDocuments(*_open(candidate), True)
                note_use(candidate / _META)
                return cached
            except PermissionError:
                say(f"token cache {candidate} is another user's and cannot be read; it is built beside it")
            except DAMAGE as error:
                say(f"token cache {candidate} is damaged ({error}); it is built anew")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_temporary(folder.parent, idle_seconds=ABANDONED_SECONDS)
        _make_room(folder.parent, say)
        stack = contextlib.ExitStack()
        temporary = stack.enter_context(temporary_folder(folder))
    except OSError as error:
        say(
            f"warning: data.cache_dir={folder.parent} cannot be written ({error}): the tokens are kept in memory, and "
            "made anew by the next run; set another"
        )
        return CachedDocuments(*collect(build()), False)
    with stack:
        documents, summary = _write(temporary, build)
        if not summary.documents:  # there is nothing to map, and the caller refuses an empty set
            return CachedDocuments(documents, summary, False)
        with disk_errors(folder.parent):
            candidate = _commit(temporary, folder)
    return CachedDocuments(*_open(candidate), False)


def _own_name(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-{os.getuid()}")


def _write(folder: Path, build: Callable[[], Iterable[Chunk]]) -> tuple[Documents, Summary]:
    """Writes chunks and meta.json into an empty folder; (no documents, the counts). Raises ValueError."""
    with disk_errors(folder.parent):
        store = _Store(folder)
    try:
        for chunk in build():
            with disk_errors(folder.parent):
                store.add(chunk)
        with disk_errors(folder.parent):
            store.finish()
    finally:
        store.close()
    return Documents.gather([]), store.summary


@contextlib.contextmanager
def disk_errors(parent: Path) -> Iterator[None]:
    """OSError becomes a ConfigError about data.cache_dir."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the token cache cannot be written ({error}); free space at data.cache_dir={parent}, or set another"
        ) from None


def _commit(temporary: Path, folder: Path) -> Path:
    """Renames the finished folder, and returns its name; another run's undamaged one stays. OSError."""
    for target in (folder, _own_name(folder)):
        if os.path.isdir(target):
            try:
                _open(target)
                return target
            except PermissionError:
                continue
            except DAMAGE:
                pass  # it is replaced
        with contextlib.suppress(OSError):
            put(temporary, target, durable=False)
            return target
    raise OSError(f"{folder} and {_own_name(folder).name} exist and cannot be replaced")


def _open(folder: Path) -> tuple[Documents, Summary]:
    """The memory-mapped documents and counts of a verified folder. PermissionError for another user's; or of DAMAGE."""
    meta = _read_meta(folder)
    fields = {name: np.memmap(folder / f"{name}.bin", dtype, mode="r") for name, dtype in FIELDS.items()}
    documents = _documents(fields, meta.sources, stored_pictures(folder, len(fields["lengths"])))
    _require_sound(documents, meta.summary)
    for path, stamp in meta.asked.items():
        if stamp_of(path) != stamp:
            raise ValueError(f"{path}, a picture of a row left out, has changed")
    return documents, meta.summary


def _read_meta(folder: Path) -> _Meta:
    """Raises ValueError with what is damaged or the first wrong field, or OSError."""
    record = read_manifest(folder, _META)
    if not record["files"].keys() >= {f"{name}.bin" for name in FIELDS}:
        raise ValueError(f"{_META} does not list all of its arrays")
    try:
        return pydantic.TypeAdapter(_Meta).validate_json(json.dumps(record), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{_META}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _require_sound(documents: Documents, summary: Summary) -> None:
    """Raises ValueError if arrays and counts contradict each other; the checksums of wrong arrays are right."""
    lengths, trained = documents.lengths, documents.trained
    if lengths.min() < 0 or lengths.sum() != len(documents.tokens) or len(documents.mask) != len(documents.tokens):
        raise ValueError("its documents do not add up to its tokens")
    if len(trained) != len(lengths) or documents.origins is None or len(documents.origins) != len(lengths):
        raise ValueError("its fields are of different lengths")
    non_empty = lengths > 0  # a labelled pair has an empty document for the answer that it does not have
    starts = documents.starts[non_empty]
    trained_counts = np.add.reduceat(documents.mask, starts, dtype=np.int64) - documents.mask[starts]
    right = np.array_equal(trained_counts, trained[non_empty]) and not trained[~non_empty].any()
    if documents.mask.max() > 1 or not right or trained_counts.min() < 1:
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


def _make_room(parent: Path, say: Callable[[str], None]) -> None:
    """Removes what no run used for a week, oldest first, while the cache takes more than the disk has free."""
    free = free_bytes(parent)
    entries = (path for path in parent.iterdir() if _ENTRY.fullmatch(path.name))
    removed = remove_oldest(entries, lambda remaining, removed: remaining > free + removed, UNUSED_SECONDS)
    if removed:
        say(f"{parent}: {removed / 1e9:.2f} GB of tokens removed that no run used for a week; the disk was filling up")


# --- keys


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder of token caches: `cache_dir`, else $JAXTUNE_CACHE, else ~/.cache/jaxtune/tokens; it may not exist."""
    if cache_dir is None:
        cache_dir = os.environ.get("JAXTUNE_CACHE") or Path("~", ".cache", "jaxtune", "tokens")
    return Path(cache_dir).expanduser()


def identities(sources: Iterable[Source]) -> list[str] | None:
    """Those of files or data sets, in order, which are read; None if one has none. Raises OSError."""
    readers = [source.identity for source in sources]
    return None if None in readers else [identity() for identity in readers if identity is not None]


def cache_key(rows: Iterable[str], tokenizer: Any, options: dict[str, Any]) -> str:
    """32 hex digits, a hash of rows (`identities`), tokenizer, options and code. A large tokenizer takes a fifth of a
    second.

      options: what else decides the tokens, as values for json.dumps or str.
    """
    key_texts = [
        *rows,
        tokenizer_fingerprint(tokenizer),
        json.dumps(options, sort_keys=True, default=str),
        _code_fingerprint(),
    ]
    return hashlib.blake2b("\n".join(key_texts).encode(), digest_size=16).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash, 32 hex digits, of a fast tokenizer's class, tokenizer.json, special tokens and chat template."""
    backend = tokenizer.backend_tokenizer.to_str()
    texts = [type(tokenizer).__name__, backend, repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


@functools.cache
def _code_fingerprint() -> str:
    """A hash, 32 hex digits, of the code that turns rows into tokens, and the versions of other packages."""
    versions = "".join(f"{name} {metadata.version(name)}\n" for name in _RENDERERS)
    sources = [file.read_bytes() for _, file in sorted(_imported(_ROOTS).items())] + [Path(__file__).read_bytes()]
    return hashlib.blake2b(b"".join([versions.encode(), *sources]), digest_size=16).hexdigest()


def _imported(modules: Iterable[str]) -> dict[str, Path]:
    """{module: file} of these modules and their imports from `_ROOMS`, at any depth."""
    files: dict[str, Path] = {}
    names = list(modules)
    while names:
        name = names.pop()
        file = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
        if name in files or not name.startswith(_ROOMS) or not file.is_file():
            continue
        files[name] = file
        for module, imported in _IMPORT.findall(file.read_text(encoding="utf-8")):  # to parse them takes half a second
            parts = re.findall(r"[\w.]+", imported)  # a name may be a module or of one
            names += [module, *(f"{module}.{part}" for part in parts)] if module else parts
    return files
