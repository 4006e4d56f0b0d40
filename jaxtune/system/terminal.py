"""How text from outside reaches a terminal: rows, names of files, kernels and tensors, messages of other programs.

Such text may hold rich's markup ("OUT[/b]"), escape sequences that move the cursor or retitle the window, characters
that turn the order of a line round, and halves of characters that no encoding takes. So nothing of ours prints but by
`say`, on a console that `console` made, or through logging with `PrintableFormatter`; a rule of the tests checks it.
Whoever reads a terminal or a pipe may go at any time: a run does not end with its reader (`outliving`).
This module imports nothing of ours, so that every room may use it.
"""

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

# Control characters but for the tab and the line's end, separators of lines and paragraphs, characters that embed,
# override or isolate a direction, and surrogates. What only joins characters (as in Persian, or emoji) is kept.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """`text` as a string in which every character that a terminal would obey stands as its escape, such as \\x1b."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


class _Stream:
    """A stream of text that may lose its reader (a pipe whose other end died, a closed terminal, a log file on a full
    disk, a stream that was closed). What it takes no more is lost, and nobody is told: none of its methods raises that.

    Args:
      name: where it is wanted that the loss of a result is told: what the error calls the stream. Then the first write
        that fails raises an OSError with that name as its file, and those after it, such as the interpreter's at its
        end, do not.
    """

    def __init__(self, stream: Any, name: str = ""):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:
            self._lost(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
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


def outlive(told: bool = False) -> None:
    """From here on this process outlives the readers of its stdout and stderr: what they do not take is lost.

    told: of stdout, which holds what the command is for, the loss is an OSError (of a pipe, a BrokenPipeError).
    """
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass  # closed by whoever started us: else the next file that is opened would get what is printed
        os.close(descriptor)
    sys.stdout = _outliving(sys.stdout, "<stdout>" if told else "")
    sys.stderr = _outliving(sys.stderr)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Within, whatever prints (callbacks and libraries too) outlives the readers of stdout and stderr."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _outliving(stream: Any, name: str = "") -> Any:
    if stream is None:  # it was closed when Python started
        stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return stream if isinstance(stream, _Stream) else _Stream(stream, name)


_silent = False


def be_silent() -> None:
    """From here on this process shows nothing but errors: another one speaks for it."""
    global _silent
    _silent = True


def say(text: object = "", file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """Prints text as a terminal may have it, by default on stdout."""
    if _silent and file is None:
        return
    print(printable(text), file=file or sys.stdout, end=end, flush=flush)


def fitted(text: str, console: Console, hang: int = 2) -> str:
    """Sentences as a console shows them. On a terminal lines are broken at spaces, what follows stands `hang` columns
    further in, and no word (a path, a key) is cut; elsewhere the text stays as it is."""
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
    """A rich console to which all text is text: strings are not searched for markup, emoji names or numbers to colour,
    and whatever is drawn, tables' cells too, is made printable."""
    as_text: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "quiet": _silent}
    return _console_class()(**as_text | options)


@functools.cache
def _console_class() -> type[Console]:
    """Made when it is wanted: to import rich takes a while."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)  # here, so that tables make room for it

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar for work on so many bytes, on stderr while that is a terminal; gives what is told of bytes as they are
    done, by any thread. Where it is none, or this process is silent, nothing is shown."""
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


def plain(text: object, style: str = "") -> Text:
    """`text` for a rich console or table of somebody else: printable, and whatever looks like markup is text."""
    from rich.text import Text

    return Text(printable(text), style)


class PrintableFormatter(logging.Formatter):
    """Formats log records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
