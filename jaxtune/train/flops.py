"""Model FLOPs of a step: what its matrices and its documents' attention need, whatever is computed again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import experts, linears
from jaxtune.train.data import Batch
from jaxtune.train.metrics import model_flops_per_step


def sum_squared_documents(batch: Batch) -> int:
    """Sum over the batch's documents of length squared."""
    total = 0
    for row in np.asarray(batch.segment_ids):
        lengths = np.bincount(row)[1:].astype(np.int64)
        total += int((lengths * lengths).sum())
    return total


def flop_counter(model: Decoder) -> Callable[[int, int], float]:
    """(real tokens, sum of squared document lengths) -> model FLOPs of a step; see metrics.model_flops_per_step."""
    config = model.config
    matmul = trained = adapters = 0
    for _, linear in linears(model):
        size = linear.sizes[0] * linear.sizes[1]
        matmul += size
        trained += size if isinstance(linear.weight, nnx.Param) else 0
        if linear.lora is not None:
            adapters += linear.lora.a.size + linear.lora.b.size
    met = 0 if config.moe is None else config.moe.experts_per_token  # experts, by a token
    for _, matrix in experts(model):
        count, out_size, in_size = matrix.sizes
        size = out_size * in_size * met
        matmul += size
        trained += size if isinstance(matrix.weight, nnx.Param) else 0
        if matrix.lora is not None:
            adapters += (matrix.lora.a.size + matrix.lora.b.size) // count * met
    head = model.head_variable
    matmul += head.size
    trained += head.size if isinstance(head, nnx.Param) else 0

    def flops(tokens: int, sum_squared: int) -> float:
        return model_flops_per_step(
            tokens=tokens,
            matmul_params=matmul,
            trained_matmul_params=trained,
            adapter_params=adapters,
            attention_layers=config.num_layers,
            query_heads=config.num_heads,
            head_dim=config.head_dim,
            sum_squared_document_tokens=sum_squared,
        )

    return flops
