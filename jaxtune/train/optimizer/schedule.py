"""The number of steps of a run (`total_steps`), and the learning rate at each step (`learning_rate_schedule`).

A warm-up rises linearly. After it the rate falls linearly or by a cosine, with or without restarts (`_restarts`), or
stays constant."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from jaxtune.train.config import ScheduleConfig, TrainConfig


def total_steps(config: TrainConfig, steps_per_epoch: int | None) -> int:
    """The number of optimizer steps of a run: config.steps if it is set, else config.epochs times `steps_per_epoch`
    (None if the number of rows is unknown), rounded, and at least 1. A run calls it when its rows are read; the
    schedule, the progress that is shown and the end of the run follow from it.

    Raises:
      ValueError: config.steps is not set, and steps_per_epoch is None, or the epochs have more steps than a counter of
        32 bits can count.
    """
    if config.steps is not None:
        return config.steps
    if steps_per_epoch is None:
        raise ValueError(
            "steps = null: the number of these rows is not known, so epochs cannot be counted and the learning rate "
            "has no end; set steps"
        )
    assert config.epochs is not None
    steps = max(1, round(config.epochs * steps_per_epoch))
    if steps >= 2**31:
        raise ValueError(f"epochs = {config.epochs:g}: {steps:,} steps are more than can be counted")
    return steps


def learning_rate_schedule(config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """A function from the number of updates made before (the step, int or int array, from 0; steps that were skipped
    are not counted) to the learning rate, by the section `schedule` of a config, with `peak` as the highest rate, for a
    run of total_steps steps. The optimizer, and the metrics of a step, take the rate from it, unless a schedule was
    given to Trainer. Raises ValueError for an unknown config.name.

    The first update already has a rate: in a warm-up of n steps, step 0 has peak / n and step n - 1 the peak. With
    config.zero_start step 0 has 0 and step n the peak. The warm-up has the share config.warmup_ratio of all steps,
    rounded, or, if that is None, config.warmup_steps steps. Linear and cosine schedules end at peak * config.min_ratio
    after total_steps; a constant one stays at the peak. cosine_with_restarts has config.cycles cosines, each from the
    peak to peak * config.min_ratio, as in transformers."""
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
    elif config.name == "cosine_with_restarts":
        after = _restarts(peak, rest, config.cycles, config.min_ratio)
    else:
        raise ValueError(f"schedule.name = {config.name!r}: must be linear, cosine, cosine_with_restarts or constant")
    if warmup == 0:
        return after
    if config.zero_start:
        rise = optax.linear_schedule(0.0, peak, warmup)
    else:
        rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])


def _restarts(peak: float, steps: int, cycles: int, min_ratio: float) -> optax.Schedule:
    """The schedule of `cycles` equal cosines over `steps` steps, each from `peak` to peak * min_ratio, at which the
    rate stays after the last one. steps: those after the warm-up, from which the schedule counts.
    `learning_rate_schedule` calls it only for the name cosine_with_restarts."""

    def rate(step):
        """The learning rate at `step`, an int or int array, counted from the begin of the first cosine."""
        done = cycles * jnp.minimum(jnp.asarray(step), steps)
        share = jnp.where(done >= cycles * steps, 1.0, done % steps / steps)  # the share of a cosine that has passed
        return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + jnp.cos(jnp.pi * share)))

    return rate
