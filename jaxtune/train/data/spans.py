"""Spans of text within a row: those that are never trained on, and those that only a template should write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtune.train.data.formats import RowError
from jaxtune.train.data.markers import special_ids
from jaxtune.train.data.tokenizing import Tokens


def special_texts(tokenizer: Any, markers: Sequence[str | None] = ()) -> re.Pattern[str] | None:
    """A pattern of what makes a turn when it stands in a row's own text: the special tokens, and the marker strings
    (without the white space around them). None where there is nothing of the kind."""
    found = {str(tokenizer.convert_ids_to_tokens(index)) for index in special_ids(tokenizer)}
    found |= {marker.strip() for marker in markers if marker is not None}
    longest_first = sorted(filter(None, found), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def refuse_left_out(turns: Sequence[Mapping[str, Any]], last_only: bool) -> None:
    """Raises RowError where one of the answers in `turns`, or the last of them, is to be trained on, and the row itself
    says that it is not to be."""
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    for answer in answers[-1 if last_only else 0 :]:
        for key in ("weight", "train", "training"):  # OpenAI's, Axolotl's
            if key in answer and not answer[key]:
                raise RowError(
                    f"an answer has {key} = {answer[key]!r}: single answers of a conversation cannot be left out; give "
                    "the turns up to it as `prompt` and those after it as `completion`, or set "
                    "data.last_response_only=true"
                )


def masked_spans(
    text: str, tokens: Tokens, responses: Sequence[tuple[int, int]], pairs: Sequence[tuple[str, str]]
) -> np.ndarray:
    """int64[n]: the indices of the tokens of responses that have a part in a span, its opening and closing included.

    A span begins and ends within one response. It also begins where the prompt ends with the opening, as templates
    do that ask for a thought; one that is not closed reaches to the end of its response.

    Args:
        text: of the row. tokens: its tokens.
        responses: (first, last) into the tokens, perhaps one beyond them for an EOS that the text does not have.
        pairs: (opening, closing).
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
    # The prompt's last white space is not the opening's: "<think>\n" stands before a response that is a thought.
    before = text[max(low - len(opening) - 16, 0) : low].rstrip()
    at = low if before.endswith(opening) else text.find(opening, low, high)
    while at >= 0:
        inside = at if at == low and before.endswith(opening) else at + len(opening)
        close = text.find(closing, inside, high)
        end = high if close < 0 else close + len(closing)
        yield at, end
        before = ""
        at = text.find(opening, end, high)
