"""Opens and reads rows of files, folders, Hugging Face data sets and lists of dicts.

Reading yields each row as a `Row` with its file and line (or number), so that error messages can name it. A row that
cannot be read is yielded with the reason, and the caller decides whether to stop or leave it out. The readers are in
`row_files.py`. A row has at most `MAX_ROW_SIZE` bytes or characters (32 MiB), and a Parquet file may expand to at most
`MAX_EXPANSION` times its size (or 32 MiB), so that a damaged or malicious file cannot exhaust the memory.
`open_sources` finds the files or data sets, each a `Source`, and `read_rows` reads them. A `Window` is a source of rows
that were read already, those of a stream.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from jaxtune.train.data.formats import FORMATS, detect_format
from jaxtune.train.data.row_errors import RowError
from jaxtune.train.data.row_files import (
    Row,
    is_array,
    read_csv,
    read_dataset,
    read_json,
    read_jsonl,
    read_list,
    read_parquet,
)

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")  # the kinds of files that can be read
# Names of compressed data files. A folder with such a file is refused, instead of reading only the other files.
_COMPRESSED = re.compile(r"\.(jsonl?|csv|parquet)\.(gz|bz2|xz|zst|zip)$", re.IGNORECASE)
# Words in the names of files and folders that mark a training split, and those that mark a test or validation split.
_SPLITS = ({"train", "training"}, {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})


# The name of a source followed by the number of its first rows to read, such as rows.jsonl[:1000].
_FIRST_ROWS = re.compile(r"(.+)\[:(\d+)\]")


@dataclasses.dataclass(frozen=True)
class Source:
    """One file, data set or list that rows are read from; `open_sources` makes it. Its functions may be called
    repeatedly."""

    name: str
    """Its name in messages."""
    read: Callable[[int], Iterator[Row]]
    """Yields in order the rows whose number is above the argument; 0 yields all. Only a stream that continues from a
    checkpoint gives another number. The others are skipped as cheaply as the file format allows. A JSON array and a
    window yield all rows in any case."""
    identity: Callable[[], str] | None = None
    """Returns a string that changes when the rows change, which goes into the key of the token cache, and into the
    digest of a file of a teacher's log-probabilities. None for a list in memory, a window of a stream or a data set
    without a fingerprint; then tokens are not cached."""
    count: Callable[[], int] | None = None
    """Returns roughly how many rows there are, for a progress bar; None if that is not known."""
    file: Path | None = None
    """The file, if the source is one. A stream notices by it that the file has changed."""
    streams: bool = True
    """True if it can be read with only a few rows in memory at a time; False if it must be read whole, as a JSON array,
    which data.streaming refuses."""
    set_epoch: Callable[[int], None] | None = None
    """Tells a data set that orders its own rows which pass over it is read next, from 0; None for others."""
    part: bool = False
    """True for the rows of a window of a stream after the first; False for all other sources. `prepare` shows no
    progress bar for such rows, and accepts them if no response in them ends its turn. It does not decide whether a
    window is left out."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive rows of a stream that are tokenised as one set, which streamed.py makes (the first one before the
    run, the others during it). `open_sources` accepts it, and makes a source of the rows of each file."""

    name: str
    """The name of the stream."""
    rows: Sequence[Row]
    """The rows."""
    part: bool = True
    """False for the first window of a stream, in which a response must end its turn; True for later ones, in which none
    need do so. It becomes `Source.part`."""


def open_sources(source: Any, streaming: bool = False, columns: Mapping[str, str] | None = None) -> list[Source]:
    """Finds the files or data sets that `source` names, and returns them in order. All rows that a run reads are found
    by it: those that it trains and evaluates on, prompts, and a teacher's log-probabilities. No rows of files are read,
    but a data set given by name is downloaded unless `streaming` is set.

    Args:
        source: a file (.jsonl, .json, .parquet, .csv), a folder of such files, a folder written by
            `datasets.save_to_disk`, the name of a data set (`name`, `name:config` or `name:config:split`; the split is
            `train` if it is not given), any of these with `[:N]` behind it, for its first N rows, a list of such paths
            and names, a `datasets.Dataset` or IterableDataset, a list (or other iterable) of dicts, or a Window (rows
            of a stream that were read already).
        streaming: whether a data set given by name is read over the network during the run instead of being downloaded.
            With it, such a data set, or an IterableDataset, gives one source for each of its shards; else a data set is
            one source.
        columns: {name of a format's column: its name in these rows}; other columns keep their names. A row that lacks
            one of these columns is a bad row.

    Raises:
        ValueError: there is no such file or data set, or its kind is not known; a folder has no data file, a compressed
            one, or files of several splits; a saved data set has splits, but no `train`; or [:N] is after a folder of
            several files, or after any name with `streaming` set.
        OSError: a .json file, of which the first characters are read, cannot be opened.
    """
    if columns:
        return [_renamed(one, columns) for one in open_sources(source, streaming)]
    if isinstance(source, Window):
        files = itertools.groupby(source.rows, key=lambda row: row.file)
        return [_window_source(source, list(rows)) for _, rows in files] or [_window_source(source, [])]
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if path.is_file():
            return [_file_source(path)]
        if (cut := _FIRST_ROWS.fullmatch(str(source))) and not path.exists():
            return [_first_rows(open_sources(cut[1], streaming), str(source), int(cut[2]), streaming)]
        if path.is_dir():
            return _dataset_sources(_load_from_disk(path), str(source), streaming) if _is_saved(path) else _folder(path)
        if path.suffix.lower() in SUFFIXES or str(source).startswith((".", "/", "~")):
            raise ValueError(f"no such data file or folder: {source}{_nearest(path)}")
        return _dataset_sources(_load_named(str(source), streaming), str(source), streaming)
    if hasattr(source, "column_names") and hasattr(source, "features"):  # of `datasets`
        return _dataset_sources(source, "dataset", streaming)
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        parts = list(source)
        if parts and all(isinstance(part, str | os.PathLike) for part in parts):
            return [found for part in parts for found in open_sources(part, streaming)]
        return [Source("rows", lambda after: read_list(parts, after), count=lambda: len(parts))]
    raise ValueError(
        f"data must be a path, a data set's name, a list of them, or a list of dicts, got {type(source).__name__}"
    )


def read_rows(sources: Sequence[Source], format: str = "auto", max_rows: int | None = None) -> Iterator[Row]:
    """Yields the rows of all sources in order, as they are read. `prepare` gets the rows that it tokenises from it.
    Prompts to sample answers to, and the rows of a stream before they are a Window, are read by `Source.read` itself. A
    good row has its row format set. A bad row, which cannot be read or (with "auto") fits no format, is yielded too,
    without columns and with the reason.

    Args:
        sources: from `open_sources`.
        format: a row format of `formats.FORMATS`. With "auto", the first row of a source whose columns fit a format
            decides for the whole source: the rows before it become bad rows, and the rows after it are not compared
            with the format.
        max_rows: the number of rows of all sources, bad rows included, after which to stop; None reads all.

    Raises:
        ValueError: an argument is wrong (raised at the call), or a file cannot be read further (while rows are read).
        OSError: a file cannot be opened.
    """
    if format not in FORMATS:
        raise ValueError(f"data.format must be one of {', '.join(FORMATS)}, got {format!r}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"data.max_rows must be at least 1, got {max_rows}")
    rows = itertools.chain.from_iterable(_with_format(source.read(0), format) for source in sources)
    return itertools.islice(rows, max_rows)


def _window_source(window: Window, rows: list[Row]) -> Source:
    """The `Source` of `rows`, those of `window` (consecutive rows of a stream) that come from one file, so that
    data.format=auto decides for each file. They are in memory and have no identity, so their tokens are not cached."""
    return Source(window.name, lambda after: iter(rows), part=window.part)


def _with_format(rows: Iterator[Row], format: str) -> Iterator[Row]:
    """Yields the rows of one source with their row format set, for `read_rows`. As long as the format is to be
    detected, a row whose columns fit none becomes a bad row (without columns, with the reason).

    Args:
        rows: the rows of the source.
        format: a row format of `formats.FORMATS`; with "auto" it is detected from the first row whose columns fit one,
            and applies to all rows after it, whatever their columns are.
    """
    for row in rows:
        if row.value is not None:
            try:
                format = detect_format(row.value) if format == "auto" else format
                row = dataclasses.replace(row, format=format)
            except RowError as error:
                row = dataclasses.replace(row, value=None, error=str(error))
        yield row


# --- sources


def _folder(folder: Path) -> list[Source]:
    """The sources of all data files below a folder, in the order of their names. Hidden files and folders are ignored.
    `open_sources` calls it. Raises ValueError if there is none, if one is compressed, or if the names are those of both
    training and test splits."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if (file.suffix.lower() in SUFFIXES or _COMPRESSED.search(file.name))
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)  # a notebook's checkpoints, ...
    )
    if not files:
        raise ValueError(f"the folder {folder} holds no data file ({', '.join(SUFFIXES)})")
    splits = [(file, _split_of(file.relative_to(folder))) for file in files]
    trained, held_out = (next((file for file, found in splits if found == split), None) for split in range(2))
    if trained and held_out:
        raise ValueError(
            f"the folder {folder} holds files of several splits, such as {trained.relative_to(folder)} and "
            f"{held_out.relative_to(folder)}: name one file, or a folder with those of one split"
        )
    return [_file_source(file) for file in files]


