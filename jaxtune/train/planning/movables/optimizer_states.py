"""An adapter's optimizer states on the host between updates (optimizer_offload.py). Tensors are then updated one by
one, so last bits may differ. In full fine-tuning the config decides (optim.offload).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import optax

from jaxtune.models.decoder import Decoder
from jaxtune.train.config.sections import HOSTED_OPTIMIZERS
from jaxtune.train.optimizer import optimizer_offload
from jaxtune.train.optimizer.optim import update_bound
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.layer_forecasts import step_time
from jaxtune.train.planning.movables.movable import Movable, Outcome, Seconds
from jaxtune.train.planning.parts import STATES, StepParts
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.step import StepProgram


@dataclasses.dataclass(frozen=True)
class OptimizerStates(Movable):
    """Large arrays of the states of a run on one device whose optimizer may have them on the host. None without an
    update bound (`update_bound`), as the update would be computed twice.
    """

    word = "optimizer_states"
    side = "host"
    worth = 1.01  # they take host memory, and are copied back for every save; forecasts are not exact
    errs_apart = True

    bytes: float = 0.0
    arrays: int = 0
    name: str = ""  # of the optimizer

    @property
    def able(self) -> bool:
        return self.bytes > 0

    @classmethod
    def of(cls, model: Decoder, states: optax.OptState, spec: StepSpec) -> OptimizerStates:
        optim = spec.optim
        alone = spec.mesh_shape.size == 1 and spec.model.adapts and spec.optimizer is None
        if not alone or optim.name not in HOSTED_OPTIMIZERS or update_bound(optim, spec.max_grad_norm) is None:
            return cls(name=optim.name)
        hosted = [leaf for leaf in jax.tree.leaves(states) if optimizer_offload.is_hosted(leaf)]
        return cls(float(optimizer_offload.hosted_bytes(hosted)), len(hosted), optim.name)

    def levels(self, costs: StepParts, device: Device) -> Sequence[int]:
        return (1,)

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        """They free device memory until the update, which has them all there."""
        update = dataclasses.replace(costs.update, hosted_bytes=self.bytes, bytes=self.bytes)
        moved = dataclasses.replace(costs.moved, pinned_bytes=costs.moved.pinned_bytes + self.bytes)
        fixed = {**costs.fixed, STATES: costs.fixed[STATES] - self.bytes}
        return dataclasses.replace(costs, fixed=fixed, update=update, moved=moved)

    def seconds(self, costs: StepParts, device: Device) -> Seconds:
        """Copies from the host and back, also of those that the config has there."""
        copies = self.arrays * costs.level(self.word) * step_time(device).copy_seconds
        return Seconds(update=2 * (copies + costs.update.hosted_bytes / (device.link or device.copy)))

    def refusal(self, costs: StepParts, device: Device) -> str | None:
        size = costs.update.hosted_bytes
        if not device.link or size <= device.host_bytes:
            return None
        return (
            f"optim.offload: the states of {self.name} take {size / 1e9:.1f} GB of host memory for each device, which "
            f"may pin {device.host_bytes / 1e9:.1f} GB; use an optimizer in 8 bits, or unset it"
        )

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        size, seconds = costs.update.hosted_bytes, self.seconds(costs, device).update
        if not size or device.name == "cpu":
            return []
        return [f"  optimizer states on the host: {size / 1e9:.2f} GB, {seconds:.2f} s a step"]

    @classmethod
    def program(cls, program: StepProgram, level: int) -> StepProgram:
        return dataclasses.replace(program, offload=program.offload or bool(level))
