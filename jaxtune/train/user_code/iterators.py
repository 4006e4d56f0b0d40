"""What the user's functions return as iterators. Standard library alone, as it is also used in their processes."""

from __future__ import annotations

from collections.abc import Iterator


def listed(value: object) -> object:
    """A list of what an iterator gives, such as a generator or `map`; else the value. This runs the user's code."""
    return [*value] if isinstance(value, Iterator) else value
