"""Which events of a script's callback only look at a run, told by their code."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

_REACHES = ("control", "trainer", "model", "should_")  # in names through which a callback acts, or reads weights


def only_looks(kind: type, event: str) -> bool:
    """Whether a class's method reads neither its `control` nor the model, and names no trainer, nor do functions of its
    module that it calls. False where that cannot be seen.
    """
    function = getattr(kind, event, None)
    if not isinstance(function, FunctionType):
        return False
    parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    if ({p.name for p in parameters[3:4]} | _of_many(function)) & _read(function.__code__):
        return False
    others = [value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, FunctionType)]
    if any(_keeps(other) for other in others) or "super" in function.__code__.co_names:
        return False
    return all(_names_none(code) for code in _codes(kind, function))


def _keeps(function: FunctionType) -> bool:
    """Whether a method may store on `self` what acts, for another to use."""
    code = function.__code__
    if not any(instruction.opname == "STORE_ATTR" for instruction in dis.get_instructions(code)):
        return False
    return bool(_of_many(function) & _read(code)) or not _names_none(code)


def _of_many(function: FunctionType) -> set[str]:
    """Names of *arguments and **keywords."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _read(code: CodeType) -> set[str]:
    """Local variables that a code reads, or leaves to functions within it."""
    loaded = [i.argval for i in dis.get_instructions(code) if i.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))]
    names = {name for value in loaded for name in (value if isinstance(value, tuple) else (value,))}
    return names | set(code.co_cellvars)


def _names_none(code: CodeType) -> bool:
    names = {*code.co_names, *code.co_freevars, *(_read(code) - {"self"})}
    return not any(word in name for name in names for word in _REACHES)


def _codes(kind: type, function: FunctionType) -> Iterator[CodeType]:
    """Of a function, of those within it, and of those of its class and module that it names."""
    seen, left = set(), [function]
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            yield code
            codes += [value for value in code.co_consts if isinstance(value, CodeType)]
            for name in code.co_names:
                named = getattr(kind, name, None), function.__globals__.get(name)
                left += [
                    each for each in named if isinstance(each, FunctionType) and each.__module__ == kind.__module__
                ]
