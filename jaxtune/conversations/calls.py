"""The forms in which models write tool calls, and their parsers."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

type Arguments = dict[str, Any]
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
    body: Literal["object", "list", ""] = ""
    """JSON that may be between: an object of a call, or a list of them; "": neither."""


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
        value = json.loads(value) if value.strip() else None
        if isinstance(value, str):  # quoted twice
            return arguments_of(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call are an object")
    return value


def _call_of(value: object) -> Call:
    """A call of a JSON object; ValueError if it has no name."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        raise ValueError("a call is an object with a name")
    return Call(name, arguments_of(next((value[key] for key in ("arguments", "parameters") if key in value), None)))


def _json_call(text: str, schemas: Schemas) -> list[Call]:
    """{"name": ..., "arguments": ...}, or a list of them."""
    value = json.loads(text)
    if isinstance(value, list) and value:
        return [_call_of(call) for call in value]
    return [_call_of(value)]


def _json_calls(text: str, schemas: Schemas) -> list[Call]:
    """JSON objects or lists of them, one after another."""
    calls, decoder, tail = [], json.JSONDecoder(), text.strip()
    while tail:
        value, end = decoder.raw_decode(tail)
        calls += [_call_of(call) for call in (value if isinstance(value, list) else [value])]
        tail = tail[end:].lstrip("; \n,")
    return calls


def _llama(text: str, schemas: Schemas) -> list[Call]:
    """Llama 3's JSON objects, with or without <|python_tag|>; ValueError if there is none."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if not text.startswith("{"):
        raise ValueError("no JSON object")
    return _json_calls(text, schemas)


# --- typed texts


def allows_text(schema: object, root: object = None) -> bool:
    """Whether a JSON schema allows a string; True if it names no type. root: the document of its references."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return schema is not False
    if isinstance(reference := schema.get("$ref"), str):
        return allows_text(_referred(root, reference), root)
    if isinstance(kind := schema.get("type"), str | list | tuple):
        return kind == "string" or (not isinstance(kind, str) and "string" in kind)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            return any(allows_text(subschema, root) for subschema in schema[key])
    if isinstance(schema.get("allOf"), list | tuple):
        return all(allows_text(subschema, root) for subschema in schema["allOf"])
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list | tuple):
        return any(isinstance(value, str) for value in values)
    return True


def _referred(root: object, reference: str) -> object:
    for key in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(key, {}) if isinstance(root, Mapping) else {}
    return {} if isinstance(root, Mapping) and "$ref" in root else root


_WORDS = {"True": True, "False": False, "None": None}  # templates write Python's words


def _typed(text: str, parameters: object, key: str) -> object:
    """An argument's bare text as a value, by the schema of the tool's parameters."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if isinstance(properties, Mapping) and key in properties and allows_text(properties[key], parameters):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _WORDS.get(text.strip(), text)


def _typed_call(name: str, texts: Sequence[tuple[str, str]], schemas: Schemas) -> Call:
    """A call whose arguments are bare texts, (key, text) each."""
    parameters = schemas.get(name, {})
    return Call(name, {key: _typed(text, parameters, key) for key, text in texts})


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml(text: str, schemas: Schemas) -> list[Call]:
    """Of Qwen3-Coder and others: <function=NAME><parameter=KEY>VALUE</parameter>...</function>; else ValueError."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        raise ValueError("a call is <function=NAME>...</function>")
    return [_typed_call(function[1], _PARAMETER.findall(function[2]), schemas)]


_INVOKE = re.compile(r"<invoke name=\"?([^\">]+)\"?>(.*?)</invoke>", re.DOTALL)
_NAMED = re.compile(r"<parameter name=\"?([^\">]+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL)


def _invoked(text: str, schemas: Schemas) -> list[Call]:
    """Of MiniMax: <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>."""
    calls = [_typed_call(name, _NAMED.findall(body), schemas) for name, body in _INVOKE.findall(text)]
    if not calls or _INVOKE.sub("", text).strip():
        raise ValueError('a call is <invoke name="NAME">...</invoke>')
    return calls


_GLM = re.compile(r"\s*([^\s<]+)\s*((?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)*)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm(text: str, schemas: Schemas) -> list[Call]:
    """Of GLM 4.5 and later: NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...; else ValueError."""
    call = _GLM.fullmatch(text)
    if call is None:
        raise ValueError("a call is NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
    return [_typed_call(call[1], [(key.strip(), value) for key, value in _PAIR.findall(call[2])], schemas)]


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:(\w+)<｜tool▁sep｜>(\S+)\s*```json\s*(.*?)\s*```|(\S+?)<｜tool▁sep｜>(.*?))\s*"
    r"(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)


def _deepseek(text: str, schemas: Schemas) -> list[Call]:
    """Of DeepSeek: function<sep>NAME and a JSON block (V3, R1), or NAME<sep>JSON (V3.1)."""
    calls = [
        Call(name or short, arguments_of(block if name else bare))
        for _, name, block, short, bare in _DEEPSEEK.findall(text)
    ]
    if not calls or _DEEPSEEK.sub("", text).strip():
        raise ValueError("a call is <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>")
    return calls


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)


def _kimi(text: str, schemas: Schemas) -> list[Call]:
    """Of Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>."""
    calls = [Call(name, arguments_of(value)) for name, value in _KIMI.findall(text)]
    if not calls or _KIMI.sub("", text).strip():
        raise ValueError("a call is <|tool_call_begin|>NAME<|tool_call_argument_begin|>JSON<|tool_call_end|>")
    return calls


_NAME_AND_JSON = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)?", re.DOTALL)


