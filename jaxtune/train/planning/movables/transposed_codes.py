"""Transposed codes beside frozen FP8 weights (models/placement/transposed_codes.py), for all layers or for none;
results are bitwise equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import optax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import transposed_codes
from jaxtune.pallas.formats import Stored
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.layer_costs import nbytes
from jaxtune.train.planning.layer_forecasts import product_time
from jaxtune.train.planning.movables.movable import ANY_GAIN, Movable, Outcome, Seconds
from jaxtune.train.planning.parts import StepParts
from jaxtune.train.planning.step_spec import StepSpec

TRANSPOSED_CODES = "transposed codes of FP8 weights"  # a name of bytes in StepParts.fixed


@dataclasses.dataclass(frozen=True)
class TransposedCodes(Movable):
    """A copy for each frozen FP8 weight that is multiplied without decoding. None with QAT, which multiplies by rounded
    weights, with divided weights, and if the run generates, where memory is better spent on more answers.
    """

    word = "transposed_codes"
    side = "device"
    worth = ANY_GAIN
    at_last = True

    bytes: float = 0.0

    @property
    def able(self) -> bool:
        return self.bytes > 0

    @classmethod
    def of(cls, model: Decoder, states: optax.OptState, spec: StepSpec) -> TransposedCodes:
        if spec.mesh_shape.shard_count > 1 or spec.rounds or spec.generates:
            return cls()
        matrices = (matrix for layer in model.layers for *_, matrix in layer.matrices())
        frozen = (m.stored_weight for m in matrices if m.fp8 and not isinstance(m.weight, nnx.Param))
        # A copy is as large as its codes, which may be shapes here.
        return cls(nbytes([w.with_transposed(lambda codes: codes).transposed for w in frozen if isinstance(w, Stored)]))

    def with_room(self, costs: StepParts, level: int, room_bytes: float, device: Device) -> Sequence[int]:
        """Hopper only: its kernel reads the codes where they are; elsewhere they would be joined in each step. Not with
        weights that stream, which would bring their copies."""
        return (1,) if device.hopper and not costs.level("streamed") else ()

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        moved = dataclasses.replace(costs.moved, copied_bytes=costs.moved.copied_bytes + self.bytes)
        return dataclasses.replace(costs, fixed={**costs.fixed, TRANSPOSED_CODES: self.bytes}, moved=moved)

    def seconds(self, costs: StepParts, device: Device) -> Seconds:
        """Minus what kept copies save: a copy of codes takes as long as decoding them (FP8.decoded_share)."""
        fit, size = product_time(device), self.bytes * costs.level(self.word)
        return Seconds(micro_batch=-(size * fit.decoded_bytes / (device.copy * fit.decoded_share)))

    @classmethod
    def after_placing(cls, level: int) -> tuple[int, float]:
        return 0, level

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        if not costs.level(self.word) or device.name == "cpu":
            return []
        saved = outcome.micro_batches * -self.seconds(costs, device).micro_batch
        words = f"{self.bytes / 1e9:.2f} GB, {saved:.3f} s a step less"
        return [f"  codes of FP8 weights are kept transposed, too ({words})"]

    @classmethod
    def finished(cls, frozen: nnx.State, level: int) -> nnx.State:
        return transposed_codes.with_copies(frozen) if level else transposed_codes.without_copies(frozen)
