"""The notations in which families write calls, and the grammars of calls of given tools, in llguidance's Lark."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from jaxtune.conversations.values import allows_text, properties_of, referred

SPACES = {"x-guidance": {"whitespace_pattern": r"[ \t\n\r]{0,24}"}}  # or a model may write them for ever
_HOLES = re.compile(r"(NAME|OBJECT|JSON|NUMBER|ARGUMENTS|KEY|VALUE|\n|, )")
_FILLED = {"KEY": r"/[A-Za-z_][A-Za-z0-9_.\-]*/", "NUMBER": "/[0-9]{1,4}/", "\n": "WS?", ", ": '"," " "?'}
_TERMINALS = [
    r"WS: /[ \t\r\n]{1,4}/",
    "TEXT: /(?s:.+)/",
    r"""PYTHON: /"([^"\\\n]|\\[\\"'nrt])*"|'([^'\\\n]|\\[\\"'nrt])*'/""",
]
_QUOTES = '<|"|>'  # Gemma's
_MOST_DEEP = 6  # levels of Gemma's values that follow a schema


@dataclasses.dataclass(frozen=True)
class Notation:
    """How calls are written between a form's marks. Words in capitals stand for what is filled in, line breaks for any
    white space.
    """

    call: str = "OBJECT"
    """One call: its NAME; OBJECT, JSON with `keys`; JSON, its arguments; ARGUMENTS, each `argument`."""
    argument: str = ""
    """One argument: its KEY and its VALUE."""
    values: Literal["text", "python", "gemma"] = "text"
    """A VALUE is bare text, or JSON where its schema allows no text; a literal; in Gemma's notation."""
    separator: str = ""
    """Between arguments."""
    around: tuple[str, str, str] = ("", "", "")
    """What is before the calls, between them, and behind them."""
    single: bool = False
    """Whether there is one call between the marks."""
    keys: tuple[str, ...] = ("name", "arguments")
    """Of OBJECT: the last two are those of the name and the arguments, those before are texts."""


def grammar_of_calls(
    marks: tuple[str, str],
    notations: Sequence[Notation],
    schemas: Mapping[str, object],
    tokens: Mapping[str, int],
    many: bool,
    behind_text: bool = False,
) -> str:
    """Of calls of tools with their marks.

    marks: that open and close them, or "".
    schemas: {tool's name: JSON schema of its arguments} of the tools that may be called.
    tokens: {text: id} of the tokens that no text has.
    many: whether several calls may follow each other.
    behind_text: any text comes before the opening mark, and calls between one pair of marks follow.
    """
    opens, closes = marks
    rules = _Rules(tokens, opens)
    block = _any_of(rules.block(notation, schemas, many) for notation in notations)
    block = " ".join(filter(None, (block, f"WS? {rules.literal(closes)}" if closes else "")))
    if behind_text and opens not in tokens:
        start = f"{rules.of('/(?s:.*)/', f'[suffix={json.dumps(opens)}]')} WS? {block}"
    else:
        call = f"{rules.literal(opens)} WS? {block}" if opens else block
        between = "WS?" if opens else '"; "'
        more = f" ({between} {rules.of(call)})*" if many and not behind_text else ""
        start = f"{rules.of(call)}{more}"
    return "\n".join([f"start: {start}", *rules.lines, *_TERMINALS])


def _any_of(bodies: Iterable[str]) -> str:
    alternatives = list(dict.fromkeys(bodies))
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _resolved(schema: object, root: object) -> object:
    """A schema, or the one that its reference names."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return referred(root, reference) if isinstance(reference, str) else schema


def _texts(schema: object) -> list[str] | None:
    """The texts that a schema names as all of its values; None if it does not."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not values:
        return None
    return values if all(isinstance(value, str) for value in values) else None


