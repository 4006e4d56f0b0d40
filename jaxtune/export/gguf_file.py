"""Writes GGUF files one tensor at a time, and reads them back to verify them."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.export import gguf_blocks
from jaxtune.export.gguf_tensors import Source, Tensor, all_tensors
from jaxtune.export.gguf_types import stored_types
from jaxtune.models.files import byte_files
from jaxtune.system import terminal
from jaxtune.system.extras import install
from jaxtune.system.files import writing

_ALIGNMENT = 32  # a tensor begins at a multiple of this, in bytes
_FETCHED_AHEAD = 3  # runs that are copied to the host while the device makes and encodes the next


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as it was written."""

    shape: tuple[int, ...]  # in numpy's order; the file lists the dimensions in reverse
    kind: str  # gguf's name of the type
    offset: int  # position of its first byte, in bytes from the beginning of the file
    # checksums of its bytes, one for each run of bytes that was written at once, in order
    sums: tuple[byte_files.Sums, ...]


def require_gguf() -> None:
    """Raises ValueError, which says what to install, if the gguf package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError(f"gguf: the gguf package is missing: {install('gguf')}") from None


def size_bytes(tensors: Sequence[Tensor], kinds: Mapping[str, str]) -> int:
    """An upper bound of the tensors' bytes in a file. kinds: {tensor: gguf's name of its type}."""
    return sum(_tensor_bytes(tensor, kinds[tensor.name]) + _ALIGNMENT for tensor in tensors)


def _tensor_bytes(tensor: Tensor, kind: str) -> int:
    """Without padding; rows must be whole blocks of `kind`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(np.prod(tensor.shape, dtype=np.int64)) // block * size


def write(
    file: Path,
    architecture: str,
    fields: Mapping[str, Any],
    sources: Sequence[Source],
    outtype: str,
    ready: Callable[[str], object] = lambda _: None,
) -> dict[str, Stored]:
    """Writes a GGUF file: {tensor: what was written}. The device has what one Source makes and a few encoded runs.

      file: new, or replaced.
      architecture: gguf's name of it. outtype: the file's type; single tensors may differ (stored_types).
      fields: metadata; an int becomes uint32, a float float32, a list an array, whose ints are int32.
      sources: in the order of the file.
      ready: called with each tensor's name before it is made; may wait for its programs.

    Raises ArithmeticError for a value that is not finite or not represented, another shape than planned, or a wrong
    merge; ValueError for one that left QAT's grid; OSError for a full disk.
    """
    tensors = all_tensors(sources)
    kinds = stored_types(tensors, outtype, architecture, fields)
    total = size_bytes(tensors, kinds)
    header = _header(file, architecture, fields, tensors, kinds)
    return _written(file, header, sources, kinds, total, ready)


def _written(
    file: Path,
    header: bytes,
    sources: Sequence[Source],
    kinds: Mapping[str, str],
    total: int,
    ready: Callable[[str], object],
) -> dict[str, Stored]:
    offsets: dict[str, int] = {}
    sums: dict[str, list[byte_files.Sums]] = {}
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()  # in the order of the file
    with (
        writing(file, total),
        terminal.progress(f"writing {file.name}", total) as advanced,
        byte_files.Writer(file, advanced) as out,
        ThreadPoolExecutor(_FETCHED_AHEAD, thread_name_prefix="jaxtune-fetch") as pool,
    ):

        def write_one() -> None:
            """Writes the run that has waited longest."""
            name, fetched = waiting.popleft()
            if name not in sums:
                _fill(out)
                offsets[name] = out.size_bytes
            sums.setdefault(name, []).append(out.append(fetched.result()))

        out.append(header)
        for source in sources:
            for tensor in source.tensors:
                ready(tensor.name)
            value = source.make()
            for tensor in source.tensors:
                array, kind = _planned(tensor, tensor.of(value)), kinds[tensor.name]
                grid = gguf_blocks.grid_of(tensor.grid, kind)
                for fetch in gguf_blocks.encode(tensor.weight or tensor.name, array, kind, grid):
                    waiting.append((tensor.name, pool.submit(fetch)))
                    if len(waiting) > _FETCHED_AHEAD:
                        write_one()
                del array
            del value
        while waiting:
            write_one()
        _fill(out)
    return {
        tensor.name: Stored(tensor.shape, kinds[tensor.name], offsets[tensor.name], tuple(sums[tensor.name]))
        for tensor in all_tensors(sources)
    }


def _planned(tensor: Tensor, array: Any) -> Any:
    """Raises ArithmeticError if the shape is not that of the header."""
    if tuple(array.shape) != tensor.shape:
        raise ArithmeticError(f"gguf: {tensor.name} is {list(array.shape)}, and was planned as {list(tensor.shape)}")
    return array


def _fill(out: byte_files.Writer) -> None:
    """Appends zeros up to the next tensor."""
    if short := -out.size_bytes % _ALIGNMENT:
        out.append(bytes(short))


