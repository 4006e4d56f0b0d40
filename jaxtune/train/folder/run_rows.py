"""The rows of a run as tokens: `run_rows` tokenises those that it trains on and those that it is evaluated on, by a
`Reader`, and `source_of` makes the source of its batches."""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
import os
from typing import Any

from jaxtune.models.config import DecoderConfig
from jaxtune.system import processes
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.feeds import FedBatches, PreparedSet, RowSet
from jaxtune.train.data.reading import open_sources
from jaxtune.train.data.steps import pack_steps
from jaxtune.train.data.streamed import StreamedRows
from jaxtune.train.folder.record import require_same_rows
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.objectives.own_samples import own_samples
from jaxtune.train.objectives.policy import GRPO
from jaxtune.train.objectives.prompts import sampled_answers
from jaxtune.train.optimizer.schedule import total_steps


def run_rows(
    reader: Reader, train_rows: object = None, eval_rows: object = None, apart: bool = False
) -> tuple[TokenDataset | BatchSource, TokenDataset | None]:
    """Tokenises the rows of a run as its objective reads them. On each host one process tokenises first, and the others
    read its cache. The Trainer calls it when it is made, and `jaxtune sensitivity` for the rows that it measures on. A
    collective call in a run of several processes. data.max_rows limits the rows to train on only.

    Args:
      reader: tokenises rows for the run.
      train_rows, eval_rows: a path, a data set's name, a list of dicts, or a prepared TokenDataset; train_rows may also
        be a BatchSource, which is returned as it is, or a list of (rows, weight) for a mixture. None: the rows that the
        config names.
      apart: what happens to the training rows that data.eval_rows takes out for evaluation, if there are other rows to
        evaluate on. False: they are trained on. True: they are left out of training all the same. A Trainer with
        trains=False passes True, so that one that evaluates a run's weights has the rows that the run trained on.
    Returns:
      (rows to train on, held-out rows or None). Rows to train on that are streamed, mixed or sampled are a BatchSource,
        which makes them during the run. If the objective learns from rewards and the config asks for answers in
        evaluations, the held-out rows are only answered and have no loss, and None is returned for them; without such
        answers held-out rows are an error for this objective.
    Raises:
      ValueError: the rows cannot be used; a document, cut to data.length tokens, has more tokens than the model has
        positions; processes see different rows; an option does not go with rows that are made during the run.
    """
    config, data = reader.config, reader.config.data
    wanted = data.train if train_rows is None else train_rows
    held_out = data.eval if eval_rows is None else eval_rows
    mixed, own = _weighted(wanted), isinstance(wanted, BatchSource)
    made_later = own or bool(mixed) or is_stream(wanted, data.streaming)
    if samples(reader.objective):
        if bool(mixed) or is_stream(wanted, data.streaming):
            raise ValueError(
                f"objective = {config.objective.name}: its prompts are one set of rows, read before the run"
            )
        wanted = wanted if own else reader.sampled(wanted)
        made_later = own = True
        if config.evaluation.asking and isinstance(reader.objective, GRPO):
            held_out = None  # its rows are answered, and have no loss
    what = "the rows to train on are streamed, mixed or made during the run"
    if made_later and data.eval_rows:
        raise ValueError(
            f"data.eval_rows = {data.eval_rows}: {what}, and none can be taken out of them; set data.eval, or give "
            "eval_rows"
        )
    if made_later and not own and data.packing == "step":
        raise ValueError(f"data.packing = 'step': {what}, and steps cannot be laid out before; set true or false")
    with processes.one_a_host():
        train: TokenDataset | BatchSource
        if isinstance(wanted, BatchSource):
            train = wanted
        elif made_later:
            mixed = mixed or [(wanted, 1.0)]
            sets = [reader.row_set(rows) for rows, _ in mixed]
            train = FedBatches(sets, [weight for _, weight in mixed], config.rows_per_step, config.seed)
        else:
            train = reader.tokenised(wanted, data.max_rows)
        held_out = None if held_out is None else reader.tokenised(held_out)
    require_same_rows({"data.train": train, "data.eval": held_out})
    if isinstance(train, BatchSource):
        return train, held_out
    if data.eval_rows and (held_out is None or apart):
        train, taken = train.split(data.eval_rows)
        return train, taken if held_out is None else held_out
    return train, held_out


