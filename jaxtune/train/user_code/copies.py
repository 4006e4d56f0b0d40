"""Copies that one answer or one function has for itself."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping

_LEAVES = (str, int, float, bool, type(None))
_TYPES = (list, dict, tuple, set, collections.OrderedDict, collections.defaultdict, collections.deque, bytearray)


def own_copy[T](value: T) -> T:
    """A copy in which lists, dicts, tuples and sets are new, at any depth, also of subclasses; all other objects, such
    as arrays and pictures, are shared. A list that occurs twice within `value`, or in itself, does so in the copy."""
    return _copied(value, {})


def own_copies(given: Mapping[str, object], shared: frozenset[str] = frozenset()) -> dict[str, object]:
    """Arguments, {name: a list with an entry for each answer}, with copies for each entry, so that entries share
    nothing. shared: names of lists whose entries are objects to be shared."""
    return {
        name: (list(value) if name in shared else [own_copy(entry) for entry in value])
        if isinstance(value, list)
        else value
        for name, value in given.items()
    }


def _copied(value, seen: dict[int, object]):
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind not in _TYPES and not isinstance(value, list | dict | tuple | set):
        return value
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple):
        entries = [_copied(entry, seen) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return tuple(entries) if kind is tuple else tuple.__new__(kind, entries)
    try:
        new = copy.copy(value)
    except Exception:  # of a subclass that cannot be copied
        return value
    seen[id(value)] = new
    if isinstance(new, dict):
        for key, entry in value.items():
            if type(entry) not in _LEAVES:
                dict.__setitem__(new, key, _copied(entry, seen))
    elif isinstance(new, list | collections.deque):
        for index, entry in enumerate(value):
            if type(entry) not in _LEAVES:
                new[index] = _copied(entry, seen)
    return new
