"""Converts examples to tokens with a chat template, and decides which tokens are trained on.

`RowEncoder` renders an example to text, with the character ranges of its responses (`Rendered`), and makes ids of the
text and a mask of the ranges (`Encoded`). The ranges are the template's `{% generation %}` marks, or, if it has none,
come from rendering the conversation up to each response; or marker strings (`markers.py`; `derive_markers` finds those
of a template). `resolve_template` reads templates, and `trained_tokenizer` puts one into a tokenizer to be stored.

The trained tokens of a response are its text and the token that ends the turn; nothing after it, and no span of
`mask_spans`. Of train_on="turns" and "completion" they are those of TRL and Unsloth, with all that the template writes
for the turn. If a conversation's own text contains special tokens or markers, its responses are found by the template
even if markers are given, because text that a user typed must not open a response.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtune.conversations.dates import dated, writes_date
from jaxtune.conversations.messages import template_for
from jaxtune.conversations.prompts import prompt_tokens
from jaxtune.conversations.templates import (
    TemplateError,
    asking_template,
    asking_templates,
    guarded,
    special_pattern,
    unguarded,
)
from jaxtune.conversations.tokenizing import (
    Tokenizer,
    Tokens,
    beginning,
    end_ids,
    tokenize,
    tokenize_pieces,
    with_beginning,
)
from jaxtune.train.data.conversations import GENERATION_MARK, SENTINEL, Conversations
from jaxtune.train.data.formats import Example, strings
from jaxtune.train.data.markers import Markers
from jaxtune.train.data.packaged import PACKAGED, missing_marks, packaged_that_fit
from jaxtune.train.data.row_errors import RowError, SetupError, attempt, check_unicode
from jaxtune.train.data.row_files import MAX_ROW_SIZE
from jaxtune.train.data.spans import (
    is_marked,
    masked_spans,
    refuse_marked_questions,
    special_texts,
    untrained_spans,
    within,
)

TRAIN_ON = ("responses", "turns", "completion", "all")  # the values of data.train_on
TrainOn = Literal["responses", "turns", "completion", "all"]
# (a part of a template's text, what it writes before a response, the beginning of that behind which the response begins
# in TRL's marked version of the template)
_TRL_OPENINGS = (
    ("You are Qwen, created by Alibaba Cloud", "<|im_start|>assistant\n", "<|im_start|>assistant"),
    ("<|start|>assistant", "<|start|>assistant", ""),
)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One example as tokens, with counts for the summary of all rows; `RowEncoder.encode` makes it."""

    tokens: np.ndarray
    """int32[n]: token ids."""
    mask: np.ndarray
    """bool[n]: True where the token is trained on."""
    responses: int
    """The number of responses that are trained on; 1 with train_on="all"."""
    ended: int
    """The number of these responses that end with a token that ends a turn, or were cut before it. With train_on="all"
    it is 1 if any token but the first is such a token or the text was cut, else 0."""
    masked: int = 0
    """The number of tokens of responses that `mask_spans` excludes."""
    special: str = ""
    """A special token or marker that the text of the messages contains; "" if there is none."""
    left_out: str = ""
    """What the template does not write of the conversation, in words, such as "tools"; "" if it writes everything."""
    cut: bool = False
    """Whether the text was cut at `max_tokens`."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """One example as text, with the ranges of its responses: what `RowEncoder` makes of it before it tokenises."""

    text: str
    """The text to tokenise."""
    ranges: list[tuple[int, int]] | None
    """The (start, end) character ranges of its responses: all of it for text alone, the completion for a plain prompt,
    [] for a conversation of which all is trained on, as no range is needed; None if markers find them in the tokens."""
    special: str = ""
    """A special token or marker that the text of the messages contains; "" if there is none."""
    left_out: str = ""
    """What the template does not write of the conversation, in words, such as "tools"; "" if it writes everything."""
    begin: int = 0
    """The index of the first character after the prompt's turns, before which nothing is trained on; 0 without them."""
    excluded: tuple[tuple[int, int], ...] = ()
    """The (start, end) character ranges of answers, or parts of them, that the row's marks exclude."""
    cuts: tuple[int, ...] = ()
    """Places within special tokens' texts that tools returned: no token extends over them."""
    prompt: str | None = None
    """The text before a completion, as it is tokenised alone, if that decides where the completion begins."""


