"""Kahneman-Tversky optimisation: single answers, each of which is desirable or not.

An answer's log-ratio to the reference is compared to how far the model has moved away from the reference on answers
that do not belong to their prompts, an estimate of a KL divergence. As in TRL, such an answer is that of the row
before; it stands as the second document of a pair (data/pairs.py), whose first is the row's own.
"""

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
from jaxtune.train.data import Batch
from jaxtune.train.data.documents import Document, Documents
from jaxtune.train.data.formats import LABELLED
from jaxtune.train.data.pairs import LABELS, PAIRS, PairDataset
from jaxtune.train.objectives.preference import Referenced, answers
from jaxtune.train.program.loss import Forward

_SIDES = ("chosen", "rejected")  # TRL's names of desirable answers and others


@dataclasses.dataclass(frozen=True)
class KTO(Referenced):
    """KTO (arXiv 2402.01306, eq. 7 and 8), with TRL's estimate of the divergence: a micro-batch's mean, at least 0.

    Args:
      beta: how strongly the model is held to the reference.
      desirable_weight, undesirable_weight: of the losses of the two kinds of answers.
    """

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    name: ClassVar[str] = "kto"
    form: ClassVar[str] = LABELLED
    unit: ClassVar[str] = "examples"
    sums: ClassVar[tuple[str, ...]] = (
        "kl",
        "examples/chosen",
        *(f"{kind}/{side}" for kind in ("rewards", "logps") for side in _SIDES),
    )

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> PairDataset:
        given = isinstance(rows, PairDataset)
        made = super().prepare(rows, tokenizer, data, vocab_size=vocab_size, max_rows=max_rows)
        if given:
            return made
        documents, labels = with_strangers(made.documents)
        reference = made.reference  # of as many documents, and not known yet
        return dataclasses.replace(made, documents=documents, labels=labels, reference=reference)

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        ours = answers(model, forward(model, batch), batch, forward)
        ratios = self.compared(model, batch, forward, ours)
        there = batch.extra[PAIRS]
        with jax.named_scope("loss"):
            ratio, count = ratios[..., 0], there.sum()
            moved, examples = partition.total(((there * ratios[..., 1]).sum(), count))
            divergence = jax.lax.stop_gradient(jax.nn.relu(moved / jnp.maximum(examples, 1.0)))
            chosen = there * batch.extra[LABELS]
            rejected = there - chosen
            losses = self.desirable_weight * chosen * jax.nn.sigmoid(self.beta * (divergence - ratio))
            losses += self.undesirable_weight * rejected * jax.nn.sigmoid(self.beta * (ratio - divergence))
            sums = {"kl": divergence * count, "examples/chosen": chosen.sum()}
            for kind, values in (("rewards", self.beta * ratio), ("logps", ours.logps[..., 0])):
                sums |= {f"{kind}/{side}": (values * of).sum() for side, of in zip(_SIDES, (chosen, rejected))}
            return losses.sum(), count, jax.lax.stop_gradient(sums)

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over the answers of a kind, 0 where there is none."""
        chosen = sums["examples/chosen"]
        counts = {"chosen": chosen, "rejected": sums["count"] - chosen}

        def mean(name: str, count: Any) -> Any:
            return sums[name] / (count + (count == 0))

        found = {"kl": mean("kl", sums["count"])}
        found |= {
            f"{kind}/{side}": mean(f"{kind}/{side}", counts[side]) for kind in ("rewards", "logps") for side in _SIDES
        }
        both = (counts["chosen"] > 0) & (counts["rejected"] > 0)
        return found | {"rewards/margins": both * (found["rewards/chosen"] - found["rewards/rejected"])}


def with_strangers(documents: Documents) -> tuple[Documents, np.ndarray]:
    """(each row's document, then its prompt with the answer of the row before; float32[rows], 1 where desirable).

    documents: pairs of which one is empty: the second of a desirable answer, the first of another.
    """
    labels = np.asarray(documents.lengths[0::2] > 0)
    own = [documents[2 * row + int(not desirable)] for row, desirable in enumerate(labels)]
    return _paired(own, len(own), documents, np.arange(len(documents))), labels.astype(np.float32)


def in_groups(rows: PairDataset, size: int) -> PairDataset:
    """Rows of `with_strangers`, paired anew as TRL does: among `size` rows that follow each other the first gets the
    last one's answer. Rows whose answer lies beyond rows.length are left out before."""
    assert rows.labels is not None
    all_of_them = [rows.documents[2 * row] for row in range(len(rows.labels))]
    kept = np.asarray([document.mask[1 : rows.length].any() for document in all_of_them])
    places = np.repeat(2 * np.flatnonzero(kept), 2)
    documents = _paired([all_of_them[row] for row in np.flatnonzero(kept)], size, rows.documents, places)
    reference = None if rows.reference is None else np.full(len(documents), np.nan, np.float32)
    return dataclasses.replace(rows, documents=documents, labels=rows.labels[kept], reference=reference)


def _paired(own: list[Document], size: int, source: Documents, places: np.ndarray) -> Documents:
    """Each document, then its prompt with the answer of the one before it in its group of `size`. places: of the
    results, where in `source` they came from."""
    begins = [int(np.argmax(document.mask)) for document in own]
    made = []
    for row, document in enumerate(own):
        before = row - 1 if row % size else min(row + size, len(own)) - 1
        other, start = own[before], begins[before]
        tokens, mask = (
            np.concatenate([ours[: begins[row]], theirs[start:]])
            for ours, theirs in ((document.tokens, other.tokens), (document.mask, other.mask))
        )
        made += [document, Document(tokens, mask)]
    origins = None if source.origins is None else source.origins[places]
    return dataclasses.replace(Documents.gather(made), origins=origins, files=source.files)