def _mistral(text: str, schemas: Schemas) -> list[Call]:
    """A JSON list (versions 3 to 7), or NAME[ARGS]JSON (11 and later); else ValueError."""
    if text.lstrip().startswith(("[{", "{", "[ {")):
        return _json_calls(text, schemas)
    call = _NAME_AND_JSON.fullmatch(text)
    if call is None:
        raise ValueError("a call is a JSON list, or NAME[ARGS]JSON")
    return [Call(call[1], arguments_of(call[2]))]


def _python(text: str, schemas: Schemas) -> list[Call]:
    """Python calls with literal keyword arguments: [f(a=1), g()], or one a line."""
    try:
        bodies = [line.value for line in ast.parse(text.strip()).body if isinstance(line, ast.Expr)]
    except SyntaxError as error:
        raise ValueError(f"no calls of Python: {error}") from None
    nodes = [node for body in bodies for node in (body.elts if isinstance(body, ast.List) else [body])]
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
            raise ValueError("a call is NAME(KEY=VALUE, ...)")
        arguments = {str(word.arg): _literal(word.value) for word in node.keywords}
        calls.append(Call(ast.unparse(node.func), arguments))
    if not calls:
        raise ValueError("no call")
    return calls


def _literal(node: ast.expr) -> object:
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    return ast.literal_eval(node)


# A text in quotes of Gemma's own; a sign of the notation; a key, which has no quotes; a number, true, false or null.
_GEMMA_TOKEN = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<sign>[{}\[\],:])|(?P<word>[^{}\[\],:<]+)', re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)


def _gemma(text: str, schemas: Schemas) -> list[Call]:
    """Of Gemma 4: call:NAME{key:value,...}, texts between <|"|>; else ValueError."""
    call = _GEMMA_CALL.fullmatch(text)
    if call is None:
        raise ValueError("a call is call:NAME{key:value,...}")
    json_tokens, position, body = [], 0, call[2]
    while position < len(body):
        token = _GEMMA_TOKEN.match(body, position)
        if token is None:
            raise ValueError(f"the arguments {body!r} are malformed at {position}")
        position = token.end()
        word = token["word"]
        is_key = word is not None and body.startswith(":", position)
        json_tokens.append(token["sign"] or (word if word and not is_key else json.dumps(token["text"] or word or "")))
    return [Call(call[1], arguments_of("".join(json_tokens)))]


# The first form whose `source` a template has is taken. gpt-oss's calls are channels (`answers.py`).
FORMS = (
    CallForm(
        "Gemma 4 <|tool_call>",
        ("<|tool_call>call:", "<tool_call|>"),
        "<|tool_call>",
        "<tool_call|>",
        _gemma,
        marks=('<|"|>',),
    ),
    CallForm(
        "DeepSeek",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _deepseek,
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallForm(
        "Kimi",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _kimi,
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallForm(
        "Mistral [TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        "",
        _mistral,
        marks=("[ARGS]", "[CALL_ID]"),
        body="list",
    ),
    CallForm("LFM2 <|tool_call_start|>", ("<|tool_call_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", _python),
    CallForm("OLMo <function_calls>", ("<function_calls>",), "<function_calls>", "</function_calls>", _python),
    CallForm(
        "Phi-4 <|tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
        "<|tool_call|>",
        "<|/tool_call|>",
        _json_call,
        body="object",
    ),
    CallForm("Granite <|tool_call|>", ("<|tool_call|>",), "<|tool_call|>", "", _json_calls, body="list"),
    CallForm(
        "Command <|START_ACTION|>",
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _json_calls,
        body="list",
    ),
    CallForm("MiniMax <invoke>", ("<minimax:tool_call>",), "<minimax:tool_call>", "</minimax:tool_call>", _invoked),
    CallForm("Seed <function=NAME>", ("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _xml),
    CallForm("GLM <arg_key>", ("<tool_call>", "<arg_key>"), "<tool_call>", "</tool_call>", _glm),
    CallForm("Qwen3-Coder <function=NAME>", ("<tool_call>", "<function="), "<tool_call>", "</tool_call>", _xml),
    CallForm(
        "Hermes and Qwen <tool_call> JSON", ("<tool_call>",), "<tool_call>", "</tool_call>", _json_call, body="object"
    ),
    CallForm(
        "Llama 3 JSON",
        ("<|start_header_id|>", "tool_calls"),
        "",
        "",
        _llama,
        leading=("{", "<|python_tag|>"),
        marks=("<|python_tag|>",),
        body="object",
    ),
)
HERMES = next(form for form in FORMS if form.name.startswith("Hermes"))
