"""The plan of a forward pass without a backward, such as an evaluation or a teacher's. It fits where a training step
does not.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import Sizes
from jaxtune.models.placement import partition
from jaxtune.models.stack.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.system import processes
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import CHUNK_LOGITS, splits
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.parts import StepParts
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec


def forward_bytes(costs: StepParts, tokens: float, chunk_tokens: int, device: Device) -> float:
    """Device bytes of a forward pass beside the weights: two arrays of hidden states, and the largest of a layer (an
    upper bound, with all its values at once), the head and the tower.

      tokens: computed at a time on one device.
      chunk_tokens: tokens whose logits exist at a time; 0: no head.
      costs: of the model, at the length of its rows.
    """
    layers, shape = [], costs.shape
    for kind in costs.layers.kinds:
        residuals = {name: kind.residual_bytes(name, tokens) for name in kind.residuals}
        sizes = Sizes(residuals, frozenset(residuals), 1, shape.dtype, shape.length, device.hopper, device.name)
        layers.append(sum(residuals.values()) + kind.block.forward_bytes(sizes))
    hidden = tokens * shape.hidden_size * shape.dtype.itemsize
    head_parts, logit_parts = costs.head.parts_bytes(shape, device)
    logits = chunk_tokens * shape.vocab_size * (4.0 + shape.dtype.itemsize + logit_parts)
    of_pictures = 0.0
    if costs.tower is not None:
        of_pictures = forward_bytes(costs.tower.parts, tokens * costs.tower.patches / shape.length, 0, device)
    return 2 * hidden + max(*layers, logits + (head_parts if chunk_tokens else 0.0), of_pictures)


class ForwardPlanner:
    """Chooses micro-batches and logits at a time, so that a forward pass fits; has a Planner's `plan`, `device`,
    `budget_bytes` and `cost`. If nothing fits, `plan` is the smallest, without an error.

      model: may be abstract.
      spec: its micro_batches is the least number that is tried.
      device: a jax.Device (then construction is collective), or the planner's Device.
      beside_bytes: of other weights on each device meanwhile.
    """

    def __init__(self, model: Decoder, spec: StepSpec, device: Any, beside_bytes: float = 0.0):
        divided = spec.mesh_shape
        if not isinstance(device, Device):
            limit = processes.smallest((device.memory_stats() or {}).get("bytes_limit"))
            sharing = devices.devices_here(divided.size)
            name = "cpu" if device.platform == "cpu" else device.device_kind
            device = devices.find_device(name, limit, sharing=sharing)
        self.device: Device = device
        self.beside_bytes = beside_bytes
        self.budget_bytes = devices.budget(spec.memory, self.device)
        self.cost = costs = step_cost(model, spec.forward)
        _, trainable, frozen = nnx.split(model, nnx.Param, ...)
        self.weight_bytes = partition.bytes_per_device((trainable, frozen), divided.shard_count)
        residuals = ResidualPlan.uniform(RECOMPUTE, costs.shape.num_layers)
        # The fewest micro-batches are tried first, and for each number of them the most logits at a time.
        self._plans = [
            StepPlan(residuals, count, chunk)
            for count in splits(costs.shape.rows, costs.shape.devices, None)
            if count >= (spec.micro_batches or 1)
            for chunk in sorted(self._chunks(count), reverse=True)
        ]
        room = None if self.budget_bytes is None else self.budget_bytes - self.weight_bytes - beside_bytes
        fitting = (plan for plan in self._plans if room is None or self.working_bytes(plan) <= room)
        self.plan = next(fitting, self._plans[-1])

    def _chunks(self, count: int) -> set[int]:
        shape = self.cost.shape
        return {max(1, min(int(shape.tokens(count)), logits // shape.vocab_size)) for logits in CHUNK_LOGITS}

    def working_bytes(self, plan: StepPlan) -> float:
        """Device bytes beside the weights, by forecast."""
        return forward_bytes(self.cost, self.cost.shape.tokens(plan.micro_batches), plan.chunk_tokens, self.device)

    def smaller(self, program: Any) -> bool:
        """Takes a smaller plan if `program` (jax.stages.Compiled) needs more than there is, as if other forecasts were
        as wrong; returns whether it did, so that it must be compiled. False also if the need is unknown or no plan is
        smaller. Every process must call: the largest need decides.
        """
        analysis = program.memory_analysis()
        if self.budget_bytes is None or analysis is None:
            return False
        need = max(processes.all_of(float(analysis.temp_size_in_bytes)))
        room = self.budget_bytes - self.weight_bytes - self.beside_bytes
        if need <= room:
            return False
        worse = max(need / self.working_bytes(self.plan), 1.0)
        later = self._plans[self._plans.index(self.plan) + 1 :]
        if not later:
            return False
        self.plan = next((plan for plan in later if worse * self.working_bytes(plan) <= room), later[-1])
        return True
