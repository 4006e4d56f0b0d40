"""Checks of the values of a configuration. Each raises a `ConfigError` that names the key, the value and the fix.

Most functions check one value. `require_usable_numbers` walks a whole configuration, and refuses integers that are
above the limit of their key (2**31 - 1 for most keys), and floats that float32 cannot represent (infinity and NaN
included). `unique_names` gives the names that metrics of functions of equal names have.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence


class ConfigError(ValueError):
    """Raised for a configuration that cannot be used: when it is read or made, and later if the model, the rows or the
    device do not fit it. The message names the key, its value where there is one, and what to do. The commands print it
    without a traceback, as they print other errors of a user, and end with code 2."""


def require(condition: bool, key: str, value: object, fix: str) -> None:
    """Raises `ConfigError` with the message "KEY = VALUE: FIX" unless the condition holds. Nearly all checks of values
    use it, so that their messages look alike.

    Args:
        condition: whether the value can be used; if True, nothing happens.
        key: the dotted key, such as "optim.learning_rate".
        value: its value, which the message shows by repr.
        fix: what to do instead, in words.
    """
    if not condition:
        raise ConfigError(f"{key} = {value!r}: {fix}")


def positive(key: str, value: float | None) -> None:
    """Raises `ConfigError` unless the value of the dotted key `key` is None, or finite and above 0. A config and its
    sections check their numbers by it when they are made; None stands for a key that is not set."""
    require(value is None or (value > 0 and math.isfinite(value)), key, value, "must be greater than 0")


def not_negative(key: str, value: float | None) -> None:
    """Raises `ConfigError` unless the value of the dotted key `key` is None, or finite and at least 0. A config and its
    sections check their numbers by it when they are made; None stands for a key that is not set."""
    require(value is None or (value >= 0 and math.isfinite(value)), key, value, "must be 0 or more")


def fraction(key: str, value: float | None, below_one: bool = False) -> None:
    """Raises `ConfigError` unless the value of the dotted key `key` is None, or from 0 to 1. The sections check shares,
    decays and probabilities by it when they are made; None stands for a key that is not set. below_one: whether 1
    itself is refused (True) or accepted (False)."""
    inside = value is None or (0 <= value < 1 if below_one else 0 <= value <= 1)
    require(inside, key, value, "must be from 0 to " + ("below 1" if below_one else "1"))


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Makes the `names` of reward functions and classes of environments different from each other, in their order, so
    that each has metrics of its own: a name that stood before gets a number behind it, ("f", "f_2"), the smallest from
    2 on that makes a name which is neither in `names` nor made before. A config's checks find the metrics' names with
    it too."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        found.append(next(one for one in numbered if one not in (*names, *found)) if name in found else name)
    return tuple(found)


# The ranges of the compiled programs' int32 and float32.
LARGEST_INTEGER = 2**31 - 1
_LARGEST_FLOAT, _SMALLEST_FLOAT = 3e38, 1e-37
# Upper limits of single keys. They are beyond any model and machine; a larger number is a slip that would ask for
# terabytes of memory.
_LIMITS = {
    "seed": 2**32 - 1,  # jax.random.key uses only 32 bits: 2**32 would be the same seed as 0
    "adapter.r": 65_536,
    "adapter.rank_pattern": 65_536,
    "data.num_workers": 1_024,
    "rows_per_step": 1_000_000,
    "data.length": 16_777_216,
}


def require_usable_numbers(value: object, key: str) -> None:
    """Raises `ConfigError` if the absolute value of an integer in a configuration is above the limit of its key
    (`_LIMITS`, such as 65,536 for adapter.r; 2**31 - 1 for keys without one), or if a float is neither 0 nor from 1e-37
    to 3e38 in absolute value, which float32 can represent (infinity and NaN are refused). A TrainConfig calls it when
    it is made, because the compiled programs compute with int32 and float32.

    Args:
        value: a configuration, one of its sections, or a value of it. Sections and mappings are walked; lists and
            tuples are not looked into.
        key: its dotted key; "" for the whole configuration.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            require_usable_numbers(getattr(value, field.name), f"{key}.{field.name}".lstrip("."))
    elif isinstance(value, dict):
        for name, item in value.items():
            require_usable_numbers(item, f"{key}.{name}")
    elif isinstance(value, int) and not isinstance(value, bool):
        limit = next((top for start, top in _LIMITS.items() if key == start or key.startswith(f"{start}.")), None)
        top = LARGEST_INTEGER if limit is None else limit
        require(abs(value) <= top, key, value, f"must be at most {top:,}")
    elif isinstance(value, float):
        usable = value == 0 or _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT  # false of NaN
        require(usable, key, value, f"must be a number that float32 holds, from {_SMALLEST_FLOAT} to {_LARGEST_FLOAT}")
