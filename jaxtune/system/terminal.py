"""Safe output of text from outside (rows, file names, messages) on a terminal.

Such text may hold rich's markup, escape sequences, reversing characters and lone surrogates, so jaxtune prints only by
`say`, on a `console` from here, or through logging with `PrintableFormatter`; a test checks this. A reader that
disappears must not end a run (`outlive`, `outliving`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import select
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from jaxtune.system import timing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Control characters except tab and newline, separators of lines and paragraphs, characters that embed, override or
# isolate a direction, and surrogates. Characters that only join others (as in Persian, or emoji) are kept.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""`text` with escapes such as \x1b for control characters, characters that reverse text, line separators and lone
    surrogates. Tabs and newlines stay.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


class _Screen:
    """What stdout and stderr show, as far as streams of `outlive` write it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.written = time.monotonic()
        self.passing: _Stream | None = None  # whose last line the next output replaces

    def clear(self) -> None:
        stream, self.passing = self.passing, None
        if stream is not None:
            stream.put("\r\x1b[2K")


_screen = _Screen()
os.register_at_fork(after_in_child=_screen.__init__)  # another thread may hold the lock
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _Stream:
    """A text stream that drops what it cannot write (a dead pipe, a closed terminal, a full disk).

    name: "" ignores all errors; else the first OSError is raised with this name as its file.
    """

    def __init__(self, stream: Any, name: str = ""):
        self._stream, self._name = stream, name
        self.in_line = False  # whether what was written ends within a line

    def write(self, text: str) -> int:
        """The number of characters, also of dropped text; characters that the encoding lacks become escapes."""
        with _screen.lock:
            _screen.clear()
            if text:
                begun = max(text.rfind("\n"), text.rfind("\r")) + 1
                self.in_line = bool(_CONTROL.sub("", text[begun:])) or (self.in_line and not begun)
                _screen.written = time.monotonic()
        return self.put(text)  # without the lock: nobody may read this stream

    def put(self, text: str) -> int:
        """`write` of what is not looked at."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.put(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:
            self._lost(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes by `write`: the wrapped stream's own method would raise when the reader is gone."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        if self._name and isinstance(error, OSError):
            name, self._name = self._name, ""
            raise OSError(error.errno, error.strerror, name) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def outlive(raises: bool = False) -> None:
    """From now on failing writes to stdout and stderr do not end the process, and closed descriptors 0 to 2 are the
    null device. SIGHUP is not handled.

      raises: the first failing write to stdout raises OSError, for commands whose result is printed.
    """
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass  # the parent closed it; without this the next file that is opened would get what is printed
        os.close(descriptor)
    sys.stdout = _outliving(sys.stdout, "<stdout>" if raises else "")
    sys.stderr = _outliving(sys.stderr)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """`outlive` as a context, for a run in a user's own script."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _outliving(stream: Any, name: str = "") -> Any:
    """The stream as a _Stream of this `name`; the null device for None, a stream closed at Python's start."""
    if stream is None:  # the stream was closed when Python started
        stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return stream if isinstance(stream, _Stream) else _Stream(stream, name)


_silent = False


def be_silent() -> None:
    """From now on `say` and new consoles, unless given a `file`, and progress bars show nothing in this process."""
    global _silent
    _silent = True


def say_passing(text: str, silent_seconds: float) -> None:
    """Prints a line on stderr if for so long nothing was printed; on a terminal the next output replaces it. Nothing in
    a silent process, without `outlive`, and within another text's line.
    """
    out, err = (stream if isinstance(stream, _Stream) else None for stream in (sys.stdout, sys.stderr))
    with _screen.lock:
        if _silent or err is None or time.monotonic() - _screen.written < silent_seconds:
            return
        if err.in_line or (out is not None and out.in_line and _are_one(out, err)) or not _takes_more(err):
            return
        if not err.isatty():
            err.write(f"{printable(text)}\n")
        else:
            _screen.clear()
            err.put(printable(text)[: _columns(err) - 1])
            _screen.passing = err
        err.flush()


