"""Readers of rows: one for each kind of file, for `datasets` and for lists.

Each yields in order the rows numbered above `after`, from 1, and skips the others cheaply; an array in a .json file is
always read whole. A row that cannot be read, or is too large or nested too deeply, is yielded as a bad row. Where
nothing can be read after an error readers raise ValueError, only `read_json` yields a last bad row. A missing file
raises OSError.
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
MAX_FILES_SIZE = 512 * 2**20  # the most bytes of a row's pictures
_BATCH_SIZE = 64 * 2**20  # bytes of a Parquet file's rows that are read at a time
MAX_DEPTH = 100  # the most objects and lists inside each other
MAX_EXPANSION = 1000  # the most characters of all rows of a Parquet file, as a multiple of its size in bytes

type _Decoder = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row as it was read: with its columns, or with the reason why it cannot be used."""

    file: str
    number: int
    """The line where it begins (JSONL, JSON, CSV) or its number (others), from 1."""
    value: Mapping[str, Any] | None
    """Columns by name; None for a bad row."""
    format: str = ""
    """Of `formats.FORMATS` without "auto"; "" until `read_rows` sets it, and for a bad row."""
    error: str = ""
    """Why a row without `value` cannot be used."""
    size: int = 0
    """Roughly its characters, which limit chunks and windows; 0 if not decoded."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


def _object(file: str, number: int, value: object) -> Row:
    if not isinstance(value, Mapping):
        return Row(file, number, None, error=f"not an object with columns but {type(value).__name__}")
    size, error = _measure(value)
    return Row(file, number, None if error else value, error=error, size=size)


def _table_row(file: str, number: int, value: Mapping[str, Any]) -> Row:
    """The Row of a table, without nested keys whose value is None, as in TRL."""
    row = _object(file, number, value)
    if row.value is None:
        return row
    return dataclasses.replace(row, value={name: _without_none(cell) for name, cell in row.value.items()})


def _without_none(value: object) -> object:
    """A copy of a cell whose mappings lose keys with None, unless they were written so."""
    if isinstance(value, Mapping):
        written = isinstance(value, _Written)
        return {key: _without_none(element) for key, element in value.items() if written or element is not None}
    return [_without_none(element) for element in value] if isinstance(value, list | tuple) else value


class _Written(dict[str, object]):
    """An object of JSON or a map in a table: its keys are its own, not a column's."""


def _measure(value: Any) -> tuple[int, str]:
    """(Rough number of characters; why the row is too large or nested too deeply, or ""), level by level."""
    size, files, level = 0, 0, [value]
    for _ in range(MAX_DEPTH):
        inner: dict[int, Any] = {}
        for item in level:
            elements = [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            for element in elements:
                if isinstance(element, Mapping | list | tuple):
                    inner[id(element)] = element
                else:
                    files += len(element) if isinstance(element, bytes) else 0
                    size += len(element) if isinstance(element, str) else 8
        if size > MAX_ROW_SIZE:
            return size, _too_long("characters")
        if files > MAX_FILES_SIZE:
            return size, f"more than {MAX_FILES_SIZE:,} bytes of pictures; divide it into several rows"
        if not inner:
            return size + files, ""
        level = list(inner.values())
    return size, f"nested deeper than {MAX_DEPTH} levels"


def _too_long(unit: str) -> str:
    return f"more than {MAX_ROW_SIZE:,} {unit}, the most that one row may have; divide it into several rows"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object's pairs. Raises ValueError for a repeated key, of which json would keep the last."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return result


_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys)


def read_jsonl(file: Path, after: int) -> Iterator[Row]:
    """Rows of a .jsonl file; empty lines are skipped."""
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
    """Lines with their breaks; None for one over MAX_ROW_SIZE, which is never in memory as a whole."""
    while line := stream.readline(MAX_ROW_SIZE + 1):
        if len(line) <= MAX_ROW_SIZE:
            yield line
            continue
        while len(line) > MAX_ROW_SIZE:  # skip the rest of the line
            line = stream.readline(MAX_ROW_SIZE + 1)
        yield None


def is_array(file: Path) -> bool:
    """Whether a .json file is one array, which cannot be streamed: its first character but white space, within 4 KiB,
    is "[".
    """
    with open(file, "rb") as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def read_json(file: Path, after: int) -> Iterator[Row]:
    """Rows of a .json file: an array, read from its beginning whatever `after` is and numbered by lines, or an object a
    line. Invalid JSON in an array gives a bad row, the last one.
    """
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
    position, line, counted_to = text.index("[") + 1, 1, 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        line, counted_to = line + text.count("\n", counted_to, position), position
        if position < len(text) and text[position] == "]":
            if text[position + 1 :].strip():
                yield Row(str(file), line, None, error="bad JSON, something follows the array's end; write one array")
            return
        try:
            value, position = _JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"nested deeper than {MAX_DEPTH} levels"
            yield Row(str(file), line, None, error=f"bad JSON, the array cannot be read further: {reason}")
            return
        yield _object(str(file), line, value)


