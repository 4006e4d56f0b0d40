"""Learning-rate schedules: linear warm-up from zero, then linear, cosine or constant."""

from __future__ import annotations

import optax

from jaxtune.train.config import ScheduleConfig


def learning_rate_schedule(config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """step (int, from 0) -> learning rate. The first update already moves: step 0 of a warm-up of n has peak / n.

    linear and cosine end at peak * config.min_ratio after total_steps.
    """
    warmup = config.warmup_steps
    if config.warmup_ratio is not None:
        warmup = round(config.warmup_ratio * total_steps)
    rest = max(1, total_steps - warmup)
    if config.name == "constant":
        after = optax.constant_schedule(peak)
    elif config.name == "linear":
        after = optax.linear_schedule(peak, peak * config.min_ratio, rest)
    elif config.name == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.min_ratio)
    else:
        raise ValueError(f"schedule.name = {config.name!r}: must be linear, cosine or constant")
    if warmup == 0:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])
