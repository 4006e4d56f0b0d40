"""The numbers of a script's compute_metrics, which needs the logits of all evaluation rows in host memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxtune.compat.rows import IGNORE
from jaxtune.compat.texts import NumpyTensor
from jaxtune.models.decoder import Decoder
from jaxtune.system import waiting
from jaxtune.train.data.batches import Batches


class EvalPrediction(NamedTuple):
    """The argument of compute_metrics. A row is one document, several if packing=True, or a pair: the prompt with the
    chosen answer, then with the rejected one (KTOTrainer: a mismatched one).
    """

    # float32[rows, length, vocab] (of a reward model vocab is 1), or joined results of preprocess_logits_for_metrics
    predictions: Any
    # int32[rows, length]: the row's token where it is trained on, -100 elsewhere; the logits at position t predict the
    # label at position t + 1, as in transformers
    label_ids: np.ndarray


ComputeMetrics = Callable[[EvalPrediction], Mapping[str, Any]]
Preprocess = Callable[[Any, Any], Any]


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, state, tokens, segment_ids, positions):
    """Logits float32[rows, length, vocab] of one batch; segment_ids are 0 at padding."""
    return nnx.merge(graph, state)(tokens, segment_ids, positions)


def predict_rows(module: Decoder, batches: Batches, preprocess: Preprocess | None) -> EvalPrediction:
    """A model's logits (or what `preprocess` makes of them) and labels, in host memory.

    ValueError: all logits take more than half of the host's memory, and `preprocess` is None.
      batches: one epoch of batches of one row.
      preprocess: maps (logits float32[1, length, vocab], labels int32[1, length]) to an array or a tuple of arrays.
      module: on the devices.
    """
    rows, head = batches.steps_per_epoch, module.config.head
    logit_bytes = rows * batches.length * (head.outputs or module.config.vocab_size) * 4
    if preprocess is None and logit_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2:
        raise ValueError(
            f"SFTTrainer: compute_metrics needs the logits of {rows:,} rows of {batches.length:,} tokens, which are "
            f"{logit_bytes / 1e9:,.0f} GB: give preprocess_logits_for_metrics, such as lambda logits, labels: "
            "logits.argmax(-1), or fewer rows"
        )
    graph, state = nnx.split(module)
    predictions, labels = [], []
    for step in range(rows):
        batch = batches.batch_at(step)
        logits = np.asarray(_logits(graph, state, batch.tokens, batch.segment_ids, batch.positions))
        row = np.full(batch.tokens.shape, IGNORE, np.int32)
        row[:, 1:] = np.where(batch.weights > 0, batch.targets, IGNORE)[:, :-1]
        labels.append(row)
        if preprocess is not None:
            with waiting.users_code("preprocess_logits_for_metrics"):
                logits = preprocess(logits.view(NumpyTensor), row.view(NumpyTensor))
        predictions.append(logits)
    joined = jax.tree.map(lambda *chunks: np.concatenate([np.asarray(chunk) for chunk in chunks]), *predictions)
    return EvalPrediction(joined, np.concatenate(labels))


def run_compute_metrics(prediction: EvalPrediction, compute_metrics: ComputeMetrics) -> dict[str, float]:
    """The numbers of compute_metrics as floats, each name with the prefix eval_; ValueError if they are no numbers."""
    with waiting.users_code("compute_metrics"):
        result = compute_metrics(prediction)
    if not isinstance(result, Mapping):
        raise ValueError(f"SFTTrainer: compute_metrics returned {type(result).__name__}; it returns a dict of numbers")
    try:
        named = {str(name): float(value) for name, value in result.items()}
    except (TypeError, ValueError):
        raise ValueError(
            f"SFTTrainer: compute_metrics returned {dict(result)!r}; each value must be a number"
        ) from None
    return {name if name.startswith("eval_") else f"eval_{name}": value for name, value in named.items()}
