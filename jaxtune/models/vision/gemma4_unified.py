"""What takes a tower's place in Gemma 4 12B: two linears make a feature of a patch of 48 x 48 pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.norm import LayerNorm
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.vision.gemma4 import outer_linear, unit_norm
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import Tower, TowerConfig

_EPS = 1e-5  # of the centred norms, which no key names
# {attributes from the Tower: their name in transformers' model}
_NAMES = {
    "patch_norm": "patch_ln1",
    "projection": "patch_dense",
    "projected_norm": "patch_ln2",
    "position_norm": "pos_norm",
    "out": "multimodal_embedder.embedding_projection",
}


@dataclasses.dataclass(frozen=True)
class Gemma4EmbedderConfig(TowerConfig):
    """Its blocks are none; they have the sizes."""

    positions: int  # learned ones of each axis
    pad_token: int
    looks: Literal["windows"] | None  # both_ways

    @property
    def prefixes(self) -> tuple[str, ...]:
        return ("model.embed_vision.",)

    @property
    def stored_names(self) -> tuple[tuple[str, str], ...]:
        here, names = "model.embed_vision", ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")
        moved = ((f"{here}.{name}", f"model.vision_embedder.{name}") for name in names)
        return (*moved, (f"{here}.multimodal_embedder.embedding_projection", f"{here}.embedding_projection"))

    @property
    def patch_numbers(self) -> int:
        """In the order (row, column, channel)."""
        return 3 * self.patch_size**2

    @property
    def placeholder(self) -> int:
        return self.pad_token

    @property
    def both_ways(self) -> Literal["windows"] | None:
        return self.looks

    def tensor_name(self, path: Sequence[object]) -> str:
        _, first, *words = map(str, path)
        if first == "positions":
            return "model.embed_vision.pos_embedding"
        return ".".join(("model.embed_vision", _NAMES[first], *words))

    def make(self, key: jax.Array, dtype) -> Gemma4Embedder:
        return Gemma4Embedder(self, key, dtype)


class Embedding(nnx.Module):
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
        positions = jax.random.normal(keys[1], (config.positions, 2, size), jnp.float32) * blocks.initializer_range
        self.positions: nnx.Variable = nnx.Param(positions.astype(dtype))
        self.position_norm = LayerNorm(size, _EPS, dtype, bias=True)
        self.out = outer_linear(blocks, size, config.out_size, keys[2], dtype)

    def __call__(self, pictures: Pictures, key: jax.Array | None = None) -> jax.Array:
        """[B, P, out_size]. key: draws the adapters' dropout masks; None: no dropout."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = self.projected_norm(self.projection(self.patch_norm(pictures.patches), keys[0]))
        columns, rows = jnp.moveaxis(self.positions[...].astype(jnp.float32), 1, 0)
        at = pictures.patch_coordinates
        x = x + (columns[at[..., 1]] + rows[at[..., 0]]).astype(x.dtype)
        return self.out(unit_norm(self.position_norm(x), self.eps), keys[1])


class Gemma4Embedder(Tower):
    """A patch becomes a feature alone.

    key: draws the initial weights. dtype: of the weights as stored.
    """

    def __init__(self, config: Gemma4EmbedderConfig, key: jax.Array, dtype):
        self.config = config
        self.layers = nnx.List([])
        self.merger = Embedding(config, key, dtype)

    @property
    def mergers(self) -> list[tuple[tuple, Embedding]]:
        return [(("merger",), self.merger)]

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        return (self.merger(pictures, dropout_key),)