class _Rules:
    """Those of a grammar. tokens: {text: id} of tokens that no text has. opens: the mark before calls, or ""."""

    def __init__(self, tokens: Mapping[str, int], opens: str):
        self._tokens, self._opens = tokens, opens
        self._names: dict[tuple[str, str], str] = {}

    @property
    def lines(self) -> list[str]:
        return [f"{name}{attributes}: {body}" for (body, attributes), name in self._names.items()]

    def of(self, body: str, attributes: str = "") -> str:
        """The name of the rule with this body."""
        return self._names.setdefault((body, attributes), f"r{len(self._names)}")

    def literal(self, text: str) -> str:
        known = sorted((token for token in self._tokens if token in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        return " ".join(
            f"<[{self._tokens[piece]}]>" if piece in self._tokens else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def json(self, schema: object, root: object) -> str:
        """JSON of a schema with the definitions of its document."""
        value = schema if isinstance(schema, Mapping) else {} if schema is not False else {"enum": []}
        kept = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
        return self.of(f"%json {json.dumps({**value, **kept, **SPACES})}")

    def filled(self, text: str, **filled: str) -> str:
        """A notation's text."""
        holes, pieces = _FILLED | filled, filter(None, _HOLES.split(text))
        return " ".join(filter(None, (holes[piece] if piece in holes else self.literal(piece) for piece in pieces)))

    def block(self, notation: Notation, schemas: Mapping[str, object], many: bool) -> str:
        """Calls between the marks."""
        call = self.of(_any_of(self.call(notation, name, schema) for name, schema in schemas.items()))
        before, between, after = (self.literal(text) for text in notation.around)
        if notation.around[1] == ", ":
            before, between, after = f"{before} WS?", '"," WS?', f"WS? {after}"
        more = f"({between} {call})*" if many and not notation.single else ""
        return " ".join(filter(None, (before, call, more, after)))

    def call(self, notation: Notation, name: str, schema: object) -> str:
        schema = schema if isinstance(schema, Mapping) and schema else {"type": "object"}
        filled = {"NAME": self.literal(name)}
        if "OBJECT" in notation.call:
            filled["OBJECT"] = self.object(notation.keys, name, schema)
        if "JSON" in notation.call:
            filled["JSON"] = self.json(schema, schema)
        if "ARGUMENTS" in notation.call:
            filled["ARGUMENTS"] = self.arguments(notation, _resolved(schema, schema), schema)
        return self.filled(notation.call, **filled)

    def object(self, keys: Sequence[str], name: str, schema: Mapping[str, object]) -> str:
        """JSON of a name and arguments; with the white space that templates write, where a mark has announced it."""
        *texts, of_name, of_arguments = keys
        if not self._opens:  # an answer's JSON may begin alike, whose words are no literals
            value = {of_name: {"const": name}, of_arguments: schema}
            of_object = {"type": "object", "required": [of_name, of_arguments], "additionalProperties": False}
            return self.json({**of_object, "properties": value}, schema)
        string = self.json({"type": "string"}, None)
        before = [f'({self._key(key)} {string} "," " "?)?' for key in texts]
        named = f"{self._key(of_name)} {self.literal(json.dumps(name, ensure_ascii=False))}"
        arguments = f"{self._key(of_arguments)} {self.json(schema, schema)}"
        pairs = (named, arguments), (arguments, named)  # Granite and Mistral write both
        return _any_of(" ".join(['"{"', *before, first, '"," " "?', last, '"}"']) for first, last in pairs)

    def _key(self, key: str) -> str:
        return f'{json.dumps(f"{json.dumps(key)}:")} " "?'

    def arguments(self, notation: Notation, schema: object, root: object, deep: int = 0) -> str:
        """Those of a schema in its order, each at most once; of one that names none, any."""
        properties = properties_of(schema)
        if properties is None or not isinstance(schema, Mapping):
            argument = self.of(self.argument(notation, None, True, root, deep))
            return f"({argument} ({self.filled(notation.separator)} {argument})*)?"
        required = schema.get("required")
        needed = {*required} if isinstance(required, list | tuple) else set()
        arguments = [
            (self.of(self.argument(notation, name, value, root, deep)), name in needed)
            for name, value in properties.items()
        ]
        following, beginnings = "", [""]
        for argument, is_needed in reversed(arguments):
            beginning = f"{argument} {following}".strip()
            beginnings = [beginning] if is_needed else [beginning, *beginnings]
            next_one = f"{self.filled(notation.separator)} {argument}".strip()
            body = f"{next_one if is_needed else f'({next_one})?'} {following}".strip()
            following = self.of(body)
        some = [beginning for beginning in beginnings if beginning]
        body = f"({' | '.join(some)})" if some else ""
        return f"{body}?" if some and "" in beginnings else body

    def argument(self, notation: Notation, name: str | None, schema: object, root: object, deep: int) -> str:
        key = {} if name is None else {"KEY": self.literal(name)}
        if notation.values == "gemma":
            return self.filled(notation.argument, VALUE=self.gemma(notation, schema, root, deep + 1), **key)
        if notation.values == "python":
            return self.filled(notation.argument, VALUE=self.python(schema, root), **key)
        before, _, after = notation.argument.partition("VALUE")
        return f"{self.filled(before, **key)} {self.bare(schema, root, after)}"

    def bare(self, schema: object, root: object, after: str) -> str:
        """A bare text, and what is behind it."""
        closes, resolved = after.strip(), _resolved(schema, root)
        if not allows_text(schema, root):
            return f"WS? {self.json(schema, root)} WS? {self.filled(after)}"
        if (texts := _texts(resolved)) is not None:
            return f'"\\n"? {_any_of(map(self.literal, filter(None, texts)))} "\\n"? {self.filled(after)}'
        if closes in self._tokens:
            return f"TEXT? {self.filled(after)}"
        text = self.of("/(?s:.*)/", f"[suffix={json.dumps(closes)}]")
        return f"{text} {self.filled(after.partition(closes)[2])}".strip()

    def python(self, schema: object, root: object) -> str:
        resolved = _resolved(schema, root)
        if (texts := _texts(resolved)) is not None:
            return _any_of(self.literal(quoted) for text in texts for quoted in (repr(text), json.dumps(text)))
        if not allows_text(schema, root):
            return self.json(schema, root)
        is_text = isinstance(resolved, Mapping) and resolved.get("type") == "string"
        return "PYTHON" if is_text else f"(PYTHON | {self.json(schema, root)})"

    def gemma(self, notation: Notation, schema: object, root: object, deep: int) -> str:
        resolved = _resolved(schema, root)
        if (texts := _texts(resolved)) is not None:
            return _any_of(f"{self.literal(_QUOTES)} {self.literal(text)} {self.literal(_QUOTES)}" for text in texts)
        kind = resolved.get("type") if isinstance(resolved, Mapping) and deep < _MOST_DEEP else None
        if kind == "string":
            return self._quoted()
        if kind == "object":
            return self.of(f'"{{" {self.arguments(notation, resolved, root, deep)} "}}"')
        if kind == "array" and isinstance(resolved, Mapping):
            item = self.gemma(notation, resolved.get("items", True), root, deep + 1)
            return self.of(f'"[" ({item} ("," {item})*)? "]"')
        if kind in ("integer", "number", "boolean", "null"):
            return self.json(resolved, root)
        return self._any_gemma()

    def _quoted(self) -> str:
        """A text between Gemma's quotes."""
        quotes = self.literal(_QUOTES)
        if _QUOTES in self._tokens:
            return f"{quotes} TEXT? {quotes}"
        return f"{quotes} {self.of('/(?s:.*)/', f'[suffix={json.dumps(_QUOTES)}]')}"

    def _any_gemma(self) -> str:
        word = self.json({"type": ["number", "boolean", "null"]}, None)
        body = f'{word} | {self._quoted()} | "[" (any ("," any)*)? "]"'
        body += f' | "{{" ({_FILLED["KEY"]} ":" any ("," {_FILLED["KEY"]} ":" any)*)? "}}"'
        self._names[body, ""] = "any"
        return "any"
