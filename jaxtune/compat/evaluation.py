"""The methods `evaluate` and `predict` of transformers' Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxtune.compat.callbacks import Events
from jaxtune.compat.measures import ComputeMetrics, EvalPrediction, Preprocess, predict_rows, run_compute_metrics
from jaxtune.compat.model import CompatModel
from jaxtune.compat.reports import Reports
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.trainer import Trainer


class PredictionOutput(NamedTuple):
    """What predict() returns, as in transformers; EvalPrediction says what a row is."""

    predictions: object  # float32[rows, length, vocab] logits, or the joined results of preprocess_logits_for_metrics
    # int32[rows, length]: the row's token where it is trained on, -100 elsewhere; the logits at position t predict the
    # label at position t + 1
    label_ids: np.ndarray
    metrics: dict[str, float]  # such as {"test_loss": 1.2}


class Evaluations(Reports):
    """The part of SFTTrainer that measures the current model on held-out rows."""

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
        """Evaluates the current model, calls on_log and on_evaluate, and returns the numbers: "eval_loss",
        "eval_targets" (trained tokens; "eval_pairs", "eval_examples"), and those of the objective and of
        compute_metrics.

        ValueError: no rows, another format than the trained ones, or logits of more than half of the host's memory.
          eval_dataset: None: the trainer's.
          ignore_keys: has no effect.
          metric_key_prefix: replaces "eval" in the names.
        """
        del ignore_keys
        trainer = self._trainer() if eval_dataset is None else self._on(eval_dataset)
        values = trainer.evaluate()
        if self.compute_metrics is not None:
            held_out = trainer.eval_data
            assert held_out is not None  # evaluate() has looked
            values |= run_compute_metrics(self._predicted(held_out), self.compute_metrics)
        values = _renamed(values, metric_key_prefix)
        events = self._events()
        events.tell("on_log", logs=values)
        events.tell("on_evaluate", metrics=values)
        return values

    def predict(
        self, test_dataset: object, ignore_keys: object = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits, labels and the numbers of `evaluate` for rows of train_dataset's format, padded to the trainer's
        length; calls no callback. ValueError as in `evaluate`.

          ignore_keys: has no effect.
          metric_key_prefix: replaces "eval" in the names.
          test_dataset: rows; unlike in `evaluate` there is no default.
        """
        del ignore_keys
        trainer = self._on(test_dataset)
        values = trainer.evaluate()
        assert trainer.eval_data is not None
        prediction = self._predicted(trainer.eval_data)
        if self.compute_metrics is not None:
            values |= run_compute_metrics(prediction, self.compute_metrics)
        return PredictionOutput(prediction.predictions, prediction.label_ids, _renamed(values, metric_key_prefix))

    def _on(self, dataset: object) -> Trainer:
        """A jaxtune Trainer that evaluates the current model on these rows and trains nothing."""
        rows, form = self._read(dataset, self._formatting)
        if form != self._format:
            raise ValueError(f"SFTTrainer: train_dataset is {self._format}, these rows are {form}: make them alike")
        config = self.config(prepared=False)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval="eval_dataset"))
        train = self._prepared.train_data or self._train_rows()  # type: ignore[attr-defined]
        trainer = Trainer(self._to_train(), self.tokenizer, config, train, rows, trains=False)
        tokenised = trainer.eval_data
        assert tokenised is not None  # config and rows ask for them
        held_out = self._rows_for(tokenised)
        if held_out is tokenised:
            return trainer
        return Trainer(self._to_train(), self.tokenizer, config, train, held_out, trains=False)

    def _measure(self, held_out: TokenDataset | None) -> dict[str, float]:
        """The numbers of compute_metrics on `held_out`; {} without compute_metrics."""
        if self.compute_metrics is None:
            return {}
        assert held_out is not None  # it is called after an evaluation
        return run_compute_metrics(self._predicted(held_out), self.compute_metrics)

    def _predicted(self, held_out: TokenDataset) -> EvalPrediction:
        if not self._packing():
            held_out = dataclasses.replace(held_out, packing=False)
        rows = held_out.batches(1, shuffle=False)
        return predict_rows(self.model.module, rows, self.preprocess_logits_for_metrics)


def _renamed(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """{"test_loss": ...} for {"eval_loss": ...} and the prefix "test"."""
    return {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in values.items()}
