"""The training loss: a sum and a count, divided once by the count of the whole optimizer step."""

from __future__ import annotations

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.stack import ResidualPlan
from jaxtune.pallas.linear_cross_entropy import linear_cross_entropy
from jaxtune.train.data.batches import Batch


def loss_sum_and_count(
    model: Decoder,
    batch: Batch,
    *,
    max_documents: int | None = None,
    plan: ResidualPlan | None = None,
    chunk_tokens: int | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted next-token losses and sum of weights: float32 scalars, differentiable.

    A step over several batches adds both and divides once: the same gradient however the rows are split.

    Args:
      batch: fields [rows, length].
      max_documents: a promise about the rows that lets faster attention be chosen (see PackedLayout).
      plan: what happens to residuals. chunk_tokens: tokens whose logits exist at a time.
      dropout_key: adapters' dropout; None for none.
    """
    hidden = model.hidden_states(
        batch.tokens,
        batch.segment_ids,
        batch.positions,
        max_documents=max_documents,
        plan=plan,
        dropout_key=dropout_key,
    )
    head = model.head_variable
    with jax.named_scope("loss"):
        return linear_cross_entropy(
            hidden,
            head[...],
            batch.targets,
            batch.weights,
            soft_cap=model.config.final_soft_cap,
            head_gradient=isinstance(head, nnx.Param),
            chunk_tokens=chunk_tokens,
        )
