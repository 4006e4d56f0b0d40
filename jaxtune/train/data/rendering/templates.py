"""Converts examples to tokens with a chat template, and decides which tokens are trained on.

Responses are found by the template's `{% generation %}` marks, by rendering up to each response, or by marker strings.
Trained are a response's text and the token that ends its turn, without `mask_spans`; with train_on="turns" and
"completion" what TRL and Unsloth train. If a conversation's own text has special tokens or markers, the template finds
the responses even if markers are given: text that a user typed must not open one.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtune.conversations.dates import dated, writes_date
from jaxtune.conversations.ends import RoleEnds, role_ends
from jaxtune.conversations.messages import pictures_of, template_for
from jaxtune.conversations.picture_processors import PlacedPicture, placed_pictures, spaced
from jaxtune.conversations.pictures import PictureError
from jaxtune.conversations.prompts import prompt_tokens
from jaxtune.conversations.templates import (
    TemplateError,
    asking_template,
    asking_templates,
    guarded,
    special_pattern,
    unguarded,
)
from jaxtune.conversations.thoughts import has_stray_block
from jaxtune.conversations.tokenizing import (
    Tokenizer,
    Tokens,
    beginning,
    end_ids,
    tokenize,
    tokenize_pieces,
    with_beginning,
)
from jaxtune.system.files import read_text
from jaxtune.train.data.rendering.conversations import GENERATION_MARK, SENTINEL, Conversations
from jaxtune.train.data.rendering.formats import Example, strings
from jaxtune.train.data.rendering.markers import Markers
from jaxtune.train.data.rendering.packaged import PACKAGED, missing_marks, packaged_that_fit
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rendering.spans import (
    is_marked,
    masked_spans,
    refuse_marked_questions,
    special_texts,
    untrained_spans,
    within,
)
from jaxtune.train.data.rows.row_errors import RowError, SetupError, attempt, check_unicode
from jaxtune.train.data.rows.row_files import MAX_ROW_SIZE

TRAIN_ON = ("responses", "turns", "completion", "all")  # the values of data.train_on
TrainOn = Literal["responses", "turns", "completion", "all"]
# (a part of a template's text, what it writes before a response, the beginning of that behind which the response begins
# in TRL's marked version of the template)
_TRL_OPENINGS = (
    ("You are Qwen, created by Alibaba Cloud", "<|im_start|>assistant\n", "<|im_start|>assistant"),
    ("<|start|>assistant", "<|start|>assistant", ""),
    ("<｜Assistant｜>", "<｜Assistant｜>", ""),
    ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", ""),
)
_OPENED_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")  # of a prompt's end; TRL's marked templates train it


@dataclasses.dataclass(frozen=True)
class Encoded:
    """An example as tokens, with counts."""

    tokens: np.ndarray
    """int32[n]"""
    mask: np.ndarray
    """bool[n]: True where the token is trained on."""
    responses: int
    """Trained responses; 1 with train_on="all"."""
    ended: int
    """Responses that end with a token that ends a turn, or were cut before it; with train_on="all" 1 if any token but
    the first does.
    """
    masked: int = 0
    """Response tokens that `mask_spans` excludes."""
    special: str = ""
    """A special token or marker in the messages' text."""
    left_out: str = ""
    """What the template does not write, in words."""
    has_stray_thought: bool = False
    """Whether a thought is among the words of an answer, as the template has no place for thoughts."""
    is_cut: bool = False
    """Whether it was cut at `max_tokens`."""
    pictures: tuple[PlacedPicture, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rendered:
    """An example as text, with the ranges of its responses."""

    text: str
    ranges: list[tuple[int, int]] | None
    """(start, end) character ranges of responses; [] if all of a conversation is trained on; None if markers find them
    in the tokens.
    """
    special: str = ""
    left_out: str = ""
    begin: int = 0
    """First character after the prompt's turns, before which nothing is trained on."""
    excluded: tuple[tuple[int, int], ...] = ()
    """(start, end) character ranges that the row's marks exclude."""
    cuts: tuple[int, ...] = ()
    """Places in special tokens' texts from tools, which no token spans."""
    prompt: str | None = None
    """Text before a completion, tokenised alone, if that decides where it begins."""


def resolve_template(tokenizer: Tokenizer, template: str | None, tools: object = None) -> str:
    """The Jinja text of a chat template. Raises SetupError if there is none, or a packaged one needs special tokens
    that the tokenizer lacks.

      template: None or "tokenizer" (its own; of several the one for `tools`), a packaged name, a .jinja path, or Jinja
      text.
    """
    if template is None or template == "tokenizer":
        own_template = template_for(tokenizer.chat_template, tools)
        if own_template is None:
            raise SetupError(
                f"the tokenizer has no chat template; set data.template to {_names_that_fit(tokenizer)} a .jinja file"
            )
        return own_template
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
            return read_text(path)
        except FileNotFoundError:
            raise SetupError(f"data.template={template}: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"data.template={template} cannot be read: {error}") from None
    raise SetupError(
        f"data.template={template!r} is not known; give tokenizer, {', '.join(PACKAGED)}, or the path of a .jinja file"
    )


def writes_today(tokenizer: object, template: str | None) -> bool:
    """Whether a template, as `resolve_template` takes it, writes the date; False if there is none."""
    if template in (None, "tokenizer"):
        named = getattr(tokenizer, "chat_template", None)
        return any(writes_date(text or "") for text in (named.values() if isinstance(named, dict) else [named]))
    try:
        return writes_date(resolve_template(tokenizer, template))
    except SetupError:
        return False


def _names_that_fit(tokenizer: Tokenizer) -> str:
    """Usable packaged names for messages, ending with "or to the path of"."""
    return "".join(f"{name}, " for name in packaged_that_fit(tokenizer)) + "or to the path of"


def trained_tokenizer(tokenizer: Tokenizer, template: str | None, arguments: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer to save with a trained model: its template writes by itself what prompts had in training. A copy,
    or the same if nothing changes. Raises SetupError.

      template: that training used, as `resolve_template` takes it; arguments: variables that the template got besides
      messages.
    """
    if tokenizer is None:
        return tokenizer
    if template is None:
        asks = asking_templates(tokenizer, arguments)
    else:
        asks = asking_template(tokenizer, resolve_template(tokenizer, template), arguments)
    if template is None and asks == tokenizer.chat_template:
        return tokenizer
    trained = copy.copy(tokenizer)
    trained.chat_template = asks
    return trained


class RowEncoder:
    """Converts examples to tokens and masks (`encode`), and to prompts (`encode_prompt`). `end_ids` may end a turn.

    Raises ValueError for a wrong argument, or a tokenizer that is not fast.

      template: as `resolve_template` takes it. None: the tokenizer's own, but prompts and completions stay plain text
      instead of becoming conversations.
      today: the day that the template writes; None: that of asking.
      train_on: "responses" up to the token that ends the turn; "turns" with all that the template writes for them
      (TRL's assistant_only_loss, Unsloth's markers); "completion": all after the prompt (TRL); "all".
      instruction_part, response_part: marker strings that find responses, both or neither; ignored with "all".
      mask_spans: (opening, closing) texts; a span without a closing reaches to the response's end.
      max_tokens: text is cut after the window (65,536 characters) or piece that reaches it. None: never.
      last_response_only: of a conversation's responses only the last is trained on.
      pictures: how those of rows are read; None: rows have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        today: str | None = None,
        train_on: TrainOn = "responses",
        instruction_part: str | None = None,
        response_part: str | None = None,
        last_response_only: bool = False,
        mask_spans: Sequence[tuple[str, str]] | None = None,
        max_tokens: int | None = None,
        pictures: PictureOptions | None = None,
    ):
        if train_on not in TRAIN_ON:
            raise ValueError(f"data.train_on must be one of {', '.join(TRAIN_ON)}, got {train_on!r}")
        if not tokenizer.is_fast:
            raise ValueError(
                "a fast tokenizer (tokenizer.json) is needed: it gives the position of each token in the text"
            )
        self.tokenizer = tokenizer
        self.template, self.today = template, today
        self.train_on = train_on
        self.last_response_only = last_response_only
        self.mask_spans = tuple(mask_spans or ())
        if any(
            len(pair) != 2 or not all(isinstance(text, str) and text.strip() for text in pair)
            for pair in self.mask_spans
        ):
            raise ValueError(f"data.mask_spans={mask_spans!r}: give pairs of texts, such as [[<think>, </think>]]")
        self.max_tokens, self.pictures = max_tokens, pictures
        self.markers = None
        if train_on in ("responses", "turns") and (instruction_part is not None or response_part is not None):
            self.markers = Markers(tokenizer, instruction_part, response_part)
        self._special_texts = special_texts(tokenizer, (instruction_part, response_part) if self.markers else ())
        self._special_tokens = special_pattern(tokenizer)
        self.end_ids = end_ids(tokenizer)
        self._begins = beginning(tokenizer)
        self._jinja: dict[bool, str] = {}
        self._role_ends: dict[str, RoleEnds] = {}

    # --- rows

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """For each example its tokens and mask, or a RowError. Raises SetupError if a template or EOS is needed and
        missing.
        """
        rendered: list[Rendered | RowError] = [attempt(self.render, example) for example in examples]
        rendered = [
            item if isinstance(item, RowError) else self._spaced(example, item)
            for example, item in zip(examples, rendered, strict=True)
        ]
        texts = [item.text for item in rendered if isinstance(item, Rendered)]
        texts += [item.prompt for item in rendered if isinstance(item, Rendered) and item.prompt is not None]
        try:
            tokenized = iter(self._tokenize(texts))
        except Exception:  # a text that the tokenizer refuses must affect its own row only, so each is tried separately
            tokenized = iter([attempt(lambda text: self._tokenize([text])[0], text) for text in texts])
        token_lists = [item if isinstance(item, RowError) else next(tokenized) for item in rendered]
        results: list[Encoded | RowError] = []
        for example, item, tokens in zip(examples, rendered, token_lists, strict=True):
            prompt = next(tokenized) if isinstance(item, Rendered) and item.prompt is not None else None
            wrong = next((outcome for outcome in (tokens, prompt) if isinstance(outcome, RowError)), None)
            finished = wrong or attempt(self._finish, example, item, tokens, prompt)
            results.append(attempt(self._illustrated, example, finished) if self.pictures else finished)
        return results

    def _spaced(self, example: Example, rendered: Rendered) -> Rendered:
        """With the text that the image processor writes around pictures."""
        if self.pictures is None or not any(pictures_of(message) for message in example.messages or ()):
            return rendered
        processor = self.pictures.processor
        written = str(self.tokenizer.convert_ids_to_tokens(processor.written))
        text, shifted = spaced(rendered.text, written, processor)

        def moved(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
            return [(shifted(low), shifted(high)) for low, high in ranges]

        return dataclasses.replace(
            rendered,
            text=text,
            ranges=None if rendered.ranges is None else moved(rendered.ranges),
            begin=shifted(rendered.begin),
            excluded=tuple(moved(rendered.excluded)),
            cuts=tuple(map(shifted, rendered.cuts)),
            prompt=None if rendered.prompt is None else spaced(rendered.prompt, written, processor)[0],
        )

    def _illustrated(self, example: Example, encoded: Encoded | RowError) -> Encoded | RowError:
        """With the tokens of its pictures, which are never trained on."""
        if self.pictures is None or isinstance(encoded, RowError):
            return encoded
        try:
            tokens, indices, pictures = placed_pictures(
                example.messages or (), encoded.tokens, self.pictures.processor, encoded.is_cut
            )
        except PictureError as error:
            raise RowError(str(error)) from None
        mask = np.where(indices >= 0, encoded.mask[indices], False)
        return dataclasses.replace(encoded, tokens=tokens, mask=mask, pictures=pictures)

    def encode_prompt(self, example: Example) -> np.ndarray:
        """int32[n]: as `encode_asked`, without the pictures."""
        return self.encode_asked(example)[0]

    def encode_asked(self, example: Example) -> tuple[np.ndarray, tuple[PlacedPicture, ...]]:
        """(int32[n], its pictures) of the prompt of an example's last response: a text alone, a plain prompt, or a
        conversation without a last assistant message, unless that is begun and continued. Raises RowError, SetupError.
        """
        prompt: Any = example.text
        if prompt is None and self.is_plain(example):
            prompt = example.prompt or ""
        template = None
        if prompt is None:
            template, prompt = self._template_text(example.tools), list(example.messages or ())
            if prompt and prompt[-1]["role"] == "assistant" and not example.begun:
                prompt.pop()
        try:
            processor = None if self.pictures is None else self.pictures.processor
            ids = prompt_tokens(
                self.tokenizer,
                prompt,
                template=template,
                tools=example.tools,
                arguments=example.arguments,
                continues=example.begun,
                processor=processor,
            )
            tokens, messages = np.array(ids, np.int32), [] if isinstance(prompt, str) else prompt
            if processor is None:
                return tokens, ()
            tokens, _, pictures = placed_pictures(messages, tokens, processor)
        except (TemplateError, PictureError) as error:
            raise RowError(str(error)) from None
        return tokens, pictures

    def before_answer(self, example: Example) -> str:
        """What the template writes between generation prompt and last answer, such as an empty thought; "" if nothing
        is found. Raises RowError.
        """
        if self.is_plain(example) or not example.messages:
            return ""
        prompt = self._render(example.messages[:-1], example, add_generation_prompt=True)
        text = self._render([*example.messages[:-1], {"role": "assistant", "content": SENTINEL}], example)
        before, separator, _ = text.removeprefix(prompt).partition(SENTINEL)
        return before if separator and text.startswith(prompt) else ""

    def render(self, example: Example) -> Rendered:
        """The text of an example and its responses' ranges. Raises RowError if the template fails, responses are not
        found, or the text is too long or no Unicode.
        """
        cuts: list[int] = []
        prompt_text: str | None = None
        if example.text is not None:
            text, ranges, special, left_out, begin = example.text, [(0, len(example.text))], "", "", 0
            excluded = []
        elif self.is_plain(example):
            text, special, left_out, begin = (example.prompt or "") + (example.completion or ""), "", "", 0
            excluded = []
            ranges = [(len(example.prompt or ""), len(text))]
            prompt_text = example.prompt or ""
        else:
            special = self._special_in(example)
            messages, mark = guarded(example.messages or [], self._special_tokens)
            example = dataclasses.replace(example, messages=messages)
            text, ranges, excluded = self._render_conversation(example, special)
            begin = self._end_of_prompt(example, text)
            ranges = [(low, high) for low, high in ranges if high > begin]
            if self.train_on == "completion" or (self.train_on == "turns" and example.prompt_messages):
                prompt_text = self._render(messages[: _asked(example)], example, add_generation_prompt=True)
            left_out = self._conversations(example).left_out(messages, example.tools, text)
            text, ranges = self._with_role_ends(example, text, ranges)
            if mark:  # positions are counted without the marks
                begin = begin - text.count(mark, 0, begin)
                ranges, excluded = (
                    [(low - text.count(mark, 0, low), high - text.count(mark, 0, high)) for low, high in some]
                    for some in (ranges, excluded)
                )
                text, cuts = unguarded(text, mark)
                prompt_text = None if prompt_text is None else unguarded(prompt_text, mark)[0]
        check_unicode(text)
        if len(text) > 2 * MAX_ROW_SIZE:
            raise RowError(
                f"its text has {len(text):,} characters once the template is applied; divide it into several rows"
            )
        by_markers = self.markers is not None and not special and not is_marked(self._trained(example))
        visible_ranges = None if by_markers else ranges
        prompt_text = None if example.text is not None or self.train_on in ("responses", "all") else prompt_text
        return Rendered(text, visible_ranges, special, left_out, begin, tuple(excluded), tuple(cuts), prompt_text)

    def _with_role_ends(
        self, example: Example, text: str, ranges: list[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """With the token of the next turn's role at the end of each response, also behind the last one, if the model
        stops there.
        """
        ends, messages = self._ends_by_role(example.tools), example.messages or []
        if not ends.answer or self.train_on == "all":
            return text, ranges
        if messages[-1]["role"] == "assistant" and messages[-1].get("train", True):
            text += ends.call if messages[-1].get("tool_calls") else ends.answer
        following = re.compile(rf"\s*(?:{'|'.join(map(re.escape, ends))})")
        matches = ((low, high, following.match(text, high)) for low, high in ranges)
        return text, [(low, high if match is None else match.end()) for low, high, match in matches]

    def _ends_by_role(self, tools: object) -> RoleEnds:
        template = self._template_text(tools)
        if template not in self._role_ends:
            self._role_ends[template] = role_ends(self.tokenizer, template)
        return self._role_ends[template]

    def _special_in(self, example: Example) -> str:
        if self._special_texts is None:
            return ""
        matches = (self._special_texts.search(text) for text in strings([example.messages, example.tools]))
        return next((match[0] for match in matches if match), "")

    def _render_conversation(
        self, example: Example, special: str
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """(Text, character ranges of responses, ranges that marks exclude). RowError."""
        messages = example.messages or []
        marked = is_marked(self._trained(example))
        if self.train_on == "completion" and marked:
            raise RowError("its turns are marked, and data.train_on=completion trains on all of a completion")
        if self.train_on == "all":
            refuse_marked_questions(messages)
        if not marked and (self.train_on in ("all", "completion") or (self.markers is not None and not special)):
            return self._render(messages, example), [], []
        responses = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
        first = max(example.prompt_messages, 1)
        if self.last_response_only:  # the ranges of the other responses are not needed
            first = max([first, *responses])
        try:
            conversations = self._conversations(example)
            if GENERATION_MARK.search(self._template_text(example.tools)):
                if not marked:
                    return *conversations.render_marked(messages, example.tools), []
                text, by_message = conversations.marked_by_message(messages, example.tools)
            else:
                text, ranges = conversations.render_prefixes(messages, example.tools, first)
                if self.train_on == "turns":
                    template = self._template_text(example.tools)
                    ranges = [(low - _before_response(template, text, low), high) for low, high in ranges]
                if not marked:
                    return text, ranges, []
                by_message = {
                    i: [character_range]
                    for i, character_range in zip([i for i in responses if i >= first], ranges, strict=True)
                }
            return self._by_marks(example, text, by_message)
        except RowError as error:
            if self.markers is None or marked:
                raise
            raise RowError(
                f"its text holds {special!r}, a special token or marker, so markers cannot find its responses, and "
                f"neither can the template: {error}"
            ) from None

    def _trained(self, example: Example) -> list[dict]:
        """Messages of which something may be trained on."""
        return (example.messages or [])[0 if self.train_on == "all" else example.prompt_messages :]

    def _by_marks(
        self, example: Example, text: str, by_message: dict[int, list[tuple[int, int]]]
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """As `_render_conversation`, of marked messages. by_message: ranges of responses by message."""
        messages = example.messages or []
        trained, excluded = [], []
        last = max(by_message, default=0)
        for index in range(len(messages) - len(self._trained(example)), len(messages)):
            message, ranges = messages[index], by_message.get(index)
            if message["role"] != "assistant" or (self.last_response_only and index < last):
                continue
            if ranges is None and (self.train_on == "all" or index > 0) and is_marked([message]):
                raise RowError(f"the chat template does not show messages[{index}], whose marks cannot be followed")
            train = message.get("train", True)
            (trained if train else excluded).extend(ranges or ())
            if train and ranges and (spans := untrained_spans(message)):
                start, stripped = self._conversations(example).content_range(messages, example.tools, text, index)
                excluded += [(start + max(low - stripped, 0), start + high - stripped) for low, high in spans]
        return text, [] if self.train_on == "all" else trained, excluded

    def _end_of_prompt(self, example: Example, text: str) -> int:
        """The index in `text` after the prompt's turns, or 0. Raises RowError if the template does not show it."""
        if not example.prompt_messages or self.train_on in ("all", "completion"):
            return 0
        prompt_messages = (example.messages or [])[: example.prompt_messages]
        for asking in (False, True):  # some templates write an end after the last turn without a generation prompt
            prompt = self._render(prompt_messages, example, add_generation_prompt=asking)
            if text.startswith(prompt):
                return len(prompt)
        raise RowError(
            "the chat template writes the turns of the prompt differently once the completion follows, so they cannot "
            "be separated; make one list `messages` of them, and set data.last_response_only=true"
        )

    def is_plain(self, example: Example) -> bool:
        """Whether prompt and completion stay text, without a chat template."""
        return example.prompt is not None and (self.template is None or example.messages is None)

    def _finish(
        self, example: Example, rendered: Rendered, tokens: Tokens, prompt: Tokens | None
    ) -> Encoded | RowError:
        """Tokens and mask, with one BOS at most, and EOS for plain text; RowError without a token."""
        text, ranges = rendered.text, rendered.ranges or []
        is_raw = example.text is not None or self.is_plain(example)
        exact = self.train_on in ("turns", "completion")
        cuts = set() if exact else {low for low, _ in ranges if np.any((tokens.starts < low) & (low < tokens.ends))}
        cuts.update(rendered.cuts)
        if cuts:
            # A token has the end of a prompt and the begin of its response. At inference the prompt is tokenised
            # alone, so it is tokenised alone here too.
            tokens = tokenize_pieces(self.tokenizer, text, sorted(cuts), self.max_tokens)
        ids = tokens.ids
        spans = []
        for low, high in ranges[-1:] if self.last_response_only else ranges:
            first, last = (int(index) for index in np.searchsorted(tokens.starts, (low, high)))
            if exact:  # the tokens that have its first and its last character
                first, last = (int(i) for i in np.searchsorted(tokens.ends, (low, high - 1), side="right") + (0, 1))
            elif not is_raw:
                last = self._end_of_turn(text, tokens, first, last, high)
            spans.append((first, last))
        if is_raw:
            ids, spans = self._with_eos(text, tokens, spans)
        if not len(ids):
            return RowError("no token")
        if rendered.ranges is None and self.markers is not None:
            found = self.markers.spans(ids, exact)
            names = () if exact or is_raw else filter(None, self._ends_by_role(example.tools))
            ends = {self.tokenizer.convert_tokens_to_ids(name) for name in names}
            found = [(first, last + (last < len(ids) and int(ids[last]) in ends)) for first, last in found]
            spans = [
                (first, last if exact or last > len(tokens) else self._end_of_turn(text, tokens, first, last))
                for first, last in found
                if not rendered.begin or rendered.begin < tokens.ends[last - 1]
            ]
            spans = spans[-1 if self.last_response_only else 0 :]
        if prompt is not None:
            after = _common_tokens(prompt.ids, ids)
            turns = [(max(first, after), last) for first, last in spans]
            spans = turns if self.train_on == "turns" else [(after, len(ids))]
        mask, spans, responses, ended = self._mask(ids, spans, text, tokens)
        masked = masked_spans(text, tokens, spans, self.mask_spans)
        mask[masked] = False
        mask[: len(tokens)] &= ~within(tokens, rendered.excluded)
        with_bos = np.array(with_beginning(self.tokenizer, ids.tolist(), self._begins), np.int32)
        added = len(with_bos) - len(ids)  # 1 if a BOS was prepended, -k if k repeated ones were removed, else 0
        mask = np.concatenate([np.zeros(added, bool), mask]) if added > 0 else mask[-added:]
        return Encoded(
            with_bos,
            mask,
            responses,
            ended,
            masked=len(masked),
            special=rendered.special,
            left_out=rendered.left_out,
            has_stray_thought=not is_raw and self._has_stray_thought(example),
            is_cut=tokens.is_cut,
        )

    def _has_stray_thought(self, example: Example) -> bool:
        return any(has_stray_block(turn, self._template_text(example.tools)) for turn in self._trained(example))

    def _mask(
        self, ids: np.ndarray, spans: list[tuple[int, int]], text: str, tokens: Tokens
    ) -> tuple[np.ndarray, list[tuple[int, int]], int, int]:
        """(Mask of `ids`, non-empty spans, Encoded's `responses` and `ended`)."""
        mask = np.zeros(len(ids), bool)
        if self.train_on == "all":
            mask[:] = True
            ended = int(tokens.is_cut or not self.end_ids.isdisjoint(ids[1:].tolist()))
            return mask, [(0, len(ids))], 1, ended
        spans = [(first, last) for first, last in spans if first < last]
        ended = 0
        for first, last in spans:
            mask[first:last] = True
            ended += self._is_ended(ids, first, last, text, tokens) or (tokens.is_cut and last == len(ids))
        return mask, spans, len(spans), ended

    def _is_ended(self, ids: np.ndarray, first: int, last: int, text: str, tokens: Tokens) -> bool:
        """Whether a response's tokens have one that ends the turn, with white space behind it at most. ids: with an
        appended EOS; tokens: of `text`.
        """
        if int(ids[last - 1]) in self.end_ids:
            return True
        last = min(last, len(tokens))
        return first < last and int(ids[self._end_of_turn(text, tokens, first, last) - 1]) in self.end_ids

    def _end_of_turn(self, text: str, tokens: Tokens, first: int, last: int, high: int | None = None) -> int:
        """The index after a response's last trained token; `last` if none ends the turn. high: index in `text` after
        it.
        """
        if high is None:
            high = int(tokens.ends[last - 1])
        for index in range(last - 1, first - 1, -1):
            if int(tokens.ids[index]) in self.end_ids:
                return index + 1 if not text[tokens.ends[index] : high].strip() else last
        return last

    def _with_eos(
        self, text: str, tokens: Tokens, spans: list[tuple[int, int]]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """(Ids, spans) of plain text with EOS at its end and in the last response. SetupError without EOS."""
        eos = self.tokenizer.eos_token
        if eos is not None and self.train_on == "completion" and not text.endswith(eos):
            return np.append(tokens.ids, np.int32(self.tokenizer.eos_token_id)), spans
        if eos is None:
            raise SetupError("the tokenizer has no EOS token, so no row can end; set tokenizer.eos_token")
        end = self._end_of_turn(text, tokens, 0, len(tokens), len(text))
        rendered = self.markers is not None and end > 0 and int(tokens.ids[end - 1]) in self.end_ids
        if rendered or text.rstrip().endswith(eos):
            return tokens.ids, spans
        ids = np.append(tokens.ids, np.int32(self.tokenizer.eos_token_id))
        return ids, [*spans[:-1], *((first, len(ids)) for first, _ in spans[-1:])]

    def _tokenize(self, texts: list[str]) -> list[Tokens]:
        return tokenize(self.tokenizer, texts, self.max_tokens)

    def _template_text(self, tools: object = None) -> str:
        """Looked up when needed, as plain text needs no template. Raises SetupError."""
        if bool(tools) not in self._jinja:
            self._jinja[bool(tools)] = dated(resolve_template(self.tokenizer, self.template, tools), self.today)
        return self._jinja[bool(tools)]

    def _conversations(self, example: Example) -> Conversations:
        return Conversations(
            self.tokenizer,
            self._template_text(example.tools),
            self._special_texts,
            self.end_ids,
            keeps_space=self.train_on == "turns",
            arguments=example.arguments,
        )

    def _render(self, messages: list[dict], example: Example, add_generation_prompt: bool = False) -> str:
        """The text of messages with an example's tools and variables."""
        return self._conversations(example).render(messages, example.tools, add_generation_prompt)


def _asked(example: Example) -> int:
    return example.prompt_messages or example.asked_messages or len(example.messages or ()) - 1


def _before_response(template: str, text: str, low: int) -> int:
    """How many characters before a response at `low` TRL trains on too."""
    thought = _OPENED_THOUGHT.search(text, max(low - 64, 0), low)
    start = low if thought is None else thought.start()
    written = (entry for entry in _TRL_OPENINGS if entry[0] in template and text.endswith(entry[1], 0, start))
    return low - start + next((len(opening) - len(kept_opening) for _, opening, kept_opening in written), 0)


def _common_tokens(prompt: np.ndarray, ids: np.ndarray) -> int:
    shorter = min(len(prompt), len(ids))
    differs = np.flatnonzero(prompt[:shorter] != ids[:shorter])
    return int(differs[0]) if len(differs) else shorter


def derive_markers(tokenizer: Tokenizer, template: str | None = None) -> tuple[str, str]:
    """(instruction_part, response_part) of a template: what it writes before a user's message that follows a response,
    and before a response. Raises ValueError if they cannot be found.
    """
    encoder = RowEncoder(tokenizer, template=template)
    user, answer, again = ("\ue000u\ue001", "\ue000a\ue001", "\ue000v\ue001")
    turns = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    try:
        text = encoder._render(turns, Example(), add_generation_prompt=True)
    except RowError as error:
        raise ValueError(f"markers cannot be derived: {error}") from None
    between = []
    for low, high in ((user, answer), (answer, again)):
        if low not in text or high not in text:
            raise ValueError("markers cannot be derived: the template changes the messages; give both markers")
        between.append(text[text.index(low) + len(low) : text.index(high)])
    special = [tokenizer.convert_ids_to_tokens(int(index)) for index in encoder.end_ids]
    response, instruction = (_without_turn_end(gap, special) for gap in between)
    if instruction == between[1] and not encoder._ends_by_role(None).answer:
        raise ValueError("markers cannot be derived: no special token of this tokenizer ends a response; give both")
    if not response.strip() or not instruction.strip():
        raise ValueError(
            f"markers cannot be derived from this template ({instruction!r}, {response!r}); "
            "set data.instruction_part and data.response_part"
        )
    return instruction, response


def _without_turn_end(gap: str, special: list[str]) -> str:
    """`gap` without the token that ends the turn before it and white space; all of it if nothing would be left."""
    for token in sorted(special, key=len, reverse=True):
        opening = gap.removeprefix(token)
        if opening != gap and opening.strip():
            return opening.lstrip()
    return gap
