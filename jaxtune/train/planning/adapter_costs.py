"""The memory that a layer's adapters take in a step beside their parameters, gradients and optimizer states: copies of
experts' adapters for the kernels, low-rank inputs that are kept for the backward, and masked inputs of dropout.
step_cost counts it by these functions."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.segment import Segment, matrix_of
from jaxtune.models.stack_layers import with_low_rank_kept


def experts_adapters(layers: Sequence[Block], dtype) -> float:
    """Bytes that `layers` keep for the adapters of their experts if every residual is kept: the adapters, copied to the
    layout and compute dtype (`dtype`) of the kernels, unless that is float32, in which adapters are stored. It is
    StepCost.shared."""
    matrices = [matrix for layer in layers for *_, matrix in layer.matrices() if matrix.num_experts and matrix.lora]
    return sum(matrix.adapter_bytes(dtype.itemsize) for matrix in matrices) if dtype.itemsize < 4 else 0.0


def low_rank_bytes(layer: Block, segment: tuple[str, tuple[str, ...]], dtype) -> float:
    """Bytes per token of the low-rank inputs of a segment, which a layer keeps unless the plan recomputes what they
    need (SegmentCost.low_rank_with); the few of the empty rows that fill up experts' tiles are not counted. segment:
    its name and outputs; the layer may have none like it. dtype: the compute dtype."""
    kept = with_low_rank_kept(layer.segments(), ())
    return sum(_low_rank_bytes(layer, s, dtype) for s in kept if (s.name, s.outputs) == segment)


def _low_rank_bytes(layer: Block, segment: Segment, dtype) -> float:
    """Bytes per token of a segment's low-rank inputs: a number of the compute dtype `dtype` for each rank of the
    adapters of its matrices, and of experts for each of the token's experts. Under quantisation-aware training none is
    kept."""
    matrices = [matrix_of(layer, name) for name in segment.matrices]
    adapted = [matrix for matrix in matrices if matrix.lora is not None and matrix.fake_quant is None]
    each = [(matrix.low_rank_bytes(dtype.itemsize), matrix.num_experts) for matrix in adapted]
    return float(sum(size * (segment.experts_per_token if experts else 1) for size, experts in each))


def masked_sizes(model: Decoder) -> list[int]:
    """The number of input features of each adapter in the layers of `model` that has dropout; [] without dropout. By
    the largest of these the planner reserves one adapter's masked input and its mask (StepCost.dropout_bytes), because
    only one of each is there at a time."""
    return [m.sizes[1] for layer in model.layers for *_, m in layer.matrices() if m.lora is not None and m.lora.rate]
