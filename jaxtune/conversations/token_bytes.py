"""The bytes that a token stands for, from the vocabulary: its text alone would lack spaces and parts of characters."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from jaxtune.conversations.tokenizing import Tokenizer, special_ids

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # SentencePiece's


def _byte_signs() -> dict[str, int]:
    """{sign in byte-level vocabularies: byte}: printable bytes are their own, others follow from U+0100 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """The bytes of each token of a tokenizer: byte-level, SentencePiece with and without fallback to bytes, or, of
    another kind, its text alone.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.specials = frozenset(special_ids(tokenizer))
        self._added = {int(token): str(text) for text, token in getattr(tokenizer, "get_added_vocab", dict)().items()}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = decoder.__getstate__().decode() if decoder is not None else ""
        self._read: Callable[[str], bytes] | None = None
        if '"ByteLevel"' in state:
            self._read = functools.partial(_byte_level, _byte_signs())
        elif _SPACE in state or '"ByteFallback"' in state:
            self._read = _sentence_piece
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def alone(self, token: int) -> bytes:
        """Those with which a text begins, from which some tokenizers take a space away."""
        whole = self(token)
        return whole[1:] if whole[:1] == b" " and self._text(token).encode() == whole[1:] else whole

    def _of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token) if self._read is not None else None
        return self._text(token).encode(errors="replace") if piece is None or self._read is None else self._read(piece)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _byte_level(signs: dict[str, int], piece: str) -> bytes:
    return b"".join(bytes([signs[sign]]) if sign in signs else sign.encode() for sign in piece)


def _sentence_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return piece.replace(_SPACE, " ").encode() if byte is None else bytes([int(byte[1], 16)])
