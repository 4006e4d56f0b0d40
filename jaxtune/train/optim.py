"""Optimizers, all optax."""

from __future__ import annotations

import jax
import optax

from jaxtune.train.config import OptimConfig


def _decayed(parameters):
    """Weight decay applies to matrices: not to norms, biases or DoRA magnitudes, which have one dimension."""
    return jax.tree.map(lambda p: p.ndim >= 2, parameters)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer named by `config`, in fp32; gradients come clipped."""
    if config.name == "adamw":
        return optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        )
    if config.name == "adafactor":
        return optax.adafactor(
            schedule,
            multiply_by_parameter_scale=False,
            clipping_threshold=None,
            weight_decay_rate=config.weight_decay or None,
            weight_decay_mask=_decayed,
        )
    if config.name == "sgd":
        decay = optax.add_decayed_weights(config.weight_decay, _decayed)
        return optax.chain(decay, optax.sgd(schedule, momentum=config.momentum or None))
    raise ValueError(f"optim.name = {config.name!r}: must be adamw, adafactor or sgd")
