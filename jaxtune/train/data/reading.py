"""Rows from wherever people have them: files, folders, Hugging Face datasets, lists of dicts.

Reading yields a `Row` with its place (file and line), so that every complaint can name it. A row that cannot
be read is yielded too, with the reason; what becomes of it is the caller's policy. The readers are in `row_files.py`.
One row can be no more than `MAX_ROW_SIZE`, and a compressed file can hold no more than `MAX_EXPANSION` times its own
size: nobody's memory depends on what a file claims.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtune.train.data.formats import FORMATS, RowError, detect_format
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

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_COMPRESSED = re.compile(r"\.(jsonl?|csv|parquet)\.(gz|bz2|xz|zst|zip)$", re.IGNORECASE)  # which reading refuses
# What names of files and folders call the rows to train on, and those that are kept for later.
_SPLITS = ({"train", "training"}, {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})


@dataclasses.dataclass(frozen=True)
class Source:
    """One file or data set.

    name: how it is called in messages. read: yields its rows in order, those whose number is above its argument, and
    passes over the others as cheaply as their format allows. identity: a string that changes when its rows do; None
    where there is none (lists in memory). count: about how many rows there are, for a progress bar. file: where it is
    one. streams: whether reading keeps few rows in memory at a time. part: whether it is a part of a stream, which need
    not be usable alone, and of which nothing is said.
    """

    name: str
    read: Callable[[int], Iterator[Row]]
    identity: Callable[[], str] | None = None
    count: Callable[[], int] | None = None
    file: Path | None = None
    streams: bool = True
    part: bool = False


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows of a stream that are tokenised as one set. name: of the stream. part: see Source."""

    name: str
    rows: Sequence[Row]
    part: bool = True


def open_sources(source: Any, streaming: bool = False) -> list[Source]:
    """Finds the data behind `source`, and reads nothing yet.

    Args:
        source: a file (.jsonl, .json, .parquet, .csv), a folder of such files, a folder written by
            `datasets.save_to_disk`, a data set's name (`name`, `name:config` or `name:config:split`; the split is
            `train` unless said), a list of any of these, a `datasets.Dataset` or IterableDataset, a list of dicts, or
            a Window.
        streaming: a data set that is named is not downloaded but read as it is needed, and an IterableDataset gives one
            source for each of its shards.

    Raises:
        ValueError: there is no such file or data set, or it is of no known kind.
    """
    if isinstance(source, Window):
        files = itertools.groupby(source.rows, key=lambda row: row.file)
        return [_window_source(source, list(rows)) for _, rows in files] or [_window_source(source, [])]
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if path.is_file():
            return [_file_source(path)]
        if path.is_dir():
            return _dataset_sources(_load_from_disk(path), str(source), streaming) if _is_saved(path) else _folder(path)
        if path.suffix.lower() in SUFFIXES or str(source).startswith((".", "/", "~")):
            raise ValueError(f"no such data file or folder: {source}")
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
    """The rows of all sources, in order.

    Args:
        sources: from `open_sources`.
        format: a form of `formats.FORMATS`; "auto" decides for each source by the columns of the first row whose
            columns it knows; the rows before that one are bad.
        max_rows: stop after so many rows in all.

    Raises:
        ValueError: an option is wrong, or a file cannot be read at all.
    """
    if format not in FORMATS:
        raise ValueError(f"data.format must be one of {', '.join(FORMATS)}, got {format!r}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"data.max_rows must be at least 1, got {max_rows}")
    rows = itertools.chain.from_iterable(_with_format(source.read(0), format) for source in sources)
    return itertools.islice(rows, max_rows)


def _window_source(window: Window, rows: list[Row]) -> Source:
    return Source(window.name, lambda after: iter(rows), part=window.part)


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
    files = sorted(
        file
        for file in folder.rglob("*")
        if (file.suffix.lower() in SUFFIXES or _COMPRESSED.search(file.name))
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)  # a notebook's checkpoints, ...
    )
    if not files:
        raise ValueError(f"the folder {folder} holds no data file ({', '.join(SUFFIXES)})")
    words = [(file, set(re.split(r"[^a-z]+", str(file.relative_to(folder)).lower()))) for file in files]
    trained, held_out = (next((file for file, parts in words if parts & names), None) for names in _SPLITS)
    if trained and held_out:
        raise ValueError(
            f"the folder {folder} holds files of several splits, such as {trained.relative_to(folder)} and "
            f"{held_out.relative_to(folder)}: name one file, or a folder with those of one split"
        )
    return [_file_source(file) for file in files]


def _file_source(file: Path) -> Source:
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
    """Name and content: the name stands in every message about a row, so it belongs to what is cached."""
    with open(file, "rb") as stream:
        return f"{file} {hashlib.file_digest(stream, 'blake2b').hexdigest()}"


def _file_count(file: Path) -> int:
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        try:
            return parquet.read_metadata(file).num_rows
        except Exception:  # which reading it will tell
            return 0
    with open(file, "rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))


def _dataset_sources(dataset: Any, name: str, streaming: bool) -> list[Source]:
    shards = dataset.num_shards if streaming and not hasattr(dataset, "__len__") else 1
    if shards > 1:
        parts = (dataset.shard(num_shards=shards, index=index) for index in range(shards))
        return [one for index, part in enumerate(parts) for one in _dataset_sources(part, f"{name}[{index}]", False)]
    # `datasets` keeps a fingerprint of everything that made a data set.
    fingerprint = getattr(dataset, "_fingerprint", None)
    source = Source(
        name,
        lambda after: read_dataset(dataset, name, after),
        (lambda: f"{name} {fingerprint}") if fingerprint else None,
        (lambda: len(dataset)) if hasattr(dataset, "__len__") else None,
    )
    return [source]


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _load_from_disk(folder: Path) -> object:
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
    from datasets import load_dataset

    path, config, split = [*name.split(":"), "", ""][:3]
    try:
        return load_dataset(path, config or None, split=split or "train", streaming=streaming)
    except Exception as error:  # the hub's client raises many kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name!r} is no file or folder, and as a data set it cannot be loaded: {reason}") from None
