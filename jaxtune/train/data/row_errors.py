"""Errors of a single row, and errors of the setup that affect every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RowError(ValueError):
    """One row cannot be used; the message has the reason, and the catcher adds the place. data.on_bad_row decides
    whether the run stops.
    """


class Excluded(RowError):
    """A mark beside its conversation excludes a row from training; no bad row."""


class SetupError(ValueError):
    """The tokenizer or the options are wrong for every row; `attempt` lets it pass."""


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of work(*arguments) on one row, or its RowError, returned. Any other exception becomes a RowError, so
    that unforeseen content affects its row only; SetupError is raised.
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
    """Raises RowError for half of a surrogate pair, which JSON can write as an escape and no tokenizer encodes."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise RowError("not valid Unicode: half of a surrogate pair")