@dataclasses.dataclass(frozen=True)
class Reader:
    """Tokenises a run's rows, which are given by a path, a hub name or as a data set: all of them before the run
    (`tokenised`), as prompts of sampled answers (`sampled`), or as a set from which batches draw (`row_set`). The
    Trainer and `jaxtune sensitivity` make one for `run_rows`, which calls the method that fits.

    Args:
      objective: says what is read from a row.
      tokenizer: the run's Hugging Face tokenizer.
      config: the run's.
      model: the config of the model that trains on the rows.
      ends: the token ids that end an answer, for an objective that samples answers.
    """

    objective: Objective
    tokenizer: Any
    config: TrainConfig
    model: DecoderConfig
    # Token ids that end an answer.
    ends: tuple[int, ...] = ()

    def tokenised(self, rows: object, max_rows: int | None = None) -> TokenDataset:
        """Tokenises `rows`, all of them or the first `max_rows`, as the objective reads them, and returns them as a
        data set, from which batches are made: for training rows that are read before the run, for held-out rows, and
        for the sets of a mixture (`row_set`).

        Raises:
          ValueError: a document, cut to data.length tokens, has more of them than the model was made for, or what
            `Objective.prepare` raises.
        """
        data, vocab_size = self.config.data, self.model.vocab_size
        prepared = self.objective.prepare(rows, self.tokenizer, data, vocab_size=vocab_size, max_rows=max_rows)
        longest = min(data.length, int(prepared.documents.lengths.max()))
        if longest > self.model.context_length:  # a longer row is fine: positions restart with each document
            raise ValueError(
                f"data.length = {data.length}: the longest document has {longest} tokens, and the model was made "
                f"for at most {self.model.context_length} positions: lower data.length, or give it more by "
                "model.rope_scaling='{rope_type: yarn, factor: F}' or model.max_position_embeddings=N"
            )
        return prepared

    def sampled(self, rows: object) -> BatchSource:
        """The source of the batches of a run that samples answers (GRPO, RLOO, on-policy distillation). It samples
        answers to the prompts of `rows` from the model during the run. `run_rows` calls it for the rows to train on,
        never for those of evaluations. Raises ValueError if the prompts, or for rewards the functions that the config
        names, cannot be used."""
        if isinstance(self.objective, Distill):
            positions = self.model.context_length
            return own_samples(self.objective, rows, self.tokenizer, self.config, self.ends, positions)
        assert isinstance(self.objective, GRPO)
        return sampled_answers(self.objective, rows, self.tokenizer, self.config, self.ends, self.model.context_length)

    def row_set(self, rows: object) -> RowSet:
        """`rows` as one of the sets from which a run's batches are drawn during the run. Of streamed rows a first
        window is tokenised here and the others in the background while the run trains; rows of a mixture that are not
        streamed are tokenised here, all at once. `run_rows` calls it for each set of a mixture, and for streamed rows.
        Raises ValueError if they cannot be read, or as `tokenised` does; later windows raise it during the run."""
        data, name = self.config.data, str(rows) if isinstance(rows, str | os.PathLike) else "rows"
        if not is_stream(rows, data.streaming):
            return PreparedSet(name, self.tokenised(rows, data.max_rows))
        # The run may use its tokenizer while a thread tokenises with this one, which starts no process for each window.
        alone = dataclasses.replace(self.config, data=dataclasses.replace(data, num_workers=data.num_workers or 1))
        own = dataclasses.replace(self, tokenizer=copy.deepcopy(self.tokenizer), config=alone)
        if isinstance(rows, InOrder):  # its shards are not read apart: a data set that shuffles itself mixes them
            return StreamedRows(name, open_sources(rows.rows), own.tokenised, data.buffer_size, "given")
        return StreamedRows(name, open_sources(rows, streaming=True), own.tokenised, data.buffer_size)


