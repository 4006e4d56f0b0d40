"""The plan of one run: chosen before it is compiled, checked after, kept when the run is resumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import optax

from jaxtune import processes
from jaxtune.models import partition
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import PlanError, choose, fitting_settings
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.forecasts import Forecast, forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.report import plan_lines

# A step that ran out of memory needed more than was predicted; by how much nobody says.
_MORE = 1.15
# Of the budget, by which a compiled step may exceed it. Forecasts are up to 0.3 % low (Qwen3.5 on an H200), the budget
# leaves four times as much to fragments, and a second compilation takes minutes.
_EXCESS = 0.005


def out_of_memory(error: BaseException) -> bool:
    """Whether XLA raised `error` because memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


class Planner:
    """Chooses the plan of a run on a device, and another one where the first was too large.

    Args:
      model: what is trained. length: of its rows, in tokens. device: a jax.Device of this process. keeps_model: whether
        somebody holds the model beside the run. optimizer: what moves the weights, if not what config.optim says.
      reference_runs: Objective.reference_runs. note: said before the plan, such as why it is on this mesh.

    Attributes: device (devices.Device), budget_bytes (None: no limit), cost (StepCost), forecast (of the plan
    in force).

    Raises:
      PlanError: nothing fits.
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        length: int,
        device: Any,
        keeps_model: bool = True,
        optimizer: optax.GradientTransformation | None = None,
        reference_runs: int = 0,
        note: str | None = None,
    ):
        self._changes: Any = dict(optimizer=optimizer, reference_runs=reference_runs)
        self.config, self.shape, self._note = config, model.config, note
        limit = processes.smallest((device.memory_stats() or {}).get("bytes_limit"))
        mesh = config.mesh or MeshConfig()
        sharing = devices.devices_here(math.prod(partition.mesh_shape(mesh.data, mesh.fsdp)))
        self.device = devices.find_device(
            "cpu" if device.platform == "cpu" else device.device_kind, limit, sharing=sharing
        )
        self.budget_bytes = devices.budget(config, self.device)
        self.cost = step_cost(model, config, length, keeps_model, **self._changes)
        self.forecast = self._choose(self.budget_bytes)

    @property
    def plan(self) -> StepPlan:
        return self.forecast.plan

    def lines(self) -> list[str]:
        """The plan in words."""
        lines = plan_lines(self.forecast, self.cost, self.device, self.budget_bytes)
        return lines if self._note is None else [self._note, *lines]

    def adopt(self, record: dict[str, Any]) -> None:
        """Takes a checkpoint's plan: one chosen anew might not be the same. Not where the config asks for another, nor
        on another mesh, whose bits are others in any case: its devices may have no room for it, more room than it uses,
        or not as many rows in each of its micro-batches."""
        mesh = self.config.mesh or MeshConfig()
        if (record["mesh_data"], record["mesh_fsdp"]) != partition.mesh_shape(mesh.data, mesh.fsdp):
            return
        stored = self._recorded(record)
        same_split = self.config.micro_batches in (None, stored.micro_batches)
        if same_split and (self.config.memory.plan is None or self.plan.residuals == stored.residuals):
            self.forecast = forecast(self.cost, stored, self.device)

    def _recorded(self, record: dict[str, Any]) -> StepPlan:
        return StepPlan.from_record(record, self.cost.num_layers, self.cost.known)

    def replan(
        self, problem: str, need_bytes: float | None, print_line: Callable[[str], None], begun: bool = False
    ) -> None:
        """Another plan, smaller by as much as the last one's need was underestimated (None: not known). begun: the
        weights lie as the last plan says, and stay so."""
        peak = self.forecast.peak_bytes
        room = "" if self.budget_bytes is None else f" in {self.budget_bytes / 1e9:.2f} GB"
        print_line(f"the plan does not fit{room}: {problem}; planning once more")
        smaller = peak / _MORE
        if need_bytes is not None and self.budget_bytes is not None:
            smaller = 0.99 * self.budget_bytes * peak / need_bytes  # another plan is as wrong to within so much
        self.forecast = self._choose(smaller, self.plan.residuals.resident if begun else 0)
        for line in self.lines():
            print_line(line)

    def fits(self, need_bytes: float) -> bool:
        """Whether a compiled step of so many bytes may run within the budget."""
        assert self.budget_bytes is not None
        return need_bytes <= self.budget_bytes * (1 + _EXCESS)

    def hopeless(self, problem: str) -> PlanError:
        """The error of a run whose second plan did not fit either."""
        budget = self.budget_bytes or self.forecast.peak_bytes
        return PlanError(self.forecast, budget, self._fixes(budget / _MORE), f"planned twice, and still {problem}; it")

    def _choose(self, budget_bytes: float | None, resident: int = 0) -> Forecast:
        try:
            found = choose(self.cost, self.config, self.device, budget_bytes, resident=resident)
            if processes.count() > 1:  # whose hosts and measured rates may differ
                plan = processes.of_first(found.plan.to_record)
                found = forecast(self.cost, self._recorded(plan), self.device)
            return found
        except PlanError as error:
            fixes = self._fixes(error.budget_bytes)
            raise PlanError(error.smallest, error.budget_bytes, fixes) from None

    def _fixes(self, budget_bytes: float) -> list[str]:
        data = dataclasses.replace(self.config.data, length=self.cost.length)
        config = dataclasses.replace(self.config, data=data)
        return fitting_settings(self.shape, config, self.device, budget_bytes, **self._changes)

    def compiled_bytes(self, *programs: Any) -> float:
        """What the compiler says that the programs of a step need at most, with all that lies beside their arguments.

        The work space that vendor libraries choose at run time is not in it.
        """
        needs = []
        for program in programs:
            analysis = program.memory_analysis()
            added = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            needs.append(analysis.temp_size_in_bytes + max(added, 0))
        return self.cost.fixed_bytes(self.plan.micro_batches, self.plan.residuals.resident) + max(needs)
