"""Safe output on a terminal of text from outside: rows, names of files, kernels and tensors, messages of other
programs.

Such text may contain rich's markup ("OUT[/b]"), escape sequences that move the cursor or retitle the window, characters
that reverse the order of a line, and lone surrogates that no encoding accepts. Therefore jaxtune prints only through
`say`, through a console that `console` made, or through logging with `PrintableFormatter`; a test checks this rule. The
reader of a terminal or a pipe may disappear at any time, and a run must not end with it (`outlive`, `outliving`).
`printable` escapes characters, `fitted` breaks lines to a terminal's width, `plain` makes text for a console of a
user's own, `progress` and `counted` show progress bars, and `be_silent` stops what a process of a larger run shows. The
module imports nothing of jaxtune, so every package may use it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Control characters except tab and newline, separators of lines and paragraphs, characters that embed, override or
# isolate a direction, and surrogates. Characters that only join others (as in Persian, or emoji) are kept.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""`text` as a string in which every character that a terminal would act on is replaced by its escape, such as
    \x1b. So are characters that reverse the direction of text, separators of lines and paragraphs, and lone surrogates,
    which no encoding accepts. Tabs and newlines are kept."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


class _Stream:
    """A text stream that may lose its reader: a pipe whose other end died, a closed terminal, a log file on a full
    disk, a closed stream. Text that can no longer be written is dropped, so that printing does not end a run.
    Attributes that are not defined here are those of the wrapped stream.

    Args:
      stream: the stream that is written to.
      name: if given, such as "<stdout>", the first OSError of a write or flush is raised with this name as its file;
        later ones, such as those when the interpreter exits, are ignored. `outlive` gives one to the stdout of commands
        whose result is what they print. If empty, all are ignored. A ValueError, which a closed stream raises, is
        ignored in both cases.
    """

    def __init__(self, stream: Any, name: str = ""):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        """Writes `text` and returns what the stream's own `write` returns, the number of characters written. A
        character that the stream's encoding lacks is written as its escape, of which each character counts. If the
        stream fails, the text is dropped, its length (with the escapes) is returned, and the error is ignored, with one
        exception: if the stream has a name, the first OSError of its `write` and `flush` is raised, with that name as
        its file."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:
            self._lost(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of `lines` by `write`, without adding line ends. The wrapped stream's own method would raise an
        error when the reader is gone."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream. A failure is ignored, with one exception: if the stream has a name, the first OSError of
        its `write` and `flush` is raised, with that name as its file. A ValueError, which a closed stream raises, is
        always ignored."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        """Called with the error of a failed write or flush. If the stream has a name and `error` is an OSError, raises
        it with that name and clears the name, so that this happens once; otherwise ignores the error. Only the stdout
        of commands whose result is what they print has a name (`outlive`): such a command ends when its text cannot be
        written, to a pipe or a file, and others, such as training, continue."""
        if self._name and isinstance(error, OSError):
            name, self._name = self._name, ""
            raise OSError(error.errno, error.strerror, name) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def outlive(raises: bool = False) -> None:
    """From now on, writes to stderr, and without `raises` to stdout, do not end this process when they fail because the
    reader is gone, such as `head` or a closed terminal, or the disk of a log file is full: what can no longer be
    written is dropped. The command line calls it at its start, and so does each process that tokenises rows. SIGHUP,
    which a closing terminal sends, is not handled here: train/signals.py stops a run after a save at it, under nohup it
    is ignored, and any other process ends. If one of the file descriptors 0 to 2 is closed, the null device takes its
    place.

    Args:
      raises: True: the first write to stdout that fails raises an OSError (for a pipe, a BrokenPipeError), for commands
        whose result is what they print, and that have nothing left to do then. False: such a write is dropped, too, for
        commands such as training whose result is on disk.
    """
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass  # the parent closed it; without this the next file that is opened would get what is printed
        os.close(descriptor)
    sys.stdout = _outliving(sys.stdout, "<stdout>" if raises else "")
    sys.stderr = _outliving(sys.stderr)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """A context in which printing does not fail when the reader of stdout or stderr is gone, such as a terminal that
    was closed: what can no longer be written is dropped, also what callbacks and libraries print. At its end,
    sys.stdout and sys.stderr are what they were before. It is for runs that a user's own script starts; commands use
    `outlive`, which has no end."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _outliving(stream: Any, name: str = "") -> Any:
    """A stream wrapped as a _Stream. name: "": all text that cannot be written is dropped; otherwise, such as
    "<stdout>", the first OSError is raised with this name (see _Stream and `outlive`). A stream that is wrapped already
    is returned unchanged, with its own name. For None, a stream that was closed when Python started, the null device is
    wrapped."""
    if stream is None:  # the stream was closed when Python started
        stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return stream if isinstance(stream, _Stream) else _Stream(stream, name)


_silent = False


def be_silent() -> None:
    """From now on `say` and consoles that are made later, both without a `file`, and progress bars show nothing in this
    process. `say` with a `file`, such as stderr, and consoles with one still print. In a run of several processes all
    but the first call it when they join, because the first prints for all."""
    global _silent
    _silent = True


_rewordings: list[Callable[[str], str]] = []


@contextlib.contextmanager
def rewording(change: Callable[[str], str]) -> Iterator[None]:
    """Within it `say` and the lines of a run print `change(text)`; of several the innermost counts."""
    _rewordings.append(change)
    try:
        yield
    finally:
        _rewordings.pop()


def reworded(text: str) -> str:
    return _rewordings[-1](text) if _rewordings else text


def say(text: object = "", file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """Prints text made safe for a terminal (`printable`) and `end`. The arguments are those of Python's print; `file`
    None is stdout, on which a silent process (`be_silent`) prints nothing. flush: True: it is written at once, not
    buffered."""
    if _silent and file is None:
        return
    print(printable(reworded(str(text))), file=file or sys.stdout, end=end, flush=flush)


def fitted(text: str, console: Console, hang: int = 2) -> str:
    """Returns `text` with its lines broken between words, so that each fits the width of the terminal, which would
    otherwise break them within words. A word that is wider than the terminal stays whole. Callers print the result by
    `say` or on a Console of the library rich.

    Args:
      text: sentences; its own line breaks stay.
      console: a rich Console of the stream on which they will be printed; it is asked only for its width and whether
        it is a terminal. If it is none, the text is returned unchanged.
      hang: the number of columns by which continuation lines are indented beyond their first line.
    """
    if not console.is_terminal:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        broken = textwrap.wrap(
            line, console.width, subsequent_indent=indent + " " * hang, break_long_words=False, break_on_hyphens=False
        )
        lines += broken or [""]
    return "\n".join(lines)


def console(**options: Any) -> Console:
    """Returns a rich Console for text from outside. In strings, [markup] and :emoji: are printed as they are, and
    numbers are not coloured; control characters in all that is drawn, such as tables' cells, become escapes
    (`printable`). If the process is silent (`be_silent`) when it is made, the console prints nothing, not even on
    stderr, unless it has a `file`, such as one from which a text is made. options: arguments of rich's Console, such as
    stderr=True or `file`, which win over these settings."""
    quiet = _silent and options.get("file") is None
    as_text: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "quiet": quiet}
    return _console_class()(**as_text | options)


@functools.cache
def _console_class() -> type[Console]:
    """Returns a subclass of rich's Console that draws the characters on which a terminal would act, such as escape
    sequences and those that reverse a line, as escapes (`printable`). The subclass is created at first use, because
    importing rich takes time."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """A rich Console that draws the characters on which a terminal would act as escapes."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(
                printable(text), **options
            )  # made printable here, so that tables compute its width

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A context with a progress bar on stderr for work on bytes: the writing of a model's files, and the reading back
    of an export. It yields a function that is called with the number of bytes done since its last call, by any thread.
    The bar disappears at the end of the context. Without a terminal, or if this process is silent (`be_silent`),
    nothing is shown.

    Args:
      what: the work in words, printed before the bar.
      total_bytes: the number of bytes of the whole work.
    """
    if _silent or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=total_bytes)
        yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def counted(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A context with a progress bar on stderr for work that is counted: `jaxtune generate` counts the answers to a file
    of prompts by it, and `jaxtune sensitivity` matrices. Training has a display of its own. It yields a function that
    is called with the number of items done since its last call. The bar stays on the screen at the end. Without a
    terminal, or if this process is silent (`be_silent`), nothing is shown.

    Args:
      what: the items in words, printed before the bar.
      total: the number of all items.
      done: how many of them are done before the context begins.
    """
    if _silent or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console(stderr=True)) as bar:
        task = bar.add_task(printable(what), total=total, completed=done)
        yield lambda count: bar.advance(task, count)


def plain(text: object, style: str = "") -> Text:
    """Returns `text` as a rich Text, for a console that may be rich's own, on which a run prints its messages: its
    characters are made printable, and rich's markup in it is shown as it is written. style: a style of rich, such as
    "bold"; "": none."""
    from rich.text import Text

    return Text(printable(text), style)


class PrintableFormatter(logging.Formatter):
    """A log formatter whose lines cannot act on the terminal, because `printable` escapes their characters. Its
    arguments are those of logging.Formatter. The command line gives it to logging.lastResort, the handler that prints
    warnings of jaxtune and of libraries where no other handler is set."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as logging.Formatter formats it, made printable."""
        return printable(super().format(record))
