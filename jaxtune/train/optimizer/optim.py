"""The optimizers, all of them optax transformations, and what a step asks of them."""

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


def weight_storage(wanted: Literal["fp32", "bf16"] | None, precision: str, parameters: int) -> Literal["fp32", "bf16"]:
    """The dtype in which trained matrices are stored: `wanted`, or, if that is None, "bf16" (with stochastic rounding)
    for a run that computes in bf16 and trains more than 2 billion parameters, else "fp32". With either, trained tensors
    of one dimension are float32. The run and its planner call it.

    Full fine-tuning of a large model (8B: 32 GB of float32 weights, and as much again for gradients) would not fit one
    GPU in float32. Adapters hardly ever have that many parameters.

    Args:
      wanted: the config key optim.weights; None if it is not set.
      precision: the dtype of computation (TrainConfig.computes_in), "bf16", "fp16" or "fp32".
      parameters: number of trained parameters.
    """
    if wanted is not None:
        return wanted
    return "bf16" if precision == "bf16" and parameters > BF16_WEIGHTS_ABOVE else "fp32"


@dataclasses.dataclass(frozen=True)
class UpdateBound:
    """A bound on one update of weights: no element w changes by more than rate * (direction + decay * |w|), where rate
    is the learning rate. A step decides by it, before the update, whether all new weights will be finite."""

    direction: float
    """The largest element of the optimizer's direction, times the embeddings' learning rate over `rate` if that ratio
    is above 1."""
    decay: float
    """The factor of weight decay, times the same ratio if that is above 1."""


def update_bound(config: OptimConfig, max_grad_norm: float | None) -> UpdateBound | None:
    """The bound on one update of the optimizer in `config`: with gradients clipped to max_grad_norm (None: they are
    not) of Adam, whose bias-corrected mean of gradients is at most that norm and is divided by at least eps, and of
    Muon; of Lion always, as its direction is a sign. None: the step computes the whole update to know."""
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
    """The learning rate of embeddings and output head as a multiple of that of all other tensors, by `config`; 1.0 if
    it sets none. `update_bound` and `make_optimizer` use it."""
    rate = config.embedding_learning_rate
    return 1.0 if rate is None else rate / config.learning_rate


def decayed_tensors(parameters) -> list[bool]:
    """[bool], in the order of jax.tree.leaves: whether weight decay applies to each tensor of `parameters`, an
    nnx.State. It applies to those with two or more dimensions (matrices, embeddings and adapters' too, and experts'
    weights) whose name is not "bias", as experts' biases have two; so not to norms, biases or DoRA magnitudes. The
    optimizer finds them so, and the train step where it updates tensors one by one."""
    found = jax.tree_util.tree_leaves_with_path(parameters)
    return [leaf.ndim >= 2 and "bias" not in (getattr(key, "key", None) for key in path) for path, leaf in found]


def embedding_tensors(parameters) -> list[bool]:
    """[bool], in the order of jax.tree.leaves: whether each tensor of `parameters`, an nnx.State, is the matrix of the
    input embeddings or of the output head; these may have a learning rate of their own (optim.embedding_learning_rate).
    They are known by their names, "embedding.weight" and "head.weight"; their adapters' matrices are not among them.
    `_scale_embeddings` and a step that updates tensors one by one ask it; a run with that option is refused if no
    tensor is among them."""
    names = [
        [getattr(key, "key", None) for key in path[:2]] for path, _ in jax.tree_util.tree_leaves_with_path(parameters)
    ]
    return [name in (["embedding", "weight"], ["head", "weight"]) for name in names]


def orthogonal_tensors(
    parameters, decayed: list[bool] | None = None, embeddings: list[bool] | None = None
) -> list[bool]:
    """Whether Muon updates each tensor: matrices (an expert's are one each, an adapter's too) but not those of the
    embeddings and the output head. decayed, embeddings: as decayed_tensors and embedding_tensors find them by name,
    where `parameters` is a list."""
    decayed = decayed_tensors(parameters) if decayed is None else decayed
    embeddings = embedding_tensors(parameters) if embeddings is None else embeddings
    return [matrix and not vocabulary for matrix, vocabulary in zip(decayed, embeddings, strict=True)]


