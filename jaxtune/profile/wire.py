"""A reader of protobuf's wire format, enough for XPlane and HLO files, so that neither needs a schema library.

Format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class WireError(ValueError):
    """The bytes are not a whole protobuf message."""


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """(field number, value) in file order. A value is an int (varint), or a memoryview (everything else)."""
    position, end = 0, len(message)
    while position < end:
        tag, position = varint(message, position)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise WireError("field number 0")
        if kind == 2:
            length, position = varint(message, position)
            stop = position + length
            if stop > end:
                raise WireError(f"field {number} ends {stop - end} bytes past the message")
            yield number, message[position:stop]
            position = stop
        elif kind == 0:
            value, position = varint(message, position)
            yield number, value
        elif kind in (1, 5):
            stop = position + (8 if kind == 1 else 4)
            if stop > end:
                raise WireError(f"field {number} is cut")
            yield number, message[position:stop]
            position = stop
        else:
            raise WireError(f"field {number} has wire type {kind}")


def varint(message: memoryview, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = shift = 0
    try:
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position
            shift += 7
            if shift > 63:
                raise WireError("a varint is longer than 64 bits")
    except IndexError:
        raise WireError("a varint is cut") from None


def repeated_ints(value: int | memoryview) -> list[int]:
    """The ints of a repeated field's occurrence, packed or not."""
    if isinstance(value, int):
        return [value]
    out, position = [], 0
    while position < len(value):
        item, position = varint(value, position)
        out.append(item)
    return out


def text(value: memoryview) -> str:
    return bytes(value).decode("utf-8", "replace")
