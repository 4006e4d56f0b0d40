"""Copies that one answer or one function has for itself."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

_LEAVES = (str, int, float, bool, type(None))
_TYPES = (list, dict, tuple, set, collections.deque, bytearray)


def own_copy[T](value: T) -> T:
    """A copy with new lists, dicts, tuples and sets at any depth, subclasses included; arrays and other objects are
    shared. Repeated and cyclic references stay so.
    """
    return _copied(value, {})


def own_copies(given: Mapping[str, object], shared: frozenset[str] = frozenset()) -> dict[str, object]:
    """{name: list with an entry for each answer}, with copies of entries. shared: names of lists whose entries are
    shared.
    """
    return {
        name: (list(value) if name in shared else [own_copy(entry) for entry in value])
        if isinstance(value, list)
        else value
        for name, value in given.items()
    }


def _copied(value: Any, copies_by_id: dict[int, object]) -> Any:
    """A copy of nested containers; copies_by_id: those so far, so that cycles and shared objects stay such."""
    kind = type(value)
    if kind in _LEAVES or not isinstance(value, _TYPES):
        return value
    if id(value) in copies_by_id:
        return copies_by_id[id(value)]
    if isinstance(value, tuple):
        entries = [_copied(entry, copies_by_id) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return tuple(entries) if type(value) is tuple else tuple.__new__(type(value), entries)
    if isinstance(value, set | bytearray):
        return copy.copy(value)
    try:
        new = copy.copy(value)
    except Exception:  # of a subclass that cannot be copied
        return value
    copies_by_id[id(value)] = new
    for index, entry in value.items() if isinstance(value, dict) else enumerate(value):
        if type(entry) not in _LEAVES:
            new[index] = _copied(entry, copies_by_id)
    return new
