"""Weights divided over devices that are whole on each for longer than a pass of their layer, which saves exchanges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.movables.movable import Movable
from jaxtune.train.planning.parts import FROZEN, StepParts
from jaxtune.train.program.step import StepProgram


class Whole(Movable):
    """The last layers' weights stay gathered from forward to backward, if all weights train."""

    word = "whole"
    counted = True

    def with_room(self, costs: StepParts, level: int, room_bytes: float, device: Device) -> Sequence[int]:
        size, layers = costs.divided.layer_bytes, costs.shape.num_layers
        if not size or costs.divided.frozen_layer_bytes or room_bytes <= 0:
            return ()
        return (layers if math.isinf(room_bytes) else min(layers, 1 + int(room_bytes / size)),)

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        return dataclasses.replace(costs, divided=dataclasses.replace(costs.divided, whole=level))

    @classmethod
    def after_placing(cls, level: int) -> tuple[int, float]:
        return 0, math.inf

    @classmethod
    def program(cls, program: StepProgram, level: int) -> StepProgram:
        assert program.plan is not None
        return dataclasses.replace(program, plan=dataclasses.replace(program.plan, whole_weights=level))


class Resident(Movable):
    """The first layers' frozen weights are whole for the run, without a share: to gather them in each step takes time,
    and at the loss, the peak, a device would hold share and whole.
    """

    word = "resident"
    counted = True

    def levels(self, costs: StepParts, device: Device) -> Sequence[int]:
        layers = costs.shape.num_layers
        return (layers // 2, layers) if costs.divided.frozen_layer_bytes else ()

    def with_room(self, costs: StepParts, level: int, room_bytes: float, device: Device) -> Sequence[int]:
        layers = costs.shape.num_layers
        if not costs.divided.frozen_layer_bytes or room_bytes <= 0:
            return ()
        if math.isinf(room_bytes):
            return (layers,)
        return layers, min(level + int(room_bytes / costs.divided.resident_layer_bytes), layers - 1)

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        divided, layers = costs.divided, costs.shape.num_layers
        added = divided.resident_bytes(level, layers) - divided.resident_bytes(divided.resident, layers)
        fixed = {**costs.fixed, FROZEN: costs.fixed[FROZEN] + added}
        return dataclasses.replace(costs, fixed=fixed, divided=dataclasses.replace(divided, resident=level))

    @classmethod
    def after_placing(cls, level: int) -> tuple[int, float]:
        return level, math.inf

    @classmethod
    def declared(cls, model: Decoder, frozen: nnx.State, level: int) -> nnx.State:
        return partition.declared_resident(frozen, level, len(model.layers))