def samples(objective: Objective) -> bool:
    """Whether a run with this objective makes its rows during the run, by sampling answers from the model: True for
    GRPO, RLOO and on-policy distillation, False for objectives that train on given answers. `run_rows` decides by it
    how rows are read, and the Trainer whether to look for the tokens that end an answer."""
    return isinstance(objective, GRPO) or (isinstance(objective, Distill) and objective.on_policy > 0)


@dataclasses.dataclass(frozen=True)
class InOrder:
    """An IterableDataset of the library `datasets` that is trained on in its own order, as transformers does: neither
    its shards nor its rows are shuffled here."""

    rows: object


def is_stream(rows: object, streaming: bool = False) -> bool:
    """Whether `rows` are read during the run (True) or all before it (False). They are read during the run if
    `streaming` (data.streaming) is True, whatever the rows are, or if they are an IterableDataset of the library
    `datasets`."""
    if isinstance(rows, InOrder):
        return True
    return streaming or (hasattr(rows, "features") and hasattr(rows, "num_shards") and not hasattr(rows, "__len__"))


def _weighted(rows: object) -> list[tuple[object, float]]:
    """The (rows, weight) pairs of a mixture if `rows` is a list or tuple of such pairs only, else an empty list. Raises
    ValueError for a weight that is not a positive number."""
    if not isinstance(rows, list | tuple) or not rows:
        return []
    pairs = [part for part in rows if isinstance(part, list | tuple) and len(part) == 2]
    pairs = [(part, float(weight)) for part, weight in pairs if isinstance(weight, numbers.Real)]
    if len(pairs) < len(rows):
        return []
    for part, weight in pairs:
        if not 0 < weight < math.inf:
            name = part if isinstance(part, str | os.PathLike) else f"a {type(part).__name__}"
            raise ValueError(
                f"train_rows: the weight of {name} = {weight}: must be greater than 0; leave such rows out"
            )
    return pairs


def source_of(
    train: TokenDataset | BatchSource, held_out: TokenDataset | None, config: TrainConfig
) -> tuple[BatchSource, TokenDataset | None, int]:
    """Makes the source of a run's batches from the rows that run_rows returned, and counts the run's steps. The Trainer
    calls it.

    Args:
      train: the rows to train on, tokenised; a source is taken as it is.
      held_out: the rows of evaluations, or None.
      config: the run's.
    Returns:
      (the source of the batches; the held-out rows, which with data.packing=step are laid out as the steps' rows are;
        the number of steps of the run).
    Raises:
      ValueError: the rows cannot be packed, or epochs are set for a source that does not know their number of steps.
    """
    source = train if isinstance(train, BatchSource) else train.batches(config.rows_per_step, seed=config.seed)
    steps = total_steps(config, source.steps_per_epoch)
    if isinstance(train, TokenDataset) and train.packing == "step":
        return *pack_steps(train, held_out, config, steps), steps
    return source, held_out, steps


def most_documents(batches: BatchSource, held_out: TokenDataset | None) -> int | None:
    """The largest number of documents in any row that is computed; None if the source of the batches knows no limit.
    The programs of steps and evaluations are made with it (setup.step_programs), because cuDNN's attention needs a
    limit. With config.deterministic they get None in its place, because cuDNN's sums are in no fixed order. batches: of
    the steps. held_out: the rows of evaluations, or None."""
    if batches.max_documents is None:
        return None
    return max(batches.max_documents, 0 if held_out is None else held_out.rows.max_documents)
