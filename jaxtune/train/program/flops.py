"""Model FLOPs of a step: what its matrices, its documents' attention and the other work of its layers need, without
recomputation. `flop_counter` makes the function that counts them for a model, by the formula of `model_flops_per_step`,
from the `document_lengths` of a batch. The metric `mfu` compares them with the device's peak."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import matrix_of, weights_per_token
from jaxtune.train.data.batches import Batch


def document_lengths(batch: Batch) -> np.ndarray:
    """int[documents]: the number of tokens of each of the documents of `batch`, row by row, padding (segment 0) left
    out; it waits for arrays on a device. Engine.load_step counts a step's documents by it, and the Monitor gives the
    counts to the function of `flop_counter`; only `mfu` depends on them."""
    return np.concatenate([np.bincount(row)[1:] for row in np.asarray(batch.segment_ids)])


def flop_counter(model: Decoder) -> Callable[[np.ndarray], float]:
    """Makes a function from the lengths of a step's documents (int[documents], in tokens) to the step's model FLOPs for
    this model: those of matrices and attention, as model_flops_per_step counts them, and three times those that layers
    declare for other work in the forward (token_flops). The metric `mfu`, model FLOP utilisation, is made of it."""
    config = model.config
    matmul = trained = adapters = 0
    head = model.head_variable
    matmul += head.size
    trained += head.size if isinstance(head, nnx.Param) else 0

    beside, widths = 0.0, collections.Counter[int | None]()  # of attentions, by their window
    for layer, spec in zip(model.layers, config.layers, strict=True):
        for segment in layer.segments():
            # Work that is neither a matrix nor attention counts twice in the backward, once for each argument.
            beside += 3 * segment.token_flops
            widths[spec.window] += segment.attention_width
            for matrix in (matrix_of(layer, name) for name in segment.matrices):
                size = weights_per_token(segment, matrix)
                matmul += size
                trained += size if isinstance(matrix.weight, nnx.Param) else 0
                if matrix.lora is not None:
                    whole, experts = matrix.lora.a.size + matrix.lora.b.size, matrix.num_experts
                    adapters += whole // experts * segment.experts_per_token if experts else whole

    def flops(lengths: np.ndarray) -> float:
        """Model FLOPs of a step whose documents have these lengths, int[documents] in tokens."""
        tokens = int(lengths.sum())
        return beside * tokens + model_flops_per_step(
            tokens=tokens,
            matmul_params=matmul,
            trained_matmul_params=trained,
            adapter_params=adapters,
            attention=sum(width * _seen(lengths, window) for window, width in widths.items()),
        )

    return flops


def _seen(lengths: np.ndarray, window: int | None) -> float:
    """About twice the number of pairs of tokens that see each other in causal attention: the sum of length^2 over the
    documents, less what is outside of a sliding window. The function of `flop_counter` counts attention by it. lengths:
    the documents' tokens. window: the window's tokens; None: no window."""
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
    """FLOPs that the model needs for one optimizer step on all devices, without recomputation; the basis of model FLOP
    utilisation. Only the function of `flop_counter` calls it, and adds the layers' other work; no plan depends on it.

    The count uses T tokens (without padding); N = matmul_params, the elements of every matrix that a token is
    multiplied by (with the head, without the embedding look-up, and of a mixture only the experts that a token visits);
    N' = trained_matmul_params, those of them that train; A = adapter_params, those of the adapters' matrices (also only
    of the experts that a token visits); and W S = attention, summed over the layers, where W is the number of query
    heads times their size, and S the sum over documents of length^2, less (length - window)^2 of documents that are
    longer than a sliding window:

            forward    2 N T                        each weight: one multiply and one add per token
                     + 2 A T                        the adapters
                     + 4 W S / 2                    q k^T and p v; half of them, as attention is causal
            backward   2 N T                        the gradient to the input of every product
                     + 2 N' T                       the gradient of the trained weights
                     + 4 A T                        both gradients of the adapters
                     + twice the forward attention  dv, dp, dq, dk

    Full fine-tuning (N' = N, A = 0) needs 6 N T + 6 W S, the formula of PaLM (arXiv 2204.02311, appendix B) with causal
    attention. LoRA (N' = 0) needs 4 N T + 6 A T + 6 W S.
    """
    attention_forward = 4 * attention / 2
    forward = 2 * (matmul_params + adapter_params) * tokens + attention_forward
    backward = (2 * matmul_params + 2 * trained_matmul_params + 4 * adapter_params) * tokens + 2 * attention_forward
    return float(forward + backward)
