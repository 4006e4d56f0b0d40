"""Finds responses by marker strings (`Markers`): a response is the tokens from a response marker to the end of that
turn. `templates.RowEncoder` decides by it what is trained on, if data.response_part is set.

The rules are those of Unsloth's `train_on_responses_only`. They work on token ids, so they also apply to rows that were
tokenised elsewhere. A marker is found by its stable core, the tokens that are the same whatever text is next to the
marker. The tokens at its edges may merge with their neighbours, and are optional.

Token ids do not show who wrote them. If a user types "<|im_start|>assistant" into a message, a search for markers takes
that for the begin of a response, as it does in Unsloth and in TRL's older collator for completions. TRL's
assistant-only loss (the template's `{% generation %}` marks) and Axolotl (turns rendered one by one) are not misled,
but like everything that renders a conversation to one text, they let the model read the typed text as a control token.
Tokenizers that encode each message separately (torchtune, mistral-common) make it plain text. Here, markers are used
for conversations whose own text has neither a special token nor a marker. For the others, the template's turns decide
and the row is counted in a warning; if the template cannot show the responses either, the row is bad
(`templates.RowEncoder`). Rows of text that is already rendered are not checked.
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
    """A marker string as token ids, which `find` searches for in the tokens of a row. `Markers` makes it by tokenising
    the marker between several texts and keeping the longest run of tokens that it has in all of them.

    Attributes:
        text: the marker.
        core: int32[n], the longest run of tokens of the marker that are the same whatever text is next to it.
        lead, trail: the marker's head and tail, the text before and after the core, as the tokenizer's raw pieces
            (token strings); "" if there is none, or if it is merged with its neighbours in every context. In real text
            these tokens may be merged with their neighbours.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        text: the marker.
        key: the config key below `data` that it comes from, for error messages.

    Raises:
        ValueError: the marker is empty, or its core would be empty or only white space.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, key: str):
        """Tokenises the marker between several texts, and finds its core: the longest run of tokens that it has in all
        of them. The class describes the arguments."""
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
        """The raw pieces (token strings) of the characters `start:end` of the marker, its head or its tail, joined,
        from which `lead` and `trail` are made. The marker was tokenised between several texts, the contexts; the pieces
        are those of the first context in which whole tokens cover exactly these characters, or "" if there is none.

        Args:
            tokenizer: a fast Hugging Face tokenizer.
            encoded: for each context, the (start, end, id) of the tokens that are entirely inside the marker.
            start, end: indices of characters in the marker.
        """
        for tokens in encoded:
            inside = [token for token in tokens if start <= token[0] and token[1] <= end and token[0] < token[1]]
            if inside and inside[0][0] == start and inside[-1][1] == end:
                return "".join(tokenizer.convert_ids_to_tokens([token[2] for token in inside]))
        return ""

    def find(self, tokens: np.ndarray) -> np.ndarray:
        """int64[n]: the indices in `tokens` (a row, int32) at which the marker's core begins, the tokens that are the
        same whatever text is next to the marker. `Markers.spans` looks for the ends of the marker around each."""
        return _find(tokens, self.core)


