"""Errors in OpenAI's form, and JSON that never fails."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping

# Of OpenAI: what the client did, and what the server failed to do.
_INVALID, _SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An error that a client gets in place of an answer, as a response or as a stream's last event.

    Args:
      status: of HTTP.
      message: the key, its value and the fix.
      param: the wrong key of the request; None: no single one.
      code: for programs, such as model_not_found.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, object]:
        """{"error": {"message", "type", "param", "code"}}"""
        kind = _SERVER if self.status >= 500 else _INVALID
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@contextlib.contextmanager
def panics() -> Iterator[None]:
    """An ApiError for a panic of the tokenizers library, which is no Exception and would end a thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ApiError(400, f"the tokenizer fails on this text: {str(error)[:200]}") from None


_SPLIT = 5  # levels of a large body; the values below are encoded by calls of their own
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def encoded(body: object, large: bool = False) -> bytes:
    """JSON in UTF-8. Lone surrogates are escapes, NaN and infinities null, so that no text or number makes it fail.

    large: in many calls, between which other threads run.
    """
    return "".join(_pieces(body, _SPLIT if large else 0)).encode("utf-8", "backslashreplace")


def _pieces(value: object, depth: int) -> Iterator[str]:
    if depth and isinstance(value, list | tuple | dict) and value:
        named = isinstance(value, dict)
        yield "{" if named else "["
        separator = ""
        for item in value.items() if named else value:
            if named:
                separator += _ENCODER.encode(item[0]) + ": "
            yield separator
            yield from _pieces(item[1] if named else item, depth - 1)
            separator = ", "
        yield "}" if named else "]"
        return
    try:
        yield _ENCODER.encode(value)
    except ValueError:
        yield _ENCODER.encode(_finite(value))


def _finite(value: object) -> object:
    """A JSON value with None for floats that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
