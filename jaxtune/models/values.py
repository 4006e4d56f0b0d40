"""Checks of values from files or callers, such as config.json. Each takes `key`, the name of the value in errors (a
config key, often after a file's name), and raises ValueError unless the value fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1  # the largest count, because indices are int32
MOST_LAYERS = 4096  # ten times as many as any published model has


def whole(key: str, value: Any, least: int = 1, most: int = LARGEST) -> None:
    """Raises ValueError unless a value is an integer (no bool) from `least` to `most`, both included.

    key: the value's name in the error, such as "lora.r".
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        bounds = f"from {least} to {most}" if most != LARGEST else f"of at least {least}"
        raise ValueError(f"{key} = {_shown(value)}: must be an integer {bounds}")


def number(key: str, value: Any, above: float | None = None, least: float | None = None) -> None:
    """Raises ValueError unless a value is a finite number (no bool).

    key: the value's name in the error, such as "lora.alpha".
    above, least: it must be greater than `above` and at least `least`; None: no such bound.
    """
    finite = isinstance(value, Real) and not isinstance(value, bool) and _finite(value)
    if not finite or (above is not None and value <= above) or (least is not None and value < least):
        conjunction = "" if above is None or least is None else " and"
        bounds = "" if above is None else f" above {above:g}{conjunction}"
        bounds += "" if least is None else f" of at least {least:g}"
        raise ValueError(f"{key} = {_shown(value)}: must be a finite number{bounds}")


def _finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def positive(key: str, value: Any) -> None:
    """Raises ValueError, with the name `key`, unless a value is a finite number (no bool) above 0."""
    number(key, value, above=0)


def not_negative(key: str, value: Any) -> None:
    """Raises ValueError, with the name `key`, unless a value is a finite number (no bool) of at least 0."""
    number(key, value, least=0)


def boolean(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {_shown(value)}: must be true or false")


def text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key} = {_shown(value)}: must be a string")


def mapping(key: str, value: Any) -> None:
    """Raises ValueError, with the name `key`, unless a value is a mapping; its keys and values are not checked."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} = {_shown(value)}: must be an object with keys of its own")


def items(key: str, value: Any, check: Callable[[str, Any], None]) -> None:
    """Raises ValueError unless a value is a list or tuple of which every item passes `check`.

    key: the value's name in the error.
    check: (name, item), raises ValueError; the name is key[index].
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} = {_shown(value)}: must be a list")
    for index, item in enumerate(value):
        check(f"{key}[{index}]", item)


def texts(key: str, value: Any) -> None:
    """Raises ValueError, with the name `key`, unless a value is a list or tuple of strings."""
    items(key, value, text)


def token_ids(key: str, value: Any) -> None:
    """A token id (0 to 2^31 - 1), or a list of them, which may be nested; the vocabulary is not checked."""
    if isinstance(value, list | tuple):
        items(key, value, token_ids)
    else:
        whole(key, value, least=0)


def _shown(value: Any) -> str:
    representation = repr(value)
    return representation if len(representation) <= 80 else representation[:77] + "..."
