"""A tower: the layers of a decoder over the patches of pictures, and what makes of their outputs the features that
stand at a text's picture tokens. Each kind of tower is a file of its own.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig, RopeConfig
from jaxtune.models.layers.block import Block
from jaxtune.models.linear import Linear
from jaxtune.models.rope import rotary_table
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.models.vision.pictures import Pictures
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.quant_matmul import quant_matmul


@dataclasses.dataclass(frozen=True)
class TowerConfig(abc.ABC):
    """Shape of a tower."""

    blocks: DecoderConfig  # of its layers; vocabulary, embedding and head are not used
    patch_size: int  # pixels of a patch's side
    merge_size: int  # patches of a feature's side
    out_size: int  # numbers of a feature, the text's hidden size

    @property
    @abc.abstractmethod
    def prefixes(self) -> tuple[str, ...]:
        """Of its tensors' names in checkpoints, such as ("model.visual.",)."""

    @property
    def stored_names(self) -> tuple[tuple[str, str], ...]:
        """(beginning of tensors' names, that in published checkpoints) where these differ from transformers' model."""
        return ()

    @property
    @abc.abstractmethod
    def patch_numbers(self) -> int:
        """The numbers of a patch."""

    @property
    def placeholder(self) -> int | None:
        """The token of which pictures' tokens have the per-layer embeddings; None: their own."""
        return None

    @property
    def both_ways(self) -> Literal["windows", "all"] | None:
        """The text's layers in which the tokens of a picture see each other; None: its tokens are causal everywhere."""
        return None

    @abc.abstractmethod
    def tensor_name(self, path: Sequence[object]) -> str:
        """The name in checkpoints of a tensor or module. path: attributes and indices from the Tower."""

    @abc.abstractmethod
    def make(self, key: jax.Array, dtype) -> Tower:
        """Draws the initial weights, stored in `dtype`."""


class PatchProjection(nnx.Module):
    """A convolution whose kernel is a whole patch: a product with a weight [hidden, channels, ..., rows, columns].

    patches: [B, P, numbers in the kernel's order] -> [B, P, hidden].
    std: the standard deviation of the initial weight.
    """

    def __init__(self, shape: tuple[int, ...], std: float, key: jax.Array, dtype):
        self.weight: nnx.Variable = nnx.Param((jax.random.normal(key, shape, jnp.float32) * std).astype(dtype))
        self.bias: nnx.Variable = nnx.Param(jnp.zeros(shape[:1], dtype))

    def __call__(self, patches: jax.Array) -> jax.Array:
        weight = self.weight[...]
        return quant_matmul(patches, [weight.reshape(weight.shape[0], -1)], [None], [self.bias[...]])[0]


class Merging(Protocol):
    """A module that makes features of patches."""

    @property
    def matrices(self) -> tuple[str, ...]:
        """Attributes of its linears."""
        ...


class Tower(nnx.Module):
    """Makes features of pictures. Its linears are never quantised: of a 9B it has a twentieth of the weights, which
    pixels need more than text does. It computes in the patches' dtype.
    """

    config: TowerConfig
    layers: nnx.List[Block]

    @property
    def trains(self) -> bool:
        """Whether any of its tensors is trained, adapters included."""
        return bool(jax.tree.leaves(nnx.state(self, nnx.Param)))

    @property
    def unadapted(self) -> list[str]:
        """Modules that PEFT would match by name, and that have no adapters here."""
        return []

    def before_layers(self) -> Iterator[tuple[tuple, Linear]]:
        """Yields (path, Linear) of those that the layers' input goes through."""
        yield from ()

    @property
    def mergers(self) -> Sequence[tuple[tuple, Merging]]:
        """(path from the Tower, module) of those that make features, the last layer's at last."""
        raise NotImplementedError

    def linears(self, layers: bool = True, merger: bool = True) -> Iterator[tuple[str, Linear]]:
        """Yields (Hugging Face module name, Linear), such as model.visual.blocks.0.attn.qkv.

        layers: with those of the layers and before them. merger: with those after them, at last.
        """
        paths = [*self.before_layers()] if layers else []
        for index, layer in enumerate(self.layers if layers else ()):
            paths += [(("layers", index, module, name), matrix) for module, name, matrix in layer.matrices()]
        for path, module in self.mergers if merger else ():
            paths += [((*path, name), getattr(module, name)) for name in module.matrices]
        for path, matrix in paths:
            yield self.config.tensor_name(path), matrix

    def inputs(self, patches: jax.Array, dtype) -> jax.Array:
        """The image processor's patches float32[B, P, F] as the tower reads them, in `dtype`."""
        return patches.astype(dtype)

    def layout(self, pictures: Pictures, axes: tuple[int, int] | None = None) -> PackedLayout:
        """In which the patches of a picture see each other, turned by their coordinates.

        axes: of the coordinates that turn the first and the second half of a head's pairs; None: nothing turns them.
        """
        blocks, most = self.config.blocks, pictures.max_pictures
        most = None if most is None else max(most, 1)  # 0: rows of padding alone
        rows, patches = pictures.patch_segments.shape
        layout = packed_layout((rows, patches), pictures.patch_segments, most, causal=False)
        if axes is None:
            return layout
        rope, size = RopeConfig(theta=blocks.rotary[0].theta), blocks.head_dim // 2
        by_axis = [rotary_table(rope, size, size, pictures.patch_coordinates[..., axis]) for axis in axes]
        table = tuple(jnp.concatenate(tables, -1) for tables in zip(*by_axis, strict=True))
        return dataclasses.replace(layout, rotary=(table,))

    def __call__(
        self, pictures: Pictures, plan: ResidualPlan | None = None, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        """The features, each [B, P / merge^2, out_size]: those that stand at tokens, then those that are added after
        the text's first layers; of padding they mean nothing.

        pictures: with patches from `inputs`.
        plan: where each layer's residuals are until the backward; None: all stay in device memory.
        dropout_key: draws the adapters' dropout masks; None: no dropout.
        """
        raise NotImplementedError
