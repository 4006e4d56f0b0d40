"""`jaxtune train` that also writes which implementation every product chose.

python -m benchmarks.proof.recorded RECIPE [key=value ...] output=FOLDER

With the environment variable PROOF_TURNS=FILE:N runs train in turns: each waits after its first step, which compiles,
until N of them have come so far (or have ended), then for FILE's lock, which it keeps to its end.
"""

from __future__ import annotations

import atexit
import collections
import fcntl
import functools
import json
import os
import sys
import time
from pathlib import Path

from jaxtune.train.callbacks import Between, Callback

TURNS = "PROOF_TURNS"


class Turn(Callback):
    """After its first step, waits until all runs have made theirs, and then until no other one trains."""

    def __init__(self, turns: str):
        file, _, count = turns.rpartition(":")
        self._file, self._count = Path(file), int(count)
        self.lock: int | None = None  # kept until the process ends
        self._arrived = False

    def between(self, moment: Between) -> None:
        if self.lock is None:
            moment.wait()
            self.arrive()
            while self._file.stat().st_size < self._count:
                time.sleep(0.05)
            self.lock = os.open(self._file, os.O_RDWR)
            fcntl.flock(self.lock, fcntl.LOCK_EX)

    def arrive(self) -> None:
        """Others no longer wait for this run; also of one that ends without a step."""
        if not self._arrived:
            self._arrived = True
            with self._file.open("ab") as file:
                file.write(b".")


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
    if turns := os.environ.get(TURNS):
        turn = Turn(turns)
        atexit.register(turn.arrive)
        app.Trainer = functools.partial(app.Trainer, callbacks=(turn,))
    return cli.console(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
