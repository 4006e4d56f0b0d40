"""The forms in which models write tool calls, and their parsers."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jaxtune.conversations.call_grammars import Notation, grammar_of_calls
from jaxtune.conversations.values import (
    Arguments,
    after_spaces,
    allows_text,
    bare_name,
    json_at,
    json_text,
    json_value,
    known_name,
    literal,
    properties_of,
    statements,
    typed,
    unique,
)

__all__ = ["FORMS", "HERMES", "Call", "CallForm", "Schemas", "allows_text"]
__all__ += ["arguments_of", "channel_call", "json_text", "schemas_of"]

# {tool's name: JSON schema of its parameters}.
type Schemas = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it, not checked against a schema."""

    name: str
    arguments: Arguments

    @property
    def message(self) -> Arguments:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclasses.dataclass(frozen=True)
class CallForm:
    """A form of calls: text from `opens` to `closes` ("": to the next `opens`, or the end)."""

    name: str
    """For error messages."""
    source: tuple[str, ...]
    """Texts that must all be in the template's Jinja source."""
    opens: str
    closes: str
    parse: Callable[[str, Schemas], list[Call]]
    """The calls in the text between; ValueError if malformed."""
    leading: tuple[str, ...] = ()
    """In place of `opens`: beginnings of an answer that consists of calls; part of their text."""
    marks: tuple[str, ...] = ()
    """Further tokens within the text."""
    notations: tuple[Notation, ...] = (Notation(single=True),)
    """In which models write what is between, for grammars."""
    shows_end: bool = True
    """Whether a text that can be parsed is a whole call, also before its `closes`."""
    bare: tuple[str, str] = ("", "")
    """How a call without the outer marks begins and ends, which is part of its text; "": it has them."""

    def calls(self, text: str, schemas: Schemas) -> list[Call] | None:
        """The calls in the text between; None if it is malformed, or has values that JSON has not."""
        try:
            calls = self.parse(text, schemas)
            for call in calls:
                json_text(call.arguments)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None
        return calls

    def calls_and_words(self, text: str, schemas: Schemas) -> tuple[list[Call] | None, str]:
        """`calls`, and what a model wrote behind them; words only where no mark ends them."""
        calls = self.calls(text, schemas)
        if calls is not None or self.closes:
            return calls, ""
        end = _values_end(text)
        calls = self.calls(text[:end], schemas) if _WORDS.match(text, end) else None
        if calls is None or (self.leading and any(call.name not in schemas for call in calls)):
            return None, ""
        return calls, text[end:]

    def grammar(self, schemas: Schemas, tokens: Mapping[str, int], many: bool = True, behind_text: bool = False) -> str:
        """Of calls, as of `grammar_of_calls`."""
        marks = self.opens, self.closes
        return grammar_of_calls(marks, self.notations, schemas, tokens, many, behind_text)


def schemas_of(tools: object) -> Arguments:
    """{tool's name: JSON schema of its parameters}."""
    schemas: Arguments = {}
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schemas[function["name"]] = function.get("parameters") or {}
    return schemas


