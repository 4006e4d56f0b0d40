"""Checks of single values that come from files or callers; an error names the key, the value and what it must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1  # of a count: what an int32 index reaches
MOST_LAYERS = 4096  # ten times those of any published model


def whole(key: str, value: Any, least: int = 1, most: int = LARGEST) -> None:
    """Raises ValueError for anything but an integer from `least` to `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        bounds = f"from {least} to {most}" if most != LARGEST else f"of at least {least}"
        raise ValueError(f"{key} = {_shown(value)}: must be an integer {bounds}")


def number(key: str, value: Any, above: float | None = None, least: float | None = None) -> None:
    """Raises ValueError for anything but a finite number, above or at least the bound."""
    fits = isinstance(value, Real) and not isinstance(value, bool) and _finite(value)
    if not fits or (above is not None and value <= above) or (least is not None and value < least):
        bounds = "" if above is None else f" above {above:g}"
        bounds = bounds if least is None else f" of at least {least:g}"
        raise ValueError(f"{key} = {_shown(value)}: must be a finite number{bounds}")


def _finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def positive(key: str, value: Any) -> None:
    number(key, value, above=0)


def not_negative(key: str, value: Any) -> None:
    number(key, value, least=0)


def boolean(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {_shown(value)}: must be true or false")


def text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key} = {_shown(value)}: must be a string")


def mapping(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} = {_shown(value)}: must be an object with keys of its own")


def items(key: str, value: Any, of: Callable[[str, Any], None]) -> None:
    """Raises ValueError for anything but a list whose every item passes `of`."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} = {_shown(value)}: must be a list")
    for index, item in enumerate(value):
        of(f"{key}[{index}]", item)


def texts(key: str, value: Any) -> None:
    items(key, value, text)


def token_ids(key: str, value: Any) -> None:
    """Raises ValueError for anything but a token id or a list of them."""
    if isinstance(value, list | tuple):
        items(key, value, token_ids)
    else:
        whole(key, value, least=0)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
