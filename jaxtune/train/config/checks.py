"""What the values of a configuration are checked with; see config.py."""

from __future__ import annotations

import dataclasses
import math


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value and the fix."""


def require(condition: bool, key: str, value: object, fix: str) -> None:
    if not condition:
        raise ConfigError(f"{key} = {value!r}: {fix}")


def positive(key: str, value: float | None) -> None:
    require(value is None or (value > 0 and math.isfinite(value)), key, value, "must be greater than 0")


def not_negative(key: str, value: float | None) -> None:
    require(value is None or (value >= 0 and math.isfinite(value)), key, value, "must be 0 or more")


def fraction(key: str, value: float | None, below_one: bool = False) -> None:
    inside = value is None or (0 <= value < 1 if below_one else 0 <= value <= 1)
    require(inside, key, value, "must be from 0 to " + ("below 1" if below_one else "1"))


# What the programs count with: int32 and float32.
LARGEST_INTEGER = 2**31 - 1
_LARGEST_FLOAT, _SMALLEST_FLOAT = 3e38, 1e-37
# Beyond any model and machine; numbers above them are slips that would ask for terabytes.
_LIMITS = {
    "seed": 2**32 - 1,  # jax.random.key takes no more of it: 2**32 was the seed 0
    "adapter.r": 65_536,
    "adapter.rank_pattern": 65_536,
    "data.num_workers": 1_024,
    "rows_per_step": 1_000_000,
    "data.length": 16_777_216,
}


def require_usable_numbers(value: object, key: str) -> None:
    """Every number of a config, by its dotted key, is one that the programs can count with."""
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
