"""Digests of the user's code and rows, by which a continued run sees that they changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from jaxtune.system.sealed import crc32

_PACKAGE = Path(__file__).parents[1]
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def code_digest(function: Callable) -> str | None:
    """16 hex digits of a function's, class's or callable's code: its module's whole file, or its own source in a script
    or notebook, or its instructions; with arguments of a partial and plain values of a closure. None for this
    package's.
    """
    pieces = _parts(function)
    return None if pieces is None else hashlib.sha256(b"\0".join(pieces)).hexdigest()[:16]


def code_of(functions: Mapping[str, Callable]) -> dict[str, str]:
    return {name: digest for name, function in functions.items() if (digest := code_digest(function)) is not None}


def values_crc32(values: Iterable[object]) -> int:
    """CRC-32 of values of rows: JSON whatever the order of keys, bytes, arrays and others."""
    texts = (json.dumps(value, sort_keys=True, default=_described, skipkeys=False) for value in values)
    return crc32(text.encode("utf-8", "backslashreplace") for text in texts)


def _described(value: object) -> object:
    if isinstance(value, bytes | bytearray):
        return ["bytes", len(value), crc32([value])]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(repr, value))]
    raw: Callable[[], bytes] | None = getattr(value, "tobytes", None)  # of arrays and pictures
    if raw is not None:
        about = [str(getattr(value, name, "")) for name in ("dtype", "shape", "mode", "size")]
        return [type(value).__name__, *about, crc32([raw()])]
    return _text(value).decode()


def _parts(function: Callable) -> list[bytes] | None:
    """What decides a function's results, as bytes: its code and bound arguments. None for a function of jaxtune
    itself.
    """
    if isinstance(function, functools.partial):
        inner = _parts(function.func)
        bound_arguments = [_text(value) for value in (*function.args, *sorted(function.keywords.items()))]
        return None if inner is None else [*inner, *bound_arguments]
    function = inspect.unwrap(function)
    plain = isinstance(function, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType)
    code = function if plain else type(function)  # of an object that can be called, its class's
    file = _file(code)
    if file is not None and file.is_relative_to(_PACKAGE):
        return None
    bound = [_text(value) for value in _closure(function)]
    if file is not None and file.is_file() and code.__module__ != "__main__":
        return [file.read_bytes(), code.__qualname__.encode(), *bound]
    try:
        return [textwrap.dedent(inspect.getsource(code)).encode(), *bound]
    except (OSError, TypeError):
        return [*_instructions(code), *bound]


def _file(code: Callable) -> Path | None:
    try:
        name = inspect.getsourcefile(code)
    except (TypeError, OSError):
        return None
    return None if name is None else Path(name)


def _closure(function: object) -> list[object]:
    cells = getattr(function, "__closure__", None) or ()
    return [value for cell in cells if isinstance(value := _content(cell), _PLAIN)]


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _text(value: object) -> bytes:
    return re.sub(r"0x[0-9a-f]+", "", repr(value)).encode("utf-8", "replace")


def _instructions(code: object) -> list[bytes]:
    """Instructions and constants of a function, or of a class's functions, without line numbers."""
    if isinstance(code, type):
        return [piece for _, value in sorted(vars(code).items()) if callable(value) for piece in _instructions(value)]
    compiled = getattr(code, "__code__", None)
    if not isinstance(compiled, types.CodeType):
        return [_text(getattr(code, "__qualname__", code))]
    pieces = [compiled.co_code, " ".join(compiled.co_names).encode()]
    for constant in compiled.co_consts:
        pieces += (
            _instructions(types.FunctionType(constant, {}))
            if isinstance(constant, types.CodeType) and not (constant.co_freevars)
            else [constant.co_code if isinstance(constant, types.CodeType) else _text(constant)]
        )
    return pieces
