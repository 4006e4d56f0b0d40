"""Tokenises texts and records the position of each token, at a cost that grows linearly with the length of a text.

A text longer than a window is tokenised window by window. Neighbouring windows overlap, and are joined where both have
the same token at the same position, away from the edges of both. There they agree with the text tokenised as a whole,
except in a repetition longer than the overlap, whose tokens may begin at another of its periods.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

WINDOW = 65_536  # characters of a window
OVERLAP = 2_048  # characters that a window shares with the next one


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a text, with their positions in it."""

    ids: np.ndarray
    """int32[n]: token ids."""
    starts: np.ndarray
    """int64[n]: the index in the text of each token's first character."""
    ends: np.ndarray
    """int64[n]: the index in the text after each token's last character."""
    cut: bool = False
    """Whether the rest of the text was not tokenised, because there were enough tokens."""

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, first: int, last: int, shift: int = 0, cut: bool = False) -> Tokens:
        """The tokens `first:last`, with `shift` characters added to their positions (those of a window count from the
        window's beginning). cut: the `cut` of the result."""
        at = slice(first, last)
        return Tokens(self.ids[at], self.starts[at] + shift, self.ends[at] + shift, cut)

    @classmethod
    def joined(cls, parts: list[Tokens]) -> Tokens:
        """The tokens of a text from `parts`, those of its consecutive parts, whose positions are in the whole text
        already; they are `cut` if the last part is."""
        fields = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "starts", "ends"))
        return cls(*fields, cut=parts[-1].cut)


def tokenize(tokenizer: Any, texts: list[str], max_tokens: int | None = None) -> list[Tokens]:
    """The tokens of each text, without the special tokens that a tokenizer adds around a text.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        texts: any number of texts of any length.
        max_tokens: tokenising a text stops once it has at least this many tokens; None never stops. A text of a single
            window is never cut.
    """
    short = iter(_at_once(tokenizer, [text for text in texts if len(text) <= WINDOW]))
    return [next(short) if len(text) <= WINDOW else _in_windows(tokenizer, text, max_tokens) for text in texts]


def tokenize_pieces(tokenizer: Any, text: str, cuts: list[int], max_tokens: int | None = None) -> Tokens:
    """The tokens of a text, tokenised in pieces so that no token extends over one of the positions `cuts`.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        text: the text.
        cuts: indices of characters, in ascending order.
        max_tokens: tokenising stops after the piece with which there are at least this many tokens; None never stops.
    """
    pieces, count = [], 0
    for low, high in itertools.pairwise([0, *cuts, len(text)]):
        piece = tokenize(tokenizer, [text[low:high]], max_tokens)[0]
        count += len(piece)
        full = max_tokens is not None and count >= max_tokens and high < len(text)
        pieces.append(piece.part(0, len(piece), low, cut=piece.cut or full))
        if pieces[-1].cut:
            break
    return Tokens.joined(pieces)


def _at_once(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """The tokens of each of `texts`, with their positions, by one call of `tokenizer` and without windows or special
    tokens around a text."""
    if not texts:
        return []
    output = tokenizer(
        texts,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    results = []
    for ids, offsets in zip(output["input_ids"], output["offset_mapping"], strict=True):
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        results.append(Tokens(np.array(ids, np.int32), pairs[:, 0], pairs[:, 1]))
    return results


def _in_windows(tokenizer: Any, text: str, max_tokens: int | None) -> Tokens:
    """The tokens of a `text` that is longer than `WINDOW`, tokenised by `tokenizer` window by window, because the time
    for a text as a whole may grow faster than its length. max_tokens: tokenising stops once there are at least this
    many tokens, and the result is `cut`; None never stops."""

    def window(low: int) -> Tokens:
        tokens = _at_once(tokenizer, [text[low : low + WINDOW]])[0]
        return tokens.part(0, len(tokens), low)

    parts, count = [], 0
    low, current = 0, window(0)
    while (high := low + WINDOW) < len(text):
        low = high - OVERLAP
        following = window(low)
        last, first = _seam(current, following, low, high)
        if first is None:  # no token in common: the next window begins after the last token used of this one
            last = min(max(last, 1), len(current))
            low = int(current.ends[last - 1])
            following, first = window(low), 0
        parts.append(current.part(0, last))
        count += last
        current = following.part(first, len(following))
        if max_tokens is not None and count >= max_tokens:
            return Tokens.joined([*parts, current.part(0, 0, cut=True)])
    return Tokens.joined([*parts, current])


def _seam(before: Tokens, after: Tokens, low: int, high: int) -> tuple[int, int | None]:
    """Where to join two windows: (index in `before`, index in `after`) of a token that both have.

    It is the common token (of equal id and position) nearest to the middle of their overlap, the characters `low:high`
    of the text. If there is no common token, it returns the index in `before` of the token at the middle, and None.
    """
    middle = (low + high) // 2
    places = np.intersect1d(before.starts[before.starts >= low], after.starts[after.starts < high])
    for place in places[np.argsort(np.abs(places - middle), kind="stable")].tolist():
        last, first = int(np.searchsorted(before.starts, place)), int(np.searchsorted(after.starts, place))
        if last and before.ids[last] == after.ids[first] and before.ends[last] == after.ends[first]:
            return last, first
    return int(np.searchsorted(before.starts, middle)), None
