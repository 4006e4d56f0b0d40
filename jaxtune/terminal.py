"""How text from outside reaches a terminal: rows, names of files, kernels and tensors, messages of other programs.

Such text may hold rich's markup ("OUT[/b]"), escape sequences that move the cursor or retitle the window, characters
that turn the order of a line round, and halves of characters that no encoding takes. Whatever prints it passes it
through `printable`, or through `plain` for rich. This module imports nothing of ours, so that every room may use it.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# Control characters but for the tab and the line's end, separators of lines and paragraphs, characters that embed,
# override or isolate a direction, and surrogates. What only joins characters (as in Persian, or emoji) is kept.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """`text` as a string in which every character that a terminal would obey stands as its escape, such as \\x1b."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def plain(text: object, style: str = "") -> Text:
    """`text` for a rich console or table: printable, and whatever looks like markup is text."""
    from rich.text import Text

    return Text(printable(text), style)


class PrintableFormatter(logging.Formatter):
    """Formats log records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
