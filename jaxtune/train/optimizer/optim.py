"""The optimizers, all of them optax transformations, and the dtypes in which trained weights are stored."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtune.train.config import OptimConfig
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit

BF16_WEIGHTS_ABOVE = 2_000_000_000  # with more trained parameters than this, weights are stored in bf16 by default


def weight_storage(wanted: Literal["fp32", "bf16"] | None, precision: str, parameters: int) -> Literal["fp32", "bf16"]:
    """The storage of trained weights (StepProgram.weights).

    Full fine-tuning of a model whose float32 weights would not fit (8B: 32 GB, and as much again for gradients) stores
    them in bf16 with stochastic rounding. Adapters never have that many parameters. Runs in fp32 and fp16 store
    float32.

    Args:
      wanted: optim.weights; None: not set.
      precision: of the run.
      parameters: number of trained parameters.
    """
    if wanted is not None:
        return wanted
    return "bf16" if precision == "bf16" and parameters > BF16_WEIGHTS_ABOVE else "fp32"


@dataclasses.dataclass(frozen=True)
class UpdateBound:
    """A bound on one update of weights: no element w moves by more than rate * (direction + decay * |w|), where rate
    is the learning rate. A step uses it to decide before the update whether all new weights will be finite."""

    direction: float
    decay: float


def update_bound(config: OptimConfig, max_grad_norm: float | None) -> UpdateBound | None:
    """How far one update of the optimizer in `config` can move a weight, if gradients are clipped to max_grad_norm;
    None without clipping (max_grad_norm is None) and for optimizers other than adamw and adamw_8bit. The
    bias-corrected mean of the gradients is at most that norm, and it is divided by at least eps."""
    if max_grad_norm is None or config.name not in ("adamw", "adamw_8bit"):
        return None
    faster = max(1.0, _embedding_share(config))
    return UpdateBound(faster * max_grad_norm / config.eps, faster * config.weight_decay)


def _embedding_share(config: OptimConfig) -> float:
    """The learning rate of embeddings as a multiple of that of all other tensors, by `config`; 1.0 if it sets none."""
    rate = config.embedding_learning_rate
    return 1.0 if rate is None else rate / config.learning_rate


def decayed_tensors(parameters) -> list[bool]:
    """For each tensor of `parameters`, an nnx.State, in the order of jax.tree.leaves, whether weight decay applies to
    it. It applies to matrices, and not to norms, biases (experts' biases have two dimensions) or DoRA magnitudes."""
    found = jax.tree_util.tree_leaves_with_path(parameters)
    return [leaf.ndim >= 2 and "bias" not in (getattr(key, "key", None) for key in path) for path, leaf in found]


def embedding_tensors(parameters) -> list[bool]:
    """For each tensor of `parameters`, an nnx.State, in the order of jax.tree.leaves, whether it is the matrix of the
    input embeddings or of the output head; these may have a learning rate of their own."""
    names = [
        [getattr(key, "key", None) for key in path[:2]] for path, _ in jax.tree_util.tree_leaves_with_path(parameters)
    ]
    return [name in (["embedding", "weight"], ["head", "weight"]) for name in names]


def _scale_embeddings(share: float) -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates of embeddings by `share`. Its update takes `embeddings`, the result of embedding_tensors
    for parameters that come without their names."""

    def update(updates, state, params=None, *, embeddings: list[bool] | None = None, **others):
        del others
        leaves, structure = jax.tree.flatten(updates)
        which = embedding_tensors(params) if embeddings is None else embeddings
        scaled = [u * share if is_one else u for u, is_one in zip(leaves, which, strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _add_decay(rate: float) -> optax.GradientTransformationExtraArgs:
    """Weight decay, `rate` times the parameter, as an optax transformation. Its update takes `decayed`, the result of
    decayed_tensors, for parameters that come without their names because tensors are updated one by one."""

    def decay(decayed: list[bool] | None = None) -> optax.GradientTransformation:
        def mask(tree):
            return jax.tree.unflatten(jax.tree.structure(tree), decayed or decayed_tensors(tree))

        return optax.add_decayed_weights(rate, mask)

    def update(updates, state, params=None, *, decayed=None, **others):
        del others
        return decay(decayed).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(decay().init, update)


class StepOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer whose update takes three more arguments, for work that has to be done while states are read and
    written.

    `scale` is a float32 number by which gradients of any float dtype are multiplied in float32. `finite` is a bool; if
    it is false, the states stay as they are, and the updates are meaningless. `divided` says for each gradient whether
    devices have a part of it and of its states; None: no gradient is divided.
    """


def step_optimizer(optimizer: optax.GradientTransformation) -> StepOptimizer:
    """`optimizer` as a StepOptimizer: itself if it is one, else one that scales gradients before it and selects the
    states after it, so that a train step can treat all optimizers alike."""
    if isinstance(optimizer, StepOptimizer):
        return optimizer

    def update(updates, state, params=None, *, scale=1.0, finite=True, divided=None, **own):
        del divided  # XLA divides plain operations in the same way as their operands
        updates = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, updates)
        updates, new = optimizer.update(updates, state, params, **own)
        return updates, _where(finite, new, state)

    return StepOptimizer(optimizer.init, update)


def _where(finite, new, old):
    """`new` if `finite` (a bool array), else `old`, leaf by leaf: two trees of the same structure."""
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> StepOptimizer:
    """The optimizer named by `config`. Gradients come clipped, parameters in float32. Everything is float32 except the
    stored moments of adamw_8bit.

    Each optimizer's update is a direction plus weight_decay times the parameter, times the learning rate, so that decay
    has the same meaning in all. For embeddings, embedding_learning_rate takes the place of the schedule's peak.
    Adafactor (arXiv 1804.04235) has factored second moments and update clipping, and uses the learning rate as it is.

    Raises:
      ValueError: the name is unknown.
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
    parts = [direction, _add_decay(config.weight_decay), optax.scale_by_learning_rate(schedule)]
    if config.embedding_learning_rate is not None:
        parts.append(_scale_embeddings(_embedding_share(config)))
    optimizer = optax.chain(*parts)
    if config.name != "adamw_8bit":
        return step_optimizer(optimizer)

    def update(updates, state: Any, params=None, *, scale=1.0, finite=True, divided=None, **own):
        """The update of the chain. The first state is selected where it is computed, as a later selection would keep
        the old moments in memory."""
        new: Any
        updates, new = optimizer.update(updates, state, params, scale=scale, finite=finite, divided=divided, **own)
        return updates, (new[0], *_where(finite, new[1:], state[1:]))

    return StepOptimizer(optimizer.init, update)
