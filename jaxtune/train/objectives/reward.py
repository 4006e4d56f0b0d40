"""Training of reward models: models that give a text a score, trained so that the chosen answer of a pair scores higher
than the rejected one. `Reward` is the objective; `scores` computes the scores, and `margins` reads by how much they
should differ.

The score of a document is the head's output for its last token, as in Hugging Face's ForSequenceClassification. Options
and metrics have TRL's names."""

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
from jaxtune.train.config import DataConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.documents import Documents
from jaxtune.train.data.formats import PREFERENCE
from jaxtune.train.data.pairs import LABELS, PAIRS, PairDataset
from jaxtune.train.data.reading import open_sources, read_rows
from jaxtune.train.objectives.preference import Pairs
from jaxtune.train.program.loss import Forward


def scores(model: Decoder, hidden: jax.Array, batch: Batch) -> jax.Array:
    """The scores that a model gives the documents of a batch of pairs, each for the document's last token:
    float32[rows, most pairs of a row, 2], chosen answers at index 0. Entries without a pair have arbitrary values. Only
    `Reward.loss` calls it, in training and evaluation.

    Args:
      model: a model with a scoring head.
      hidden: [rows, length, hidden size], its hidden states for the batch after the final norm.
      batch: packed pairs.
    """
    rows, most = batch.extra[PAIRS].shape
    within = batch.segment_ids[..., None] == jnp.arange(1, 2 * most + 1, dtype=batch.segment_ids.dtype)
    last = jnp.where(within, jnp.arange(within.shape[1])[:, None], 0).max(1)
    ends = jnp.take_along_axis(hidden, last[..., None], axis=1)
    return model.logits(ends).reshape(rows, most, 2)


@dataclasses.dataclass(frozen=True)
class Reward(Pairs):
    """The objective of reward models, the Bradley-Terry model of preferences (arXiv 2203.02155, equation 1). The loss
    of a pair is -log sigmoid(score of chosen - score of rejected); for rows with a column `margin`, the margin is
    subtracted from the difference (arXiv 2307.09288, equation 2). Its metrics are means over pairs; those of the lowest
    and the highest score, min_reward and max_reward, are first taken over each micro-batch. The metric "margin" is the
    difference of the scores, and not the column."""

    center_rewards_coefficient: float | None = None
    """The factor of a further loss, the square of the sum of a pair's two scores (arXiv 2312.09244, eq. 2), which keeps
    the mean of scores near 0; None: there is no such loss."""

    name: ClassVar[str] = "reward"  # by which objective.name selects it
    head: ClassVar[Head] = SCORE  # the model must have a head that scores texts
    # the names of the sums of `loss` for metrics
    sums: ClassVar[tuple[str, ...]] = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        """Reads and tokenises rows into pairs of documents, with the numbers in the rows' column `margin`, if they have
        one. Pairs that would have to be cut to fit data.length are left out, because a text that is cut has no last
        token to score. Raises ValueError if the rows cannot be trained on, or a margin is no finite number or is
        missing in some rows only, and ConfigError for options of `data` that pairs cannot have (`Pairs.prepare`).

        Args:
          rows: a path, a data set's name or a list of dicts; a PairDataset is checked and returned as it is: no margins
            are read, and its own field `whole` says whether long pairs are left out.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the size of the model's vocabulary; token ids that are not below it are refused.
          max_rows: the most rows to read; None reads all.
        """
        made = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows)
        if isinstance(rows, PairDataset):
            return made
        # Pairs that are too long are left out (`whole`), because a text that is cut has no last token to score.
        return dataclasses.replace(made, labels=margins(rows, made.documents, max_rows, data.columns), whole=True)

    def check(self, model: Decoder) -> None:
        """Raises ValueError if the model has no head that scores texts. The Trainer calls it before anything is
        compiled."""
        if model.config.head != SCORE:
            raise ValueError(
                "objective = reward: this model has no head that scores texts: give it one (jaxtune.reward_model), and "
                "then an adapter"
            )

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The loss of `batch`, a micro-batch of pairs: (sum of the losses, number of pairs, {name: sum} for each name
        in `sums`), float32 scalars that are added up over micro-batches and devices. The train step differentiates it,
        and evaluation calls it too. forward: runs `model`, whose head gives the scores."""
        given, there = scores(model, forward(model, batch), batch), batch.extra[PAIRS]
        with jax.named_scope("loss"):
            chosen, rejected = given[..., 0], given[..., 1]
            margin = batch.extra.get(LABELS, 0.0)
            losses = -jax.nn.log_sigmoid(chosen - rejected - margin)
            if self.center_rewards_coefficient is not None:
                losses += self.center_rewards_coefficient * (chosen + rejected) ** 2
            count, whole = there.sum(), there[..., None] > 0
            any_pair = partition.total(count) > 0
            lowest, highest = (
                partition.largest(jnp.where(whole, sign * given, -jnp.inf).max()) * sign for sign in (-1.0, 1.0)
            )
            values = {"mean_reward": given.mean(-1), "accuracy": chosen > rejected, "margin": chosen - rejected}
            sums = {name: jnp.where(there > 0, value, 0.0).sum() for name, value in values.items()}
            # The extremes are those of a micro-batch; over several micro-batches they are averaged by pairs.
            sums |= {"min_reward": jnp.where(any_pair, lowest, 0.0) * count}
            sums |= {"max_reward": jnp.where(any_pair, highest, 0.0) * count}
            return jnp.where(there > 0, losses, 0.0).sum(), count, jax.lax.stop_gradient(sums)


def margins(
    rows: Any, documents: Documents, max_rows: int | None = None, columns: Mapping[str, str] | None = None
) -> np.ndarray | None:
    """Reads the column `margin` of the rows that the pairs were made of: float32[pairs], or None if no row has one.
    `Reward.prepare` calls it, and the loss asks for a score difference that is larger by the margin.

    Args:
      rows: the rows, in any form that `reading.open_sources` accepts; they are read again.
      documents: the two documents of each pair, with the files and lines by which their rows are found.
      max_rows: the most rows to read, the same number as when the documents were made; None reads all.
      columns: the config's data.columns, {name here: column's name in the rows}; None: columns have the names here.
    Raises:
      ValueError: a margin is not a finite number, or is missing in some rows only.
    """
    places = [documents.source(2 * pair) for pair in range(len(documents) // 2)]
    wanted = set(places)
    found: dict[str, float] = {}
    for row in read_rows(open_sources(rows, columns=columns), PREFERENCE, max_rows):
        if row.place not in wanted or row.value is None or row.value.get("margin") is None:
            continue
        margin = row.value["margin"]
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not np.isfinite(margin):
            raise ValueError(f"{row.place}: margin = {margin!r}: must be a finite number")
        found[row.place] = float(margin)
    if not found:
        return None
    if lacking := [place for place in places if place not in found]:
        raise ValueError(f"{lacking[0]}: no margin, and {len(found)} rows have one: give it to all, or to none")
    return np.asarray([found[place] for place in places], np.float32)
