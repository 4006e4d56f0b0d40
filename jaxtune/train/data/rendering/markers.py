"""Finds responses by marker strings, with the rules of Unsloth's `train_on_responses_only`.

They work on token ids, so also on rows tokenised elsewhere. A marker is found by its core, the tokens that are the same
in every context; tokens at its edges may merge with their neighbours.

Token ids do not show who wrote them: a user's "<|im_start|>assistant" would begin a response, as in Unsloth and TRL's
completion collator. So markers decide only for conversations whose own text has no special token or marker; for others
the template does, with a warning, or the row is bad. Rendered text is not checked.
"""

from __future__ import annotations

import numpy as np

from jaxtune.conversations.tokenizing import Tokenizer, special_ids

# Texts that are put before and after a marker to learn which of its tokens are the same in all contexts.
_BEFORE_SPACE = ("a", ".", "1", '"', "\n")
_BEFORE_TEXT = ("\n", "\n\n", "a")
_AFTER_SPACE = ("a", "A", "1", " a", "\n", '"', "é")
_AFTER_TEXT = ("\n", "\n\n", "\nA", " a", " A", "a", "1")


class _Marker:
    """A marker as token ids: the longest run that is common to several contexts is the core. ValueError if it is empty.

    core: int32[n].
    lead, trail: the text before and after the core as raw pieces; "" if always merged with neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, key: str):
        if not text or not text.strip():
            raise ValueError(f"data.{key} is empty: give the string that begins such a turn")
        contexts = [
            (before, after)
            for before in (_BEFORE_SPACE if text[0].isspace() else _BEFORE_TEXT)
            for after in (_AFTER_SPACE if text[-1].isspace() else _AFTER_TEXT)
        ]
        encoded = []  # for each context: (start, end, id) of the tokens that are entirely inside the marker
        for before, after in contexts:
            output = tokenizer(before + text + after, add_special_tokens=False, return_offsets_mapping=True)
            low, high = len(before), len(before) + len(text)
            tokens = zip(output["offset_mapping"], output["input_ids"], strict=True)
            encoded.append([(a - low, b - low, i) for (a, b), i in tokens if low <= a and b <= high])
        stable = set(encoded[0]).intersection(*encoded[1:])
        run = max(_runs([token for token in encoded[0] if token in stable], encoded[0]), key=len, default=[])
        if not run or not text[run[0][0] : run[-1][1]].strip():
            raise ValueError(
                f"data.{key}={text!r} has no token that is the same in every context; give a longer marker, "
                "with the line breaks and special tokens around it"
            )
        self.text = text
        self.core = np.array([token[2] for token in run], np.int32)
        start, end = run[0][0], run[-1][1]
        self.lead = self._edge(tokenizer, encoded, 0, start)
        self.trail = self._edge(tokenizer, encoded, end, len(text))

    @staticmethod
    def _edge(tokenizer: Tokenizer, encoded: list[list[tuple[int, int, int]]], start: int, end: int) -> str:
        """The raw pieces of the marker's characters start:end in the first context whose tokens cover exactly these;
        else "".
        """
        for tokens in encoded:
            inside = [token for token in tokens if start <= token[0] and token[1] <= end and token[0] < token[1]]
            if inside and inside[0][0] == start and inside[-1][1] == end:
                return "".join(tokenizer.convert_ids_to_tokens([token[2] for token in inside]))
        return ""

    def find(self, tokens: np.ndarray) -> np.ndarray:
        return _find(tokens, self.core)


def _find(tokens: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """int64[n]: indices where `sequence` (not empty) begins in `tokens`."""
    starts = np.flatnonzero(tokens[: max(len(tokens) - len(sequence) + 1, 0)] == sequence[0])
    for shift in range(1, len(sequence)):
        starts = starts[tokens[starts + shift] == sequence[shift]]
    return starts


def _spellings(tokenizer: Tokenizer, text: str, key: str) -> list[_Marker]:
    """The marker, and the marker after a space ("hi ASSISTANT:") if its core differs. ValueError as `_Marker`."""
    plain = _Marker(tokenizer, text, key)
    if text[0].isspace():
        return [plain]
    try:
        spaced = _Marker(tokenizer, " " + text, key)
    except ValueError:
        return [plain]
    has_plain = len(_find(spaced.core, plain.core)) > 0
    return [plain] if has_plain else [plain, spaced]


def _runs(
    stable_tokens: list[tuple[int, int, int]], tokens: list[tuple[int, int, int]]
) -> list[list[tuple[int, int, int]]]:
    """`stable_tokens` divided into runs (start, end, id) that are consecutive in `tokens`."""
    stable_set, runs = set(stable_tokens), [[]]
    for token in tokens:
        if token in stable_set:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return runs


def _is_blank(pieces: str) -> bool:
    """Whether raw pieces of byte-level BPE or SentencePiece are only white space."""
    return not pieces.replace("<0x0A>", "").strip("ĠĊĉč▁ \t\n\r")


class Markers:
    r"""Finds responses by the strings that begin a user's turn and a response, such as "<|im_start|>user\n".

    Raises ValueError for a missing or empty marker, or one without a token that is the same in every context.
    """

    def __init__(self, tokenizer: Tokenizer, instruction_part: str | None, response_part: str | None):
        if instruction_part is None or response_part is None:
            missing = "instruction_part" if instruction_part is None else "response_part"
            raise ValueError(f"data.{missing} is missing: markers come in pairs, give both or neither")
        self.tokenizer = tokenizer
        self.instructions = _spellings(tokenizer, instruction_part, "instruction_part")
        self.responses = _spellings(tokenizer, response_part, "response_part")
        self.opener = self._shared_special_prefix(instruction_part, response_part)

    def _shared_special_prefix(self, instruction_part: str, response_part: str) -> np.ndarray:
        """int32[n]: special tokens with which both markers begin. They open other roles' turns too, and so end a
        response.
        """
        special = special_ids(self.tokenizer)
        marker_texts = (instruction_part, response_part)
        marker_ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in marker_texts]
        shared = []
        for first, second in zip(*marker_ids, strict=False):
            if first != second or first not in special:
                break
            shared.append(first)
        return np.array(shared, np.int32)

    def spans(self, tokens: np.ndarray, whole_turns: bool = False) -> list[tuple[int, int]]:
        """(start, end) token ranges of the responses in `tokens` (int32[n]), in order, none empty.

        whole_turns: responses end before the next instruction marker, as in Unsloth. Else they end at the first of: an
        EOS (included), a BOS that is no EOS, the markers' common special prefix, any marker.
        """
        tokens = np.asarray(tokens, np.int32)
        starts = {
            self._after(tokens, int(index) + len(marker.core), marker.trail)
            for marker in self.responses
            for index in marker.find(tokens)
        }
        if not starts:
            return []
        stops = [len(tokens)]
        for marker in self.instructions if whole_turns else (*self.responses, *self.instructions):
            stops += [self._before(tokens, int(index), marker.lead) for index in marker.find(tokens)]
        if whole_turns:
            turns: list[tuple[int, int]] = []
            for start in sorted(starts):
                if not turns or start >= turns[-1][1]:
                    turns.append((start, min(stop for stop in stops if stop >= start)))
            return [(start, end) for start, end in turns if start < end]
        if len(self.opener):
            stops += _find(tokens, self.opener).tolist()
        if self.tokenizer.bos_token_id is not None and self.tokenizer.bos_token_id != self.tokenizer.eos_token_id:
            stops += np.flatnonzero(tokens == self.tokenizer.bos_token_id).tolist()
        if self.tokenizer.eos_token_id is not None:
            stops += (np.flatnonzero(tokens == self.tokenizer.eos_token_id) + 1).tolist()
        ordered = np.array(sorted(stops))
        spans = [(start, int(ordered[np.searchsorted(ordered, start)])) for start in sorted(starts)]
        return [(start, end) for start, end in spans if start < end]

    def _after(self, tokens: np.ndarray, index: int, trail: str) -> int:
        """The index after a marker whose core ends before `index`, with as much of its tail, raw pieces `trail`, as
        follows.
        """
        remaining_trail = trail
        while remaining_trail and index < len(tokens):
            piece = self.tokenizer.convert_ids_to_tokens(int(tokens[index]))
            if piece.startswith(remaining_trail) and (_is_blank(piece) or not _is_blank(remaining_trail)):
                return index + 1
            if not remaining_trail.startswith(piece):
                break
            remaining_trail = remaining_trail[len(piece) :]
            index += 1
        return index

    def _before(self, tokens: np.ndarray, index: int, lead: str) -> int:
        """The index where a marker begins whose core begins at `index`, with as much of its head,
        `lead`, as precedes.
        """
        remaining_lead = lead
        while remaining_lead and index > 0:
            piece = self.tokenizer.convert_ids_to_tokens(int(tokens[index - 1]))
            if not remaining_lead.endswith(piece):
                break
            remaining_lead = remaining_lead[: -len(piece)]
            index -= 1
        return index
