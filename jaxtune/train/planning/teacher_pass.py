"""The plan of the pass that stores a teacher's log-probabilities before a run (objective.teacher_top_k). It needs
teacher and student, but no optimizer, so it may need more memory than a step; that shows from shapes, before the
teacher is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import stored_in
from jaxtune.models.placement import partition
from jaxtune.pallas.format_names import LOADED
from jaxtune.system import host_memory
from jaxtune.train.config import ConfigError, MeshConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.objectives.checkpoints import Checkpoint
from jaxtune.train.objectives.objective import TeacherColumn
from jaxtune.train.objectives.teachers import of_pass
from jaxtune.train.planning.cost import abstract_model
from jaxtune.train.planning.devices import Device, budget
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.phases import Phase, loading_bytes, phase_lines, phase_warnings
from jaxtune.train.planning.step_spec import StepSpec

_FROM_ELSEWHERE = "objective.teacher_logprobs, a file of its log-probabilities from a machine with more memory"
_SHORTEST = 256  # tokens of the shortest rows that are proposed


@dataclasses.dataclass(frozen=True)
class TeacherPass:
    """A teacher's pass over the rows of a run, and its memory.

    spec: of a step.
    student: nnx.State of the model that trains, on the devices meanwhile; may be shapes.
    attached_teacher: a teacher attached in Python; None: the objective's.
    name: the teacher's folder or hub name; "base" or None: the base.
    """

    spec: StepSpec
    rows_per_step: int
    shape: partition.MeshShape
    length: int
    device: Device
    student: nnx.State
    attached_teacher: Decoder | None
    name: str | None

    @property
    def own_spec(self) -> StepSpec:
        """On the mesh of `shape`, without QAT, and with the teacher's own precision map."""
        mesh = MeshConfig(data=self.shape.copies, fsdp=self.shape.shard_count)
        attached = Precision(self.spec.model.precision.computes_in)
        precision = attached if self.attached_teacher is not None else self._checkpoint.precision
        model = dataclasses.replace(self.spec.model, precision=precision)
        return dataclasses.replace(self.spec, model=model, rows=self.rows_per_step, mesh=mesh, rounds=False)

    def teacher(self, load_in: str | None = None) -> Decoder:
        """The teacher as shapes, or itself if attached in Python. load_in: a format in place of the config's, for one
        that is loaded.
        """
        if self.attached_teacher is not None:
            return self.attached_teacher
        return self._checkpoint.shapes(load_in=load_in)

    @property
    def _checkpoint(self) -> Checkpoint:
        model = self.spec.model
        return of_pass(self.name, model.objective.teacher_load_in, Checkpoint(model.base, model.precision))

    def planner(self, teacher: Decoder, length: int | None = None) -> ForwardPlanner:
        """A planner of the pass, with the student's weights beside. length: tokens of a row; None: the run's."""
        student_bytes = partition.bytes_per_device(self.student, self.shape.shard_count)
        spec = dataclasses.replace(self.own_spec, length=length or self.length)
        return ForwardPlanner(teacher, spec, self.device, student_bytes)

    @functools.cached_property
    def phase(self) -> Phase:
        """Peak memory of the pass, loading included, with changes of the config by which it would fit."""
        teacher = self.teacher()
        planner = self.planner(teacher)
        need, host = self._need(teacher, planner)
        budget = planner.budget_bytes
        is_within = budget is None or need <= budget
        remedy = ", or ".join([*self._changes(teacher, None if is_within else budget), _FROM_ELSEWHERE])
        return Phase("teacher", need, host, remedy)

    def warnings(self) -> list[str]:
        """A line for each memory, of device or host, that is too small. ConfigError if a teacher must be loaded and
        both models' weights alone are more than a device holds.
        """
        planner = self.planner(self.teacher())
        phase, budget = self.phase, planner.budget_bytes
        weights = planner.beside_bytes + planner.weight_bytes
        if self.attached_teacher is None and budget is not None and weights > budget:
            raise ConfigError(
                f"objective.teacher = {self.name!r}: its weights of {planner.weight_bytes / 1e9:.2f} GB and the "
                f"student's of {planner.beside_bytes / 1e9:.2f} GB do not fit {budget / 1e9:.2f} GB of device memory: "
                f"{phase.remedy}"
            )
        return phase_warnings([phase], budget, host_memory.size_bytes())

    def _need(self, teacher: Decoder, planner: ForwardPlanner) -> tuple[float, float]:
        """(device, host) bytes at the peak."""
        device, host = loading_bytes(teacher, planner.cost.shape.dtype.itemsize, stored_in(teacher) in LOADED)
        weights = planner.beside_bytes + planner.weight_bytes
        return weights + max(planner.working_bytes(planner.plan), device), host

    def _changes(self, teacher: Decoder, budget_bytes: float | None) -> Iterator[str]:
        """Changes of the config that each let the pass fit (None: unchecked)."""

        def fits(make_teacher: Callable[[], Decoder], length: int | None = None) -> bool:
            if budget_bytes is None:
                return True
            changed = make_teacher()
            return self._need(changed, self.planner(changed, length))[0] <= budget_bytes

        if self.attached_teacher is None and stored_in(teacher) is None and fits(lambda: self.teacher("nf4")):
            yield "model.load_in=nf4" if self.name in (None, "base") else "objective.teacher_load_in=nf4"
        length = self.length // 2
        while length >= _SHORTEST and not fits(lambda: teacher, length):
            length //= 2
        if length >= _SHORTEST:
            yield f"data.length={length}"


def pass_lines(spec: StepSpec, shape: DecoderConfig, device: Device, elsewhere: bool) -> list[str]:
    """Lines of --plan about the pass, from shapes; [] without one. ValueError if the teacher's config.json cannot be
    used, ConfigError if it is an adapter's folder or the base of random weights.

      shape: the student's.
      elsewhere: the device is another machine's.
    """
    column = spec.needs.rows_before
    if not isinstance(column, TeacherColumn) or column.top_k is None:
        return []
    student = nnx.state(abstract_model(shape, spec.model))
    phase = TeacherPass(spec, spec.rows, spec.mesh_shape, spec.length, device, student, None, column.teacher).phase
    host_bytes = device.host_memory_bytes if elsewhere else host_memory.size_bytes()
    return phase_lines([phase], budget(spec.memory, device), host_bytes)
