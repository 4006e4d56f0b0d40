"""Optimizers, all optax, and how the weights that they move are kept."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtune.train.config import OptimConfig
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit

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


def decayed_tensors(parameters) -> list[bool]:
    """Of each tensor, whether weight decay applies to it: to matrices, and not to norms, biases (those of experts have
    two dimensions) or DoRA magnitudes."""
    found = jax.tree_util.tree_leaves_with_path(parameters)
    return [leaf.ndim >= 2 and "bias" not in (getattr(key, "key", None) for key in path) for path, leaf in found]


def _add_decay(rate: float) -> optax.GradientTransformationExtraArgs:
    """decayed: of parameters that come without their names, what decayed_tensors says of them."""

    def decay(decayed: list[bool] | None = None) -> optax.GradientTransformation:
        def mask(tree):
            return jax.tree.unflatten(jax.tree.structure(tree), decayed or decayed_tensors(tree))

        return optax.add_decayed_weights(rate, mask)

    def update(updates, state, params=None, *, decayed=None, **others):
        del others
        return decay(decayed).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(decay().init, update)


class StepOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer whose update takes three arguments more, for what has to be done as states are read and written.

    scale: float32 number, by which gradients of any float dtype are multiplied in float32. finite: bool; where it is
    false, the states stay as they are, and the updates mean nothing. divided: of each gradient, whether devices have a
    part of it and of its states; None: of none.
    """


def step_optimizer(optimizer: optax.GradientTransformation) -> StepOptimizer:
    """The same optimizer, if it is one already; else with the gradients scaled before it, the states chosen after."""
    if isinstance(optimizer, StepOptimizer):
        return optimizer

    def update(updates, state, params=None, *, scale=1.0, finite=True, divided=None, **own):
        del divided  # XLA divides plain operations as their operands are
        updates = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, updates)
        updates, new = optimizer.update(updates, state, params, **own)
        return updates, _where(finite, new, state)

    return StepOptimizer(optimizer.init, update)


def _where(finite, new, old):
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> StepOptimizer:
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
    optimizer = optax.chain(direction, _add_decay(config.weight_decay), optax.scale_by_learning_rate(schedule))
    if config.name != "adamw_8bit":
        return step_optimizer(optimizer)

    def update(updates, state: Any, params=None, *, scale=1.0, finite=True, divided=None, **own):
        """The first of the chain's states is chosen where it is made: a choice here would keep the old moments."""
        new: Any
        updates, new = optimizer.update(updates, state, params, scale=scale, finite=finite, divided=divided, **own)
        return updates, (new[0], *_where(finite, new[1:], state[1:]))

    return StepOptimizer(optimizer.init, update)
