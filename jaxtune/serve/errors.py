"""Errors in OpenAI's form, and JSON that never fails."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

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


def encoded(body: object) -> bytes:
    """JSON in UTF-8. Lone surrogates are escapes, NaN and infinities null, so that no text or number makes it fail."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(body), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace")


def _finite(value: object) -> object:
    """A JSON value with None for floats that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