def _split_of(file: PurePath) -> int | None:
    """The index in _SPLITS of the split that a data file's name says, or else the name of the nearest folder above it:
    0 for training, 1 for test and validation. None if no name has such a word, or the first that does has words of
    both. file: the path relative to the folder that the user gave, whose own name does not count."""
    for part in reversed(file.parts):
        words = set(re.split(r"[^a-z]+", part.lower()))
        if found := [split for split, names in enumerate(_SPLITS) if words & names]:
            return found[0] if len(found) == 1 else None
    return None


def _file_source(file: Path) -> Source:
    """The `Source` of the data file `file`, read by the reader for its suffix; lower and upper case are the same. Of a
    .json file the beginning is read, to see whether it is an array. Raises ValueError if no reader knows the suffix,
    and OSError if a .json file cannot be opened."""
    readers = {".jsonl": read_jsonl, ".json": read_json, ".parquet": read_parquet, ".csv": read_csv}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise ValueError(f"{file}: cannot read {file.suffix or 'a file without suffix'}; known: {', '.join(SUFFIXES)}")
    streams = reader is not read_json or not is_array(file)
    return Source(
        str(file),
        lambda after: reader(file, after),
        lambda: _file_identity(file),
        lambda: _file_count(file),
        file,
        streams,
    )


