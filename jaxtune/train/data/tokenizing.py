"""Text to tokens, and where in the text they lie, at a cost that grows with the text's length and no faster.

A text longer than a window is tokenised window by window. Neighbouring windows overlap, and are joined where both
have the same token at the same place, away from the edges of both: there they agree with the text tokenised whole.
(But for a repetition longer than the overlap, whose tokens may then begin at another of its periods.)
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

WINDOW = 65_536  # characters
OVERLAP = 2_048


@dataclasses.dataclass(frozen=True)
class Tokens:
    """`ids` int32[n], and where in the text each begins and ends: `starts`, `ends` int64[n], in characters.

    cut: whether they stop before the text does, as there are enough of them.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    cut: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, first: int, last: int, shift: int = 0, cut: bool = False) -> Tokens:
        """Tokens `first:last`, `shift` characters further on."""
        at = slice(first, last)
        return Tokens(self.ids[at], self.starts[at] + shift, self.ends[at] + shift, cut)

    @classmethod
    def joined(cls, parts: list[Tokens]) -> Tokens:
        fields = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "starts", "ends"))
        return cls(*fields, cut=parts[-1].cut)


def tokenize(tokenizer: Any, texts: list[str], most: int | None = None) -> list[Tokens]:
    """The tokens of each text, without any that a tokenizer adds around it.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        texts: any number, of any length.
        most: stop once there are so many tokens of a text; None never stops. Texts of one window are never cut.
    """
    short = iter(_at_once(tokenizer, [text for text in texts if len(text) <= WINDOW]))
    return [next(short) if len(text) <= WINDOW else _in_windows(tokenizer, text, most) for text in texts]


def tokenize_pieces(tokenizer: Any, text: str, cuts: list[int], most: int | None = None) -> Tokens:
    """The tokens of a text of which no token lies across the places `cuts`, in ascending order."""
    pieces, count = [], 0
    for low, high in itertools.pairwise([0, *cuts, len(text)]):
        piece = tokenize(tokenizer, [text[low:high]], most)[0]
        count += len(piece)
        full = most is not None and count >= most and high < len(text)
        pieces.append(piece.part(0, len(piece), low, cut=piece.cut or full))
        if pieces[-1].cut:
            break
    return Tokens.joined(pieces)


def _at_once(tokenizer: Any, texts: list[str]) -> list[Tokens]:
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


def _in_windows(tokenizer: Any, text: str, most: int | None) -> Tokens:
    def window(low: int) -> Tokens:
        tokens = _at_once(tokenizer, [text[low : low + WINDOW]])[0]
        return tokens.part(0, len(tokens), low)

    parts, count = [], 0
    low, current = 0, window(0)
    while (high := low + WINDOW) < len(text):
        low = high - OVERLAP
        following = window(low)
        last, first = _seam(current, following, low, high)
        if first is None:  # no token in common: the next window begins where this one is left
            last = min(max(last, 1), len(current))
            low = int(current.ends[last - 1])
            following, first = window(low), 0
        parts.append(current.part(0, last))
        count += last
        current = following.part(first, len(following))
        if most is not None and count >= most:
            return Tokens.joined([*parts, current.part(0, 0, cut=True)])
    return Tokens.joined([*parts, current])


def _seam(before: Tokens, after: Tokens, low: int, high: int) -> tuple[int, int | None]:
    """(index into `before`, index into `after`) of the token that both windows have, the one nearest to the middle of
    their overlap `low:high`; where there is none, the index of the token of `before` at the middle, and None."""
    middle = (low + high) // 2
    places = np.intersect1d(before.starts[before.starts >= low], after.starts[after.starts < high])
    for place in places[np.argsort(np.abs(places - middle), kind="stable")].tolist():
        last, first = int(np.searchsorted(before.starts, place)), int(np.searchsorted(after.starts, place))
        if last and before.ids[last] == after.ids[first] and before.ends[last] == after.ends[first]:
            return last, first
    return int(np.searchsorted(before.starts, middle)), None