def resolve_template(tokenizer: Tokenizer, template: str | None, tools: object = None) -> str:
    """The Jinja text of a chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: None or "tokenizer" (the tokenizer's own; of several, the one for `tools`), a packaged name, the path
            of a `.jinja` file, or Jinja text.
        tools: the tools of the conversation, or None.

    Raises:
        SetupError: there is no such template, or it is packaged and needs special tokens that the tokenizer lacks.
    """
    if template is None or template == "tokenizer":
        own = template_for(tokenizer.chat_template, tools)
        if own is None:
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


def writes_today(tokenizer: object, template: str | None) -> bool:
    """Whether a chat template, as `resolve_template` takes it, writes the date; False if there is no such template."""
    if template in (None, "tokenizer"):
        named = getattr(tokenizer, "chat_template", None)
        return any(writes_date(text or "") for text in (named.values() if isinstance(named, dict) else [named]))
    try:
        return writes_date(resolve_template(tokenizer, template))
    except SetupError:
        return False


def _names_that_fit(tokenizer: Tokenizer) -> str:
    """A passage for error messages that propose another template: the names of the packaged templates that this
    tokenizer can use, each followed by a comma, and at the end "or to the path of"."""
    return "".join(f"{name}, " for name in packaged_that_fit(tokenizer)) + "or to the path of"


