"""Opens and reads rows of files, folders, Hugging Face data sets and lists of dicts.

Each `Row` has its file and line, and one that cannot be read has the reason. A row has at most 32 MiB, and a Parquet
file expands to at most MAX_EXPANSION times its size, so that a damaged file cannot exhaust memory.
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

from jaxtune.train.data.rendering.formats import FORMATS, detect_format
from jaxtune.train.data.rows.row_errors import RowError
from jaxtune.train.data.rows.row_files import (
    Row,
    is_array,
    read_csv,
    read_dataset,
    read_json,
    read_jsonl,
    read_list,
    read_parquet,
    undecoded,
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
    """A file, data set or list of rows. Its functions may be called repeatedly."""

    name: str
    read: Callable[[int], Iterator[Row]]
    """Yields the rows with numbers above the argument, in order; a JSON array and a window yield all. Skipping is as
    cheap as the format allows.
    """
    identity: Callable[[], str] | None = None
    """A string that changes with the rows. None (a list, a window, a data set without a fingerprint): tokens are not
    cached.
    """
    count: Callable[[], int] | None = None
    """Rough number of rows for a progress bar; None: unknown."""
    file: Path | None = None
    streams: bool = True
    """Whether few rows in memory suffice; False for a JSON array, which data.streaming refuses."""
    set_epoch: Callable[[int], None] | None = None
    """Tells a data set that orders its own rows the number of the next pass, from 0."""
    is_later_window: bool = False
    """True for a stream's windows after the first: no progress bar, and no response need end its turn."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive rows of a stream that are tokenised as one set."""

    name: str
    rows: Sequence[Row]
    is_later_window: bool = True
    """False for the first window; becomes `Source.is_later_window`."""


def open_sources(source: Any, streaming: bool = False, columns: Mapping[str, str] | None = None) -> list[Source]:
    """The files or data sets that `source` names, in order. Reads no rows, but downloads a data set named on the hub
    unless `streaming`.

    Raises ValueError for an unknown file, kind or data set, a folder with no data file, a compressed one or several
    splits, a saved data set without `train`, or [:N] with several files or streaming; OSError.

      source: a file (.jsonl, .json, .parquet, .csv), a folder of them or of `save_to_disk`, a data set's `name`,
      `name:config` or `name:config:split` (default `train`), any of these with [:N] for its first N rows, a list of
      them, a `datasets` object, an iterable of dicts, or a Window.
      streaming: data sets are read over the network during the run, a source a shard.
      columns: {name of a format's column: its name in these rows}; a row without one is bad.
    """
    if columns:
        return [_renamed(original, columns) for original in open_sources(source, streaming)]
    if isinstance(source, Window):
        files = itertools.groupby(source.rows, key=lambda row: row.file)
        return [_window_source(source, list(rows)) for _, rows in files] or [_window_source(source, [])]
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if path.is_file():
            return [_file_source(path)]
        if (match := _FIRST_ROWS.fullmatch(str(source))) and not path.exists():
            return [_first_rows(open_sources(match[1], streaming), str(source), int(match[2]), streaming)]
        if path.is_dir():
            return _dataset_sources(_load_from_disk(path), str(source), streaming) if _is_saved(path) else _folder(path)
        if path.suffix.lower() in SUFFIXES or str(source).startswith((".", "/", "~")):
            raise ValueError(f"no such data file or folder: {source}{_nearest(path)}")
        return _dataset_sources(_load_named(str(source), streaming), str(source), streaming)
    if hasattr(source, "column_names") and hasattr(source, "features"):  # of `datasets`
        return _dataset_sources(source, "dataset", streaming)
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        entries = list(source)
        if entries and all(isinstance(entry, str | os.PathLike) for entry in entries):
            return [opened for entry in entries for opened in open_sources(entry, streaming)]
        return [Source("rows", lambda after: read_list(entries, after), count=lambda: len(entries))]
    raise ValueError(
        f"data must be a path, a data set's name, a list of them, or a list of dicts, got {type(source).__name__}"
    )


