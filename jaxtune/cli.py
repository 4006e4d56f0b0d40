"""The console command. A user's mistake or too little memory is a message on stderr and exit code 2
(JAXTUNE_TRACEBACK=1 shows the traceback); any other exception keeps its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtune.commands import (
    chat,
    common,
    convert,
    doctor,
    evaluate,
    export,
    generate,
    info,
    launch,
    profile,
    report,
    sensitivity,
    serve,
    train,
    tune,
    watch,
)
from jaxtune.system import ending, interrupts, invocation, processes, progress, terminal, timing, turns
from jaxtune.system.heap import collect_seldom, rest_while_importing
from jaxtune.system.terminal import say

USER_ERROR = 2
COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    module.__name__.rpartition(".")[2]: module.run
    for module in (
        train,
        generate,
        chat,
        serve,
        evaluate,
        export,
        profile,
        info,
        tune,
        report,
        watch,
        doctor,
        launch,
        convert,
        sensitivity,
    )
}
_TIMED = ("train", "generate", "chat", "serve", "evaluate")  # they say when they have imported what they need
# Commands whose results are files or a page. The result of all other commands is what they print.
_WORKING = ("train", "launch", "export", "tune", "report", "watch", "serve")


def process(words: Sequence[str] = ()) -> None:
    """The entry point of a process that runs nothing else: `console` with these words before those of its command line.
    It ends without taking Python's objects apart, which takes two seconds, and after a failure without waiting for its
    threads, which may compile for minutes.
    """
    words = [*words, *sys.argv[1:]]
    invocation.note_command(words)
    turns.take_often()
    rest_while_importing()
    codes: list[int] = []
    atexit.register(ending.end_now, codes)  # the first one is called last
    try:
        codes.append(console(words))
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        codes.append(1)
    if codes[0] not in (0, os.EX_TEMPFAIL):  # the latter: a signal ended training, which was saved
        if (user_code := sys.modules.get("jaxtune.train.user_code.calling")) is not None:
            user_code.close()  # the processes of rewards and tools, with their own
        ending.end_now(codes)
    ending.leave_devices()
    sys.exit(codes[0])


def console(arguments: Sequence[str] | None = None, silent_seconds: float = progress.SILENT_SECONDS) -> int:
    """Sets a process of its own up and calls `main`.

    Interrupts that Python drops are raised again, and a closed output is an error only for a command that prints its
    result. After `silent_seconds` without output a line says what is being done. In a run of several processes success
    waits for the others, and a failure is reported to them and ends the
    process here.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    collect_seldom()
    interrupts.raise_dropped_interrupts()
    terminal.outlive(raises=not set(arguments[:1]) <= set(_WORKING))
    timing.record(timing.process_start())
    idle = arguments[:1] in (["launch"], ["watch"])  # they show what others do
    heartbeat = contextlib.nullcontext() if idle else progress.heartbeat(silent_seconds)
    try:
        with heartbeat:
            code = main(arguments)
    except BaseException as error:
        if processes.count() > 1:
            traceback.print_exc()
            ending.last_words(f"{type(error).__name__}: {error}")
            ending.leave(1)
        raise
    ending.leave(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, prints its errors, and returns the exit code.

    0; 1: the reader of the output is gone, or the command's finding (`doctor`, `profile compare`); 2: a user's mistake
    or too little memory; 75: a signal ended training, which the same command continues; 128 plus the signal's number:
    another KeyboardInterrupt, whose message is the signal's name ("": SIGINT). argparse raises SystemExit.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if logging.lastResort is not None:  # it prints warnings of jaxtune and of libraries
        logging.lastResort.setFormatter(terminal.PrintableFormatter())
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        return 1
    except KeyboardInterrupt as stopped:
        name = str(stopped) or "SIGINT"
        ending.last_words(f"it was stopped: {name}")
        say(f"jaxtune: stopped by {name}", file=sys.stderr)
        return 128 + signal.Signals[name]  # the exit code that a shell would report
    except (ValueError, ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        message = _out_of_memory(error) or (str(error) if _is_user_error(error) else None)
        if os.environ.get("JAXTUNE_TRACEBACK") == "1" or message is None:
            raise
        return _fail(message)


def _run(arguments: list[str]) -> int:
    """Runs the command that `arguments` name, or prints the usage, the version, or an error for an unknown command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_usage()
        return 0 if arguments else USER_ERROR
    name, *words = arguments
    if name == "--version":
        from jaxtune import __version__

        say(f"jaxtune {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        return _fail(f"unknown command {name!r}; {hint}")
    with timing.recording(time.monotonic()):
        if name not in _TIMED:
            timing.imported()
        return COMMANDS[name](words) or 0


def _out_of_memory(error: Exception) -> str | None:
    """The message for an error that says that host or device memory ran out; None for any other."""
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        details = f" ({first_line})" if first_line else ""
        return (
            f"out of host memory{details}: this machine has {pages * page / 1e9:.1f} GB. A smaller model, "
            "model.load_in=nf4, fewer data.num_workers or fewer other programs need less"
        )
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of device memory ({first_line}): a smaller or quantised model, or shorter inputs, need less"
    return None


def _is_user_error(error: Exception) -> bool:
    """Whether an error is the user's to mend: of a file, a full disk, or a value that jaxtune's own code refuses."""
    if isinstance(error, RuntimeError):
        return False
    if isinstance(error, OSError):
        return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    raised_in = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        raised_in = frame.f_code.co_filename
    return Path(raised_in).is_relative_to(Path(__file__).parent)


def _fail(message: str) -> int:
    """Prints an error message on stderr and returns exit code 2; the other processes of a run print it too."""
    ending.last_words(message)
    screen = terminal.console(stderr=True)
    for line in message.splitlines():
        say(terminal.fitted(f"jaxtune: error: {line}", screen), file=sys.stderr)
    return USER_ERROR


def _print_usage() -> None:
    summaries = {name: (command.__doc__ or "").split("\n\n")[0] for name, command in COMMANDS.items()}
    say("usage: jaxtune COMMAND ...\n")
    common.print_columns([(name, " ".join(summary.split())) for name, summary in summaries.items()])
    more, version = invocation.spelled("COMMAND --help"), invocation.spelled("--version")
    say(f"\n'{more}' says more, '{version}' which version this is.")


if __name__ == "__main__":
    process()
