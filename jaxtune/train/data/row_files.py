"""Readers of rows, one for each kind of file and for data sets in memory.

Each yields the rows whose number is above `after`, in order, and passes over the others as cheaply as the format
allows. A row that cannot be read is yielded too, with the reason.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import itertools
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxtune.system.terminal import printable

MAX_ROW_SIZE = 32 * 2**20  # bytes of a line, characters of a row: about eight million tokens
MAX_DEPTH = 100  # objects and lists inside each other
MAX_EXPANSION = 1000  # what rows may hold over what their Parquet file weighs


@dataclasses.dataclass(frozen=True)
class Row:
    """One row as read: `value` is its columns, or None with the reason in `error`.

    number: the line in the file (JSONL, JSON, CSV) or the row (Parquet, datasets, lists), from 1.
    format: the form of its file, a key of `formats.COLUMNS`. size: about how many characters it holds.
    """

    file: str
    number: int
    value: Mapping[str, Any] | None
    format: str = ""
    error: str = ""
    size: int = 0

    @property
    def place(self) -> str:
        """`file:number`, for messages."""
        return f"{self.file}:{self.number}"


def _object(file: str, number: int, value: object) -> Row:
    if not isinstance(value, Mapping):
        return Row(file, number, None, error=f"not an object with columns but {type(value).__name__}")
    size, error = _measure(value)
    return Row(file, number, None if error else value, error=error, size=size)


def _table_row(file: str, number: int, value: Mapping[str, Any]) -> Row:
    """A row of a table, in which objects of one column have all of its keys: None where they had none, as the arguments
    of calls of different tools and the parameters of their schemas. What no object said is not rendered, as in TRL."""
    row = _object(file, number, value)
    if row.value is None:
        return row
    return dataclasses.replace(row, value={name: _said(cell) for name, cell in row.value.items()})


def _said(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _said(part) for key, part in value.items() if part is not None}
    return [_said(part) for part in value] if isinstance(value, list | tuple) else value


def _measure(value: Any) -> tuple[int, str]:
    """(about how many characters, what is too much of a row or ""). Level by level: no stack of ours overflows, and
    a list that holds itself is only too deep."""
    size, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: dict[int, Any] = {}
        for item in level:
            parts = [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            for part in parts:
                if isinstance(part, Mapping | list | tuple):
                    inner[id(part)] = part
                else:
                    size += len(part) if isinstance(part, str | bytes) else 8
        if size > MAX_ROW_SIZE:
            return size, _too_long("characters")
        if not inner:
            return size, ""
        level = list(inner.values())
    return size, f"nested deeper than {MAX_DEPTH} levels"


def _too_long(unit: str) -> str:
    return f"more than {MAX_ROW_SIZE:,} {unit}, the most that one row may have; divide it into several rows"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once)


def read_jsonl(file: Path, after: int) -> Iterator[Row]:
    with open(file, "rb") as stream:
        for number, line in enumerate(_lines(stream), start=1):
            if number <= after:
                continue
            if line is None:
                yield Row(str(file), number, None, error=_too_long("bytes"))
                continue
            line = line.removeprefix(b"\xef\xbb\xbf")  # of files that were joined, in the middle too
            if not line.strip():
                continue
            try:
                yield _object(str(file), number, _JSON.decode(line.decode("utf-8")))
            except UnicodeDecodeError as error:
                yield Row(str(file), number, None, error=f"not UTF-8 (byte {error.start} of the line)")
            except ValueError as error:
                yield Row(str(file), number, None, error=f"bad JSON: {error}")
            except RecursionError:
                yield Row(str(file), number, None, error=f"bad JSON: nested deeper than {MAX_DEPTH} levels")


def _lines[AnyStr: (bytes, str)](stream: IO[AnyStr]) -> Iterator[AnyStr | None]:
    """The lines of a file; None for one that is longer than `MAX_ROW_SIZE`, of which no more is ever held."""
    while line := stream.readline(MAX_ROW_SIZE + 1):
        if len(line) <= MAX_ROW_SIZE:
            yield line
            continue
        while len(line) > MAX_ROW_SIZE:  # what readline stopped in the middle of
            line = stream.readline(MAX_ROW_SIZE + 1)
        yield None


def is_array(file: Path) -> bool:
    with open(file, "rb") as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def read_json(file: Path, after: int) -> Iterator[Row]:
    """A JSON array of objects, which is read whole and from its beginning, or lines of objects under the suffix
    .json."""
    if not is_array(file):
        yield from read_jsonl(file, after)
        return
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield Row(str(file), line, None, error="not UTF-8; a JSON array with such bytes cannot be read further")
        return
    del data
    at, line, counted = text.index("[") + 1, 1, 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        if at < len(text) and text[at] == "]":
            if text[at + 1 :].strip():
                yield Row(str(file), line, None, error="bad JSON, something follows the array's end; write one array")
            return
        try:
            value, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"nested deeper than {MAX_DEPTH} levels"
            yield Row(str(file), line, None, error=f"bad JSON, the array cannot be read further: {reason}")
            return
        yield _object(str(file), line, value)


def read_csv(file: Path, after: int) -> Iterator[Row]:
    return (row for row in _csv_rows(file) if row.number > after)


def _csv_rows(file: Path) -> Iterator[Row]:
    def lines(stream: IO[str]) -> Generator[str]:
        for line in _lines(stream):
            if line is None:
                raise csv.Error(_too_long("characters"))
            yield line

    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_SIZE))  # of the module; its own is 131,072 characters
    # Bytes that are not UTF-8 become lone surrogates, so that only their row is lost.
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        source = lines(stream)
        reader = csv.reader(source, strict=True)
        columns: list[str] | None = None
        before = 0
        while True:
            number = before + reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Row(str(file), number, None, error=f"bad CSV: {error}")
                if inspect.getgeneratorstate(source) == inspect.GEN_CLOSED:  # go on after a line that is too long
                    before, source = number, lines(stream)
                    reader = csv.reader(source, strict=True)
                continue
            if columns is None:
                columns = values
                if twice := [name for name in columns if name and columns.count(name) > 1]:
                    raise ValueError(f"{file}: its header names the column {twice[0]!r} more than once; rename one")
            elif not values:
                continue
            elif len(values) != len(columns):
                yield Row(str(file), number, None, error=f"{len(values)} fields, the header has {len(columns)}")
            elif any("\udc80" <= char <= "\udcff" for value in values if not value.isascii() for char in value):
                yield Row(str(file), number, None, error="not UTF-8")
            else:
                yield _object(str(file), number, dict(zip(columns, values, strict=True)))


def read_parquet(file: Path, after: int) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    weight = file.stat().st_size
    allowed = max(MAX_ROW_SIZE, MAX_EXPANSION * weight)
    refusal = ValueError(
        f"{file}: its {weight:,} bytes hold rows of more than {allowed:,}; a file that expands so far is not read. If "
        "its rows are truly so much alike, write them as JSONL"
    )
    number = read = 0
    try:
        metadata = parquet.read_metadata(file)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        # Run lengths can claim a thousand million values in a few bytes; each takes a pointer or a number in memory.
        if sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks) > allowed:
            raise refusal
        texts = list({chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"})
        # As dictionaries, texts that many rows share are in memory once; each row is made by itself.
        with parquet.ParquetFile(file, read_dictionary=texts, page_checksum_verification=True) as table:
            for index, group in enumerate(groups):
                until = number + group.num_rows
                if until <= after:
                    number = until
                    continue
                # One group of rows after the other: of texts in lists, Arrow cannot join the dictionaries of two.
                for batch in table.iter_batches(batch_size=1024, row_groups=[index]):
                    for place in range(batch.num_rows):
                        number += 1
                        if number <= after:
                            continue
                        row = _parquet_row(file, number, batch, place)
                        read += row.size
                        if read > allowed:
                            raise refusal
                        yield row
                if number != until:
                    raise ValueError(f"its group {index} of rows ends {until - number} rows early")
    except Exception as error:  # of many kinds, where a bit of the file is another
        if error is refusal:
            raise
        where = f" after row {number:,}" if number else ""
        reason = printable(error).strip() or type(error).__name__
        raise ValueError(f"{file}: not a readable Parquet file{where}: {reason}; fetch or write it again") from None


def _parquet_row(file: Path, number: int, batch: Any, place: int) -> Row:
    try:
        return _table_row(str(file), number, {name: batch[name][place].as_py() for name in batch.schema.names})
    except (ValueError, OverflowError) as error:  # not UTF-8, or a date that Python does not know
        return Row(str(file), number, None, error=f"cannot be read: {error}")


def read_list(values: Sequence[object], after: int) -> Iterator[Row]:
    return (_object("rows", number, value) for number, value in enumerate(values[after:], start=after + 1))


def read_dataset(dataset: Any, name: str, after: int) -> Iterator[Row]:
    rows = iter(dataset.skip(after) if after else dataset)
    for number in itertools.count(after + 1):
        try:
            value = next(rows)
        except StopIteration:
            return
        except Exception as error:  # each kind of column has a decoder of its own, with errors of its own
            raise ValueError(
                f"{name}: row {number} cannot be read: {type(error).__name__}: {printable(error)}"
            ) from error
        yield _table_row(name, number, value)
