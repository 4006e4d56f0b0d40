"""Frozen weights of layers in pinned host memory (models/placement/streams.py): each pass over a layer copies them to
the device while the layers before it compute. Results are bitwise equal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import has_adapter
from jaxtune.models.placement import partition, streams
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.movables.movable import Movable, Outcome
from jaxtune.train.planning.parts import FROZEN, StepParts
from jaxtune.train.planning.step_spec import StepSpec


@dataclasses.dataclass(frozen=True)
class Streamed(Movable):
    """Not in a run that generates, as each token would wait for all layers, nor of weights that QAT rounds."""

    word = "streamed"
    counted = True
    needs = "an adapter's run on one device that loads its model, without rewards, answers in evaluations and QAT"
    last_resort = True

    layer_bytes: tuple[float, ...] = ()  # frozen, of each layer
    one_piece: float = 0.0  # of a layer's bytes, the share of its largest matrix

    @classmethod
    def of(cls, model: Decoder, states: optax.OptState, spec: StepSpec) -> Streamed:
        if not has_adapter(model) or spec.mesh_shape.size > 1 or spec.generates or spec.rounds or spec.keeps_model:
            return cls()
        matrices = [[*map(streams.streamed_bytes, _frozen(layer))] for layer in model.layers]
        return cls(tuple(map(sum, matrices)), max(max(sizes) / max(sum(sizes), 1.0) for sizes in matrices))

    @property
    def able(self) -> bool:
        return any(self.layer_bytes)

    def levels(self, costs: StepParts, device: Device) -> Sequence[int]:
        layers = costs.shape.num_layers
        return sorted({-(-layers * quarter // 4) for quarter in (1, 2, 3, 4)}) if device.link else ()

    def with_room(self, costs: StepParts, level: int, room_bytes: float, device: Device) -> Sequence[int]:
        """As many more layers stay on the device as there is room for."""
        stay = int(room_bytes / max(self.layer_bytes)) if room_bytes < float("inf") else level
        return range(max(level - stay, 0), level) if level else ()

    def _bytes(self, level: int) -> float:
        return sum(self.layer_bytes[layer] for layer in streams.streamed_layers(level, len(self.layer_bytes)))

    def _arriving(self, own: float, following: float) -> tuple[float, float, float]:
        """Moved.streaming. Experts come nearly at once: one array has most of them, and is copied in one piece."""
        return own, following, following * (1.0 if self.one_piece > 0.5 else self.one_piece)

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        size, largest = self._bytes(level), max(self.layer_bytes)
        more = size - self._bytes(costs.level(self.word))
        fixed = {**costs.fixed, FROZEN: costs.fixed[FROZEN] - more}
        moved = dataclasses.replace(
            costs.moved,
            pinned_bytes=costs.moved.pinned_bytes + more,
            link_bytes=costs.moved.link_bytes + more / costs.shape.num_layers,
            streaming=self._arriving(min(largest, size), min(largest, size - min(largest, size))),
        )
        return dataclasses.replace(costs, fixed=fixed, moved=moved)

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        if not (level := costs.level(self.word)):
            return []
        size = self._bytes(level)
        seconds = f", {size / device.link:.2f} s a pass over the link" if device.link and device.name != "cpu" else ""
        return [f"  weights of {level} layers stream from the host ({size / 1e9:.2f} GB{seconds})"]

    @classmethod
    def layers_on_host(cls, plan: str) -> int:
        levels = re.findall(rf";\s*{cls.word}\s*=\s*(\d+)", plan)
        return int(levels[-1]) if levels else 0

    @classmethod
    def moved(cls, model: Decoder, frozen: nnx.State, level: int, where: NamedSharding) -> nnx.State:
        def placed(variable: nnx.Variable, hosted: bool) -> nnx.Variable:
            declared = streams.declared(variable, variable.get_value(), hosted)
            arrays, structure = jax.tree.flatten(declared)
            for index, kind in enumerate(streams.memory_kinds(declared)):
                there = where if kind is None else where.with_memory_kind(kind)
                if kind is not None or arrays[index].sharding.memory_kind == streams.PINNED:
                    arrays[index] = partition.put(arrays[index], there)
            return structure.unflatten(arrays)

        return _of_layers(placed, frozen, level, len(model.layers))

    @classmethod
    def declared(cls, model: Decoder, frozen: nnx.State, level: int) -> nnx.State:
        def declare(variable: nnx.Variable, hosted: bool) -> nnx.Variable:
            return streams.declared(variable, variable.get_value(), hosted)

        return _of_layers(declare, frozen, level, len(model.layers))


def _frozen(layer: nnx.Module) -> list[nnx.Variable]:
    state = nnx.split(layer, nnx.Param, ...)[2]
    return jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _of_layers(
    function: Callable[[nnx.Variable, bool], nnx.Variable], frozen: nnx.State, level: int, layers: int
) -> nnx.State:
    """The state with function(variable, whether it is on the host) in place of the layers' variables."""
    hosted = set(streams.streamed_layers(level, layers))

    def at(path, variable):
        keys = [getattr(key, "key", None) for key in path]
        return function(variable, keys[1] in hosted) if keys[0] == "layers" else variable

    return jax.tree_util.tree_map_with_path(at, frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
