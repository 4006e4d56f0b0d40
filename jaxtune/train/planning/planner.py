"""The planner of one training run (`Planner`): chooses its plan, checks it against the compiler, and restores it when
the run is resumed. (Passes without a backward have a ForwardPlanner, forward.py.) `out_of_memory` recognises the errors
after which another plan is tried."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import optax

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.display.report import plan_lines
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import PlanError
from jaxtune.train.planning.cost import StepCost, step_cost
from jaxtune.train.planning.fitting import fitting_settings
from jaxtune.train.planning.forecasts import Forecast, forecast
from jaxtune.train.planning.host_states import NO_STATES
from jaxtune.train.planning.host_table import NO_TABLE
from jaxtune.train.planning.known import KnownFailures
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.search import Failed, Room, goal, next_plan, short_bytes


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of XLA (JaxRuntimeError) says that device or host memory ran out. Only its message is searched,
    for RESOURCE_EXHAUSTED or "out of memory"; the caller must have tested the type. If so, Engine tries another plan
    (while it compiles, and in the first step), and `phase` raises the error with a remedy."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def refused_bytes(error: BaseException) -> float | None:
    """The bytes of the allocation that an error of XLA (JaxRuntimeError) says was refused, as in "trying to allocate
    1.98GiB"; None if its message names none. Planner.short_bytes asks it by how much a step was too large."""
    found = re.search(r"trying to allocate ([\d.]+) ?(bytes|[KMGT]iB)", str(error))
    return None if found is None else float(found[1]) * 1024.0 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(found[2])


