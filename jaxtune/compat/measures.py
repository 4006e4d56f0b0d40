"""The numbers of a script's own compute_metrics: `predicted` computes a model's logits on the evaluation rows as an
`EvalPrediction`, the argument that compute_metrics gets in transformers too, and `measured` calls that function. The
trainers' methods in evaluation.py call both. ComputeMetrics and Preprocess are the types of the functions that scripts
give."""

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
    """The argument of a script's compute_metrics: what the model predicts on the evaluation rows, and the labels. A row
    is one document, or several if packing=True. With pairs of answers it is one pair: the prompt with the chosen
    answer, and directly after it the prompt with the rejected one (KTOTrainer: the row's answer, and a mismatched
    one)."""

    # float32[rows, length, vocab] (of a reward model vocab is 1), or joined results of preprocess_logits_for_metrics
    predictions: Any
    # int32[rows, length]: the row's token where it is trained on, -100 elsewhere; the logits at position t predict the
    # label at position t + 1, as in transformers
    label_ids: np.ndarray


ComputeMetrics = Callable[[EvalPrediction], Mapping[str, Any]]
Preprocess = Callable[[Any, Any], Any]


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, state, tokens, segment_ids, positions):
    """The logits of one batch, which `predicted` collects, float32[rows, length, vocab]; it is one compiled program.
    `graph` and `state` are the model's static and array parts, split by nnx.split; tokens, segment_ids (0: padding) and
    positions are int32[rows, length]."""
    return nnx.merge(graph, state)(tokens, segment_ids, positions)


def predicted(module: Decoder, batches: Batches, preprocess: Preprocess | None) -> EvalPrediction:
    """Runs a model on rows and returns its logits, or what `preprocess` makes of them, with the labels, in host memory,
    for compute_metrics and predict.

    Args:
      module: the model.
      batches: one epoch of batches of one row each, in the order of the results.
      preprocess: preprocess_logits_for_metrics: maps (logits float32[1, length, vocab], labels int32[1, length]), NumPy
        arrays whose argmax accepts torch's dim too, to an array or a tuple of arrays with the same first axis. None:
        the logits are returned.
    Raises:
      ValueError: all logits take more than half of the host's memory, and `preprocess` is None.
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
    joined = jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *predictions)
    return EvalPrediction(joined, np.concatenate(labels))


def measured(prediction: EvalPrediction, compute_metrics: ComputeMetrics) -> dict[str, float]:
    """Calls a script's compute_metrics with `prediction`, the logits and labels of an evaluation, and returns its
    numbers as floats, {name: number}. Each name gets the prefix eval_ if it has none.

    Raises:
      ValueError: the result is not a mapping of numbers.
    """
    with waiting.users_code("compute_metrics"):
        found = compute_metrics(prediction)
    if not isinstance(found, Mapping):
        raise ValueError(f"SFTTrainer: compute_metrics returned {type(found).__name__}; it returns a dict of numbers")
    try:
        named = {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError):
        raise ValueError(f"SFTTrainer: compute_metrics returned {dict(found)!r}; each value must be a number") from None
    return {name if name.startswith("eval_") else f"eval_{name}": value for name, value in named.items()}
