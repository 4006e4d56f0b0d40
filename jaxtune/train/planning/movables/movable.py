"""What a movable declares: something that a plan may have in another memory than usual, or in more copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement.host_table import Array
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.train.config import AdapterConfig
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.parts import StepParts
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.step import StepProgram

ANY_GAIN = 1 + 1e-9  # a `Movable.worth`


@dataclasses.dataclass(frozen=True)
class Option:
    """A level of a movable, and what it adds to a step of one micro-batch."""

    level: int
    device_bytes: float  # during the whole step
    pinned_bytes: float  # of host memory
    pageable_bytes: float
    seconds: float  # without what runs beside the device's work


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Time that a movable adds to a step."""

    micro_batch: float = 0.0  # in each micro-batch
    update: float = 0.0  # beside the update
    beside: float = 0.0  # beside the device's work: the whole step takes at least this


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A plan with its forecast, as far as `Movable.lines` tell of it."""

    residuals: ResidualPlan
    micro_batches: int
    recompute_seconds: float
    wait_seconds: float


@dataclasses.dataclass(frozen=True)
class Movable:
    """A movable; the fields of a subclass say what of one run it may move. A plan has it at a level, how much is moved,
    from 0 on.
    """

    word: ClassVar[str]  # in plans, their texts and records
    counted: ClassVar[bool] = False  # whether levels count layers; a plan's text then has "word=level"
    side: ClassVar[str | None] = None  # where level 1 has all of it, "host" or "device", as a plan's record says
    worth: ClassVar[float] = 1.0  # by how many times a step must be faster with it, unless nothing else fits
    errs_apart: ClassVar[bool] = False  # whether forecasts with it are wrong by other bytes than without
    needs: ClassVar[str] = ""  # what a run is that may move it, for an error
    last_resort: ClassVar[bool] = False  # whether plans have it only if none without it fits
    at_last: ClassVar[bool] = False  # whether `with_room` is asked for the chosen plan alone, not for each candidate

    # ---- what the planner asks

    @classmethod
    def of(cls, model: Decoder, states: optax.OptState, spec: StepSpec) -> Self:
        """What of this run may be moved. Before `StepParts` are known. Arrays of model and optimizer may be shapes."""
        return cls()

    @property
    def able(self) -> bool:
        """Whether this run may move anything."""
        return True

    def levels(self, costs: StepParts, device: Device) -> Sequence[int]:
        """Levels with which plans are searched, beside the one in `costs`."""
        return ()

    def with_room(self, costs: StepParts, level: int, room_bytes: float, device: Device) -> Sequence[int]:
        """Levels to try, best first, in a plan at `level` that leaves `room_bytes` of device memory."""
        return ()

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        """The costs with bytes and work as at `level`, how much is moved."""
        return costs

    def at[P: StepParts](self, costs: P, level: int) -> P:
        """`placed`, with the level recorded."""
        if level == costs.level(self.word):
            return costs
        assert self.able and (self.counted or level == 1)
        placed = self.placed(costs, level)
        levels = {word: number for word, number in {**placed.moved.levels, self.word: level}.items() if number}
        return dataclasses.replace(placed, moved=dataclasses.replace(placed.moved, levels=levels))

    def options(self, costs: StepParts, device: Device) -> list[Option]:
        """The `levels` with what they add."""
        options, before = [], self.seconds(costs, device)
        for level in self.levels(costs, device):
            at = self.at(costs, level)
            after = self.seconds(at, device)
            options.append(
                Option(
                    level,
                    at.fixed_bytes(1) - costs.fixed_bytes(1),
                    at.moved.pinned_bytes - costs.moved.pinned_bytes,
                    at.moved.pageable_bytes - costs.moved.pageable_bytes,
                    after.micro_batch + after.update - before.micro_batch - before.update,
                )
            )
        return options

    def seconds(self, costs: StepParts, device: Device) -> Seconds:
        """At the level in `costs`."""
        return Seconds()

    def refusal(self, costs: StepParts, device: Device) -> str | None:
        """Why no plan may be made at all."""
        return None

    @classmethod
    def after_placing(cls, level: int) -> tuple[int, float]:
        """(least, most) level of the next plan, once weights are placed at `level`."""
        return level, level

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        """What the plan's report tells of it. Rates of a CPU are unknown."""
        return []

    # ---- what places it

    @classmethod
    def left_on_host(cls, adapter: AdapterConfig | None, generates: bool, tied: bool) -> Sequence[str]:
        """Hugging Face names of tensors that loading leaves in host memory until the plan is known, as what left the
        device would leave a gap between other weights. tied: whether the head is the embedding.
        """
        return ()

    @classmethod
    def layers_on_host(cls, plan: str) -> int:
        """Layers of which memory.plan has the matrices in pinned host memory, where loading puts them."""
        return 0

    @classmethod
    def program(cls, program: StepProgram, level: int) -> StepProgram:
        """The program of a step at `level`."""
        return program

    @classmethod
    def moved(cls, model: Decoder, frozen: nnx.State, level: int, where: NamedSharding) -> nnx.State:
        """The frozen weights, which a caller's model may share, in the memory that `level` has them in."""
        return frozen

    @classmethod
    def looked_up(cls, model: Decoder, frozen: nnx.State, level: int) -> Mapping[str, Array]:
        """Tables of which batches bring the rows of their tokens."""
        return {}

    @classmethod
    def declared(cls, model: Decoder, frozen: nnx.State, level: int) -> nnx.State:
        """The frozen weights, arrays or shapes, as variables that say how they are placed."""
        return frozen

    @classmethod
    def finished(cls, frozen: nnx.State, level: int) -> nnx.State:
        """Placed frozen weights, arrays or shapes, as the step's programs take them. Again after each new plan."""
        return frozen
