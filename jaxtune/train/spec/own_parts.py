"""Optimizers, schedules and objectives that the user's code gives to Trainer: config keys that they make void are
refused, and checkpoints record their identities, so that no run resumes with another. Of a function only behaviour can
be recorded.
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

from jaxtune.train.config import OptimConfig, ScheduleConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.objectives.objective import Objective

_SCHEDULE_POINTS = 16  # the number of steps at which a schedule's rates are recorded
# The keys of `optim` that have an effect even if an optimizer was given.
_KEPT = ("weights",)


def require_nothing_beside(
    optim_config: OptimConfig,
    schedule_config: ScheduleConfig,
    objective_config: ObjectiveConfig,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
    objective: Objective | None,
) -> None:
    """ValueError if a config section is set although its part was given; an optimizer has its own schedule."""
    if optimizer is not None:
        if optim_config.offload:
            raise ValueError(
                "optim.offload = True: the states of an optimizer given to Trainer stay on the device, because the "
                "size of its updates is not bounded in advance; unset it, or use an optim.name that has it"
            )
        _require_defaults("optim", optim_config, OptimConfig(), "optimizer", _KEPT)
    if optimizer is not None or schedule is not None:
        kind = "optimizer" if schedule is None else "schedule"
        _require_defaults("schedule", schedule_config, ScheduleConfig(), kind)
    if objective is not None:
        _require_defaults("objective", objective_config, ObjectiveConfig(), "objective")


def identities(
    trainable: nnx.State,
    total_steps: int,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
    objective: Objective | None,
) -> dict[str, Any]:
    """{"objective", "schedule", "optimizer": identity} of the parts that were given."""
    recorded: dict[str, Any] = {}
    if objective is not None:
        recorded["objective"] = objective_identity(objective)
    if schedule is not None:
        recorded["schedule"] = schedule_identity(schedule, total_steps)
    if optimizer is not None:
        recorded["optimizer"] = optimizer_identity(optimizer, trainable)
    return recorded


def _require_defaults(section: str, section_config: Any, default: Any, kind: str, exempt: tuple[str, ...] = ()) -> None:
    """ValueError if a section differs from its defaults, except keys in `exempt`."""
    for field in dataclasses.fields(section_config):
        value = getattr(section_config, field.name)
        if field.name not in exempt and value != getattr(default, field.name):
            raise ValueError(
                f"{section}.{field.name} = {value!r}: it has no effect beside the {kind} that was given to Trainer; "
                f"leave it out, or leave {kind} out"
            )


def optimizer_identity(optimizer: optax.GradientTransformation, trainable: Any) -> dict[str, str]:
    """{"states": digest of their paths, shapes and dtypes, "update": digest of its jaxpr, without values of arrays}.
    trainable: may be shapes; traced in float32.
    """
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
    states = jax.eval_shape(optimizer.init, wide)
    named = [
        (jax.tree_util.keystr(path), a.shape, str(a.dtype)) for path, a in jax.tree_util.tree_leaves_with_path(states)
    ]
    program = str(jax.make_jaxpr(optimizer.update)(wide, states, wide))
    return {"states": _digest(str(named)), "update": _digest(re.sub(r"0x[0-9a-f]+", "", program))}


def schedule_identity(schedule: optax.Schedule, total_steps: int) -> list[float]:
    """Learning rates at 16 steps, spread evenly over the run."""
    return [float(np.asarray(schedule(int(step)))) for step in np.linspace(0, total_steps - 1, _SCHEDULE_POINTS)]


def objective_identity(objective: Objective) -> str:
    return repr(objective) if dataclasses.is_dataclass(objective) else type(objective).__qualname__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
