"""The train command: trains by a config, exports the model, and measures exact match on held-out questions."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.system import ending, processes, terminal, timing
from jaxtune.system.disk import require_makeable
from jaxtune.system.program_cache import use_program_cache
from jaxtune.system.terminal import fitted
from jaxtune.train.config import TrainConfig
from jaxtune.train.delivery import Delivery, RunIsComplete
from jaxtune.train.display import model_report, rows_report
from jaxtune.train.display.next_commands import next_commands
from jaxtune.train.folder.run_state import read_state, write_state
from jaxtune.train.log.metrics import require_packages
from jaxtune.train.loop.saving import TrainingInterrupted
from jaxtune.train.shown_plan import show_memory, show_plan
from jaxtune.train.signals import EXIT_SAVED, Interrupted, StopSignal
from jaxtune.train.spec.loading import loading
from jaxtune.train.spec.run_spec import decided_objective
from jaxtune.train.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console


def run(config: TrainConfig, check: bool = False, plan: bool = False, console: Console | None = None) -> int:
    """Trains, exports and evaluates as the config asks; all results are in config.output. Returns the exit code: 0, 1
    if the last state was not saved, or 75 after a signal, and the same command then continues. Errors are raised.

      check: only reads rows and shows how they are tokenised and packed.
      plan: only shows the memory plan: from shapes if plan.device is set or data.train is empty, else by compiling the
      step.
      console: None: the terminal.

    `check` and `plan` write nothing to the output folder, perhaps to the caches of tokens and programs.
    """
    timing.imported()
    console = console or terminal.console(soft_wrap=True)
    if not check:
        require_packages(config.metrics.tensorboard, config.metrics.wandb_project, config.metrics.trackio_project)
    objective = decided_objective(config)
    require_makeable("output", config.output)
    if plan and (config.plan.device is not None or not config.data.train):
        show_plan(config, objective, console)
        return 0
    use_program_cache()
    if check or plan:
        with loading(config) as (weights, tokenizer, model):
            trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights, trains=plan)
            if check:
                about = "\n".join([trainer.data_summary(), *trainer.columns_read()])
                rows_report.check(trainer.model.given, about, trainer.batches, trainer.tokenizer, console)
            else:
                show_memory(trainer, console)
        return 0
    with StopSignal() as stop:
        try:
            with stop.at_once():
                return _train(config, console, stop)
        except (TrainingInterrupted, Interrupted) as stopped:
            ending.last_words(f"it was stopped: {stopped}")
            console.print(fitted(f"stopped: {stopped}. The same command continues from there.", console))
            return EXIT_SAVED


def _train(config: TrainConfig, console: Console, stop: StopSignal) -> int:
    """A run of the train command; returns the exit code. Signals raise TrainingInterrupted or Interrupted."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir("."))  # back from where the user's functions went
        with timing.phase("prepare"):
            weights, tokenizer, model = stack.enter_context(loading(config))
            if note := model_report.cpu_note(model):
                console.print(note, markup=False, highlight=False)
            trainer = Trainer(model, tokenizer, config, keeps_model=False, weights=weights, checks_folder=True)
        console.print(model_report.trained_table(trainer.model.given))
        console.print(fitted(trainer.data_summary(), console))
        delivery = Delivery(trainer, console)
        del model, weights  # only the trainer refers to the model now, so it can free what it copies
        try:
            trainer.train(stop, delivery)
        except RunIsComplete as complete:
            if read_state(trainer.output).name != "finished":  # it was killed after its export
                write_state(trainer.output, "finished", "", trainer.total_steps)
            console.print(fitted(str(complete), console))
            delivery.show_numbers()
    code = 0 if trainer.unsaved is None else 1
    if not processes.first():
        return code
    if trainer.unsaved is not None:
        console.print(fitted(f"warning: the last state is not saved, only exported: {trainer.unsaved}", console))
    console.print(f"done: {config.output}\n\nnext:")
    asked = bool(config.evaluation.exact_match_rows)
    for purpose, command in next_commands(Path(config.output), config.data, config.model.path, asked):
        console.print(f"  # {purpose}\n  {command}")
    return code
