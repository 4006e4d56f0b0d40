"""Parts of a row's text that are not trained on, and special tokens that the row's own text contains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxtune.conversations.messages import Message
from jaxtune.conversations.tokenizing import Tokens
from jaxtune.train.data.markers import special_ids
from jaxtune.train.data.row_errors import RowError


def special_texts(tokenizer: Any, markers: Sequence[str | None] = ()) -> re.Pattern[str] | None:
    """A pattern of the texts that only a template should write: special tokens, and `markers` stripped of white space
    (None is skipped). None if there are none.
    """
    texts = {str(tokenizer.convert_ids_to_tokens(index)) for index in special_ids(tokenizer)}
    texts |= {marker.strip() for marker in markers if marker is not None}
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def is_marked(messages: Sequence[Message]) -> bool:
    """Whether an answer, or a part of one, is marked as not to be trained on."""
    return any(not message.get("train", True) or "train_detail" in message for message in messages)


def refuse_marked_questions(messages: Sequence[Message]) -> None:
    """Raises RowError if another turn than an answer is marked as not to be trained on, for data.train_on=all."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and not message.get("train", True):
            raise RowError(
                f"messages[{index}], of the role {message['role']}, is marked as not to be trained on, and "
                "data.train_on=all trains on it: set data.train_on=responses, or leave the mark out"
            )


def untrained_spans(message: Message) -> list[tuple[int, int]]:
    """(start, end) character ranges of a message's content that its marks exclude from training."""
    details = message.get("train_detail")
    if details is None:
        return []
    trained = [(span["begin_offset"], span["end_offset"] + 1) for span in details if span["train"]]
    forbidden = [(span["begin_offset"], span["end_offset"] + 1) for span in details if not span["train"]]
    gaps, gap_start = [], 0
    for low, high in trained:
        gaps.append((gap_start, low))
        gap_start = max(gap_start, high)
    gaps.append((gap_start, len(message["content"])))
    return [(low, high) for low, high in [*gaps, *forbidden] if low < high]


def within(tokens: Tokens, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool[n]: tokens with a character in one of the (start, end) ranges."""
    inside = np.zeros(len(tokens), bool)
    for low, high in ranges:
        inside |= (tokens.starts < high) & (tokens.ends > low)
    return inside


def masked_spans(
    text: str, tokens: Tokens, responses: Sequence[tuple[int, int]], pairs: Sequence[tuple[str, str]]
) -> np.ndarray:
    """int64[n]: ascending indices of tokens with a character in a span that data.mask_spans excludes.

    A span goes from an opening to the next closing, both included, or to the response's end. If the prompt ends with
    the opening and at most 16 characters of white space, the response begins within a span; an opening that ends with
    white space is not recognised there.

      responses: (start, end) token ranges; an end may be one beyond the tokens, for an appended EOS.
      pairs: (opening, closing) texts.
    """
    index_arrays = [np.zeros(0, np.int64)]
    if not pairs:
        return index_arrays[0]
    for first, last in responses:
        last = min(last, len(tokens))
        if first >= last:
            continue
        low, high = int(tokens.starts[first]), int(tokens.ends[last - 1])
        starts, ends = tokens.starts[first:last], tokens.ends[first:last]
        for opening, closing in pairs:
            for begin, end in _spans(text, low, high, opening, closing):
                index_arrays.append(first + np.flatnonzero((starts < end) & (ends > begin)))
    return np.unique(np.concatenate(index_arrays))


def _spans(text: str, low: int, high: int, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """(start, end) character ranges in `text` of the spans in the response text[low:high]; see `masked_spans`."""
    # White space at the end of the prompt is not part of the opening: "<think>\n" comes before a thought.
    before = text[max(low - len(opening) - 16, 0) : low].rstrip()
    start = low if before.endswith(opening) else text.find(opening, low, high)
    while start >= 0:
        inside = start if start == low and before.endswith(opening) else start + len(opening)
        close = text.find(closing, inside, high)
        end = high if close < 0 else close + len(closing)
        yield start, end
        before = ""
        start = text.find(opening, end, high)
