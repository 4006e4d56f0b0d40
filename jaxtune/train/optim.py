"""Optimizers, all optax, and how the weights that they move are kept."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import optax

from jaxtune.train.adam8 import scale_by_adam_8bit
from jaxtune.train.config import OptimConfig

BF16_WEIGHTS_ABOVE = 2_000_000_000  # trained parameters


def weight_storage(wanted: Literal["fp32", "bf16"] | None, precision: str, parameters: int) -> Literal["fp32", "bf16"]:
    """How trained weights are kept (StepProgram.weights), where optim.weights, `wanted`, may leave it open.

    Full fine-tuning of so many parameters that float32 would not fit (8B: 32 GB, and as much again for its gradients)
    keeps them in bf16 with stochastic rounding; adapters never have that many. fp32 and fp16 runs keep float32.
    """
    if wanted is not None:
        return wanted
    return "bf16" if precision == "bf16" and parameters > BF16_WEIGHTS_ABOVE else "fp32"


@dataclasses.dataclass(frozen=True)
class UpdateBound:
    """No update moves an element w by more than rate * (direction + decay * |w|)."""

    direction: float
    decay: float


def update_bound(config: OptimConfig, max_grad_norm: float | None) -> UpdateBound | None:
    """The bound of adamw and adamw_8bit over gradients clipped to max_grad_norm: its moments' mean, freed of its bias,
    is at most that norm, and is divided by at least eps. None where there is no such bound."""
    if max_grad_norm is None or config.name not in ("adamw", "adamw_8bit"):
        return None
    return UpdateBound(max_grad_norm / config.eps, config.weight_decay)


def _decayed(parameters):
    """Weight decay applies to matrices: not to norms, biases or DoRA magnitudes, which have one dimension."""
    return jax.tree.map(lambda p: p.ndim >= 2, parameters)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer named by `config`; gradients come clipped, parameters in fp32. All is fp32 but the stored moments
    of adamw_8bit.

    Each is a direction, plus weight_decay times the parameter, times the learning rate: decay means the same in all.
    Adafactor (arXiv 1804.04235) has factored second moments and update clipping, and takes the learning rate as it is.
    """
    if config.name == "adamw":
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    elif config.name == "adamw_8bit":
        direction = scale_by_adam_8bit(config.beta1, config.beta2, config.eps)
    elif config.name == "adafactor":
        direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    elif config.name == "sgd":
        direction = optax.trace(config.momentum) if config.momentum else optax.identity()
    else:
        raise ValueError(f"optim.name = {config.name!r}: must be adamw, adamw_8bit, adafactor or sgd")
    decay = optax.add_decayed_weights(config.weight_decay, _decayed)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(schedule))
