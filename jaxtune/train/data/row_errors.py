"""Errors of a single row (`RowError`), which `attempt` returns in place of raising them, and errors of the setup that
affect every row (`SetupError`). `check_unicode` refuses text that no tokenizer can encode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RowError(ValueError):
    """One row of the data cannot be used. The message gives the reason; the code that catches it adds the file and
    line. With data.on_bad_row="skip" such a row is left out and counted; otherwise the run stops with an error that
    names the row."""


class Excluded(RowError):
    """A row says by a mark beside its conversation that it is not trained on; it is counted, and is no bad row."""


class SetupError(ValueError):
    """The tokenizer or the options are wrong, so that no row can be used, whatever it contains. `templates.py` raises
    it; `attempt` does not catch it, so it ends the run instead of making every row a bad one."""


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work(*arguments)`, which handles one row, or the `RowError` that it raised, returned and not
    raised. The code that converts and tokenises rows calls its functions by it.

    Any other exception is returned as a `RowError` that names its type (a RecursionError as "nested too deeply"), so
    that a row with unforeseen content affects that row only. A `SetupError` is raised, since it concerns all rows.
    """
    try:
        return work(*arguments)
    except RowError as error:
        return error
    except SetupError:
        raise
    except RecursionError:
        return RowError("nested too deeply")
    except Exception as error:
        return RowError(f"cannot be used: {type(error).__name__}: {error}")


def check_unicode(text: str) -> None:
    """Raises `RowError` if `text`, which comes from a row, has half of a surrogate pair. JSON can write one as an
    escape (backslash, u, d83d), and no tokenizer can encode it. Columns of text and contents of messages are checked
    when a row is converted. The rendered text is checked as a whole, because it also has thoughts, tools and calls."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise RowError("not valid Unicode: half of a surrogate pair")
