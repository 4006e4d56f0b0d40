"""Checks of the arguments of public operations (`Arguments`), made while a call is traced. An error names the argument,
what it is (`describe` puts it into words) and what it must be. `Parted` is the interface of the quantised weights that
may be given in place of an array. The checks add nothing to the program."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Parted(Protocol):
    """The interface of a quantised weight that consists of several arrays (formats.Stored has it), as far as the checks
    here use it: they call `problem`, and refuse a weight that returns a reason; they also read its shape. This file
    imports no formats, because they import it."""

    def problem(self) -> str | None:
        """Returns the reason, in words, why the weight's arrays do not belong to one tensor, such as sizes that do not
        fit each other; None if they do. `Arguments.array` calls it and puts the reason into its error."""
        ...


class Arguments:
    """A checker for the arguments of one call of the operation `op`. Each method checks one argument, returns nothing,
    and raises a TypeError or ValueError that names the operation and the argument: `array` an array's dtype and shape,
    `is_a` a class, `sequence` a list or tuple, `number` a number and its range, `choice` one of several strings.

    A shape is written as words: "B T heads D". A word is a size that is bound by the first array that has it, and that
    every other array with the word must have. A number stands for itself, and a leading "..." for any number of axes.
    The attribute `sizes` is {word: (its size, a text for messages on where it is from)}; operations add to it words
    whose sizes they compute.

    Args:
      op: the name of the operation, for messages.
      sizes: {word: size} of words that are known before any array.
    """

    def __init__(self, op: str, **sizes: int):
        """Makes the checker for one call of the operation named `op`. sizes: {a word of shapes, such as "heads": the
        size} of words that are known before any array is checked."""
        self.op = op
        self.sizes: dict[str, tuple[int, str]] = {word: (size, "") for word, size in sizes.items()}

    def array(self, name: str, value: Any, shape: str, dtypes: Any, stored: tuple[type[Parted], ...] = ()) -> None:
        """Checks that a value is an array of this shape and dtype.

        Args:
          name: the argument's name, for messages.
          value: the argument.
          shape: a word for each axis, such as "B T heads D": a number is a size, a name is a size that all arrays of
            the call share and that the first one sets, and a leading "..." stands for any number of axes.
          dtypes: the only allowed dtype, or a tuple of the names of all allowed ones.
          stored: classes of quantised weights that are allowed in place of an array. For such a weight the shape is
            checked, and that its arrays fit each other, but no dtype.
        Raises:
          TypeError: it is not an array, or has another dtype.
          ValueError: it has another shape, or the arrays of a quantised weight do not fit each other.
        """
        if isinstance(value, stored):
            if value.problem() is not None:
                raise ValueError(f"{self.op}: {name} is damaged: {value.problem()}")
        else:
            allowed = dtypes if isinstance(dtypes, tuple) else (str(jnp.dtype(dtypes)),)
            wanted = f"an array of {_either(allowed)} [{', '.join(shape.split())}]"
            if not _is_array(value):
                also = "".join(f" or {kind.__name__}" for kind in stored)
                raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {wanted}{also}")
            if str(value.dtype) not in allowed:
                raise TypeError(f"{self.op}: {name} is {describe(value)}; its dtype must be {_either(allowed)}")
        self._fit(name, value, shape.split())

    def _fit(self, name: str, value: Any, words: list[str]) -> None:
        """For `array`: checks the shape of the argument `name`, `value`, against `words`, one for each axis: a number
        is a size, a name is a size that all arrays of the call share, and a leading "..." stands for any number of
        axes. Names that have no size yet get it from this array.

        Raises:
          ValueError: the shape differs; the message has the sizes of the names that have one, and where each is from
            (the text in `sizes`).
        """
        sizes = tuple(value.shape)
        if words[:1] == ["..."]:
            words, sizes = words[1:], sizes[max(0, len(sizes) - len(words) + 1) :]
        fits = len(sizes) == len(words)
        for word, size in zip(words, sizes, strict=False):
            known = int(word) if word.isdigit() else self.sizes.get(word, (size, ""))[0]
            fits = fits and size == known
        if not fits:
            open_ = ["..."] if len(value.shape) != len(sizes) else []
            text = f"{self.op}: {name} is {describe(value)}; its shape must be [{', '.join(open_ + words)}]"
            known = [f"{word} = {self.sizes[word][0]}{self.sizes[word][1]}" for word in words if word in self.sizes]
            raise ValueError(text + (f" with {', '.join(dict.fromkeys(known))}" if known else ""))
        for word, size in zip(words, sizes, strict=True):
            if not word.isdigit():
                self.sizes.setdefault(word, (size, f" (as {name} has)"))

    def is_a(self, name: str, value: Any, kind: type | tuple[type, ...], hint: str) -> None:
        """Checks that the argument `name`, `value`, is an instance of `kind`, a class or a tuple of them; `hint` says
        in words what it must be.

        Raises:
          TypeError: it has another class.
        """
        if not isinstance(value, kind):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {hint}")

    def sequence(self, name: str, value: Any, of: str, count: int | None = None) -> None:
        """Checks that the argument `name`, `value`, is a list, a tuple or another sequence, but not a string, of
        `count` entries (None: at least one); `of` says in words what the entries are, which are not checked.

        Raises:
          TypeError: it is no such sequence.
          ValueError: it has another number of entries.
        """
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be a list or tuple of {of}")
        if len(value) != count if count is not None else not value:
            wanted = "one or more" if count is None else count
            raise ValueError(f"{self.op}: {name} has {len(value)} entries; it must have {wanted}: {of}")

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
        """Checks that an argument is a finite number of Python or numpy, which is known while tracing; a bool is
        refused.

        Args:
          name: the argument's name, for messages.
          value: the argument.
          whole: True: it must be an integer; False: any real number is allowed.
          least: the smallest number allowed; None: no limit.
          above: it must be larger than this number; None: no limit.
          below: it must be smaller than this number; None: no limit.
          optional: True: None is allowed too; False: it is refused.
        Raises:
          TypeError: it is not such a number, for instance an array or a traced value.
          ValueError: it is out of range, infinite or NaN.
        """
        if optional and value is None:
            return
        what = ("a whole number" if whole else "a number") + (" or None" if optional else "")
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {what}, known when the call is traced")
        ranges = [("at least", least), ("above", above), ("below", below)]
        wanted = " and ".join(f"{word} {bound:g}" for word, bound in ranges if bound is not None)
        plain = float(value)
        good = math.isfinite(plain) and (least is None or plain >= least)
        if not (good and (above is None or plain > above) and (below is None or plain < below)):
            raise ValueError(f"{self.op}: {name} = {value}: must be {wanted or 'finite'}")

    def choice(self, name: str, value: Any, choices: Sequence[str]) -> None:
        """Checks that the argument `name`, `value`, such as an activation's name, is one of the strings `choices`.

        Raises:
          TypeError: it is not a string.
          ValueError: it is none of the choices.
        """
        if not isinstance(value, str):
            raise TypeError(f"{self.op}: {name} is {_kind(value)}; it must be {_either(choices)}")
        if value not in choices:
            raise ValueError(f"{self.op}: {name} = {value!r}: must be {_either(choices)}")


def describe(value: Any) -> str:
    """An array (`value`) in words, such as float32[2, 24], and a quantised weight by its class and shape. The messages
    of failed checks contain it."""
    kind = str(value.dtype) if _is_array(value) else type(value).__name__
    return f"{kind}[{', '.join(map(str, value.shape))}]"


def _is_array(value: Any) -> bool:
    """Whether a value is an array: one of JAX or numpy, a numpy scalar, or an object that JAX converts to an array
    (with a method __jax_array__). `Arguments.array` refuses all other values, except quantised weights of the classes
    that it is given, and messages describe arrays by dtype and shape."""
    return isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")


def _kind(value: Any) -> str:
    """Any value in words, for error messages: an array by dtype and shape, None as "None", another value by its class
    and the first 60 characters of its text."""
    if _is_array(value):
        return f"an array {describe(value)}"
    return "None" if value is None else f"a {type(value).__name__} ({str(value)[:60]})"


def _either(words: Sequence[str]) -> str:
    """Returns the words, for messages, with commas between them and "or" before the last: "a, b or c". The list of all
    integer dtypes (INTEGERS) becomes "an integer dtype"."""
    if tuple(words) == INTEGERS:
        return "an integer dtype"
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
