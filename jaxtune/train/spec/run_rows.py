"""The rows of a run as tokens, and the source of its batches."""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
import os
from collections.abc import Sequence
from typing import Any

from jaxtune.models.config import DecoderConfig
from jaxtune.system import processes, timing
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rows.feeds import FedBatches, PreparedSet, RowSet
from jaxtune.train.data.rows.reading import open_sources
from jaxtune.train.data.rows.streamed import InOrder, StreamedRows, is_stream
from jaxtune.train.folder.record import require_same_rows
from jaxtune.train.objectives.objective import Objective, require_known_rows
from jaxtune.train.sampled.prompts import AnswerSteps, UserFunctions
from jaxtune.train.sampled.sources import sampled_source


def run_rows(
    reader: Reader, train_rows: object = None, eval_rows: object = None, apart: bool = False
) -> tuple[TokenDataset | BatchSource, TokenDataset | None]:
    """(rows to train on, held-out rows or None), tokenised; a BatchSource if they are streamed, mixed or sampled. On
    each host one process tokenises first. Collective.

      train_rows, eval_rows: a path, data set's name, list of dicts or TokenDataset; None: the config's. train_rows may
      be a BatchSource or a list of (rows, weight). data.max_rows limits them alone.
      apart: rows of data.eval_rows stay out of training even if others are evaluated on.

    Held-out rows of an objective of rewards are answered only: None. ValueError for unusable rows, a document longer
    than the model's positions, different rows in processes, or options that do not go with rows made during the run.
    """
    config, data = reader.config, reader.config.data
    train_source = data.train if train_rows is None else train_rows
    held_out = data.eval if eval_rows is None else eval_rows
    mixed, is_source = _weighted(train_source), isinstance(train_source, BatchSource)
    made_later = is_source or bool(mixed) or is_stream(train_source, data.streaming)
    if reader.objective.samples:
        if bool(mixed) or is_stream(train_source, data.streaming):
            raise ValueError(
                f"objective = {reader.objective.label}: its prompts are one set of rows, read before the run"
            )
        train_source = train_source if is_source else reader.sampled(train_source)
        made_later = is_source = True
        if config.evaluation.asking and not reader.objective.has_row_loss:
            held_out = None  # its rows are answered, and have no loss
    if made_later and (column := reader.objective.needs_rows_before) is not None:
        require_known_rows(column)
    reason = "the rows to train on are streamed, mixed or made during the run"
    if made_later and data.eval_rows:
        raise ValueError(
            f"data.eval_rows = {data.eval_rows}: {reason}, and none can be taken out of them; set data.eval, or give "
            "eval_rows"
        )
    if made_later and not is_source and config.unit.counts_examples:
        raise ValueError(f"data.packing = 'step': {reason}, and steps cannot be laid out before; set true or false")
    with timing.phase("rows"), processes.one_a_host():
        train: TokenDataset | BatchSource
        if isinstance(train_source, BatchSource):
            train = train_source
        elif made_later:
            mixed = mixed or [(train_source, 1.0)]
            sets = [reader.row_set(rows, config.seed + (number << 48)) for number, (rows, _) in enumerate(mixed)]
            train = FedBatches(sets, [weight for _, weight in mixed], config.rows_per_step, config.seed)
        else:
            train = reader.tokenised(train_source, data.max_rows)
        held_out = None if held_out is None else reader.tokenised(held_out)
    require_same_rows({"data.train": train, "data.eval": held_out})
    if isinstance(train, BatchSource):
        return train, held_out
    if data.eval_rows and (held_out is None or apart):
        train, split_rows = train.split(data.eval_rows)
        return train, split_rows if held_out is None else held_out
    return train, held_out


