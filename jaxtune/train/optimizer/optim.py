"""The optimizers, all of them optax transformations."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxtune.train.config import OptimConfig
from jaxtune.train.config.sections import OPTIMIZERS
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit
from jaxtune.train.optimizer.lion8 import scale_by_lion_8bit
from jaxtune.train.optimizer.muon import LARGEST_DIRECTION, scale_by_muon

BF16_WEIGHTS_ABOVE = 2_000_000_000  # with more trained parameters than this, weights are stored in bf16 by default


def weight_storage(
    configured: Literal["fp32", "bf16"] | None, precision: str, parameters: int
) -> Literal["fp32", "bf16"]:
    """The dtype in which trained matrices are stored: the config's, or "bf16" (rounded stochastically) for a bf16 run
    with over 2 billion trained `parameters`, else "fp32". Tensors of one dimension are float32 either way.

      configured: None: by the rule. precision: the run's, "bf16" or "fp32".
    """
    if configured is not None:
        return configured
    return "bf16" if precision == "bf16" and parameters > BF16_WEIGHTS_ABOVE else "fp32"


ELEMENTWISE = ("adamw", "lion")  # names of optimizers with a bound that treat each element alone


@dataclasses.dataclass(frozen=True)
class UpdateBound:
    """No element w changes in an update by more than rate * (direction + decay * |w|). It tells before the update
    whether all new weights will be finite.
    """

    direction: float
    """Largest element of the direction, times a higher learning rate of embeddings over `rate`."""
    decay: float
    """The factor of weight decay, times the same ratio."""


def update_bound(config: OptimConfig, max_grad_norm: float | None) -> UpdateBound | None:
    """The bound on one update; None: the whole update must be computed to know. Lion's direction is a sign. Adam's
    bias-corrected mean of clipped gradients is at most max_grad_norm, divided by at least eps.
    """
    if config.name in ("lion", "lion_8bit"):
        direction = 1.0
    elif max_grad_norm is None or config.name not in ("adamw", "adamw_8bit", "muon"):
        return None
    else:
        direction = max_grad_norm / config.eps
        if config.name == "muon":
            direction = max(direction, LARGEST_DIRECTION)
    faster = max(1.0, _embedding_share(config))
    return UpdateBound(faster * direction, faster * config.weight_decay)


def _embedding_share(config: OptimConfig) -> float:
    """Learning rate of embeddings and head over that of other tensors."""
    rate = config.embedding_learning_rate
    return 1.0 if rate is None else rate / config.learning_rate


def decayed_tensors(parameters) -> list[bool]:
    """Whether weight decay applies to each leaf of an nnx.State: to matrices and embeddings, not to norms, DoRA
    magnitudes and "bias" (experts' biases have two dimensions).
    """
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return [leaf.ndim >= 2 and "bias" not in (getattr(key, "key", None) for key in path) for path, leaf in leaves]


def embedding_tensors(parameters) -> list[bool]:
    """Whether each leaf of an nnx.State is the matrix of input embeddings or output head, by name; their adapters' are
    not.
    """
    names = [
        [getattr(key, "key", None) for key in path[:2]] for path, _ in jax.tree_util.tree_leaves_with_path(parameters)
    ]
    return [name in (["embedding", "weight"], ["head", "weight"]) for name in names]


def orthogonal_tensors(
    parameters, decayed: list[bool] | None = None, embeddings: list[bool] | None = None
) -> list[bool]:
    """Whether Muon updates each tensor: matrices (an expert's are one each) except embeddings and head. decayed,
    embeddings: what decayed_tensors and embedding_tensors say of them; needed for a list, which has no names.
    """
    decayed = decayed_tensors(parameters) if decayed is None else decayed
    embeddings = embedding_tensors(parameters) if embeddings is None else embeddings
    return [matrix and not vocabulary for matrix, vocabulary in zip(decayed, embeddings, strict=True)]


def _scale_embeddings(share: float) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates of embeddings and head by `share`; of a list by its bools `embeddings`."""

    def update(updates, state, params=None, *, embeddings: list[bool] | None = None, **unused):
        del unused
        leaves, structure = jax.tree.flatten(updates)
        is_embedding = embedding_tensors(params) if embeddings is None else embeddings
        scaled = [u * share if is_one else u for u, is_one in zip(leaves, is_embedding, strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _add_decay(rate: float) -> optax.GradientTransformationExtraArgs:
    """Adds `rate` times the parameter to decayed tensors' updates; of a list by its bools `decayed`."""

    def decay(decayed: list[bool] | None = None) -> optax.GradientTransformation:

        def mask(tree):
            return jax.tree.unflatten(jax.tree.structure(tree), decayed or decayed_tensors(tree))

        return optax.add_decayed_weights(rate, mask)

    def update(updates, state, params=None, *, decayed=None, **unused):
        del unused
        return decay(decayed).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(decay().init, update)


class StepOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer whose `update` does more in its pass over memory. `scale` multiplies gradients in float32. `finite`:
    if false, the states stay and the updates must not be used. `divided`: a bool for each gradient, whether it and its
    states are divided over devices; None: none is.
    """


def step_optimizer(optimizer: optax.GradientTransformation) -> StepOptimizer:
    """`optimizer` as a StepOptimizer. Further keyword arguments go to `optimizer.update`, which must know them."""
    if isinstance(optimizer, StepOptimizer):
        return optimizer

    def update(updates, state, params=None, *, scale=1.0, finite=True, divided=None, **extra_args):
        del divided  # XLA divides plain operations in the same way as their operands
        updates = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, updates)
        updates, new = optimizer.update(updates, state, params, **extra_args)
        return updates, _where(finite, new, state)

    return StepOptimizer(optimizer.init, update)


def _where(finite, new, old):
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> StepOptimizer:
    """The optimizer that `config` names, for float32 parameters, without clipping. If tensors are updated one by one,
    its update needs `decayed` and `embeddings`, lists of a bool for each.

    An update is minus the learning rate times (direction + weight_decay * parameter). With embedding_learning_rate,
    updates of embeddings and head, decay included, are scaled by its ratio to learning_rate. Adafactor (arXiv
    1804.04235) does not scale by the parameters' size. ValueError for an unknown name.
    """
    transforms = [_direction(config), _add_decay(config.weight_decay), optax.scale_by_learning_rate(schedule)]
    if config.embedding_learning_rate is not None:
        transforms.append(_scale_embeddings(_embedding_share(config)))
    optimizer = optax.chain(*transforms)
    if not config.name.endswith("_8bit"):
        return step_optimizer(optimizer)

    def update(updates, state: Any, params=None, *, scale=1.0, finite=True, divided=None, **extra_args):
        """Selects the moments where they are computed: a later selection would keep the old ones in memory."""
        new: Any
        updates, new = optimizer.update(
            updates, state, params, scale=scale, finite=finite, divided=divided, **extra_args
        )
        return updates, (new[0], *_where(finite, new[1:], state[1:]))

    return StepOptimizer(optimizer.init, update)


def _direction(config: OptimConfig) -> optax.GradientTransformation:
    """The optimizer's step before weight decay and learning rate. ValueError for an unknown name."""
    betas = config.beta1, config.beta2
    if config.name == "adamw":
        return optax.scale_by_adam(*betas, config.eps)
    if config.name == "adamw_8bit":
        return scale_by_adam_8bit(*betas, config.eps)
    if config.name == "lion":
        return optax.scale_by_lion(*betas)
    if config.name == "lion_8bit":
        return scale_by_lion_8bit(*betas)
    if config.name == "muon":
        assert config.momentum is not None
        return scale_by_muon(config.momentum, *betas, config.eps, orthogonal_tensors)
    if config.name == "adafactor":
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    if config.name == "sgd":
        return optax.trace(config.momentum) if config.momentum else optax.identity()
    raise ValueError(f"optim.name = {config.name!r}: must be {', '.join(OPTIMIZERS)}")
