"""Model FLOPs of a step: what its matrices and its documents' attention need, whatever is computed again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import experts, linears
from jaxtune.train.data import Batch


def sum_squared_documents(batch: Batch) -> int:
    """Sum over the batch's documents of length squared."""
    total = 0
    for row in np.asarray(batch.segment_ids):
        lengths = np.bincount(row)[1:].astype(np.int64)
        total += int((lengths * lengths).sum())
    return total


def flop_counter(model: Decoder) -> Callable[[int, int], float]:
    """(real tokens, sum of squared document lengths) -> model FLOPs of a step; see model_flops_per_step."""
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

    segments = [segment for layer in model.layers for segment in layer.segments()]
    # What is neither a matrix nor attention: in the backward, as much for each of the two arguments of a product.
    beside = 3 * sum(segment.token_flops for segment in segments)
    width = sum(segment.attention_width for segment in segments)

    def flops(tokens: int, sum_squared: int) -> float:
        return beside * tokens + model_flops_per_step(
            tokens=tokens,
            matmul_params=matmul,
            trained_matmul_params=trained,
            adapter_params=adapters,
            attention_width=width,
            sum_squared_document_tokens=sum_squared,
        )

    return flops


def model_flops_per_step(
    *,
    tokens: int,
    matmul_params: int,
    trained_matmul_params: int,
    adapter_params: int = 0,
    attention_width: int,
    sum_squared_document_tokens: int,
) -> float:
    """FLOPs that the model needs for one optimizer step, whatever the program recomputes; for model FLOP utilisation.

    With T tokens (padding left out), N = matmul_params (every matrix a token is multiplied by, the head included, the
    embedding look-up not, of a mixture only the experts a token visits), N' = trained_matmul_params, A =
    adapter_params, W = attention_width (query heads times their size, summed over the layers), and S = sum over
    documents of length^2:

        forward    2 N T                        each weight: one multiply, one add a token
                 + 2 A T                        the adapters beside them
                 + 4 W S / 2                    q k^T and p v; half is causal
        backward   2 N T                        the gradient to the input of every matmul
                 + 2 N' T                       the gradient of the trained weights
                 + 4 A T                        both for the adapters
                 + twice the forward attention  dv, dp, dq, dk

    Full fine-tuning (N' = N, A = 0) is thus 6 N T + 6 W S, the formula of PaLM (arXiv 2204.02311, appendix B) with
    causal attention; LoRA (N' = 0) is 4 N T + 6 A T + 6 W S. A sliding window is not taken off S here: the caller
    passes the visible pairs times two.
    """
    attention_forward = 4 * attention_width * sum_squared_document_tokens / 2
    forward = 2 * (matmul_params + adapter_params) * tokens + attention_forward
    backward = (2 * matmul_params + 2 * trained_matmul_params + 4 * adapter_params) * tokens + 2 * attention_forward
    return float(forward + backward)
