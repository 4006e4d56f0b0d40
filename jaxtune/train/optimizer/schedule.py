"""The number of steps of a run, and the learning rate at each of them.

A warm-up rises linearly. After it the rate falls linearly or by a cosine, with or without restarts, or stays constant.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from jaxtune.train.config import ScheduleConfig, TrainConfig


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """The optimizer steps of a run.

    Raises:
      ValueError: they are more than a counter of 32 bits can hold.
    """
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    steps = max(1, round(config.epochs * steps_per_epoch))
    if steps >= 2**31:
        raise ValueError(f"epochs = {config.epochs:g}: {steps:,} steps are more than can be counted")
    return steps


def learning_rate_schedule(config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """step (int, from 0) -> learning rate. The first update already moves: step 0 of a warm-up of n has peak / n, and
    step n - 1 the peak; or, with config.zero_start, 0, and step n the peak.

    linear and the cosines end at peak * config.min_ratio after total_steps; of cosine_with_restarts, config.cycles
    cosines from the peak follow each other, as in transformers.
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
    def rate(step):
        done = cycles * jnp.minimum(jnp.asarray(step), steps)
        share = jnp.where(done >= cycles * steps, 1.0, done % steps / steps)  # of a cosine that is gone by
        return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + jnp.cos(jnp.pi * share)))

    return rate