def _scale_embeddings(share: float) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that multiplies the updates of embeddings and output head by `share`, so that they have a
    learning rate of their own. `make_optimizer` puts it last. Its update takes `embeddings`, one bool for each tensor,
    True for those to multiply; None: they are found by name. It must be given if the parameters are a list, as when
    tensors are updated one by one, because a list has no names and none would be found."""

    def update(updates, state, params=None, *, embeddings: list[bool] | None = None, **others):
        """(the updates, with those of embeddings and output head multiplied by `share`; `state`, which is empty).
        embeddings: a bool for each tensor, True for those; None: they are found by their names in `params`. others: not
        used."""
        del others
        leaves, structure = jax.tree.flatten(updates)
        which = embedding_tensors(params) if embeddings is None else embeddings
        scaled = [u * share if is_one else u for u, is_one in zip(leaves, which, strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _add_decay(rate: float) -> optax.GradientTransformationExtraArgs:
    """Weight decay as an optax transformation: it adds `rate` times the parameter to the update of each decayed tensor,
    before the update is multiplied by minus the learning rate. Its update takes `decayed`, one bool for each tensor;
    None: `decayed_tensors` decides, which knows biases by their names. If tensors are updated one by one, the
    parameters are a list without names, and `decayed` must be given. `make_optimizer` puts it behind the direction of
    every optimizer."""

    def decay(decayed: list[bool] | None = None) -> optax.GradientTransformation:
        """optax's transformation that adds weight decay to the updates of the tensors that `decayed` marks by a bool
        each; None: of those that decayed_tensors finds."""

        def mask(tree):
            """A tree like `tree` of bools, True for the tensors that decay, as optax takes it."""
            return jax.tree.unflatten(jax.tree.structure(tree), decayed or decayed_tensors(tree))

        return optax.add_decayed_weights(rate, mask)

    def update(updates, state, params=None, *, decayed=None, **others):
        """(the updates with the decay of `params` added; `state`, which is empty). decayed: a bool for each tensor,
        whether it decays; None: decayed_tensors decides. others: not used."""
        del others
        return decay(decayed).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(decay().init, update)


class StepOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer whose `update` takes three more keyword arguments from a train step, so that what they ask for is
    done in the same pass over memory in which states are read and written.

    `scale` is a float32 number by which gradients of any float dtype are multiplied in float32. `finite` is a bool: if
    it is true, the update is an ordinary one; if it is false, the new states equal the old ones, and the returned
    updates must not be used. `divided` is a list with a bool for each gradient: whether that gradient and its states
    are divided over the devices of the mesh (True) or whole on each (False); None: no gradient is divided."""


def step_optimizer(optimizer: optax.GradientTransformation) -> StepOptimizer:
    """Returns `optimizer` as a StepOptimizer, so that a train step, which calls it, can treat all optimizers alike,
    also one that was given to Trainer: itself if it is one, else an optimizer whose update casts gradients to float32
    and multiplies them by its argument `scale` before, and returns the old states instead of the new ones if its
    argument `finite` is false. It ignores `divided`; further keyword arguments are passed on to `optimizer.update`,
    which must know them."""
    if isinstance(optimizer, StepOptimizer):
        return optimizer

    def update(updates, state, params=None, *, scale=1.0, finite=True, divided=None, **own):
        """(updates, new states) of the wrapped optimizer, for the parameters `params`, its states `state` and the
        gradients `updates`, which are multiplied by `scale` in float32 before. If `finite` is false, the states are the
        old ones, and the updates must not be used. divided: not used. own: further arguments of the wrapped optimizer's
        update."""
        del divided  # XLA divides plain operations in the same way as their operands
        updates = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, updates)
        updates, new = optimizer.update(updates, state, params, **own)
        return updates, _where(finite, new, state)

    return StepOptimizer(optimizer.init, update)


def _where(finite, new, old):
    """A tree with the leaves of `new` if `finite` (a bool or bool[]) is true, else with those of `old`, which has the
    same structure: StepOptimizers so keep their old states in a step whose numbers are not finite. Weights, and the
    moments of adamw_8bit, are selected elsewhere."""
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def make_optimizer(config: OptimConfig, schedule: optax.Schedule) -> StepOptimizer:
    """The optimizer that `config` names, for float32 parameters, with the learning rate of `schedule` by the number of
    updates made. Its states are float32, except counts (int32) and moments in 8 bits. It does not clip: the factor
    `scale` of its update may. If tensors are updated one by one, its update must also be given `decayed` and
    `embeddings`: lists of a bool for each tensor, from decayed_tensors and embedding_tensors.

    Each update is minus the learning rate times (a direction plus weight_decay times the parameter), so that decay has
    the same meaning in all; norms, biases and DoRA magnitudes do not decay. With embedding_learning_rate the updates of
    embeddings and output head, decay included, are multiplied by embedding_learning_rate / learning_rate. Lion: arXiv
    2302.06675. Adafactor (arXiv 1804.04235) has factored second moments and update clipping, and does not scale the
    learning rate by the size of the parameters.

    Raises:
      ValueError: the name is unknown.
    """
    parts = [_direction(config), _add_decay(config.weight_decay), optax.scale_by_learning_rate(schedule)]
    if config.embedding_learning_rate is not None:
        parts.append(_scale_embeddings(_embedding_share(config)))
    optimizer = optax.chain(*parts)
    if not config.name.endswith("_8bit"):
        return step_optimizer(optimizer)

    def update(updates, state: Any, params=None, *, scale=1.0, finite=True, divided=None, **own):
        """The first entry of `state`, the moments, is selected where it is computed, as a later selection would keep
        the old moments in memory."""
        new: Any
        updates, new = optimizer.update(updates, state, params, scale=scale, finite=finite, divided=divided, **own)
        return updates, (new[0], *_where(finite, new[1:], state[1:]))

    return StepOptimizer(optimizer.init, update)


def _direction(config: OptimConfig) -> optax.GradientTransformation:
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
