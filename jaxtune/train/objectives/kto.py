"""Kahneman-Tversky optimisation (KTO): training on single answers, each of which is desirable or undesirable. `KTO` is
the objective; `with_mismatched_answers` and `mismatched_in_groups` make the pairs of answers that it needs.

The log-ratio of an answer's probability to the reference's is compared with an estimate of the KL divergence between
model and reference. The estimate is the mean log-ratio of mismatched answers, answers that do not belong to their
prompts: a row's is that of the nearest row before with another prompt. A row is stored as a pair of documents
(data/pairs.py): its own answer, then its mismatched answer, which only has the room that its own one leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.train.config import DataConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.documents import Document, Documents
from jaxtune.train.data.formats import LABELLED
from jaxtune.train.data.pairs import LABELS, PAIRS, PairDataset
from jaxtune.train.objectives.preference import Referenced, sum_log_probs
from jaxtune.train.program.loss import Forward

_SIDES = ("chosen", "rejected")  # TRL's names of desirable and undesirable answers in metrics


@dataclasses.dataclass(frozen=True)
class KTO(Referenced):
    """The objective of Kahneman-Tversky optimisation (arXiv 2402.01306, equations 7 and 8): rows have a single answer,
    which is labelled as desirable or undesirable. The loss moves the answer's log-ratio, log p(answer) - log
    p_ref(answer) under a reference model, above or below the KL divergence between model and reference. The divergence
    kl is estimated as in TRL: the mean log-ratio of a micro-batch's mismatched answers (each the answer of another row,
    after this row's prompt) on all devices, at least 0, without gradient. The reference is the model with its adapter
    off (`Referenced`). The loss of a desirable answer is desirable_weight
    sigmoid(beta (kl - log-ratio)), that of an undesirable one undesirable_weight sigmoid(beta (log-ratio - kl)); its
    reward, in metrics, is beta times its log-ratio. beta: the larger it is, the less the model moves away from the
    reference."""

    desirable_weight: float = 1.0
    """The factor of the losses of desirable answers."""
    undesirable_weight: float = 1.0
    """The factor of the losses of undesirable answers."""

    name: ClassVar[str] = "kto"  # by which objective.name selects it
    row_format: ClassVar[str] = LABELLED  # data rows have one answer and a label
    unit: ClassVar[str] = "examples"  # what the count of `loss` counts: labelled answers
    # the names of the sums of `loss` for metrics
    sums: ClassVar[tuple[str, ...]] = (
        "kl",
        "examples/chosen",
        *(f"{kind}/{side}" for kind in ("rewards", "logps") for side in _SIDES),
    )

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        """Reads and tokenises labelled rows into pairs of documents: each row's prompt with its own answer, and the
        same prompt with the answer of the nearest row before with another prompt, which is mismatched.
        The labels are 1 for desirable answers, 0 for others. With precompute_ref_log_probs the data set has an array
        for the reference's log-probabilities, NaN until the Trainer fills it. A run calls it for its training rows and
        its held-out rows. Raises ValueError if the rows cannot be trained on, and ConfigError for options of `data`
        that pairs cannot have (`Pairs.prepare`).

        Args:
          rows: a path, a data set's name or a list of dicts; a PairDataset, which has mismatched answers already, is
            checked and returned.
          tokenizer: a fast Hugging Face tokenizer.
          data: the options of reading, templates and packing.
          vocab_size: the size of the model's vocabulary; token ids that are not below it are refused.
          max_rows: the most rows to read; None reads all.
        """
        given = isinstance(rows, PairDataset)
        made = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows)
        if given:
            return made
        documents, labels = with_mismatched_answers(made.documents)
        reference = made.reference  # NaN, for as many documents as before
        return dataclasses.replace(made, documents=documents, labels=labels, reference=reference, second_yields=True)

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """KTO's loss of `batch`, a micro-batch of pairs (an answer and a mismatched one): (sum of the losses, number of
        answers without the mismatched ones, {name: sum} for each name in `sums`), float32 scalars that are added up
        over micro-batches and devices. The sum "kl" is the estimated divergence times that number of answers. forward:
        runs `model` and its reference, and computes log-probabilities. Train steps and evaluations trace it."""
        answers = sum_log_probs(model, forward(model, batch), batch, forward)
        ratios = self.unscaled_rewards(model, batch, forward, answers)
        there = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            ratio, count = ratios[..., 0], there.sum()
            strange = _mismatched_there(batch)
            moved = jnp.where(strange, ratios[..., 1], 0.0)  # without a mismatched answer its reference may be NaN
            moved, examples = partition.total((moved.sum(), strange.sum(dtype=jnp.float32)))
            divergence = jax.lax.stop_gradient(jax.nn.relu(moved / jnp.maximum(examples, 1.0)))
            chosen = there * batch.extra[LABELS]
            rejected = there - chosen
            losses = self.desirable_weight * chosen * jax.nn.sigmoid(self.beta * (divergence - ratio))
            losses += self.undesirable_weight * rejected * jax.nn.sigmoid(self.beta * (ratio - divergence))
            sums = {"kl": divergence * count, "examples/chosen": chosen.sum()}
            for kind, values in (("rewards", self.beta * ratio), ("logps", answers.logps[..., 0])):
                sums |= {f"{kind}/{side}": (values * of).sum() for side, of in zip(_SIDES, (chosen, rejected))}
            return losses.sum(), count, jax.lax.stop_gradient(sums)

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """{name: number}: "rewards/..." and "logps/...", the means of rewards and log-probabilities over desirable
        ("chosen") and undesirable ("rejected") answers, 0 for a kind of which there is none; "rewards/margins", the
        difference of the two mean rewards, 0 if a kind is missing; and "kl", the estimated divergence; they are for the
        log of steps and evaluations. sums: the totals of what `loss` returns, by name, with "loss" and "count"."""
        chosen = sums["examples/chosen"]
        counts = {"chosen": chosen, "rejected": sums["count"] - chosen}

        def mean(name: str, count: Any) -> Any:
            """The sum of the metric `name` divided by `count`, the number of answers that it was summed over; 0 if
            there are none."""
            return sums[name] / (count + (count == 0))

        found = {"kl": mean("kl", sums["count"])}
        found |= {
            f"{kind}/{side}": mean(f"{kind}/{side}", counts[side]) for kind in ("rewards", "logps") for side in _SIDES
        }
        both = (counts["chosen"] > 0) & (counts["rejected"] > 0)
        return found | {"rewards/margins": both * (found["rewards/chosen"] - found["rewards/rejected"])}


def _mismatched_there(batch: Batch) -> jax.Array:
    """bool[rows, most pairs]: whether a pair has a mismatched answer, of which rows without room have none."""
    seconds = 2 * jnp.arange(1, batch.extra[PAIRS].shape[1] + 1, dtype=batch.segment_ids.dtype)
    return ((batch.segment_ids[..., None] == seconds) & (batch.weights > 0)[..., None]).any(1)


def with_mismatched_answers(documents: Documents) -> tuple[Documents, np.ndarray]:
    """Makes the pairs of KTO for `KTO.prepare`: adds to the document of each labelled row, in place of its empty one,
    its prompt with the answer of the nearest row before that has another prompt; rows before the first are the last
    ones. If all prompts are one, it is the row before. An answer begins with the first trained token of its document;
    what comes before is the prompt.

    Args:
      documents: two documents for each row, of which one is empty: the second if the answer is desirable, the first if
        it is undesirable.
    Returns:
      (two documents for each row: first its own, whether desirable or not, then the mismatched one; float32[rows]
        labels, 1 where the answer is desirable).
    """
    labels = np.asarray(documents.lengths[0::2] > 0)
    own = [documents[2 * row + int(not desirable)] for row, desirable in enumerate(labels)]
    before = _nearest_of_other_prompts(own)
    return _mismatched(own, before, documents, np.arange(len(documents))), labels.astype(np.float32)


def _nearest_of_other_prompts(own: list[Document]) -> list[int]:
    """For each document the index of the nearest one before it, cyclically, with another prompt; without one, of the
    one before it."""
    prompts = [document.tokens[: int(np.argmax(document.mask))].tobytes() for document in own]
    nearest = [(row - 1) % len(own) for row in range(len(own))]
    if len(set(prompts)) == 1:
        return nearest
    for row in (*range(len(own)), *range(len(own))):  # the first round of the first rows begins with the last ones
        if prompts[nearest[row]] == prompts[row]:
            nearest[row] = nearest[(row - 1) % len(own)]
    return nearest


def mismatched_in_groups(rows: PairDataset, size: int) -> PairDataset:
    """Chooses the mismatched answers of rows anew, as TRL does: among the rows of one batch, whatever their prompts.

    Rows are taken in groups of `size` consecutive rows. A row gets the answer of the row before it in its group, and
    the first row of a group that of the last one; the last group may be smaller. Rows of which truncation to
    `rows.length` tokens leaves no token of the answer are left out first. The result is a new data set. If `rows` has
    an array of the reference's log-probabilities, that of the result is all NaN, to be computed for the new pairs; else
    it is None too.

    Args:
      rows: a data set that KTO.prepare made.
      size: the number of rows in a group.
    """
    assert rows.labels is not None
    own = [rows.documents[2 * row] for row in range(len(rows.labels))]
    kept = np.asarray([document.mask[1 : rows.length].any() for document in own])
    places = np.repeat(2 * np.flatnonzero(kept), 2)
    chosen = [own[row] for row in np.flatnonzero(kept)]
    before = [row - 1 if row % size else min(row + size, len(chosen)) - 1 for row in range(len(chosen))]
    documents = _mismatched(chosen, before, rows.documents, places)
    reference = None if rows.reference is None else np.full(len(documents), np.nan, np.float32)
    return dataclasses.replace(rows, documents=documents, labels=rows.labels[kept], reference=reference)


def _mismatched(own: list[Document], others: list[int], source: Documents, places: np.ndarray) -> Documents:
    """Makes the pairs by which KTO estimates the KL divergence: for each document of `own` that document, and its
    prompt with the answer of another one. An answer begins with a document's first trained token.

    Args:
      own: n documents, each a prompt and its answer.
      others: for each of `own` the index of the document whose answer is its mismatched one.
      source: the set that the documents `own` come from.
      places: int[2 n], for each document of the result the index in `source` of the one whose file and line it gets.
    Returns:
      2 n documents: each of `own`, followed by its prompt with the other answer. Each token keeps its entry of the mask
        that says what is trained on.
    """
    begins = [int(np.argmax(document.mask)) for document in own]
    made = []
    for row, document in enumerate(own):
        other, start = own[others[row]], begins[others[row]]
        tokens, mask = (
            np.concatenate([prompt[: begins[row]], answer[start:]])
            for prompt, answer in ((document.tokens, other.tokens), (document.mask, other.mask))
        )
        made += [document, Document(tokens, mask)]
    origins = None if source.origins is None else source.origins[places]
    return dataclasses.replace(Documents.gather(made), origins=origins, files=source.files)
