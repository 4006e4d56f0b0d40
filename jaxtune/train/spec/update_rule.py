"""The optimizer and the schedule of a run."""

from __future__ import annotations

from dataclasses import dataclass

import optax

from jaxtune.train.config import OptimConfig, ScheduleConfig
from jaxtune.train.optimizer.optim import UpdateBound, make_optimizer, update_bound
from jaxtune.train.optimizer.schedule import learning_rate_schedule


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    """Learning rate by updates made, for metrics; None: a given optimizer's is unknown."""
    bound: UpdateBound | None
    """How far an update can move a weight; None: unknown, so a step computes the update first to know whether weights
    stay finite.
    """


def update_rule(
    optim: OptimConfig,
    schedule_config: ScheduleConfig,
    max_grad_norm: float | None,
    total_steps: int,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
) -> UpdateRule:
    """The config's rule, or that of a user's optimizer or schedule; None: the config's. A user's optimizer has its own
    rate: a schedule beside it is only shown, and there is no bound.
    """
    if optimizer is not None:
        return UpdateRule(optimizer, schedule, None)
    schedule = schedule or learning_rate_schedule(schedule_config, optim.learning_rate, total_steps)
    bound = update_bound(optim, max_grad_norm)
    return UpdateRule(make_optimizer(optim, schedule), schedule, bound)
