"""Ids of calls: nine letters and digits, which all chat templates take."""

from __future__ import annotations

import hashlib
import secrets
import string

_SIGNS = string.ascii_letters + string.digits
_SIZE = 9  # Mistral's templates take no other, and the others take any


def new_id() -> str:
    """A call's id: nine letters and digits."""
    return "".join(secrets.choice(_SIGNS) for _ in range(_SIZE))


def short_id(value: object) -> str:
    """An id of nine letters and digits; from another one always the same."""
    text = str(value)
    if len(text) == _SIZE and all(sign in _SIGNS for sign in text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest())
    return "".join(_SIGNS[number // len(_SIGNS) ** place % len(_SIGNS)] for place in range(_SIZE))
