"""What is read of a row, and as what, noted where it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar

# {a column, or TURN and the key of a turn: as what it is read}; "" for a key that changes nothing.
type Reads = dict[str, str]

TURN = "messages[]."
_NOTED: ContextVar[Reads | None] = ContextVar("noted", default=None)
_MADE: ContextVar[frozenset[str]] = ContextVar("made", default=frozenset())


@contextlib.contextmanager
def noted() -> Iterator[Reads]:
    """What is read within it, by this thread."""
    reads: Reads = {}
    token = _NOTED.set(reads)
    try:
        yield reads
    finally:
        _NOTED.reset(token)


def note(name: str, role: str) -> None:
    """Notes that a column or key is read; of several roles the first counts."""
    made = _MADE.get()
    if (reads := _NOTED.get()) is not None and name not in made and not (made and name.startswith(TURN)):
        reads.setdefault(name, role)


@contextlib.contextmanager
def made_of_others(columns: Iterable[str]) -> Iterator[None]:
    """Within it these columns, and turns, are made of what was noted before."""
    token = _MADE.set(frozenset(columns))
    try:
        yield
    finally:
        _MADE.reset(token)


def unread(columns: Mapping[str, object], reads: Reads) -> list[str]:
    """The columns with values that are not read."""
    return [name for name, cell in columns.items() if name and name not in reads and not is_blank(cell)]


def is_blank(cell: object) -> bool:
    """Whether a cell is null, or an empty text, list or object."""
    return cell is None or (isinstance(cell, str | list | tuple | Mapping) and not cell)


class RowsRead[T](list[T]):
    """What rows make, and in `columns` what is read of them, in words."""

    columns: str = ""


def told(reads: Reads, others: Iterable[str], of_others: str = "not read") -> str:
    """Both in words, short. others: what is not read, of columns and keys of turns; of_others: words for it."""
    others = [*dict.fromkeys(others)]
    known = {name: role for name, role in reads.items() if role and name not in others}
    words = [_as(name, role) for name, role in known.items() if not name.startswith(TURN)]
    of_turns = {name.removeprefix(TURN): role for name, role in known.items() if name.startswith(TURN)}
    keys = [_as(name, role) for name, role in of_turns.items() if name not in known]  # a column may mark turns
    idle = [name for name, role in reads.items() if not role]
    lists = {"": words or ["nothing"], "of turns": keys, of_others: others}
    lists["not read"] = [*lists.get("not read", []), *idle]
    return "; ".join(f"{title}{': ' * bool(title)}{', '.join(names)}" for title, names in lists.items() if names)


def _as(name: str, role: str) -> str:
    return name if name == role else f"{name} as {role}"
