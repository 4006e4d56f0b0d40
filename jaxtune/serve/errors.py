"""Errors of the server in the form in which OpenAI's API reports them (`ApiError`), and the JSON of its responses
(`encoded`, which has `_finite` replace numbers that JSON lacks)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

# Of OpenAI: what the client did, and what the server failed to do.
_INVALID, _SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An error that a client gets in place of an answer. Any code that handles a request raises it, and `app` turns it
    into the response, or into the last event of a stream. `body` returns it as a dict in OpenAI's form. The arguments
    are also its attributes.

    Args:
      status: HTTP status.
      message: what is wrong, in words for people: the key, its value and the fix.
      param: the key of the request that is wrong; None: no single one.
      code: a word that programs can compare, such as model_not_found; None: there is none.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, object]:
        """The JSON object of the error in OpenAI's form, which `app` sends as a response or as a stream's last event:
        {"error": {"message", "type", "param", "code"}}. `type` is server_error for a status of 500 and above, and
        invalid_request_error below."""
        kind = _SERVER if self.status >= 500 else _INVALID
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def encoded(body: object) -> bytes:
    """Returns `body`, a JSON value, as JSON text in UTF-8, for responses and the events of streams. Lone surrogates,
    which a client's text may have and UTF-8 cannot encode, are written as escapes (\\udXXX), so that no text makes a
    response fail. NaN and infinities, such as the log-probabilities of weights that have NaN, are written as null,
    because JSON has no words for them."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(body), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace")


def _finite(value: object) -> object:
    """Returns a JSON value with None in place of each float that is NaN or infinite, in lists (also tuples, which
    become lists) and dicts too. `encoded` calls it for a body with such floats."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
