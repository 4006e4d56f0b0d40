"""What happens to arguments of a script that jaxtune.compat does not follow: each has no effect, or is refused.

The table is arguments.yaml, from which the documentation's tables are written too.
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
    """An entry of arguments.yaml: an argument that is not followed, unless its value is one of `free`."""

    idle: bool  # True: it has no effect here, which is printed; False: it would change the result, and is refused
    text: str  # why it has no effect, or what to use instead
    # values, such as the default, that are accepted without a line or an error; an error proposes the first; () if none
    free: tuple


_LONGEST = 100  # characters of a value in a message


def shown(value: object) -> str:
    """A value in a message: as Python writes it, or its kind where that is long or an address."""
    text = repr(value)
    if len(text) <= _LONGEST and " at 0x" not in text:
        return text
    kinds = sorted({type(one).__name__ for one in value}) if isinstance(value, list | tuple | set) else []
    return f"a {type(value).__name__}" + (f" of {', '.join(kinds)}" if kinds else "")


_printed: set[tuple[str, str]] = set()


def settle(
    where: str, arguments: Mapping[str, Any], table: Mapping[str, Argument], callee: Callable | None = None
) -> None:
    """Accepts, reports or refuses the arguments that a function does not follow.

    Values of Argument.free are accepted, other idle arguments are printed; the rest raises ValueError.
      where: the called function, for messages.
      callee: its parameters are proposed in place of an unknown argument.
    """
    for name, value in arguments.items():
        if name not in table:
            parameter_names = [*inspect.signature(callee).parameters] if callee is not None else []
            if dataclasses.is_dataclass(callee):  # its __init__ may take fields by **
                parameter_names += [field.name for field in dataclasses.fields(callee)]
            near = difflib.get_close_matches(name, [*parameter_names, *table], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where}: {name} = {shown(value)} is not an argument that jaxtune.compat knows{hint}")
        argument = table[name]
        if any(value is free or (type(value) is type(free) and value == free) for free in argument.free):
            continue
        if not argument.idle:
            advice = f"; leave it at {argument.free[0]!r}" if argument.free else ""
            raise ValueError(f"{where}: {name} = {shown(value)} is not supported{advice}. Instead: {argument.text}")
        report_idle(where, name, argument.text)


def report_idle(where: str, name: str, text: str) -> None:
    """Prints, once in a process, why argument `name` of the function `where` has no effect. text: the reason."""
    if (where, name) not in _printed:
        _printed.add((where, name))
        say(f"{where}: {name} does nothing here: {text}")


def choose(where: str, name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    """Translates an argument's value: table[value]. ValueError lists the supported values; TypeError if unhashable.
    where, name: the called function and its argument, for messages.
    """
    if value not in table:
        raise ValueError(f"{where}: {name} = {shown(value)} is not supported; supported: {', '.join(map(repr, table))}")
    return table[value]
