"""Values of arguments as models write them: JSON, Python's literals, and bare text whose type a schema says."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

type Arguments = dict[str, Any]

_JSON_WORDS = {"true": True, "false": False, "null": None}
_WORDS = {"True": True, "False": False, "None": None}  # templates write Python's words
_SPACES_AND_QUOTES = " \t\r\n\"'`"
_SPACE = re.compile(r"\s*")
_FILE = "<call>"
# Of an escape such as "\d", which stays as it is.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(_FILE))


def unique(pairs: Iterable[tuple[str, object]]) -> Arguments:
    """An object of its (key, value); ValueError for a key written twice."""
    values: Arguments = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} is written twice")
        values[key] = value
    return values


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value


def _no_number(text: str) -> object:
    raise ValueError(f"JSON has no {text}")


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_float=_number, parse_constant=_no_number)


def json_at(text: str, start: int = 0) -> tuple[object, int]:
    """(value, its end) of JSON within a text, spaces before it left out; ValueError if there is none."""
    return _DECODER.raw_decode(text, after_spaces(text, start))


def json_value(text: str) -> object:
    """The value of a text that is JSON; ValueError for NaN, an infinity and a key written twice too."""
    value, end = json_at(text)
    if end != len(text.rstrip()):
        raise ValueError(f"text after JSON, at {end}")
    return value


def ends_in_string(text: str) -> bool:
    """Whether a text is the beginning of JSON that is cut within a string."""
    try:
        json_at(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def after_spaces(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return start if space is None else space.end()


def json_text(value: object) -> str:
    """The JSON of arguments; ValueError or TypeError for what JSON has not."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def statements(text: str) -> list[ast.stmt]:
    """Python's statements; ValueError for other text, and for comments, which the tree leaves out."""
    try:
        body = ast.parse(text.strip(), _FILE).body
        if "#" in text:
            tokens = tokenize.generate_tokens(io.StringIO(text.strip()).readline)
            if any(token.type == tokenize.COMMENT for token in tokens):
                raise ValueError("a comment is no value")
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"no Python: {error}") from None
    return body


def literal(node: ast.expr) -> object:
    """The value of a Python literal that JSON has too, also in JSON's words; a tuple is a list. ValueError: another."""
    match node:
        case ast.Constant(value=str() as text):
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # joins \ud83d\ude42
        case ast.Constant(value=bool() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            value = literal(node.operand)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value if isinstance(node.op, ast.USub) else value
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [literal(value) for value in values]
        case ast.Dict(keys=keys, values=values):
            return unique((_key(key), literal(value)) for key, value in zip(keys, values, strict=True))
    raise ValueError(f"{ast.unparse(node)[:80]} is no value that JSON has")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is a text")


def known_name(name: str, known: Mapping[str, object] | None) -> str:
    """A name without spaces and quotes around it, if `known` has it so and not as it is written."""
    bare = name.strip(_SPACES_AND_QUOTES)
    return bare if known is not None and name not in known and bare in known else name


def bare_name(name: str, known: Mapping[str, object] | None) -> str:
    """A name that a notation writes without quotes: without spaces and quotes around it, unless `known` has them."""
    return name if known is not None and name in known else name.strip(_SPACES_AND_QUOTES) or name


def properties_of(parameters: object) -> Mapping[str, object] | None:
    """{name: schema} of a tool's arguments; None if the schema names none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else None


# --- typed texts


def allows_text(schema: object, root: object = None) -> bool:
    """Whether a JSON schema allows a string; True if it names no type. root: the document of its references."""
    return _allows("string", schema, schema if root is None else root, unnamed=True)


def allows_null(schema: object, root: object = None) -> bool:
    """Whether a JSON schema names null. root: the document of its references."""
    return _allows("null", schema, schema if root is None else root, unnamed=False)


def _allows(wanted: str, schema: object, root: object, unnamed: bool) -> bool:
    """Whether a schema allows a type, "string" or "null". unnamed: what a schema says that names no type."""
    if not isinstance(schema, Mapping):
        return schema is not False and unnamed
    if wanted == "null" and schema.get("nullable") is True:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        return _allows(wanted, referred(root, reference), root, unnamed)
    if isinstance(kind := schema.get("type"), str | list | tuple):
        return kind == wanted or (not isinstance(kind, str) and wanted in kind)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            return any(_allows(wanted, subschema, root, unnamed) for subschema in schema[key])
    if isinstance(parts := schema.get("allOf"), list | tuple):
        named = unnamed or any(_allows(wanted, part, root, False) for part in parts)
        return named and all(_allows(wanted, part, root, True) for part in parts)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list | tuple):
        return any(value is None if wanted == "null" else isinstance(value, str) for value in values)
    return unnamed


def referred(root: object, reference: str) -> object:
    """What a reference of a JSON schema names in its document, which is no reference itself."""
    for key in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(key, {}) if isinstance(root, Mapping) else {}
    return {} if isinstance(root, Mapping) and "$ref" in root else root


def typed(text: str, parameters: object, key: str) -> object:
    """An argument's bare text as a value, by the schema of the tool's parameters."""
    properties = properties_of(parameters)
    schema = None if properties is None else properties.get(key)
    if schema is not None and allows_text(schema, parameters):
        return None if text.strip() in ("null", "None") and allows_null(schema, parameters) else text
    try:
        return json_value(text)
    except (ValueError, RecursionError):
        if text.strip() in _WORDS:
            return _WORDS[text.strip()]
    try:
        match () if schema is None else statements(text):
            case [ast.Expr(value=node)]:
                return literal(node)
    except (ValueError, RecursionError, MemoryError):
        pass
    return text
