"""What becomes of an argument that the callee's own signature does not follow: it is idle, or it is refused.

arguments.yaml holds a table for each callee; the documentation's tables are written from them.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxtune.system.terminal import say


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument that is not followed.

    idle: it changes nothing here, and `text` says why; else it would change the result, and `text` says what to use in
    its place. free: values at which it asks for nothing; others are told of (idle) or an error.
    """

    idle: bool
    text: str
    free: tuple


_told: set[tuple[str, str]] = set()


def settle(
    where: str, others: Mapping[str, Any], table: Mapping[str, Argument], callee: Callable | None = None
) -> None:
    """Says in one line, once a process, why an idle argument does nothing here, and refuses the rest.

    Args:
      others: the arguments that `callee` does not follow.
    Raises:
      ValueError: an argument that would change the result, or that nobody knows.
    """
    for name, value in others.items():
        if name not in table:
            known = [*inspect.signature(callee).parameters] if callee is not None else []
            if dataclasses.is_dataclass(callee):  # its __init__ may take fields by **
                known += [field.name for field in dataclasses.fields(callee)]
            near = difflib.get_close_matches(name, [*known, *table], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where}: {name} = {value!r} is not an argument that jaxtune.compat knows{hint}")
        argument = table[name]
        if any(value is free or (type(value) is type(free) and value == free) for free in argument.free):
            continue
        if not argument.idle:
            at = f"; leave it at {argument.free[0]!r}" if argument.free else ""
            raise ValueError(f"{where}: {name} = {value!r} is not supported{at}. Instead: {argument.text}")
        tell(where, name, argument.text)


def tell(where: str, name: str, text: str) -> None:
    """Says once a process why an argument does nothing here."""
    if (where, name) not in _told:
        _told.add((where, name))
        say(f"{where}: {name} does nothing here: {text}")


def choose(where: str, name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    if value not in table:
        raise ValueError(f"{where}: {name} = {value!r} is not supported; supported: {', '.join(map(repr, table))}")
    return table[value]