def read_csv(file: Path, after: int) -> Iterator[Row]:
    """Rows of a CSV file with a header; all values are text. Raises ValueError for a repeated column, or a header that
    shows another separator.
    """
    return (row for row in _csv_rows(file) if row.number > after)


def _csv_rows(file: Path) -> Iterator[Row]:
    """Widens csv.field_size_limit of the process."""

    def lines(stream: IO[str]) -> Generator[str]:
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
                if len(columns) == 1 and (
                    mark := next((separator for separator in ";\t|" if separator in columns[0]), None)
                ):
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
    """Rows of a Parquet file; skipped groups are not read. Raises ValueError, maybe after some rows, if it is damaged
    or expands beyond MAX_EXPANSION times its size and 32 MiB.
    """
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
                fitting = _BATCH_SIZE * group.num_rows // max(group.total_byte_size, 1)
                for batch in table.iter_batches(min(max(fitting, 1), 1024), row_groups=[index]):
                    decoders = {field.name: _decoder(field.type) for field in batch.schema}
                    for batch_index in range(batch.num_rows):
                        number += 1
                        if number <= after:
                            continue
                        row = _parquet_row(file, number, batch, batch_index, decoders)
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


def _parquet_row(file: Path, number: int, batch: Any, index: int, decoders: Mapping[str, _Decoder]) -> Row:
    try:
        cells = {name: batch[name][index].as_py() for name in batch.schema.names}
        return _table_row(str(file), number, {name: decoders[name](cell) for name, cell in cells.items()})
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a date that Python cannot represent
        return Row(str(file), number, None, error=f"cannot be read: {error}")


def _decoder(kind: Any) -> _Decoder:
    """Makes objects of the maps and JSON in an Arrow type's cells, which pyarrow gives as pairs and text."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        decode = json.JSONDecoder(object_pairs_hook=lambda pairs: _Written(_unique_keys(pairs))).decode
        return lambda cell: decode(cell) if isinstance(cell, str) else cell
    if types.is_map(kind):
        inner = _decoder(kind.item_type)
        return lambda cell: _Written((key, inner(element)) for key, element in cell) if isinstance(cell, list) else cell
    if types.is_struct(kind):
        fields = {kind.field(index).name: _decoder(kind.field(index).type) for index in range(kind.num_fields)}
        if all(decoder is _as_it_is for decoder in fields.values()):
            return _as_it_is
        return lambda cell: (
            {key: fields[key](element) for key, element in cell.items()} if isinstance(cell, Mapping) else cell
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        if inner is _as_it_is:
            return _as_it_is
        return lambda cell: [inner(element) for element in cell] if isinstance(cell, list) else cell
    return _as_it_is


def _as_it_is(cell: object) -> object:
    return cell


def read_list(values: Sequence[object], after: int) -> Iterator[Row]:
    return (_object("rows", number, value) for number, value in enumerate(values[after:], start=after + 1))


def undecoded(dataset: Any) -> Any:
    """The data set with pictures as files, so that a broken one makes its own row a bad one."""
    kinds = [
        kind for feature in (getattr(dataset, "features", None) or {}).values() for kind in _decoded_kinds(feature)
    ]
    if "Image" not in kinds:
        return dataset
    if hasattr(dataset, "decode"):  # a stream
        return dataset.decode(False)
    for name, feature in dataset.features.items():
        if type(feature).__name__ == "Image":
            dataset = dataset.cast_column(name, dataclasses.replace(feature, decode=False))
    nested = {kind for feature in dataset.features.values() for kind in _decoded_kinds(feature)}
    return dataset.with_format("arrow") if nested == {"Image"} and dataset.format["type"] is None else dataset


def _decoded_kinds(feature: object) -> Iterator[str]:
    """Names of what `datasets` decodes in a column."""
    if isinstance(feature, Mapping | list | tuple):
        for inner in feature.values() if isinstance(feature, Mapping) else feature:
            yield from _decoded_kinds(inner)
    elif hasattr(feature, "decode_example"):
        if getattr(feature, "decode", True):
            yield type(feature).__name__
    elif (inner := getattr(feature, "feature", None)) is not None:
        yield from _decoded_kinds(inner)


def read_dataset(dataset: Any, name: str, after: int) -> Iterator[Row]:
    """Rows of a `datasets` object. Raises ValueError for one that cannot be decoded, as the iterator then ends.
    dataset: map-style or iterable, as `undecoded` gives it. name: for messages. after: rows up to this number are
    skipped.
    """
    if hasattr(dataset, "__len__"):
        rows = iter(dataset.skip(after) if after else dataset)
    else:  # what `skip` makes of a stream begins with the first pass, and shuffles no shards in later ones
        rows = itertools.islice(iter(dataset), after, None)
    for number in itertools.count(after + 1):
        try:
            value = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the decoder of each kind of column raises errors of its own
            raise ValueError(
                f"{name}: row {number} cannot be read: {type(error).__name__}: {printable(error)}"
            ) from error
        yield _table_row(name, number, value.to_pylist()[0] if hasattr(value, "to_pylist") else value)
