"""Answers that follow a regular expression or a JSON schema: in runs that learn from rewards, and in Python."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtune
from jaxtune.train.config import ConfigError, DataConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answering import Prompt
from jaxtune.train.sampled.prompts import UserFunctions, _answering
from tests.serve.running import BASE

pytest.importorskip("llguidance")
from jaxtune.models.generation import grammars

NEW = 24
# Each of at most NEW characters, and no shorter text of one goes on as another of its texts.
EXPRESSIONS = st.one_of(
    st.integers(1, 9).map("[a-f]{{{}}}".format),
    st.integers(1, 4).map("(?:yes|no|12){{{}}}\\.".format),
    st.lists(st.text("abc 12", min_size=1, max_size=9), min_size=1, max_size=3, unique=True).map(
        lambda words: "(?:" + "|".join(map(re.escape, words)) + ")!"
    ),
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded():
    return jaxtune.from_pretrained(BASE, dtype="float32")


@given(st.lists(st.none() | EXPRESSIONS, min_size=1, max_size=4), st.integers(0, 99))
def test_drawn_answers_in_python_follow_their_own_expressions(loaded, expressions, seed):
    model, tokenizer = loaded
    compiler = grammars.Grammars.of(model, tokenizer)

    def constraints():
        return [e and compiler.constraint(grammars.regex_grammar(e)) for e in expressions]

    prompts = [tokenizer(f"Say {index}.")["input_ids"] for index in range(len(expressions))]
    answers = jaxtune.generate(model, prompts, NEW, 1.2, seed, constraints=constraints())
    for expression, ids in zip(expressions, answers, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert expression is None or re.fullmatch(expression, text), (expression, text)
    with jaxtune.Sampler(model, 4, 64) as sampler:
        rows = list(sampler.run(prompts, NEW, 1.2, seed, constraints=constraints()))
    assert [row.ids for row in rows] == answers


def test_constraints_are_of_one_answer_each(loaded):
    model, tokenizer = loaded
    rule = grammars.Grammars.of(model, tokenizer).constraint(grammars.regex_grammar("ab"))
    with jaxtune.Sampler(model, 2, 64) as sampler:
        for caller, asks in (
            ("generate", lambda rules: jaxtune.generate(model, [[5], [6]], 4, constraints=rules)),
            ("Sampler", lambda rules: list(sampler.run([[5], [6]], 4, constraints=rules))),
        ):
            with pytest.raises(ValueError, match=f"{caller}: constraints: one is of several rows"):
                asks([rule, rule])
            with pytest.raises(ValueError, match=f"{caller}: constraints of 1 prompts for 2 prompts"):
                asks([rule])


def answering(tokenizer, template=None, **options):
    room = 200 if "json_schema" in options else NEW  # white space between the words of JSON
    settings = Settings(max_completion_length=room, slots=4, temperature=1.2, **options)
    data = DataConfig("rows.jsonl", template=template)
    return _answering(UserFunctions(), settings, tokenizer, data, [tokenizer.eos_token_id], 256)


@given(EXPRESSIONS | st.just(None), st.integers(0, 2**31))
def test_drawn_answers_of_a_run_follow_its_grammar(loaded, expression, seed):
    model, tokenizer = loaded
    options = {"json_schema": json.dumps(SCHEMA)} if expression is None else {"regex": expression}
    of_run = answering(tokenizer, **options)
    messages = [{"role": "user", "content": "Say it."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    asked = [Prompt("Once", tuple(tokenizer("Once")["input_ids"]), {})] * 2 + [Prompt(messages, tuple(ids), {})] * 2
    answers, _ = of_run(model, asked, range(seed, seed + 4))
    for answer in answers:
        assert answer.finish_reason == "stop"
        text = answer.completion if isinstance(answer.completion, str) else of_run.sampling.decode(answer.ids)
        if expression is None:
            assert 0 <= json.loads(text)["n"] <= 99
        else:
            assert re.fullmatch(expression, text), (expression, text)
        assert len(answer.logps) == len(answer.ids) and max(answer.logps) <= 0


def test_thoughts_come_before_the_grammar(loaded):
    """Of messages in a template that opens them, not of texts that it does not write."""
    model, tokenizer = loaded
    thinks = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}{{ '' if '</think>' else '' }}"
    constraint = answering(tokenizer, thinks, regex="[a-f]{9}").sampling.constraint
    ids = tuple(tokenizer("Say it.<think>")["input_ids"])
    of_messages, of_text = (
        constraint(model.config.vocab_size, Prompt(turns, ids, {}))
        for turns in ([{"role": "user", "content": "Say it."}], "Say it.<think>")
    )
    assert of_messages.mask() is None
    plain = answering(tokenizer, regex="[a-f]{9}").sampling.constraint
    assert plain(model.config.vocab_size, Prompt("Say it.<think>", ids, {})).mask() is not None
    assert of_text.mask() is None, "the template writes texts, too"


def test_an_answer_whose_grammar_is_given_up_is_cut_off(loaded, monkeypatch, caplog):
    model, tokenizer = loaded
    of_run = answering(tokenizer, regex="[a-f]{9}")
    monkeypatch.setattr(grammars.GrammarConstraint, "accept", fails)
    answers, _ = of_run(model, [Prompt("Once", (5, 6), {})] * 2, [1, 2])
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert "an answer is cut off: the grammar takes too long" in caplog.text


def fails(*_):
    raise ValueError("the grammar takes too long")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "("}, r"objective.regex = '\('"),
        ({"json_schema": "{"}, "objective.json_schema = '{': the schema is not JSON"),
        ({"json_schema": "[1]"}, "the schema must be a JSON object"),
        ({"json_schema": '{"type": "nothing"}'}, "objective.json_schema"),
    ],
)
def test_a_grammar_that_is_not_followed(loaded, options, message):
    with pytest.raises(ConfigError, match=message):
        answering(loaded[1], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "a", "json_schema": "{}"},
        {"regex": "a", "tools": ("own.py:tool",)},
        {"json_schema": "{}", "environment_factory": "own.py:Game"},
        {"regex": "a", "rollout_func": "own.py:play"},
    ],
)
def test_a_grammar_beside_what_has_forms_of_its_own(options):
    with pytest.raises(ConfigError, match=r"objective\.(regex|json_schema) = "):
        ObjectiveConfig("grpo", reward_funcs=("exact_match",), **options)
