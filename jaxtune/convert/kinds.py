"""Kinds of values in another program's config, as its schema has them: 'int|null', 'list[text]|"auto"|null'.

null, bool, int, float, text, mapping, list[KINDS], any, or a JSON constant, which is itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

_SAID = {"bool": "true or false", "int": "a whole number", "float": "a number", "text": "a text"}
_SAID |= {"mapping": "a mapping with names", "any": "anything"}
# What YAML 1.1 and pydantic take for true and false.
_BOOLS = {True: True, False: False, "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def fitted(value: object, kinds: str) -> object:
    """The value as the first of the kinds that takes it: a number or a yes in quotes is that number or true, and a
    float without a fraction an int. Raises ValueError with what is taken.
    """
    alternatives = re.findall(r'list\[.*\]|"[^"]*"|[^|]+', kinds)
    for kind in sorted(alternatives, key=lambda kind: kind == "text"):  # "1e-5" is a number where one is taken
        try:
            return _as(value, kind)
        except (ValueError, OverflowError):
            continue
    said = [_SAID.get(kind) or re.sub(r"list\[(.*)\]", r"a list of \1", kind) for kind in alternatives]
    raise ValueError(" or ".join(word for word in said if word != "null"))


def _as(value: object, kind: str) -> object:
    """The value as one kind; ValueError if it is none of it."""
    if kind.startswith("list[") and isinstance(value, list):
        return [fitted(element, kind[5:-1]) for element in value]
    if kind == "any" or json.dumps(value, default=str) == kind:
        return value
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "mapping" and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    if kind == "bool" and isinstance(value, bool | int | str):
        word = value.lower() if isinstance(value, str) else value
        if word in _BOOLS:
            return _BOOLS[word]
    if kind in ("int", "float") and isinstance(value, str | int | float) and not isinstance(value, bool):
        number = float(value.replace("_", "")) if isinstance(value, str) else value
        if math.isfinite(number) and (kind == "float" or number == int(number)):
            return int(number) if kind == "int" else number
    raise ValueError(kind)
