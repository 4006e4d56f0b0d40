"""Rows to tokens: chat templates, and which tokens are trained on.

A row becomes text and the character ranges of its responses; one call of the tokenizer turns text into ids and
offsets, and the offsets turn ranges into a mask. Ranges come from the template's own structure: from its
`{% generation %}` marks, or, where it has none, from rendering the conversation up to each response. Marker
strings (`markers.py`) are the way for rows and templates that show no structure.

What is trained in a response is its text and the token that ends the turn, nothing after it, and no span that
`mask_spans` names. A conversation whose own text holds special tokens, or the markers, has its responses found by the
template's structure even where markers are given: what somebody typed opens no response.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtune.train.data.conversations import GENERATION_MARK, SENTINEL, Conversations
from jaxtune.train.data.formats import Example, RowError, SetupError, attempt, check_unicode, strings
from jaxtune.train.data.markers import Markers, special_ids
from jaxtune.train.data.packaged import PACKAGED, missing_marks, packaged_that_fit
from jaxtune.train.data.row_files import MAX_ROW_SIZE
from jaxtune.train.data.spans import masked_spans, refuse_left_out, special_texts
from jaxtune.train.data.tokenizing import Tokens, tokenize, tokenize_pieces

TRAIN_ON = ("responses", "all")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One row as tokens: `tokens` int32[n], `mask` bool[n] (True where trained on).

    responses: how many responses were found. ended: how many of them train a token that ends the turn, or reach the
    cut. masked: tokens that `mask_spans` took out. special: a special token or marker that stands in the text of the
    row's messages, or "". left_out: what of the conversation the template does not write, or "". cut: whether the row
    was longer than `max_tokens`.
    """

    tokens: np.ndarray
    mask: np.ndarray
    responses: int
    ended: int
    masked: int = 0
    special: str = ""
    left_out: str = ""
    cut: bool = False


@dataclasses.dataclass(frozen=True)
class Rendered:
    """One row as text. ranges: of its responses, in characters; None where markers find them in the tokens, after the
    character `begin`."""

    text: str
    ranges: list[tuple[int, int]] | None
    special: str = ""
    left_out: str = ""
    begin: int = 0