def _are_one(out: _Stream, err: _Stream) -> bool:
    """Whether they are the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(out.fileno(), err.fileno())
    except (OSError, ValueError):
        return False


def _takes_more(stream: _Stream) -> bool:
    """False for a full pipe, a write to which waits."""
    try:
        return bool(select.select([], [stream.fileno()], [], 0)[1])
    except (OSError, ValueError):  # no file, as in a notebook
        return True


def _columns(stream: _Stream) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def end_passing() -> None:
    """Removes a line of say_passing."""
    with _screen.lock:
        _screen.clear()


_rewordings: list[Callable[[str], str]] = []


@contextlib.contextmanager
def rewording(change: Callable[[str], str]) -> Iterator[None]:
    """Within it `say` and the lines of a run print `change(text)`; the innermost context counts."""
    _rewordings.append(change)
    try:
        yield
    finally:
        _rewordings.pop()


def reworded(text: str) -> str:
    return _rewordings[-1](text) if _rewordings else text


def say(text: object = "", file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """Prints a text made safe (`printable`).

    text: anything with a str().
    file: None: stdout, on which a silent process prints nothing.
    end: written after the text.
    flush: write out buffered text at once.
    """
    if _silent and file is None:
        return
    print(printable(reworded(str(text))), file=file or sys.stdout, end=end, flush=flush)


def fitted(text: str, console: Console, hang: int = 2) -> str:
    """A text broken between words at the terminal's width; unchanged without one.

    console: of the terminal to which the text goes.
    hang: further columns of continuation lines.
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
    """A rich Console for text from outside: no markup, emoji or coloured numbers, and escapes for control characters.
    In a silent process it prints nothing without a `file`. options: of rich's Console; they win.
    """
    quiet = _silent and options.get("file") is None
    as_text: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "quiet": quiet}
    return _console_class()(**as_text | options)


@functools.cache
def _console_class() -> type[Console]:
    """A rich Console with escapes for what a terminal acts on; made at first use, as importing rich takes time."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(
                printable(text), **options
            )  # made printable here, so that tables compute its width

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole


def progress(description: str, total_bytes: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """A phase of exporting, with a progress bar on stderr if that is a terminal and the process not silent. Its value
    is a function that takes, from any thread, the bytes done since its last call.
    """
    columns = ("DownloadColumn", "TimeRemainingColumn", "TransferSpeedColumn")
    return _counting(timing.phase("export", words=description, total=total_bytes, unit="B"), columns)


def counted(
    description: str, total: int, completed: int = 0, phase: str = timing.ELSE, transient: bool = False
) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """As `progress`, for items, with a bar that stays unless it is `transient`.

    description: before the bar.
    total: items in all; 0: unknown.
    completed: items done before.
    phase: of system/timing.py.
    """
    columns = ("MofNCompleteColumn", "TimeElapsedColumn", "TimeRemainingColumn")
    work = timing.phase(phase, words=description, total=total)
    work.advance(completed)
    return _counting(work, columns, transient)


@contextlib.contextmanager
def _counting(work: timing.Phase, columns: Sequence[str], transient: bool = True) -> Iterator[Callable[[int], None]]:
    with work:
        if _silent or not sys.stderr.isatty():
            yield work.advance
            return
        from rich import progress as rich

        description = rich.TextColumn("{task.description}", markup=False)
        shown = (description, rich.BarColumn(), *(getattr(rich, name)() for name in columns))
        with rich.Progress(*shown, console=console(stderr=True), transient=transient) as bar:
            task = bar.add_task(printable(work.words), total=work.total or None, completed=work.done)

            def advance(count: int) -> None:
                work.advance(count)
                bar.advance(task, count)

            yield advance


def plain(text: object, style: str = "") -> Text:
    """`text` as a rich Text for any console: printable, with markup shown as written. style: such as "bold"."""
    from rich.text import Text

    return Text(printable(text), style)


class PrintableFormatter(logging.Formatter):
    """A log formatter whose lines cannot act on the terminal (`printable`)."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