def trained_tokenizer(tokenizer: Tokenizer, template: str | None, arguments: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer of a trained model, whose chat template writes by itself what prompts have in training: a copy, or
    `tokenizer` itself if nothing changes. Raises `SetupError` if there is no such template."""
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
    """Converts examples to tokens and masks (`encode`), for the rows of a run, and to prompts (`encode_prompt`), for
    answers that are sampled in training or in evaluations. `end_ids` are the ids of the tokens that may end a turn:
    EOS, and all special tokens but BOS and UNK.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: a chat template, in any form that `resolve_template` takes; None is the tokenizer's own. With None,
            prompts and completions are plain text and are not rendered; otherwise they become a conversation.
        today: the day that the template writes, as data.today; None: the day of asking.
        train_on: "responses" trains on responses, up to the token that ends the turn; "turns" on the assistant's turns
            with all that the template writes for them, as TRL's assistant_only_loss and Unsloth's markers; "completion"
            on all that follows the prompt, as TRL; "all" on all tokens.
        instruction_part, response_part: marker strings, both or neither. If they are given, `markers.Markers` finds the
            responses, otherwise the template does. They are ignored with train_on="all".
        last_response_only: train only on the last response of a conversation (True) or on all of them (False).
        mask_spans: (opening, closing) pairs of texts; tokens of a response from an opening to its closing, both
            included, are not trained on. A span without a closing reaches to the end of its response.
        max_tokens: a text may be cut once it has at least this many tokens: after a window of 65,536 characters, or,
            if it is tokenised in pieces (`_finish`), after a piece. None cuts nothing.

    Raises:
        ValueError: an argument is wrong, or the tokenizer is not fast.
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
            len(pair) != 2 or not all(isinstance(part, str) and part.strip() for part in pair)
            for pair in self.mask_spans
        ):
            raise ValueError(f"data.mask_spans={mask_spans!r}: give pairs of texts, such as [[<think>, </think>]]")
        self.max_tokens = max_tokens
        self.markers = None
        if train_on in ("responses", "turns") and (instruction_part is not None or response_part is not None):
            self.markers = Markers(tokenizer, instruction_part, response_part)
        self._special_texts = special_texts(tokenizer, (instruction_part, response_part) if self.markers else ())
        self._special_tokens = special_pattern(tokenizer)
        self.end_ids = end_ids(tokenizer)
        self._begins = beginning(tokenizer)
        self._jinja: dict[bool, str] = {}

    # --- rows

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """For each of `examples` in order, its tokens and mask (`Encoded`), or a `RowError` with the reason why it
        cannot be used. `workers.encode_chunk` calls it for the rows of a run, and on-policy distillation for answers of
        its data. Raises `SetupError` if one needs a template or an EOS, and there is no usable one."""
        rendered: list[Rendered | RowError] = [attempt(self.render, example) for example in examples]
        texts = [item.text for item in rendered if isinstance(item, Rendered)]
        texts += [item.prompt for item in rendered if isinstance(item, Rendered) and item.prompt is not None]
        try:
            tokenized = iter(self._tokenize(texts))
        except Exception:  # a text that the tokenizer refuses must affect its own row only, so each is tried separately
            tokenized = iter([attempt(lambda text: self._tokenize([text])[0], text) for text in texts])
        whole = [item if isinstance(item, RowError) else next(tokenized) for item in rendered]
        results: list[Encoded | RowError] = []
        for example, item, tokens in zip(examples, rendered, whole, strict=True):
            prompt = next(tokenized) if isinstance(item, Rendered) and item.prompt is not None else None
            wrong = next((one for one in (tokens, prompt) if isinstance(one, RowError)), None)
            results.append(wrong or attempt(self._finish, example, item, tokens, prompt))
        return results

    def encode_prompt(self, example: Example) -> np.ndarray:
        """int32[n]: the prompt from which the last response of an example is generated: all of a text alone, a plain
        prompt (data.template is null), or a conversation without its last message if that is the assistant's. Raises
        `RowError` if the template fails, and `SetupError` if a conversation has none."""
        prompt: Any = example.text
        if prompt is None and self._is_raw(example):
            prompt = example.prompt or ""
        template = None
        if prompt is None:
            template, prompt = self._template_text(example.tools), list(example.messages or ())
            if prompt and prompt[-1]["role"] == "assistant":
                prompt.pop()
        try:
            ids = prompt_tokens(self.tokenizer, prompt, template=template, tools=example.tools)
        except TemplateError as error:
            raise RowError(str(error)) from None
        return np.array(ids, np.int32)

    def around_answer(self, example: Example) -> tuple[str, str]:
        """The texts that the template itself adds (before, after) the last answer of the conversation of `example`.
        Exact match (`evaluate.questions_of`) sees by them where, in what a model generates, the answer begins, and
        which token ends it. Raises `RowError` if the template fails.

        Before an answer, some templates write an empty thought or the name of a channel after the generation prompt;
        after it, they write the end of the turn. Both are "" for a plain prompt, or if they cannot be found.
        """
        if self._is_raw(example) or not example.messages:
            return "", ""
        prompt = self._render(example.messages[:-1], example.tools, add_generation_prompt=True)
        text = self._render([*example.messages[:-1], {"role": "assistant", "content": SENTINEL}], example.tools)
        before, found, after = text.removeprefix(prompt).partition(SENTINEL)
        return (before, after) if found and text.startswith(prompt) else ("", "")

    def render(self, example: Example) -> Rendered:
        """The text of an example (text, prompt with completion, or a rendered conversation) and the ranges of its
        responses: the first part of `encode`, which alone calls it. Raises `RowError` if it cannot be rendered,
        its responses are not found or may not be trained on, or its text is too long or not Unicode."""
        cuts: list[int] = []
        asked: str | None = None
        if example.text is not None:
            text, ranges, special, left_out, begin = example.text, [(0, len(example.text))], "", "", 0
            excluded = []
        elif self._is_raw(example):
            text, special, left_out, begin = (example.prompt or "") + (example.completion or ""), "", "", 0
            excluded = []
            ranges = [(len(example.prompt or ""), len(text))]
            asked = example.prompt or ""
        else:
            special = self._special_in(example)
            messages, mark = guarded(example.messages or [], self._special_tokens)
            example = dataclasses.replace(example, messages=messages)
            text, ranges, excluded = self._render_conversation(example, special)
            begin = self._end_of_prompt(example, text)
            ranges = [(low, high) for low, high in ranges if high > begin]
            if self.train_on == "completion" or (self.train_on == "turns" and example.prompt_messages):
                asked = self._render(messages[: _asked(example)], example.tools, add_generation_prompt=True)
            left_out = self._conversations(example.tools).left_out(messages, example.tools, text)
            if mark:  # positions are counted without the marks
                begin = begin - text.count(mark, 0, begin)
                ranges, excluded = (
                    [(low - text.count(mark, 0, low), high - text.count(mark, 0, high)) for low, high in some]
                    for some in (ranges, excluded)
                )
                text, cuts = unguarded(text, mark)
                asked = None if asked is None else unguarded(asked, mark)[0]
        check_unicode(text)
        if len(text) > 2 * MAX_ROW_SIZE:
            raise RowError(
                f"its text has {len(text):,} characters once the template is applied; divide it into several rows"
            )
        by_markers = self.markers is not None and not special and not is_marked(self._trained(example))
        shown = None if by_markers else ranges
        asked = None if example.text is not None or self.train_on in ("responses", "all") else asked
        return Rendered(text, shown, special, left_out, begin, tuple(excluded), tuple(cuts), asked)

    def _special_in(self, example: Example) -> str:
        """The first special token, or marker string that opens turns, in the messages and tools of the conversation
        `example`; "" if there is none. A warning counts such rows, and markers are not used for them."""
        if self._special_texts is None:
            return ""
        found = (self._special_texts.search(text) for text in strings([example.messages, example.tools]))
        return next((match[0] for match in found if match), "")

    def _render_conversation(
        self, example: Example, special: str
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """(Text of a conversation, character ranges of its responses, those within them that its marks exclude). Ranges
        of the prompt and before the last response may be among them. There are none if all tokens are trained on, or if
        markers will find the responses. Raises `RowError` if the template fails, or does not show the responses."""
        messages = example.messages or []
        marked = is_marked(self._trained(example))
        if self.train_on == "completion" and marked:
            raise RowError("its turns are marked, and data.train_on=completion trains on all of a completion")
        if self.train_on == "all":
            refuse_marked_questions(messages)
        if not marked and (self.train_on in ("all", "completion") or (self.markers is not None and not special)):
            return self._render(messages, example.tools), [], []
        responses = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
        first = max(example.prompt_messages, 1)
        if self.last_response_only:  # the ranges of the other responses are not needed
            first = max([first, *responses])
        try:
            conversations = self._conversations(example.tools)
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
                by_message = {i: [one] for i, one in zip([i for i in responses if i >= first], ranges, strict=True)}
            return self._by_marks(example, text, by_message)
        except RowError as error:
            if self.markers is None or marked:
                raise
            raise RowError(
                f"its text holds {special!r}, a special token or marker, so markers cannot find its responses, and "
                f"neither can the template: {error}"
            ) from None

    def _trained(self, example: Example) -> list[dict]:
        """The messages of which something may be trained on."""
        return (example.messages or [])[0 if self.train_on == "all" else example.prompt_messages :]

    def _by_marks(
        self, example: Example, text: str, by_message: dict[int, list[tuple[int, int]]]
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """What `_render_conversation` returns of a conversation whose messages have marks. by_message: the ranges of
        its responses by the index of the message."""
        messages = example.messages or []
        kept, excluded = [], []
        last = max(by_message, default=0)
        for index in range(len(messages) - len(self._trained(example)), len(messages)):
            message, ranges = messages[index], by_message.get(index)
            if message["role"] != "assistant" or (self.last_response_only and index < last):
                continue
            if ranges is None and (self.train_on == "all" or index > 0) and is_marked([message]):
                raise RowError(f"the chat template does not show messages[{index}], whose marks cannot be followed")
            train = message.get("train", True)
            (kept if train else excluded).extend(ranges or ())
            if train and ranges and (spans := untrained_spans(message)):
                start, stripped = self._conversations(example.tools).content_range(messages, example.tools, text, index)
                excluded += [(start + max(low - stripped, 0), start + high - stripped) for low, high in spans]
        return text, [] if self.train_on == "all" else kept, excluded

    def _end_of_prompt(self, example: Example, text: str) -> int:
        """The index in `text`, the rendered conversation of `example`, of the first character after the turns of its
        prompt (`Example.prompt_messages`), in which nothing is trained on; 0 if there are none, or if everything is
        trained on. Raises `RowError` if the template does not show it."""
        if not example.prompt_messages or self.train_on in ("all", "completion"):
            return 0
        asked = (example.messages or [])[: example.prompt_messages]
        for asking in (False, True):  # some templates write an end after the last turn without a generation prompt
            prompt = self._render(asked, example.tools, add_generation_prompt=asking)
            if text.startswith(prompt):
                return len(prompt)
        raise RowError(
            "the chat template writes the turns of the prompt differently once the completion follows, so they cannot "
            "be separated; make one list `messages` of them, and set data.last_response_only=true"
        )

    def _is_raw(self, example: Example) -> bool:
        """Whether an example is a prompt (and completion, if any) that stays plain text, as no template was given."""
        return example.prompt is not None and self.template is None

    def _finish(
        self, example: Example, rendered: Rendered, tokens: Tokens, prompt: Tokens | None
    ) -> Encoded | RowError:
        """The tokens of a rendered example with their mask, with at most one BOS at the beginning, and an EOS for
        plain text; a `RowError` if there is none.

        rendered: the example's text, and the ranges of its responses. tokens, prompt: those of its texts."""
        text, ranges = rendered.text, rendered.ranges or []
        is_raw = example.text is not None or self._is_raw(example)
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
            spans = [
                (first, last if exact or last > len(tokens) else self._end_of_turn(text, tokens, first, last))
                for first, last in self.markers.spans(ids)
                if not rendered.begin or rendered.begin < tokens.ends[last - 1]
            ]
            spans = spans[-1 if self.last_response_only else 0 :]
        if prompt is not None:
            after = _common_tokens(prompt.ids, ids)
            turns = [(max(first, after), last) for first, last in spans]
            spans = turns if self.train_on == "turns" else [(after, len(ids))]
        mask, spans, responses, ended = self._mask(ids, spans, tokens)
        masked = masked_spans(text, tokens, spans, self.mask_spans)
        mask[masked] = False
        mask[: len(tokens)] &= ~within(tokens, rendered.excluded)
        with_bos = np.array(with_beginning(self.tokenizer, ids.tolist(), self._begins), np.int32)
        added = len(with_bos) - len(ids)  # 1 if a BOS was prepended, -k if k repeated ones were removed, else 0
        mask = np.concatenate([np.zeros(added, bool), mask]) if added > 0 else mask[-added:]
        return Encoded(with_bos, mask, responses, ended, len(masked), rendered.special, rendered.left_out, tokens.cut)

    def _mask(
        self, ids: np.ndarray, spans: list[tuple[int, int]], tokens: Tokens
    ) -> tuple[np.ndarray, list[tuple[int, int]], int, int]:
        """(The mask of a row's tokens `ids`, its spans that are not empty, `responses` and `ended` of Encoded)."""
        mask = np.zeros(len(ids), bool)
        if self.train_on == "all":
            mask[:] = True
            ended = int(tokens.cut or any(int(token) in self.end_ids for token in ids[1:]))
            return mask, [(0, len(ids))], 1, ended
        spans = [(first, last) for first, last in spans if first < last]
        ended = 0
        for first, last in spans:
            mask[first:last] = True
            # White space may follow the token that ends the turn.
            trained = ids[max(first, last - 2) : last] if self.train_on != "responses" else ids[last - 1 : last]
            ended += bool(any(int(token) in self.end_ids for token in trained) or (tokens.cut and last == len(ids)))
        return mask, spans, len(spans), ended

    def _end_of_turn(self, text: str, tokens: Tokens, first: int, last: int, high: int | None = None) -> int:
        """The index after the last token of a response that is trained on, without white space that the template writes
        after the token that ends the turn; `last` if no token ends the turn, or other text follows that token.

        Args:
            text, tokens: the text of the row and its tokens.
            first, last: the token range of the response.
            high: the index in the text after the response's last character; None is the end of its last token.
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
        """Appends an EOS to a row of plain text and to its last response (if any), so that the model learns to stop.
        Returns (the token ids, int32[n]; the ranges). Raises `SetupError` if the tokenizer has no EOS.

        A row that already ends with EOS is not changed. If markers are used, the row's text is a conversation that was
        rendered before; it is not changed either if it ends with another token that ends a turn, such as Gemma's.

        Args:
            text, tokens: the text of the row and its tokens.
            spans: the (start, end) token ranges of its responses.
        """
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
        """The tokens of each of `texts`, in order, with their positions in the text. A text of over 65,536 characters
        is cut after the window with which it has at least `max_tokens` tokens. For `encode`: prompts are not cut."""
        return tokenize(self.tokenizer, texts, self.max_tokens)

    def _template_text(self, tools: object = None) -> str:
        """The Jinja text of the template, looked up when it is needed, because plain text needs none. Raises
        `SetupError` if there is none or the tokenizer lacks its special tokens."""
        if bool(tools) not in self._jinja:
            self._jinja[bool(tools)] = dated(resolve_template(self.tokenizer, self.template, tools), self.today)
        return self._jinja[bool(tools)]

    def _conversations(self, tools: object) -> Conversations:
        """Renders conversations with these tools by the template, and finds their responses."""
        whole = self.train_on == "turns"
        return Conversations(self.tokenizer, self._template_text(tools), self._special_texts, self.end_ids, whole)

    def _render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation (messages, and tools or None) by this encoder's template, for prompts and for rows
        whose responses the template need not find. add_generation_prompt: whether the text ends with what the template
        writes before a response. Raises `RowError` if the template fails on it, `SetupError` if there is none."""
        return self._conversations(tools).render(messages, tools, add_generation_prompt)


def _asked(example: Example) -> int:
    """How many messages of a conversation are the prompt of its completion: all but the last, if it does not say."""
    return example.prompt_messages or example.asked_messages or len(example.messages or ()) - 1


def _before_response(template: str, text: str, low: int) -> int:
    """How many characters before a response, at `low`, TRL trains on too."""
    written = (one for one in _TRL_OPENINGS if one[0] in template and text.endswith(one[1], 0, low))
    return next((len(opening) - len(kept) for _, opening, kept in written), 0)


def _common_tokens(prompt: np.ndarray, ids: np.ndarray) -> int:
    """How many tokens both begin with."""
    shorter = min(len(prompt), len(ids))
    differs = np.flatnonzero(prompt[:shorter] != ids[:shorter])
    return int(differs[0]) if len(differs) else shorter


def derive_markers(tokenizer: Tokenizer, template: str | None = None) -> tuple[str, str]:
    """Returns the markers (instruction_part, response_part) of a chat template, for jaxtune.compat's
    train_on_responses_only without markers: the texts that it writes before a user's message that follows a response,
    and before a response. A short conversation is rendered with `template`, as `RowEncoder` takes it.

    Raises:
      ValueError: the markers cannot be found in what the template writes, or there is no such template.
    """
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
    """The text that opens the next turn, a marker: `gap`, the text between two messages, without the token of `special`
    that ends the turn before and white space after it; all of `gap` if it does not begin so, or no text follows."""
    for token in sorted(special, key=len, reverse=True):
        rest = gap.removeprefix(token)
        if rest != gap and rest.strip():
            return rest.lstrip()
    return gap
