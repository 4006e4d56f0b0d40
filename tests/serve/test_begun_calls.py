"""Calls follow their tools' schemas from their opening mark on, and nothing before it costs a mask."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

import jaxtune
from jaxtune.conversations.answers import AnswerReader, Mark
from jaxtune.conversations.calls import FORMS
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.serve.bodies import read_chat
from jaxtune.serve.served import Readable, ServedModel
from tests.conversations.test_calls import GLM, HERMES, SOURCES, written
from tests.serve.running import BASE, served_models
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer

pytest.importorskip("llguidance")
from jaxtune.models.generation import call_constraints, grammars
from jaxtune.models.generation.call_constraints import CallConstraint, Watched

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "unit": {"enum": ["C", "F"]}, "n": {"type": "integer"}},
    "required": ["at", "n"],
}
MARKED = [form.name for form in FORMS if form.opens]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return grammars.Grammars(tokenizer, [tokenizer.eos_token_id], len(tokenizer))


def asked(name: str, tokenizer=None, strict: bool | None = None, parameters=PARAMETERS, **body):
    """What is read of a chat with a tool, whose template is of a family."""
    tokenizer = tokenizer or make_tokenizer()
    tokenizer.chat_template = f"{{% if false %}}{SOURCES[name]} tools{{% endif %}}{PLAIN_TEMPLATE}"
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    if strict is not None:
        tool["function"]["strict"] = strict
    served = Readable("m", tokenizer, ends=(tokenizer.eos_token_id,), vocab_size=len(tokenizer))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool]} | body
    return read_chat(body, {"m": served}, {"m": 9999}).rows[0]


def follows(rule: CallConstraint, tokens) -> int:
    """How many tokens are taken, each behind its mask."""
    for count, token in enumerate(tokens):
        mask = rule.mask()
        if mask is not None and not mask[token // 32] >> (token % 32) & 1:
            return count
        assert not rule.accept([token]) and not rule.dropped
    return len(tokens)


@pytest.mark.parametrize("special", [False, True], ids=["text", "token"])
@pytest.mark.parametrize("name", MARKED)
def test_calls_of_each_family_are_followed(name, special):
    """Whose marks are text or tokens: words are free, calls are of the tool, and words behind them are free again."""
    made, form = make_tokenizer(), next(form for form in FORMS if form.name == name)
    if special:
        made.add_tokens([mark for mark in (form.opens, form.closes, *form.marks) if mark], special_tokens=True)
    grammar = asked(name, made).call_grammar
    compiler = grammars.Grammars(made, [made.eos_token_id], len(made))
    reader = AnswerReader(made, made.chat_template)

    def ids(text: str) -> list[int]:
        return made(text, add_special_tokens=False)["input_ids"]

    right = written(name, "look", {"at": "Paris, the <b>", "unit": "C", "n": 12})
    rule = compiler.of_calls(grammar, reader, False)
    for _ in range(2):
        assert follows(rule, ids("Let me look [1]. ")) == len(ids("Let me look [1]. ")) and rule.waits
        assert follows(rule, tokens := ids(right)) == len(tokens) and rule.waits, right
    if '{"name": "look", "arguments": ' in right:
        values = '{"at": "Paris", "n": 1}'
        turned = written(name, "look", {"at": "Paris", "n": 1}).replace(
            f'"name": "look", "arguments": {values}', f'"arguments": {values}, "name": "look"'
        )
        for text in (turned, turned.replace("[{", "[\n {").replace("}]", "}\n]")):
            assert follows(rule, tokens := ids(text)) == len(tokens) and rule.waits, text
    for wrong in (
        written(name, "lok", {"at": "x", "n": 1}),
        written(name, "look", {"at": "x", "unit": "K", "n": 1}),
        written(name, "look", {"at": "x"}),
        written(name, "look", {"at": "x", "n": "many"}),
    ):
        rule = compiler.of_calls(grammar, reader, False)
        assert follows(rule, tokens := ids(wrong)) < len(tokens) and not rule.waits, wrong
    rule = compiler.of_calls(grammar, reader, False)
    rule.accept(tokens := ids(wrong))  # made before the mark was known
    assert 0 < rule.dropped < len(tokens) and rule.mask() is not None


def test_calls_drafted_in_thoughts_are_free():
    made = make_tokenizer()
    grammar = asked(HERMES, made).call_grammar
    compiler = grammars.Grammars(made, [made.eos_token_id], len(made))
    reader = AnswerReader(made, SOURCES[HERMES] + " </think>")
    draft, ended = "<tool_call>{", "</think> So: <tool_call>"
    for first, thinks in (("Hm, ", True), ("<think>Hm, ", False)):
        rule = compiler.of_calls(grammar, reader, thinks)
        for text, waits in ((first + draft, True), (ended, False)):
            for token in made(text, add_special_tokens=False)["input_ids"]:
                assert not rule.accept([token]) and not rule.dropped
            assert rule.waits == waits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_rounds_ahead_change_no_token(tokenizer, compiler, temperature, steps):
    """Tokens that were made before a mark was read are made anew where they are none of a call."""
    base = served_models()["base"]
    prompts = [tokenizer(text)["input_ids"] for text in ("Once upon a time", "What is 12 + 30?", "The number")]
    marks = ["rted", "d, i", "7"]

    def made(waits: bool, follows: bool = True) -> list:
        def rule(mark: str) -> CallConstraint:
            lark = f'start: before " "? "(" /[a-f]{{5}}/ ")"\nbefore[suffix={json.dumps(mark)}]: /(?s:.*)/'
            compiled = compiler.compiled(grammars.calls_grammar(lark))
            words = (len(tokenizer) + 31) // 32
            return CallConstraint(compiled, words, words, Watched(tokenizer, Mark(mark, None)), False)

        with jaxtune.Sampler(base.model, 4, 256, tokens_per_round=steps) as sampler:
            sampler._rows.lets_wait = waits
            rules = [rule(mark) if follows else None for mark in marks]
            return [*sampler.run(prompts, 60, temperature, constraints=rules, seed=3)]

    waiting, masked, free = made(True), made(False), made(True, False)
    assert [row.ids for row in waiting] == [row.ids for row in masked] != [row.ids for row in free]
    for row, other in zip(waiting, masked, strict=True):
        assert row.finish_reason == other.finish_reason
        np.testing.assert_allclose(row.logprobs, other.logprobs, rtol=0, atol=1e-4)
    assert any("(" in tokenizer.decode(row.ids) for row in waiting)


def test_what_is_not_followed_leaves_calls_free(capsys):
    made = make_tokenizer()
    row = asked(HERMES, made, parameters={"type": "object", "properties": {"x": {"uniqueItems": True}}})
    assert row.call_grammar is None and row.grammar is None and "follow no grammar" in capsys.readouterr().err
    assert asked(HERMES, made, strict=False).call_grammar is None
    assert asked(HERMES, made, strict=True).call_grammar is not None
    assert asked(HERMES, made, tool_choice="none").call_grammar is None
    assert asked("gpt-oss").call_grammar is None and asked("Llama 3 JSON").call_grammar is None
    row = asked(HERMES, made, tool_choice="required")
    assert row.call_grammar is None and row.grammar is not None


def test_a_grammar_that_takes_too_long_is_left(compiler, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(call_constraints, "_SECONDS", 1e-9)
    compiled = compiler.compiled(grammars.calls_grammar('start: before "a"\nbefore[suffix="<"]: /(?s:.*)/'))
    words = (len(tokenizer) + 31) // 32
    rule = CallConstraint(compiled, words, words, Watched(tokenizer, Mark("<", None)), False)
    for begins in (True, False):
        rule.accept(tokenizer("<", add_special_tokens=False)["input_ids"])
        assert rule.waits != begins
        assert rule.mask() is None and rule.waits
    assert capsys.readouterr().err.count("takes too long") == 1


def test_the_server_gives_rows_their_rules():
    """From a body to the sampler's constraint."""
    base = served_models()["base"]
    shown = copy.deepcopy(base.tokenizer)
    shown.chat_template = f"{{% if false %}}{SOURCES[GLM]} tools{{% endif %}}{PLAIN_TEMPLATE}"
    served = ServedModel("m", base.model, shown)
    tool = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool], "n": 2}
    request = read_chat(body, {"m": served.readable}, {"m": 999})
    rules = [row.constraint for row in served.constrained(request)]
    assert all(isinstance(rule, CallConstraint) and rule.waits for rule in rules) and rules[0] is not rules[1]
    assert request.grammar_bytes >= 0