def arguments_of(value: object) -> Arguments:
    """A call's arguments from an object or JSON text; {} for nothing. Raises ValueError."""
    if isinstance(value, str):
        value = json_value(value) if value.strip() else None
        if isinstance(value, str):  # quoted twice
            return arguments_of(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call are an object")
    return value


def _named(name: str, arguments: Arguments, schemas: Schemas) -> Call:
    """A call; names that the schemas have without the spaces and quotes around them are those."""
    name = known_name(name, schemas)
    known = properties_of(schemas.get(name))
    return Call(name, unique((known_name(key, known), value) for key, value in arguments.items()))


# What an object of a call may have beside its name; anything else would vanish.
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
_CALL_KEYS = frozenset((*_NAMES, *_ARGUMENTS, "id", "tool_call_id", "call_id", "type"))


def _call_of(value: object, schemas: Schemas) -> Call:
    """A call of a JSON object; ValueError if it has no name, or more than a call has."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        if not value.keys() <= {"function", "id", "type"}:
            raise ValueError("a call has a function and an id")
        value = value["function"]
    if not isinstance(value, dict) or not value.keys() <= _CALL_KEYS:
        raise ValueError("a call is an object with a name and arguments")
    names, written = ([value[key] for key in keys if key in value] for keys in (_NAMES, _ARGUMENTS))
    if len(names) != 1 or not isinstance(names[0], str) or not names[0] or len(written) > 1:
        raise ValueError("a call has one name, and its arguments once")
    return _named(names[0], arguments_of(written[0] if written else None), schemas)


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise ValueError("no call")
    return calls


def _calls_of(values: Iterable[object], schemas: Schemas) -> list[Call]:
    """The calls of JSON objects and lists of them; ValueError if there is none."""
    calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
    return _some([_call_of(call, schemas) for call in calls])


def _json_call(text: str, schemas: Schemas) -> list[Call]:
    """{"name": ..., "arguments": ...}, or a list of them."""
    return _calls_of([json_value(text)], schemas)


_BETWEEN_VALUES = re.compile(r"[;,\s]*")


def _json_values(text: str) -> Iterator[object]:
    """JSON values one after another."""
    at, end = 0, len(text.rstrip())
    while at < end:
        value, at = json_at(text, at)
        yield value
        between = _BETWEEN_VALUES.match(text, at)
        at = at if between is None else between.end()


_FIRST_VALUE = re.compile(r"(?:\[\s*)?\{")
_WORDS = re.compile(r"\s*[^\s{}\[\],:;\"]")  # behind a call; anything else may be a damaged one


def _values_end(text: str) -> int:
    """Where the JSON values end that a text has one after another; 0 if it has none."""
    first, end = _FIRST_VALUE.search(text), 0
    at = len(text) if first is None else first.start()
    with contextlib.suppress(ValueError, RecursionError):
        while at < len(text):
            _, end = json_at(text, at)
            between = _BETWEEN_VALUES.match(text, end)
            at = end if between is None else between.end()
    return end


def _json_calls(text: str, schemas: Schemas) -> list[Call]:
    """JSON objects or lists of them, one after another; ValueError if there is none."""
    return _calls_of(_json_values(text), schemas)


def _llama(text: str, schemas: Schemas) -> list[Call]:
    """Llama 3's JSON objects, with or without <|python_tag|>; ValueError for another object: it is an answer."""
    values = [*_json_values(text.strip().removeprefix("<|python_tag|>"))]
    for value in values:
        if not isinstance(value, dict) or not (value.keys() & {*_ARGUMENTS} or value.get("name") in schemas):
            raise ValueError("a call is an object with a name and parameters")
    return _calls_of(values, schemas)


def channel_call(name: str, text: str, schemas: Schemas) -> Call:
    """The call of gpt-oss's message to a function; ValueError if its text is no JSON object, or is unfinished."""
    call = _named(name, arguments_of(text), schemas)
    json_text(call.arguments)
    return call


# --- arguments between tags


def _typed_call(name: str, texts: Sequence[tuple[str, str]], schemas: Schemas) -> Call:
    """A call whose arguments are bare texts, (key, text) each."""
    name = bare_name(name, schemas)
    parameters = schemas.get(name, {})
    known = properties_of(parameters)
    keys = [(bare_name(key, known), text) for key, text in texts]
    return Call(name, unique((key, typed(text, parameters, key)) for key, text in keys))


@dataclasses.dataclass(frozen=True)
class _Tagged:
    """A notation of arguments between tags.

    opens: a pattern of an argument's beginning, whose first group is its key; closes: its end; follows: a pattern of
    what may come behind that end.
    """

    opens: re.Pattern[str]
    closes: str
    follows: re.Pattern[str]

    def read(self, text: str, at: int) -> tuple[list[tuple[str, str]], int]:
        """([(key, text)], their end) of the arguments that begin at a place."""
        texts = []
        while opened := self.opens.match(text, at):
            end = self._end(text, opened.end())
            texts.append((opened[1], text[opened.end() : end]))
            at = after_spaces(text, end + len(self.closes))
        return texts, at

    def _end(self, text: str, start: int) -> int:
        """Where a value ends: at the first end that has behind it what may follow. ValueError if none has, or another
        argument begins within and does not end: then an end is missing.
        """
        end = text.find(self.closes, start)
        while end >= 0 and not self.follows.match(text, end + len(self.closes)):
            end = text.find(self.closes, end + 1)
        within = start
        while end >= 0 and (inner := self.opens.search(text, within, end)):
            within = text.find(self.closes, inner.end(), end)
            end = end if within >= 0 else -1
        if end < 0:
            raise ValueError(f"the argument at {start} has no {self.closes}")
        return end


def _parameters(opens: str, function_closes: str, function_opens: str) -> _Tagged:
    """Those of a function, in tags: another one follows each, or the function's end before a function or nothing."""
    follows = rf"\s*(?:{opens}|{function_closes}\s*(?:{function_opens}|\Z))"
    return _Tagged(re.compile(rf"{opens}([^>\n]+)>"), "</parameter>", re.compile(follows))


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_FUNCTION_END = re.compile(r"\s*</function>\s*(?=<function=|\Z)")
_PARAMETERS = _parameters("<parameter=", "</function>", "<function=")
_INVOKE = re.compile(r"\s*<invoke name=([^>\n]+)>\s*")
_INVOKE_END = re.compile(r"\s*</invoke>\s*(?=<invoke |\Z)")
_INVOKE_PARAMETERS = _parameters("<parameter name=", "</invoke>", "<invoke ")


def _functions(
    text: str, schemas: Schemas, begin: re.Pattern[str], arguments: _Tagged, end: re.Pattern[str]
) -> list[Call]:
    """Calls one after another, each with arguments between tags; ValueError for anything else."""
    calls, at = [], 0
    while at < len(text):
        begun = begin.match(text, at)
        if begun is None:
            raise ValueError(f"no call at {at}")
        texts, at = arguments.read(text, begun.end())
        ended = end.match(text, at)
        if ended is None:
            raise ValueError(f"a call does not end at {at}")
        texts = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in texts]
        calls.append(_typed_call(begun[1], texts, schemas))
        at = ended.end()
    return _some(calls)


