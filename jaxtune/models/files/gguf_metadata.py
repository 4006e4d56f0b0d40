"""What a GGUF file says of its model, and which of its keys were asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtune.models.families.common.key import Config


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a GGUF file says of its model. Numbers are read as they were before float32 rounded them."""

    file: str  # for messages
    fields: Config
    shapes: Mapping[str, tuple[int, ...]]  # {tensor: its shape in numpy's order}
    values: Callable[[str], np.ndarray]  # a tensor's numbers
    tied: bool  # whether the head is the embedding
    asked: set[str] = dataclasses.field(
        default_factory=set
    )  # keys that were asked for, without the architecture's name

    @functools.cached_property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: object = None) -> Any:
        self.asked.add(key)
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            return [shortest(element) if isinstance(element, float) else element for element in value]
        return shortest(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file}: its metadata lack {self.architecture}.{key}; convert the model again")
        return value

    def has(self, ending: str) -> bool:
        """Whether a tensor's name has this end, such as attn_q.bias."""
        return any(name.endswith(ending) for name in self.shapes)


def shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))
