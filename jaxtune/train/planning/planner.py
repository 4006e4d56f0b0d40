"""The planner of one training run, with the compiler's check of its plans."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import PlanError
from jaxtune.train.planning.cost import StepCost, step_cost
from jaxtune.train.planning.fitting import fitting_settings
from jaxtune.train.planning.forecasts import Forecast, forecast
from jaxtune.train.planning.known import KnownFailures
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.plan_text import plan_lines
from jaxtune.train.planning.search import Failed, Room, goal, next_plan, short_bytes
from jaxtune.train.planning.step_spec import StepSpec


def refused_bytes(error: BaseException) -> float | None:
    """Bytes of the refused allocation in an XLA error ("trying to allocate 1.98GiB"); None if it names none."""
    amount = re.search(r"trying to allocate ([\d.]+) ?(bytes|[KMGT]iB)", str(error))
    return (
        None if amount is None else float(amount[1]) * 1024.0 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(amount[2])
    )


class Planner:
    """Chooses the plan of a run, and a smaller one after a failure. Collective, as are `skip_known_failures` and
    `replan`: the first process decides.

      note: a line before the plan.

    PlanError if by forecast even the smallest plan exceeds `room.limit_bytes`; ValueError if the device is refused,
    memory.plan cannot be read, or the host is too small for optimizer states.
    """

    def __init__(self, model: Decoder, spec: StepSpec, device: Any, note: str | None = None):
        self.spec, self.shape, self._note = spec, model.config, note
        limit = processes.smallest((device.memory_stats() or {}).get("bytes_limit"))
        sharing = devices.devices_here(spec.mesh_shape.size)
        self.device = devices.find_device(
            "cpu" if device.platform == "cpu" else device.device_kind, limit, sharing=sharing
        )
        self.room = Room(devices.budget(spec.memory, self.device), devices.limit(spec.memory, self.device))
        self._cost = step_cost(model, spec)
        self._failed: list[Failed] = []
        self._known: KnownFailures | None = None
        self.forecast, self._smallest = self._next()

    @property
    def plan(self) -> StepPlan:
        return self.forecast.plan

    @property
    def unplaced_cost(self) -> StepCost:
        """The costs of a step with nothing moved, whatever the plan."""
        return self._cost

    @property
    def cost(self) -> StepCost:
        """The costs of a step, with everything where the plan in force has it."""
        return self._cost.placed(self.plan.moved)

    @property
    def residual_host_bytes(self) -> float:
        """Pinned host memory of one device that a step fills, without weights that stream."""
        return self.forecast.host_bytes - self.cost.moved.pinned_bytes

    @property
    def budget_bytes(self) -> float | None:
        """Device bytes that a step may take; None: no limit."""
        return self.room.budget_bytes

    @property
    def compilations(self) -> int:
        """Plans that were compiled, or skipped because an earlier run failed with them, and the one in force."""
        return len(self._failed) + 1

    def lines(self) -> list[str]:
        """The plan in force as lines of text."""
        lines = plan_lines(self.forecast, self.cost, self.device, self.budget_bytes)
        return lines if self._note is None else [self._note, *lines]

    def adopt(self, record: dict[str, Any]) -> None:
        """Takes a checkpoint's plan (StepPlan.to_record and the mesh's sizes), as another would change the last bits.
        Not taken: on another mesh, against memory.plan or micro_batches, or if micro-batches do not divide the
        rows. What this run cannot move stays. Call Engine.follow_plan, then Engine.fit, which checks that it fits.
        ValueError if it is impossible for this model.
        """
        if partition.MeshShape.from_record(record) != self.spec.mesh_shape:
            return
        stored = self._recorded(record)
        able = {word: level for word, level in stored.moved.items() if self._cost.may(word, level)}
        stored = dataclasses.replace(stored, moved=able)  # where things are changes no result
        # With data.packing=step a changed number of steps can change the number of rows.
        same_split = self.spec.micro_batches in (None, stored.micro_batches)
        same_split = same_split and self.cost.shape.rows % stored.micro_batches == 0
        if same_split and (self.spec.memory.plan is None or self.plan.text == stored.text):
            self.forecast, self._smallest = forecast(self._cost, stored, self.device), False

    def _recorded(self, record: dict[str, Any]) -> StepPlan:
        return StepPlan.from_record(record, self._cost.shape.num_layers, self._cost.layers.all_residuals)

    def skip_known_failures(self, failures: KnownFailures) -> None:
        """Skips plans that failed in earlier runs of the same programs with no less memory. If none is left, earlier
        failures are ignored. `replan` adds this run's failures to the same record.
        """
        self._known = failures
        while (failure := failures.of(self.forecast, self.budget_bytes)) is not None:
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
        ran: bool = False,
    ) -> None:
        """Chooses and prints another plan after the one in force failed; the caller compiles it.

          need_bytes: of the failed plan; None: unknown.
          placed: weights are on the devices already, which limits what may move (Movable.after_placing).
          short_bytes: what the step lacked when it ran; None: it did not run, or there is no limit.
          problem: what failed, in words, for the printed line.
          ran: the step ran, and what it pinned counts as lost: on an H200 XLA's pool had no room for a third plan after
            two such failures, as if it had kept their residuals.

        PlanError if no plan is left.
        """
        room = "" if self.budget_bytes is None else f" in {self.budget_bytes / 1e9:.2f} GB"
        print_line(f"the plan does not fit{room}: {problem}; planning again")
        self._failed.append(Failed(self.plan, self.forecast.peak_bytes, need_bytes, short_bytes))
        if self._known is not None:
            self._known.add(self._failed[-1], self.budget_bytes)
        if placed:
            limits = {word: movable.after_placing(self.plan.level(word)) for word, movable in MOVABLES.items()}
            self._cost = self._cost.limited(limits)
        if ran:
            free = self.device.host_bytes - self.residual_host_bytes
            self.device = dataclasses.replace(self.device, host_bytes=max(free, self.cost.moved.pinned_bytes))
        self.forecast, self._smallest = self._next()
        for line in self.lines():
            print_line(line)

    def short_bytes(self, error: BaseException, local_devices: Sequence) -> float | None:
        """Device bytes that a step lacked that ran out of memory; None without a limit. Ask at once, while the step's
        arrays exist.
        """
        return short_bytes(self.room, refused_bytes(error), devices.free_bytes(local_devices))

    def fits(self, need_bytes: float) -> bool:
        """Whether a compiled step may run: within the budget and half a percent, or, for the smallest plan,
        `room.limit_bytes`.
        """
        return self.room.fits(need_bytes, self._smallest)

    def _next(self) -> tuple[Forecast, bool]:
        """(forecast, whether it is the smallest plan) of the next plan, which the first process decides."""

        def found() -> list[Any]:
            try:
                next_forecast, smallest = next_plan(self._cost, self.spec, self.device, self.room, self._failed)
                return [next_forecast.plan.to_record(), smallest, None]
            except PlanError as error:
                return [error.smallest.plan.to_record(), True, [error.budget_bytes, error.compiled, error.need_bytes]]

        record, smallest, refused = processes.of_first(found)
        next_forecast = forecast(self._cost, self._recorded(record), self.device)
        if refused is None:
            return next_forecast, smallest
        budget, *error_facts = refused
        raise PlanError(next_forecast, budget, self._fixes(goal(budget, self._failed) or budget), *error_facts)

    def _fixes(self, budget_bytes: float) -> list[str]:
        return fitting_settings(self.shape, self.spec, self.device, budget_bytes)

    def compiled_bytes(self, *programs: Any) -> float:
        """Device bytes of a step at its peak: temporaries and new outputs of the largest of its `programs`
        (jax.stages.Compiled), and what is always there. Workspace that vendor libraries choose at run time is missing.
        """
        program_bytes = []
        for program in programs:
            analysis = program.memory_analysis()
            added = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            program_bytes.append(analysis.temp_size_in_bytes + max(added, 0))
        return self.cost.fixed_bytes(self.plan.micro_batches) + max(program_bytes)
