"""The schedules of transformers as keys of the section `schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtune.convert.tables import Table

# transformers' arguments that are rates and not shares of the peak.
RATES = ("min_lr", "lr_end")
_LOWEST = 1e-7  # transformers' lr_end of "polynomial"


def schedule_keys(table: Table, name: str, arguments: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """{key of the section `schedule`: value} of a scheduler of transformers, without warm-up. Raises ValueError for one
    that is not supported.

      table: of known schedulers.
      name: the scheduler's in transformers, such as "cosine_with_min_lr".
      arguments: its keyword arguments.
      peak: the highest learning rate, of which min_lr and lr_end become shares.
    """
    if name not in table.schedules:
        hint = table.refused_schedules.get(name) or f"one of {', '.join(table.schedules)}"
        raise ValueError(f"{name!r} is not supported. Instead: {hint}")
    key_of = table.schedule_arguments.get(name, {})
    if unknown := [key for key in arguments if key not in key_of]:
        keywords = {key: arguments[key] for key in unknown}
        raise ValueError(f"{name!r} with {keywords!r} is not supported; it takes {', '.join(key_of) or 'no arguments'}")
    keywords = {key: value for key, value in arguments.items() if value is not None}
    if name == "polynomial":
        keywords = {"lr_end": _LOWEST, **keywords}
    lowest = [key for key in keywords if key_of[key] == "min_ratio"]
    if name == "cosine_with_min_lr" and len(lowest) != 1:
        raise ValueError(f"{name!r} needs min_lr or min_lr_rate, one of them")
    if name == "warmup_stable_decay" and "num_decay_steps" not in keywords:
        raise ValueError(f"{name!r} needs num_decay_steps")
    keys = {key_of[key]: float(value) / peak if key in RATES else value for key, value in keywords.items()}
    return {"name": table.schedules[name], **keys}
