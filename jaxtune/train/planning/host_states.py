"""Where the planner may put the optimizer's states of an adapter: on the device, or on the host, from which they are
copied to the device for each update and back (train/optimizer/optimizer_offload.py). The plan has them on the host if
that is faster, because the device then has more room for a micro-batch, or if no other plan fits. Tensors are then
updated one by one, so results may differ in the last bits, as under any other plan. `states_of` gives the facts about a
run's states (`States`), and `update_bytes` what an update takes.

Full fine-tuning, whose states are most of what a step keeps, has the config decide (optim.offload)."""

from __future__ import annotations

import dataclasses

import jax

from jaxtune.train.config import TrainConfig
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import update_bound

_ADAM8_STATES = 2 + 8 / 256  # bytes for an element


@dataclasses.dataclass(frozen=True)
class States:
    """The facts about the optimizer's states that the planner needs, as `states_of` finds them: StepCost.states. With 0
    in `bytes`, no plan moves them to the host."""

    bytes: float = 0.0  # of the arrays that may be on the host; 0: none may
    arrays: int = 0  # their number


NO_STATES = States()  # of a run whose states are where its config says


def states_of(states, config: TrainConfig) -> States:
    """The planner's facts about the optimizer's `states`, which may be abstract, in a run of `config` on one device,
    with the optimizer that the config names. Those of an adapter may be on the host if the optimizer's update has a
    bound (`update_bound`), without which it would be computed twice. step_cost calls it; where the states then are, the
    choice of a plan decides."""
    if config.adapter is None or update_bound(config.optim, config.max_grad_norm) is None:
        return NO_STATES
    hosted = [leaf for leaf in jax.tree.leaves(states) if optimizer_offload.is_hosted(leaf)]
    return States(float(optimizer_offload.hosted_bytes(hosted)), len(hosted))


def update_bytes(masters, config: TrainConfig) -> float:
    """Device bytes that the update takes in addition to weights, states and gradients, on one device if nothing is
    divided. It is done tensor by tensor (optimizer_offload.py), so they are those of the largest tensor. 0 with an
    adapter, where they are negligible, and if the states are on the device, unless the optimizer is adamw_8bit.
    masters: the trained weights' float32 shapes. config: has the optimizer. step_cost takes a device's share."""
    if config.adapter is not None:
        return 0.0
    size = max((leaf.size for leaf in jax.tree.leaves(masters)), default=0)
    if config.optim.name == "adamw_8bit":
        # The update direction and, if the update is computed twice (step.py), first moments. With states on the host:
        # one tensor's states, and one moment of the next tensor.
        beside = 1.5 if config.optim.offload else 1.0 if config.max_grad_norm is None else 0.0
        return size * (4.0 + beside * _ADAM8_STATES)
    # Moments before and after the update, with the gaps that the compiler leaves between large buffers.
    return size * 24.0 if config.optim.offload else 0.0
