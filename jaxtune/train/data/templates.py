"""Converts examples to tokens with a chat template, and decides which tokens are trained on.

`RowEncoder` renders an example to text, with the character ranges of its responses (`Rendered`), and makes ids of the
text and a mask of the ranges (`Encoded`). The ranges are the template's `{% generation %}` marks, or, if it has none,
come from rendering the conversation up to each response; or marker strings (`markers.py`; `derive_markers` finds those
of a template). `resolve_template` reads templates, and `trained_tokenizer` puts one into a tokenizer to be stored.

The trained tokens of a response are its text and the token that ends the turn; nothing after it, and no span of
`mask_spans`. If a conversation's own text contains special tokens or markers, its responses are found by the template
even if markers are given, because text that a user typed must not open a response.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtune.conversations.dates import dated, writes_date
from jaxtune.train.data.conversations import GENERATION_MARK, SENTINEL, Conversations
from jaxtune.train.data.formats import Example, strings
from jaxtune.train.data.markers import Markers, special_ids
from jaxtune.train.data.packaged import PACKAGED, missing_marks, packaged_that_fit
from jaxtune.train.data.row_errors import RowError, SetupError, attempt, check_unicode
from jaxtune.train.data.row_files import MAX_ROW_SIZE
from jaxtune.train.data.spans import masked_spans, refuse_left_out, special_texts
from jaxtune.train.data.tokenizing import Tokens, tokenize, tokenize_pieces

TRAIN_ON = ("responses", "all")  # the values of data.train_on


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


def resolve_template(tokenizer: Any, template: str | None) -> str:
    """The Jinja text of a chat template. Rows and prompts are rendered by it; the key of the token cache contains it;
    and it is put into the tokenizer of a trained model, and by jaxtune.compat's get_chat_template into a script's.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: None or "tokenizer" (the tokenizer's own; of several, the "default"), a packaged name, the path of a
            `.jinja` file, or Jinja text.

    Raises:
        SetupError: there is no such template, or it is packaged and needs special tokens that the tokenizer lacks.
    """
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


def writes_today(tokenizer: object, template: str | None) -> bool:
    """Whether a chat template, as `resolve_template` takes it, writes the date; False if there is no such template."""
    if template in (None, "tokenizer"):
        named = getattr(tokenizer, "chat_template", None)
        return any(writes_date(text or "") for text in (named.values() if isinstance(named, dict) else [named]))
    try:
        return writes_date(resolve_template(tokenizer, template))
    except SetupError:
        return False


def _names_that_fit(tokenizer: Any) -> str:
    """A passage for error messages that propose another template: the names of the packaged templates that this
    tokenizer can use, each followed by a comma, and at the end "or to the path of"."""
    return "".join(f"{name}, " for name in packaged_that_fit(tokenizer)) + "or to the path of"


def trained_tokenizer(tokenizer: Any, template: str | None) -> Any:
    """The Trainer's tokenizer, also stored with the trained model: a copy with the chat template data.template,
    so that generation renders prompts as training did. It is `tokenizer` itself if template is None, or if there is no
    tokenizer (the rows were already tokens). Raises `SetupError` if there is no such template."""
    if template is None or tokenizer is None:
        return tokenizer
    trained = copy.copy(tokenizer)
    trained.chat_template = resolve_template(tokenizer, template)
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
        train_on: "responses" trains on responses only, "all" on all tokens.
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
        tokenizer: Any,
        *,
        template: str | None = None,
        today: str | None = None,
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
        """For each of `examples` in order, its tokens and mask (`Encoded`), or a `RowError` with the reason why it
        cannot be used. `workers.encode_chunk` calls it for the rows of a run, and on-policy distillation for answers of
        its data. Raises `SetupError` if one needs a template or an EOS, and there is no usable one."""
        rendered: list[Rendered | RowError] = [attempt(self.render, example) for example in examples]
        texts = [item.text for item in rendered if isinstance(item, Rendered)]
        try:
            tokenized = iter(self._tokenize(texts))
        except Exception:  # a text that the tokenizer refuses must affect its own row only, so each is tried separately
            tokenized = iter([attempt(lambda text: self._tokenize([text])[0], text) for text in texts])
        results: list[Encoded | RowError] = []
        for example, item in zip(examples, rendered, strict=True):
            tokens = item if isinstance(item, RowError) else next(tokenized)
            results.append(tokens if isinstance(tokens, RowError) else attempt(self._finish, example, item, tokens))
        return results

    def encode_prompt(self, example: Example) -> np.ndarray:
        """int32[n]: the prompt from which the last response of an example is generated, with BOS as in training. It is
        for answers that are sampled in training or in evaluations, not for `jaxtune chat` or serve. For an example of
        text alone, it is all of the text; for a plain prompt (data.template is null), the prompt; neither needs a
        template. For a conversation, it is the turns without the last one if that is the assistant's, rendered with the
        generation prompt (training has the same tokens before the response, unless the template renders them
        differently there). Raises `RowError` if the template fails, and `SetupError` if a conversation has none."""
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
        """The first special token, or marker string that opens turns, in the messages and tools of the conversation
        `example`; "" if there is none. A warning counts such rows, and markers are not used for them."""
        if self._special_texts is None:
            return ""
        found = (self._special_texts.search(text) for text in strings([example.messages, example.tools]))
        return next((match[0] for match in found if match), "")

    def _render_conversation(self, example: Example, special: str) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the (start, end) character ranges of its responses. The template's marks also
        give those of the prompt and those before the last one; `render` and `_finish` drop them if they do not train.
        There are none if all tokens are trained on, or if markers will find the responses.

        Args:
            example: with messages.
            special: what `_special_in` found; if it is not "", markers are not used.

        Raises:
            RowError: the template fails, the responses are not found, or an answer is marked as not to be trained on.
        """
        messages = example.messages or []
        if self.train_on != "all":
            refuse_left_out(messages[example.prompt_messages :], self.last_response_only)
        if self.train_on == "all" or (self.markers is not None and not special):
            return self._render(messages, example.tools), []
        try:
            if GENERATION_MARK.search(self._template_text()):
                return self._conversations.render_marked(messages, example.tools)
            first = max(example.prompt_messages, 1)
            if self.last_response_only:  # the ranges of the other responses are not needed
                first = max([first, *(i for i, turn in enumerate(messages) if turn["role"] == "assistant")])
            return self._conversations.render_prefixes(messages, example.tools, first)
        except RowError as error:
            if self.markers is None:
                raise
            raise RowError(
                f"its text holds {special!r}, a special token or marker, so markers cannot find its responses, and "
                f"neither can the template: {error}"
            ) from None

    def _end_of_prompt(self, example: Example, text: str) -> int:
        """The index in `text`, the rendered conversation of `example`, of the first character after the turns of its
        prompt (`Example.prompt_messages`), in which nothing is trained on; 0 if there are none, or if everything is
        trained on. Raises `RowError` if the template does not show it."""
        if not example.prompt_messages or self.train_on == "all":
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

    def _finish(self, example: Example, rendered: Rendered, tokens: Tokens) -> Encoded | RowError:
        """The tokens of a rendered example with their mask, with at most one BOS at the beginning, and an EOS for
        plain text. If a token extends over the begin of a response, the text is tokenised again, in pieces that begin
        there. Where markers find the responses, they do it here. Returns a `RowError` if there is no token. `encode`
        calls it last. rendered: the example's text, and the ranges of its responses. tokens: those of that text."""
        text, ranges = rendered.text, rendered.ranges or []
        is_raw = example.text is not None or self._is_raw(example)
        cuts = [low for low, _ in ranges if np.any((tokens.starts < low) & (low < tokens.ends))]
        if cuts:
            # A token has the end of a prompt and the begin of its response. At inference the prompt is tokenised
            # alone, so it is tokenised alone here too.
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
        added = len(with_bos) - len(ids)  # 1 if a BOS was prepended, -k if k repeated ones were removed, else 0
        mask = np.concatenate([np.zeros(1, bool), mask]) if added > 0 else mask[-added:]
        return Encoded(with_bos, mask, responses, ended, len(masked), rendered.special, rendered.left_out, tokens.cut)

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
        if eos is None:
            raise SetupError("the tokenizer has no EOS token, so no row can end; set tokenizer.eos_token")
        end = self._end_of_turn(text, tokens, 0, len(tokens), len(text))
        rendered = self.markers is not None and end > 0 and int(tokens.ids[end - 1]) in self.end_ids
        if rendered or text.rstrip().endswith(eos):
            return tokens.ids, spans
        ids = np.append(tokens.ids, np.int32(self.tokenizer.eos_token_id))
        return ids, [*spans[:-1], *((first, len(ids)) for first, _ in spans[-1:])]

    def _one_bos(self, tokens: np.ndarray) -> np.ndarray:
        """`tokens` (int32[n] token ids) with exactly one BOS at the beginning if the tokenizer adds one or the template
        wrote one (several become one), else unchanged. Rows and prompts (`encode_prompt`) get it alike."""
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
        """The tokens of each of `texts`, in order, with their positions in the text. A text of over 65,536 characters
        is cut after the window with which it has at least `max_tokens` tokens. For `encode`: prompts are not cut."""
        return tokenize(self.tokenizer, texts, self.max_tokens)

    def _template_text(self) -> str:
        """The Jinja text of the template, looked up on the first call, because plain text needs none. Raises
        `SetupError` if there is none or the tokenizer lacks its special tokens."""
        if self._jinja is None:
            self._jinja = dated(resolve_template(self.tokenizer, self.template), self.today)
        return self._jinja

    @property
    def _conversations(self) -> Conversations:
        """The `Conversations` of this encoder's template, which renders conversations and finds their responses; made
        anew on each access. Raises `SetupError` if there is no such template."""
        return Conversations(self.tokenizer, self._template_text(), self._special_texts, self.end_ids)

    def _render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation (messages, and tools or None) by this encoder's template, for prompts and for rows
        whose responses the template need not find. add_generation_prompt: whether the text ends with what the template
        writes before a response. Raises `RowError` if the template fails on it, `SetupError` if there is none."""
        return self._conversations.render(messages, tools, add_generation_prompt)


def derive_markers(tokenizer: Any, template: str | None = None) -> tuple[str, str]:
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
