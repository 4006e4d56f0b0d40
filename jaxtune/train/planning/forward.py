"""The plan of a forward pass without a backward, such as an evaluation or a teacher's. It fits where a training step
does not.
"""

from __future__ import annotations

import math
from typing import Any

from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import Sizes
from jaxtune.models.placement import partition
from jaxtune.models.stack.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.system import processes
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import CHUNK_LOGITS, splits
from jaxtune.train.planning.cost import StepCost, step_cost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.host_room import places
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.movables.movable import Outcome
from jaxtune.train.planning.parts import FROZEN, StepParts
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.plan_text import pass_lines
from jaxtune.train.planning.step_spec import StepSpec


def forward_bytes(costs: StepParts, tokens: float, chunk_tokens: int, device: Device) -> float:
    """Device bytes of a forward pass beside the weights that stay: those that stream, two arrays of hidden states, and
    the largest of a layer (an upper bound, with all its values at once), the head and the tower.

      tokens: computed at a time on one device.
      chunk_tokens: tokens whose logits exist at a time; 0: no head.
      costs: of the model, at the length of its rows.
    """
    layers, shape = [], costs.shape
    for kind in costs.layers.kinds:
        residuals = {name: kind.residual_bytes(name, tokens) for name in kind.residuals}
        sizes = Sizes(residuals, frozenset(residuals), 1, shape.dtype, shape.length, device.hopper, device.name)
        layers.append(sum(residuals.values()) + kind.block.forward_bytes(sizes, kind.renamed))
    hidden = tokens * shape.hidden_size * shape.dtype.itemsize
    head_parts, logit_parts = costs.head.parts_bytes(shape, device)
    logits = chunk_tokens * shape.vocab_size * (4.0 + shape.dtype.itemsize + logit_parts)
    of_pictures = 0.0
    if costs.tower is not None:
        of_pictures = forward_bytes(costs.tower.parts, tokens * costs.tower.patches / shape.length, 0, device)
    head = logits + (head_parts if chunk_tokens else 0.0)
    return sum(costs.moved.streaming[:2]) + 2 * hidden + max(*layers, head, of_pictures)


class ForwardPlanner:
    """Chooses micro-batches, logits at a time and, where an adapter's base does not fit, the layers whose weights
    stream, so that a forward pass fits; has a Planner's `plan`, `device`, `budget_bytes` and `cost`. If nothing fits,
    `plan` is the last that was tried, without an error.

      model: may be abstract.
      spec: its micro_batches is the least number that is tried; memory.plan says how many layers stream.
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
        self._all_bytes = partition.bytes_per_device((trainable, frozen), divided.shard_count)
        residuals = ResidualPlan.uniform(RECOMPUTE, costs.shape.num_layers)
        # The fewest micro-batches are tried first, and for each number of them the most logits at a time; each
        # micro-batch waits for all weights that stream.
        plans = [
            StepPlan(residuals, count, chunk, placed.moved.levels)
            for placed in self._placed(spec.memory.plan)
            for count in splits(costs.shape.rows, costs.shape.devices, None)
            if count >= (spec.micro_batches or 1)
            for chunk in sorted(self._chunks(count), reverse=True)
        ]
        self._plans = sorted(plans, key=lambda plan: plan.micro_batches * sum(plan.moved.values()))
        self.plan = next(filter(self._fits, self._plans), self._plans[-1])

    def _placed(self, text: str | None) -> list[StepCost]:
        """The costs with each number of layers whose weights may stream; memory.plan's alone if it has any."""
        streaming = {word for word, movable in self.cost.movables.items() if movable.last_resort and movable.able}
        asked = {word: min(MOVABLES[word].layers_on_host(text or ""), self.cost.shape.num_layers) for word in streaming}
        limits = {word: (level, level) for word, level in asked.items() if level}
        return places(self.cost.limited(dict.fromkeys(MOVABLES.keys() - streaming, (0, 0)) | limits), self.device)

    @property
    def weight_bytes(self) -> float:
        """Device bytes of the weights under the plan."""
        return self._weights(self.plan)

    def _weights(self, plan: StepPlan) -> float:
        return self._all_bytes - self.cost.fixed[FROZEN] + self.cost.placed(plan.moved).fixed[FROZEN]

    def _room(self, plan: StepPlan) -> float:
        budget = math.inf if self.budget_bytes is None else self.budget_bytes
        return budget - self._weights(plan) - self.beside_bytes

    def _fits(self, plan: StepPlan, worse: float = 1.0) -> bool:
        return worse * self.working_bytes(plan) <= self._room(plan)

    def lines(self, rows: int) -> list[str]:
        """The weights that stream, and the predicted time of a pass over so many rows; [] if none do."""
        costs, outcome = self.cost.placed(self.plan.moved), Outcome(self.plan.residuals, self.plan.micro_batches, 0, 0)
        lines = [line for word in self.plan.moved for line in costs.movables[word].lines(costs, outcome, self.device)]
        return lines + pass_lines(self.plan, self.cost, self.device, {"an evaluation's": rows})

    def _chunks(self, count: int) -> set[int]:
        shape = self.cost.shape
        return {max(1, min(int(shape.tokens(count)), logits // shape.vocab_size)) for logits in CHUNK_LOGITS}

    def working_bytes(self, plan: StepPlan) -> float:
        """Device bytes beside the weights, by forecast."""
        tokens = self.cost.shape.tokens(plan.micro_batches)
        return forward_bytes(self.cost.placed(plan.moved), tokens, plan.chunk_tokens, self.device)

    def smaller(self, program: Any) -> bool:
        """Takes a smaller plan if `program` (jax.stages.Compiled) needs more than there is, as if other forecasts were
        as wrong; returns whether it did, so that it must be compiled. False also if the need is unknown or no plan is
        smaller whose weights lie where the plan's do, as they are placed by now. Every process must call: the largest
        need decides.
        """
        analysis = program.memory_analysis()
        if self.budget_bytes is None or analysis is None:
            return False
        need = max(processes.all_of(float(analysis.temp_size_in_bytes)))
        if need <= self._room(self.plan):
            return False
        worse = max(need / self.working_bytes(self.plan), 1.0)
        later = [plan for plan in self._plans[self._plans.index(self.plan) + 1 :] if plan.moved == self.plan.moved]
        if not later:
            return False
        self.plan = next((plan for plan in later if self._fits(plan, worse)), later[-1])
        return True