def resolve_template(tokenizer: Any, template: str | None) -> str:
    """The Jinja text of a template: None or "tokenizer" (the tokenizer's own), a packaged name, a path to a
    `.jinja` file, or Jinja text itself. Raises `SetupError`, a `ValueError`, where there is none, or where a packaged
    one marks its turns with what is no special token of this tokenizer."""
    if template is None or template == "tokenizer":
        own = tokenizer.chat_template
        own = own.get("default") if isinstance(own, dict) else own
        if not own:
            raise SetupError(
                f"the tokenizer has no chat template; set data.template to {_names_that_fit(tokenizer)} a .jinja file"
            )
        return own
    if template in PACKAGED:
        missing = missing_marks(tokenizer, template)
        if missing:
            raise SetupError(
                f"data.template={template}: it writes {', '.join(map(repr, missing))}, no special token of this "
                "tokenizer, so a model would never learn what a turn is and when to stop; set data.template to "
                f"{_names_that_fit(tokenizer)} a .jinja file, or take a tokenizer that has what is missing"
            )
        return PACKAGED[template].text
    if "{%" in template or "{{" in template:
        return template
    path = Path(template).expanduser()
    if path.suffix == ".jinja":
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise SetupError(f"data.template={template}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"data.template={template} cannot be read: {error}") from None
    raise SetupError(
        f"data.template={template!r} is not known; give tokenizer, {', '.join(PACKAGED)}, or the path of a .jinja file"
    )


def _names_that_fit(tokenizer: Any) -> str:
    """What to set instead, as the beginning of "NAME, or the path of": only what this tokenizer can use."""
    return "".join(f"{name}, " for name in packaged_that_fit(tokenizer)) + "or to the path of"


def trained_tokenizer(tokenizer: Any, template: str | None) -> Any:
    """The tokenizer that belongs to a model trained with data.template: a copy whose own chat template that is.

    The tokenizer as it is where template is None, or there is no tokenizer (rows that were prepared before).
    """
    if template is None or tokenizer is None:
        return tokenizer
    trained = copy.copy(tokenizer)
    trained.chat_template = resolve_template(tokenizer, template)
    return trained


class RowEncoder:
    """Turns examples into tokens and masks.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: see `resolve_template`. None also leaves prompts and completions as they stand; any other
            choice renders them as a conversation.
        train_on: "responses", or "all" tokens of a row.
        instruction_part, response_part: marker strings; both or neither. With them the responses are found by
            `markers.Markers`, without them by the template's structure.
        last_response_only: of a conversation, train the last response alone.
        mask_spans: pairs of texts; what stands between the two, and they themselves, is not trained on. A span that
            is not closed reaches to the end of its response.
        max_tokens: rows that are longer than a window of `tokenizing.tokenize` are cut at so many tokens; None cuts
            nothing.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        train_on: Literal["responses", "all"] = "responses",
        instruction_part: str | None = None,
        response_part: str | None = None,
        last_response_only: bool = False,
        mask_spans: Sequence[tuple[str, str]] | None = None,
        max_tokens: int | None = None,
    ):
        if train_on not in TRAIN_ON:
            raise ValueError(f"data.train_on must be one of {', '.join(TRAIN_ON)}, got {train_on!r}")
        if not tokenizer.is_fast:
            raise ValueError("a fast tokenizer (tokenizer.json) is needed: it tells where in the text a token lies")
        self.tokenizer = tokenizer
        self.template = template
        self.train_on = train_on
        self.last_response_only = last_response_only
        self.mask_spans = tuple(mask_spans or ())
        if any(
            len(pair) != 2 or not all(isinstance(part, str) and part.strip() for part in pair)
            for pair in self.mask_spans
        ):
            raise ValueError(f"data.mask_spans={mask_spans!r}: give pairs of texts, such as [[<think>, </think>]]")
        self.max_tokens = max_tokens
        self.markers = None
        if train_on == "responses" and (instruction_part is not None or response_part is not None):
            self.markers = Markers(tokenizer, instruction_part, response_part)
        self._special_texts = special_texts(tokenizer, (instruction_part, response_part) if self.markers else ())
        self.end_ids = special_ids(tokenizer) - {tokenizer.bos_token_id, tokenizer.unk_token_id}
        if tokenizer.eos_token_id is not None:
            self.end_ids |= {tokenizer.eos_token_id}
        self.bos_id = tokenizer.bos_token_id
        self.adds_bos = self.bos_id is not None and tokenizer("")["input_ids"][:1] == [self.bos_id]
        self._jinja: str | None = None

    # --- rows

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Tokens and mask of each example, or the reason why it has none, in order."""
        rendered: list[Rendered | RowError] = [attempt(self.render, example) for example in examples]
        texts = [item.text for item in rendered if isinstance(item, Rendered)]
        try:
            tokenized = iter(self._tokenize(texts))
        except Exception:  # one text that the tokenizer cannot take costs that row, not the others
            tokenized = iter([attempt(lambda text: self._tokenize([text])[0], text) for text in texts])
        results: list[Encoded | RowError] = []
        for example, item in zip(examples, rendered, strict=True):
            tokens = item if isinstance(item, RowError) else next(tokenized)
            results.append(tokens if isinstance(tokens, RowError) else attempt(self._finish, example, item, tokens))
        return results

    def encode_prompt(self, example: Example) -> np.ndarray:
        """int32[n]: an example up to where its last response begins, as a model is asked for it.

        The same text, BOS and tokens that training puts before that response.
        """
        if example.text is not None:
            text = example.text
        elif self._is_raw(example):
            text = example.prompt or ""
        else:
            messages = list(example.messages or ())
            if messages and messages[-1]["role"] == "assistant":
                messages.pop()
            text = self._render(messages, example.tools, add_generation_prompt=True)
        return self._one_bos(tokenize(self.tokenizer, [text])[0].ids)

    def around_answer(self, example: Example) -> tuple[str, str]:
        """What the template writes between a prompt and an answer that ends the conversation, and which nobody gave it:
        an empty thought, the name of a channel. And what it writes after the answer, which ends the turn."""
        if self._is_raw(example) or not example.messages:
            return "", ""
        prompt = self._render(example.messages[:-1], example.tools, add_generation_prompt=True)
        text = self._render([*example.messages[:-1], {"role": "assistant", "content": SENTINEL}], example.tools)
        before, found, after = text.removeprefix(prompt).partition(SENTINEL)
        return (before, after) if found and text.startswith(prompt) else ("", "")

    def render(self, example: Example) -> Rendered:
        """The text of an example, and where its responses are. Raises `RowError` where it has none."""
        if example.text is not None:
            text, ranges, special, left_out, begin = example.text, [(0, len(example.text))], "", "", 0
        elif self._is_raw(example):
            text, special, left_out, begin = (example.prompt or "") + (example.completion or ""), "", "", 0
            ranges = [(len(example.prompt or ""), len(text))]
        else:
            special = self._special_in(example)
            text, ranges = self._render_conversation(example, special)
            begin = self._end_of_prompt(example, text)
            ranges = [(low, high) for low, high in ranges if high > begin]
            left_out = self._conversations.left_out(example.messages or [], example.tools, text)
        check_unicode(text)
        if len(text) > 2 * MAX_ROW_SIZE:
            raise RowError(
                f"its text has {len(text):,} characters once the template is applied; divide it into several rows"
            )
        return Rendered(text, None if self.markers is not None and not special else ranges, special, left_out, begin)

    def _special_in(self, example: Example) -> str:
        """The first special token or marker that stands in the text of a conversation, or ""."""
        if self._special_texts is None:
            return ""
        found = (self._special_texts.search(text) for text in strings([example.messages, example.tools]))
        return next((match[0] for match in found if match), "")

    def _render_conversation(self, example: Example, special: str) -> tuple[str, list[tuple[int, int]]]:
        messages = example.messages or []
        if self.train_on != "all":
            refuse_left_out(messages[example.asked :], self.last_response_only)
        if self.train_on == "all" or (self.markers is not None and not special):
            return self._render(messages, example.tools), []
        try:
            if GENERATION_MARK.search(self._template_text()):
                return self._conversations.render_marked(messages, example.tools)
            first = max(example.asked, 1)
            if self.last_response_only:  # of those that are not trained on, nothing need be told from the template
                first = max([first, *(i for i, turn in enumerate(messages) if turn["role"] == "assistant")])
            return self._conversations.render_prefixes(messages, example.tools, first)
        except RowError as error:
            if self.markers is None:
                raise
            raise RowError(
                f"its text holds {special!r}, a special token or marker, so markers cannot tell its responses, and "
                f"neither can the template: {error}"
            ) from None

    def _end_of_prompt(self, example: Example, text: str) -> int:
        """Where in the text of an example the turns end in which nothing is trained on."""
        if not example.asked or self.train_on == "all":
            return 0
        asked = (example.messages or [])[: example.asked]
        for asking in (False, True):  # some templates write an end after the last turn, unless they ask
            prompt = self._render(asked, example.tools, add_generation_prompt=asking)
            if text.startswith(prompt):
                return len(prompt)
        raise RowError(
            "the chat template writes the turns of the prompt differently once the completion follows, so they cannot "
            "be told apart; make one list `messages` of them, and set data.last_response_only=true"
        )

    def _is_raw(self, example: Example) -> bool:
        return example.prompt is not None and self.template is None

    def _finish(self, example: Example, rendered: Rendered, tokens: Tokens) -> Encoded | RowError:
        text, ranges = rendered.text, rendered.ranges or []
        is_raw = example.text is not None or self._is_raw(example)
        cuts = [low for low, _ in ranges if np.any((tokens.starts < low) & (low < tokens.ends))]
        if cuts:
            # A token holds the end of a prompt and the start of its response. Whoever asks the model will have
            # the prompt tokenised alone, so it is tokenised alone here.
            tokens = tokenize_pieces(self.tokenizer, text, cuts, self.max_tokens)
        ids = tokens.ids
        spans = []
        for low, high in ranges[-1:] if self.last_response_only else ranges:
            first, last = (int(index) for index in np.searchsorted(tokens.starts, (low, high)))
            if not is_raw:
                last = self._end_of_turn(text, tokens, first, last, high)
            spans.append((first, last))
        if is_raw:
            ids, spans = self._with_eos(text, tokens, spans)
        if not len(ids):
            return RowError("no token")
        if rendered.ranges is None and self.markers is not None:
            spans = [
                (first, last if last > len(tokens) else self._end_of_turn(text, tokens, first, last))
                for first, last in self.markers.spans(ids)
                if not rendered.begin or rendered.begin < tokens.ends[last - 1]
            ]
            spans = spans[-1 if self.last_response_only else 0 :]
        mask = np.zeros(len(ids), bool)
        if self.train_on == "all":
            mask[:] = True
            spans = [(0, len(ids))]
            responses, ended = 1, int(tokens.cut or any(int(token) in self.end_ids for token in ids[1:]))
        else:
            spans = [(first, last) for first, last in spans if first < last]
            for first, last in spans:
                mask[first:last] = True
            ends = (int(ids[last - 1]) in self.end_ids or (tokens.cut and last == len(ids)) for _, last in spans)
            responses, ended = len(spans), sum(ends)
        masked = masked_spans(text, tokens, spans, self.mask_spans)
        mask[masked] = False
        with_bos = self._one_bos(ids)
        added = len(with_bos) - len(ids)  # 1 prepended, 0, or -k doubled ones taken away
        mask = np.concatenate([np.zeros(1, bool), mask]) if added > 0 else mask[-added:]
        return Encoded(with_bos, mask, responses, ended, len(masked), rendered.special, rendered.left_out, tokens.cut)

    def _end_of_turn(self, text: str, tokens: Tokens, first: int, last: int, high: int | None = None) -> int:
        """The end of a response without the white space that a template writes after its end-of-turn token.

        high: where in the text the response ends, if not with its last token."""
        if high is None:
            high = int(tokens.ends[last - 1])
        for index in range(last - 1, first - 1, -1):
            if int(tokens.ids[index]) in self.end_ids:
                return index + 1 if not text[tokens.ends[index] : high].strip() else last
        return last

    def _with_eos(
        self, text: str, tokens: Tokens, spans: list[tuple[int, int]]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Appends EOS to a raw row, and trains on it, so that the model learns to stop.

        A row that ends with EOS already stays as it is. Where markers find the responses, the row is a rendered
        conversation: then it also stays as it is if it ends with another token that ends a turn, such as Gemma's or
        Phi-3's."""
        eos = self.tokenizer.eos_token
        if eos is None:
            raise SetupError("the tokenizer has no EOS token, so no row can end; set tokenizer.eos_token")
        end = self._end_of_turn(text, tokens, 0, len(tokens), len(text))
        rendered = self.markers is not None and end > 0 and int(tokens.ids[end - 1]) in self.end_ids
        if rendered or text.rstrip().endswith(eos):
            return tokens.ids, spans
        ids = np.append(tokens.ids, np.int32(self.tokenizer.eos_token_id))
        return ids, [*spans[:-1], *((first, len(ids)) for first, _ in spans[-1:])]

    def _one_bos(self, tokens: np.ndarray) -> np.ndarray:
        """Exactly one BOS where the tokenizer wants one or the template wrote one; else none."""
        if self.bos_id is None:
            return tokens
        leading = 0
        while leading < len(tokens) and tokens[leading] == self.bos_id:
            leading += 1
        if leading > 1:
            return tokens[leading - 1 :]
        if leading == 0 and self.adds_bos:
            return np.concatenate([np.array([self.bos_id], np.int32), tokens])
        return tokens

    def _tokenize(self, texts: list[str]) -> list[Tokens]:
        return tokenize(self.tokenizer, texts, self.max_tokens)

    def _template_text(self) -> str:
        if self._jinja is None:
            self._jinja = resolve_template(self.tokenizer, self.template)
        return self._jinja

    @property
    def _conversations(self) -> Conversations:
        return Conversations(self.tokenizer, self._template_text(), self._special_texts, self.end_ids)

    def _render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        return self._conversations.render(messages, tools, add_generation_prompt)


def derive_markers(tokenizer: Any, template: str | None = None) -> tuple[str, str]:
    """(instruction_part, response_part) of a chat template: what it writes before a user's message after an
    earlier response, and before a response. Raises `ValueError` where the template does not show them."""
    encoder = RowEncoder(tokenizer, template=template)
    user, answer, again = ("\ue000u\ue001", "\ue000a\ue001", "\ue000v\ue001")
    turns = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    try:
        text = encoder._render(turns, None, add_generation_prompt=True)
    except RowError as error:
        raise ValueError(f"markers cannot be derived: {error}") from None
    between = []
    for low, high in ((user, answer), (answer, again)):
        if low not in text or high not in text:
            raise ValueError("markers cannot be derived: the template changes the messages; give both markers")
        between.append(text[text.index(low) + len(low) : text.index(high)])
    special = [tokenizer.convert_ids_to_tokens(int(index)) for index in encoder.end_ids]
    response, instruction = (_without_turn_end(gap, special) for gap in between)
    if instruction == between[1]:
        raise ValueError("markers cannot be derived: no special token of this tokenizer ends a response; give both")
    if not response.strip() or not instruction.strip():
        raise ValueError(
            f"markers cannot be derived from this template ({instruction!r}, {response!r}); "
            "set data.instruction_part and data.response_part"
        )
    return instruction, response


def _without_turn_end(gap: str, special: list[str]) -> str:
    """What opens the next turn: the gap without the special token that ends the last one, if more follows."""
    for token in sorted(special, key=len, reverse=True):
        rest = gap.removeprefix(token)
        if rest != gap and rest.strip():
            return rest.lstrip()
    return gap
