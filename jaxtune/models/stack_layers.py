"""What the program of a stack is specialised on: a static description of each layer under a plan.

The stack (models/stack.py) makes it from the blocks and the plan, and compiles one program for each description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.tiles import tiled_residuals
from jaxtune.models.residual_plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class StackLayer:
    """What the program of one layer is specialised on: its static arguments; equal layers share a program."""

    graph: nnx.GraphDef  # the block's structure
    spec: LayerSpec  # its kind
    kept: tuple[str, ...]  # names of the residuals that are kept
    in_fp8: tuple[str, ...]  # names of the residuals that are kept in FP8
    offloaded: tuple[str, ...]  # names of the residuals that are offloaded
    aux: tuple[str, ...]  # names of the auxiliary values that it can return beside its output
    tile: int | None  # tokens of each row in a tile of its tokenwise segments; None: they run whole
    free: tuple[str, ...]  # residuals that need not be tied to its gradient (BackwardOrder.free)
    shared: tuple[str, ...]  # names of what it takes from earlier layers
    given: tuple[tuple[str, str], ...]  # the items of Block.gives

    @property
    def gives(self) -> dict[str, str]:
        """{its name of a residual: the name under which later layers take it}"""
        return dict(self.given)

    def taken(self, given: Mapping[str, jax.Array], shared: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """{name: value} of what the layer takes from outside.

        Args:
          given: {name: value} of what the decoder gives to this layer; all of it is taken.
          shared: {name: value} of what earlier layers gave to later ones; only what this layer takes is in the
            result.
        """
        return {**given, **{name: shared[name] for name in self.shared}}


@dataclasses.dataclass(frozen=True)
class StackProgram:
    """What a program of the whole stack is specialised on: the static argument of _stack."""

    layers: tuple[StackLayer, ...]
    aux: tuple[str, ...]  # names of the auxiliary values that are wanted
    short: bool  # whether memory is short, that is, whether any residual is not kept
    whole_weights: int  # ResidualPlan.whole_weights, at least 1

    def stays_whole(self, index: int) -> bool:
        """Whether the weights of the layer of this index stay gathered from its forward to its backward."""
        return index >= len(self.layers) - self.whole_weights


def require_given(layers: Sequence[StackLayer]) -> None:
    """Checks `layers`, the descriptions of all layers in their order: raises ValueError if one takes a value that no
    earlier layer gives."""
    there: set[str] = set()
    for index, layer in enumerate(layers):
        if missing := set(layer.shared) - there:
            raise ValueError(f"layer {index} takes {', '.join(sorted(missing))}, which no earlier layer gives")
        there |= set(layer.gives.values())


def described(
    block: Block, graph, spec: LayerSpec, plan: LayerPlan, tile: int | None, given: tuple[str, ...]
) -> StackLayer:
    """The static description of a layer, by which its program is compiled.

    Args:
      block: the layer; its arrays are not read.
      graph: its structure, an nnx.GraphDef.
      spec: its LayerSpec.
      plan: says which of its residuals are kept, kept in FP8, or offloaded to host memory; those that later layers
        take are always kept.
      tile: tokens of each row in a tile of tokenwise segments, such as those of an MLP (ResidualPlan.tile_tokens);
        ignored, so that these run whole, unless the plan recomputes every value inside them. None: they run whole.
      given: names of what the decoder gives it; the others that it takes come from earlier layers.
    """
    residuals, gives = block.residuals(), block.gives
    inside = tiled_residuals(block.segments())
    dropped = plan.named("recompute", residuals)
    tiled = bool(inside) and set(inside) <= set(dropped)
    placed = {how: plan.named(how, residuals) for how in ("keep", "fp8", "offload")}
    in_fp8, offloaded = (tuple(name for name in placed[how] if name not in gives) for how in ("fp8", "offload"))
    kept = (*placed["keep"], *(name for name in gives if name not in placed["keep"]))
    return StackLayer(
        graph,
        spec,
        kept,
        in_fp8,
        offloaded,
        tuple(block.aux),
        tile if tiled else None,
        block.order.free,
        tuple(name for name in block.takes if name not in given),
        tuple(gives.items()),
    )
