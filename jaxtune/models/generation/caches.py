"""The states of a sampler's slots: caches of keys and values, and states of delta nets."""

from __future__ import annotations

import jax

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.sampled_model import SampledModel


class Caches:
    """The states of so many slots, which grow in place of being made anew.

    Attributes:
      states: as the last round left them; None before the first `grow`.
      capacity: tokens of a row for which each slot has room.
    """

    def __init__(self, programs: device.Programs, model: SampledModel, slots: int, division: Division | None = None):
        self._programs, self._model, self._slots, self._division = programs, model, slots, division
        self.states: device.States = None
        self.capacity = 0

    def grow(self, capacity: int) -> None:
        """Gives each slot room for rows of `capacity` tokens."""
        weights = self._model.weights
        shapes = device.states_shape(weights.structure, weights.shapes, self._slots, capacity)
        if self.states is not None:
            leaves, treedef = jax.tree.flatten(self.states)
            self.states = None  # so that each array is freed after its copy
            for index, longer in enumerate(jax.tree.leaves(shapes)):
                if leaves[index].shape != longer.shape:
                    leaves[index] = self._programs.grow(longer.shape, leaves[index])
            self.states = jax.tree.unflatten(treedef, leaves)
        elif self._division is None:
            self.states = device.empty_states(weights.structure, weights.shapes, self._slots, capacity)
        else:
            self.states = self._division.put(shapes)
        self.capacity = capacity
