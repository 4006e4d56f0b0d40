"""Model FLOPs of a step, without recomputation, for the metric `mfu`."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import matrix_of, weights_per_token
from jaxtune.train.data.batches import Batch


def document_lengths(batch: Batch) -> np.ndarray:
    """int[documents]: tokens of each document, row by row, without padding. Waits for arrays on a device."""
    return np.concatenate([np.bincount(row)[1:] for row in np.asarray(batch.segment_ids)])


def flop_counter(model: Decoder) -> Callable[[np.ndarray], float]:
    """A function from the document lengths of a step (int[documents]) to its model FLOPs: matrices and attention, and
    three times the layers' other work (token_flops).
    """
    config = model.config
    matmul = trained = adapters = 0
    head = model.head_variable
    matmul += head.size
    trained += head.size if isinstance(head, nnx.Param) else 0

    other_flops, widths = 0.0, collections.Counter[int | None]()  # of attentions, by their window
    for layer, spec in zip(model.layers, config.layers, strict=True):
        for segment in layer.segments():
            # Work that is neither a matrix nor attention counts twice in the backward, once for each argument.
            other_flops += 3 * segment.token_flops
            widths[spec.window] += segment.attention_width
            for matrix in (matrix_of(layer, name) for name in segment.matrices):
                size = weights_per_token(segment, matrix)
                matmul += size
                trained += size if isinstance(matrix.weight, nnx.Param) else 0
                if matrix.lora is not None:
                    adapter_size, experts = matrix.lora.a.size + matrix.lora.b.size, matrix.num_experts
                    adapters += adapter_size // experts * segment.experts_per_token if experts else adapter_size

    def flops(lengths: np.ndarray) -> float:
        tokens = int(lengths.sum())
        return other_flops * tokens + model_flops_per_step(
            tokens=tokens,
            matmul_params=matmul,
            trained_matmul_params=trained,
            adapter_params=adapters,
            attention=sum(width * _seen(lengths, window) for window, width in widths.items()),
        )

    return flops


def _seen(lengths: np.ndarray, window: int | None) -> float:
    """About twice the pairs of tokens that see each other: the sum of length^2, less what a window hides."""
    hidden = 0 if window is None else np.maximum(lengths - window, 0)
    return float((lengths.astype(float) ** 2 - hidden**2).sum())


def model_flops_per_step(
    *,
    tokens: int,
    matmul_params: int,
    trained_matmul_params: int,
    adapter_params: int = 0,
    attention: float,
) -> float:
    """FLOPs of one optimizer step on all devices, without recomputation. With T tokens (no padding), N = matmul_params
    (elements of matrices that multiply a token: the head, not the embedding, only a token's experts), N' those that
    train, A = adapter_params, and W S = attention, summed over layers: query heads times their size, times the sum of
    length^2 - (length - window)^2:

            forward    2 N T + 2 A T + 4 W S / 2    products, adapters, q k^T and p v (causal: half)
            backward   2 N T                        gradients to inputs
                     + 2 N' T + 4 A T               gradients of weights; both of the adapters
                     + twice the forward attention  dv, dp, dq, dk

    Full fine-tuning: 6 N T + 6 W S (PaLM, arXiv 2204.02311, appendix B); LoRA: 4 N T + 6 A T + 6 W S.
    """
    attention_forward = 4 * attention / 2
    forward = 2 * (matmul_params + adapter_params) * tokens + attention_forward
    backward = (2 * matmul_params + 2 * trained_matmul_params + 4 * adapter_params) * tokens + 2 * attention_forward
    return float(forward + backward)
