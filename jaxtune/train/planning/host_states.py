"""An adapter's optimizer states on the device, or on the host and copied for each update (optimizer_offload.py), if
that is faster or nothing else fits. Tensors are then updated one by one, so last bits may differ. In full fine-tuning
the config decides (optim.offload).
"""

from __future__ import annotations

import dataclasses

import jax

from jaxtune.train.config import TrainConfig
from jaxtune.train.config.sections import HOSTED_OPTIMIZERS
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import update_bound

_BLOCKED_STATES = {"adamw_8bit": 2 + 8 / 256, "lion_8bit": 1 + 4 / 256}  # bytes for an element
# For an element: the direction, the momentum with Nesterov's, an iteration's sum in float32, and two bfloat16 copies.
_MUON_BYTES = 3 * 4.0 + 2 * 2.0


@dataclasses.dataclass(frozen=True)
class States:
    """Optimizer states that a plan may move to the host."""

    bytes: float = 0.0  # of the arrays that may be on the host; 0: none may
    arrays: int = 0  # their number


NO_STATES = States()  # of a run whose states are where its config says


def states_of(states, config: TrainConfig) -> States:
    """The states that a plan may move to the host, in a run on one device; none without an update bound
    (`update_bound`), as the update would be computed twice.
    """
    hosted_optimizer = config.optim.name in HOSTED_OPTIMIZERS
    if config.adapter is None or not hosted_optimizer or update_bound(config.optim, config.max_grad_norm) is None:
        return NO_STATES
    hosted = [leaf for leaf in jax.tree.leaves(states) if optimizer_offload.is_hosted(leaf)]
    return States(float(optimizer_offload.hosted_bytes(hosted)), len(hosted))


def update_bytes(masters, config: TrainConfig) -> float:
    """Device bytes of the update beside weights, states and gradients: the largest tensor's, as they are updated one by
    one. 0 with an adapter. masters: float32 shapes of the trained weights.
    """
    if config.adapter is not None:
        return 0.0
    size, name = max((leaf.size for leaf in jax.tree.leaves(masters)), default=0), config.optim.name
    if name in _BLOCKED_STATES:
        # The direction, for Lion the momentum before it is encoded, and if the update is computed twice (step.py), the
        # first states. With states on the host: one tensor's states, and half of the next one's.
        direction = 4.0 if name == "adamw_8bit" else 8.0
        twice = config.max_grad_norm is None and name == "adamw_8bit"
        extra_states = 1.5 if config.optim.offload else 1.0 if twice else 0.0
        return size * (direction + extra_states * _BLOCKED_STATES[name])
    if name == "muon":
        return size * _MUON_BYTES
    # Moments before and after the update, with the gaps that the compiler leaves between large buffers.
    return size * (24.0 if name == "adamw" else 12.0) if config.optim.offload else 0.0
