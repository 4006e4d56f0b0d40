"""Readers of rows: one for each kind of file (`read_jsonl`, `read_json`, `read_csv`, `read_parquet`), one for
`datasets` (`read_dataset`) and one for lists (`read_list`). `reading.open_sources` chooses them. `is_array` says
whether a .json file is one array or has an object a line.

Each reader yields in order the rows whose number is above `after` and skips the others as cheaply as the file format
allows. Numbers count from 1, so 0 yields all; only a stream that continues from a checkpoint gives another `after`. Of
an array in a .json file all rows are yielded, whatever `after` is.

A row that cannot be read, that has more than MAX_ROW_SIZE bytes or characters, or that is nested deeper than MAX_DEPTH
(`_measure`, `_too_long`), is a bad row: it is yielded as a `Row` with the reason instead of its columns. Where nothing
can be read after an error, readers raise ValueError: read_dataset for a row that cannot be decoded, read_csv for a
wrong header, and read_parquet for a damaged file or one that expands too much (MAX_EXPANSION). Only read_json yields a
bad row then, the last one, for an array that is not valid. A file that is not there raises OSError.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxtune.system.terminal import printable

MAX_ROW_SIZE = 32 * 2**20  # the most bytes of a line and characters of a row: about eight million tokens
MAX_DEPTH = 100  # the most objects and lists inside each other
MAX_EXPANSION = 1000  # the most characters of all rows of a Parquet file, as a multiple of its size in bytes

type _Decoder = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row as it was read: a good one with its columns, or a bad one with the reason why it cannot be used. The
    readers make it, for rows to train and evaluate on as well as for prompts and a teacher's log-probabilities."""

    file: str
    """The file or data set that it comes from."""
    number: int
    """The line in the file on which it begins (JSONL, JSON, CSV) or its number (Parquet, datasets, lists), from 1."""
    value: Mapping[str, Any] | None
    """Its columns by name; None if it is a bad row."""
    format: str = ""
    """Its row format, one of `formats.FORMATS` without "auto", such as "alpaca"; "" until `reading.read_rows` sets it,
    and for a bad row."""
    error: str = ""
    """Why it cannot be used (it cannot be read, fits no format or lacks a column), if `value` is None."""
    size: int = 0
    """Roughly how many characters it has, by which chunks of rows and windows of streams are limited; 0 if it was not
    decoded."""

    @property
    def place(self) -> str:
        """`file:number`, for messages. The objective reward, which reads the rows again for their margins, also finds
        the row of each pair by it."""
        return f"{self.file}:{self.number}"


def _object(file: str, number: int, value: object) -> Row:
    """The `Row` of a decoded value, as row `number` of `file`: a bad one (without the value, with the reason) if the
    value is not a mapping, is too large, or is nested too deeply. Readers make every row that they could decode by
    it."""
    if not isinstance(value, Mapping):
        return Row(file, number, None, error=f"not an object with columns but {type(value).__name__}")
    size, error = _measure(value)
    return Row(file, number, None if error else value, error=error, size=size)


def _table_row(file: str, number: int, value: Mapping[str, Any]) -> Row:
    """The `Row` number `number` of a table `file` (Parquet, datasets) with the columns `value`, without the keys of
    nested objects whose value is None. `read_dataset` and `_parquet_row` make rows by it. It is a bad row (without
    columns, with the reason) if it is too large or too deeply nested with those keys, which are removed afterwards.

    In a table, all objects of a column have the same keys: an object has None for keys that only other objects have,
    such as arguments of calls of other tools. As in TRL, these keys are not rendered.
    """
    row = _object(file, number, value)
    if row.value is None:
        return row
    return dataclasses.replace(row, value={name: _without_none(cell) for name, cell in row.value.items()})


def _without_none(value: object) -> object:
    """A copy of a cell of a table, in which mappings lose the keys whose value is None, unless they were written so."""
    if isinstance(value, Mapping):
        written = isinstance(value, _Written)
        return {key: _without_none(part) for key, part in value.items() if written or part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list | tuple) else value


class _Written(dict[str, object]):
    """An object of JSON or a map in a table: its keys are its own, and not those of a column."""


def _measure(value: Any) -> tuple[int, str]:
    """Returns (roughly how many characters a row has, why it is too large or too deeply nested, or ""). value: the
    row's columns, a mapping of any nested values; names count too, and a value that is neither text nor bytes counts as
    8 characters. `_object` refuses rows by it.

    It is walked level by level and not recursively, so that deep nesting cannot overflow the stack, and a list that
    contains itself is refused as nested too deeply.
    """
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
    """The reason why a row is too large, with the limit, for the message about a bad row. unit: the unit in which the
    row was measured, "bytes" or "characters"."""
    return f"more than {MAX_ROW_SIZE:,} {unit}, the most that one row may have; divide it into several rows"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object's (key, value) pairs, an `object_pairs_hook` of json. Raises ValueError if a key occurs
    twice, because json would silently keep only the last; the row becomes a bad one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys)


