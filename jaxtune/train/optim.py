"""Optimizers, all optax."""

from __future__ import annotations

import jax
import optax

from jaxtune.train.config import OptimConfig


def _decayed(parameters):
    """Weight decay applies to matrices: not to norms, biases or DoRA magnitudes, which have one dimension."""
    return jax.tree.map(lambda p: p.ndim >= 2, parameters)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer named by `config`, in fp32; gradients come clipped.

    Each is a direction, plus weight_decay times the parameter, times the learning rate: decay means the same in all.
    Adafactor (arXiv 1804.04235) has factored second moments and update clipping, and takes the learning rate as it is.
    """
    if config.name == "adamw":
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    elif config.name == "adafactor":
        direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    elif config.name == "sgd":
        direction = optax.trace(config.momentum) if config.momentum else optax.identity()
    else:
        raise ValueError(f"optim.name = {config.name!r}: must be adamw, adafactor or sgd")
    decay = optax.add_decayed_weights(config.weight_decay, _decayed)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(schedule))
