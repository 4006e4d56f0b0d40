"""A movable that nothing else knows: the frozen weights of the first layers lie in pinned host memory, and each is
copied to the device one layer ahead, in forward and backward, beside the residuals' copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.layer_costs import nbytes
from jaxtune.train.planning.movables.movable import Movable, Outcome
from jaxtune.train.planning.parts import FROZEN, StepParts
from jaxtune.train.planning.step_spec import StepSpec

BUFFERS = "weights of two layers that arrive"


@dataclasses.dataclass(frozen=True)
class Streamed(Movable):
    word = "streamed"
    counted = True

    layer_bytes: float = 0.0  # frozen, of the largest layer

    @classmethod
    def of(cls, model: Decoder, states: optax.OptState, spec: StepSpec) -> Streamed:
        frozen = nnx.split(model, nnx.Param, ...)[2]
        layers = frozen.get("layers", {}).values() if spec.model.adapts and spec.mesh_shape.size == 1 else ()
        return cls(max((nbytes(layer) for layer in layers), default=0.0))

    @property
    def able(self) -> bool:
        return self.layer_bytes > 0

    def levels(self, costs: StepParts, device: Device) -> Sequence[int]:
        layers = costs.shape.num_layers
        return [layers * quarter // 4 for quarter in (1, 2, 3, 4)] if device.link else ()

    def with_room(self, costs: StepParts, level: int, room_bytes: float, device: Device) -> Sequence[int]:
        """As many more layers stay on the device as fit there."""
        return (max(level - int(room_bytes / self.layer_bytes), 1),) if 0 < room_bytes < float("inf") and level else ()

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        more = (level - costs.level(self.word)) * self.layer_bytes
        fixed = {**costs.fixed, FROZEN: costs.fixed[FROZEN] - more, BUFFERS: 2 * self.layer_bytes * bool(level)}
        moved = dataclasses.replace(
            costs.moved,
            pinned_bytes=costs.moved.pinned_bytes + more,
            link_bytes=costs.moved.link_bytes + more / costs.shape.num_layers,
        )
        return dataclasses.replace(costs, fixed=fixed, moved=moved)

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        level = costs.level(self.word)
        return [f"  weights of {level} layers stream from the host"] if level else []

    @classmethod
    def moved(cls, model: Decoder, frozen: nnx.State, level: int, where: NamedSharding) -> nnx.State:
        def at(path, variable):
            keys = [getattr(key, "key", None) for key in path]
            if keys[0] != "layers" or keys[1] >= level:
                return variable
            return variable.replace(jax.tree.map(partition.on_host, variable.get_value()))

        return jax.tree_util.tree_map_with_path(at, frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
