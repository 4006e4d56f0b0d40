"""Checks of single values, each a `ConfigError` that names the key, the value and the fix."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration that cannot be used, or that the model, the rows or the device do not fit. The message names the
    key and the fix; commands print it without a traceback.
    """


def require(condition: bool, key: str, value: object, fix: str) -> None:
    """Raises `ConfigError` "KEY = VALUE: FIX" unless the condition holds.

    key: dotted, such as "optim.learning_rate".
    fix: what to do instead.
    """
    if not condition:
        raise ConfigError(f"{key} = {value!r}: {fix}")


def positive(key: str, value: float | None) -> None:
    """Raises `ConfigError` unless `value` is None (not set), or finite and above 0."""
    require(value is None or (value > 0 and math.isfinite(value)), key, value, "must be greater than 0")


def not_negative(key: str, value: float | None) -> None:
    """Raises `ConfigError` unless `value` is None (not set), or finite and at least 0."""
    require(value is None or (value >= 0 and math.isfinite(value)), key, value, "must be 0 or more")


def fraction(key: str, value: float | None, below_one: bool = False) -> None:
    """Raises `ConfigError` unless `value` is None (not set), or from 0 to 1; below_one: 1 itself is refused."""
    inside = value is None or (0 <= value < 1 if below_one else 0 <= value <= 1)
    require(inside, key, value, "must be from 0 to " + ("below 1" if below_one else "1"))


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names` with a number behind each that stood before, ("f", "f_2"), so that each has metrics of its own."""
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        unique.append(
            next(candidate for candidate in numbered if candidate not in (*names, *unique)) if name in unique else name
        )
    return tuple(unique)


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
    """Raises `ConfigError` for an integer above its key's limit (2**31 - 1 for most), and for a float beyond float32.

    Sections and mappings are walked, lists are not.
        key: the dotted key of `value`; "" for a whole configuration.
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
