"""A checkpoint as a run opens it: the base of what trains, or a teacher. All that decides its numbers is one value,
which opens it, has its shapes, and names what is stored of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json

from jaxtune.models import initial
from jaxtune.models.components import stored_as
from jaxtune.models.decoder import Decoder, abstract_decoder
from jaxtune.models.files.model_folder import find_config
from jaxtune.models.files.positions import stretched
from jaxtune.models.files.quant import compute_in_fp8, require_stated
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import freeze
from jaxtune.models.registry import config_from_hf, tower_config, weights_stored_in
from jaxtune.train.config import ModelConfig
from jaxtune.train.config.precision import Precision

# Keys of `model` that say where its files are, what trains of it or who reads its rows, and change none of its numbers.
_ELSEWHERE = ("path", "from_config", "tokenizer", "pictures", "tower")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's files, with a path, and all that decides what a run makes of them."""

    model: ModelConfig
    precision: Precision

    def open(self, pictures: bool = False) -> Pretrained:
        """Its config and headers, without weights. ValueError, OSError. pictures: with its tower."""
        assert self.model.path is not None
        return Pretrained(
            self.model.path,
            self.precision.dtype,
            self.model.load_in,
            precision=self.precision.components,
            positions=self.model.positions,
            pictures=pictures,
        )

    def computing(self, model: Decoder) -> Decoder:
        return computing(self.model, model)

    def shapes(self, pictures: bool = False, load_in: str | None = None) -> Decoder:
        """The frozen model with shapes for arrays, from config.json; shared, so do not change it. ValueError.

        load_in: a format in place of its own.
        """
        model = self.model if load_in is None else dataclasses.replace(self.model, load_in=load_in, compute=None)
        assert model.path is not None
        components = tuple(self.precision.components.items())
        positions = json.dumps(model.positions, sort_keys=True)
        shapes = _shapes(model.path, self.precision.dtype, model.load_in, pictures, components, positions)
        with initial.as_shapes():
            return dataclasses.replace(self, model=model).computing(shapes)

    @property
    def key(self) -> tuple[object, ...]:
        """What names that which is stored of it, beside its files: every setting that decides its numbers. Settings at
        their defaults leave it as it was before they existed.
        """
        set_keys = [
            (field.name, value)
            for field in dataclasses.fields(self.model)
            if field.name not in (*_ELSEWHERE, "load_in")
            and (value := getattr(self.model, field.name)) != field.default
        ]
        components = [("precision", *self.precision.components.items())] if self.precision.components else []
        return (self.precision.computes_in, self.model.load_in, *set_keys, *components)


def computing(config: ModelConfig, model: Decoder) -> Decoder:
    """The loaded model, multiplying as `model.compute` says. ValueError without weights in FP8 for that."""
    return compute_in_fp8(model) if config.compute == "fp8" else model


@functools.lru_cache(4)
def _shapes(
    path: str,
    dtype: str,
    load_in: str | None,
    pictures: bool,
    components: tuple[tuple[str, str], ...],
    positions: str,
) -> Decoder:
    hf = find_config(path, published=not pictures)
    require_stated(path, hf, load_in)
    changed = json.loads(positions)
    hf = stretched(hf, changed.get("rope_scaling"), changed.get("max_position_embeddings"))
    shape, load_in = config_from_hf(hf), load_in or weights_stored_in(hf)
    tower = tower_config(hf) if pictures else None
    with initial.as_shapes():
        return freeze(stored_as(abstract_decoder(shape, dtype, tower), dict(components), load_in))
