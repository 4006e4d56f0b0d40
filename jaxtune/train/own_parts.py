"""Parts of a run that a user's own code gives to Trainer, and what they are known by when a run is resumed.

A config says what its own parts are; of a function only what it does can be recorded. An optimizer is known by its
states and by the program of its update, a schedule by its rates, an objective by its name and fields.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxtune.train.config import OptimConfig, ScheduleConfig, TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.objectives.objective import Objective

_SCHEDULE_POINTS = 16  # of a run, at which a schedule's rates are compared
# What of optim.* still means something beside an optimizer of one's own.
_KEPT = ("weights",)


def require_own_optimizer(config: TrainConfig) -> None:
    """Refuses settings of config.optim that an optimizer given in Python would leave without effect.

    Raises:
      ValueError: such a setting.
    """
    if config.optim.offload:
        raise ValueError(
            "optim.offload = True: the states of an optimizer given to Trainer stay on the device, as nothing bounds "
            "what its update can reach before it is made; unset it, or use optim.name=adamw or adamw_8bit"
        )
    _require_defaults("optim", config.optim, OptimConfig(), "optimizer", _KEPT)


def require_own_schedule(config: TrainConfig) -> None:
    """As require_own_optimizer, of config.schedule and a schedule given in Python."""
    _require_defaults("schedule", config.schedule, ScheduleConfig(), "schedule")


def require_own_objective(config: TrainConfig) -> None:
    """As require_own_optimizer, of config.objective and an objective given in Python."""
    _require_defaults("objective", config.objective, ObjectiveConfig(), "objective")


def require_nothing_beside(
    config: TrainConfig,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
    objective: Objective | None,
) -> None:
    """Refuses settings of config that the parts given in Python would leave without effect."""
    if optimizer is not None:
        require_own_optimizer(config)
    if schedule is not None:
        require_own_schedule(config)
    if objective is not None:
        require_own_objective(config)


def identities(
    trainable: nnx.State,
    total_steps: int,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
    objective: Objective | None,
) -> dict[str, Any]:
    """What each part that was given is known by; nothing for the others."""
    known: dict[str, Any] = {}
    if objective is not None:
        known["objective"] = objective_identity(objective)
    if schedule is not None:
        known["schedule"] = schedule_identity(schedule, total_steps)
    if optimizer is not None:
        known["optimizer"] = optimizer_identity(optimizer, trainable)
    return known


def _require_defaults(section: str, given: Any, default: Any, part: str, kept: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name not in kept and value != getattr(default, field.name):
            raise ValueError(
                f"{section}.{field.name} = {value!r}: it has no effect beside the {part} that was given to Trainer; "
                f"leave it out, or leave {part} out"
            )


def optimizer_identity(optimizer: optax.GradientTransformation, trainable: Any) -> dict[str, str]:
    """{"states", "update"}: digests of the shapes of an optimizer's states and of its update's program, in which its
    numbers stand. trainable: what it moves, which may be abstract."""
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    states = jax.eval_shape(optimizer.init, wide)
    named = [
        (jax.tree_util.keystr(path), a.shape, str(a.dtype)) for path, a in jax.tree_util.tree_leaves_with_path(states)
    ]
    program = str(jax.make_jaxpr(optimizer.update)(wide, states, wide))
    return {"states": _digest(str(named)), "update": _digest(re.sub(r"0x[0-9a-f]+", "", program))}


def schedule_identity(schedule: optax.Schedule, total_steps: int) -> list[float]:
    """Rates at steps from the first to the last."""
    return [float(np.asarray(schedule(int(step)))) for step in np.linspace(0, total_steps - 1, _SCHEDULE_POINTS)]


def objective_identity(objective: Objective) -> str:
    """Its class and, of a dataclass, its fields."""
    return repr(objective) if dataclasses.is_dataclass(objective) else type(objective).__qualname__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