@dataclasses.dataclass(frozen=True)
class Reader:
    """Tokenises a run's rows: before the run, as prompts of sampled answers, or as a set from which batches draw."""

    objective: Objective
    tokenizer: Any
    config: TrainConfig
    model: DecoderConfig
    # Token ids that end an answer.
    ends: tuple[int, ...] = ()
    # How pictures are read; None refuses them.
    pictures: PictureOptions | None = None

    def tokenised(self, rows: object, max_rows: int | None = None) -> TokenDataset:
        """All or the first `max_rows` rows as a data set. ValueError if a document is longer than the model's
        positions, or from Objective.prepare.
        """
        data, vocab_size = self.config.data, self.model.vocab_size
        options = {} if self.pictures is None else {"pictures": self.pictures}
        prepared = self.objective.prepare(
            rows, self.tokenizer, data, vocab_size=vocab_size, max_rows=max_rows, **options
        )
        longest = min(data.length, int(prepared.documents.lengths.max()))
        if longest > self.model.context_length:  # a longer row is fine: positions restart with each document
            raise ValueError(
                f"data.length = {data.length}: the longest document has {longest} tokens, and the model was made "
                f"for at most {self.model.context_length} positions: lower data.length, or give it more by "
                "model.rope_scaling='{rope_type: yarn, factor: F}' or model.max_position_embeddings=N"
            )
        return prepared

    def sampled(self, rows: object) -> BatchSource:
        """A source that samples answers to prompts from the model during the run. ValueError if prompts or reward
        functions cannot be used.
        """
        config, positions = self.config, self.model.context_length
        steps = AnswerSteps(config.data, config.rows_per_step, config.micro_batches, config.mesh, config.seed)
        functions = UserFunctions.named(config.objective)
        return sampled_source(
            self.objective, rows, self.tokenizer, steps, self.ends, positions, functions, self.pictures
        )

    def row_set(self, rows: object, seed: int) -> RowSet:
        """A set from which batches are drawn during the run, in an order by `seed`. Of streamed rows a first window is
        tokenised here, later ones in the background, which may then raise ValueError.
        """
        data, name = self.config.data, str(rows) if isinstance(rows, str | os.PathLike) else "rows"
        if not is_stream(rows, data.streaming):
            return PreparedSet(name, self.tokenised(rows, data.max_rows), seed)
        # The run may use its tokenizer while a thread tokenises with this one, which starts no process for each window.
        alone = dataclasses.replace(self.config, data=dataclasses.replace(data, num_workers=data.num_workers or 1))
        reader = dataclasses.replace(self, tokenizer=copy.deepcopy(self.tokenizer), config=alone)
        if isinstance(rows, InOrder):  # its shards are not read apart: a data set that shuffles itself mixes them
            return StreamedRows(name, open_sources(rows.rows), reader.tokenised, data.buffer_size, "given", seed)
        return StreamedRows(name, open_sources(rows, streaming=True), reader.tokenised, data.buffer_size, seed=seed)


def _weighted(rows: object) -> list[tuple[object, float]]:
    """(rows, weight) pairs of a mixture; [] if it is none. ValueError for a weight that is not positive."""
    if not isinstance(rows, list | tuple) or not rows:
        return []
    pairs = [source for source in rows if isinstance(source, list | tuple) and len(source) == 2]
    pairs = [(source, float(weight)) for source, weight in pairs if isinstance(weight, numbers.Real)]
    if len(pairs) < len(rows):
        return []
    for source, weight in pairs:
        if not 0 < weight < math.inf:
            name = source if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
            raise ValueError(
                f"train_rows: the weight of {name} = {weight}: must be greater than 0; leave such rows out"
            )
    return pairs


def alike(held_out: Sequence[TokenDataset]) -> list[TokenDataset]:
    """The sets with as much room for documents and patches in a row as any needs, so that one program evaluates all."""
    if len(held_out) < 2:
        return list(held_out)
    most = max(data.rows.max_documents for data in held_out)
    patches = max(data.rows.patches for data in held_out)
    return [data.with_max_documents(most).with_patches(patches) for data in held_out]


def most_documents(batches: BatchSource, held_out: TokenDataset | None) -> int | None:
    """The most documents in any row, which cuDNN's attention needs; None: unknown."""
    if batches.max_documents is None:
        return None
    return max(batches.max_documents, 0 if held_out is None else held_out.rows.max_documents)


def most_pictures(batches: BatchSource, held_out: TokenDataset | None) -> int | None:
    """The most pictures in any row, which a tower's attention needs; None: unknown."""
    if batches.max_pictures is None:
        return None
    return max(batches.max_pictures, 0 if held_out is None else held_out.rows.max_pictures)