def read_rows(sources: Sequence[Source], format: str = "auto", max_rows: int | None = None) -> Iterator[Row]:
    """The rows of all sources in order, with their format set. Bad rows are yielded too, without columns and with the
    reason.

    Raises ValueError for a wrong argument (at the call) or a file that cannot be read further; OSError.

      format: of `formats.FORMATS`. "auto": a source's first row that fits a format decides; rows before it are bad,
      later ones are not compared.
      max_rows: of all sources, bad rows included; None: all.
    """
    if format not in FORMATS:
        raise ValueError(f"data.format must be one of {', '.join(FORMATS)}, got {format!r}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"data.max_rows must be at least 1, got {max_rows}")
    rows = itertools.chain.from_iterable(_with_format(source.read(0), format) for source in sources)
    return itertools.islice(rows, max_rows)


def _window_source(window: Window, rows: list[Row]) -> Source:
    """A source for a window's rows of one file, as the format is detected for each file."""
    return Source(window.name, lambda after: iter(rows), is_later_window=window.is_later_window)


def _with_format(rows: Iterator[Row], format: str) -> Iterator[Row]:
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
    """Sources of the data files below a folder by name. ValueError for none, or files of both splits."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if (file.suffix.lower() in SUFFIXES or _COMPRESSED.search(file.name))
        and file.is_file()
        # Such as a notebook's checkpoints.
        and not any(component.startswith(".") for component in file.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(f"the folder {folder} holds no data file ({', '.join(SUFFIXES)})")
    splits = [(file, _split_of(file.relative_to(folder))) for file in files]
    trained, held_out = (next((file for file, file_split in splits if file_split == split), None) for split in range(2))
    if trained and held_out:
        raise ValueError(
            f"the folder {folder} holds files of several splits, such as {trained.relative_to(folder)} and "
            f"{held_out.relative_to(folder)}: name one file, or a folder with those of one split"
        )
    return [_file_source(file) for file in files]


def _split_of(file: PurePath) -> int | None:
    """0 (training) or 1 (test, validation) by words in the file's or nearest folder's name; None if undecided."""
    for component in reversed(file.parts):
        words = set(re.split(r"[^a-z]+", component.lower()))
        if matches := [split for split, names in enumerate(_SPLITS) if words & names]:
            return matches[0] if len(matches) == 1 else None
    return None


def _file_source(file: Path) -> Source:
    """The source of a data file, by its suffix. ValueError for an unknown one."""
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
    """Path and content hash; the path counts because cached origins name it."""
    with open(file, "rb") as stream:
        return f"{file} {hashlib.file_digest(stream, 'blake2b').hexdigest()}"


def _file_count(file: Path) -> int:
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        try:
            return parquet.read_metadata(file).num_rows
        except Exception:  # reading the file will report the error
            return 0
    with open(file, "rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))


def _dataset_sources(dataset: Any, name: str, streaming: bool) -> list[Source]:
    """The Sources of a `datasets` object: one, or one for each shard if `streaming`."""
    shards = dataset.num_shards if streaming and not hasattr(dataset, "__len__") else 1
    if shards > 1:
        shard_datasets = (dataset.shard(num_shards=shards, index=index) for index in range(shards))
        return [
            shard_source
            for index, shard_dataset in enumerate(shard_datasets)
            for shard_source in _dataset_sources(shard_dataset, f"{name}[{index}]", False)
        ]
    # A data set has a fingerprint, which `datasets` computes from everything that the rows were made with.
    fingerprint = getattr(dataset, "_fingerprint", None)
    dataset = undecoded(dataset)  # a pass's number does not reach what is derived from it
    source = Source(
        name,
        lambda after: read_dataset(dataset, name, after),
        (lambda: f"{name} {fingerprint}") if fingerprint else None,
        (lambda: len(dataset)) if hasattr(dataset, "__len__") else None,
        set_epoch=getattr(dataset, "set_epoch", None),
    )
    return [source]


def _first_rows(sources: list[Source], name: str, count: int, streaming: bool) -> Source:
    """The first `count` rows of the only source, bad rows included. Raises ValueError for several, or a stream."""
    if len(sources) != 1 or streaming:
        why = "of a stream `steps` says how much is read" if streaming else "it is a folder of several files"
        raise ValueError(f"{name}: {why}; name one file or data set before [:{count}]")
    [whole_source] = sources
    return dataclasses.replace(
        whole_source,
        name=name,
        read=lambda after: (row for row in itertools.islice(whole_source.read(0), count) if row.number > after),
        identity=None
        if whole_source.identity is None
        else lambda: f"{whole_source.identity and whole_source.identity()} first {count}",
        count=lambda: count,
    )


def _renamed(source: Source, columns: Mapping[str, str]) -> Source:
    """A source with columns renamed to those of the row formats; others stay.

    columns: {name of a format's column: its name in these rows, or a text with such names in braces}.
    """
    texts = {ours: _BRACES.split(name) for ours, name in columns.items() if _BRACES.search(name)}
    plain = {ours: name for ours, name in columns.items() if ours not in texts}
    required = [*plain.values(), *(pieces[1] for pieces in texts.values())]
    read = {*plain.values(), *(name for pieces in texts.values() for name in pieces[1::2])}

    def renamed(row: Row) -> Row:
        if row.value is None:
            return row
        if missing := [name for name in required if name not in row.value]:
            column_names = ", ".join(map(str, row.value))
            error = f"it has no column {missing[0]!r}, which data.columns names, but {column_names}"
            return dataclasses.replace(row, value=None, error=error)
        cells = {name: row.value.get(name) for pieces in texts.values() for name in pieces[1::2]}
        if wrong := [name for name, cell in cells.items() if not isinstance(cell, str | None)]:
            error = f"column {wrong[0]} is no text, and data.columns puts it into one"
            return dataclasses.replace(row, value=None, error=error)
        other_cells = {name: cell for name, cell in row.value.items() if name not in read}
        joined = {ours: _filled(pieces, cells) for ours, pieces in texts.items()}
        return dataclasses.replace(row, value=other_cells | {o: row.value[name] for o, name in plain.items()} | joined)

    sorted_columns = sorted(columns.items())
    return dataclasses.replace(
        source,
        read=lambda after: map(renamed, source.read(after)),
        identity=None
        if source.identity is None
        else lambda: f"{source.identity and source.identity()} columns {sorted_columns}",
    )


_BRACES = re.compile(r"\{([^{}]+)\}")  # the name of a column in a text of data.columns


def _filled(pieces: Sequence[str], cells: Mapping[str, Any]) -> str:
    """A text of several columns; text between two of them is left out unless both have some."""
    written: list[str] = []
    for before, name in zip(["", *pieces[2:-1:2]], pieces[1::2], strict=True):
        if cell := cells[name]:
            written += [before if written else "", cell]
    return "".join([pieces[0], *written, pieces[-1]])


def _nearest(path: Path) -> str:
    """ "; did you mean ...?" with the nearest name beside `path`, that its folder is missing, or ""."""
    try:
        near = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.iterdir()], 1, 0.75)
    except OSError:
        return f" (there is no folder {path.parent} either)" if path.parent != Path() else ""
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _load_from_disk(folder: Path) -> object:
    """The data set in a folder of `save_to_disk`, or its split `train`. Raises ValueError without one."""
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
    """The data set `name[:config[:split]]` from the hub or a local cache; the split is `train` by default."""
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
