"""The tower of Gemma 4: patches of 0 to 1, learned positions of each axis, layers as the text's, and means of 3 x 3
patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.linear import Clips, Linear, NeverTrained
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.stack.stack import run_stack
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import (
    Merging,
    Tower,
    TowerConfig,
    axis_positions,
    drawn,
    layers_of,
    outer_linear,
)
from jaxtune.pallas.normed_heads import inverse_rms

_TOWER = "model.vision_tower"
_MODULES = {
    "projection": f"{_TOWER}.patch_embedder.input_proj",
    "positions.weight": f"{_TOWER}.patch_embedder.position_embedding_table",
    "layers": f"{_TOWER}.encoder.layers",
    "merger.projection": "model.embed_vision.embedding_projection",
    "merger.bias": f"{_TOWER}.std_bias",
    "merger.scale": f"{_TOWER}.std_scale",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4TowerConfig(TowerConfig):
    """Raises ValueError for sizes that do not fit each other. A patch's numbers: (row, column, channel)."""

    prefixes = (f"{_TOWER}.", "model.embed_vision.")
    modules = _MODULES

    positions: int  # learned ones of each axis
    clipped: bool  # the layers' linears clamp their inputs and outputs
    standardised: bool  # means are shifted and scaled by numbers of the checkpoint

    def __post_init__(self):
        if self.blocks.head_dim % 4:
            raise ValueError(
                f"vision_config.head_dim = {self.blocks.head_dim}: turned by two axes, it must be a multiple of 4"
            )

    def tensor_name(self, path: Sequence[object]) -> str:
        words = list(map(str, path))
        if words[0] == "layers" and words[3:] and words[3].endswith("_proj"):  # within the module that clamps
            words[4:5] = [] if words[4:5] == ["clips"] else ["linear", *words[4:5]]
        return super().tensor_name(words)

    def make(self, key: jax.Array, dtype) -> Gemma4Tower:
        return Gemma4Tower(self, key, dtype)


class AxisPositions(nnx.Module):
    """The sum of a learned vector of the column and one of the row: weight [2, positions, hidden]."""

    def __init__(self, config: Gemma4TowerConfig, key: jax.Array, dtype):
        shape = (2, config.positions, config.blocks.hidden_size)
        self.weight = drawn(shape, config.blocks.initializer_range, key, dtype)

    def __call__(self, coordinates: jax.Array) -> jax.Array:
        return axis_positions(self.weight[0], self.weight[1], coordinates)


class Pooler(Merging):
    """projection(norm(sqrt(hidden) * the mean of a block's patches)), the means standardised in between if `scale` and
    `bias` are there: [B, P, hidden] -> [B, P / merge^2, out_size]. The norm has no weight.
    """

    matrices = ("projection",)

    def __init__(self, config: Gemma4TowerConfig, key: jax.Array, dtype):
        self.config, hidden = config, config.blocks.hidden_size
        self.projection = outer_linear(config.blocks, hidden, config.out_size, key, dtype)
        self.bias = NeverTrained(jnp.zeros((hidden,), dtype)) if config.standardised else None
        self.scale = NeverTrained(jnp.ones((hidden,), dtype)) if config.standardised else None

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """key: draws the adapter's dropout mask; None: no dropout."""
        hidden, block, wide = x.shape[-1], self.config.merge_size**2, jnp.float32
        blocks = x[:, : x.shape[1] // block * block].reshape(x.shape[0], -1, block, hidden)
        means = blocks.astype(wide).mean(2).astype(x.dtype)
        pooled = means.astype(wide) * hidden**0.5
        if self.bias is not None and self.scale is not None:
            pooled = (pooled - self.bias[...].astype(wide)) * self.scale[...].astype(wide)
        return self.projection(unit_norm(pooled.astype(x.dtype), self.config.blocks.norm_eps), key)


def unit_norm(x: jax.Array, eps: float) -> jax.Array:
    """RMS normalisation over the last axis without a weight, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * inverse_rms(wide, eps)).astype(x.dtype)


class Gemma4Tower(Tower):
    """A projection of patches, positions, layers in which the patches of a picture see each other, turned by column and
    row, and a Pooler.

      key: draws the initial weights. dtype: of the weights as stored.
    """

    def __init__(self, config: Gemma4TowerConfig, key: jax.Array, dtype):
        self.config, blocks = config, config.blocks
        keys = jax.random.split(key, blocks.num_layers + 3)
        self.projection = outer_linear(blocks, config.patch_numbers, blocks.hidden_size, keys[0], dtype)
        self.positions = AxisPositions(config, keys[1], dtype)
        self.layers = layers_of(blocks, keys[3:], dtype)
        for layer in self.layers if config.clipped else ():
            for _, _, linear in layer.matrices():
                linear.clips = Clips(dtype)
        self.merger = Pooler(config, keys[2], dtype)

    @property
    def unadapted(self) -> list[str]:
        return [name.removesuffix(".linear") for name, _ in self.linears(merger=False) if name.endswith(".linear")]

    def before_layers(self) -> Iterator[tuple[tuple, Linear]]:
        yield ("projection",), self.projection

    def inputs(self, patches: jax.Array, dtype) -> jax.Array:
        return (2.0 * (patches - 0.5)).astype(dtype)

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        keys = (None,) * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        x = self.projection(pictures.patches, keys[0])
        x = x + self.positions(pictures.patch_coordinates).astype(x.dtype)
        layout = self.layout(pictures, axes=(1, 0))
        x, _ = run_stack(self.layers, self.config.blocks.layers, x, layout, plan, keys[1])
        return (self.merger(x, keys[2]),)
