"""What takes a tower's place in Gemma 4 12B: two linears make a feature of a patch of 48 x 48 pixels."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jaxtune.models.norm import LayerNorm
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.vision.gemma4 import unit_norm
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import Merging, Tower, TowerConfig, axis_positions, drawn, outer_linear

_EPS = 1e-5  # of the centred norms, which no key names
_HERE, _OUT = "model.embed_vision", "multimodal_embedder.embedding_projection"
_NAMES = {
    "patch_norm": "patch_ln1",
    "projection": "patch_dense",
    "projected_norm": "patch_ln2",
    "positions": "pos_embedding",
    "position_norm": "pos_norm",
    "out": _OUT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4EmbedderConfig(TowerConfig):
    """Its blocks are none; they have the sizes. A patch's numbers are in the order (row, column, channel)."""

    prefixes = (f"{_HERE}.",)
    modules = {f"merger.{attribute}": f"{_HERE}.{name}" for attribute, name in _NAMES.items()}
    stored_names = {f"{_HERE}.{name}": f"model.vision_embedder.{name}" for name in _NAMES.values()} | {
        f"{_HERE}.{_OUT}": f"{_HERE}.embedding_projection"
    }

    positions: int  # learned ones of each axis

    def make(self, key: jax.Array, dtype) -> Gemma4Embedder:
        return Gemma4Embedder(self, key, dtype)


class Embedding(Merging):
    """out(unit norm(norm(norm(projection(norm(patch))) + positions))), where positions are the sum of a learned vector
    of the column and one of the row, [positions, 2, size].
    """

    matrices = ("projection", "out")

    def __init__(self, config: Gemma4EmbedderConfig, key: jax.Array, dtype):
        self.eps, blocks = config.blocks.norm_eps, config.blocks
        keys, size, numbers = jax.random.split(key, 3), config.blocks.hidden_size, config.patch_numbers
        self.patch_norm = LayerNorm(numbers, _EPS, dtype, bias=True)
        self.projection = outer_linear(blocks, numbers, size, keys[0], dtype, bias=True)
        self.projected_norm = LayerNorm(size, _EPS, dtype, bias=True)
        self.positions = drawn((config.positions, 2, size), blocks.initializer_range, keys[1], dtype)
        self.position_norm = LayerNorm(size, _EPS, dtype, bias=True)
        self.out = outer_linear(blocks, size, config.out_size, keys[2], dtype)

    def __call__(self, pictures: Pictures, key: jax.Array | None = None) -> jax.Array:
        """[B, P, out_size]. key: draws the adapters' dropout masks; None: no dropout."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = self.projected_norm(self.projection(self.patch_norm(pictures.patches), keys[0]))
        tables = self.positions[...]
        x = x + axis_positions(tables[:, 0], tables[:, 1], pictures.patch_coordinates).astype(x.dtype)
        return self.out(unit_norm(self.position_norm(x), self.eps), keys[1])


class Gemma4Embedder(Tower):
    """A patch becomes a feature alone.

    key: draws the initial weights. dtype: of the weights as stored.
    """

    def __init__(self, config: Gemma4EmbedderConfig, key: jax.Array, dtype):
        self.config = config
        self.layers = nnx.List([])
        self.merger = Embedding(config, key, dtype)

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        return (self.merger(pictures, dropout_key),)
