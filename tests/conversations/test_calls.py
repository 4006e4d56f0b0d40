"""A call is whole or it is text: whatever its values have, wherever it is cut, whatever is wrong with it."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxtune.conversations.answers import Answer, AnswerReader
from jaxtune.conversations.calls import FORMS, Call
from tests.train.data.conftest import make_tokenizer

TEXT, NUMBER, OPTIONAL = {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}
SCHEMAS = {"look": {"properties": {"at": TEXT, "unit": TEXT, "n": NUMBER, "deep": {"type": "object"}, "o": OPTIONAL}}}
SOURCES = {form.name: " ".join(form.source) for form in FORMS} | {"gpt-oss": "<|channel|> <|message|> functions."}
BARE = {"Qwen3-Coder <function=NAME>", "Seed <function=NAME>", "MiniMax <invoke>", "GLM <arg_key>"}  # values are texts


@functools.cache
def reader_of(name: str) -> AnswerReader:
    return AnswerReader(make_tokenizer(), SOURCES[name])


def read(name: str, text: str, cut: bool = False) -> Answer:
    return reader_of(name).read_text(text, SCHEMAS, cut=cut)


def bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


def tags(arguments, opens: str, closes: str) -> str:
    return "".join(f"{opens.replace('KEY', key)}{bare(value)}{closes}" for key, value in arguments.items())


def python(name: str, arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_object(name: str, arguments, key: str = "arguments", of_name: str = "name") -> str:
    return json.dumps({of_name: name, key: arguments}, ensure_ascii=False)


def written(form: str, name: str, arguments) -> str:
    """A call as a model of this form writes it."""
    values = json.dumps(arguments, ensure_ascii=False)
    xml = f"<function={name}>\n{tags(arguments, '<parameter=KEY>' + chr(10), chr(10) + '</parameter>' + chr(10))}"
    sep, begin, end = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    block = f"\n```json\n{values}\n```"
    named = tags(arguments, '<parameter name="KEY">\n', "\n</parameter>\n")
    pairs = tags(arguments, "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
    kimi = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{values}<|tool_call_end|>"
    return {
        "Hermes": f"<tool_call>\n{as_object(name, arguments)}\n</tool_call>",
        "Qwen3-Coder": f"<tool_call>\n{xml}</function>\n</tool_call>",
        "Seed": f"<seed:tool_call>\n{xml}</function>\n</seed:tool_call>",
        "MiniMax": f'<minimax:tool_call>\n<invoke name="{name}">\n{named}</invoke>\n</minimax:tool_call>',
        "GLM": f"<tool_call>{name}\n{pairs}</tool_call>",
        "Gemma": f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>",
        "Mistral": f"[TOOL_CALLS]{name}[ARGS]{values}",
        "DeepSeek": f"<｜tool▁calls▁begin｜>{begin}function{sep}{name}{block}{end}<｜tool▁calls▁end｜>",
        "Kimi": f"<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>",
        "LFM2": f"<|tool_call_start|>[{python(name, arguments)}]<|tool_call_end|>",
        "OLMo": f"<function_calls>{python(name, arguments)}</function_calls>",
        "Phi-4": f"<|tool_call|>[{as_object(name, arguments)}]<|/tool_call|>",
        "Granite": f"<|tool_call|>[{as_object(name, arguments)}]",
        "Command": f"<|START_ACTION|>[{as_object(name, arguments, 'parameters', 'tool_name')}]<|END_ACTION|>",
        "Llama": as_object(name, arguments, "parameters"),
        "gpt-oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{values}<|call|>",
    }[form.split()[0]]


MARKS = [
    "</parameter>",
    "<parameter=unit>",
    "</function>",
    "<function=look>",
    "</tool_call>",
    "<tool_call>",
    "</invoke>",
]
MARKS += ["</arg_value>", "<arg_key>", '<|"|>', "<tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁call▁end｜>", "```"]
MARKS += ["<|tool_call_end|>", "</function_calls>", "<|END_ACTION|>", "<|call|>", "<|end|>", "<think>", "</think>"]
MARKS += [
    '<parameter name="unit">',
    "</minimax:tool_call>",
    "</seed:tool_call>",
    "Paris",
    "null",
    "7",
    "ü🙂",
    "\\",
    '"',
]
MARKS += ["'", "{", "}", "[", "]", ",", ":", "unit:", "\n", " ", "#", "=", "<", "unit=", "\\ud83d"]
VALUES = st.lists(st.sampled_from(MARKS), max_size=4).map("".join) | st.text(max_size=6)
ARGUMENTS = st.fixed_dictionaries(
    {"at": VALUES}, optional={"unit": VALUES, "n": st.integers(-9, 99), "deep": st.just({"true": [True, None, "x, y"]})}
)
# An end with the next beginning behind it is two arguments, or two calls, in every reading.
PAIRS = [
    *("</parameter><parameter", "</parameter></function><function", "</arg_value><arg_key", "</invoke><invoke"),
    *("<tool_call>", "<arg_key>", '<|"|>,', '<|"|>}', '<|"|>]'),
]


def is_two(text: str) -> bool:
    return any(pair in "".join(text.split()) for pair in PAIRS)


@pytest.mark.parametrize("form", SOURCES)
@settings(max_examples=25)
@given(ARGUMENTS)
def test_values_of_any_characters(form, arguments):
    """Are read as they were written; in notations that quote nothing, what could be two things is text."""
    arguments = {key: value.replace("\r", "") if isinstance(value, str) else value for key, value in arguments.items()}
    quotes_nothing = form in BARE or form.startswith("Gemma")
    assume(not quotes_nothing or not any(is_two(str(value)) for value in arguments.values()))
    text = written(form, "look", arguments)
    answer = read(form, text)
    if quotes_nothing and not answer.calls:
        assert "<" in str(arguments) and answer.content
    else:
        assert (answer.calls, answer.content) == ((Call("look", arguments),), "")


def whole_or_text(form: str, text: str, calls: tuple[Call, ...], cut: bool) -> None:
    """Of a prefix of `calls`: some of them as they are, or none, and then all of it is in the text."""
    answer = read(form, text, cut)
    assert answer.calls == calls[: len(answer.calls)], (text, answer)
    if not answer.calls and form != "gpt-oss":
        assert answer.content == text


@pytest.mark.parametrize("form", SOURCES)
def test_calls_cut_at_every_character(form):
    """By max_tokens, or a model that ended within: no half call, and no call that only a cut made whole."""
    first, second = Call("look", {"at": "Paris, 'x'", "n": 12}), Call("look", {"at": "", "deep": {"a": [1]}})
    one = written(form, first.name, first.arguments)
    two = one + ("; " if form.startswith("Llama") else "") + written(form, second.name, second.arguments)
    if form == "gpt-oss":
        two = one + "<|start|>assistant" + written(form, second.name, second.arguments)
    assert read(form, two).calls == (first, second)
    has_end = form == "gpt-oss" or next(item for item in FORMS if item.name == form).closes
    for end in range(len(two)):
        whole_or_text(form, two[:end], (first, second), cut=True)
        assert bool(read(form, two[:end], cut=True).calls) == bool(has_end and end >= len(one)) or not has_end
        if form != "gpt-oss":
            whole_or_text(form, two[:end], (first, second), cut=False)
    bare_call = written(form, "delete_files", {})
    for end in range(len(bare_call)):
        answer = read(form, bare_call[:end], cut=True)
        assert not answer.calls and (answer.content or not end or form == "gpt-oss")
        if form != "gpt-oss":
            assert all(call == Call("delete_files", {}) for call in read(form, bare_call[:end]).calls)


@pytest.mark.parametrize("form", SOURCES)
@settings(max_examples=40)
@given(st.data())
def test_a_damaged_call_loses_no_argument(form, data):
    """One character or mark is taken away, doubled or put in: no word of names and values is lost."""
    text = written(form, "look", {"at": "Paris", "unit": "C 1", "n": 70})
    header = text.find("<|message|>") + 11 if form == "gpt-oss" else 0  # which is no text
    at = data.draw(st.integers(header, len(text) - 1))
    size = data.draw(st.sampled_from([0, 1, 1, 1, 2, 9, 13]))
    new = data.draw(st.sampled_from(["", "", text[at : at + size] * 2, *MARKS]))
    damaged = text[:at] + new + text[at + size :]
    answer = read(form, damaged)
    calls = [(call.name, call.arguments) for call in answer.calls]
    said = json.dumps([calls, answer.content, answer.reasoning], ensure_ascii=False)
    for word in ("Paris", "unit", "C 1", "70", *([] if header else ["look"])):
        assert said.count(word) >= damaged.count(word), (damaged, answer)


@pytest.mark.parametrize("form", SOURCES)
@settings(max_examples=30)
@given(st.lists(st.sampled_from(["call", "words ", *MARKS]), max_size=6), ARGUMENTS, st.data())
def test_a_stream_of_calls_is_the_whole(form, parts, arguments, data):
    text = "".join(written(form, "look", arguments) if part == "call" else part for part in parts)
    text, cut = text[: data.draw(st.integers(0, len(text)))], data.draw(st.booleans())
    stream, pieces, at = reader_of(form).stream(SCHEMAS), [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 40))
        pieces += stream.add(text[at : at + size])
        at += size
    pieces += stream.end(cut)
    whole = read(form, text, cut)
    assert tuple(stream.calls) == whole.calls
    for kind, said in (("content", whole.content), ("thought", whole.reasoning)):
        assert "".join(text for of, text in pieces if of == kind) == said


XML, GLM, GEMMA = "Qwen3-Coder <function=NAME>", "GLM <arg_key>", "Gemma 4 <|tool_call>"
PYTHON, HERMES, LLAMA = "OLMo <function_calls>", "Hermes and Qwen <tool_call> JSON", "Llama 3 JSON"


@pytest.mark.parametrize(
    "form, text, arguments",
    [
        (XML, "<function=look>\n<parameter=at>\nParis\n</function>", None),
        (XML, "<function=look>\n<Parameter=at>\nParis\n</Parameter>\n</function>", None),
        (XML, "<function=look><parameter=at>Paris<parameter=unit>C</parameter></function>", None),
        (XML, "<function=look><parameter=at>a</parameter><parameter=at>b</parameter></function>", None),
        (XML, '<function="look"><parameter="at">Paris</parameter></function>', {"at": "Paris"}),
        (XML, "<function=look><parameter=at>a </parameter> b\n</parameter></function>", {"at": "a </parameter> b"}),
        (XML, "<function=look><parameter=o>null</parameter></function>", {"o": None}),
        (XML, "<function=look><parameter=at>null</parameter></function>", {"at": "null"}),
        (
            XML,
            "<function=look><parameter=deep>{'a': (1, True, None)}</parameter></function>",
            {"deep": {"a": [1, True, None]}},
        ),
        (XML, "<function=look><parameter=n>NaN</parameter></function>", {"n": "NaN"}),
        (
            GLM,
            "look<arg_key>at</arg_key><arg_value>a</arg_value></tool_call> b</arg_value>",
            {"at": "a</arg_value></tool_call> b"},
        ),
        (GLM, "look<arg_key>at</arg_key>Paris", None),
        (GEMMA, "call:look{at:1, n : 2}", {"at": 1, "n": 2}),
        (GEMMA, "call:look{'at':1,\"n\":2}", {"at": 1, "n": 2}),
        (GEMMA, 'call:look{at:<|"|>print(<|"|>hi<|"|>)<|"|>,n:2}', {"at": 'print(<|"|>hi<|"|>)', "n": 2}),
        (GEMMA, 'call:look{at:<|"|>Paris,unit:<|"|>C<|"|>}', None),
        (
            PYTHON,
            'look(deep={"a": true, "b": [null, False]}, n=-1)',
            {"deep": {"a": True, "b": [None, False]}, "n": -1},
        ),
        (PYTHON, "look(at=('a', 'b'))", {"at": ["a", "b"]}),
        *(
            (PYTHON, f"look(at={value})", None)
            for value in ("{1}", "b'a'", "...", "2j", "1e999", "{(1,): 2}", "f'x'", "NaN")
        ),
        *(
            (PYTHON, text, None)
            for text in ("y = look(at='a')", "look(at='a') # twice", "look('a')", "look(**{'at': 1})")
        ),
        (PYTHON, "y = look(at='a')\nlook(at='b')", None),
        *(
            (HERMES, f'{{"name": "look", "arguments": {{"n": {value}}}}}', None)
            for value in ("NaN", "-Infinity", "1e999")
        ),
        (HERMES, '{"name": "look", "arguments": {"n": 1}, "at": "Paris"}', None),
        (HERMES, '{"name": "look", "arguments": {"n": 1, "n": 2}}', None),
        (HERMES, '{"name": " look", "arguments": {" at": "x", " else": 1}}', {"at": "x", " else": 1}),
        (LLAMA, '{"name": "Anna", "age": 3}', None),
        (LLAMA, '{"name": "Anna"}', None),
        (LLAMA, '{"function": {"name": "Anna"}}', None),
        (LLAMA, '{"name": "look"}', {}),
        (LLAMA, '{"name": "look", "parameters": {"at": "x"}}', {"at": "x"}),
    ],
)
def test_a_call_is_whole_or_text(form, text, arguments):
    """arguments: None where it is text."""
    marks = next((item.opens, item.closes) for item in FORMS if item.name == form)
    answer = read(form, text.join(marks))
    assert (answer.calls, answer.content) == (
        ((), text.join(marks)) if arguments is None else ((Call("look", arguments),), "")
    )


def test_words_between_calls_stay():
    call = written(HERMES, "look", {})
    answer = read(HERMES, f"A. {call} B. {call} C.\n")
    assert (answer.content, len(answer.calls)) == ("A.  B.  C.", 2)
    assert read(HERMES, f"{call}\n{call}\n").content == ""


@pytest.mark.parametrize("form", SOURCES)
def test_an_opening_mark_alone_is_text(form):
    opens = written(form, "look", {}).partition("look")[0]
    assert form == "gpt-oss" or read(form, opens).content == opens


@pytest.mark.parametrize("form", [form.name for form in FORMS if not form.closes])
@pytest.mark.parametrize("cut", [False, True])
def test_words_behind_a_call_that_no_mark_ends(form, cut):
    """Stay words, also where the answer was cut in them; what may be a damaged call is one text with it."""
    call = written(form, "look", {"at": "Paris"})
    for words in ("It is.", "\n\nDone"):
        answer = read(form, f"{call} {words}", cut)
        assert (answer.calls, answer.content) == ((Call("look", {"at": "Paris"}),), words.strip())
    for damaged in (call + "}", call + ', "n": 1}', call[:-2] + " Done"):
        assert read(form, damaged, cut).calls == ()
    assert read(LLAMA, written(LLAMA, "Anna", {}) + " is a call").calls == ()


def test_a_call_without_its_outer_marks():
    inner = written(XML, "look", {"at": "a </function> b", "n": 2}).split("\n", 1)[1].removesuffix("\n</tool_call>")
    call = Call("look", {"at": "a </function> b", "n": 2})
    for text, words in ((inner, ""), (f"Ok. {inner}\n</tool_call>", "Ok."), (f"{inner}\nB.", "B.")):
        answer = read(XML, text)
        assert (answer.calls, answer.content) == ((call,), words)
    assert read(XML, f"{inner}\n{inner}").calls == (call, call)
    assert read(XML, f"{inner}\n<tool_call>\n{inner}\n</tool_call>").calls == (call, call)
    for end in range(len(inner)):
        whole_or_text(XML, inner[:end], (call,), cut=True)


@pytest.mark.parametrize("form", [form.name for form in FORMS if form.opens])
def test_a_call_ends_thoughts_that_have_no_end(form):
    reader = AnswerReader(make_tokenizer(), f"{SOURCES[form]} </think>")
    call = written(form, "look", {"at": "Paris"})
    for opening in ("", "<think>"):
        text = f"{'' if opening else '<think>'}Hm, so. {call}"
        answer = reader.read_text(text, SCHEMAS, opening)
        assert (answer.calls, answer.content, answer.reasoning) == ((Call("look", {"at": "Paris"}),), "", "Hm, so.")
        for thought in (f"{text} or not", f"{text}</think>"):
            answer = reader.read_text(thought, SCHEMAS, opening)
            assert (answer.calls, answer.content) == ((), "") and call in answer.reasoning
        assert reader.read_text(text, SCHEMAS, opening, cut=True).calls == ()
        stream = reader.stream(SCHEMAS, opening)
        said = "".join(said for sign in text for _, said in stream.add(sign)) + "".join(t for _, t in stream.end())
        assert (tuple(stream.calls), said) == ((Call("look", {"at": "Paris"}),), "Hm, so.")


GRANITE, MISTRAL = "Granite <|tool_call|>", "Mistral [TOOL_CALLS]"
WEATHER, TOKYO = '{"name": "weather", "arguments": {"city": "Tokyo"}}', Call("weather", {"city": "Tokyo"})


# What other servers' tests of their parsers have models write.
@pytest.mark.parametrize(
    ("form", "text", "calls", "content"),
    [
        (HERMES, f"Sure.<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>", 2, "Sure."),
        (HERMES, f"<tool_call>\n{WEATHER}", 1, ""),
        (HERMES, f"<tool_call>\n{WEATHER[:-1]}", 0, f"<tool_call>\n{WEATHER[:-1]}"),
        (
            HERMES,
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Tokyo\\"}"}</tool_call>',
            1,
            "",
        ),
        (GRANITE, f"Let me look.\n<|tool_call|> [\n  {WEATHER},\n  {WEATHER}\n]\nDone.", 2, "Let me look.\n\nDone."),
        (GRANITE, '<|tool_call|> [{"arguments": {"city": "Tokyo"}, "name": "weather"}]', 1, ""),
        (GRANITE, 'Some text [{"name": "weather"}]', 0, 'Some text [{"name": "weather"}]'),
        (MISTRAL, f"Hello[TOOL_CALLS] [{WEATHER}]\nextra", 1, "Hello\nextra"),
        (MISTRAL, '[TOOL_CALLS]weather{"city": "Tokyo"}[TOOL_CALLS]weather{"city": "Tokyo"}', 2, ""),
        (MISTRAL, "[TOOL_CALLS] not json at all", 0, "[TOOL_CALLS] not json at all"),
        (MISTRAL, f"[TOOL_CALLS]  junk [{WEATHER}] trail", 0, f"[TOOL_CALLS]  junk [{WEATHER}] trail"),
    ],
)
def test_what_other_servers_are_tested_with(form, text, calls, content):
    answer = reader_of(form).read_text(text, {"weather": {}})
    assert (answer.calls, answer.content) == ((TOKYO,) * calls, content)
    stream = reader_of(form).stream({"weather": {}})
    pieces = [*(piece for sign in text for piece in stream.add(sign)), *stream.end()]
    assert (tuple(stream.calls), "".join(said for _, said in pieces)) == (answer.calls, content)
