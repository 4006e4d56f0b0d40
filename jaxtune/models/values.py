"""Checks of values that come from files or callers, such as config.json, adapter files and arguments. Errors name the
key, the value and what the value must be.

Every check takes `key`, by which errors name the value (a config key, often after a file's name), and the value. It
returns None, or raises ValueError. `whole` checks an integer, `number`, `positive` and `not_negative` a finite number,
`boolean`, `text` and `mapping` a type, `items` a list by a check of its items, `texts` a list of strings, and
`token_ids` token ids, one or a list."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

LARGEST = 2**31 - 1  # the largest count, because indices are int32
MOST_LAYERS = 4096  # ten times as many as any published model has


def whole(key: str, value: Any, least: int = 1, most: int = LARGEST) -> None:
    """Raises ValueError unless the value is an integer (not a bool) from `least` to `most` (2^31 - 1 if not given),
    both included; sizes and counts from files and callers are checked so. key: the name by which the error mentions the
    value, such as a config key."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        bounds = f"from {least} to {most}" if most != LARGEST else f"of at least {least}"
        raise ValueError(f"{key} = {_shown(value)}: must be an integer {bounds}")


def number(key: str, value: Any, above: float | None = None, least: float | None = None) -> None:
    """Raises ValueError unless the value is a finite number (not a bool) that is greater than `above` and at least
    `least`; a bound that is None does not count. Numbers of config.json, such as rope_theta, are checked so. key: the
    name by which the error mentions the value, such as a config key."""
    fits = isinstance(value, Real) and not isinstance(value, bool) and _finite(value)
    if not fits or (above is not None and value <= above) or (least is not None and value < least):
        both = "" if above is None or least is None else " and"
        bounds = "" if above is None else f" above {above:g}{both}"
        bounds += "" if least is None else f" of at least {least:g}"
        raise ValueError(f"{key} = {_shown(value)}: must be a finite number{bounds}")


def _finite(value: Real) -> bool:
    """Whether `value`, a real number that `number` checks, is finite as a float; False for infinity, NaN, and an
    integer that is too large for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def positive(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a finite number (not a bool) above 0; factors of config.json and
    adapter_config.json, such as lora_alpha, are checked so. key: the name by which the error mentions the value, such
    as a config key."""
    number(key, value, above=0)


def not_negative(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a finite number (not a bool) of at least 0; coefficients of config.json,
    such as router_aux_loss_coef, and an adapter's dropout are checked so. key: the name by which the error mentions the
    value, such as a config key."""
    number(key, value, least=0)


def boolean(key: str, value: Any) -> None:
    """Raises ValueError unless the value is True or False; switches of config.json and adapter_config.json, such as
    use_dora, are checked so. key: the name by which the error mentions the value, such as a config key."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {_shown(value)}: must be true or false")


def text(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a string; names in config.json, adapter and tokenizer files are checked so.
    key: the name by which the error mentions the value, such as a config key."""
    if not isinstance(value, str):
        raise ValueError(f"{key} = {_shown(value)}: must be a string")


def mapping(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a mapping (an object in JSON), as some keys of config.json, adapter and
    tokenizer files must be; the mapping's own keys and values are not checked. key: the name by which the error
    mentions the value."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} = {_shown(value)}: must be an object with keys of its own")


def items(key: str, value: Any, of: Callable[[str, Any], None]) -> None:
    """Raises ValueError unless the value is a list or tuple of which every item passes a check; lists from config files
    are checked so. of: the check, one of this module's functions or another (key, item) -> None that raises. key: the
    name by which the error mentions the value; an item is mentioned as key[index]."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} = {_shown(value)}: must be a list")
    for index, item in enumerate(value):
        of(f"{key}[{index}]", item)


def texts(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a list or tuple of strings, such as layer_types of a config.json; a single
    string is refused. key: the name by which the error mentions the value."""
    items(key, value, text)


def token_ids(key: str, value: Any) -> None:
    """Raises ValueError unless the value is a token id (an integer from 0 to 2^31 - 1), or a list or tuple of token
    ids, which may be nested; whether the vocabulary has them is not checked. Special tokens of config.json and
    generation_config.json are checked so. key: the name by which the error mentions the value."""
    if isinstance(value, list | tuple):
        items(key, value, token_ids)
    else:
        whole(key, value, least=0)


def _shown(value: Any) -> str:
    """The value as an error message shows it: its repr, of which, if it is longer than 80 characters, only the first 77
    are shown, followed by three dots."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
