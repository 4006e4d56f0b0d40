"""What happens to the arguments of a script that a function or class of jaxtune.compat has no parameter for: each
either has no effect here, or is refused (`settle`, by a table of `Argument`s). `tell` prints why an argument has no
effect. `choose` translates the values of arguments that are followed.

arguments.yaml lists these arguments. tables.py reads it, and makes a table for each function or class; the tables of
the documentation are written from it too.
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
    """What happens to an argument that a function or class of jaxtune.compat does not use, unless its value is one of
    `free`: an entry of arguments.yaml, which tables.py reads and `settle` applies."""

    idle: bool  # True: it has no effect here, which is printed; False: it would change the result, and is refused
    text: str  # why it has no effect, or what to use instead
    # values, such as the default, that are accepted without a line or an error; an error proposes the first; () if none
    free: tuple


_printed: set[tuple[str, str]] = set()


def settle(
    where: str, others: Mapping[str, Any], table: Mapping[str, Argument], callee: Callable | None = None
) -> None:
    """Decides about the arguments that a function or class of jaxtune.compat was given and does not use. Most of those
    that take further arguments (`others`) call it; a few methods, such as CompatModel.merge_and_unload, ignore them
    without it. A value that changes nothing (equal to one of Argument.free and of its type), such as the default, is
    accepted; for another value one line is printed by `tell` if the argument has no effect here; all other arguments
    are refused. The caller then ignores `others`.

    Args:
      where: the name of the function or class that the script called, for messages.
      others: {name: value} of the arguments that it was given and does not use.
      table: {name: Argument} of the known ones (tables.py).
      callee: the function or class itself; the names of its parameters are proposed in place of an unknown argument.
        None: only names in `table` are proposed.
    Raises:
      ValueError: an argument that would change the result, or that is unknown.
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
    """Prints why an argument has no effect here, once in a process for each `where` (the called function or class) and
    `name` (the argument). `text` is the reason. `settle` calls it. So do trainers, _format and BitsAndBytesConfig, for
    arguments that they know and that have no effect in one case."""
    if (where, name) not in _printed:
        _printed.add((where, name))
        say(f"{where}: {name} does nothing here: {text}")


def choose(where: str, name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    """Translates an argument's value to jaxtune's: returns table[value]. Where jaxtune has the same values, the callers
    use it only as a check.

    Args:
      where: the called function or class, for the message.
      name: the argument, for the message.
      value: the script's value, such as "adamw_torch"; it must be hashable (else TypeError).
      table: {each supported value: what it means here}.
    Raises:
      ValueError: the value is not in the table; the message lists those that are.
    """
    if value not in table:
        raise ValueError(f"{where}: {name} = {value!r} is not supported; supported: {', '.join(map(repr, table))}")
    return table[value]