def _file_identity(file: Path) -> str:
    """A string that changes with a file's path (as it was given) or content, by which cached tokens of the file are
    found; those of a moved file are not. It reads the whole file. The path counts because the cache stores it for
    messages about rows. Raises OSError if the file cannot be read."""
    with open(file, "rb") as stream:
        return f"{file} {hashlib.file_digest(stream, 'blake2b').hexdigest()}"


def _file_count(file: Path) -> int:
    """The number of rows of a Parquet file, 0 if it is damaged, which reading it will report; or the number of line
    breaks of another file, about that of its rows. A progress bar takes it as the total."""
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        try:
            return parquet.read_metadata(file).num_rows
        except Exception:  # reading the file will report the error
            return 0
    with open(file, "rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))


def _dataset_sources(dataset: Any, name: str, streaming: bool) -> list[Source]:
    """The sources of a data set of the library `datasets`: one for each of its shards if it is streamed, otherwise one
    for all rows.

    Args:
        dataset: a Dataset or IterableDataset.
        name: its name in messages.
        streaming: whether an IterableDataset is divided into its shards; a Dataset never is.
    """
    shards = dataset.num_shards if streaming and not hasattr(dataset, "__len__") else 1
    if shards > 1:
        parts = (dataset.shard(num_shards=shards, index=index) for index in range(shards))
        return [one for index, part in enumerate(parts) for one in _dataset_sources(part, f"{name}[{index}]", False)]
    # A data set has a fingerprint, which `datasets` computes from everything that the rows were made with.
    fingerprint = getattr(dataset, "_fingerprint", None)
    source = Source(
        name,
        lambda after: read_dataset(dataset, name, after),
        (lambda: f"{name} {fingerprint}") if fingerprint else None,
        (lambda: len(dataset)) if hasattr(dataset, "__len__") else None,
        set_epoch=getattr(dataset, "set_epoch", None),
    )
    return [source]


def _first_rows(sources: list[Source], name: str, count: int, streaming: bool) -> Source:
    """The source of the first `count` rows of another one, bad rows included, for a name such as rows.jsonl[:1000].

    Args:
        sources: a list with that source only.
        name: its name with the number of rows, for messages.
        count: how many rows are read.
        streaming: whether the rows are streamed, which is refused.

    Raises:
        ValueError: there are several sources, or `streaming` is set.
    """
    if len(sources) != 1 or streaming:
        why = "of a stream `steps` says how much is read" if streaming else "it is a folder of several files"
        raise ValueError(f"{name}: {why}; name one file or data set before [:{count}]")
    [whole] = sources
    return dataclasses.replace(
        whole,
        name=name,
        read=lambda after: (row for row in itertools.islice(whole.read(0), count) if row.number > after),
        identity=None if whole.identity is None else lambda: f"{whole.identity and whole.identity()} first {count}",
        count=lambda: count,
    )


def _renamed(source: Source, columns: Mapping[str, str]) -> Source:
    """A copy of `source` with the columns of its rows renamed to the names that the row formats use (data.columns);
    other columns stay, unless one has such a name already: then it is replaced. The renaming is part of its identity.

    columns: {name of a format's column: its name in these rows, or a text with such names in braces}. A row that lacks
      one of them is a bad row; of several in one text, only one that lacks the first.
    """
    texts = {ours: _BRACES.split(name) for ours, name in columns.items() if _BRACES.search(name)}
    plain = {ours: name for ours, name in columns.items() if ours not in texts}
    needed = [*plain.values(), *(parts[1] for parts in texts.values())]
    read = {*plain.values(), *(name for parts in texts.values() for name in parts[1::2])}

    def renamed(row: Row) -> Row:
        """`row` with renamed columns; a bad row, with the reason, if it lacks one; unchanged if it is bad already."""
        if row.value is None:
            return row
        if missing := [name for name in needed if name not in row.value]:
            there = ", ".join(map(str, row.value))
            error = f"it has no column {missing[0]!r}, which data.columns names, but {there}"
            return dataclasses.replace(row, value=None, error=error)
        cells = {name: row.value.get(name) for parts in texts.values() for name in parts[1::2]}
        if wrong := [name for name, cell in cells.items() if not isinstance(cell, str | None)]:
            error = f"column {wrong[0]} is no text, and data.columns puts it into one"
            return dataclasses.replace(row, value=None, error=error)
        others = {name: cell for name, cell in row.value.items() if name not in read}
        joined = {ours: _filled(parts, cells) for ours, parts in texts.items()}
        return dataclasses.replace(row, value=others | {o: row.value[name] for o, name in plain.items()} | joined)

    own = sorted(columns.items())
    return dataclasses.replace(
        source,
        read=lambda after: map(renamed, source.read(after)),
        identity=None if source.identity is None else lambda: f"{source.identity and source.identity()} columns {own}",
    )


_BRACES = re.compile(r"\{([^{}]+)\}")  # the name of a column in a text of data.columns


def _filled(parts: Sequence[str], cells: Mapping[str, Any]) -> str:
    """A text of several columns. What stands between two of them is left out unless both have text.

    parts: texts and names of columns in turn."""
    written: list[str] = []
    for before, name in zip(["", *parts[2:-1:2]], parts[1::2], strict=True):
        if cell := cells[name]:
            written += [before if written else "", cell]
    return "".join([parts[0], *written, parts[-1]])


def _nearest(path: Path) -> str:
    """Returns the end of the error message of `open_sources` about a path that is not found, or of `_load_named` about
    a data set: "; did you mean ...?" with the file or folder beside it whose name is nearest; that the folder does not
    exist either; or ""."""
    try:
        near = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], 1, 0.75)
    except OSError:
        return f" (there is no folder {path.parent} either)" if path.parent != Path() else ""
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _is_saved(folder: Path) -> bool:
    """Whether `folder` was written by `save_to_disk` of the library `datasets`, whose files only that library reads.
    `open_sources` loads such a folder by `_load_from_disk`, and takes any other for a folder of data files."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _load_from_disk(folder: Path) -> object:
    """Loads, for `open_sources`, the data set in a folder that `save_to_disk` of the library `datasets` wrote; if it
    was saved with its splits, the one named `train`. Raises ValueError if none of the splits has that name."""
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if "train" not in dataset:
            raise ValueError(
                f"{folder} has no split `train` but {', '.join(map(str, dataset))}; name one of its subfolders"
            )
        dataset = dataset["train"]
    return dataset


def _load_named(name: str, streaming: bool) -> Any:
    """Loads, for `open_sources`, the data set `name`, `name:config` or `name:config:split`, from the hub or a local
    cache; without them, its default config and the split "train". streaming: whether its rows are read over the network
    later instead of being downloaded now. Raises ValueError if it cannot be loaded."""
    from datasets import load_dataset

    path, config, split = [*name.split(":"), "", ""][:3]
    try:
        return load_dataset(path, config or None, split=split or "train", streaming=streaming)
    except Exception as error:  # the client of the hub raises many kinds of errors
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        near = _nearest(Path(name))
        raise ValueError(
            f"{name!r} is no file or folder, and as a data set it cannot be loaded{near or f': {reason}'}"
        ) from None
