"""The methods `evaluate` and `predict` of transformers' Trainer, in the class `Evaluations`, from which SFTTrainer
inherits, and what predict returns (`PredictionOutput`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxtune.compat.callbacks import Events
from jaxtune.compat.measures import ComputeMetrics, EvalPrediction, Preprocess, measured, predicted
from jaxtune.compat.model import CompatModel
from jaxtune.compat.reports import Reports
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.trainer import Trainer


class PredictionOutput(NamedTuple):
    """What predict() returns, as in transformers: the first two fields are those of EvalPrediction, which says what a
    row is."""

    predictions: object  # float32[rows, length, vocab] logits, or the joined results of preprocess_logits_for_metrics
    # int32[rows, length]: the row's token where it is trained on, -100 elsewhere; the logits at position t predict the
    # label at position t + 1
    label_ids: np.ndarray
    metrics: dict[str, float]  # such as {"test_loss": 1.2}


class Evaluations(Reports):
    """The methods of a trainer that compute numbers of the current model on rows that it does not train on: `evaluate`
    and `predict`. SFTTrainer inherits from it, and sets the attributes below. Subclasses that sample answers for
    rewards (GRPOTrainer, RLOOTrainer) raise ValueError in both, because sampled answers have no held-out loss; their
    runs evaluate rewards instead."""

    model: CompatModel  # the script's
    tokenizer: object  # of transformers
    # the script's function from an EvalPrediction to {name: number}, for each evaluation; None: there is none
    compute_metrics: ComputeMetrics | None
    # the script's function from (logits, labels) of one row to what compute_metrics gets of it; None: the logits
    preprocess_logits_for_metrics: Preprocess | None
    _rows: dict[str, Any]  # the script's rows under "train" and "eval", before they are tokenised
    _format: str  # the name of their format, such as "messages"
    _formatting: Callable[..., object] | None  # the script's formatting_func
    _prepared: Trainer  # a jaxtune Trainer with the tokenised rows of the script, made at the first use
    # Methods of SFTTrainer and its subclasses, which explain them.
    config: Callable[..., TrainConfig]  # makes the run's TrainConfig
    _read: Callable[..., tuple[object, str]]  # the rows of a script's data set, and the name of their format
    _packing: Callable[[], bool]  # whether several documents share a row
    _rows_for: Callable[[TokenDataset], TokenDataset]  # tokenised rows in the form that the run needs
    _to_train: Callable[[], Decoder]  # the module that is trained and evaluated
    _trainer: Callable[[], Trainer]  # a jaxtune Trainer of the current model on the script's rows
    _events: Callable[[], Events]  # what passes events to the script's callbacks

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the current model, calls on_log and on_evaluate of the callbacks with the numbers, and returns
        them: {"eval_loss": mean loss, "eval_targets": the number of trained tokens that it is a mean over} (for pairs
        of answers "eval_pairs", for KTO "eval_examples", their number), the objective's other numbers and those of
        compute_metrics. Callbacks cannot request anything by their control here.

        Args:
          eval_dataset: rows of the same format as train_dataset; None: the trainer's eval_dataset.
          ignore_keys: has no effect; transformers' method has it.
          metric_key_prefix: what the names begin with in place of "eval".
        Raises:
          ValueError: there are no rows to evaluate on, or they have another format than the trained ones;
            compute_metrics needs all logits, which take more than half of the host's memory, or returns no numbers.
        """
        del ignore_keys
        trainer = self._trainer() if eval_dataset is None else self._on(eval_dataset)
        values = trainer.evaluate()
        if self.compute_metrics is not None:
            held_out = trainer.eval_data
            assert held_out is not None  # evaluate() has looked
            values |= measured(self._predicted(held_out), self.compute_metrics)
        values = _renamed(values, metric_key_prefix)
        events = self._events()
        events.tell("on_log", logs=values)
        events.tell("on_evaluate", metrics=values)
        return values

    def predict(
        self, test_dataset: object, ignore_keys: object = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Runs the current model on `test_dataset` and returns its predictions for each row, beside the numbers that
        `evaluate` computes. No method of the callbacks is called.

        Args:
          test_dataset: rows of the same format as train_dataset.
          ignore_keys: has no effect; transformers' method has it.
          metric_key_prefix: what the names of the numbers begin with in place of "eval".
        Returns:
          a PredictionOutput: the logits, float32[rows, length, vocab] (of a reward model vocab is 1), or what
            preprocess_logits_for_metrics makes of them; the labels, int32[rows, length]; and the numbers. All rows have
            the length of the trainer's rows (at most the least of max_length and the model's max_seq_length, for pairs
            twice that), padding included. The logits at position t predict the label at t + 1, and labels are -100
            wherever a token is not trained on.
        Raises:
          ValueError: all logits take more than half of the host's memory, and preprocess_logits_for_metrics is not
            given; the rows have another format than the trained ones; or compute_metrics returns no numbers.
        """
        del ignore_keys
        trainer = self._on(test_dataset)
        values = trainer.evaluate()
        assert trainer.eval_data is not None
        found = self._predicted(trainer.eval_data)
        if self.compute_metrics is not None:
            values |= measured(found, self.compute_metrics)
        return PredictionOutput(found.predictions, found.label_ids, _renamed(values, metric_key_prefix))

    def _on(self, dataset: object) -> Trainer:
        """Makes a jaxtune Trainer that evaluates the current model on the rows of `dataset`, a data set in any form
        that the trainer accepts as train_dataset, and trains nothing; evaluate and predict use it for rows that the
        script passes to them. Its eval_data has these rows, tokenised and in the form that `_rows_for` gives them.
        Raises ValueError if the rows have another format than the trained ones."""
        rows, form = self._read(dataset, self._formatting)
        if form != self._format:
            raise ValueError(f"SFTTrainer: train_dataset is {self._format}, these rows are {form}: make them alike")
        config = self.config(prepared=False)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval="eval_dataset"))
        train = self._prepared.train_data or self._train_rows()  # type: ignore[attr-defined]
        trainer = Trainer(self._to_train(), self.tokenizer, config, train, rows, trains=False)
        read = trainer.eval_data
        assert read is not None  # config and rows ask for them
        held_out = self._rows_for(read)
        if held_out is read:
            return trainer
        return Trainer(self._to_train(), self.tokenizer, config, train, held_out, trains=False)

    def _measure(self, held_out: TokenDataset | None) -> dict[str, float]:
        """Returns the numbers that compute_metrics returns for the current model on `held_out`, the tokenised rows of
        a run's evaluations; {} if there is no compute_metrics. Events calls it after each evaluation of a run, which
        therefore has rows. Raises ValueError if compute_metrics returns no numbers, or if it needs all logits and they
        take more than half of the host's memory."""
        if self.compute_metrics is None:
            return {}
        assert held_out is not None  # it is called after an evaluation
        return measured(self._predicted(held_out), self.compute_metrics)

    def _predicted(self, held_out: TokenDataset) -> EvalPrediction:
        """Returns the current model's logits (or what preprocess_logits_for_metrics makes of them) and labels on the
        tokenised rows `held_out`, by measures.predicted, for compute_metrics and predict. A row has one document (or
        one pair), or several if the script asks for packing."""
        if not self._packing():
            held_out = dataclasses.replace(held_out, packing=False)
        rows = held_out.batches(1, shuffle=False)
        return predicted(self.model.module, rows, self.preprocess_logits_for_metrics)


def _renamed(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The numbers of an evaluation, `values`, under the names that the script asked for by metric_key_prefix
    (`prefix`): {"test_loss": ...} for {"eval_loss": ...}. The prefix and an underscore take the place of "eval_", and
    are put before a name that lacks it."""
    return {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in values.items()}
