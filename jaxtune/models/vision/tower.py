"""A tower: the layers of a decoder over the patches of pictures, and what makes of their outputs the features that
stand at a text's picture tokens. Each kind of tower is a file of its own.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig(abc.ABC):
    """Shape of a tower, and its names in checkpoints."""

    prefixes: ClassVar[tuple[str, ...]]  # of its tensors, such as ("model.visual.",)
    # {path from the Tower, such as "merger.norm": the name of that module or tensor}; "" is what no other path begins
    modules: ClassVar[Mapping[str, str]]
    # {beginning of tensors' names: that in published checkpoints} where these differ from transformers' model
    stored_names: ClassVar[Mapping[str, str]] = {}

    blocks: DecoderConfig  # of its layers; vocabulary, embedding and head are not used
    patch_size: int  # pixels of a patch's side
    merge_size: int  # patches of a feature's side
    out_size: int  # numbers of a feature, the text's hidden size
    channels: int = 3  # numbers of a pixel
    frames: int = 1  # pictures of a patch; a still picture is there as often
    words: tuple[tuple[str, str], ...] = ()  # (attribute below `modules`, its name) where they differ
    # the token of which pictures' tokens have the per-layer embeddings; None: their own
    placeholder: int | None = None
    # the text's layers in which the tokens of a picture see each other; None: its tokens are causal everywhere
    both_ways: Literal["windows", "all"] | None = None

    @property
    def patch_numbers(self) -> int:
        """The numbers of a patch."""
        return self.channels * self.frames * self.patch_size**2

    def tensor_name(self, path: Sequence[object]) -> str:
        """The name of a tensor or module. path: attributes and indices from the Tower."""
        words, names = tuple(map(str, path)), dict(self.words)
        count = next(n for n in range(len(words), -1, -1) if ".".join(words[:n]) in self.modules)
        return ".".join((self.modules[".".join(words[:count])], *(names.get(word, word) for word in words[count:])))

    @abc.abstractmethod
    def make(self, key: jax.Array, dtype) -> Tower:
        """Draws the initial weights, stored in `dtype`."""


def drawn(shape: tuple[int, ...], std: float, key: jax.Array, dtype) -> nnx.Variable:
    """Normal weights."""
    return nnx.Param((jax.random.normal(key, shape, jnp.float32) * std).astype(dtype))


def outer_linear(config: DecoderConfig, in_size: int, out_size: int, key: jax.Array, dtype, bias=False) -> Linear:
    """A linear outside of a stack, whose weight has no logical axes, because no device divides it."""
    linear = Linear(in_size, out_size, bias=bias, std=config.initializer_range, key=key, dtype=dtype)
    linear.weight = nnx.Param(linear.weight.get_value())
    linear.quantizable = False
    return linear


def layers_of(config: DecoderConfig, keys: jax.Array, dtype) -> nnx.List[Block]:
    """A layer of each of the keys [N], never quantised."""
    layers = [Block(config, spec, key, dtype) for spec, key in zip(config.layers, keys, strict=True)]
    for layer in layers:
        for _, _, linear in layer.matrices():
            linear.quantizable = False
    return nnx.List(layers)


def axis_positions(columns: jax.Array, rows: jax.Array, coordinates: jax.Array) -> jax.Array:
    """float32[B, P, hidden], the sum of a vector of the column and one of the row. columns, rows: [positions, hidden].
    coordinates: int32[B, P, 2], as in Pictures.
    """
    columns, rows = (table.astype(jnp.float32) for table in (columns, rows))  # so that gradients are summed in float32
    return columns[coordinates[..., 1]] + rows[coordinates[..., 0]]


class PatchProjection(nnx.Module):
    """A convolution whose kernel is a whole patch: a product with a weight [hidden, channels, ..., rows, columns].

    patches: [B, P, numbers in the kernel's order] -> [B, P, hidden].
    std: the standard deviation of the initial weight.
    """

    def __init__(self, shape: tuple[int, ...], std: float, key: jax.Array, dtype):
        self.weight = drawn(shape, std, key, dtype)
        self.bias: nnx.Variable = nnx.Param(jnp.zeros(shape[:1], dtype))

    def __call__(self, patches: jax.Array) -> jax.Array:
        weight = self.weight[...]
        return quant_matmul(patches, [weight.reshape(weight.shape[0], -1)], [None], [self.bias[...]])[0]


class Merging(nnx.Module):
    """Makes features of patches."""

    matrices: ClassVar[tuple[str, ...]] = ()  # attributes of its linears


class Tower(nnx.Module):
    """Makes features of pictures. Its linears are never quantised: of a 9B it has a twentieth of the weights, which
    pixels need more than text does. It computes in the patches' dtype.
    """

    config: TowerConfig
    layers: nnx.List[Block]
    merger: Merging

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
        return [(("merger",), self.merger)]

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
        """The features, each [B, P / merge^2, out_size]: those at tokens, then those added after the text's first
        layers; of padding they mean nothing. Each family implements it.

        pictures: with patches from `inputs`.
        plan: where each layer's residuals are until the backward; None: all stay in device memory.
        dropout_key: draws the adapters' dropout masks; None: no dropout.
        """
        raise NotImplementedError