def read_jsonl(file: Path, after: int) -> Iterator[Row]:
    """Yields the rows of a file with one JSON object a line (.jsonl) whose line number is above `after`; 0 yields all.
    Empty lines are skipped; a line that cannot be read, or is longer than `MAX_ROW_SIZE` bytes, gives a bad row.
    `read_json` calls it for a .json file with one object a line. Raises OSError if the file cannot be opened."""
    with open(file, "rb") as stream:
        for number, line in enumerate(_lines(stream), start=1):
            if number <= after:
                continue
            if line is None:
                yield Row(str(file), number, None, error=_too_long("bytes"))
                continue
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark, on any line, as concatenated files have it
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
    """Yields the lines of an open file (`stream`, of bytes or text), each with its line break, or None for a line of
    more than `MAX_ROW_SIZE` (32 Mi) bytes or characters, which is never in memory as a whole. The readers of JSONL and
    CSV make a bad row of None."""
    while line := stream.readline(MAX_ROW_SIZE + 1):
        if len(line) <= MAX_ROW_SIZE:
            yield line
            continue
        while len(line) > MAX_ROW_SIZE:  # skip the rest of the line
            line = stream.readline(MAX_ROW_SIZE + 1)
        yield None


def is_array(file: Path) -> bool:
    """Whether a .json file is one array of objects, which must be read as a whole, and not one object a line: whether
    its first character that is no white space, within 4 KiB, is "[". `read_json` chooses by it how to read, and
    `reading.py` notes by it that the file cannot be streamed."""
    with open(file, "rb") as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def read_json(file: Path, after: int) -> Iterator[Row]:
    """Yields the rows of a .json file, for `Source.read`: an array of objects, which is read into memory as a whole and
    always from its beginning (`after` is ignored), or one object a line. In an array, a row's number is the line on
    which it begins. Invalid JSON in an array, or text after it, gives a bad row, after which nothing is read; a file
    with an array that is not UTF-8 gives only a bad row."""
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
    """Yields, for `Source.read`, the rows of a CSV file with a header: those whose number, the line on which they
    begin, is above `after`. All values are text. A line that cannot be read, or has another number of fields than the
    header, gives a bad row. Raises ValueError if the header names a column twice, or is a single column that shows
    another separator than commas."""
    return (row for row in _csv_rows(file) if row.number > after)


