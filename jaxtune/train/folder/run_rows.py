"""The rows of a run as tokens: those it trains on and those it is evaluated on."""

from __future__ import annotations

from typing import Any

from jaxtune.models.config import DecoderConfig
from jaxtune.system import processes
from jaxtune.train.config import DataConfig
from jaxtune.train.data import Batches, TokenDataset
from jaxtune.train.folder.record import require_same_rows
from jaxtune.train.objectives.objective import Objective


def prepared_rows(
    objective: Objective,
    tokenizer: Any,
    data: DataConfig,
    model: DecoderConfig,
    train_rows: Any,
    eval_rows: Any,
    apart: bool = False,
) -> tuple[TokenDataset, TokenDataset | None]:
    """(rows to train on, held-out rows or None), tokenised as the objective reads them. On each host one process
    tokenises first, and the others read its cache.

    Args:
      objective: the run's.
      tokenizer: the model's.
      data: the config's section.
      model: the model's config.
      train_rows, eval_rows: as for Trainer; None: the rows that `data` names.
      apart: rows that data.eval_rows takes from the training rows stay apart even if other rows are held out, as in the
        run whose weights are evaluated.
    Raises:
      ValueError: a document has more tokens than the model has positions; processes that see different rows.
    """

    def load(rows, max_rows):
        """The tokenised rows, with their lengths checked."""
        prepared = objective.prepare(rows, tokenizer, data, vocab_size=model.vocab_size, max_rows=max_rows)
        longest = min(data.length, int(prepared.documents.lengths.max()))
        if longest > model.context_length:  # a longer row is fine: positions restart with each document
            raise ValueError(
                f"data.length = {data.length}: the longest document has {longest} tokens, and the model was made "
                f"for at most {model.context_length} positions; lower data.length"
            )
        return prepared

    held_out = data.eval if eval_rows is None else eval_rows
    with processes.one_a_host():
        train = load(data.train if train_rows is None else train_rows, data.max_rows)
        held_out = None if held_out is None else load(held_out, None)
    require_same_rows({"data.train": train, "data.eval": held_out})
    if data.eval_rows and (held_out is None or apart):
        train, taken = train.split(data.eval_rows)
        return train, taken if held_out is None else held_out
    return train, held_out


def most_documents(batches: Batches, held_out: TokenDataset | None) -> int:
    """The largest number of documents in a row of the steps or of the evaluation."""
    return max(batches.max_documents, 0 if held_out is None else held_out.rows.max_documents)
