"""One process of the kill tests: it runs the train command on a tiny model and sends itself a signal at a given moment.

A parent process could not choose the moment, because the duration of a step differs from machine to machine. So this
process counts its own moments (before and after a step is dispatched, a batch is evaluated, a file of a save or an
export is written, a phase starts), and sends itself the signal at the moment whose number it was given.

Usage: kills.py RECIPE MOMENT SIGNAL [key=value ...]. MOMENT 0 sends no signal. If the command ends, it prints how many
moments there were.
"""

from __future__ import annotations

import os
import signal
import sys

from jaxtune import cli
from jaxtune.system import files
from jaxtune.train import trainer
from jaxtune.train.engine import programs, trained_model
from jaxtune.train.folder import results
from jaxtune.train.spec import loading


def main() -> int:
    recipe, moment, number, *overrides = sys.argv[1:]
    left, seen = int(moment), 0

    def tick() -> None:
        nonlocal seen
        seen += 1
        if seen == left:
            os.kill(os.getpid(), signal.Signals[number])

    def around(owner, name: str) -> None:
        real = getattr(owner, name)

        def ticking(*arguments, **options):
            tick()
            result = real(*arguments, **options)
            tick()
            return result

        setattr(owner, name, ticking)

    around(trainer, "resolve")
    for name in ("_resume", "_start"):
        around(trainer.Trainer, name)
    for name in ("accumulate", "place"):
        around(programs.Engine, name)
    around(trained_model.TrainedModel, "finished")
    around(trainer.m, "loss_plot")
    around(trainer.m.Progress, "evaluating")
    around(loading, "load_tokenizer")
    around(results, "write_manifest")
    around(files.os, "replace")
    around(files.os, "fsync")
    around(files.os, "rename")
    code = cli.main(["train", recipe, *overrides])
    print(f"moments {seen}")
    return code


if __name__ == "__main__":
    sys.exit(main())
