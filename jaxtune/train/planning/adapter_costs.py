"""Memory of adapters in a step beside parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.segment import Segment, matrix_of
from jaxtune.models.stack_layers import with_low_rank_kept


def experts_adapters(layers: Sequence[Block], dtype) -> float:
    """Bytes of the copies of experts' adapters in the kernels' layout and `dtype`; 0 for float32, in which adapters are
    stored.
    """
    matrices = [matrix for layer in layers for *_, matrix in layer.matrices() if matrix.num_experts and matrix.lora]
    return sum(matrix.adapter_bytes(dtype.itemsize) for matrix in matrices) if dtype.itemsize < 4 else 0.0


def low_rank_bytes(layer: Block, segment: tuple[str, tuple[str, ...]], dtype) -> float:
    """Bytes per token of the low-rank inputs that a layer keeps for a segment (name, outputs), unless the plan
    recomputes what they need. dtype: the compute dtype.
    """
    segments = with_low_rank_kept(layer.segments(), ())
    return sum(_low_rank_bytes(layer, s, dtype) for s in segments if (s.name, s.outputs) == segment)


def _low_rank_bytes(layer: Block, segment: Segment, dtype) -> float:
    """None under quantisation-aware training."""
    matrices = [matrix_of(layer, name) for name in segment.matrices]
    adapted = [matrix for matrix in matrices if matrix.lora is not None and matrix.fake_quant is None]
    adapter_sizes = [(matrix.low_rank_bytes(dtype.itemsize), matrix.num_experts) for matrix in adapted]
    return float(sum(size * (segment.experts_per_token if experts else 1) for size, experts in adapter_sizes))


def masked_sizes(model: Decoder) -> list[int]:
    """Input features of each adapter with dropout. One masked input and its mask exist at a time, so the largest
    counts.
    """
    return [m.sizes[1] for layer in model.layers for *_, m in layer.matrices() if m.lora is not None and m.lora.rate]
