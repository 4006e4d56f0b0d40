"""The tower of Gemma 3, SigLIP's: pictures of one size, layers without rotation, and means of 4 x 4 patches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.norm import RMSNorm, norm_of
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.stack.stack import run_stack
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import Merging, PatchProjection, Tower, TowerConfig, drawn, layers_of
from jaxtune.pallas.quant_matmul import quant_matmul

_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_MODULES = {
    "projection": f"{_TOWER}.embeddings.patch_embedding",
    "positions": f"{_TOWER}.embeddings.position_embedding",
    "layers": f"{_TOWER}.encoder.layers",
    "norm": f"{_TOWER}.post_layernorm",
    "merger.norm": f"{_PROJECTOR}.mm_soft_emb_norm",
    "merger.weight": f"{_PROJECTOR}.mm_input_projection_weight",
}
_WORDS = {
    "mixer": "self_attn",
    "mixer_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "o_proj": "out_proj",
    "up_proj": "fc1",
    "down_proj": "fc2",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3TowerConfig(TowerConfig):
    """Raises ValueError for sizes that do not fit each other. A patch's numbers: (channel, row, column)."""

    prefixes = (f"{_TOWER}.", f"{_PROJECTOR}.")
    stored_names = {_TOWER: f"{_TOWER}.vision_model"}
    modules = _MODULES

    words: tuple[tuple[str, str], ...] = tuple(_WORDS.items())
    side: int  # patches of a picture's side

    def __post_init__(self):
        if self.side % self.merge_size:
            raise ValueError(f"a picture's side of {self.side} patches is no multiple of a feature's {self.merge_size}")

    def make(self, key: jax.Array, dtype) -> Gemma3Tower:
        return Gemma3Tower(self, key, dtype)


class Positions(nnx.Module):
    """A learned vector of each patch, row by row: weight [side * side, hidden]."""

    def __init__(self, config: Gemma3TowerConfig, key: jax.Array, dtype):
        self.side, blocks = config.side, config.blocks
        self.weight = drawn((config.side**2, blocks.hidden_size), blocks.initializer_range, key, dtype)

    def __call__(self, coordinates: jax.Array) -> jax.Array:
        """float32[B, P, hidden]. coordinates: int32[B, P, 2], as in Pictures."""
        table = self.weight[...].astype(jnp.float32)  # so that gradients of a row are summed in float32
        return table[coordinates[..., 0] * self.side + coordinates[..., 1]]


class Projector(Merging):
    """norm(the mean of a block's patches) @ weight [hidden, out_size]: [B, P, hidden] -> [B, P / merge^2, out_size]."""

    def __init__(self, config: Gemma3TowerConfig, key: jax.Array, dtype):
        self.block, blocks = config.merge_size**2, config.blocks
        self.norm = RMSNorm(blocks.hidden_size, blocks.norm_eps, 1.0, dtype)
        self.weight = drawn((blocks.hidden_size, config.out_size), blocks.initializer_range, key, dtype)

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
        shape = (blocks.hidden_size, config.channels, config.patch_size, config.patch_size)
        self.projection = PatchProjection(shape, blocks.initializer_range, keys[0], dtype)
        self.positions = Positions(config, keys[1], dtype)
        self.layers = layers_of(blocks, keys[3:], dtype)
        self.norm = norm_of(blocks, blocks.hidden_size, dtype)
        self.merger = Projector(config, keys[2], dtype)

    @property
    def unadapted(self) -> list[str]:
        return [self.config.tensor_name(("projection",))]  # a convolution

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        x = self.projection(pictures.patches)
        x = x + self.positions(pictures.patch_coordinates).astype(x.dtype)
        x, _ = run_stack(self.layers, self.config.blocks.layers, x, self.layout(pictures), plan, dropout_key)
        return (self.merger(self.norm(x)),)
