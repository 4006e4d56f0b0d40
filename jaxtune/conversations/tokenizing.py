"""Tokenises texts and records the position of each token, at a cost that grows linearly with the length of a text.

A text longer than a window (65,536 characters) is tokenised window by window. Neighbouring windows overlap, and are
joined at a token that both have at the same position, away from the edges of both. There they agree with the text
tokenised as a whole. The exception is a stretch of repeated text that is longer than the overlap: its tokens may begin
at another character of the repeated unit than in the text tokenised as a whole.
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
    """The tokens of a text, with their positions in it. The positions say which tokens are of a prompt and which are of
    a response, so that the loss counts only the latter."""

    ids: np.ndarray
    """int32[n]: token ids."""
    starts: np.ndarray
    """int64[n]: the index in the text of each token's first character."""
    ends: np.ndarray
    """int64[n]: the index in the text after each token's last character."""
    cut: bool = False
    """True: the tokens are of the beginning of the text only, because tokenising stopped at `max_tokens`. False: of all
    of it."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.ids)

    def part(self, first: int, last: int, shift: int = 0, cut: bool = False) -> Tokens:
        """Returns the tokens with the indices first to last - 1. shift: the number of characters that is added to their
        positions, which makes positions in a window into positions in the whole text. cut: the value of `cut` in the
        result."""
        at = slice(first, last)
        return Tokens(self.ids[at], self.starts[at] + shift, self.ends[at] + shift, cut)

    @classmethod
    def joined(cls, parts: list[Tokens]) -> Tokens:
        """Joins `parts`, the tokens of consecutive windows or pieces of a text, whose positions are counted from the
        beginning of the whole text: returns the tokens of that text. Its `cut` is that of the last part."""
        fields = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "starts", "ends"))
        return cls(*fields, cut=parts[-1].cut)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the special tokens of a Hugging Face tokenizer: its added tokens that are marked so, and EOS etc."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the special tokens that may end a turn: all but BOS and UNK, and EOS."""
    ends = special_ids(tokenizer) - {tokenizer.bos_token_id, tokenizer.unk_token_id}
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The token ids that the tokenizer puts before a text, such as BOS."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], list(tokenizer("a")["input_ids"])
    starts = (at for at in range(len(whole)) if plain and whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def with_beginning(tokenizer: Tokenizer, ids: Sequence[int], begins: Sequence[int] | None = None) -> list[int]:
    """Token ids of a text with what the tokenizer puts before a text, once, whether or not the text has it.

    Args:
        begins: what `beginning` says of the tokenizer; None asks it.
    """
    ids, bos = list(ids), tokenizer.bos_token_id
    begins = beginning(tokenizer) if begins is None else begins
    leading = next((place for place, token in enumerate(ids) if token != bos), len(ids))
    if leading:
        return ids[leading - 1 :]
    return ids if not begins or ids[:1] == list(begins[:1]) else [*begins, *ids]


def tokenize(tokenizer: Tokenizer, texts: list[str], max_tokens: int | None = None) -> list[Tokens]:
    """The tokens of each text, in order, with their positions in it, without the special tokens that a tokenizer adds
    around a text. `RowEncoder` tokenises rows and prompts by it, and adds BOS and EOS itself where they belong. A text
    of more than `WINDOW` characters is tokenised window by window, whatever `max_tokens` is, so that the time grows
    linearly with its length.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        texts: any number of texts of any length.
        max_tokens: tokenising a text stops after the window with which there are at least this many tokens, because
            data.overflow=truncate cuts off the rest; the result's `cut` is then True, if text is left. None never
            stops. A text of a single window is never cut.
    """
    short = iter(_at_once(tokenizer, [text for text in texts if len(text) <= WINDOW]))
    return [next(short) if len(text) <= WINDOW else _in_windows(tokenizer, text, max_tokens) for text in texts]


def tokenize_pieces(tokenizer: Tokenizer, text: str, cuts: Sequence[int], max_tokens: int | None = None) -> Tokens:
    """The tokens of a text, none of which extends over one of the positions `cuts`; decoded, they are the text.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        text: the text.
        cuts: indices of characters, in ascending order; each is the first character of a piece.
        max_tokens: tokenising stops after the piece with which there are at least this many tokens, and the result's
            `cut` is then True if text is left. None never stops.
    """
    pieces, count = [], 0
    for low, high in itertools.pairwise([0, *cuts, len(text)]):
        words = text[low:high]
        piece = _later(tokenizer, words, max_tokens) if low else tokenize(tokenizer, [words], max_tokens)[0]
        count += len(piece)
        full = max_tokens is not None and count >= max_tokens and high < len(text)
        pieces.append(piece.part(0, len(piece), low, cut=piece.cut or full))
        if pieces[-1].cut:
            break
    return Tokens.joined(pieces)


# Texts before a piece with whose first characters none of their tokens merges; which do differs between tokenizers.
_ANCHORS = ("\n", "a", ".", "1", "\n.", "é")


def _later(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> Tokens:
    """The tokens of a text that follows another one: without the space that SentencePiece puts before a text."""
    if text and _adds_space(tokenizer):
        for anchor in _ANCHORS:
            whole = tokenize(tokenizer, [anchor + text], max_tokens)[0]
            first = int(np.searchsorted(whole.starts, len(anchor)))
            if first < len(whole) and whole.starts[first] == len(anchor) and np.all(whole.ends[:first] <= len(anchor)):
                return whole.part(first, len(whole), -len(anchor), whole.cut)
    return tokenize(tokenizer, [text], max_tokens)[0]


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and str(tokenizer.convert_ids_to_tokens(ids[0])).startswith(("\u2581", "\u0120"))


def _at_once(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    """The tokens of each of `texts`, with their positions, by one call of `tokenizer`, a fast Hugging Face one, without
    windows and without the special tokens (such as BOS) that it adds around a text; [] without texts. `tokenize` calls
    it for all texts of a single window, and `_in_windows` for each window of a long one."""
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
    """The tokens of a `text` of more than `WINDOW` characters, tokenised by `tokenizer` window by window, because the
    time for a text as a whole may grow faster than its length. max_tokens: tokenising stops once there are at least
    this many tokens, and the result's `cut` is then True, if text is left; None never stops."""

    def window(low: int) -> Tokens:
        """The tokens of the window that begins at character `low`, with positions in the whole text."""
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
            following, first = _later(tokenizer, text[low : low + WINDOW]), 0
            following = following.part(0, len(following), low)
        parts.append(current.part(0, last))
        count += last
        current = following.part(first, len(following))
        if max_tokens is not None and count >= max_tokens:
            return Tokens.joined([*parts, current.part(0, 0, cut=True)])
    return Tokens.joined([*parts, current])


def _seam(before: Tokens, after: Tokens, low: int, high: int) -> tuple[int, int | None]:
    """Where to join two overlapping windows of a text: (index in `before`, index in `after`) of a token that both have.
    `_in_windows` joins them there. The tokens of `before` are used up to that index, and those of `after` from it on.

    Args:
        before, after: the tokens of a window and of the next one, with positions in the whole text.
        low, high: the overlap of the windows is the characters low to high - 1 of the text.
    Returns:
        the indices of the common token (of equal id and position) that is nearest to the middle of the overlap. If
            there is no common token: the index of the first token of `before` that begins at or after the middle, or
            their number if none does, and None; the caller then makes the next window anew from there.
    """
    middle = (low + high) // 2
    places = np.intersect1d(before.starts[before.starts >= low], after.starts[after.starts < high])
    for place in places[np.argsort(np.abs(places - middle), kind="stable")].tolist():
        last, first = int(np.searchsorted(before.starts, place)), int(np.searchsorted(after.starts, place))
        if last and before.ids[last] == after.ids[first] and before.ends[last] == after.ends[first]:
            return last, first
    return int(np.searchsorted(before.starts, middle)), None
