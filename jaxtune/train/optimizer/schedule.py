"""The number of steps of a run, and the learning rate at each."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxtune.train.config import ScheduleConfig
from jaxtune.train.config.sections import ENDLESS, SCHEDULES


def total_steps(steps: int | None, epochs: float | None, steps_per_epoch: int | None) -> int:
    """`steps`, or if it is None `epochs` times `steps_per_epoch`, rounded, at least 1: then ValueError if
    steps_per_epoch is None or 32 bits cannot count the steps.
    """
    if steps is not None:
        return steps
    if steps_per_epoch is None:
        raise ValueError(
            "steps = null: the number of these rows is not known, so epochs cannot be counted and the learning rate "
            "has no end; set steps"
        )
    assert epochs is not None
    steps = max(1, round(epochs * steps_per_epoch))
    if steps >= 2**31:
        raise ValueError(f"epochs = {epochs:g}: {steps:,} steps are more than can be counted")
    return steps


def learning_rate_schedule(config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """The learning rate by number of updates made (skipped steps do not count); `peak` is the highest. Shapes are those
    of transformers.get_scheduler.

    In a warm-up of n steps, step 0 has peak / n and step n - 1 the peak; with zero_start step 0 has 0 and step n the
    peak. warmup_ratio and decay_ratio are shares of all steps, rounded.

      total_steps: of the run.
    """
    warmup = _steps(config.warmup_ratio, config.warmup_steps, total_steps)
    after = _after_warmup(config, peak, max(1, total_steps - warmup), warmup, total_steps)
    if warmup == 0:
        return after
    if config.name == "warmup_stable_decay":
        rise = _shaped_rise(config, peak, warmup)
    elif config.zero_start:
        rise = optax.linear_schedule(0.0, peak, warmup)
    else:
        rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])


def _shaped_rise(config: ScheduleConfig, peak: float, warmup: int) -> optax.Schedule:
    late = 0 if config.zero_start else 1

    def rate(step):
        share = jnp.minimum(jnp.asarray(step) + late, warmup) / warmup
        return peak * (config.min_ratio + (1 - config.min_ratio) * _fall(config.warmup, 1 - share))

    return rate


def _steps(ratio: float | None, steps: int | None, total_steps: int) -> int:
    return round(ratio * total_steps) if ratio is not None else steps or 0


def _after_warmup(config: ScheduleConfig, peak: float, steps: int, warmup: int, total_steps: int) -> optax.Schedule:
    """The schedule by steps after the warm-up. steps: how many these are; total_steps: with the warm-up."""
    if config.name == "constant":
        return optax.constant_schedule(peak)
    if config.name == "linear":
        return optax.linear_schedule(peak, peak * config.min_ratio, steps)
    if config.name == "polynomial":
        return optax.polynomial_schedule(peak, peak * config.min_ratio, config.power, steps)
    if config.name == "cosine":
        return _shaped(lambda share: _cosine(share, config.waves), peak, config.min_ratio, steps)
    if config.name == "cosine_with_restarts":
        return _restarts(peak, steps, config.cycles, config.min_ratio)
    if config.name == "inverse_sqrt":
        timescale = config.timescale or warmup or 10_000
        return lambda step: peak / jnp.sqrt((jnp.asarray(step) + timescale) / timescale)
    if config.name == "warmup_stable_decay":
        decay = _steps(config.decay_ratio, config.decay_steps, total_steps)
        stable = total_steps - warmup - decay if config.stable_steps is None else config.stable_steps
        fall = _shaped(
            lambda share: jnp.where(share < 1, _fall(config.decay, share, config.waves), 0.0),
            peak,
            config.min_ratio,
            max(1, decay),
        )
        return optax.join_schedules([optax.constant_schedule(peak), fall], [stable])
    raise ValueError(f"schedule.name = {config.name!r}: must be {', '.join(SCHEDULES)}")


def _shaped(shape: Callable[[jax.Array], jax.Array], peak: float, floor: float, steps: int) -> optax.Schedule:
    """peak * (floor + (1 - floor) * shape(share of `steps` that has passed))."""
    return lambda step: peak * (floor + (1 - floor) * shape(jnp.minimum(jnp.asarray(step), steps) / steps))


def _cosine(share: jax.Array, waves: float) -> jax.Array:
    return 0.5 * (1.0 + jnp.cos(2 * jnp.pi * waves * share))


def _fall(shape: str, share: jax.Array, waves: float = 0.5) -> jax.Array:
    """From 1 at a share of 0 to 0 at 1."""
    if shape == "linear":
        return 1.0 - share
    return _cosine(share, waves) if shape == "cosine" else 1.0 - jnp.sqrt(share)


def _restarts(peak: float, steps: int, cycles: int, min_ratio: float) -> optax.Schedule:
    """`cycles` equal cosines over `steps` steps, from `peak` to peak * min_ratio, where the rate then stays."""

    def rate(step):
        cycle_steps = cycles * jnp.minimum(jnp.asarray(step), steps)
        # The share of a cosine that has passed.
        share = jnp.where(cycle_steps >= cycles * steps, 1.0, cycle_steps % steps / steps)
        return peak * (min_ratio + (1.0 - min_ratio) * _cosine(share, 0.5))

    return rate


def _depends_on_total(config: ScheduleConfig) -> bool:
    """Whether the rate of a step is another one if the run has more steps."""
    has_plateau = config.name == "warmup_stable_decay"
    if config.min_ratio == 1 and (has_plateau or config.warmup_ratio is None):
        return False
    if config.warmup_ratio is not None:
        return True
    if has_plateau:
        return config.stable_steps is None or config.decay_ratio is not None
    return config.name not in ENDLESS


def new_rates(
    schedule_config: ScheduleConfig, schedule: optax.Schedule | None, step: int, skipped: ArrayLike, total_steps: int
) -> list[str]:
    """A sentence on the learning rate of a run that is resumed with more steps; [] if these do not change it.

    schedule: maps updates made to the rate; None if unknown.
    skipped: steps without an update.
    """
    if schedule is None or not _depends_on_total(schedule_config):
        return []
    rate = float(np.asarray(schedule(step - np.asarray(skipped))))
    return [
        f"the run is longer than it was: from here the learning rate follows the {schedule_config.name} schedule of "
        f"{total_steps:,} steps, and is {rate:.3g} in step {step + 1:,}"
    ]