def _csv_rows(file: Path) -> Iterator[Row]:
    """Yields all rows of the CSV file `file`, whose first line has the names of the columns, for `read_csv`, which
    leaves out those that are not wanted. A line that cannot be read gives a bad row; a wrong header raises
    ValueError. It raises the limit of a field's size of all CSV readers of this process (csv.field_size_limit)."""

    def lines(stream: IO[str]) -> Generator[str]:
        """Yields the lines of `stream` for the CSV reader; raises csv.Error at one that is too long, and then ends."""
        for line in _lines(stream):
            if line is None:
                raise csv.Error(_too_long("characters"))
            yield line

    # The limit is for all readers of this process; its default is 131,072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_SIZE))
    # Bytes that are not UTF-8 become lone surrogates, so that only the row that has them is bad.
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
                if columns is None:
                    raise ValueError(f"{file}: its header, line {number}, is bad CSV: {error}") from None
                yield Row(str(file), number, None, error=f"bad CSV: {error}")
                if inspect.getgeneratorstate(source) == inspect.GEN_CLOSED:  # continue after a line that is too long
                    before, source = before + reader.line_num + 1, lines(stream)
                    reader = csv.reader(source, strict=True)
                continue
            if columns is None:
                columns = values
                if len(columns) == 1 and (mark := next((one for one in ";\t|" if one in columns[0]), None)):
                    kind = {";": "semicolons", "\t": "tabs", "|": "bars"}[mark]
                    raise ValueError(
                        f"{file}: its header is the one column {columns[0]!r}: the file is separated by {kind}; write "
                        "it with commas, or as JSONL"
                    )
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
    """Yields, for `Source.read`, the rows of a Parquet file whose number (from 1) is above `after`; groups of rows
    before it are not read. Raises ValueError, also after some rows, if the file is damaged, or expands to more than
    1,000 times its size (`MAX_EXPANSION`) and more than 32 MiB. A single row that cannot be decoded gives a bad row."""
    import pyarrow.parquet as parquet

    weight = file.stat().st_size
    allowed = max(MAX_ROW_SIZE, MAX_EXPANSION * weight)
    refusal = ValueError(
        f"{file}: its {weight:,} bytes expand to rows of more than {allowed:,}, which is not read. If its rows are "
        "truly that repetitive, write them as JSONL"
    )
    number = read = 0
    try:
        metadata = parquet.read_metadata(file)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        # Run-length encoding can declare a billion values in a few bytes; each takes a pointer or a number in memory.
        if sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks) > allowed:
            raise refusal
        texts = list({chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"})
        # Read as dictionaries, a text that many rows share is in memory once; rows are converted one at a time.
        with parquet.ParquetFile(file, read_dictionary=texts, page_checksum_verification=True) as table:
            for index, group in enumerate(groups):
                until = number + group.num_rows
                if until <= after:
                    number = until
                    continue
                # Row groups are read one by one, because Arrow cannot join the dictionaries of two groups for texts in
                # lists.
                for batch in table.iter_batches(batch_size=1024, row_groups=[index]):
                    decoders = {field.name: _decoder(field.type) for field in batch.schema}
                    for place in range(batch.num_rows):
                        number += 1
                        if number <= after:
                            continue
                        row = _parquet_row(file, number, batch, place, decoders)
                        read += row.size
                        if read > allowed:
                            raise refusal
                        yield row
                if number != until:
                    raise ValueError(f"its group {index} of rows ends {until - number} rows early")
    except Exception as error:  # a damaged file can raise many kinds of errors
        if error is refusal:
            raise
        where = f" after row {number:,}" if number else ""
        reason = printable(error).strip() or type(error).__name__
        raise ValueError(f"{file}: not a readable Parquet file{where}: {reason}; fetch or write it again") from None


def _parquet_row(file: Path, number: int, batch: Any, place: int, decoders: Mapping[str, _Decoder]) -> Row:
    """Row number `number` of a Parquet file, from the row at index `place` of a RecordBatch; a bad row if it cannot be
    decoded."""
    try:
        cells = {name: batch[name][place].as_py() for name in batch.schema.names}
        return _table_row(str(file), number, {name: decoders[name](cell) for name, cell in cells.items()})
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a date that Python cannot represent
        return Row(str(file), number, None, error=f"cannot be read: {error}")


def _decoder(kind: Any) -> _Decoder:
    """What makes objects of the maps and JSON in the cells of an Arrow type, which pyarrow gives as pairs and text."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        decode = json.JSONDecoder(object_pairs_hook=lambda pairs: _Written(_unique_keys(pairs))).decode
        return lambda cell: decode(cell) if isinstance(cell, str) else cell
    if types.is_map(kind):
        inner = _decoder(kind.item_type)
        return lambda cell: _Written((key, inner(part)) for key, part in cell) if isinstance(cell, list) else cell
    if types.is_struct(kind):
        fields = {kind.field(index).name: _decoder(kind.field(index).type) for index in range(kind.num_fields)}
        if all(decoder is _as_it_is for decoder in fields.values()):
            return _as_it_is
        return lambda cell: (
            {key: fields[key](part) for key, part in cell.items()} if isinstance(cell, Mapping) else cell
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        if inner is _as_it_is:
            return _as_it_is
        return lambda cell: [inner(part) for part in cell] if isinstance(cell, list) else cell
    return _as_it_is


def _as_it_is(cell: object) -> object:
    return cell


def read_list(values: Sequence[object], after: int) -> Iterator[Row]:
    """Yields the rows of `values`, a list of dicts, whose number (from 1) is above `after`; their file is called
    "rows". `open_sources` takes it for rows that a script passes as a list. A value that is no dict gives a bad row."""
    return (_object("rows", number, value) for number, value in enumerate(values[after:], start=after + 1))


def read_dataset(dataset: Any, name: str, after: int) -> Iterator[Row]:
    """Yields the rows of `dataset`, a Dataset or IterableDataset of the library `datasets`, whose number (from 1) is
    above `after`: one of the hub, one that `save_to_disk` wrote, or one that a script passes. name: its name in
    messages. Raises ValueError if a row cannot be decoded, since the iterator cannot continue after that."""
    rows = iter(dataset.skip(after) if after else dataset)
    for number in itertools.count(after + 1):
        try:
            value = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the decoder of each kind of column raises errors of its own
            raise ValueError(
                f"{name}: row {number} cannot be read: {type(error).__name__}: {printable(error)}"
            ) from error
        yield _table_row(name, number, value)