class Planner:
    """Chooses the plan of a run on a device, and a smaller one if the first was too large. A run has one, with which
    its Engine compiles. `plan` is the plan in force, and `lines` its text; `adopt` takes that of a checkpoint;
    `skip_known_failures` and `replan` choose another; `compiled_bytes` and `fits` compare the compiler's figure with
    the memory. In a run of several processes all must make it, and call `skip_known_failures` and `replan`, at the same
    time, because the first one decides for all.

    Args:
      model: what trains.
      config: the run's.
      length: tokens of a row.
      device: a jax.Device of this process.
      keeps_model: True: the model that was given stays in memory during the run, beside the copies of its trained
        tensors. False: only the copies exist.
      optimizer: updates the weights; None: the one that config.optim asks for.
      reference_runs: how many forward passes of a frozen reference model each loss has (Objective.reference_runs).
      note: a line printed before the plan, such as the reason for the mesh.

    Attributes:
      device: planning.devices.Device: the memory and the speed of the device.
      room: search.Room: the memory that a step may take.
      cost: StepCost: the bytes and the work of a step, whatever the plan, except that what may be on
        the host (tables of embeddings, optimizer states) is where the plan in force has it.
      forecast: Forecast: the memory and the time of a step by the plan in force.

    Raises:
      PlanError: by forecast even the smallest plan exceeds `room.limit_bytes`.
      ValueError: the device is refused; config.memory.plan cannot be read; or the host's memory is too small for the
        optimizer's states.
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
        """Finds the memory and the rates of the device and the costs of a step, and chooses the plan by forecast;
        nothing is compiled. The class describes the arguments and the errors."""
        self._changes: Any = dict(optimizer=optimizer, reference_runs=reference_runs)
        self.config, self.shape, self._note = config, model.config, note
        limit = processes.smallest((device.memory_stats() or {}).get("bytes_limit"))
        mesh = config.mesh or MeshConfig()
        sharing = devices.devices_here(partition.mesh_shape(*mesh.sizes).size)
        self.device = devices.find_device(
            "cpu" if device.platform == "cpu" else device.device_kind, limit, sharing=sharing
        )
        self.room = Room(devices.budget(config, self.device), devices.limit(config, self.device))
        self._cost = step_cost(model, config, length, keeps_model, **self._changes)
        self._failed: list[Failed] = []
        self._known: KnownFailures | None = None
        self.forecast, self._smallest = self._next()

    @property
    def plan(self) -> StepPlan:
        """The plan in force: the one with which the step is compiled, until `adopt`, `skip_known_failures` or `replan`
        takes another."""
        return self.forecast.plan

    @property
    def cost(self) -> StepCost:
        """The costs of a step, which are its bytes and its work (its times are in `forecast`), with the tables
        of embeddings and optimizer states where the plan in force has them, for `compiled_bytes`, the phases of
        the run, and the plan of sampled answers. Plans are chosen from `_cost`, which leaves these places open."""
        return self._cost.placed(self.plan)

    @property
    def budget_bytes(self) -> float | None:
        """Bytes of device memory that a step may take; None if nothing limits them. Reports, the phases of the run and
        the plan of sampled answers take it; whether a compiled step may run, `fits` decides."""
        return self.room.budget_bytes

    @property
    def compilations(self) -> int:
        """The number of plans that this run compiled, or skipped because an earlier run failed with them, with the one
        in force; 1 if the first plan fitted. Benchmarks record it."""
        return len(self._failed) + 1

    def lines(self) -> list[str]:
        """The plan in force as the lines of text that a run prints and logs: the planner's `note` if there
        is one (the reason for the mesh), then placements, memory and speed (report.plan_lines)."""
        lines = plan_lines(self.forecast, self.cost, self.device, self.budget_bytes)
        return lines if self._note is None else [self._note, *lines]

    def adopt(self, record: dict[str, Any]) -> None:
        """Takes the plan in `record` (StepPlan.to_record and the mesh's sizes), that of the checkpoint from which the
        run resumes, because a plan chosen anew might differ and would then change results in the last bits. Raises
        ValueError if it is a plan on the same mesh that is not possible for this model's layers and residuals.

        The plan is not taken if the config asks for another one (memory.plan or micro_batches), if its
        micro-batches do not divide the rows of a step, or if the mesh is another. Results on another mesh differ in any
        case, and its devices may have less memory, more memory, or too few rows for the micro-batches. If this run
        cannot have tables of embeddings or optimizer states on the host, the plan is taken with them on the device:
        the tables' place changes no result, and that of the states at most the last bits. If it cannot keep transposed
        codes, which change no result either, the plan is taken without them.

        Whether the plan fits is not checked here: Engine.fit compiles it, and chooses another one if it does not fit
        the budget. The caller must call Engine.follow_plan."""
        mesh = self.config.mesh or MeshConfig()
        if partition.MeshShape.from_record(record) != partition.mesh_shape(*mesh.sizes):
            return
        stored = self._recorded(record)
        if stored.table_on_host and not self._cost.table.bytes:  # where they are changes no result
            stored = dataclasses.replace(stored, table_on_host=False)
        if stored.states_on_host and not self._cost.states.bytes:
            stored = dataclasses.replace(stored, states_on_host=False)
        if stored.transposed_codes and not self._cost.codes_bytes:
            stored = dataclasses.replace(stored, transposed_codes=False)
        # With data.packing=step a changed number of steps can change the number of rows.
        same_split = self.config.micro_batches in (None, stored.micro_batches)
        same_split = same_split and self.cost.rows % stored.micro_batches == 0
        if same_split and (self.config.memory.plan is None or self.plan.residuals == stored.residuals):
            self.forecast, self._smallest = forecast(self._cost, stored, self.device), False

    def _recorded(self, record: dict[str, Any]) -> StepPlan:
        """The StepPlan for this model in a `record` that StepPlan.to_record made, in a checkpoint or in the first
        process of the run: `adopt` and `_next` read it. Raises ValueError if the plan is not possible for this model's
        layers and residuals."""
        return StepPlan.from_record(record, self._cost.num_layers, self._cost.known)

    def skip_known_failures(self, known: KnownFailures) -> None:
        """Replaces the plan in force by the one that would be tried next (as `replan` chooses it), as long as `known`
        says that it failed in an earlier run of the same programs: that it needed more device memory than this run's
        budget, or that memory ran out in it with a budget at least as large. `replan` then records this run's failures
        in `known`. If no plan is left so, all earlier failures are ignored, and the first plan is tried again. Engine
        calls it when it is made."""
        self._known = known
        while (failure := known.of(self.forecast, self.budget_bytes)) is not None:
            self._failed.append(failure)
            try:
                self.forecast, self._smallest = self._next()
            except PlanError:  # nothing is refused because of earlier runs: then all plans are tried again
                self._failed.clear()
                self.forecast, self._smallest = self._next()
                return

    def replan(
        self,
        problem: str,
        need_bytes: float | None,
        print_line: Callable[[str], None],
        placed: bool = False,
        short_bytes: float | None = None,
    ) -> None:
        """Chooses another plan after the one in force failed, and prints it; what the failure showed corrects the
        forecasts (search.py), and is recorded for later runs if skip_known_failures was called before. Engine calls it,
        then follow_plan, and only then compiles the programs of the new plan, which is left to the caller.

        Args:
          problem: why it failed, for the line that is printed.
          need_bytes: device bytes that it needs; None: unknown.
          print_line: prints a line.
          placed: True: the weights are already on the devices, so the next plan must keep at least as many layers'
            frozen weights whole as this one, and the tables of embeddings and optimizer states where they are, and may
            keep transposed codes only if this one does. False: they are not, and the next plan is free.
          short_bytes: the bytes that the step lacked when it ran (Failed.short_bytes); None: it did not run, or
            nothing limits the memory.
        Raises:
          PlanError: no plan is left.
        """
        room = "" if self.budget_bytes is None else f" in {self.budget_bytes / 1e9:.2f} GB"
        print_line(f"the plan does not fit{room}: {problem}; planning again")
        self._failed.append(Failed(self.plan, self.forecast.peak_bytes, need_bytes, short_bytes))
        if self._known is not None:
            self._known.add(self._failed[-1], self.budget_bytes)
        if placed:
            # Transposed codes may be given up; all else stays where it is.
            cost = self._cost.placed(dataclasses.replace(self.plan, transposed_codes=False))
            table = cost.table if cost.table_on_host else NO_TABLE
            states = cost.states if cost.states_on_host else NO_STATES
            codes = cost.codes_bytes if self.plan.transposed_codes else 0.0
            self._cost = dataclasses.replace(cost, table=table, states=states, codes_bytes=codes)
        self.forecast, self._smallest = self._next(self.plan.residuals.resident if placed else 0)
        for line in self.lines():
            print_line(line)

    def short_bytes(self, error: BaseException, local_devices: Sequence) -> float | None:
        """How many device bytes a step lacked that ran out of memory, for `replan`; None if nothing limits the memory.
        Engine.first_step asks at once, while the step's arrays are there. error: XLA's error from the step.
        local_devices: this process's devices of the mesh, of which the fullest counts."""
        return short_bytes(self.room, refused_bytes(error), devices.free_bytes(local_devices))

    def fits(self, need_bytes: float) -> bool:
        """Whether a compiled step that needs `need_bytes` of device memory may run: within the budget, which it may
        exceed by half a percent, or, if the plan in force was chosen as the smallest there is, within
        `room.limit_bytes`. True if nothing limits it. Engine asks after compiling; if not, it calls `replan`."""
        return self.room.fits(need_bytes, self._smallest)

    def _next(self, resident: int = 0) -> tuple[Forecast, bool]:
        """Chooses the plan to compile next: (its forecast, whether it is the smallest plan there is). In a run of
        several processes the first one decides for all, because host memory and measured rates may differ between them.

        Args:
          resident: the least number of layers whose frozen weights every device must keep whole, not divided among the
            devices (ResidualPlan.resident), because they were placed so already; 0 if no weights are placed yet.
        Raises:
          PlanError: no plan is left.
          ValueError: as for the class.
        """

        def found() -> list[Any]:
            """The choice as JSON values, which processes can exchange: [the plan's record, whether it is the smallest,
            None], or, if none is left, the smallest plan and [budget, compiled, need] of the PlanError."""
            try:
                chosen, smallest = next_plan(self._cost, self.config, self.device, self.room, self._failed, resident)
                return [chosen.plan.to_record(), smallest, None]
            except PlanError as error:
                return [error.smallest.plan.to_record(), True, [error.budget_bytes, error.compiled, error.need_bytes]]

        record, smallest, refused = processes.of_first(found)
        chosen = forecast(self._cost, self._recorded(record), self.device)
        if refused is None:
            return chosen, smallest
        budget, *tried = refused
        raise PlanError(chosen, budget, self._fixes(goal(budget, self._failed) or budget), *tried)

    def _fixes(self, budget_bytes: float) -> list[str]:
        """Up to three changes of the config, each of which alone lets a plan fit `budget_bytes` of device memory, such
        as "data.length=4096", for the message of a PlanError. If there are fewer, the last entry is the memory of a
        device that would do, such as "a card of 24.0 GB"."""
        data = dataclasses.replace(self.config.data, length=self._cost.length)
        config = dataclasses.replace(self.config, data=data)
        return fitting_settings(self.shape, config, self.device, budget_bytes, **self._changes)

    def compiled_bytes(self, *programs: Any) -> float:
        """Device bytes that a step needs at its peak: the temporary memory and the outputs beside donated inputs that
        the compiler reports for the largest of its `programs` (jax.stages.Compiled, of the plan in force), and the
        weights, states and gradient sums, which are always there, as `cost` counts them. `fits` takes it.

        Workspace that vendor libraries choose at run time is not included."""
        needs = []
        for program in programs:
            analysis = program.memory_analysis()
            added = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            needs.append(analysis.temp_size_in_bytes + max(added, 0))
        return self.cost.fixed_bytes(self.plan.micro_batches, self.plan.residuals.resident) + max(needs)
