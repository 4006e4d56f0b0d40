"""The plan of the pass by which a teacher's log-probabilities are stored before a run (objective.teacher_top_k), as a
`TeacherPass`; `pass_lines` makes the lines about it for --plan.

The pass is a phase of the run with memory of its own: it needs the teacher beside the weights of the student, but no
optimizer and no gradients. So it may need more than a step, and a teacher that does not fit is found from shapes alone,
before its weights are loaded; a run has downloaded their files by then."""

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
from jaxtune.train.config import ConfigError, MeshConfig, TrainConfig
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.teachers import pass_shapes
from jaxtune.train.planning.cost import abstract_model
from jaxtune.train.planning.devices import Device, budget, host_memory_bytes
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.phases import Phase, loading_bytes, phase_lines, phase_warnings

_FROM_ELSEWHERE = "objective.teacher_logprobs, a file of its log-probabilities from a machine with more memory"
_SHORTEST = 256  # tokens of the shortest rows that are proposed


@dataclasses.dataclass(frozen=True)
class TeacherPass:
    """What a teacher's pass over the rows of a run depends on, from which its memory is planned. A run that stores a
    teacher's values makes it before it loads the teacher (objectives/stored_teachers.py), and `pass_lines` for --plan.
    `planner` plans the pass, `phase` has its memory, and `warnings` says whether it will not fit.

    Attributes:
      config: the run's.
      shape: the shape of the run's mesh.
      length: tokens of a row.
      device: the device.
      student: the nnx.State of the model that trains, whose weights are on the devices during the pass; its arrays may
        be shapes.
      given: the teacher that was attached to the student in Python; None: it is the one that the objective names.
      name: Distill.teacher, the teacher's folder or hub name, or "base"; None is "base" too.
    """

    config: TrainConfig
    shape: partition.MeshShape
    length: int
    device: Device
    student: nnx.State
    given: Decoder | None
    name: str | None

    @property
    def own_config(self) -> TrainConfig:
        """The config of the pass: the run's with the mesh of `shape`, without QAT, and with one precision, the compute
        dtype, instead of a map of precisions: QAT and the map are the student's alone. The pass is planned with it, and
        its programs are made with it."""
        mesh = MeshConfig(data=self.shape.copies, fsdp=self.shape.parts)
        return dataclasses.replace(self.config, qat=None, precision=self.config.computes_in, mesh=mesh)

    def teacher(self, load_in: str | None = None) -> Decoder:
        """The teacher, of which only shapes are read (jax.ShapeDtypeStruct) unless it was attached in Python. load_in:
        a format for its weights in place of the one that the config asks for (None: that one); it changes nothing about
        an attached teacher. It is for forecasts; the pass itself loads its teacher elsewhere."""
        return self.given or pass_shapes(self.config, self.name, load_in)

    def planner(self, teacher: Decoder, length: int | None = None) -> ForwardPlanner:
        """The planner of the pass of this `teacher`, whose arrays may be shapes; it counts the student's weights as
        well, which are on the devices meanwhile. Forecasts make one, also for other lengths, and the pass one of its
        own, with which its programs are compiled. length: tokens of a row; None: those of the run."""
        beside = partition.bytes_per_device(self.student, self.shape.parts)
        return ForwardPlanner(teacher, self.own_config, length or self.length, self.device, beside)

    @functools.cached_property
    def phase(self) -> Phase:
        """The memory of the pass, its weights, the student's and loading included, as a Phase named "teacher", for the
        table of phases and for the error if memory runs out in the pass. Its remedy names changes by which the teacher
        would fit (`_changes`; not checked if it fits already), and a file of its log-probabilities."""
        teacher = self.teacher()
        planner = self.planner(teacher)
        need, host = self._need(teacher, planner)
        budget = planner.budget_bytes
        fits = budget is None or need <= budget
        remedy = ", or ".join([*self._changes(teacher, None if fits else budget), _FROM_ELSEWHERE])
        return Phase("teacher", need, host, remedy)

    def warnings(self) -> list[str]:
        """A line for each memory in which the pass will not fit, of the device or the host, to be shown before the
        teacher is loaded; [] if it fits both.

        Raises:
          ConfigError: the teacher has to be loaded, and its weights and the student's alone are more than a device may
            hold.
        """
        planner = self.planner(self.teacher())
        phase, budget = self.phase, planner.budget_bytes
        weights = planner.beside_bytes + planner.weight_bytes
        if self.given is None and budget is not None and weights > budget:
            raise ConfigError(
                f"objective.teacher = {self.name!r}: its weights of {planner.weight_bytes / 1e9:.2f} GB and the "
                f"student's of {planner.beside_bytes / 1e9:.2f} GB do not fit {budget / 1e9:.2f} GB of device memory: "
                f"{phase.remedy}"
            )
        return phase_warnings([phase], budget, host_memory_bytes())

    def _need(self, teacher: Decoder, planner: ForwardPlanner) -> tuple[float, float]:
        """(device bytes, host bytes) that the pass of `teacher` needs at its peak: on the device the weights of both
        models, and the larger of what a forward pass takes under the plan of its `planner` and what loading takes; on
        the host what loading takes. `phase` has them, and `_changes` compares those of changed configs."""
        device, host = loading_bytes(teacher, planner.cost.dtype.itemsize, stored_in(teacher) in LOADED)
        weights = planner.beside_bytes + planner.weight_bytes
        return weights + max(planner.working_bytes(planner.plan), device), host

    def _changes(self, teacher: Decoder, budget_bytes: float | None) -> Iterator[str]:
        """Changes of the config, as they are written on the command line, each of which alone lets the pass fit
        `budget_bytes`; with None they are not checked. They are the teacher in NF4, if it has to be loaded and is not
        quantised yet, and the longest row of half, a quarter and so on of the tokens, down to 256. The remedy of
        `phase` names them; none is applied. teacher: the one of the config."""

        def fits(made: Callable[[], Decoder], length: int | None = None) -> bool:
            """Whether the pass of the teacher that `made` returns fits, over rows of `length` tokens (None: the
            run's); True without a budget."""
            if budget_bytes is None:
                return True
            changed = made()
            return self._need(changed, self.planner(changed, length))[0] <= budget_bytes

        if self.given is None and stored_in(teacher) is None and fits(lambda: self.teacher("nf4")):
            yield "model.load_in=nf4" if self.name in (None, "base") else "objective.teacher_load_in=nf4"
        length = self.length // 2
        while length >= _SHORTEST and not fits(lambda: teacher, length):
            length //= 2
        if length >= _SHORTEST:
            yield f"data.length={length}"


def pass_lines(config: TrainConfig, shape: DecoderConfig, device: Device) -> list[str]:
    """The lines about the pass of the teacher in a plan that is made without weights and rows, which --plan prints; []
    for a config without such a pass. A run has the pass in its table of phases instead (phase_lines). Raises ValueError
    if the teacher's config.json cannot be used, in particular ConfigError if the teacher is an adapter's folder or the
    base of a model with random weights.

    Args:
      config: the run's, with its mesh.
      shape: the DecoderConfig of the model that trains.
      device: the device of the plan.
    """
    objective = objective_of(config)
    if not isinstance(objective, Distill) or objective.teacher_top_k is None:
        return []
    student = nnx.state(abstract_model(shape, config))
    mesh = partition.mesh_shape(*(config.mesh or MeshConfig()).sizes)
    phase = TeacherPass(config, mesh, config.data.length, device, student, None, objective.teacher).phase
    host_bytes = host_memory_bytes() if config.plan.device is None else device.host_memory_bytes
    return phase_lines([phase], budget(config, device), host_bytes)
