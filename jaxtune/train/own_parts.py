"""Optimizers, schedules and objectives that a user's code gives to Trainer instead of the config's. Trainer calls two
functions of this module when it is made: `require_nothing_beside` refuses config keys that have no effect beside them
(for each kind `require_own_optimizer`, `require_own_schedule` and `require_own_objective`), and `identities` makes what
checkpoints record of each (`optimizer_identity`, `schedule_identity`, `objective_identity`).

With its identity recorded, a run is not resumed with another one. What comes from the config is identified by its
settings, but of a function only its behaviour can be recorded: an optimizer is identified by its states and the program
of its update, a schedule by its rates, and an objective by its class and, if it is a dataclass, its fields."""

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

_SCHEDULE_POINTS = 16  # the number of steps at which a schedule's rates are recorded
# The keys of `optim` that have an effect even if an optimizer was given.
_KEPT = ("weights",)


def require_own_optimizer(config: TrainConfig) -> None:
    """Raises ValueError if config.optim sets a key to another value than its default, which has no effect because an
    optimizer was given to Trainer, so that a user notices it. Only `optim.weights` still has an effect.
    `require_nothing_beside` calls it."""
    if config.optim.offload:
        raise ValueError(
            "optim.offload = True: the states of an optimizer given to Trainer stay on the device, because the size of "
            "its updates is not bounded in advance; unset it, or use an optim.name that has it"
        )
    _require_defaults("optim", config.optim, OptimConfig(), "optimizer", _KEPT)


def require_own_schedule(config: TrainConfig) -> None:
    """Raises ValueError if config.schedule sets a key to another value than its default, because it has no effect
    beside the schedule that was given to Trainer. `require_nothing_beside` calls it."""
    _require_defaults("schedule", config.schedule, ScheduleConfig(), "schedule")


def require_own_objective(config: TrainConfig) -> None:
    """Raises ValueError if config.objective sets a key to another value than its default, because it has no effect
    beside the objective that was given to Trainer. `require_nothing_beside` calls it."""
    _require_defaults("objective", config.objective, ObjectiveConfig(), "objective")


def require_nothing_beside(
    config: TrainConfig,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
    objective: Objective | None,
) -> None:
    """Raises ValueError if a section of the config sets a key to another value than its default although its part was
    given to Trainer, so that the key has no effect: `optim` (but optim.weights) beside an optimizer, `schedule` beside
    a schedule, `objective` beside an objective. A part that was not given is None, and its section is not checked; so
    `schedule` is not checked beside an optimizer alone, although it has no effect there either. The Trainer calls it
    when it is made."""
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
    """The identities of what was given to Trainer, as checkpoints record them, so that a run is resumed only with the
    same: {"objective", "schedule", "optimizer": its identity}, with an entry for each that is not None. They are made
    by objective_identity, schedule_identity and optimizer_identity.

    Args:
      trainable: the tensors that the optimizer updates.
      total_steps: the steps of the run.
      optimizer, schedule, objective: what was given to Trainer, or None.
    """
    known: dict[str, Any] = {}
    if objective is not None:
        known["objective"] = objective_identity(objective)
    if schedule is not None:
        known["schedule"] = schedule_identity(schedule, total_steps)
    if optimizer is not None:
        known["optimizer"] = optimizer_identity(optimizer, trainable)
    return known


def _require_defaults(section: str, given: Any, default: Any, part: str, kept: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a section of the config differs from its defaults, because it would have no effect.

    Args:
      section: the name of the section, for the message.
      given: the section of the run's config.
      default: the same section with all defaults.
      part: the name of what was given to Trainer instead, such as "optimizer", for the message.
      kept: keys that still have an effect and may differ.
    """
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name not in kept and value != getattr(default, field.name):
            raise ValueError(
                f"{section}.{field.name} = {value!r}: it has no effect beside the {part} that was given to Trainer; "
                f"leave it out, or leave {part} out"
            )


def optimizer_identity(optimizer: optax.GradientTransformation, trainable: Any) -> dict[str, str]:
    """The identity of an optimizer that was given to Trainer, as `identities` records it in checkpoints, so that no run
    is resumed with another one: {"states": a digest of the paths, shapes and dtypes of its states, "update": a digest
    of the text of its update's jaxpr}. The jaxpr has the scalar constants of the update, but not the values of arrays.
    trainable: the tensors that it updates, which may be `jax.ShapeDtypeStruct`s; the optimizer is traced with their
    shapes in float32, whatever their dtypes."""
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    states = jax.eval_shape(optimizer.init, wide)
    named = [
        (jax.tree_util.keystr(path), a.shape, str(a.dtype)) for path, a in jax.tree_util.tree_leaves_with_path(states)
    ]
    program = str(jax.make_jaxpr(optimizer.update)(wide, states, wide))
    return {"states": _digest(str(named)), "update": _digest(re.sub(r"0x[0-9a-f]+", "", program))}


def schedule_identity(schedule: optax.Schedule, total_steps: int) -> list[float]:
    """The identity of a schedule that was given to Trainer, as `identities` records it in checkpoints, so that no run
    is resumed with another one: its learning rates at 16 steps, evenly spread from the first to the last of the
    `total_steps` steps of the run (a shorter run has some of them twice)."""
    return [float(np.asarray(schedule(int(step)))) for step in np.linspace(0, total_steps - 1, _SCHEDULE_POINTS)]


def objective_identity(objective: Objective) -> str:
    """The identity of an objective that was given to Trainer, as `identities` records it in checkpoints, so that no run
    is resumed with another one: its repr, which has its fields, if it is a dataclass; else the name of its class."""
    return repr(objective) if dataclasses.is_dataclass(objective) else type(objective).__qualname__


def _digest(text: str) -> str:
    """A hash of `text`, 16 hex digits of its SHA-256, which the identity of an own optimizer in checkpoints has in
    place of the long texts of its states and its update."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
