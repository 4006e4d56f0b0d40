"""What models write, apart: thoughts, text and calls, whole and while it arrives."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.conversations.answers import AnswerReader, Completions, whole_text
from jaxtune.conversations.calls import FORMS, Call, allows_text, arguments_of, schemas_of
from jaxtune.train.sampled.reward_functions import tagged_format
from tests.train.data.conftest import make_tokenizer

SCHEMAS = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "t": {"type": ["string", "null"]}}}}
F, G = Call("f", {"s": "7", "n": 7}), Call("g", {})
# Of each form: what a template's source has, the text of F, and that of G.
CALLS = {
    "Hermes and Qwen <tool_call> JSON": (
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"s": "7", "n": 7}}\n</tool_call>',
        '<tool_call>{"name": "g", "arguments": ""}</tool_call>',
    ),
    "Qwen3-Coder <function=NAME>": (
        "<tool_call><function=",
        "<tool_call>\n<function=f>\n<parameter=s>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    ),
    "GLM <arg_key>": (
        "<tool_call><arg_key>",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>7</arg_value>\n<arg_key>n</arg_key><arg_value>7</arg_value>\n"
        "</tool_call>",
        "<tool_call>g\n</tool_call>",
    ),
    "Gemma 4 <|tool_call>": (
        "<|tool_call>call: <tool_call|>",
        '<|tool_call>call:f{s:<|"|>7<|"|>,n:7}<tool_call|>',
        "<|tool_call>call:g{}<tool_call|>",
    ),
    "Mistral [TOOL_CALLS]": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "7", "n": 7}, "id": "abcdefghi"}]',
        "[TOOL_CALLS]g[ARGS]{}",
    ),
    "DeepSeek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"s": "7", "n": 7}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "Kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"s": "7", "n": 7}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "Phi-4 <|tool_call|>": (
        "<|tool_call|> <|/tool_call|>",
        '<|tool_call|>[{"name": "f", "arguments": {"s": "7", "n": 7}}]<|/tool_call|>',
        '<|tool_call|>[{"name": "g", "arguments": null}]<|/tool_call|>',
    ),
    "Granite <|tool_call|>": (
        "<|tool_call|>",
        '<|tool_call|>[{"name": "f", "arguments": {"s": "7", "n": 7}}]',
        '<|tool_call|>[{"name": "g"}]',
    ),
    "LFM2 <|tool_call_start|>": (
        "<|tool_call_start|>",
        "<|tool_call_start|>[f(s='7', n=7)]<|tool_call_end|>",
        "<|tool_call_start|>[g()]<|tool_call_end|>",
    ),
    "OLMo <function_calls>": (
        "<function_calls>",
        '<function_calls>f(s="7", n=7)</function_calls>',
        "<function_calls>g()</function_calls>",
    ),
    "Command <|START_ACTION|>": (
        "<|START_ACTION|>",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"s": "7", "n": 7}}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_call_id": "1", "tool_name": "g", "parameters": {}}]<|END_ACTION|>',
    ),
    "MiniMax <invoke>": (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">7</parameter>\n<parameter name="n">7</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>',
    ),
    "Seed <function=NAME>": (
        "<seed:tool_call>",
        "<seed:tool_call><function=f><parameter=s>7</parameter><parameter=n>7</parameter></function></seed:tool_call>",
        "<seed:tool_call><function=g></function></seed:tool_call>",
    ),
    "Llama 3 JSON": (
        "<|start_header_id|> tool_calls",
        '{"name": "f", "parameters": {"s": "7", "n": 7}}',
        '{"name": "g", "parameters": {}}',
    ),
}
# Of each kind of thoughts: what a template's source has, its opening and its end.
THOUGHTS = {
    "think": ("</think>", "<think>\n", "\n</think>\n\n"),
    "mistral": ("[/THINK]", "[THINK]", "[/THINK]"),
    "gemma": ("<|channel> <channel|>", "<|channel>thought\n", "<channel|>"),
    "seed": ("<seed:think>", "<seed:think>", "</seed:think>"),
}


@functools.cache
def reader_of(source: str) -> AnswerReader:
    return AnswerReader(make_tokenizer(), source)


def test_every_form_is_tried():
    assert {form.name for form in FORMS} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_each_form(name):
    source, f, g = CALLS[name]
    reader = reader_of(source)
    assert reader.form.name == name
    assert reader.read_text(f, SCHEMAS).calls == (F,)
    assert reader.read_text(g, SCHEMAS).calls == (G,)
    both = reader.read_text(f"{f}\n{g}", SCHEMAS)
    assert both.calls == (F, G) and both.content == ""
    if not reader.form.leading:
        answer = reader.read_text(f"I look.\n\n{f}", SCHEMAS)
        assert (answer.content, answer.calls) == ("I look.", (F,))
    assert reader.read_text("It is {1}.\n", SCHEMAS).message == {"role": "assistant", "content": "It is {1}.\n"}
    assert reader.read_text(f, None).calls == ()


@pytest.mark.parametrize("thoughts", THOUGHTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_a_thought_is_none(name, thoughts):
    source, f, g = CALLS[name]
    marks, opens, closes = THOUGHTS[thoughts]
    reader = reader_of(f"{source} {marks}")
    for opening, first in (("", opens), (opens.rstrip(), "")):
        answer = reader.read_text(f"{first}maybe {f} or not{closes}{g}", SCHEMAS, opening)
        assert (answer.reasoning, answer.content, answer.calls) == (f"maybe {f} or not", "", (G,))
        answer = reader.read_text(f"{first}maybe {f} but I was cut", SCHEMAS, opening)
        assert (answer.content, answer.calls, answer.reasoning) == ("", (), f"maybe {f} but I was cut")
        assert reader.read_text(f"{first}hm{closes}Four.", None, opening).message == {
            "role": "assistant",
            "content": "Four.",
            "reasoning_content": "hm",
        }
    assert reader.read_text(f"{opens}{closes}4", SCHEMAS).message == {"role": "assistant", "content": "4"}
    later = reader.read_text(f"{opens}x{closes}{g}{opens}draft {f}{closes}", SCHEMAS)
    if not reader.form.leading and reader.form.closes:
        assert later.calls == (G,) and "draft" in later.reasoning


GPT_OSS = "<|channel|> <|message|> functions."
END = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "text, content, reasoning, calls",
    [
        (f"<|channel|>analysis<|message|>It greets.{END}<|channel|>final<|message|>Hello!", "Hello!", "It greets.", ()),
        (
            f"<|channel|>analysis<|message|>to=functions.f{END}<|channel|>commentary to=functions.f <|constrain|>json"
            '<|message|>{"s": "7", "n": 7}<|call|>',
            "",
            "to=functions.f",
            (F,),
        ),
        (" to=functions.g<|channel|>commentary json<|message|>", "", "", (G,)),
        (
            f"<|channel|>commentary<|message|>I look.{END}<|channel|>commentary to=functions.g<|message|>{{}}",
            "I look.",
            "",
            (G,),
        ),
        ("<|channel|>analysis<|message|>cut off", "", "cut off", ()),
        ("<|channel|>final", "", "", ()),
        ("Hello", "Hello", "", ()),
        ("<|channel|>commentary to=functions.f<|message|>[1]", "[1]", "", ()),
    ],
)
def test_channels(text, content, reasoning, calls):
    answer = reader_of(GPT_OSS).read_text(text, SCHEMAS)
    assert (answer.content, answer.reasoning, answer.calls) == (content, reasoning, calls)


ALL = [*(f"{source} {marks}" for source, *_ in CALLS.values() for marks, *_ in THOUGHTS.values()), "", GPT_OSS]
PARTS = [part for _, *texts in [*CALLS.values(), *THOUGHTS.values()] for part in texts]
PARTS += [f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary to=functions.f")]
PARTS += [END, "thought", "text ", "\n\n", " ", "<", "{", "</think>", "<|", "[", '{"name"', "<tool_call>", "ü🙂"]


@settings(max_examples=250, deadline=None, database=None)
@given(
    st.sampled_from(ALL),
    st.lists(st.sampled_from(PARTS), max_size=7).map("".join),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.sampled_from(["", "<think>", "<|channel|>analysis<|message|>"]),
)
def test_the_pieces_of_a_stream_are_the_whole(source, text, tools, sizes, opening):
    reader = reader_of(source)
    opening = opening if source == GPT_OSS or "</think>" in source else ""
    whole = reader.read_text(text, SCHEMAS if tools else None, opening)
    stream, pieces, at = reader.stream(SCHEMAS if tools else None, opening), [], 0
    for size in sizes * (len(text) // len(sizes) + 1):
        pieces += stream.add(text[at : at + size])
        at += size
    pieces += stream.add(text[at:])
    pieces += stream.end()
    said = {kind: "".join(text for of, text in pieces if of == kind) for kind in ("content", "thought")}
    assert (said["content"], said["thought"], tuple(stream.calls)) == (whole.content, whole.reasoning, whole.calls)
    for call in whole.calls:
        assert isinstance(call.arguments, dict) and tools
    if not reader.thinks:
        assert not whole.reasoning
        assert whole.calls or whole.content == text


@pytest.mark.parametrize(
    "broken", ['<tool_call>{"name": </tool_call>', '<tool_call>["f"]</tool_call> x', "<tool_call>" + "[" * 100_000]
)
def test_a_malformed_call_is_text(broken):
    answer = reader_of("<tool_call> </think>").read_text(f"<think>x</think>So: {broken}", {})
    assert (answer.content, answer.reasoning, answer.calls) == (f"So: {broken}", "x", ())


@pytest.mark.parametrize("call", ["f", "call:f{a:}", "call:f{a:1", "call:f{a:b}", "call:f{a:<1>}", "call:f(1)"])
def test_a_malformed_call_of_gemma_is_text(call):
    text = f"<|tool_call>{call}<tool_call|>"
    assert reader_of(CALLS["Gemma 4 <|tool_call>"][0]).read_text(text, {}).message == {
        "role": "assistant",
        "content": text,
    }


def test_arguments_of_gemma():
    text = '<|tool_call>call:f{a:7,b:{c:[1.5,true,null],d:<|"|>x, {y}: "z"<|"|>},e:<|"|><|"|>}<tool_call|>'
    [call] = reader_of(CALLS["Gemma 4 <|tool_call>"][0]).read_text(text, {}).calls
    assert call == Call("f", {"a": 7, "b": {"c": [1.5, True, None], "d": 'x, {y}: "z"'}, "e": ""})


@pytest.mark.parametrize("value", [None, "", " ", "null", "{}", {}, '"{}"'])
def test_no_arguments_are_an_empty_object(value):
    assert arguments_of(value) == {}


@pytest.mark.parametrize("value", [[1], "[1]", 1, "x"])
def test_arguments_that_are_no_object_are_refused(value):
    with pytest.raises(ValueError):
        arguments_of(value)


TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


@pytest.mark.parametrize(
    "schema, allowed",
    [
        (TEXT, True),
        (NUMBER, False),
        ({"type": ["string", "null"]}, True),
        ({"type": ["integer", "null"]}, False),
        ({"anyOf": [NUMBER, TEXT]}, True),
        ({"anyOf": [NUMBER, {"type": "null"}]}, False),
        ({"oneOf": [{"anyOf": [TEXT]}]}, True),
        ({"allOf": [TEXT, {"minLength": 1}]}, True),
        ({}, True),
        ({"description": "what"}, True),
        ({"enum": ["1", "2"]}, True),
        ({"enum": [1, 2]}, False),
        ({"const": "1"}, True),
        ({"$ref": "#/$defs/T"}, True),
        ({"$ref": "#/$defs/N"}, False),
    ],
)
def test_text_stays_text_where_the_schema_allows_it(schema, allowed):
    parameters = {"properties": {"a": schema}, "$defs": {"T": TEXT, "N": NUMBER}}
    assert allows_text(schema, parameters) == allowed
    for name in ("Qwen3-Coder <function=NAME>", "GLM <arg_key>"):
        source, f, _ = CALLS[name]
        text = f.replace("=s>", "=a>").replace(">s<", ">a<").replace("7", "123")
        [call] = reader_of(source).read_text(text, {"f": parameters}).calls
        assert call.arguments["a"] == ("123" if allowed else 123)


def test_python_words_are_values():
    text = "<tool_call><function=f>" + "".join(
        f"<parameter={key}>{key}</parameter>" for key in ("True", "None", "true", "null", "1.5")
    )
    [call] = reader_of("<tool_call><function=").read_text(f"{text}</function></tool_call>", {}).calls
    assert call.arguments == {"True": True, "None": None, "true": True, "null": None, "1.5": 1.5}


def test_schemas_of_tools():
    tool = {"type": "function", "function": {"name": "f", "parameters": NUMBER}}
    assert schemas_of([tool, tool["function"] | {"name": "g"}, {"x": 1}]) == {"f": NUMBER, "g": NUMBER}
    assert schemas_of(None) == {}


# ---- tokens


def channels_tokenizer():
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def test_a_message_that_is_continued_opens_with_its_thought_alone():
    tokenizer = channels_tokenizer()

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    gpt_oss, thinks = AnswerReader(tokenizer, GPT_OSS), AnswerReader(tokenizer, "</think>")
    thought = "<|start|>assistant<|channel|>analysis<|message|>"
    assert gpt_oss.opening(ids(thought + "It is late"), continues=True) == "<|channel|>analysis<|message|>"
    assert gpt_oss.read_text(" now", None, "<|channel|>analysis<|message|>").message["reasoning_content"] == "now"
    said = "<|start|>user<|message|><think><|end|><|start|>assistant<|channel|>final<|message|>It is"
    assert gpt_oss.opening(ids(said), continues=True) == "<|channel|>final<|message|>"
    long = "and so on, " * 200
    for text, opening in (("<think>\n" + long, "<think>"), ("<think>x</think>" + long, ""), ("x", "")):
        assert thinks.opening(ids("<|im_start|>assistant\n" + text), continues=True) == opening


def test_rewards_see_the_answer_and_its_thoughts_apart():
    tokenizer = channels_tokenizer()
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    messages = [{"role": "user", "content": "Hi"}]
    gpt_oss = AnswerReader(tokenizer, GPT_OSS)
    answer = ids(f"<|channel|>analysis<|message|>It greets.{END}<|channel|>final<|message|>Hello!")
    split = {"role": "assistant", "content": "Hello!", "reasoning_content": "It greets."}
    prompt = ids("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert Completions(decode, gpt_oss)(messages, prompt, answer) == [split]
    assert Completions(decode, gpt_oss, renders_texts=True)("Hi", prompt, answer) == "Hello!"
    assert Completions(decode, gpt_oss)("Hi", ids("Hi"), answer) == decode(answer)
    opening = ids("<|start|>assistant<|channel|>analysis<|message|>")
    assert Completions(decode, gpt_oss)(messages, opening, answer[len(ids("<|channel|>analysis<|message|>")) :]) == [
        split
    ]

    thinks, answer = AnswerReader(tokenizer, "</think>"), ids("<think>\nhm\n</think>\n\n4")
    split = {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    assert Completions(decode, thinks)(messages, ids("x"), answer) == [split]
    assert Completions(decode, thinks)(messages, ids("x<think>\n"), answer[len(ids("<think>\n")) :]) == [split]
    assert Completions(decode, thinks)(messages, ids("x<think>\n\n</think>\n\n"), ids("4")) == [
        {"role": "assistant", "content": "4"}
    ]
    assert Completions(decode, thinks, renders_texts=True)("x", ids("x"), answer) == decode(answer)
    for reader in (None, AnswerReader(tokenizer, "{# </think> #}<|im_start|>")):  # no template of thoughts
        assert Completions(decode, reader)(messages, ids("x"), answer) == decode(answer)
    assert whole_text(split) == "<think>hm</think>4" and whole_text({"content": "4"}) == "4"
    tagged = {"role": "assistant", "content": "<answer>4</answer>", "reasoning_content": "hm"}
    assert tagged_format([[tagged], "<think>hm</think><answer>4</answer>", [split]]) == [1.0, 1.0, 0.0]


def test_special_tokens_are_no_text_but_marks_are():
    tokenizer = channels_tokenizer()
    reader = AnswerReader(tokenizer, GPT_OSS)
    ids = tokenizer("<|im_start|>a<|channel|>ü<|im_end|>", add_special_tokens=False)["input_ids"]
    assert reader.text(ids) == "a<|channel|>ü" and AnswerReader(tokenizer, None).text(ids) == "aü"
