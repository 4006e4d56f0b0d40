"""Where a process's wall-clock seconds go, by phase.

    with phase("rows", "tokenising", total=9_000, unit="rows") as work:
        work.advance(512)

A phase has the seconds of its thread that no phase within it has. Nothing is recorded before `begin`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from jaxtune.system import heap

ELSE = "else"
# {phase: words}, in the order of the table.
PHASES = {
    "import": "importing",
    "devices": "starting the devices",
    "rows": "preparing rows",
    "files": "reading files",
    "load": "weights to the device",
    "prepare": "preparing model and run",
    "plan": "planning memory",
    "trace": "tracing",
    "lower": "lowering",
    "compile": "compiling",
    "cached": "reading cached programs",
    "check": "checking kernels",
    "step": "steps",
    "sample": "answering",
    "wait": "waiting for",
    "eval": "evaluating",
    "save": "saving",
    "export": "exporting",
    "profile": "profiling",
    "plot": "drawing loss.png",
    "input": "reading input",
    "serve": "serving",
    ELSE: ELSE,
}
IDLE = ("input", "serve")  # phases in which others are waited for
_SHOWN = 0.01  # the share of the wall clock from which the table names a part of a phase
_OF_JAX = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_CACHE_HIT = "/jax/compilation_cache/cache_retrieval_time_sec"

type Seconds = dict[str, dict[str, float]]  # {phase: {part, such as a program; "": none: seconds}}


class Phase:
    """Some work of a thread, while it is a context.

    part: names a line below the phase's in the table; few values.
    words: what is shown while it lasts; "": by phase and part.
    total: how many `unit` there are to do; 0: unknown.
    """

    __slots__ = ("_recorder", "began", "done", "name", "part", "total", "unit", "words")

    def __init__(self, recorder: Recorder | None, name: str, part: str, words: str, total: int, unit: str):
        self._recorder, self.name, self.part, self.words = recorder, name, part, words
        self.total, self.unit, self.done, self.began = total, unit, 0, 0.0

    def __enter__(self) -> Phase:
        if self._recorder is not None:
            self._recorder.push(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._recorder is not None:
            self._recorder.pop(self)

    def advance(self, count: int = 1) -> None:
        self.done += count

    def __str__(self) -> str:
        words = self.words or " ".join(filter(None, (PHASES.get(self.name, self.name), self.part)))
        if not self.done and not self.total:
            return words
        return f"{words}: {amounts(self.done, self.total, self.unit)}"


def amounts(done: int, total: int, unit: str) -> str:
    """Such as "3 of 5 programs", "512 rows" or "1.20 of 16.06 GB" (unit "B"); total 0: unknown."""
    scale, digits, unit = (1e9, ".2f", "GB") if unit == "B" else (1, ",", unit)
    most = f" of {total / scale if unit == 'GB' else total:{digits}}" if total else ""
    return f"{done / scale if unit == 'GB' else done:{digits}}{most} {unit}".rstrip()


@dataclasses.dataclass
class _Thread:
    """The open phases of a thread. `mark`: until when its seconds are counted."""

    mark: float
    stack: list[Phase] = dataclasses.field(default_factory=list)
    seconds: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    def charge(self, now: float) -> None:
        key = (self.stack[-1].name, self.stack[-1].part) if self.stack else (ELSE, "")
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self.mark
        self.mark = now


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of a time: `main` of the main thread, which add up to the wall clock, and `beside` of all others."""

    wall_seconds: float
    main: Seconds
    beside: Seconds

    def to_json(self) -> dict[str, float | Seconds]:
        return {"wall_seconds": self.wall_seconds, "main": self.main, "beside": self.beside}

    def lines(self) -> list[str]:
        """The table: phases in the order of PHASES, and of each the parts that took a hundredth of the wall clock."""
        rows: list[tuple[str, ...]] = [("seconds", "main thread", "beside")]

        def add(words: str, *columns: Iterable[float]) -> None:
            numbers = [f"{seconds:.2f}" if (seconds := sum(column)) >= 0.005 else "" for column in columns]
            if any(numbers):
                rows.append((words, *numbers))

        order = [*PHASES, *sorted({*self.main, *self.beside} - PHASES.keys())]
        for name in sorted({*self.main, *self.beside}, key=order.index):
            columns = [seconds.get(name, {}) for seconds in (self.main, self.beside)]
            add(PHASES.get(name, name).removesuffix(" for"), *(column.values() for column in columns))
            of_part = {part: [column.get(part, 0.0) for column in columns] for column in columns for part in column}
            of_part.pop("", None)
            shown = {part for part, seconds in of_part.items() if max(seconds) >= _SHOWN * self.wall_seconds}
            for part in sorted(shown, key=lambda part: -sum(of_part[part])):
                add(f"  {part}", *([seconds] for seconds in of_part[part]))
            if shown and (others := of_part.keys() - shown):
                add(f"  {len(others)} more", *zip(*(of_part[part] for part in others), strict=True))
        rows.append(("wall clock", f"{self.wall_seconds:.2f}", ""))
        width = max(len(words) for words, *_ in rows)
        return [f"{words:<{width}}  {main:>11}  {beside:>8}".rstrip() for words, main, beside in rows]


