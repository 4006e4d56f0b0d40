"""Static, hashable descriptions of a model's layers under a plan, by which the stack's program is compiled. Layers with
equal descriptions are traced once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.segment import Segment
from jaxtune.models.layers.tiles import tiled_residuals
from jaxtune.models.stack.residual_plan import LayerPlan

# Options for programs that run a few times, such as a layer outside of any other program, or the merge of a matrix:
# autotuning their products takes longer than all of their runs, and device memory. So does compiling products with
# Triton, which takes three times as long as calling cuBLAS, and without autotuning has tiles of no particular size.
UNTUNED: dict[str, bool | int] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class StackLayer:
    """Everything but arrays by which a layer's program is compiled under a plan."""

    graph: nnx.GraphDef  # the structure of the layer's Block
    spec: LayerSpec  # the layer's kind: its parts, window and rotary base
    # names of the residuals that are kept in device memory, and of segments' low-rank inputs, which a segment without
    # adapters does not have
    kept: tuple[str, ...]
    in_fp8: tuple[str, ...]  # names of the residuals that are kept in device memory in FP8, which `kept` lacks
    offloaded: tuple[str, ...]  # names of the residuals that are copied to the host and back
    aux: tuple[str, ...]  # names of the auxiliary values that it can return beside its output
    tile: int | None  # tokens of each row in a tile of its tokenwise segments; None: they run whole
    # names of residuals that, where they are kept, need not be tied to the layer's gradient, unless memory is short
    # (StackProgram.memory_is_short): XLA may keep what the forward computed from them alone. They are `free` of the
    # block's BackwardOrder.
    free: tuple[str, ...]
    shared: tuple[str, ...]  # names of the values that it takes from earlier layers, such as their keys and values
    # the items of Block.gives (it is what this layer gives, not what it is given): pairs (its name of a residual, the
    # name under which later layers take it)
    gives_items: tuple[tuple[str, str], ...]

    @property
    def gives(self) -> dict[str, str]:
        return dict(self.gives_items)

    def taken(self, decoder_values: Mapping[str, jax.Array], shared: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The values that the layer takes from outside: all of `decoder_values`, the decoder's, and its own of
        `shared`, earlier layers'.
        """
        return {**decoder_values, **{name: shared[name] for name in self.shared}}


@dataclasses.dataclass(frozen=True)
class StackProgram:
    """The static description of the whole stack."""

    layers: tuple[StackLayer, ...]  # the descriptions of all layers, in order
    aux: tuple[str, ...]  # names of the auxiliary values, such as router_sums, that the caller wants
    # True: the plan of some layer is another than KEEP (it offloads, recomputes or rounds residuals), which means that
    # memory is short, and the backward ties more values to gradients, because XLA would keep them otherwise; False:
    # every layer's plan is KEEP
    memory_is_short: bool
    # how many of the last layers keep their weights gathered (ResidualPlan.whole_weights), at least 1
    whole_weights: int

    def stays_whole(self, index: int) -> bool:
        """Whether the layer's weights stay gathered from forward to backward; otherwise they are gathered again."""
        return index >= len(self.layers) - self.whole_weights


def require_given(layers: Sequence[StackLayer]) -> None:
    """Raises ValueError if a layer takes a value (a key of StackLayer.shared) that no earlier layer gives under this
    name.
    """
    given_names: set[str] = set()
    for index, layer in enumerate(layers):
        if missing := set(layer.shared) - given_names:
            raise ValueError(f"layer {index} takes {', '.join(sorted(missing))}, which no earlier layer gives")
        given_names |= set(layer.gives.values())


def describe_layer(
    block: Block, graph, spec: LayerSpec, plan: LayerPlan, tile: int | None, decoder_names: tuple[str, ...]
) -> StackLayer:
    """The static description of a layer under a plan. Residuals that later layers take are always kept.

      block: the layer; its arrays are not read.
      graph: its nnx.GraphDef.
      spec: its kind: parts, window and rotary base.
      plan: where its residuals are until the backward.
      tile: tokens of each row in a tile of tokenwise segments; without effect unless the plan recomputes every value
        inside them. None: no tiles.
      decoder_names: names of what the decoder gives the layer; the others that it takes come from earlier layers.

    Raises ValueError for a placement that a residual cannot have.
    """
    residuals, gives = block.residuals(), block.gives
    inside = tiled_residuals(block.segments())
    dropped = plan.named("recompute", residuals)
    tiled = bool(inside) and set(inside) <= set(dropped)
    placed = {how: plan.named(how, residuals) for how in ("keep", "fp8", "offload")}
    in_fp8, offloaded = (tuple(name for name in placed[how] if name not in gives) for how in ("fp8", "offload"))
    kept_names = (*placed["keep"], *(name for name in gives if name not in placed["keep"]))
    if not tiled:
        kept_names += tuple(map(low_rank_inputs, with_low_rank_kept(block.segments(), dropped)))
    return StackLayer(
        graph,
        spec,
        kept_names,
        in_fp8,
        offloaded,
        tuple(block.aux),
        tile if tiled else None,
        block.order.free,
        tuple(name for name in block.takes if name not in decoder_names),
        tuple(gives.items()),
    )


def low_rank_inputs(segment: Segment) -> str:
    """The name of a segment's low-rank inputs (pallas/quant_matmul/low_rank.py) among the values of a layer."""
    return f"{segment.name}_low_rank"


def with_low_rank_kept(segments: Sequence[Segment], dropped: Collection[str]) -> list[Segment]:
    """The segments whose low-rank inputs are kept for the backward, in device memory. A recomputed segment makes them
    anew, and one with a Backward of its own does not use them. dropped: names of the recomputed residuals.
    """
    linears = [segment for segment in segments if segment.matrices and segment.backward is None]
    return [segment for segment in linears if not set(dropped).intersection(keeps_low_rank(segment))]


def keeps_low_rank(segment: Segment) -> tuple[str, ...]:
    """The residuals that must not be recomputed for the segment's low-rank inputs to be kept. Experts have a row for
    each pair of token and expert: where memory is so short that gate and up are recomputed, these rows are as well.
    """
    return (*segment.outputs, *(segment.reads if segment.experts_per_token else ()))


def total_over_layers(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{name: sum over the layers that have it}."""
    total = {}
    for name in dict.fromkeys(name for layer in values for name in layer):
        total[name] = functools.reduce(operator.add, [layer[name] for layer in values if name in layer])
    return total
