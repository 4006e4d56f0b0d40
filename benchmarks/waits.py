"""Where a program's threads are while it works: a `Sampler` looks 50 times a second at what each thread executes, and
a `Part` adds what the operating system and JAX counted meanwhile."""

from __future__ import annotations

import collections
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

_EVERY_SECONDS = 0.02
_PLACES = 15  # of each kind of thread
_ROOT = Path(__file__).resolve().parents[1]


def _line(frame: FrameType) -> str:
    """FILE:LINE FUNCTION of a frame, with the last three parts of the file's path."""
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno} {code.co_name}"


def _place(frame: FrameType) -> str:
    """Where a thread is: the line of this repository that it executes, and what that has called."""
    inner, own = frame, frame
    while own is not None and not own.f_code.co_filename.startswith((f"{_ROOT}/jaxtune/", f"{_ROOT}/benchmarks/")):
        own = own.f_back
    return _line(inner) if own is inner or own is None else f"{_line(own)} > {_line(inner)}"


class Sampler:
    """Samples all threads of this process but its own while it is used as a context manager. Threads whose names
    differ by a number at the end, as those of a pool do, are one kind. `places` then has the lines at which each kind
    was found most often, and `late_share` the share of time for which this thread waited for the interpreter's lock
    after it had slept: the higher, the more others hold it."""

    def __enter__(self) -> Sampler:
        self._found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._looks, self._late, self._begun = 0, 0.0, time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        own = threading.get_ident()
        asleep = time.perf_counter()
        while not self._ended.wait(_EVERY_SECONDS):
            self._late += max(0.0, time.perf_counter() - asleep - _EVERY_SECONDS - 0.001)
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for number, frame in sys._current_frames().items():
                if number != own:
                    kind = re.sub(r"[-_ ]?\(?\d+.*", "", names.get(number, "unnamed"))
                    self._found[kind][_place(frame)] += 1
            self._looks += 1
            asleep = time.perf_counter()

    def report(self) -> dict[str, Any]:
        """{"late_share", "places": {kind of thread: {place: how many of its threads were there, on average}}}."""
        looks = max(self._looks, 1)
        return {
            "late_share": round(self._late / (time.perf_counter() - self._begun), 3),
            "places": {
                kind: {place: round(count / looks, 3) for place, count in found.most_common(_PLACES)}
                for kind, found in sorted(self._found.items())
            },
        }


class Part:
    """A part of a program, as a context manager: `record` then says how long it took, how many cores it kept busy in
    its own code and in the kernel's, which bytes the disk was asked for, how many pages were touched for the first
    time, and where its threads were. Names and seconds that others put into `seconds` meanwhile are recorded too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.record: dict[str, Any] = {}
        self._sampler = Sampler()

    def __enter__(self) -> Part:
        self._before = _counted()
        self._sampler.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._sampler.__exit__()
        wall, user, kernel, faults, disk = (after - before for after, before in zip(_counted(), self._before))
        self.record |= {
            "seconds": round(wall, 2),
            "parts": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
            "cores_busy": {"own": round(user / wall, 2), "kernel": round(kernel / wall, 2)},
            "page_faults": int(faults),
            "disk_read_bytes": int(disk),
            "threads": self._sampler.report(),
        }


def _counted() -> tuple[float, ...]:
    """The clock, seconds of the process's own code and of the kernel, page faults, bytes read from the disk."""
    used, disk = resource.getrusage(resource.RUSAGE_SELF), 0
    if os.path.exists("/proc/self/io"):
        disk = int(re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="utf-8"), re.M)[0])
    return time.perf_counter(), used.ru_utime, used.ru_stime, used.ru_minflt, disk
