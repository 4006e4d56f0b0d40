"""How models write calls of tools, by the kind of their chat template, and how templates write what tools answer.

A model's answer is parsed as text, by the function of the template's `Kind` (`parse_hermes`, `parse_xml`,
`parse_llama`, `parse_channels` or `parse_gemma`; KINDS lists the kinds), into each `Call`. A tool's answer is added
behind the sampled tokens as the tokens that the template writes between the end of the model's turn and the begin of
its next one. The sampled tokens themselves are never decoded and tokenised again, because that could change them.
`ToolFormat` does both for `answering.ToolTurns`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtune.conversations.dates import dated
from jaxtune.train.config import ConfigError
from jaxtune.train.data.conversations import Conversations
from jaxtune.train.data.row_errors import RowError
from jaxtune.train.data.templates import resolve_template
from jaxtune.train.data.tokenizing import tokenize
from jaxtune.train.objectives.reward_functions import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "\ue000 what a tool answered \ue001"  # a tool's answer by which the template is tested


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a tool that a model wrote, parsed from the text of its answer. `Tools.answer` then calls the tool."""

    name: str
    """The tool's name."""
    arguments: dict[str, object]
    """The arguments by name, values as JSON has them; they are not checked against the tool's schema."""

    @property
    def message(self) -> Message:
        """The call as a dict {"type": "function", "function": {...}}, an entry of the list `tool_calls` in a chat
        message, which chat templates read. `ToolFormat.parsed` puts it into the message of an answer, and `suffix` into
        its made-up conversation."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# {tool's name: JSON schema of its parameters}.
type Schemas = Mapping[str, Message]
# Parses an answer's text, special tokens included except the one that ended it: (the text without the calls, as each
# parser says; the calls). Raises ValueError for a malformed call.
type Parse = Callable[[str, Schemas], tuple[str, list[Call]]]


def _call_of(value: object, key: str) -> Call:
    """The call that a parsed JSON value describes: an object with the tool's "name", and with its arguments under
    `key`, as an object or as the JSON text of one; no arguments if `key` is absent. Raises ValueError if the value is
    no such object. key: "arguments" or "parameters", in which the formats of models differ. `parse_hermes` and
    `parse_llama` call it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = value.get(key, {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the {key} of a call are an object")
    return Call(value["name"], arguments)


_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def parse_hermes(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    """Parses an answer in the form of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any
    number of times: (the text before the first call, or all of it without calls, without white space at its end; the
    calls). The end of the text also ends a call. Raises ValueError for a malformed call. `ToolFormat.parsed` calls it
    while answers with tools are sampled in training.

    Args:
      text: the answer, with special tokens except the one that ended it.
      schemas: not used, but all parsers take it.
    """
    calls = [_call_of(json.loads(block), "arguments") for block in _BLOCK.findall(text)]
    return text.partition("<tool_call>")[0].rstrip(), calls


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_xml(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    """Parses an answer in the form of Qwen3-Coder and Qwen3.5,
    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>... </function></tool_call>`, any number of times: (the
    text before the first call, or all of it without calls, without white space at its end; the calls). The end of the
    text also ends a `<tool_call>`. Raises ValueError if one does not begin with `<function=NAME>` and end with its end;
    a parameter without its end is left out. `ToolFormat.parsed` calls it while answers with tools are sampled in
    training.

    Args:
      text: the answer, with special tokens except the one that ended it.
      schemas: {tool's name: JSON schema of its parameters}. A value is text if the schema says so ("type": "string"),
        else JSON where it can be read as such, else text.
    """
    calls = []
    for block in _BLOCK.findall(text):
        found = _FUNCTION.fullmatch(block)
        if found is None:
            raise ValueError("a call is <function=NAME>...</function>")
        types = schemas.get(found[1], {}).get("properties", {})
        arguments = {
            key: value if types.get(key, {}).get("type") == "string" else _json_or_text(value)
            for key, value in _PARAMETER.findall(found[2])
        }
        calls.append(Call(found[1], arguments))
    return text.partition("<tool_call>")[0].rstrip(), calls


def _json_or_text(value: str) -> object:
    """The value of a text that is JSON (such as a number or a list), or the text itself if it is no JSON: `parse_xml`
    reads so an argument whose schema does not say that it is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def parse_llama(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    """Parses an answer in the form of Llama 3: (`text` unchanged, []) if it does not begin with `{` (after a
    `<|python_tag|>`, if it has one), else ("", the calls). The whole answer is then `{"name": ..., "parameters":
    {...}}`, or with "arguments" in place of "parameters"; several are separated by semicolons, spaces or line breaks.
    Raises ValueError if it is anything else. `ToolFormat.parsed` calls it while answers with tools are sampled in
    training.

    Args:
      text: the answer, with special tokens except the one that ended it.
      schemas: not used, but all parsers take it.
    """
    rest = text.strip().removeprefix("<|python_tag|>").strip()
    if not rest.startswith("{"):
        return text, []
    calls, decoder = [], json.JSONDecoder()
    while rest:
        value, end = decoder.raw_decode(rest)
        key = "parameters" if isinstance(value, dict) and "parameters" in value else "arguments"
        calls.append(_call_of(value, key))
        rest = rest[end:].lstrip("; \n")
    return "", calls


_ADDRESSED = re.compile(r"to=functions\.([\w.-]+)[^{]*?<\|message\|>(.*?)(?:<\|call\|>|<\|start\|>|$)", re.DOTALL)
_FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?:<\||$)", re.DOTALL)


def parse_channels(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    """Parses an answer in the form of gpt-oss: (the text of the channel `final`, "" if there is none; the calls). A
    call is a message that is addressed `to=functions.NAME` and holds the arguments as a JSON object, or nothing. Raises
    ValueError if they are anything else. `ToolFormat.parsed` calls it while answers with tools are sampled in training.

    Args:
      text: the answer, with special tokens except the one that ended it.
      schemas: not used, but all parsers take it.
    """
    calls = []
    for name, block in _ADDRESSED.findall(text):
        arguments = json.loads(block or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments of a call are an object")
        calls.append(Call(name, arguments))
    final = _FINAL.search(text)
    return "" if final is None else final[1], calls


_GEMMA_CALL = re.compile(r"<\|tool_call>\s*call:([\w.-]+)(\{.*?\})\s*(?:<tool_call\|>|$)", re.DOTALL)
_GEMMA_THOUGHT = re.compile(r"<\|channel>.*?(?:<channel\|>|$)", re.DOTALL)
# A text in quotes of Gemma's own; a sign of the notation; a key, which has no quotes; a number, true, false or null.
_GEMMA_TOKEN = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<sign>[{}\[\],:])|(?P<word>[^{}\[\],:<]+)', re.DOTALL)


def parse_gemma(text: str, schemas: Schemas) -> tuple[str, list[Call]]:
    """Parses an answer in the form of Gemma 4, `<|tool_call>call:NAME{key:value,...}<tool_call|>`, any number of times:
    (the text before the first call, or all of it without calls, without thoughts; the calls). Thoughts, and calls in
    them, are removed first. Keys have no quotes and texts have `<|"|>` on both sides; other values are written as in
    JSON. The end of the text also ends a call. Raises ValueError for a malformed call. `ToolFormat.parsed` calls it
    while answers with tools are sampled in training.

    Args:
      text: the answer, with special tokens except the one that ended it.
      schemas: not used, but all parsers take it.
    """
    text = _GEMMA_THOUGHT.sub("", text)
    found = list(_GEMMA_CALL.finditer(text))
    if len(found) != text.count("<|tool_call>"):
        raise ValueError("a call is call:NAME{key:value,...}")
    return text.partition("<|tool_call>")[0].strip(), [Call(call[1], _gemma_arguments(call[2])) for call in found]


def _gemma_arguments(text: str) -> dict[str, object]:
    """The arguments of a call by name, from their text `{key:value,...}` in Gemma 4's notation, which becomes JSON by
    putting keys and texts in JSON's quotes; `parse_gemma` calls it for each call. Raises ValueError if it is
    malformed."""
    parts, at = [], 0
    while at < len(text):
        token = _GEMMA_TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"the arguments {text!r} are malformed at {at}")
        at = token.end()
        word = token["word"]
        is_key = word is not None and text.startswith(":", at)
        parts.append(token["sign"] or (word if word and not is_key else json.dumps(token["text"] or word or "")))
    arguments = json.loads("".join(parts))
    assert isinstance(arguments, dict)  # because the text begins with a brace
    return arguments


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of chat template that can call tools: how its Jinja text is recognised, and the function that parses
    answers. KINDS has all of them, from which ToolFormat takes that of a tokenizer's template."""

    name: str
    """Its name in error messages."""
    marks: tuple[str, ...]
    """Texts that the Jinja source of a template contains if it is of this kind; all must be there."""
    parse: Parse
    """Parses an answer: from (its text, {tool's name: JSON schema of its parameters}) it returns (the text without
    the calls, as each parser says; the calls), and it raises ValueError for a malformed call."""


# Parsers that tell an answer's text from its thoughts.
_WITHOUT_THOUGHTS = (parse_channels, parse_gemma)
# The first kind whose marks a template has is taken.
KINDS = (
    Kind("gpt-oss channels", ("<|channel|>", "functions."), parse_channels),
    Kind("Gemma 4 <|tool_call>", ("<|tool_call>call:", "<tool_call|>"), parse_gemma),
    Kind("Qwen3-Coder <function=NAME>", ("<tool_call>", "<function="), parse_xml),
    Kind("Hermes and Qwen <tool_call> JSON", ("<tool_call>",), parse_hermes),
    Kind("Llama 3 JSON", ("<|start_header_id|>", "tool_calls"), parse_llama),
)


class ToolFormat:
    """How one tokenizer's chat template writes calls of tools and their answers. Sampling with tools uses it to find
    the calls in an answer (`parsed`), and to make the tokens of what tools answered (`suffix`).

    Args:
      tokenizer: a fast Hugging Face tokenizer.
      template: the chat template, as the config key data.template names it; None: the tokenizer's own.
      ends: the token ids that end an answer.
      today: the day that the template writes, as data.today; None: the day of asking.
    Attributes:
      kind: the `Kind` of the template, the first one in KINDS whose marks it has.
    Raises:
      ConfigError: the template is of no known kind, does not write what tools answer, or does not end the model's turn
        with a token of `ends`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, ends: Sequence[int], today: str | None = None
    ):
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        text = resolve_template(tokenizer, template)
        self._conversations = Conversations(tokenizer, dated(text, today), None, self._ends)
        found = [kind for kind in KINDS if all(mark in text for mark in kind.marks)]
        if not found:
            known = "; ".join(kind.name for kind in KINDS)
            raise ConfigError(
                f"objective.tools: the chat template writes calls of tools in no known form ({known}); set "
                "data.template to one that does, such as qwen-3"
            )
        self.kind = found[0]
        try:
            shown = self.decode(self.suffix([{"role": "tool", "name": "tool", "content": _PROBE}]))
        except (RowError, ValueError) as error:
            raise ConfigError(f"objective.tools: the chat template cannot write what a tool answers: {error}") from None
        if _PROBE not in shown:
            raise ConfigError("objective.tools: the chat template does not write what a tool answers")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the token ids `ids`, with special tokens, because calls of tools are written with them; it is
        what the parsers of this module read. `suffix`, and the check of the template, read such text too."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def parsed(self, ids: Sequence[int], schemas: Schemas) -> tuple[Message, list[Call]]:
        """(the answer as a message of role "assistant", the calls in it). `ToolTurns` calls it for each turn that was
        sampled, and reward functions get the message. An answer with a malformed call counts as a text without calls,
        as in TRL.

        With calls, the message's content is the text that the parser of `kind` returns beside them, and `tool_calls`
        has the calls. Without calls, it is the answer's whole text without special tokens. Only in the forms of gpt-oss
        and Gemma 4 it is then the text that the parser returns, which has no thoughts, unless that is empty or a call
        was malformed.

        Args:
          ids: the token ids of one turn of the model, without the token that ended it.
          schemas: {tool's name: JSON schema of its parameters}.
        """
        try:
            content, calls = self.kind.parse(self.decode(ids), schemas)
        except (ValueError, RecursionError):  # the latter for JSON that is nested more deeply than Python can read
            content, calls = "", []
        if not calls and (not content or self.kind.parse not in _WITHOUT_THOUGHTS):
            content = str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [call.message for call in calls]
        return message, calls

    def suffix(self, messages: Sequence[Message]) -> list[int]:
        """The token ids that the template writes after the end of a turn that called tools: what the tools answered,
        and the begin of the model's next turn. `ToolTurns` adds them to the sampled tokens, before the next turn is
        sampled. Making a ToolFormat calls it once, to refuse a template that does not write answers.

        They are cut out of a short made-up conversation (a question and a call), which the template renders twice. The
        rendering without the tools' answers has n tokens that end a turn. The result is what follows the n-th such
        token in the rendering with the answers.

        Args:
          messages: the tools' answers to one turn, at least one, of role "tool", with "name" and "content".
        Raises:
          RowError: the template fails.
          ValueError: no token of `ends` ends the model's turn in the conversation: there is none, or text other than
            white space follows the last one.
        """
        call = Call(str(messages[0].get("name", "tool")), {}).message
        asked = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        before = self._ids(self._conversations.render(asked, None))
        whole = self._ids(self._conversations.render([*asked, *map(dict, messages)], None, add_generation_prompt=True))
        places = [place for place, token in enumerate(whole) if token in self._ends]
        count = sum(token in self._ends for token in before)
        last = max((place for place, token in enumerate(before) if token in self._ends), default=len(before))
        if count == 0 or self.decode(before[last + 1 :]).strip():
            raise ValueError(f"no token that ends an answer ({sorted(self._ends)}) ends the model's turn in it")
        return whole[places[count - 1] + 1 :]

    def _ids(self, text: str) -> list[int]:
        """The token ids of a text. A special token that is written in the text becomes its one id; the tokens that a
        tokenizer adds before and after a text are left out. `suffix` tokenises so what the template rendered. Half of a
        surrogate pair, which tools can return and no tokenizer encodes, becomes "?"."""
        text = text.encode(errors="replace").decode()
        return [int(token) for token in tokenize(self._tokenizer, [text])[0].ids]
