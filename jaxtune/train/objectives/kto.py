"""Kahneman-Tversky optimisation (KTO): single answers, each desirable or undesirable.

A row is a pair of documents: its own answer, and in the room that is left a mismatched one, that of the nearest row
before with another prompt. The mismatched ones estimate the KL divergence from the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.train.config import DataConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.packing.pairs import LABELS, PAIRS, PairDataset
from jaxtune.train.data.rendering.formats import LABELLED
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.preference import Referenced, sum_log_probs

_SIDES = ("chosen", "rejected")  # TRL's names of desirable and undesirable answers in metrics


@dataclasses.dataclass(frozen=True)
class KTO(Referenced):
    """The objective of KTO (arXiv 2402.01306, equations 7 and 8), with TRL's estimate of the divergence.

    With r = log p(answer) - log p_ref(answer), and kl the mean r of a micro-batch's mismatched answers on all devices,
    at least 0, without gradient: the loss is desirable_weight sigmoid(beta (kl - r)) or undesirable_weight sigmoid(beta
    (r - kl)). Metrics' rewards are beta r. A larger beta stays closer to the reference.
    """

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """"apo_zero_unpaired" (2408.06266) takes 0 for kl, and needs no mismatched answers."""

    name: ClassVar[str] = "kto"  # by which objective.name selects it
    row_format: ClassVar[str | None] = LABELLED  # data rows have one answer and a label
    no_right_answer: ClassVar[str | None] = None
    unit: ClassVar[str] = "examples"  # what the count of `loss` counts: labelled answers
    # the names of the sums of `loss` for metrics
    sums: ClassVar[tuple[str, ...]] = (
        "kl",
        "examples/chosen",
        *(f"{kind}/{side}" for kind in ("rewards", "logps") for side in _SIDES),
    )

    @property
    def by_micro_batch(self) -> bool:
        return self.loss_type == "kto"  # its mismatched answers estimate the divergence

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
        """As Pairs, of labelled rows, with mismatched answers; a PairDataset has them already. Labels are 1 for
        desirable answers, else 0.
        """
        was_prepared = isinstance(rows, PairDataset)
        data_set = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows, pictures=pictures)
        if was_prepared:
            return data_set
        documents, labels = with_mismatched_answers(data_set.documents, self.loss_type == "kto")
        reference = data_set.reference  # NaN, for as many documents as before
        return dataclasses.replace(
            data_set, documents=documents, labels=labels, reference=reference, second_yields=True
        )

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Counts answers without mismatched ones; "kl" is the divergence times that count."""
        answers = sum_log_probs(model, forward(model, batch), batch, forward)
        ratios = self.unscaled_rewards(model, batch, forward, answers)
        has_pair = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            ratio, count = ratios[..., 0], has_pair.sum()
            strange = _mismatched_there(batch)
            moved = jnp.where(strange, ratios[..., 1], 0.0)  # without a mismatched answer its reference may be NaN
            moved, examples = partition.total((moved.sum(), strange.sum(dtype=jnp.float32)))
            divergence = jax.lax.stop_gradient(jax.nn.relu(moved / jnp.maximum(examples, 1.0)))
            chosen = has_pair * batch.extra[LABELS]
            rejected = has_pair - chosen
            losses = self.desirable_weight * chosen * jax.nn.sigmoid(self.beta * (divergence - ratio))
            losses += self.undesirable_weight * rejected * jax.nn.sigmoid(self.beta * (ratio - divergence))
            sums = {"kl": divergence * count, "examples/chosen": chosen.sum()}
            for kind, values in (("rewards", self.beta * ratio), ("logps", answers.logps[..., 0])):
                sums |= {
                    f"{kind}/{side}": (values * is_side).sum() for side, is_side in zip(_SIDES, (chosen, rejected))
                }
            return losses.sum(), count, jax.lax.stop_gradient(sums)

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over desirable ("chosen") and undesirable ("rejected") answers, 0 without any; "rewards/margins", 0 if
        either is missing; "kl".
        """
        chosen = sums["examples/chosen"]
        counts = {"chosen": chosen, "rejected": sums["count"] - chosen}

        def mean(name: str, count: Any) -> Any:
            return sums[name] / (count + (count == 0))

        means = {"kl": mean("kl", sums["count"])}
        means |= {
            f"{kind}/{side}": mean(f"{kind}/{side}", counts[side]) for kind in ("rewards", "logps") for side in _SIDES
        }
        has_both = (counts["chosen"] > 0) & (counts["rejected"] > 0)
        return means | {"rewards/margins": has_both * (means["rewards/chosen"] - means["rewards/rejected"])}


def _mismatched_there(batch: Batch) -> jax.Array:
    """bool[rows, most pairs]: whether a pair has a mismatched answer."""
    seconds = 2 * jnp.arange(1, batch.extra[PAIRS].shape[1] + 1, dtype=batch.segment_ids.dtype)
    return ((batch.segment_ids[..., None] == seconds) & (batch.weights > 0)[..., None]).any(1)


def with_mismatched_answers(documents: Documents, mismatched: bool = True) -> tuple[Documents, np.ndarray]:
    """KTO's pairs of documents, and float32[rows] labels (1: desirable): each row's own document, then its prompt with
    the answer of the nearest row before, cyclically, with another prompt (with one prompt only: the row before). An
    answer begins with the first trained token; pictures are those of its tokens.

      documents: two a row, the second (desirable) or first (undesirable) empty.
      mismatched: False: the second document of each pair is empty.
    """
    labels = np.asarray(documents.lengths[0::2] > 0)
    indices = 2 * np.arange(len(labels)) + ~labels
    if not mismatched:
        lengths = documents.lengths[indices].tolist()
        own = [[[(index, 0, length)], [(index, 0, 0)]] for index, length in zip(indices.tolist(), lengths, strict=True)]
        return documents.joined([piece for pair in own for piece in pair]), labels.astype(np.float32)
    begins = _begins(documents, indices)
    prompts = [documents.key(index, begin) for index, begin in zip(indices.tolist(), begins, strict=True)]
    return _mismatched(documents, indices, begins, _nearest_of_others(prompts)), labels.astype(np.float32)


def _nearest_of_others(prompts: list[bytes]) -> list[int]:
    """For each prompt the nearest one before it, cyclically, that differs; else the one before."""
    nearest = [(row - 1) % len(prompts) for row in range(len(prompts))]
    if len(set(prompts)) == 1:
        return nearest
    for row in (
        *range(len(prompts)),
        *range(len(prompts)),
    ):  # the first round of the first rows begins with the last ones
        if prompts[nearest[row]] == prompts[row]:
            nearest[row] = nearest[(row - 1) % len(prompts)]
    return nearest


def mismatched_in_groups(rows: PairDataset, size: int) -> PairDataset:
    """A new data set with mismatched answers chosen as in TRL: within `size` consecutive rows, that of the row before,
    of the first row the last one's, whatever the prompts.

    Rows that lose their answer when cut to `rows.length` are left out before. Reference log-probabilities become NaN.
    """
    assert rows.labels is not None
    documents = rows.documents
    has_answer = np.asarray([documents[2 * row].mask[1 : rows.length].any() for row in range(len(rows.labels))])
    indices = 2 * np.flatnonzero(has_answer)
    before = [row - 1 if row % size else min(row + size, len(indices)) - 1 for row in range(len(indices))]
    documents = _mismatched(documents, indices, _begins(documents, indices), before)
    reference = None if rows.reference is None else np.full(len(documents), np.nan, np.float32)
    return dataclasses.replace(rows, documents=documents, labels=rows.labels[has_answer], reference=reference)


def _begins(documents: Documents, indices: np.ndarray) -> list[int]:
    return [int(np.argmax(documents[index].mask)) for index in indices.tolist()]


def _mismatched(documents: Documents, indices: np.ndarray, begins: list[int], answer_rows: list[int]) -> Documents:
    """The documents at `indices`, each with the answer of row answer_rows[row]."""
    lengths = documents.lengths[indices].tolist()
    answers = [(index, begin, length - begin) for index, begin, length in zip(indices.tolist(), begins, lengths)]
    pieces: list[list[tuple[int, int, int]]] = []
    for row, (index, begin, count) in enumerate(answers):
        pieces += [[(index, 0, begin + count)], [(index, 0, begin), answers[answer_rows[row]]]]
    return documents.joined(pieces)
