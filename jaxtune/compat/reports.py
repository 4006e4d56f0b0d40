"""Methods of transformers' Trainer that print and save numbers, and what train() returns."""

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
    """accelerate's object for scripts: one process, which is the main one."""

    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0

    def print(self, *words: object, sep: str = " ", **options: object) -> None:
        del options
        say(sep.join(map(str, words)))

    def wait_for_everyone(self) -> None:
        """Returns at once: there is one process."""


def rows_report(name: str, trainer: Trainer) -> list[str]:
    """Lines about a run's rows: those of `jaxtune train`, and what users of TRL may not expect.

    name: the trainer's class, which begins the latter.
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
    """The methods of a trainer that print and save numbers."""

    args: Any
    state: TrainerState

    @property
    def _output(self) -> Path:
        return Path(self.args.output_dir).expanduser()

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints the metrics on stdout, sorted by name, under a heading with `split`, such as "train"."""
        say(f"***** {split} metrics *****")
        for name in sorted(metrics):
            value = metrics[name]
            say(f"  {name} = {value:,.4f}" if isinstance(value, float) else f"  {name} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes output_dir/SPLIT_results.json, and with `combined` merges the metrics into
        output_dir/all_results.json. split: such as "train" or "eval".
        """
        self._output.mkdir(parents=True, exist_ok=True)
        _write(self._output / f"{split}_results.json", dict(metrics))
        if combined:
            path = self._output / "all_results.json"
            earlier_metrics = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write(path, earlier_metrics | dict(metrics))

    def save_state(self) -> None:
        """Writes the progress of the run to output_dir/trainer_state.json."""
        self._output.mkdir(parents=True, exist_ok=True)
        folders.write_state(self._output, self.state)

    def is_world_process_zero(self) -> bool:
        """Always True: there is one process."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Always True: there is one process."""
        return self.state.is_local_process_zero


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=4, sort_keys=True, default=float) + "\n", encoding="utf-8")
