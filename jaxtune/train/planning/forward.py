"""The plan of a forward pass without a backward, such as an evaluation or a pass of a teacher. `ForwardPlanner` chooses
into how many micro-batches the rows of a batch are divided, and for how many tokens the logits exist at a time, so that
the pass fits the device's memory. A forward pass has no optimizer, no gradients and no residuals, so it fits where a
training step of the same model does not. `forward_bytes` forecasts its memory. Trainers that only evaluate, and passes
of a teacher (teacher_pass.py), make a ForwardPlanner.

`jaxtune train --check`, which shows the rows and runs nothing, uses this plan too, so that it works for a model whose
training step would not fit."""

from __future__ import annotations

from typing import Any

import optax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import Sizes
from jaxtune.models.placement import partition
from jaxtune.models.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.system import processes
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import CHUNK_LOGITS, splits
from jaxtune.train.planning.cost import StepCost, step_cost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.plan import StepPlan


def forward_bytes(parts: StepCost, tokens: float, chunk_tokens: int, device: Device) -> float:
    """Device bytes that a forward pass takes in addition to the weights, for the plans of passes without a backward and
    the forecasts of a run's phases.

    They are two arrays of hidden states and the larger of two needs, that of a layer and that of the head. The first
    is an upper bound: it counts all values of a layer at once, and XLA frees some of them earlier. The second has the
    logits of one chunk, which exist at a time (linear_cross_entropy), and no copies of the head's weight except the
    parts of a head in float32 (StepCost.head_parts_bytes).

    Args:
      parts: costs of the model on the mesh.
      tokens: number of tokens that one device computes at a time.
      chunk_tokens: tokens whose logits exist at a time; 0: the head does not count.
      device: the device.
    """
    layers = []
    for kind in parts.kinds:
        residuals = {name: kind.residual_bytes(name, tokens) for name in kind.residuals}
        sizes = Sizes(residuals, frozenset(residuals), 1, parts.dtype, parts.length, device.hopper, device.name)
        layers.append(sum(residuals.values()) + kind.block.forward_bytes(sizes))
    hidden = tokens * parts.hidden_size * parts.dtype.itemsize
    head_parts, logit_parts = parts.head_parts_bytes(device)
    logits = chunk_tokens * parts.vocab_size * (4.0 + parts.dtype.itemsize + logit_parts)
    return 2 * hidden + max(max(layers), logits + (head_parts if chunk_tokens else 0.0))


class ForwardPlanner:
    """Chooses into how many micro-batches the rows of a batch are divided so that a forward pass fits a device, and for
    how many tokens the logits exist at a time. Both are chosen by forecast (`working_bytes`); `smaller` chooses anew if
    the compiled program needs too much.

    Engine takes it in place of a Planner, whose attributes `plan`, `device`, `budget_bytes` and `cost` it has.

    Args:
      model: its arrays may be abstract.
      config: the run's, with its mesh; config.micro_batches is the least number of micro-batches that is tried.
      length: tokens of a row.
      device: a jax.Device of this process, for which all processes must make the planner; or the planner's Device.
      beside_bytes: bytes of other weights that are on each device during the pass.

    Attributes:
      device: the planner's Device.
      budget_bytes: device bytes that weights and programs may take; None if nothing limits them.
      beside_bytes: the argument.
      weight_bytes: bytes of the model's weights on one device.
      cost: the StepCost of the model, without an optimizer.
      plan: the StepPlan in force: the number of micro-batches, the fewest that fit, and the tokens whose logits exist
        at a time, the most that fit with them. If nothing fits, it is the smallest plan, and no error is raised. Its
        residuals have no meaning here.
    """

    def __init__(self, model: Decoder, config: TrainConfig, length: int, device: Any, beside_bytes: float = 0.0):
        """Finds the device's memory and the costs of the model, and chooses the plan; nothing is compiled. The class
        describes the arguments."""
        mesh = config.mesh or MeshConfig()
        divided = partition.mesh_shape(*mesh.sizes)
        if not isinstance(device, Device):
            limit = processes.smallest((device.memory_stats() or {}).get("bytes_limit"))
            sharing = devices.devices_here(divided.size)
            name = "cpu" if device.platform == "cpu" else device.device_kind
            device = devices.find_device(name, limit, sharing=sharing)
        self.device: Device = device
        self.beside_bytes = beside_bytes
        self.budget_bytes = devices.budget(config, self.device)
        self.cost = parts = step_cost(model, config, length, optimizer=optax.identity())
        _, trainable, frozen = nnx.split(model, nnx.Param, ...)
        self.weight_bytes = partition.bytes_per_device((trainable, frozen), divided.parts)
        residuals = ResidualPlan.uniform(RECOMPUTE, parts.num_layers)
        # The fewest parts are tried first, and for each number of parts the most logits at a time.
        self._plans = [
            StepPlan(residuals, count, chunk)
            for count in splits(parts.rows, parts.devices, None)
            if count >= (config.micro_batches or 1)
            for chunk in sorted(self._chunks(count), reverse=True)
        ]
        room = None if self.budget_bytes is None else self.budget_bytes - self.weight_bytes - beside_bytes
        fitting = (plan for plan in self._plans if room is None or self.working_bytes(plan) <= room)
        self.plan = next(fitting, self._plans[-1])

    def _chunks(self, count: int) -> set[int]:
        """Candidates for the number of tokens whose logits exist at a time, if the rows are divided into `count`
        micro-batches: those with at most 2**24 to 2**28 logits, but no more tokens than a micro-batch has on a device,
        and at least 1."""
        tokens = int(self._tokens(count))
        return {max(1, min(tokens, logits // self.cost.vocab_size)) for logits in CHUNK_LOGITS}

    def _tokens(self, count: int) -> float:
        """The number of tokens that one device computes at a time, padding included, if the rows are divided into
        `count` micro-batches: a quotient, so not always a whole number. The memory of the pass is forecast by it."""
        return self.cost.rows / count / self.cost.devices * self.cost.length

    def working_bytes(self, plan: StepPlan) -> float:
        """Device bytes that a forward pass under `plan` takes in addition to the weights, by forecast. The planner
        takes the first plan whose bytes fit beside all weights; if the compiled program then needs more than there is,
        `smaller` scales the other plans' forecasts by the error."""
        return forward_bytes(self.cost, self._tokens(plan.micro_batches), plan.chunk_tokens, self.device)

    def smaller(self, program: Any) -> bool:
        """Changes `plan` to a smaller one if the compiler says that `program` (jax.stages.Compiled), compiled for the
        present plan, needs more device memory than there is. A Trainer that only evaluates calls it, and a teacher's
        pass. The next plan must fit even if its forecast is as much too low as this one's was; if none does, the
        smallest is taken. If the budget is limited, all processes of a run must call it, and the largest need of any
        decides.

        Returns:
          whether the plan was changed, so that it must be compiled again. False: the program fits, or its need is
            unknown, or there is no smaller plan, in which case running the program shows whether it fits.
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