def _xml(text: str, schemas: Schemas) -> list[Call]:
    """Of Qwen3-Coder and others: <function=NAME><parameter=KEY>VALUE</parameter>...</function>; else ValueError."""
    return _functions(text, schemas, _FUNCTION, _PARAMETERS, _FUNCTION_END)


def _invoked(text: str, schemas: Schemas) -> list[Call]:
    """Of MiniMax: <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>; else ValueError."""
    return _functions(text, schemas, _INVOKE, _INVOKE_PARAMETERS, _INVOKE_END)


_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_PAIRS = _Tagged(
    re.compile(r"<arg_key>((?:(?!</?arg_key>).)*)</arg_key>\s*<arg_value>", re.DOTALL),
    "</arg_value>",
    re.compile(r"\s*(?:<arg_key>|\Z)"),
)


def _glm(text: str, schemas: Schemas) -> list[Call]:
    """Of GLM 4.5 and later: NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...; else ValueError."""
    name = _GLM_NAME.match(text)
    if name is None:
        raise ValueError("a call is NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
    texts, at = _PAIRS.read(text, name.end())
    if at != len(text):
        raise ValueError(f"no argument at {at}")
    return [_typed_call(name[1], texts, schemas)]


# --- JSON behind a name


def _headed(
    text: str,
    schemas: Schemas,
    head: re.Pattern[str],
    ends: Callable[[re.Match[str]], re.Pattern[str]],
) -> list[Call]:
    """Calls one after another: `head`, whose first group that is not empty is the name, JSON, and an end; ValueError
    for anything else. ends: the pattern of the end behind a head.
    """
    calls, at = [], 0
    while at < len(text.rstrip()):
        begun = head.match(text, at)
        if begun is None:
            raise ValueError(f"no call at {at}")
        at, arguments, end = begun.end(), None, ends(begun)
        if text.startswith(("{", '"', "null"), at):
            arguments, at = json_at(text, at)
        ended = end.match(text, at)
        if ended is None or (arguments is None and not ended[0].strip()):
            raise ValueError(f"a call does not end at {at}")
        at = ended.end()
        calls.append(_named(next(filter(None, begun.groups())), arguments_of(arguments), schemas))
    return _some(calls)


_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>\s*(?:\w+<｜tool▁sep｜>([^\s{<`]+)\s*```json\s*|([^\s{<`]+)\s*<｜tool▁sep｜>\s*)"
)
_DEEPSEEK_END = re.compile(r"\s*(?:<｜tool▁call▁end｜>|\Z)")
_DEEPSEEK_BLOCK_END = re.compile(r"\s*```\s*(?:<｜tool▁call▁end｜>|\Z)")


def _deepseek(text: str, schemas: Schemas) -> list[Call]:
    """Of DeepSeek: function<sep>NAME and a JSON block (V3, R1), or NAME<sep>JSON (V3.1); else ValueError."""
    return _headed(text, schemas, _DEEPSEEK, lambda head: _DEEPSEEK_BLOCK_END if head[1] else _DEEPSEEK_END)


_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
)
_KIMI_END = re.compile(r"\s*(?:<\|tool_call_end\|>|\Z)")


def _kimi(text: str, schemas: Schemas) -> list[Call]:
    """Of Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>; else
    ValueError.
    """
    return _headed(text, schemas, _KIMI, lambda head: _KIMI_END)


_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


def _mistral(text: str, schemas: Schemas) -> list[Call]:
    """A JSON list (versions 3 to 7), or NAME[ARGS]JSON (11 and later); else ValueError."""
    if re.match(r"\s*(\[\s*)?\{", text):
        return _json_calls(text, schemas)
    name = _NAME.match(text)
    if name is None or not text.startswith(("{", '"'), name.end()):
        raise ValueError("a call is a JSON list, or NAME[ARGS]JSON")
    return [_named(name[1], arguments_of(json_value(text[name.end() :])), schemas)]


def _python(text: str, schemas: Schemas) -> list[Call]:
    """Python calls with literal keyword arguments: [f(a=1), g()], or one a line; else ValueError."""
    calls = []
    for line in statements(text):
        if not isinstance(line, ast.Expr):
            raise ValueError("a statement is no call")
        for node in line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]:
            if not isinstance(node, ast.Call) or node.args or not re.fullmatch(r"[\w.]+", ast.unparse(node.func)):
                raise ValueError("a call is NAME(KEY=VALUE, ...)")
            pairs = [(word.arg, literal(word.value)) for word in node.keywords if word.arg is not None]
            if len(pairs) < len(node.keywords):
                raise ValueError("**VALUES name no arguments")
            calls.append(_named(ast.unparse(node.func), unique(pairs), schemas))
    return _some(calls)


# --- Gemma's notation

_GEMMA_CALL = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_QUOTES = '<|"|>'
_GEMMA_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|([^{}\[\],:<]+?))\s*:\s*', re.DOTALL)
_GEMMA_WORD = re.compile(r"[^{}\[\],:<\"]+")
_GEMMA_OPENS = re.compile(r'[{\[,]\s*(?:[^{}\[\],:<]+:\s*)?<\|"\|>')  # a text's beginning


class _Gemma:
    """Reads one object of the notation {key:value,...}, texts between <|"|>; ValueError for anything else."""

    def __init__(self, text: str, at: int, known: Mapping[str, object] | None):
        self._text, self.at, self._known = text, at, known
        self._open: list[str] = []  # the ends of objects and lists around the place, the innermost last

    def value(self) -> object:
        sign = self._text[self.at : self.at + 1]
        if self._text.startswith(_QUOTES, self.at):
            return self._string()
        if sign == "{":
            return unique(self._items("}", self._pair))
        if sign == "[":
            return list(self._items("]", self.value))
        if sign == '"':
            value, self.at = json_at(self._text, self.at)
            return value
        word = _GEMMA_WORD.match(self._text, self.at)
        if word is None:
            raise ValueError(f"no value at {self.at}")
        self.at = word.end()
        return json_value(word[0])

    def _items[T](self, closes: str, item: Callable[[], T]) -> Iterator[T]:
        self._open.append(closes)
        self._skip(1)
        while not self._text.startswith(closes, self.at):
            yield item()
            self._skip()
            if self._text.startswith(",", self.at):
                self._skip(1)
            elif not self._text.startswith(closes, self.at):
                raise ValueError(f"no {closes} at {self.at}")
        self._open.pop()
        self.at += 1

    def _skip(self, signs: int = 0) -> None:
        self.at = after_spaces(self._text, self.at + signs)

    def _pair(self) -> tuple[str, object]:
        key = _GEMMA_KEY.match(self._text, self.at)
        if key is None:
            raise ValueError(f"no key at {self.at}")
        self.at = key.end()
        name = key[1] if key[1] is not None else bare_name(key[2], self._known if len(self._open) == 1 else None)
        return name, self.value()

    def _string(self) -> str:
        """A text up to the first marks that have behind them what may follow."""
        start = self.at + len(_QUOTES)
        end = self._text.find(_QUOTES, start)
        while end >= 0 and not self._may_end(end + len(_QUOTES)):
            end = self._text.find(_QUOTES, end + 1)
        text = self._text[start:end]
        if end < 0 or (text.count(_QUOTES) % 2 and _GEMMA_OPENS.search(text)):
            raise ValueError(f"the text at {start} has no end")
        self.at = end + len(_QUOTES)
        return text

    def _may_end(self, at: int) -> bool:
        """Whether a value may end before a place."""
        closing = list(self._open)
        while closing:
            at = after_spaces(self._text, at)
            sign = self._text[at : at + 1]
            if sign == ",":
                return closing[-1] == "]" or _GEMMA_KEY.match(self._text, at + 1) is not None
            if sign != closing.pop():
                return False
            at += 1
        return not self._text[at:].strip()


def _gemma(text: str, schemas: Schemas) -> list[Call]:
    """Of Gemma 4: call:NAME{key:value,...}, texts between <|"|>; else ValueError."""
    call = _GEMMA_CALL.match(text)
    if call is None:
        raise ValueError("a call is call:NAME{key:value,...}")
    reader = _Gemma(text, call.end(), properties_of(schemas.get(call[1])))
    arguments = arguments_of(reader.value())
    if text[reader.at :].strip():
        raise ValueError(f"text after the arguments, at {reader.at}")
    return [_named(call[1], arguments, schemas)]


_LIST = Notation(around=("[", ", ", "]"))
_XML = Notation("<function=NAME>\nARGUMENTS</function>\n", "<parameter=KEY>VALUE</parameter>\n")
_INVOKED = Notation('<invoke name="NAME">\nARGUMENTS</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n')
_PYTHON = Notation("NAME(ARGUMENTS)", "KEY=VALUE", "python", ", ")
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

# The first form whose `source` a template has is taken. gpt-oss's calls are channels (`answers.py`).
FORMS = (
    CallForm(
        "Gemma 4 <|tool_call>",
        ("<|tool_call>call:", "<tool_call|>"),
        "<|tool_call>",
        "<tool_call|>",
        _gemma,
        marks=('<|"|>',),
        notations=(Notation("call:NAME{ARGUMENTS}", "KEY:VALUE", "gemma", ",", single=True),),
    ),
    CallForm(
        "DeepSeek",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _deepseek,
        marks=(_BEGIN, _SEP, _END),
        notations=(
            Notation(f"{_BEGIN}function{_SEP}NAME\n```json\nJSON\n```{_END}", around=("", "\n", "")),
            Notation(f"{_BEGIN}NAME{_SEP}JSON{_END}"),
        ),
    ),
    CallForm(
        "Kimi",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _kimi,
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        notations=(
            Notation("<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>"),
        ),
    ),
    CallForm(
        "Mistral [TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        "",
        _mistral,
        marks=("[ARGS]", "[CALL_ID]"),
        notations=(_LIST, Notation("NAME[ARGS]JSON", single=True)),
    ),
    CallForm(
        "LFM2 <|tool_call_start|>",
        ("<|tool_call_start|>",),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        _python,
        notations=(dataclasses.replace(_PYTHON, around=("[", ", ", "]")),),
    ),
    CallForm(
        "OLMo <function_calls>",
        ("<function_calls>",),
        "<function_calls>",
        "</function_calls>",
        _python,
        notations=(dataclasses.replace(_PYTHON, around=("", "\n", "")),),
    ),
    CallForm(
        "Phi-4 <|tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
        "<|tool_call|>",
        "<|/tool_call|>",
        _json_call,
        notations=(_LIST,),
    ),
    CallForm("Granite <|tool_call|>", ("<|tool_call|>",), "<|tool_call|>", "", _json_calls, notations=(_LIST,)),
    CallForm(
        "Command <|START_ACTION|>",
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _json_calls,
        notations=(dataclasses.replace(_LIST, keys=("tool_call_id", "tool_name", "parameters")),),
    ),
    CallForm(
        "MiniMax <invoke>",
        ("<minimax:tool_call>",),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _invoked,
        notations=(_INVOKED,),
    ),
    CallForm(
        "Seed <function=NAME>", ("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _xml, notations=(_XML,)
    ),
    CallForm(
        "GLM <arg_key>",
        ("<tool_call>", "<arg_key>"),
        "<tool_call>",
        "</tool_call>",
        _glm,
        shows_end=False,
        notations=(Notation("NAME\nARGUMENTS", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", single=True),),
    ),
    CallForm(
        "Qwen3-Coder <function=NAME>",
        ("<tool_call>", "<function="),
        "<tool_call>",
        "</tool_call>",
        _xml,
        bare=("<function=", "</function>"),
        notations=(_XML,),
    ),
    CallForm("Hermes and Qwen <tool_call> JSON", ("<tool_call>",), "<tool_call>", "</tool_call>", _json_call),
    CallForm(
        "Llama 3 JSON",
        ("<|start_header_id|>", "tool_calls"),
        "",
        "",
        _llama,
        leading=("{", "<|python_tag|>"),
        marks=("<|python_tag|>",),
        notations=(Notation(keys=("name", "parameters"), single=True),),
    ),
)
HERMES = next(form for form in FORMS if form.name.startswith("Hermes"))
