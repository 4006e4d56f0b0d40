"""The tower of Gemma 4: patches of 0 to 1, learned positions of each axis, layers as the text's, and means of 3 x 3
patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.layers.block import Block
from jaxtune.models.linear import Clips, Linear, NeverTrained
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.stack.stack import run_stack
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import Tower, TowerConfig
from jaxtune.pallas.normed_heads import inverse_rms

_TOWER = "model.vision_tower"
_POSITIONS = f"{_TOWER}.patch_embedder.position_embedding_table"
# {attributes from the Tower: their name in checkpoints}
_NAMES = {
    ("projection",): f"{_TOWER}.patch_embedder.input_proj",
    ("positions", "weight"): _POSITIONS,
    ("merger", "projection"): "model.embed_vision.embedding_projection",
    ("merger", "bias"): f"{_TOWER}.std_bias",
    ("merger", "scale"): f"{_TOWER}.std_scale",
}


@dataclasses.dataclass(frozen=True)
class Gemma4TowerConfig(TowerConfig):
    """Raises ValueError for sizes that do not fit each other."""

    positions: int  # learned ones of each axis
    clipped: bool  # the layers' linears clamp their inputs and outputs
    standardised: bool  # means are shifted and scaled by numbers of the checkpoint
    names: tuple[tuple[str, str], ...]  # (attribute of a layer, its name in checkpoints) where they differ
    pad_token: int
    looks: Literal["windows"] | None  # both_ways

    def __post_init__(self):
        if self.blocks.head_dim % 4:
            raise ValueError(
                f"vision_config.head_dim = {self.blocks.head_dim}: turned by two axes, it must be a multiple of 4"
            )

    @property
    def prefixes(self) -> tuple[str, ...]:
        return (f"{_TOWER}.", "model.embed_vision.")

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
        words = tuple(map(str, path))
        if words[0] != "layers":
            head = words[: 1 if words[:1] in _NAMES else 2]
            return ".".join((_NAMES[head], *words[len(head) :]))
        names = dict(self.names)
        words = [names.get(word, word) for word in words[1:]]
        if len(words) > 2 and words[2].endswith("_proj"):  # a linear is within the module that clamps
            words[3:4] = [] if words[3:4] == ["clips"] else ["linear", *words[3:4]]
        return ".".join((f"{_TOWER}.encoder.layers", *words))

    def make(self, key: jax.Array, dtype) -> Gemma4Tower:
        return Gemma4Tower(self, key, dtype)


class AxisPositions(nnx.Module):
    """The sum of a learned vector of the column and one of the row: weight [2, positions, hidden]."""

    def __init__(self, config: Gemma4TowerConfig, key: jax.Array, dtype):
        shape = (2, config.positions, config.blocks.hidden_size)
        weight = jax.random.normal(key, shape, jnp.float32) * config.blocks.initializer_range
        self.weight: nnx.Variable = nnx.Param(weight.astype(dtype))

    def __call__(self, coordinates: jax.Array) -> jax.Array:
        """float32[B, P, hidden]. coordinates: int32[B, P, 2], as in Pictures."""
        columns, rows = self.weight[...].astype(jnp.float32)  # so that gradients of a vector are summed in float32
        return columns[coordinates[..., 1]] + rows[coordinates[..., 0]]


class Pooler(nnx.Module):
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


def outer_linear(config: DecoderConfig, in_size: int, out_size: int, key: jax.Array, dtype, bias=False) -> Linear:
    """A linear outside of a stack, whose weight has no logical axes, because no device divides it."""
    linear = Linear(in_size, out_size, bias=bias, std=config.initializer_range, key=key, dtype=dtype)
    linear.weight = nnx.Param(linear.weight.get_value())
    linear.quantizable = False
    return linear


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
        layers = [Block(blocks, spec, k, dtype) for spec, k in zip(blocks.layers, keys[3:], strict=True)]
        for layer in layers:
            for _, _, linear in layer.matrices():
                linear.quantizable = False
                if config.clipped:
                    linear.clips = Clips(dtype)
        self.layers = nnx.List(layers)
        self.merger = Pooler(config, keys[2], dtype)

    @property
    def unadapted(self) -> list[str]:
        return [name.removesuffix(".linear") for name, _ in self.linears(merger=False) if name.endswith(".linear")]

    def before_layers(self) -> Iterator[tuple[tuple, Linear]]:
        yield ("projection",), self.projection

    def inputs(self, patches: jax.Array, dtype) -> jax.Array:
        return (2.0 * (patches - 0.5)).astype(dtype)

    @property
    def mergers(self) -> list[tuple[tuple, Pooler]]:
        return [(("merger",), self.merger)]

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        keys = (None,) * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        x = self.projection(pictures.patches, keys[0])
        x = x + self.positions(pictures.patch_coordinates).astype(x.dtype)
        layout = self.layout(pictures, axes=(1, 0))
        x, _ = run_stack(self.layers, self.config.blocks.layers, x, layout, plan, keys[1])
        return (self.merger(x, keys[2]),)