class Recorder:
    """Adds up the phases of all threads.

    began: from when on, a time of `clock`.
    main: the main thread's ident; None: Python's.
    """

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic, main: int | None = None):
        self._clock, self._began = clock, began
        self._main_ident = threading.main_thread().ident if main is None else main
        self._main = _Thread(began)
        self._others: dict[int, _Thread] = {}  # those with an open phase
        self._beside: dict[tuple[str, str], float] = {}  # of phases that have ended
        self._lock = threading.Lock()

    def _thread(self) -> _Thread | None:
        """This thread's; None if it is not the main one and no phase is open in it."""
        ident = threading.get_ident()
        return self._main if ident == self._main_ident else self._others.get(ident)

    def begin(self, phase: Phase) -> None:
        """Begins the main thread's first phase, at the time of the recorder's own begin."""
        phase.began = self._began
        self._main.stack.append(phase)

    def push(self, phase: Phase) -> None:
        """Begins a phase in this thread."""
        phase.began = now = self._clock()
        if (thread := self._thread()) is None:
            thread = self._others[threading.get_ident()] = _Thread(now)
        else:
            thread.charge(now)
        thread.stack.append(phase)

    def pop(self, phase: Phase | None) -> None:
        """Ends a phase, and those within it that are still open; nothing if it is not open in this thread."""
        thread = self._thread()
        if thread is None or phase not in thread.stack:
            return
        thread.charge(self._clock())
        del thread.stack[thread.stack.index(phase) :]
        if thread is not self._main and not thread.stack:
            with self._lock:
                del self._others[threading.get_ident()]
                _add(self._beside, thread.seconds)

    def innermost(self, *names: str) -> Phase | None:
        """The innermost open phase of this thread that has one of the names."""
        thread = self._thread()
        return next((phase for phase in reversed(thread.stack if thread else []) if phase.name in names), None)

    @property
    def since(self) -> float:
        """When the main thread's last phase began or ended."""
        return self._main.mark

    def doing(self) -> list[list[Phase]]:
        """The open phases of the main thread, perhaps none, then those of each other thread that has some."""
        main, *others = ([*thread.stack] for thread in (self._main, *list(self._others.values())))
        return [main, *filter(None, others)]

    def taken(self) -> Timing:
        """What was recorded until now, open phases too; recording begins anew."""
        now = self._clock()
        with self._lock:
            seconds = [self._beside]
            for thread in list(self._others.values()):
                open_phase, mark = thread.stack[-1:], thread.mark
                seconds.append(dict(thread.seconds))
                if open_phase:
                    _add(seconds[-1], {(open_phase[0].name, open_phase[0].part): now - mark})
            beside: dict[tuple[str, str], float] = {}
            for each in seconds:
                _add(beside, each)
            self._main.charge(now)
            timing = Timing(now - self._began, _by_phase(self._main.seconds), _by_phase(beside))
            self._began, self._main.seconds = now, {}
            # Those still open have these seconds twice, and give them up at their end.
            self._beside = {key: -count for each in seconds[1:] for key, count in each.items()}
            return timing


def _add(into: dict[tuple[str, str], float], seconds: Mapping[tuple[str, str], float]) -> None:
    for key, count in seconds.items():
        into[key] = into.get(key, 0.0) + count


def _by_phase(seconds: Mapping[tuple[str, str], float]) -> Seconds:
    by_phase: Seconds = {}
    for (name, part), count in seconds.items():
        by_phase.setdefault(name, {})[part] = count
    return by_phase


# ---- this process

_OFF = Phase(None, ELSE, "", "", 0, "")
_recorder: Recorder | None = None
_listens = False  # to JAX


def phase(name: str, part: str = "", words: str = "", total: int = 0, unit: str = "") -> Phase:
    """A context of some work of this thread, with the arguments of Phase. name: of PHASES, or a new one."""
    if _recorder is None and not words:
        return _OFF
    return Phase(_recorder, name, part, words, total, unit)


def during[**P, R](name: str, part: str, words: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function's run a phase."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(name, part, words):
                return function(*args, **kwargs)

        return run

    return decorated


def current() -> Recorder | None:
    return _recorder


def process_start() -> float:
    """time.monotonic() when this process was started; now, if the system does not say when that was."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - max(age, 0.0)  # read last: a thread that is kept waiting makes no process older
    return time.monotonic()


def record(began: float) -> None:
    """Records phases from now on, unless that has begun. The main thread is importing, since `began`, until
    `imported`.
    """
    global _recorder
    if _recorder is None:
        _recorder = Recorder(began)
        _recorder.begin(Phase(_recorder, "import", "", "", 0, ""))


@contextlib.contextmanager
def recording(began: float) -> Iterator[None]:
    """`record` as a context."""
    global _recorder
    before = _recorder
    record(began)
    try:
        yield
    finally:
        _recorder = before


def imported() -> None:
    """The end of the imports with which a command or a script begins."""
    heap.imported()
    if _recorder is not None:
        _recorder.pop(_recorder.innermost("import"))


def follow_imported_jax() -> None:
    """`follow_jax`, if JAX is imported by now."""
    module = sys.modules.get("jax")
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        follow_jax()


def follow_jax() -> None:
    """Records what JAX traces, lowers, compiles and reads from its cache, from now on."""
    global _listens
    if _listens:
        return
    from jax import monitoring

    monitoring.register_scalar_listener(_jax_began)
    monitoring.register_event_duration_secs_listener(_jax_ended)
    _listens = True


def _jax_began(event: str, value: float, **facts: object) -> None:
    if _recorder is not None and event in _OF_JAX:
        program = str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        _recorder.push(phase(_OF_JAX[event], program))


def _jax_ended(event: str, duration_secs: float, **facts: object) -> None:
    if _recorder is None:
        return
    if event == _CACHE_HIT and (read := _recorder.innermost("compile")) is not None:
        read.name = "cached"
    if event in _OF_JAX:
        names = ("compile", "cached") if _OF_JAX[event] == "compile" else (_OF_JAX[event],)
        _recorder.pop(_recorder.innermost(*names))
