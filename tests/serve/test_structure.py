"""Answers that follow a grammar: JSON of schemas, expressions, calls of tools, after thoughts, beside other rows."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtune
from jaxtune.conversations.answers import AnswerReader
from jaxtune.conversations.calls import FORMS
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.limits import NO_MASK
from jaxtune.models.generation.requests import _accepted, accept_all, fill_masks
from jaxtune.serve.bodies import read_chat
from jaxtune.serve.errors import ApiError
from jaxtune.serve.served import Readable, ServedModel
from tests.conversations.test_calls import SOURCES, written
from tests.serve.running import BASE, ask, engine_of, events, served_models, serving
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer

pytest.importorskip("llguidance")
from jaxtune.models.generation import grammars

PLAIN, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return grammars.Grammars(tokenizer, [tokenizer.eos_token_id], len(tokenizer))


@pytest.fixture(scope="module")
def larger(tokenizer):
    """Of an adapter whose tokenizer has more tokens than the base."""
    more = copy.deepcopy(tokenizer)
    more.add_tokens([f"<|more{number}|>" for number in range(40)])
    return grammars.Grammars(more, [more.eos_token_id], len(tokenizer))


@pytest.fixture(scope="module")
def models():
    """The packaged model, and the same with a template that has places for tools."""
    base = served_models()["base"]
    tools = copy.deepcopy(base.tokenizer)
    tools.chat_template = "{% if tools %}<tool_call>{% endif %}" + tools.chat_template
    return {"base": base, "tools": ServedModel("tools", base.model, tools)}


@pytest.fixture(scope="module")
def port(models):
    engine = engine_of(models, slots=4, length=512)
    with serving(models, engine) as (port, _):
        yield port
    assert engine.close(60)


# ---- random schemas


def schema_of(draw: random.Random, depth: int = 0) -> dict:
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const", "pattern"]
    kinds += ["object", "object", "array", "anyOf", "$ref"] if depth < 3 else []
    kind = draw.choice(kinds)
    if kind == "enum":
        return {"enum": draw.sample(["red", "blau", "grün", 1, 2.5, None, True], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["x", 7, None, False])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-c]{1,4}$", "^\\d{4}-\\d{2}$", "^(ja|nein)$"])}
    if kind == "string":
        low = draw.randint(0, 2)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 4)}
    if kind in ("integer", "number"):
        low = draw.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + draw.randint(1, 40)}
    if kind == "array":
        low = draw.randint(0, 2)
        return {"type": "array", "items": schema_of(draw, depth + 1), "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [schema_of(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "$ref":
        return {"$ref": "#/$defs/shared"}
    if kind == "object":
        names = draw.sample(["a", "b", "long name", "ü", "type"], draw.randint(0, 4))
        required = [name for name in names if draw.random() < 0.6]
        properties = {name: schema_of(draw, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def fits(value: object, schema: dict, root: dict) -> bool:
    """Whether a value is of a schema, over the keywords that `schema_of` draws."""
    if "$ref" in schema:
        return fits(value, root["$defs"]["shared"], root)
    if "anyOf" in schema:
        return any(fits(value, each, root) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return any(value == choice and type(value) is type(choice) for choice in choices)
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        if not isinstance(value, dict) or not {*schema["required"]} <= {*value} <= {*properties}:
            return False
        return all(fits(value[name], properties[name], root) for name in value)
    if kind == "array":
        if not isinstance(value, list) or not schema["minItems"] <= len(value) <= schema["maxItems"]:
            return False
        return all(fits(item, schema["items"], root) for item in value)
    if kind == "string":
        if not isinstance(value, str) or ("pattern" in schema and re.search(schema["pattern"], value) is None):
            return False
        return "maxLength" not in schema or schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        right = isinstance(value, int | float) and not isinstance(value, bool)
        right = right and (kind == "number" or value == int(value))
        return right and schema["minimum"] <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


@pytest.mark.full
def test_two_hundred_schemas_always_parse(models, compiler, tokenizer):
    """Answers of a model that knows nothing of JSON, drawn at a high temperature."""
    draw = random.Random(11)
    roots = []
    while len(roots) < 200:
        shared = {
            "type": "object",
            "properties": {"n": {"type": "null"}},
            "required": [],
            "additionalProperties": False,
        }
        roots.append(schema_of(draw) | {"$defs": {"shared": shared}})
    ended = 0
    with jaxtune.Sampler(models["base"].model, 24, 256) as sampler:
        numbers, texts, reasons = {}, {}, {}
        for index, root in enumerate(roots):
            rule = compiler.constraint(grammars.json_grammar(root))
            number = sampler.submit([5, 6], 250, 1.5, seed=index, constraint=rule)
            numbers[number], texts[number] = root, []
        while sampler.pending:
            for piece in sampler.step():
                texts[piece.request] += piece.ids
                reasons[piece.request] = piece.finish_reason
    for number, root in numbers.items():
        if reasons[number] == "stop":
            text = tokenizer.decode(texts[number], skip_special_tokens=True)
            assert fits(json.loads(text), root, root), (text, root)
            ended += 1
    assert ended >= 190, ended


# ---- beside other rows


def test_other_rows_do_not_change(models, compiler, tokenizer):
    prompts = [tokenizer(text)["input_ids"] for text in ("Once upon a time", "What is 12 + 30?", "The number")]
    settings = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 3}, {"temperature": 0.9, "seed": 4, "top_k": 9}]
    with jaxtune.Sampler(models["base"].model, 4, 128) as sampler:

        def made(*others: str) -> list[list[int]]:
            rows = [sampler.submit(p, 40, **s) for p, s in zip(prompts, settings, strict=True)]
            for other in others:
                sampler.submit([5], 20, 1.0, constraint=compiler.constraint(grammars.regex_grammar(other)))
            texts: dict[int, list[int]] = {}
            while sampler.pending:
                for piece in sampler.step():
                    texts.setdefault(piece.request, []).extend(piece.ids)
            return [texts[row] for row in rows]

        assert made() == made("[a-f]{9}", "[0-9]{3}") == made("(ab)+")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_rows_together_are_rows_alone(compiler, larger, tokenizer, count, seed, slow):
    """Masks, and what is said of tokens, also of wrong ones, with thoughts, of two vocabularies, and where all together
    take too long.
    """
    draw, size = random.Random(seed), len(tokenizer)
    words = (size + 31) // 32
    texts = [grammars.json_grammar(schema_of(draw) | {"$defs": {"shared": {"type": "null"}}}) for _ in range(count)]
    thoughts = [draw.choice([(None, False, None), (re.compile("</think>"), draw.random() < 0.5, 7)]) for _ in texts]
    compilers = [draw.choice([compiler, larger]) for _ in texts]
    pairs = [(made, (text, *thought)) for made, text, thought in zip(compilers, texts, thoughts, strict=True)]
    rows, others = ([made.constraint(*given) for made, given in pairs] for _ in "ab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "_SECONDS_PER_TOKEN", -1.0 if slow else grammars._SECONDS_PER_TOKEN)
        patch.setattr(grammars, "_SECONDS", 1e9)
        for _ in range(draw.randint(1, 12)):
            masks = np.zeros((count + 2, words), np.uint32)
            places = draw.sample(range(count + 2), len(rows))
            fill_masks([*zip(rows, places, strict=True)], masks)
            tokens = []
            for row, place in zip(others, places, strict=True):
                mask = row.mask()
                np.testing.assert_array_equal(masks[place], NO_MASK if mask is None else mask)
                bits = np.unpackbits(masks[place].view(np.uint8), bitorder="little")[:size]
                allowed = np.flatnonzero(bits).tolist() or [0]
                tokens.append([draw.choice(allowed) if draw.random() < 0.95 else draw.randrange(size)])
            said = accept_all([*zip(rows, tokens, strict=True)])
            expected = [_accepted(*row) for row in zip(others, tokens, strict=True)]
            assert [*map(str, said)] == [*map(str, expected)]
            goes_on = [place for place, one in enumerate(said) if one is False]
            rows, others = ([group[place] for place in goes_on] for group in (rows, others))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_leaves_no_row_without_a_token(models, compiler, tokenizer, temperature):
    [token] = tokenizer("a", add_special_tokens=False)["input_ids"]
    rule = compiler.constraint(grammars.regex_grammar("ab"))
    with jaxtune.Sampler(models["base"].model, 2, 64) as sampler:
        [row] = sampler.run([[5]], 20, temperature, logit_bias={token: float("-inf")}, constraints=[rule])
        with pytest.raises(ValueError, match="constraint"):
            next(sampler.run([[5], [6]], 20, constraint=rule))
    assert row.finish_reason == "stop" and tokenizer.decode(row.ids, skip_special_tokens=True) == "ab"


def test_a_grammar_that_fails_ends_its_own_row(models, port):
    """llguidance gives some up only after tokens; the client learns it, and other rows go on."""
    wide = "start: A\nA: /.*a.{30}b.*/ & /.*b.{30}a.*/ & /.*ab.{20}a.*/"
    body = {"model": "base", "prompt": "Once", "max_tokens": 60, "temperature": 0}
    expected = ask(port, PLAIN, body)[1]["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, port, PLAIN, body)
        status, answer = ask(port, PLAIN, body | {"structured_outputs": {"grammar": wide}})
    assert status == 400 and "too many expressions" in answer["error"]["message"], answer
    assert other.result()[1]["choices"][0]["text"] == expected


def test_a_grammar_that_takes_long_fails(compiler, tokenizer):
    ids = tokenizer("ab" * 500, add_special_tokens=False)["input_ids"]
    quick, slow = grammars.regex_grammar("[ab]*"), grammars.lark_grammar('start: s\ns: s s | s s s | "a" | "b" |')
    for grammar in (quick, slow):
        rule = compiler.constraint(grammar)
        with pytest.raises(ValueError, match="too long") if grammar is slow else contextlib.nullcontext():
            for token in ids:
                assert rule.mask() is not None and not rule.accept([token])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("many", [False, True])
def test_calls_of_each_family_are_read_again(tokenizer, compiler, form, many):
    """Random texts of the grammar, by the family's own parser."""
    schemas = {
        "add": {
            "$ref": "#/$defs/pair",
            "$defs": {"pair": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
        },
        "now": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    schemas["add"]["$defs"]["pair"] |= {"required": ["a"], "additionalProperties": False}
    reader = AnswerReader(tokenizer, " ".join(form.source))
    lark = reader.call_grammar(schemas, many)
    assert reader.form is form and lark is not None
    grammar, draw, ended = grammars.lark_grammar(lark), random.Random(3), 0
    for _ in range(20):
        rule, ids = compiler.constraint(grammar), []
        for _ in range(150):
            mask = rule.mask()
            allowed = [i for i in range(len(tokenizer)) if mask[i // 32] >> (i % 32) & 1]
            ids.append(
                tokenizer.eos_token_id
                if allowed[0] == tokenizer.eos_token_id and draw.random() < 0.5
                else draw.choice(allowed)
            )
            if rule.accept(ids[-1:]):
                answer = reader.read(ids, schemas, ends=[tokenizer.eos_token_id])
                assert answer.calls and not answer.content and (many or len(answer.calls) == 1)
                for call in answer.calls:
                    assert (call.name, [*call.arguments]) in (("add", ["a"]), ("now", []))
                ended += 1
                break
    assert ended >= 3


FORMATS = {
    '{"b": 1}': {"response_format": {"type": "json_object"}},
    '{"name": "Anna", "parameter": {}}': {"response_format": {"type": "json_object"}},
    "aab": {"structured_outputs": {"regex": "a+b"}},
    "ja": {"structured_outputs": {"choice": ["ja", "nein"]}},
}


@pytest.mark.parametrize("said", FORMATS)
@pytest.mark.parametrize("name", SOURCES)
def test_calls_stay_possible_beside_an_answers_form(name, said):
    """A model that may call tools writes an answer of the form, or calls, and nothing else."""
    places = f"{{% if false %}}{SOURCES[name]} tools{{% endif %}}{PLAIN_TEMPLATE}"
    served = Readable("m", made := make_tokenizer(places))
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    if not name.startswith("Llama"):  # one whose arguments' schema is not followed
        tool["function"]["parameters"] = parameters | {
            "properties": {"at": {"type": "string"}, "x": {"uniqueItems": True}}
        }
    asked = {"model": "m", "messages": QUESTION, "tools": [tool]} | FORMATS[said]
    assert read_chat(asked, {"m": served}, {"m": 9999}).rows[0].grammar is not None
    tool["function"]["parameters"] = parameters
    grammar = read_chat(asked, {"m": served}, {"m": 9999}).rows[0].grammar
    call = written(name, "look", {"at": "Paris"})
    form = next((form for form in FORMS if form.name == name), None)
    if form is None:  # gpt-oss calls before the text that follows the grammar
        assert grammar == read_chat({**asked, "tools": None}, {"m": served}, {"m": 9999}).rows[0].grammar
        return
    compiler = grammars.Grammars(made, [made.eos_token_id], len(made))
    for text, allowed in ((call, True), (said, True), ("It is", False)):
        rule, follows = compiler.constraint(grammar), True
        for token in made(text, add_special_tokens=False)["input_ids"]:
            mask = rule.mask()
            follows = follows and bool(mask[token // 32] >> (token % 32) & 1)
            rule.accept([token]) if follows else None
        assert follows == allowed, (text, call)


# ---- thoughts


def test_thoughts_come_first(tokenizer, compiler):
    reader = AnswerReader(tokenizer, "<think></think>")
    grammar = grammars.choice_grammar(["yes", "no"])

    def allowed(rule) -> set[int] | None:
        mask = rule.mask()
        return None if mask is None else {i for i in range(len(tokenizer)) if mask[i // 32] >> (i % 32) & 1}

    free = compiler.constraint(grammar, *reader.before_content(tokenizer("a")["input_ids"], "<think>"))
    for token in tokenizer("I think yes. </think>")["input_ids"]:
        assert allowed(free) is None and not free.accept([token])
    assert allowed(free) is not None
    for token in tokenizer("no")["input_ids"]:
        assert token in (allowed(free) or ())
        ended = free.accept([token])
    assert ended or tokenizer.eos_token_id in (allowed(free) or ())
    closed = compiler.constraint(grammar, *reader.before_content(tokenizer("<think></think>")["input_ids"], ""))
    assert allowed(closed) is not None


# ---- through the server


COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}


def chat(port, **body):
    settings = {"model": "base", "messages": QUESTION, "max_tokens": 300, "temperature": 1.3, "seed": 5}
    status, answer = ask(port, CHAT, settings | body)
    assert status == 200, answer
    return answer["choices"]


def test_a_response_format(port):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    for choice in chat(port, response_format=form, n=3):
        assert choice["finish_reason"] == "stop"
        assert {*json.loads(choice["message"]["content"])} == {"colour", "n"}
    body = {"model": "base", "messages": QUESTION, "max_tokens": 300, "seed": 5, "response_format": form}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(port, CHAT, body))
    assert json.loads(text)["colour"] in ("red", "blue")
    status, answer = ask(
        port,
        RESPONSES,
        {"model": "base", "input": "a", "text": {"format": {"type": "json_schema", "name": "c", "schema": COLOUR}}},
    )
    assert status == 200 and {*json.loads(answer["output"][0]["content"][0]["text"])} == {"colour", "n"}


def test_structured_outputs(port):
    [choice] = chat(port, structured_outputs={"regex": "[a-c]{3}-[0-9]"})
    assert re.fullmatch("[a-c]{3}-[0-9]", choice["message"]["content"])
    [choice] = chat(port, structured_outputs={"choice": ["ja", "nein"]})
    assert choice["message"]["content"] in ("ja", "nein")
    [choice] = chat(port, structured_outputs={"json": json.dumps(COLOUR)})
    assert json.loads(choice["message"]["content"])["n"] in range(10)
    status, answer = ask(
        port,
        PLAIN,
        {"model": "base", "prompt": "a", "max_tokens": 20, "structured_outputs": {"grammar": 'start: "x" "y"+ "z"'}},
    )
    assert status == 200 and re.match("xy+", answer["choices"][0]["text"])


TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "now"}},
]


def test_a_tool_that_is_required(port):
    [choice] = chat(port, model="tools", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "paint"}})
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")
    [choice] = chat(port, model="tools", tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "nothing"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ],
)
def test_what_is_not_followed_is_said_by_its_key(tokenizer, body, param):
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = "tools <tool_call> {{ messages }}"
    with pytest.raises(ApiError) as error:
        read_chat({"model": "m", "messages": QUESTION, **body}, {"m": Readable("m", shown)}, {"m": 999})
    assert (error.value.status, error.value.param) == (400, param)


def test_calls_that_are_messages_cannot_be_required(tokenizer):
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = "tools functions. <|channel|> <|message|> {{ messages }}"
    body = {"model": "m", "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    with pytest.raises(ApiError, match="are messages"):
        read_chat(body, {"m": Readable("m", shown)}, {"m": 999})


def test_generate_follows_a_schema(tmp_path, capsys):
    from jaxtune import cli

    prompts, output, schema = (tmp_path / name for name in ("prompts.jsonl", "answers.jsonl", "schema.json"))
    prompts.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(3)))
    schema.write_text(json.dumps(COLOUR))
    words = ["generate", str(BASE), "--prompts", str(prompts), "--output", str(output), "--dtype", "float32"]
    words += ["--max-new-tokens", "400", "--temperature", "1.3"]
    assert cli.main([*words, "--json-schema", str(schema)]) == 0
    for line in output.read_text().splitlines():
        row = json.loads(line)
        assert row["finish_reason"] == "stop" and {*json.loads(row["answer"])} == {"colour", "n"}
    capsys.readouterr()
    assert cli.main(words) == 2 and "grammar" in capsys.readouterr().err  # another setting than that of the lines
    assert cli.main([*words, "--regex", "("]) == 2 and "--regex" in capsys.readouterr().err
