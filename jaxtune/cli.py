"""The console command: `main` finds the command in COMMANDS, runs it and handles its errors; `console`, the entry
point of the script, also sets up the process.

A user's mistake (`_is_user_error`), or running out of memory (`_out_of_memory`), is a message on stderr and exit code
2; JAXTUNE_TRACEBACK=1 shows the traceback. Any other exception is an error of jaxtune or of a library and keeps its
traceback. A command in _WORKING, whose result is a file or a page, continues when nobody reads its output.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import signal
import sys
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
from jaxtune.system import interrupts, processes, terminal
from jaxtune.system.invocation import spelled
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
# Commands whose results are files or a page. The result of all other commands is what they print.
_WORKING = ("train", "launch", "export", "tune", "report", "watch", "serve")


def console(arguments: Sequence[str] | None = None) -> int:
    """The entry point of the `jaxtune` script, of `python -m jaxtune` and of `python -m jaxtune.train`: sets up the
    process and calls `main`.

    The set-up is for a process of its own: interrupts that Python drops are raised again, output that can no longer be
    written is dropped (for a command whose result is what it prints, it is an error), and transformers does not import
    torch. In a run of several processes, success waits for the others, and a failure is reported to them and ends the
    process here.

    Args:
      arguments: the words after `jaxtune`; None: those of this process.
    Returns:
      the exit code of `main`.
    Raises:
      Exception: what `main` raises, in a run of one process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    interrupts.raise_dropped_interrupts()
    terminal.outlive(raises=not set(arguments[:1]) <= set(_WORKING))
    # transformers imports torch wherever it is installed, which takes seconds and is of no use to a command. It is
    # hidden until transformers has been imported (model_folder.load_tokenizer).
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        code = main(arguments)
    except BaseException as error:
        if processes.count() > 1:
            traceback.print_exc()
            processes.last_words(f"{type(error).__name__}: {error}")
            processes.leave(1)
        raise
    processes.leave(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and prints its errors, without the set-up of the process, which `console` does before.

    Args:
      arguments: the words after `jaxtune`; None: those of this process.
    Returns:
      the exit code: 0; 1 if the reader of the output is gone, or where a command reports a finding by it, as `doctor`
        and `profile compare` do; 2 for a user's mistake or too little memory; 75 if a signal ended training, which the
        same command continues; 128 plus the signal's number for another KeyboardInterrupt, whose message is the name of
        its signal ("": SIGINT). `launch` returns that of the process that failed first.
    Raises:
      SystemExit: by argparse, for options or arguments that the command does not take (2) and for its --help (0).
      Exception: an error of jaxtune or of a library; with JAXTUNE_TRACEBACK=1 also a user's mistake or too little
        memory.
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
        processes.last_words(f"it was stopped: {name}")
        say(f"jaxtune: stopped by {name}", file=sys.stderr)
        return 128 + signal.Signals[name]  # the exit code that a shell would report
    except (ValueError, ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        message = _out_of_memory(error) or (str(error) if _is_user_error(error) else None)
        if os.environ.get("JAXTUNE_TRACEBACK") == "1" or message is None:
            raise
        return _fail(message)


def _run(arguments: list[str]) -> int:
    """Runs the command that `arguments`, the words after `jaxtune`, name, by its function in COMMANDS, and returns its
    exit code (0 for None); `main` calls it and handles what it raises. It imports no command: all are imported with
    this module. Also does what is no command: prints the usage (for --help, or with exit code 2 if there are no words),
    the version, or an error (2) for an unknown command, with the command of the most similar name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_usage()
        return 0 if arguments else USER_ERROR
    name, *rest = arguments
    if name == "--version":
        from jaxtune import __version__

        say(f"jaxtune {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        return _fail(f"unknown command {name!r}; {hint}")
    return COMMANDS[name](rest) or 0


def _out_of_memory(error: Exception) -> str | None:
    """The message for an error that says that host or device memory ran out, which `main` prints in place of a
    traceback, before it asks `_is_user_error`; None for any other error."""
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        what = f" ({first_line})" if first_line else ""
        return (
            f"out of host memory{what}: this machine has {pages * page / 1e9:.1f} GB. A smaller model, "
            "model.load_in=nf4, fewer data.num_workers or fewer other programs need less"
        )
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of device memory ({first_line}): a smaller or quantised model, or shorter inputs, need less"
    return None


def _is_user_error(error: Exception) -> bool:
    """Whether an error that ended a command is the user's to mend, so that `main` prints its message alone, without a
    traceback. A RuntimeError never is. An OSError is if it names a file or says that a disk or a quota is full or a
    file too large, whoever raised it. A ValueError or ArithmeticError is if jaxtune's own code raised it, and not a
    library that it called. `main` asks it of these alone, after `_out_of_memory`; other errors, such as a KeyError,
    keep a traceback."""
    if isinstance(error, RuntimeError):
        return False
    if isinstance(error, OSError):
        return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    raised_in = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        raised_in = frame.f_code.co_filename
    return Path(raised_in).is_relative_to(Path(__file__).parent)


def _fail(message: str) -> int:
    """Prints an error message on stderr, each line of it after "jaxtune: error: ", and returns the exit code, 2. In a
    run of several processes the others print the message too when this one ends."""
    processes.last_words(message)
    screen = terminal.console(stderr=True)
    for line in message.splitlines():
        say(terminal.fitted(f"jaxtune: error: {line}", screen), file=sys.stderr)
    return USER_ERROR


def _print_usage() -> None:
    """Prints what `jaxtune --help` shows: the usage, and every command with the first paragraph of the docstring of its
    `run`."""
    summaries = {name: (command.__doc__ or "").split("\n\n")[0] for name, command in COMMANDS.items()}
    say("usage: jaxtune COMMAND ...\n")
    common.print_columns([(name, " ".join(summary.split())) for name, summary in summaries.items()])
    say(f"\n'{spelled('COMMAND --help')}' says more, '{spelled('--version')}' which version this is.")


if __name__ == "__main__":
    sys.exit(console())