def _header(
    file: Path, architecture: str, fields: Mapping[str, Any], tensors: Sequence[Tensor], kinds: Mapping[str, str]
) -> bytes:
    """The bytes before the tensors, without padding. gguf can only write to a file, so `file` is used and removed."""
    import gguf

    class Writer(gguf.GGUFWriter):
        """Packs a list at once; gguf does so one by one, 0.5 s for Llama 3's vocabulary."""

        def _pack_val(self, val, vtype, add_vtype, sub_type=None) -> bytes:
            kinds = set(map(type, val)) if isinstance(val, list) else set()
            if sub_type is not None or len(kinds) != 1 or not kinds <= {str, int, float}:
                return super()._pack_val(val, vtype, add_vtype, sub_type)
            head = struct.pack("<I", vtype) if add_vtype else b""
            return head + struct.pack("<IQ", gguf.GGUFValueType.get_type(val[0]), len(val)) + _packed(val)

    writer = Writer(file, architecture)
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[types[type(value)]])
    for tensor in tensors:
        number = gguf.GGMLQuantizationType[kinds[tensor.name]]
        size = _tensor_bytes(tensor, kinds[tensor.name])
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, number)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    header = file.read_bytes()
    file.unlink()
    return header


def _packed(values: list[str] | list[int] | list[float]) -> bytes:
    """A text follows its length, uint64; ints become int32, floats float32."""
    if isinstance(values[0], str):
        length = struct.Struct("<Q").pack
        return b"".join(
            chunk for value in values for text in [str(value).encode()] for chunk in (length(len(text)), text)
        )
    return np.array(values, "<i4" if isinstance(values[0], int) else "<f4").tobytes()


def verify(file: Path, architecture: str, fields: Mapping[str, Any], written: Mapping[str, Stored]) -> None:
    """Reads a file back with gguf's reader, and raises ArithmeticError unless keys, shapes, types, positions and every
    byte (by checksum) are those written.

      file: the GGUF file.
      architecture: gguf's name of it.
      fields: {key: value} of the metadata that was written.
      written: what `write` returned.
    """
    total = sum(sums.size_bytes for stored in written.values() for sums in stored.sums)
    try:
        with terminal.progress("reading it back", total) as advanced, ThreadPoolExecutor(1, "bytes") as pool:
            check = functools.partial(_has_bytes, file, advanced)
            reading = pool.submit(byte_files.all_of, check, list(written.values()))
            reader = _reader(file)
            read_fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            matches = dict(zip(written, reading.result(), strict=True))
    except Exception as error:  # a damaged file can make the reader fail in any way
        raise ArithmeticError(
            f"{file.name}: what was read back is not a GGUF file: {type(error).__name__}: {error}"
        ) from error
    expected = {"general.architecture": architecture, **fields}
    wrong = [
        key
        for key in sorted(expected.keys() | read_fields.keys())
        if not _same(expected.get(key), read_fields.get(key))
    ]
    wrong += [name for name in tensors if not (matches.get(name) and _is_described(tensors[name], written[name]))]
    wrong += sorted(written.keys() - tensors.keys())
    if wrong:
        suffix = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ArithmeticError(
            f"{file.name}: what was read back differs from what was written: {', '.join(wrong[:8])}{suffix}"
        )


def _reader(file: Path) -> Any:
    """gguf's reader, four times faster: Llama 3's lists take it 11 s as one array a token."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list[int], list]:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = GGUFValueType(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            if kind == GGUFValueType.STRING:
                values, end = _texts(memoryview(self._data), orig_offs + 12, count)
            else:
                values = [self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], count)]
                end = orig_offs + 12 + values[0].nbytes
            return end - orig_offs, values, list(range(len(values))), [GGUFValueType.ARRAY, kind]

    return Reader(file)


class _Text(bytes):
    """A text for gguf's reader, which wants arrays of bytes; the garbage collector need not follow it."""

    __slots__ = ()

    def tobytes(self) -> bytes:
        return self


def _texts(data: memoryview, position: int, count: int) -> tuple[list[_Text], int]:
    """(`count` texts from the byte `position` on, the byte after them); each follows its length, uint64."""
    texts, unpack = [], struct.Struct("<Q").unpack_from
    for _ in range(count):
        first = position + 8
        position = first + unpack(data, position)[0]
        texts.append(_Text(data[first:position]))
    return texts, position


def _has_bytes(file: Path, advanced: Callable[[int], Any], written: Stored) -> bool:
    offset = written.offset
    for sums in written.sums:
        if not byte_files.is_as_written(file, offset, sums, advanced):
            return False
        offset += sums.size_bytes
    return True


def _is_described(described: Any, written: Stored) -> bool:
    shape = tuple(int(size) for size in described.shape[::-1])
    location = int(described.data_offset), int(described.n_bytes)
    size = sum(sums.size_bytes for sums in written.sums)
    return (shape, described.tensor_type.name, *location) == (written.shape, written.kind, written.offset, size)


def _same(written: Any, read_value: Any) -> bool:
    """Whether values are equal, floats in float32."""
    if isinstance(written, list) and isinstance(read_value, list):
        if written and isinstance(written[0], float):
            return np.array_equal(np.asarray(written, np.float32), np.asarray(read_value, np.float32))
        return written == read_value
    if isinstance(written, float) and isinstance(read_value, float):
        return np.float32(written) == np.float32(read_value)
    return written == read_value
