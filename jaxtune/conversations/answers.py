"""A model's answer, split into thoughts, text and tool calls by its template's family.

Thoughts are cut first: a call within one is no call. `AnswerReader` reads whole answers or streams.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxtune.conversations.calls import FORMS, HERMES, Call, CallForm, Schemas, channel_call
from jaxtune.conversations.messages import Message, template_for
from jaxtune.conversations.tokenizing import Tokenizer, special_ids
from jaxtune.conversations.values import ends_in_string

type Kind = Literal["thought", "content"]
type Pieces = list[tuple[Kind, str]]

_TAIL = 64  # tokens of a prompt's end, in which an answer may have opening


@dataclasses.dataclass(frozen=True)
class Answer:
    """A parsed answer."""

    content: str
    reasoning: str = ""
    """The thoughts before the answer, or ""."""
    calls: tuple[Call, ...] = ()

    @property
    def message(self) -> Message:
        """The answer as an assistant message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message for call in self.calls]
        return message

    @property
    def shown(self) -> str:
        return f"{self.reasoning}\n\n{self.content}" if self.reasoning else self.content


def whole_text(message: Mapping[str, object]) -> str:
    """A message's content after its `reasoning_content`, if any, in <think> tags."""
    content, thoughts = message.get("content"), message.get("reasoning_content")
    text = content if isinstance(content, str) else ""
    return f"<think>{thoughts}</think>{text}" if thoughts else text


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """How a family marks thoughts. source: texts of its templates' Jinja source; title: how thoughts begin; wrapper:
    marks around the text after them.
    """

    source: tuple[str, ...]
    opens: str
    closes: str
    title: str = ""
    wrapper: tuple[str, str] | None = None


