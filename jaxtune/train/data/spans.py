"""Parts of a row's text that need care: special tokens and markers in the text itself (`special_texts`), answers and
spans that the row says are not to be trained on, and those of data.mask_spans (`masked_spans`)."""

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
    """A pattern that matches the texts that only a template should write, because they open or end turns: the special
    tokens of `tokenizer`, a Hugging Face one, and the strings in `markers` without white space around them (None is no
    marker). `RowEncoder` searches a row's messages and tools for them, for a warning and to see whether markers can be
    trusted. `Conversations` searches what stands of the generation prompt before a response for them: if it has one,
    the response begins after it. Returns None if there are no such texts."""
    found = {str(tokenizer.convert_ids_to_tokens(index)) for index in special_ids(tokenizer)}
    found |= {marker.strip() for marker in markers if marker is not None}
    longest_first = sorted(filter(None, found), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def is_marked(messages: Sequence[Message]) -> bool:
    """Whether messages say of an answer, or of a part of one, that it is not trained on."""
    return any(not message.get("train", True) or "train_detail" in message for message in messages)


def refuse_marked_questions(messages: Sequence[Message]) -> None:
    """Raises `RowError` if a turn that is no answer is not to be trained on: for data.train_on=all."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and not message.get("train", True):
            raise RowError(
                f"messages[{index}], of the role {message['role']}, is marked as not to be trained on, and "
                "data.train_on=all trains on it: set data.train_on=responses, or leave the mark out"
            )


def untrained_spans(message: Message) -> list[tuple[int, int]]:
    """The (start, end) character ranges of a message's content that it says are not trained on."""
    details = message.get("train_detail")
    if details is None:
        return []
    trained = [(span["begin_offset"], span["end_offset"] + 1) for span in details if span["train"]]
    forbidden = [(span["begin_offset"], span["end_offset"] + 1) for span in details if not span["train"]]
    gaps, at = [], 0
    for low, high in trained:
        gaps.append((at, low))
        at = max(at, high)
    gaps.append((at, len(message["content"])))
    return [(low, high) for low, high in [*gaps, *forbidden] if low < high]


def within(tokens: Tokens, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool[n]: the tokens of which a character is in one of the (start, end) ranges of the text."""
    inside = np.zeros(len(tokens), bool)
    for low, high in ranges:
        inside |= (tokens.starts < high) & (tokens.ends > low)
    return inside


def masked_spans(
    text: str, tokens: Tokens, responses: Sequence[tuple[int, int]], pairs: Sequence[tuple[str, str]]
) -> np.ndarray:
    """The indices of the tokens that data.mask_spans excludes from training, int64[n], in ascending order: `RowEncoder`
    takes them out of the mask.

    A span goes from an opening to the next closing, both included, within one response. If the prompt ends with the
    opening, as with templates that ask for a thought, the response begins within a span. There up to 16 characters of
    white space may follow the opening, and an opening that itself ends with white space is not recognised. A span
    without a closing reaches to the end of its response. A token is excluded if any character of it is in a span.

    Args:
        text: the text of the row.
        tokens: the tokens of that text.
        responses: the (start, end) token ranges of its responses. An end may be one beyond the tokens, for an EOS that
            was appended.
        pairs: the (opening, closing) texts.
    """
    found = [np.zeros(0, np.int64)]
    if not pairs:
        return found[0]
    for first, last in responses:
        last = min(last, len(tokens))
        if first >= last:
            continue
        low, high = int(tokens.starts[first]), int(tokens.ends[last - 1])
        starts, ends = tokens.starts[first:last], tokens.ends[first:last]
        for opening, closing in pairs:
            for begin, end in _spans(text, low, high, opening, closing):
                found.append(first + np.flatnonzero((starts < end) & (ends > begin)))
    return np.unique(np.concatenate(found))


def _spans(text: str, low: int, high: int, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Yields the (start, end) character ranges, as indices of `text`, of the spans that are not trained on in the
    response `text[low:high]`: from each `opening` to the next `closing`, both included, or to the end of the response
    if there is no `closing`. `masked_spans` calls it for each pair of texts. A response begins within a span if the
    prompt before it ends with `opening` and at most 16 characters of white space after it; an `opening` that itself
    ends with white space is not recognised there."""
    # White space at the end of the prompt is not part of the opening: "<think>\n" comes before a thought.
    before = text[max(low - len(opening) - 16, 0) : low].rstrip()
    at = low if before.endswith(opening) else text.find(opening, low, high)
    while at >= 0:
        inside = at if at == low and before.endswith(opening) else at + len(opening)
        close = text.find(closing, inside, high)
        end = high if close < 0 else close + len(closing)
        yield at, end
        before = ""
        at = text.find(opening, end, high)
