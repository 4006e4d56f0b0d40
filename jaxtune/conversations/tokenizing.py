"""Tokenises texts with the position of each token, in time linear in their length.

A longer text than a window (65,536 characters) goes window by window. Neighbours overlap and are joined at a common
token near the overlap's middle, so tokens equal those of the whole text, except in repeated text longer than the
overlap.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

type Tokenizer = Any  # of transformers, mostly a fast one

WINDOW = 65_536  # characters of a window
OVERLAP = 2_048  # characters that a window shares with the next one


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a text with their positions, which tell prompt from response."""

    ids: np.ndarray
    """int32[n]"""
    starts: np.ndarray
    """int64[n]: index of each token's first character."""
    ends: np.ndarray
    """int64[n]: index after each token's last character."""
    is_cut: bool = False
    """Whether tokenising stopped at `max_tokens` before the text's end."""

    def __len__(self) -> int:
        return len(self.ids)

    def section(self, first: int, last: int, shift: int = 0, cut: bool = False) -> Tokens:
        """Some of the tokens.

        first, last: the tokens first to last - 1.
        shift: characters that are added to their positions.
        cut: the result's `is_cut`.
        """
        selected = slice(first, last)
        return Tokens(self.ids[selected], self.starts[selected] + shift, self.ends[selected] + shift, cut)

    @classmethod
    def joined(cls, pieces: list[Tokens]) -> Tokens:
        """The tokens of consecutive pieces with positions in the whole text."""
        fields = (np.concatenate([getattr(tokens, name) for tokens in pieces]) for name in ("ids", "starts", "ends"))
        return cls(*fields, is_cut=pieces[-1].is_cut)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of a Hugging Face tokenizer's special tokens, added ones included."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a token's exact text; None if the tokenizer has no such token."""
    index = tokenizer.convert_tokens_to_ids(text)
    return index if isinstance(index, int) and tokenizer.convert_ids_to_tokens(index) == text else None


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the special tokens that may end a turn: all but BOS and UNK, and EOS."""
    ends = special_ids(tokenizer) - {tokenizer.bos_token_id, tokenizer.unk_token_id}
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text, such as BOS."""
    plain, with_special = tokenizer("a", add_special_tokens=False)["input_ids"], list(tokenizer("a")["input_ids"])
    starts = (
        offset for offset in range(len(with_special)) if plain and with_special[offset : offset + len(plain)] == plain
    )
    return with_special[: next(starts, 0)]


def with_beginning(tokenizer: Tokenizer, ids: Sequence[int], begins: Sequence[int] | None = None) -> list[int]:
    """Token ids with the tokenizer's beginning once, whether they have it or not.

    tokenizer: of the model.
    ids: of the text.
    begins: what `beginning` returned for the tokenizer; None: it is asked.
    """
    ids, bos = list(ids), tokenizer.bos_token_id
    begins = beginning(tokenizer) if begins is None else begins
    leading = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    if leading:
        return ids[leading - 1 :]
    return ids if not begins or ids[:1] == list(begins[:1]) else [*begins, *ids]


def tokenize(tokenizer: Tokenizer, texts: list[str], max_tokens: int | None = None) -> list[Tokens]:
    """The tokens of each text, without special tokens around it.

    tokenizer: a fast Hugging Face tokenizer.
    texts: each is tokenised alone.
    max_tokens: a longer text stops after the window that reaches it, with `is_cut` True if text is left.
    """
    short = iter(_at_once(tokenizer, [text for text in texts if len(text) <= WINDOW]))
    return [next(short) if len(text) <= WINDOW else _in_windows(tokenizer, text, max_tokens) for text in texts]


def tokenize_pieces(tokenizer: Tokenizer, text: str, cuts: Sequence[int], max_tokens: int | None = None) -> Tokens:
    """The tokens of a text, none across a position in `cuts` (ascending character indices).

    tokenizer: a fast one.
    text: may contain special tokens, which are read as such.
    max_tokens: stops after the piece that reaches it, with `is_cut` True if text is left.
    """
    pieces, count = [], 0
    for low, high in itertools.pairwise([0, *cuts, len(text)]):
        words = text[low:high]
        piece = _later(tokenizer, words, max_tokens) if low else tokenize(tokenizer, [words], max_tokens)[0]
        count += len(piece)
        full = max_tokens is not None and count >= max_tokens and high < len(text)
        pieces.append(piece.section(0, len(piece), low, cut=piece.is_cut or full))
        if pieces[-1].is_cut:
            break
    return Tokens.joined(pieces)


# Texts before a piece with whose first characters none of their tokens merges; which do differs between tokenizers.
_ANCHORS = ("\n", "a", ".", "1", "\n.", "é")


def _later(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> Tokens:
    """The tokens of a text that follows another: without the space that SentencePiece puts first."""
    if text and _adds_space(tokenizer):
        for anchor in _ANCHORS:
            anchored = tokenize(tokenizer, [anchor + text], max_tokens)[0]
            first = int(np.searchsorted(anchored.starts, len(anchor)))
            if (
                first < len(anchored)
                and anchored.starts[first] == len(anchor)
                and np.all(anchored.ends[:first] <= len(anchor))
            ):
                return anchored.section(first, len(anchored), -len(anchor), anchored.is_cut)
    return tokenize(tokenizer, [text], max_tokens)[0]


def _adds_space(tokenizer: Tokenizer) -> bool:
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith(("\u2581", "\u0120"))


def _at_once(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    """The tokens of each text by one call, without windows and special tokens."""
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


def _in_windows(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> Tokens:
    """The tokens of a long text by windows that overlap, until there are max_tokens."""

    def window(low: int) -> Tokens:
        tokens = _at_once(tokenizer, [text[low : low + WINDOW]])[0]
        return tokens.section(0, len(tokens), low)

    pieces, count = [], 0
    low, current = 0, window(0)
    while (high := low + WINDOW) < len(text):
        low = high - OVERLAP
        following = window(low)
        last, first = _seam(current, following, low, high)
        if first is None:  # no token in common: the next window begins after the last token used of this one
            last = min(max(last, 1), len(current))
            low = int(current.ends[last - 1])
            following, first = _later(tokenizer, text[low : low + WINDOW]), 0
            following = following.section(0, len(following), low)
        pieces.append(current.section(0, last))
        count += last
        current = following.section(first, len(following))
        if max_tokens is not None and count >= max_tokens:
            return Tokens.joined([*pieces, current.section(0, 0, cut=True)])
    return Tokens.joined([*pieces, current])


def _seam(before: Tokens, after: Tokens, low: int, high: int) -> tuple[int, int | None]:
    """(Index in `before`, in `after`) of the common token nearest to the overlap's middle; None:
    make the window anew.
    """
    middle = (low + high) // 2
    common_starts = np.intersect1d(before.starts[before.starts >= low], after.starts[after.starts < high])
    for start in common_starts[np.argsort(np.abs(common_starts - middle), kind="stable")].tolist():
        last, first = int(np.searchsorted(before.starts, start)), int(np.searchsorted(after.starts, start))
        if last and before.ids[last] == after.ids[first] and before.ends[last] == after.ends[first]:
            return last, first
    return int(np.searchsorted(before.starts, middle)), None
