"""Reward models: the chosen answer of a pair scores higher than the rejected one.

A document's score is the head's output for its last token that is not the padding token, as in Hugging Face's
ForSequenceClassification. Names are TRL's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import SCORE, Head
from jaxtune.models.placement import partition
from jaxtune.train.config import CheckpointConfig, DataConfig, EvaluationConfig, MeshConfig
from jaxtune.train.config.checks import require
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.packing.pairs import LABELS, PAIRS, PairDataset
from jaxtune.train.data.rendering.formats import PREFERENCE
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.preference import Pairs


def scores(model: Decoder, hidden: jax.Array, batch: Batch) -> jax.Array:
    """float32[rows, most pairs, 2]: documents' scores, chosen first, arbitrary without a pair. hidden: [rows, length,
    hidden size], after the final norm. batch: pairs as PackedPairs fills them; a document's score is at its last token.
    """
    rows, most = batch.extra[PAIRS].shape
    is_document = batch.segment_ids[..., None] == jnp.arange(1, 2 * most + 1, dtype=batch.segment_ids.dtype)
    last = jnp.where(is_document, jnp.arange(is_document.shape[1])[:, None], 0).max(1)
    ends = jnp.take_along_axis(hidden, last[..., None], axis=1)
    return model.logits(ends).reshape(rows, most, 2)


@dataclasses.dataclass(frozen=True)
class Reward(Pairs):
    """The Bradley-Terry model of preferences (arXiv 2203.02155, equation 1): -log sigmoid(chosen - rejected - margin),
    with a row's `margin` or 0 (arXiv 2307.09288, equation 2). Metrics are means over pairs; min_reward and max_reward
    are first taken over a micro-batch, and "margin" is the scores' difference.
    """

    center_rewards_coefficient: float | None = None
    """Factor of the squared sum of a pair's scores (arXiv 2312.09244, eq. 2), which keeps their mean near 0."""

    name: ClassVar[str] = "reward"  # by which objective.name selects it
    no_right_answer: ClassVar[str | None] = "a reward model writes no answers"
    head: ClassVar[Head] = SCORE  # the model must have a head that scores texts
    reads_pictures: ClassVar[bool] = False
    # the names of the sums of `loss` for metrics
    sums: ClassVar[tuple[str, ...]] = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")

    def prepare(
        self,
        rows: Any,
        tokenizer: Any,
        data: DataConfig,
        *,
        vocab_size: int,
        max_rows: int | None,
        pictures: PictureOptions | None = None,
    ) -> PairDataset:
        """As Pairs, with the column `margin`, without padding tokens at documents' ends, and without pairs that would
        be cut, as a cut text has no last token to score. A PairDataset is returned as it is.
        """
        data_set = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows, pictures=pictures)
        if isinstance(rows, PairDataset):
            return data_set
        # Pairs that are too long are left out, because a text that is cut has no last token to score.
        labels = margins(rows, data_set.documents, max_rows, data.columns)
        if labels is not None:
            data_set = dataclasses.replace(data_set, summary=data_set.summary.with_read("margin", "margin"))
        documents = without_padding(data_set.documents, getattr(tokenizer, "pad_token_id", None))
        return dataclasses.replace(data_set, documents=documents, labels=labels, drops_cut_pairs=True)

    def refuses(
        self, data: DataConfig, mesh: MeshConfig | None, evaluation: EvaluationConfig, checkpoint: CheckpointConfig
    ) -> None:
        super().refuses(data, mesh, evaluation, checkpoint)
        require(
            not evaluation.generate,
            "evaluation.generate",
            list(evaluation.generate),
            f"a reward model writes no answers (objective = {self.label}); leave it out",
        )

    def check(self, model: Decoder) -> None:
        """Raises ValueError without a head that scores."""
        if model.config.head != SCORE:
            raise ValueError(
                "objective = reward: this model has no head that scores texts: give it one (jaxtune.reward_model), and "
                "then an adapter"
            )

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        pair_scores, has_pair = scores(model, forward(model, batch), batch), batch.extra[PAIRS]
        with jax.named_scope("loss"):
            chosen, rejected = pair_scores[..., 0], pair_scores[..., 1]
            margin = batch.extra.get(LABELS, 0.0)
            losses = -jax.nn.log_sigmoid(chosen - rejected - margin)
            if self.center_rewards_coefficient is not None:
                losses += self.center_rewards_coefficient * (chosen + rejected) ** 2
            count, is_scored = has_pair.sum(), has_pair[..., None] > 0
            any_pair = partition.total(count) > 0
            lowest, highest = (
                partition.largest(jnp.where(is_scored, sign * pair_scores, -jnp.inf).max()) * sign
                for sign in (-1.0, 1.0)
            )
            values = {"mean_reward": pair_scores.mean(-1), "accuracy": chosen > rejected, "margin": chosen - rejected}
            sums = {name: jnp.where(has_pair > 0, value, 0.0).sum() for name, value in values.items()}
            # The extremes are those of a micro-batch; over several micro-batches they are averaged by pairs.
            sums |= {"min_reward": jnp.where(any_pair, lowest, 0.0) * count}
            sums |= {"max_reward": jnp.where(any_pair, highest, 0.0) * count}
            return jnp.where(has_pair > 0, losses, 0.0).sum(), count, jax.lax.stop_gradient(sums)


def without_padding(documents: Documents, pad_token_id: int | None) -> Documents:
    """Documents without their last tokens of this id, which may be EOS: ForSequenceClassification scores the token
    before these.
    """
    if pad_token_id is None or not len(documents.tokens):
        return documents
    lengths, trained = documents.lengths.copy(), documents.trained.copy()
    while True:
        last = np.maximum(documents.starts + lengths - 1, 0)
        is_padding = (lengths > 1) & (documents.tokens[last] == pad_token_id)
        if not is_padding.any():
            return dataclasses.replace(documents, lengths=lengths, trained=trained)
        lengths -= is_padding
        trained -= is_padding & (documents.mask[last] > 0)


def margins(
    rows: Any, documents: Documents, max_rows: int | None = None, columns: Mapping[str, str] | None = None
) -> np.ndarray | None:
    """float32[pairs]: the column `margin` of the pairs' rows, which are read again; None if no row has one. Raises
    ValueError for one that is not finite, or missing in some rows.

      rows, max_rows, columns: as when `documents` were made.
    """
    places = [documents.source(2 * pair) for pair in range(len(documents) // 2)]
    place_set = set(places)
    margin_of: dict[str, float] = {}
    for row in read_rows(open_sources(rows, columns=columns), PREFERENCE, max_rows):
        if row.place not in place_set or row.value is None or row.value.get("margin") is None:
            continue
        margin = row.value["margin"]
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
            raise ValueError(f"{row.place}: margin = {margin!r}: must be a finite number")
        margin_of[row.place] = float(margin)
    if not margin_of:
        return None
    if lacking := [place for place in places if place not in margin_of]:
        raise ValueError(f"{lacking[0]}: no margin, and {len(margin_of)} rows have one: give it to all, or to none")
    return np.asarray([margin_of[place] for place in places], np.float32)
