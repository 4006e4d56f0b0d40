"""`jaxtune train` that also writes which implementation every product chose.

python -m benchmarks.proof.recorded RECIPE [key=value ...] output=FOLDER

With the environment variable PROOF_TURNS=FILE runs train in turns: each waits after its first step, which compiles,
until no other one holds FILE's lock, and keeps it to its end. So they compile beside each other and are timed alone.
"""

from __future__ import annotations

import atexit
import collections
import fcntl
import functools
import json
import os
import sys
from pathlib import Path

from jaxtune.train.callbacks import Between, Callback

TURNS = "PROOF_TURNS"


class Turn(Callback):
    """After a process's first step, waits for the lock of a file until no other process trains."""

    def __init__(self, file: str):
        self._file = file
        self.lock: int | None = None  # kept until the process ends

    def between(self, moment: Between) -> None:
        if self.lock is None:
            moment.wait()
            self.lock = os.open(self._file, os.O_CREAT | os.O_RDWR)
            fcntl.flock(self.lock, fcntl.LOCK_EX)


def main() -> int:
    from jaxtune import cli
    from jaxtune.pallas import dispatch
    from jaxtune.train import app

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    choose = dispatch.choose

    def counted(op: str, table: dispatch.Table, implementation: str | None) -> str:
        name = choose(op, table, implementation)
        counts[op][name] += 1
        return name

    dispatch.choose = counted
    output = next(word.removeprefix("output=") for word in sys.argv if word.startswith("output="))

    def written() -> None:
        if Path(output).is_dir():
            text = json.dumps({op: dict(names) for op, names in sorted(counts.items())})
            (Path(output) / "products.json").write_text(text, encoding="utf-8")

    atexit.register(written)
    if file := os.environ.get(TURNS):
        app.Trainer = functools.partial(app.Trainer, callbacks=(Turn(file),))
    return cli.console(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
