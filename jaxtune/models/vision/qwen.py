"""The tower of Qwen3.5 and Qwen3-VL: learned positions of a square, interpolated, and mergers of 2 x 2 patches, of
some families several.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.norm import norm_of
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.stack.stack import run_in_parts
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import Merging, PatchProjection, Tower, TowerConfig, drawn, layers_of, outer_linear
from jaxtune.pallas.gated import ACTIVATIONS

_WORDS = {
    "projection": "patch_embed.proj",
    "positions": "pos_embed",
    "layers": "blocks",
    "mixer": "attn",
    "mixer_norm": "norm1",
    "mlp_norm": "norm2",
    "qkv_proj": "qkv",
    "o_proj": "proj",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "deep_mergers": "deepstack_merger_list",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenTowerConfig(TowerConfig):
    """Raises ValueError for sizes that do not fit each other. A patch's numbers: (channel, frame, row, column)."""

    prefixes = ("model.visual.",)
    modules = {"": "model.visual"}

    words: tuple[tuple[str, str], ...] = tuple(_WORDS.items())
    positions: int  # rows of the table of learned positions, a square
    # ascending indices of layers whose outputs are merged, too: the i-th features are added after text layer i
    deep: tuple[int, ...] = ()

    def __post_init__(self):
        layers = self.blocks.num_layers
        if any(first >= second for first, second in itertools.pairwise((-1, *self.deep, layers))):
            raise ValueError(f"deepstack_visual_indexes = {list(self.deep)}: must ascend, below the {layers} layers")
        if self.side**2 != self.positions:
            raise ValueError(f"num_position_embeddings = {self.positions}: must be a square")
        if self.blocks.head_dim % 4:
            raise ValueError(
                f"a tower's heads of {self.blocks.head_dim} numbers (hidden_size / num_heads) are turned by two axes: "
                "must be a multiple of 4"
            )

    @property
    def side(self) -> int:
        """Learned positions of a side."""
        return math.isqrt(self.positions)

    def make(self, key: jax.Array, dtype) -> QwenTower:
        return QwenTower(self, key, dtype)


class LearnedPositions(nnx.Module):
    """A square table of positions [side * side, hidden], interpolated to each picture's grid (bilinear, corners on
    corners).
    """

    def __init__(self, config: QwenTowerConfig, key: jax.Array, dtype):
        shape = (config.positions, config.blocks.hidden_size)
        self.weight = drawn(shape, config.blocks.initializer_range, key, dtype)

    def __call__(self, grids: jax.Array, coordinates: jax.Array) -> jax.Array:
        """float32[B, P, hidden]. grids, coordinates: int32[B, P, 2], as in Pictures."""
        table = self.weight[...].astype(jnp.float32)  # so that gradients of a row are summed in float32
        side = math.isqrt(len(table))
        at = coordinates.astype(jnp.float32) * (side - 1) / jnp.maximum(grids - 1, 1)
        first = jnp.floor(at)
        share = at - first
        index = first.astype(jnp.int32)
        (row, column), (row_share, column_share) = (jnp.moveaxis(a, -1, 0) for a in (index, share))
        total = jnp.zeros((*grids.shape[:2], table.shape[1]), jnp.float32)
        for rows, row_weight in ((row, 1 - row_share), (row + 1, row_share)):
            for columns, weight in ((column, 1 - column_share), (column + 1, column_share)):
                taps = jnp.clip(rows, 0, side - 1) * side + jnp.clip(columns, 0, side - 1)
                total = total + table[taps] * (row_weight * weight)[..., None]
        return total


class Merger(Merging):
    """down(gelu(up(the normed patches of a block, joined))): [B, P, hidden] -> [B, P / merge^2, out_size].

    norms_joined: whether the norm is over a joined block, not over each patch.
    """

    matrices = ("up_proj", "down_proj")

    def __init__(self, config: QwenTowerConfig, key: jax.Array, dtype, norms_joined: bool = False):
        blocks, keys = config.blocks, jax.random.split(key, 2)
        joined = blocks.hidden_size * config.merge_size**2
        self.norms_joined = norms_joined
        self.norm = norm_of(blocks, joined if norms_joined else blocks.hidden_size, dtype)
        self.up_proj = outer_linear(blocks, joined, joined, keys[0], dtype, bias=True)
        self.down_proj = outer_linear(blocks, joined, config.out_size, keys[1], dtype, bias=True)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """key: draws the adapters' dropout masks; None: no dropout."""
        keys = (None, None) if key is None else jax.random.split(key)
        blocks = (x.shape[0], -1, self.up_proj.sizes[1])
        x = self.norm(x.reshape(blocks)) if self.norms_joined else self.norm(x).reshape(blocks)
        return self.down_proj(ACTIVATIONS["gelu"](self.up_proj(x, keys[0])), keys[1])


class QwenTower(Tower):
    """A projection of patches, learned positions, layers in which the patches of a picture see each other, turned by
    row and column, and a merger, of some families several.

      key: draws the initial weights. dtype: of the weights as stored.
    """

    def __init__(self, config: QwenTowerConfig, key: jax.Array, dtype):
        self.config, self._ends = config, tuple(index + 1 for index in config.deep)
        keys = jax.random.split(key, config.blocks.num_layers + 3)
        size = config.patch_size
        shape = (config.blocks.hidden_size, config.channels, config.frames, size, size)
        self.projection = PatchProjection(shape, config.blocks.initializer_range, keys[0], dtype)
        self.positions = LearnedPositions(config, keys[1], dtype)
        blocks = config.blocks
        self.layers = layers_of(blocks, keys[3:], dtype)
        self.merger = Merger(config, keys[2], dtype)
        deep = [Merger(config, jax.random.fold_in(key, index), dtype, norms_joined=True) for index in config.deep]
        self.deep_mergers = nnx.List(deep)

    @property
    def unadapted(self) -> list[str]:
        return [self.config.tensor_name(("projection",))]  # a convolution

    @property
    def mergers(self) -> list[tuple[tuple, Merging]]:
        """(path from the Tower, merger) of those of the layers `deep`, and at last of the last layer."""
        deep = [(("deep_mergers", index), merger) for index, merger in enumerate(self.deep_mergers)]
        return [*deep, (("merger",), self.merger)]

    def patch_states(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> list[jax.Array]:
        """The outputs [B, P, hidden] of the layers `deep`, and at last of the last layer.

        plan: where each layer's residuals are until the backward; None: all stay in device memory.
        dropout_key: draws the adapters' dropout masks; None: no dropout.
        """
        config = self.config
        x = self.projection(pictures.patches)
        x = x + self.positions(pictures.patch_grids, pictures.patch_coordinates).astype(x.dtype)
        layout = self.layout(pictures, axes=(0, 1))
        states: list[jax.Array] = []

        def keep(x: jax.Array, index: int) -> jax.Array:
            states.append(x)
            return x

        x, _ = run_in_parts(self._ends, keep, self.layers, config.blocks.layers, x, layout, plan, dropout_key)
        return [*states, x]

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        layers_key, *keys = (None,) * (2 + len(self._ends))
        if dropout_key is not None:
            layers_key, *keys = jax.random.split(dropout_key, 2 + len(self._ends))
        states = self.patch_states(pictures, plan, layers_key)
        *deep, last = (merger(x, k) for (_, merger), x, k in zip(self.mergers, states, keys, strict=True))
        return last, *deep