def _find(tokens: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """int64[n]: the indices at which the sequence `wanted` (not empty) begins in `tokens`; both are int32 arrays. It
    finds the cores of markers in a row, or in another marker's core, and the special tokens that open a turn; [] if
    there are none."""
    at = np.flatnonzero(tokens[: max(len(tokens) - len(wanted) + 1, 0)] == wanted[0])
    for shift in range(1, len(wanted)):
        at = at[tokens[at + shift] == wanted[shift]]
    return at


def _spellings(tokenizer: Tokenizer, text: str, key: str) -> list[_Marker]:
    """The forms in which the marker `text` can occur in tokens, one or two: the marker itself and, if the core (the
    tokens that are the same in every context) that it has after a space does not contain its own, the marker after a
    space ("hi ASSISTANT:"). A marker that begins with white space, or has no core after a space, has one form.
    `Markers` searches for all forms.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        text: the marker.
        key: its config key below `data`, for error messages.

    Raises:
        ValueError: the marker is empty, or its own core would be empty or only white space.
    """
    plain = _Marker(tokenizer, text, key)
    if text[0].isspace():
        return [plain]
    try:
        spaced = _Marker(tokenizer, " " + text, key)
    except ValueError:
        return [plain]
    has_plain = len(_find(spaced.core, plain.core)) > 0
    return [plain] if has_plain else [plain, spaced]


def _runs(kept: list[tuple[int, int, int]], tokens: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Divides the tokens `kept`, some of `tokens`, into runs that are consecutive in `tokens`, of which the longest
    becomes a marker's core. Each token is (start, end, id): its characters in the marker, and its token id. The last
    run may be empty."""
    chosen, runs = set(kept), [[]]
    for token in tokens:
        if token in chosen:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return runs


def _is_blank(pieces: str) -> bool:
    """Whether raw pieces (token strings, joined) are only white space, which byte-level BPE writes as "Ġ", "Ċ" and so
    on, and SentencePiece as "▁" and "<0x0A>". `Markers._after` sees by it whether a token has a word of the response
    beside the marker's last white space; such a token belongs to the response."""
    return not pieces.replace("<0x0A>", "").strip("ĠĊĉč▁ \t\n\r")


class Markers:
    """Finds responses by an instruction marker and a response marker (data.instruction_part, data.response_part):
    `spans` returns their token ranges in a row. `RowEncoder` makes it if they are set.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        instruction_part: the string that begins a user's turn, such as "<|im_start|>user\\n".
        response_part: the string that begins a response, such as "<|im_start|>assistant\\n".

    Raises:
        ValueError: a marker is missing or empty, or has no token but white space that is the same whatever text is next
            to it.
    """

    def __init__(self, tokenizer: Tokenizer, instruction_part: str | None, response_part: str | None):
        """Makes the forms in which both markers can occur in tokens. The class describes the arguments."""
        if instruction_part is None or response_part is None:
            missing = "instruction_part" if instruction_part is None else "response_part"
            raise ValueError(f"data.{missing} is missing: markers come in pairs, give both or neither")
        self.tokenizer = tokenizer
        self.instructions = _spellings(tokenizer, instruction_part, "instruction_part")
        self.responses = _spellings(tokenizer, response_part, "response_part")
        self.opener = self._shared_special_prefix(instruction_part, response_part)

    def _shared_special_prefix(self, instruction_part: str, response_part: str) -> np.ndarray:
        """int32[n]: the special tokens with which the tokens of both marker texts, instruction_part and response_part,
        begin. They also open the turns of other roles, and so end a response: `Markers` keeps them as `opener`, which
        `spans` looks for. It is empty if they begin with different tokens or with none that is special."""
        special = special_ids(self.tokenizer)
        parts = (instruction_part, response_part)
        both = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        shared = []
        for first, second in zip(*both, strict=False):
            if first != second or first not in special:
                break
            shared.append(first)
        return np.array(shared, np.int32)

    def spans(self, tokens: np.ndarray, whole: bool = False) -> list[tuple[int, int]]:
        """The (start, end) token ranges of the responses in `tokens` (int32[n]), in order and without empty ones. A
        response begins after its marker.

        whole: it ends before the next instruction marker, or with the row, as in Unsloth. Else it ends at whichever
        comes first: after an EOS, which belongs to it; before a BOS (that is not EOS), the special tokens with which
        both markers begin, a response marker or an instruction marker; or at the end of the row.
        """
        tokens = np.asarray(tokens, np.int32)
        starts = {
            self._after(tokens, int(at) + len(marker.core), marker.trail)
            for marker in self.responses
            for at in marker.find(tokens)
        }
        if not starts:
            return []
        stops = [len(tokens)]
        for marker in self.instructions if whole else (*self.responses, *self.instructions):
            stops += [self._before(tokens, int(at), marker.lead) for at in marker.find(tokens)]
        if whole:
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

    def _after(self, tokens: np.ndarray, at: int, trail: str) -> int:
        """The index of the first token after a marker, at which `spans` begins a response. The marker's tail, the text
        after its core, is skipped as far as it follows there. (The core is the tokens of the marker that are the same
        whatever text is next to it.)

        A token that has the tail and more (":" and a line break) belongs to the marker, unless it is a word of the
        response that the tokenizer merged with the marker's last white space.

        Args:
          tokens: the row, int32[n].
          at: the index after the marker's core.
          trail: the marker's tail as raw pieces (token strings, joined).
        """
        rest = trail
        while rest and at < len(tokens):
            piece = self.tokenizer.convert_ids_to_tokens(int(tokens[at]))
            if piece.startswith(rest) and (_is_blank(piece) or not _is_blank(rest)):
                return at + 1
            if not rest.startswith(piece):
                break
            rest = rest[len(piece) :]
            at += 1
        return at

    def _before(self, tokens: np.ndarray, at: int, lead: str) -> int:
        """The index of the first token of a marker, at which `spans` ends a response before it. It is where the
        marker's head, the text before its core, begins, as far as the tokens before `at` are those of the head; `at` if
        the last of them is not. (The core is the tokens of the marker that are the same whatever text is next to it.) A
        token that also has text from before the marker is not counted.

        Args:
            tokens: the row, int32[n].
            at: the index at which the marker's core begins.
            lead: the marker's head as raw pieces (token strings, joined).
        """
        rest = lead
        while rest and at > 0:
            piece = self.tokenizer.convert_ids_to_tokens(int(tokens[at - 1]))
            if not rest.endswith(piece):
                break
            rest = rest[: -len(piece)]
            at -= 1
        return at
