"""The methods log_metrics, save_metrics and save_state of transformers' Trainer (`Reports`), what train() returns
(`TrainOutput`), and the lines about rows that it prints before the first step (`rows_report`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.compat import folders
from jaxtune.compat.callbacks import TrainerState
from jaxtune.system.terminal import say
from jaxtune.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class TrainOutput:
    """What train() returns, as in transformers."""

    global_step: int  # optimizer steps done, those before a continued run included
    training_loss: float  # mean loss of the steps of this call of train(); NaN if it made none
    # train_runtime (seconds), train_loss, epoch, train_samples_per_second and train_steps_per_second
    metrics: dict[str, float]


class Accelerator:
    """What scripts ask of accelerate's object: one process, which is the main one."""

    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0

    def print(self, *words: object, sep: str = " ", **options: object) -> None:
        del options
        say(sep.join(map(str, words)))

    def wait_for_everyone(self) -> None:
        """Nobody else is there."""


def rows_report(name: str, trainer: Trainer) -> list[str]:
    """Returns lines about a run's rows, which train() prints before the first step: those that `jaxtune train` prints,
    and then further lines about what users of TRL may not expect: with packing=True, how it changes the number of
    updates; if documents are cut, the share of them; and the share of tokens that are trained on. If rows are streamed
    or answers are sampled, there are no further lines.

    Args:
      name: the class of the script's trainer, with which these further lines begin.
      trainer: jaxtune's Trainer of the run.
    """
    lines = trainer.data_summary().splitlines()
    data, source = trainer.train_data, trainer.batches
    if data is None or source.steps_per_epoch is None:
        return lines
    report, a_step = data.report, source.rows_per_step
    if data.packing is True:
        plain = -(-report.documents // a_step)
        lines.append(
            f"{name}: packing=True: an update has {a_step:,} packed rows, so that an epoch has "
            f"{source.steps_per_epoch:,} updates; without packing it has {plain:,}"
        )
    if report.truncated:
        share = report.truncated / max(1, report.documents)
        lines.append(f"{name}: {share:.1%} of the documents are cut at {data.length:,} tokens (max_length)")
    share = report.trained_tokens / max(1, report.tokens)
    lines.append(f"{name}: {share:.1%} of the tokens are trained on")
    return lines


class Reports:
    """The methods of a trainer with which scripts print and save numbers. SFTTrainer inherits them, and sets `args`, an
    SFTConfig, and `state`."""

    args: Any
    state: TrainerState

    @property
    def _output(self) -> Path:
        """The script's output_dir as a path, with ~ expanded; it may not exist yet. save_metrics, save_state,
        train and save_model write into it."""
        return Path(self.args.output_dir).expanduser()

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints the metrics on stdout, a line each, sorted by name, under a heading with the name `split`, such as
        "train"."""
        say(f"***** {split} metrics *****")
        for name in sorted(metrics):
            value = metrics[name]
            say(f"  {name} = {value:,.4f}" if isinstance(value, float) else f"  {name} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes the metrics to output_dir/SPLIT_results.json, where SPLIT is `split`, such as "train"; output_dir is
        created if it is missing. If `combined` is True, they are also added to output_dir/all_results.json, where they
        replace values of the same names; if False, they are not."""
        self._output.mkdir(parents=True, exist_ok=True)
        _write(self._output / f"{split}_results.json", dict(metrics))
        if combined:
            path = self._output / "all_results.json"
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write(path, known | dict(metrics))

    def save_state(self) -> None:
        """Writes the progress of the run to output_dir/trainer_state.json, as transformers does: the fields of
        TrainerState, and an entry that marks the file as jaxtune's, which is read only in the file of a checkpoint-N
        folder (folders.is_own). output_dir is created if it is missing."""
        self._output.mkdir(parents=True, exist_ok=True)
        folders.write_state(self._output, self.state)

    def is_world_process_zero(self) -> bool:
        """transformers' check for the process that may write files: the state's field of this name, always True
        here."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """transformers' check for the first process on a host: the state's field of this name, always True here."""
        return self.state.is_local_process_zero


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Writes `values` to the file `path` as JSON, in place of what is there; what JSON lacks, such as a NumPy number,
    is written as a float. Raises TypeError or ValueError for a value that float() does not take. Reports.save_metrics
    calls it."""
    path.write_text(json.dumps(values, indent=4, sort_keys=True, default=float) + "\n", encoding="utf-8")
