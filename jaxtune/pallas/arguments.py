"""Checks of the arguments of public operations, while a call is traced. They add nothing to the program."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32")
CACHES = (*FLOATS, "float8_e4m3fn")  # of keys and values
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Parted(Protocol):
    """A quantised weight of several arrays (formats.Stored, which imports this file)."""

    def problem(self) -> str | None:
        """Why the arrays do not belong to one tensor, or None."""
        ...


class Arguments:
    """Checks the arguments of one call of the operation `op`; raises TypeError or ValueError that names both. Methods
    get an argument's name, for the error, and its value.

    A shape is written as words: "B T heads D". The first array that has a word binds its size. A number stands for
    itself, a leading "..." for any axes. `sizes` is {word: (size, text on where it is from)}; operations may add words.
    """

    def __init__(self, op: str, **sizes: int):
        """sizes: {word: size} known before any array."""
        self.op = op
        self.sizes: dict[str, tuple[int, str]] = {word: (size, "") for word, size in sizes.items()}

    def array(self, name: str, value: Any, shape: str, dtypes: Any, stored: tuple[type[Parted], ...] = ()) -> None:
        """Checks an array's shape and dtype; TypeError for what is no array.

        shape: names of its axes, such as "T k"; an axis of a known name must have the known size.
        dtypes: the only dtype, or a tuple of names.
        stored: classes of quantised weights allowed instead; their dtype is not checked.
        """
        if isinstance(value, stored):
            if value.problem() is not None:
                raise ValueError(f"{self.op}: {name} is damaged: {value.problem()}")
        else:
            allowed = dtypes if isinstance(dtypes, tuple) else (str(jnp.dtype(dtypes)),)
            expected = f"an array of {_either(allowed)} [{', '.join(shape.split())}]"
            if not _is_array(value):
                also = "".join(f" or {kind.__name__}" for kind in stored)
                raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {expected}{also}")
            if str(value.dtype) not in allowed:
                raise TypeError(f"{self.op}: {name} is {describe(value)}; its dtype must be {_either(allowed)}")
        self._fit(name, value, shape.split())

    def _fit(self, name: str, value: Any, words: list[str]) -> None:
        """Checks and binds the words of a shape."""
        sizes = tuple(value.shape)
        if words[:1] == ["..."]:
            words, sizes = words[1:], sizes[max(0, len(sizes) - len(words) + 1) :]
        matches = len(sizes) == len(words)
        for word, size in zip(words, sizes, strict=False):
            bound = int(word) if word.isdigit() else self.sizes.get(word, (size, ""))[0]
            matches = matches and size == bound
        if not matches:
            open_ = ["..."] if len(value.shape) != len(sizes) else []
            text = f"{self.op}: {name} is {describe(value)}; its shape must be [{', '.join(open_ + words)}]"
            bound = [f"{word} = {self.sizes[word][0]}{self.sizes[word][1]}" for word in words if word in self.sizes]
            raise ValueError(text + (f" with {', '.join(dict.fromkeys(bound))}" if bound else ""))
        for word, size in zip(words, sizes, strict=True):
            if not word.isdigit():
                self.sizes.setdefault(word, (size, f" (as {name} has)"))

    def is_a(self, name: str, value: Any, kind: type | tuple[type, ...], hint: str) -> None:
        """Checks a class, or one of several. hint: what it must be, in words."""
        if not isinstance(value, kind):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {hint}")

    def sequence(self, name: str, value: Any, of: str, count: int | None = None) -> None:
        """Checks a list or tuple of `count` entries (None: at least one), which `of` describes."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be a list or tuple of {of}")
        if len(value) != count if count is not None else not value:
            expected = "one or more" if count is None else count
            raise ValueError(f"{self.op}: {name} has {len(value)} entries; it must have {expected}: {of}")

    def number(
        self,
        name: str,
        value: Any,
        *,
        whole: bool = False,
        least: float | None = None,
        above: float | None = None,
        below: float | None = None,
        optional: bool = False,
    ) -> None:
        """Checks a finite number, at least `least`, above `above`, below `below`, known while tracing; no bool. whole:
        an integer. optional: None is accepted, too.
        """
        if optional and value is None:
            return
        kind = ("a whole number" if whole else "a number") + (" or None" if optional else "")
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {kind}, known when the call is traced")
        ranges = [("at least", least), ("above", above), ("below", below)]
        limits = " and ".join(f"{word} {bound:g}" for word, bound in ranges if bound is not None)
        plain = float(value)
        good = math.isfinite(plain) and (least is None or plain >= least)
        if not (good and (above is None or plain > above) and (below is None or plain < below)):
            raise ValueError(f"{self.op}: {name} = {value}: must be {limits or 'finite'}")

    def choice(self, name: str, value: Any, choices: Sequence[str]) -> None:
        """Checks that the value is one of the strings `choices`."""
        if not isinstance(value, str):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {_either(choices)}")
        if value not in choices:
            raise ValueError(f"{self.op}: {name} = {value!r}: must be {_either(choices)}")


def describe(value: Any) -> str:
    """An array such as float32[2, 24], or a quantised weight by class and shape."""
    kind = str(value.dtype) if _is_array(value) else type(value).__name__
    return f"{kind}[{', '.join(map(str, value.shape))}]"


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")


def _kind(value: Any) -> str:
    """A value in words, at most 60 characters of it."""
    if _is_array(value):
        return f"an array {describe(value)}"
    return "None" if value is None else f"a {type(value).__name__} ({str(value)[:60]})"


def _either(words: Sequence[str]) -> str:
    """ "a, b or c"; INTEGERS become "an integer dtype"."""
    if tuple(words) == INTEGERS:
        return "an integer dtype"
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
