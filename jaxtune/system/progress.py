"""What a process says about its own work: lines while nothing else is printed, and the table of its seconds."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtune.system import processes, terminal, timing
from jaxtune.system.files import atomic_write
from jaxtune.system.terminal import say

FILE = "timing.json"  # in a run's folder
SILENT_SECONDS = 3.0
_LOOKS = 8  # in so many seconds of silence
_beating = False


@contextlib.contextmanager
def heartbeat(silent_seconds: float = SILENT_SECONDS) -> Iterator[None]:
    """Within it a line on stderr says what this process does whenever nothing was printed for so long, unless it waits
    for others (timing.IDLE). Nothing in other threads than the main one, and within itself.
    """
    global _beating
    if _beating or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(silent_seconds / _LOOKS):
            timing.follow_imported_jax()
            recorder = timing.current()
            if recorder is not None and (words := doing(recorder.doing(), time.monotonic(), recorder.since)):
                terminal.say_passing(words, silent_seconds)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    with terminal.outliving():
        _beating = True
        thread.start()
        try:
            yield
        finally:
            _beating = False
            ended.set()
            thread.join(1.0)  # it may be writing to a pipe that nobody reads
            terminal.end_passing()


def doing(stacks: Sequence[Sequence[timing.Phase]], now: float, since: float) -> str:
    """A line about open phases (Recorder.doing), such as "waiting for programs: 1 of 3 programs, compiling accumulate,
    12 s"; "" while others are waited for. since: when the main thread's last phase began or ended.
    """
    *outer, innermost = stacks[0] or [None]
    if innermost is not None and innermost.name in timing.IDLE:
        return ""
    words = [str(phase) for phase in outer if phase is not None and phase.total][-1:]
    words.append("working" if innermost is None else str(innermost))
    if innermost is None or innermost.name in ("wait", timing.ELSE):
        others = sorted((stack[-1] for stack in stacks[1:]), key=lambda phase: phase.began)
        words += map(str, others[:2])
    if (seconds := now - (since if innermost is None else innermost.began)) >= 1:
        words.append(f"{seconds:.0f} s")
    return ", ".join(dict.fromkeys(words))


def show_timing(folder: Path | None = None) -> None:
    """Prints the table of what was recorded since the last one on stderr, and writes it into a folder's timing.json.
    Of several processes the first does.
    """
    if (recorder := timing.current()) is None or not processes.first():
        return
    taken = recorder.taken()
    say("\n".join(taken.lines()), file=sys.stderr)
    if folder is not None:
        atomic_write(folder / FILE, json.dumps(taken.to_json(), indent=2) + "\n")
