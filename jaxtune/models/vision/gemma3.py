"""The tower of Gemma 3, SigLIP's: pictures of one size, layers without rotation, and means of 4 x 4 patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.layers.block import Block
from jaxtune.models.norm import RMSNorm, norm_of
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.stack.stack import run_stack
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import PatchProjection, Tower, TowerConfig
from jaxtune.pallas.quant_matmul import quant_matmul

_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
# {attributes from the Tower, or of its layers: their name in transformers' model}
_NAMES = {
    "projection": f"{_TOWER}.embeddings.patch_embedding",
    "positions": f"{_TOWER}.embeddings.position_embedding",
    "norm": f"{_TOWER}.post_layernorm",
    "merger.norm": f"{_PROJECTOR}.mm_soft_emb_norm",
    "merger.weight": f"{_PROJECTOR}.mm_input_projection_weight",
}
_LAYERS = {
    "mixer": "self_attn",
    "mixer_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "o_proj": "out_proj",
    "up_proj": "fc1",
    "down_proj": "fc2",
}


@dataclasses.dataclass(frozen=True)
class Gemma3TowerConfig(TowerConfig):
    """Raises ValueError for sizes that do not fit each other."""

    channels: int  # numbers of a pixel
    side: int  # patches of a picture's side

    def __post_init__(self):
        if self.side % self.merge_size:
            raise ValueError(f"a picture's side of {self.side} patches is no multiple of a feature's {self.merge_size}")

    @property
    def prefixes(self) -> tuple[str, ...]:
        return (f"{_TOWER}.", f"{_PROJECTOR}.")

    @property
    def stored_names(self) -> tuple[tuple[str, str], ...]:
        return ((_TOWER, f"{_TOWER}.vision_model"),)

    @property
    def patch_numbers(self) -> int:
        """In the order (channel, row, column)."""
        return self.channels * self.patch_size**2

    @property
    def both_ways(self) -> Literal["all"]:
        return "all"

    def tensor_name(self, path: Sequence[object]) -> str:
        words = tuple(map(str, path))
        if words[0] == "layers":
            return ".".join((f"{_TOWER}.encoder.layers", *(_LAYERS.get(word, word) for word in words[1:])))
        count = 2 if words[0] == "merger" else 1
        return ".".join((_NAMES[".".join(words[:count])], *words[count:]))

    def make(self, key: jax.Array, dtype) -> Gemma3Tower:
        return Gemma3Tower(self, key, dtype)


class Positions(nnx.Module):
    """A learned vector of each patch, row by row: weight [side * side, hidden]."""

    def __init__(self, config: Gemma3TowerConfig, key: jax.Array, dtype):
        self.side, shape = config.side, (config.side**2, config.blocks.hidden_size)
        weight = jax.random.normal(key, shape, jnp.float32) * config.blocks.initializer_range
        self.weight: nnx.Variable = nnx.Param(weight.astype(dtype))

    def __call__(self, coordinates: jax.Array) -> jax.Array:
        """float32[B, P, hidden]. coordinates: int32[B, P, 2], as in Pictures."""
        table = self.weight[...].astype(jnp.float32)  # so that gradients of a row are summed in float32
        return table[coordinates[..., 0] * self.side + coordinates[..., 1]]


class Projector(nnx.Module):
    """norm(the mean of a block's patches) @ weight [hidden, out_size]: [B, P, hidden] -> [B, P / merge^2, out_size]."""

    matrices = ()

    def __init__(self, config: Gemma3TowerConfig, key: jax.Array, dtype):
        self.block, blocks = config.merge_size**2, config.blocks
        self.norm = RMSNorm(blocks.hidden_size, blocks.norm_eps, 1.0, dtype)
        weight = jax.random.normal(key, (blocks.hidden_size, config.out_size), jnp.float32) * blocks.initializer_range
        self.weight: nnx.Variable = nnx.Param(weight.astype(dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        count = x.shape[1] // self.block
        blocks = x[:, : count * self.block].reshape(x.shape[0], count, self.block, -1)
        means = blocks.astype(jnp.float32).mean(2).astype(x.dtype)
        return quant_matmul(self.norm(means), [self.weight[...].T], [None], [None])[0]


class Gemma3Tower(Tower):
    """A projection of patches, a learned position of each, layers in which the patches of a picture see each other, a
    norm, and a Projector.

      key: draws the initial weights. dtype: of the weights as stored.
    """

    def __init__(self, config: Gemma3TowerConfig, key: jax.Array, dtype):
        self.config, blocks = config, config.blocks
        keys = jax.random.split(key, blocks.num_layers + 3)
        shape, std = (
            (blocks.hidden_size, config.channels, config.patch_size, config.patch_size),
            blocks.initializer_range,
        )
        self.projection = PatchProjection(shape, std, keys[0], dtype)
        self.positions = Positions(config, keys[1], dtype)
        layers = [Block(blocks, spec, k, dtype) for spec, k in zip(blocks.layers, keys[3:], strict=True)]
        self.layers = nnx.List(layers)
        self.norm = norm_of(blocks, blocks.hidden_size, dtype)
        self.merger = Projector(config, keys[2], dtype)
        for _, linear in self.linears():
            linear.quantizable = False

    @property
    def unadapted(self) -> list[str]:
        return [self.config.tensor_name(("projection",))]  # a convolution

    @property
    def mergers(self) -> list[tuple[tuple, Projector]]:
        return [(("merger",), self.merger)]

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        x = self.projection(pictures.patches)
        x = x + self.positions(pictures.patch_coordinates).astype(x.dtype)
        x, _ = run_stack(self.layers, self.config.blocks.layers, x, self.layout(pictures), plan, dropout_key)
        return (self.merger(self.norm(x)),)