# The first whose `source` a template has is taken.
THOUGHTS = (
    Thoughts(("<|channel>", "<channel|>"), "<|channel>", "<channel|>", "thought"),  # Gemma 4
    Thoughts(("[/THINK]",), "[THINK]", "[/THINK]"),  # Magistral
    Thoughts(("<seed:think>",), "<seed:think>", "</seed:think>"),
    Thoughts(("◁/think▷",), "◁think▷", "◁/think▷"),  # Kimi
    Thoughts(("<|inner_prefix|>",), "<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Thoughts(
        ("<|START_THINKING|>",),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Thoughts(("</think>", "</response>"), "<think>", "</think>", wrapper=("<response>", "</response>")),  # Granite 3.3
    Thoughts(("</think>",), "<think>", "</think>"),  # Qwen, DeepSeek, GLM, Nemotron and others
)
_CHANNELS = ("<|channel|>", "<|message|>")  # gpt-oss's
_CHANNEL_MARKS = (*_CHANNELS, "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_FINAL = re.compile(r"<\|channel\|>final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>")
_TAG = re.compile(r"[<\[].*[>\]]")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


class Mark(NamedTuple):
    """A text in answers, which may be a token of its own."""

    text: str
    token: int | None


class AnswerReader:
    """Reads the answers to prompts of one chat template.

    template: Jinja text; None: answers are plain text, and calls have Hermes' form.
    form: of calls; None if the template writes no known one.
    thinks: whether the family's answers have thoughts.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None):
        source = _COMMENT.sub("", template or "")
        self._tokenizer = tokenizer
        self._channels = all(mark in source for mark in _CHANNELS)
        self._thoughts = next((family for family in THOUGHTS if all(mark in source for mark in family.source)), None)
        self.form = next((family for family in FORMS if all(mark in source for mark in family.source)), None)
        if self._channels:
            self._thoughts = self.form = None
        self.thinks = self._channels or self._thoughts is not None
        self.writes_calls = self.form is not None or (self._channels and "functions." in source)
        self._specials = special_ids(tokenizer)
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self._added_tags = {text: index for text, index in added.items() if _TAG.fullmatch(text)}
        self._thought_marks, self._call_marks = self._special()

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: object = None) -> AnswerReader:
        """The reader for the tokenizer's own template, of several the one for `tools`."""
        return cls(tokenizer, template_for(tokenizer.chat_template, tools))

    def call_grammar(self, schemas: Schemas, many: bool) -> str | None:
        """A grammar of answers that call tools, in llguidance's Lark; None for gpt-oss, whose calls are messages.

        schemas: {tool's name: JSON schema of its arguments} of the tools that may be called.
        many: whether several calls may follow each other.
        """
        return None if self._channels else (self.form or HERMES).grammar(schemas, self._added_tags, many)

    def begun_call_grammar(self, schemas: Schemas) -> str | None:
        """A grammar of any text up to the mark that opens calls, and of calls; None for families without that mark.

        schemas: {tool's name: JSON schema of its arguments} of the tools that may be called.
        """
        form = self.form or HERMES
        if self._channels or not form.opens or not schemas:
            return None
        return form.grammar(schemas, self._added_tags, behind_text=True)

    @property
    def marks(self) -> list[Mark]:
        """The mark that opens calls and, of a family that thinks, those that open and close thoughts."""
        thoughts = () if self._thoughts is None else (self._thoughts.opens, self._thoughts.closes)
        return [Mark(text, self._added_tags.get(text)) for text in ((self.form or HERMES).opens, *thoughts)]

    def any_call_grammar(self) -> str | None:
        """A grammar of calls whose arguments follow none: any text between their marks; None for families without
        opening marks.
        """
        form = self.form or HERMES
        if self._channels or not form.opens:
            return None
        texts = " | ".join(["TEXT", *map(self._in_lark, form.marks)])
        return f"start: {self._in_lark(form.opens)} ({texts})* {self._in_lark(form.closes)}\nTEXT: /(?s:.+)/"

    def _in_lark(self, mark: str) -> str:
        token = self._added_tags.get(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    @property
    def marks_are_special(self) -> bool:
        """Whether thoughts are marked by special tokens, which text without them cannot show."""
        marks = _CHANNELS if self._channels else () if self._thoughts is None else (self._thoughts.opens,)
        return bool(marks) and set(marks) <= self._thought_marks.keys()

    def _special(self) -> tuple[dict[str, int], dict[str, int]]:
        """({mark: id} of thoughts, the same of calls), of marks that are special tokens; other marks are plain text."""
        by_text = {str(self._tokenizer.convert_ids_to_tokens(token)): token for token in self._specials}
        thoughts, form = self._thoughts, self.form
        of_thoughts = _CHANNEL_MARKS if self._channels else ()
        if thoughts is not None:
            of_thoughts = (thoughts.opens, thoughts.closes, *(thoughts.wrapper or ()))
        of_calls = () if form is None else (form.opens, form.closes, *form.marks)
        first, second = (
            {mark: by_text[mark] for mark in marks if mark in by_text} for marks in (of_thoughts, of_calls)
        )
        return first, second

    def text(self, ids: Sequence[int], ends: Sequence[int] = (), calls: bool = True) -> str:
        """The text of an answer, with no special tokens but the marks of thoughts and, with `calls`, of calls.

        ids: of the answer.
        ends: ids that are dropped as last token.
        calls: whether marks of calls stay in the text.
        """
        marks = {*self._thought_marks.values(), *(self._call_marks.values() if calls else ())}
        visible_ids = list(ids[:-1] if len(ids) and ids[-1] in ends else ids)
        visible_ids = [int(token) for token in visible_ids if token not in self._specials or token in marks]
        return str(self._tokenizer.decode(visible_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def opening(self, prompt_ids: Sequence[int], continues: bool = False) -> str:
        """The beginning of an answer that a prompt's end holds, such as "<think>", or "".

        prompt_ids: token ids of the prompt.
        continues: the prompt ends within a message, whose text is no part of the answer.
        """
        if not self.thinks:
            return ""
        ids = list(prompt_ids if continues else prompt_ids[-_TAIL:])
        tail = str(self._tokenizer.decode(ids, skip_special_tokens=False)).rstrip()
        if self._channels:
            _, start_mark, opening = tail.rpartition("<|start|>assistant")
            header, message_mark, _ = opening.rpartition("<|message|>")
            return (header + message_mark or opening) if start_mark and "<|end|>" not in opening else ""
        assert self._thoughts is not None
        opens = self._thoughts.opens
        openings = (opens + self._thoughts.title, opens)
        if continues:
            _, opened, thought = tail.rpartition(opens)
            open_ends = opened and self._thoughts.closes not in thought
            return next(text for text in openings if (opened + thought).startswith(text)) if open_ends else ""
        return next((text for text in openings if tail.endswith(text)), "")

    def before_content(
        self, prompt_ids: Sequence[int], opening: str
    ) -> tuple[re.Pattern[str] | None, bool, int | None]:
        """(what ends thoughts, in text with special tokens, or None if there are none; whether an answer begins in
        thoughts; the token with which it may open some, or None).

        prompt_ids: token ids of the prompt.
        opening: the beginning of the answer that the prompt's end holds.
        """
        if self._channels:
            return _FINAL, True, None
        if self._thoughts is None:
            return None, False, None
        tail = str(self._tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)).rstrip()
        is_over = tail.endswith(self._thoughts.closes)
        opens = None if is_over or opening else self._thought_marks.get(self._thoughts.opens)
        return re.compile(re.escape(self._thoughts.closes)), bool(opening), opens

    def stream(self, schemas: Schemas | None = None, opening: str = "") -> AnswerStream:
        """A stream that reads an answer piece by piece.

        schemas: {tool's name: JSON schema of its arguments} of the tools that it may call; None: calls stay text.
        opening: the beginning of the answer that the prompt's end holds (`opening`), such as "<think>"; "": none.
        """
        if self._channels:
            return _Channels(schemas, opening)
        form = None if schemas is None else self.form or HERMES
        return _Tags(self._thoughts, form, schemas or {}, opening, self._call_marks)

    def read(
        self,
        ids: Sequence[int],
        schemas: Schemas | None = None,
        opening: str = "",
        ends: Sequence[int] = (),
        cut: bool = False,
    ) -> Answer:
        """The answer of tokens.

        ids: of the answer alone, without the prompt.
        schemas: {tool's name: JSON schema of its arguments} of the tools that it may call; None: calls stay text.
        opening: the beginning of the answer that the prompt's end holds (`opening`), such as "<think>"; "": none.
        ends: ids that are dropped as last token.
        cut: the answer did not end by itself, so that a call without its closing mark is text.
        """
        return self.read_text(self.text(ids, ends, schemas is not None), schemas, opening, cut)

    def read_text(self, text: str, schemas: Schemas | None = None, opening: str = "", cut: bool = False) -> Answer:
        """The answer of a text.

        text: of the answer, with the marks of thoughts and calls.
        schemas: {tool's name: JSON schema of its arguments} of the tools that it may call; None: calls stay text.
        opening: the beginning of the answer that the prompt's end holds (`opening`), such as "<think>"; "": none.
        cut: the answer did not end by itself, so that a call without its closing mark is text.
        """
        stream = self.stream(schemas, opening)
        pieces = [*stream.add(text), *stream.end(cut)]
        thoughts, content = ("".join(text for kind, text in pieces if kind == name) for name in ("thought", "content"))
        return Answer(content, thoughts, tuple(stream.calls))


class AnswerStream:
    """An answer read as its text arrives: `add` returns what is certain, `end` the rest, and then `calls` is set. The
    joined pieces do not depend on where the text was cut.

    Attributes:
      thinking: where in the text thoughts begin and end, with their closing marks.
    """

    def __init__(self):
        self.calls: list[Call] = []
        self.thinking: list[tuple[int, int]] = []
        self._added = 0  # characters
        self._text = ""  # not read yet
        self._spaces: dict[Kind, str] = {"thought": "", "content": ""}  # white space that may be the last of its kind
        self._strips: set[Kind] = {"thought"}  # kinds of which white space that comes next is left out
        self._said: set[Kind] = set()

    def add(self, text: str) -> Pieces:
        self._text += text
        self._added += len(text)
        return _joined(self._advance(False))

    def end(self, cut: bool = False) -> Pieces:
        """cut: the answer did not end by itself, so that a call without its closing mark is text."""
        return _joined([*self._advance(True), *self._close(cut)])

    def _advance(self, last: bool) -> Pieces:
        """Reads as far as no later text can change the result; with `last`, all."""
        pieces: Pieces = []
        while True:
            before = self._state, self._text
            pieces += self._step(last)
            if (self._state, self._text) == before:
                return pieces
            if before[0] in ("thought", "draft"):
                self._thought_of(len(before[1]), len(self._text))

    def _thought_of(self, unread: int, unread_then: int) -> None:
        """What was read is a thought."""
        begin, end = max(0, self._added - unread), max(0, self._added - unread_then)
        if self.thinking and self.thinking[-1][1] == begin:
            begin, _ = self.thinking.pop()
        self.thinking += [(begin, end)] if end > begin else []

    _state = ""

    def _step(self, last: bool) -> Pieces:
        raise NotImplementedError

    def _close(self, cut: bool) -> Pieces:
        raise NotImplementedError

    def _until(self, marks: Sequence[str], last: bool) -> tuple[str, str]:
        """Takes the unread text before the first mark, and that mark ("" if none has come)."""
        candidates = [(offset, -len(mark), mark) for mark in marks if mark and (offset := self._text.find(mark)) >= 0]
        if candidates:
            offset, _, mark = min(candidates)
        else:
            offset, mark = len(self._text), ""
            offset -= 0 if last else max((overlap(self._text, mark) for mark in marks), default=0)
        text, self._text = self._text[:offset], self._text[offset + len(mark) :]
        return text, mark

    def _say(self, kind: Kind, text: str, hold: bool = True) -> Pieces:
        """Text of a kind. hold: white space at its end waits for what follows."""
        text = text.lstrip() if kind in self._strips else text
        if not text:
            return []
        self._strips.discard(kind)
        text = self._spaces[kind] + text
        settled = text.rstrip() if hold else text
        self._spaces[kind] = text[len(settled) :]
        if settled:
            self._said.add(kind)
        return [(kind, settled)] if settled else []

    def _again(self, kind: Kind, between: str) -> None:
        """Begins another text of a kind, separated by `between` from an earlier one."""
        self._strips.add(kind)
        self._spaces[kind] = between if kind in self._said else ""


def _joined(pieces: Pieces) -> Pieces:
    """Pieces with neighbours of one kind joined."""
    joined: Pieces = []
    for kind, text in pieces:
        if joined and joined[-1][0] == kind:
            joined[-1] = kind, joined[-1][1] + text
        else:
            joined.append((kind, text))
    return joined


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin `mark`, short of all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


class _Tags(AnswerStream):
    """Thoughts and calls between marks. marks: special tokens, removed from the text of malformed calls."""

    def __init__(
        self, thoughts: Thoughts | None, form: CallForm | None, schemas: Schemas, opening: str, marks: Iterable[str]
    ):
        super().__init__()
        self._thoughts, self._form, self._schemas, self._marks = thoughts, form, schemas, marks
        self._state = "content"
        self._called: list[list[Call]] = []  # of each text of calls that has ended
        self._block = ""  # the text of calls that have not ended
        self._bare = False  # whether they have no outer marks
        self._tries = 0  # marks at which that text was malformed
        self._begin = 0  # where it begins in `_raw`, with its opening mark
        self._raw = ""  # all text from the first call on, without thoughts
        self._words: list[str] = []  # that text behind each text of calls
        self._title = ""
        if thoughts is not None and opening:
            self._think("" if thoughts.title and opening.endswith(thoughts.title) else thoughts.title)

    def _step(self, last: bool) -> Pieces:
        if self._state == "content":
            return self._content(last)
        if self._state == "thought":
            return self._thought(last)
        if self._state == "draft":
            return self._draft()
        return self._call(last) if self._state == "call" else self._between(last)

    def _think(self, title: str) -> None:
        self._state, self._title = "thought", title
        self._again("thought", "\n")

    def _leads(self, last: bool) -> bool | None:
        """Whether the answer begins with a call; None: not known yet."""
        form, text = self._form, self._text.lstrip()
        if form is None or not form.leading or "content" in self._said:
            return False
        if text.startswith(form.leading):
            return True
        return None if not last and any(mark.startswith(text) for mark in form.leading) else False

    def _content(self, last: bool) -> Pieces:
        """Reads the answer's own text up to a mark that opens a thought or a call; [] if more text must decide."""
        leads = self._leads(last)
        if leads:
            self._state = "call"
        if leads or leads is None:
            return []
        wrapper = (self._thoughts and self._thoughts.wrapper) or ()
        text, mark = self._until([*self._openings(), *wrapper], last)
        pieces = self._say("content", text, hold=self._form is not None or self._thoughts is not None)
        if wrapper and mark == wrapper[0] and "content" not in self._said:
            self._again("content", "")
        self._enter(mark)
        return pieces

    def _openings(self) -> list[str]:
        marks = [notation.opens for notation in (self._thoughts, self._form) if notation is not None]
        return marks if self._form is None else [*marks, self._form.bare[0]]

    def _enter(self, mark: str) -> None:
        if mark and self._thoughts is not None and mark == self._thoughts.opens:
            self._think(self._thoughts.title)
        elif mark and self._form is not None:
            self._begin_call(mark)
            self._state = "call"

    def _begin_call(self, mark: str) -> None:
        self._begin, self._tries = len(self._raw), 0
        self._bare = self._form is not None and mark == self._form.bare[0]
        self._block = mark if self._bare else ""
        self._raw += mark

    def _thought(self, last: bool) -> Pieces:
        """Reads a thought up to its closing mark. last: no more text comes."""
        assert self._thoughts is not None
        if self._title:
            text = self._text.lstrip()
            if not last and self._title.startswith(text):
                return []
            self._text, self._title = text.removeprefix(self._title), ""
        opens = self._form.opens if self._form is not None else ""
        text, mark = self._until([self._thoughts.closes, opens], last)
        pieces = self._say("thought", text)
        if mark == self._thoughts.closes:
            self._end_thought()
        elif mark:
            self._state, self._text = "draft", mark + self._text
        return pieces

    def _end_thought(self) -> None:
        self._state = "between" if self._raw else "content"
        if "content" not in self._said:
            self._again("content", "")

    def _draft(self) -> Pieces:
        """Waits for the end of a thought in which a call begins: without that end it is a call."""
        assert self._thoughts is not None
        draft, mark, text = self._text.partition(self._thoughts.closes)
        if not mark:
            return []
        self._text = text
        self._end_thought()
        return self._say("thought", draft)

    def _close_draft(self, cut: bool) -> Pieces:
        """A thought that has no end is over where nothing but calls follows."""
        stream = _Tags(None, self._form, self._schemas, "", self._marks)
        words = any(text.strip() for _, text in [*stream.add(self._text), *stream.end()])
        if cut or words or not stream.calls:
            self._thought_of(len(self._text), 0)
            return self._say("thought", self._text)
        self._called, self._words = [*self._called, stream.calls], [*self._words, ""]
        return []

    def _call(self, last: bool) -> Pieces:
        """Reads up to a mark that ends the call: one before which the text can be parsed, as values have marks too."""
        form = self._form
        assert form is not None
        text, mark = self._until([form.bare[1] if self._bare else form.closes or form.opens], last)
        self._block += text
        self._raw += text
        calls, words = None, ""
        if mark and self._tries < _MOST_TRIES:
            calls, words = form.calls_and_words(self._block + (mark if self._bare else ""), self._schemas)
        if calls is None:
            self._tries += bool(mark)
            self._block += mark
            self._raw += mark
            return []
        self._called.append(calls)
        self._words.append(words)
        if form.closes:
            self._block += mark if self._bare else ""
            self._raw += mark
            self._state = "between"
        else:
            self._begin_call(mark)
        return []

    def _between(self, last: bool) -> Pieces:
        """Reads what follows calls. If their end comes once more, the first may have been a value's text."""
        form = self._form
        closes, inner = ("", "") if form is None else (form.closes, form.bare[1] if self._bare else "")
        text, mark = self._until([*self._openings(), closes, inner], last)
        self._raw += text
        self._words[-1] += text
        if form is None or not mark or mark not in (closes, inner):
            self._enter(mark)
            return []
        self._raw += mark
        is_end = mark == (inner or closes)
        longer = self._block + self._words[-1] + mark if self._bare else self._block + mark + self._words[-1]
        calls = form.calls(longer, self._schemas) if is_end and self._tries < _MOST_TRIES else None
        self._tries += is_end
        if calls is not None:
            self._block, self._called[-1], self._words[-1] = longer, calls, ""
        elif self._words[-1].strip():
            self._words[-1] += mark
        return []

    def _close(self, cut: bool) -> Pieces:
        """Sets the calls. If one is malformed, all are text; one that was cut is text behind those that ended."""
        form, rest, pieces = self._form, "", []
        if form is not None and self._state == "call":
            calls, words = form.calls_and_words(self._block, self._schemas)
            if calls and (words or (form.shows_end and not cut)):
                self._called.append(calls)
                self._words.append(words)
            else:
                self._called = self._called if cut and not self._tries else []
                rest = self._shown(self._raw[self._begin :])
        elif self._state == "draft":
            pieces = self._close_draft(cut)
        self.calls = [call for calls in self._called for call in calls]
        if not self.calls:
            rest = self._shown(self._raw)
            spaces, self._spaces["content"] = self._spaces["content"], ""
            return [*pieces, ("content", spaces + rest)] if spaces + rest else pieces
        if "content" not in self._said:
            self._again("content", "")
        pieces += [piece for word in self._words for piece in self._say("content", word)]
        return [*pieces, *self._say("content", rest, hold=False)]

    def _shown(self, text: str) -> str:
        """Text of malformed calls, without marks that are special tokens if there is more."""
        shown = text
        for mark in self._marks:
            shown = shown.replace(mark, "")
        return shown if shown.strip() else text


_MOST_TRIES = 100  # to parse one call
_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]+)")
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADS = ("<|channel|>", "<|start|>", "to=")


class _Channels(AnswerStream):
    """The messages of gpt-oss: a header with channel and recipient, <|message|>, and text."""

    def __init__(self, schemas: Schemas | None, opening: str):
        super().__init__()
        self._schemas = schemas
        self._state = "begin"
        self._blocks: list[tuple[str, str, bool]] = []  # of calls: name, text, whether its end was written
        self.add(opening)
        self._added = 0  # of the answer

    def _step(self, last: bool) -> Pieces:
        if self._state == "begin":
            text = self._text.lstrip()
            if text.startswith(_HEADS):
                self._state = "header"
            elif last or not any(head.startswith(text) for head in _HEADS):
                self._state = "content"  # an answer without channels
            return []
        return self._header() if self._state == "header" else self._body(last)

    def _header(self) -> Pieces:
        """Reads a message's header, once it is complete, and changes the state to what it announces."""
        header, delimiter, text = self._text.partition("<|message|>")
        if not delimiter:
            return []
        self._text, recipient = text, _RECIPIENT.search(header)
        if recipient is not None and recipient[1] and self._schemas is not None:
            self._state = "call"
            self._blocks.append((recipient[2], "", False))
            return []
        to_tool = recipient is not None and not recipient[1] and recipient[2] != "user"
        kind: Kind = "thought" if "<|channel|>analysis" in header or to_tool else "content"
        self._state = kind
        self._again(kind, "\n\n")
        return []

    def _body(self, last: bool) -> Pieces:
        text, mark = self._until(_BODY_ENDS, last)
        state = self._state
        if state == "call":
            name, block, _ = self._blocks.pop()
            if mark and ends_in_string(block + text):  # a mark of the text is no mark
                self._blocks.append((name, block + text + mark, False))
                return []
            self._blocks.append((name, block + text, bool(mark)))
        if mark:
            self._state = "header"
            self._text = (mark if mark in _HEADS else "") + self._text
        return [] if state == "call" else self._say("thought" if state == "thought" else "content", text)

    def _close(self, cut: bool) -> Pieces:
        blocks, rest = self._blocks, ""
        if cut and blocks and not blocks[-1][2]:
            *blocks, (_, rest, _) = blocks
        try:
            self.calls = [channel_call(name, block, self._schemas or {}) for name, block, _ in blocks]
        except (ValueError, TypeError, RecursionError):
            rest = "\n".join(block for _, block, _ in self._blocks)
        if self._state == "header" and not self._text.startswith(_HEADS):  # text behind an end, and no header
            rest += self._text
            for mark in _BODY_ENDS:
                rest = rest.replace(mark, "")
        if rest:
            return self._say("content", rest, hold=False)
        spaces = "" if "content" in self._strips else self._spaces["content"]
        return [("content", spaces)] if spaces and self._state == "content" else []


@dataclasses.dataclass(frozen=True)
class Completions:
    """Sampled answers as reward functions get them.

    For messages: an assistant message, with `reasoning_content` if the family writes thoughts. For text: text, with
    thoughts unless special tokens mark them.
    """

    decode: Callable[[Sequence[int]], str]
    """Token ids to text, without special tokens."""
    reader: AnswerReader | None = None
    """None: no template."""
    renders_texts: bool = False
    """Whether the template also writes prompts that are text."""

    def __call__(
        self, prompt: str | list[Message], prompt_ids: Sequence[int], ids: Sequence[int]
    ) -> str | list[Message]:
        """An answer in the form of its prompt."""
        reader, is_text = self.reader, isinstance(prompt, str)
        if reader is None or not reader.thinks or (is_text and not (self.renders_texts and reader.marks_are_special)):
            return self.decode(ids)
        answer = reader.read(ids, opening=reader.opening(prompt_ids))
        return answer.content if is_text else [answer.message]
