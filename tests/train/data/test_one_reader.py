"""Rows are read alike by all who ask with them: what stands before the answer is what training has before it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.commands import answers
from jaxtune.train.config import ConfigError, DataConfig
from jaxtune.train.data import prepare
from jaxtune.train.sampled.prompts import read_prompts
from tests.train.data.conftest import make_tokenizer

TEMPLATE = (
    "{% if style %}<style>{{ style }}</style>{% endif %}"
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = st.text("ab é", min_size=1, max_size=6).filter(str.strip)
TOOLS = [{"name": "add", "parameters": {}}]


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


@st.composite
def rows(draw) -> tuple[dict, dict]:
    """(A row's question, its answer), in any form of docs/data.md, with any of the columns beside it."""
    question, answer = draw(WORDS), draw(WORDS)
    turns = [turn("user", question)]
    form = draw(st.sampled_from(("prompt", "turns", "one turn", "JSON", "question", "alpaca", "messages", "sharegpt")))
    asked: dict = {
        "prompt": {"prompt": question},
        "turns": {"prompt": turns},
        "one turn": {"prompt": turns[0]},
        "JSON": {"prompt": json.dumps(turns)},
        "question": {"question": question},
        "alpaca": {"instruction": question, "input": draw(WORDS | st.just(""))},
        "messages": {"messages": [*turns, turn("assistant", answer)]},
        "sharegpt": {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
    }[form]
    if form in ("prompt", "question", "alpaca") and draw(st.booleans()):
        pairs = [[draw(WORDS), draw(WORDS)]]
        flat = [turn(role, text) for role, text in zip(("user", "assistant"), pairs[0], strict=True)]
        asked["history"] = draw(st.sampled_from((pairs, flat, json.dumps(pairs), [])))
    if draw(st.booleans()):
        asked[draw(st.sampled_from(("system", "system_prompt")))] = draw(WORDS)
    if draw(st.booleans()):
        asked[draw(st.sampled_from(("tools", "functions")))] = draw(st.sampled_from((TOOLS, json.dumps(TOOLS))))
    if draw(st.booleans()):
        style = {"style": draw(WORDS), "other": None}
        asked["chat_template_kwargs"] = draw(st.sampled_from((style, json.dumps(style))))
    name = {"alpaca": "output", "messages": "", "sharegpt": ""}.get(
        form, draw(st.sampled_from(("answer", "completion")))
    )
    return asked, {name: answer} if name else {}


@given(rows(), st.sampled_from([None, "tokenizer"]))
def test_all_who_ask_read_the_columns_that_training_reads(row, template):
    asked, answer = row
    tokenizer = make_tokenizer(TEMPLATE)
    options = dict(length=999, num_workers=0, template=template, last_response_only=True)
    data = prepare([asked | answer], tokenizer, **options)
    document = data.documents[0]
    expected = tokenizer.decode(document.tokens[: list(document.mask).index(True)])
    config = DataConfig(train="x", template=template)
    if any("not read" in sentence for sentence in data.warnings()):
        assert template is None  # a text has no place for tools and variables of a template
        with pytest.raises(ConfigError, match="beside a prompt of text"):
            read_prompts([asked | answer], tokenizer, config, 999)
        return
    prompts = read_prompts([asked | answer, *([asked] if "prompt" in asked else [])], tokenizer, config, 999)
    assert {tokenizer.decode(prompt.ids) for prompt in prompts} == {expected}
    if template is not None and not {"question", "instruction"} & asked.keys():
        assert tokenizer.decode(answers.prompt_of(asked, tokenizer, False, "x").ids) == expected


@given(WORDS, WORDS, st.sampled_from(["", "1"]))
def test_a_begun_answer_is_continued_or_refused(question, begun, answer):
    """Sampled answers and `generate` continue it; rows that train on an answer behind it are refused."""
    tokenizer, turns = make_tokenizer(TEMPLATE), [turn("user", question), turn("assistant", begun)]
    row = {"prompt": turns} | ({"answer": answer} if answer else {})
    [prompt] = read_prompts([row], tokenizer, DataConfig(train="x"), 999)
    text = tokenizer.decode(prompt.ids)
    assert text.rstrip().endswith(f"<|im_start|>assistant\n{begun}".rstrip())
    assert prompt.columns.get("answer", "") == answer and prompt.turns == turns
    assert answers.prompt_of({"prompt": turns}, tokenizer, False, "x").ids == list(prompt.ids)
    for last in ({"completion": "2"}, {"completion": [turn("assistant", "2")]}):
        for read in (prepare, lambda rows, *_, **__: read_prompts(rows, tokenizer, DataConfig(train="x"), 999)):
            with pytest.raises(ValueError, match="one message of the assistant"):
                read([{"prompt": turns, **last}], tokenizer, length=99, num_workers=0)


TOLD = [
    ("text", {"text": "a b", "system": "s", "id": 1}, "text; not read: system, id"),
    (
        "messages",
        {"messages": [turn("user", "q") | {"id": 1}, turn("assistant", "a") | {"weight": 1, "thinking": "t"}]},
        "messages as conversation; of turns: role, content, thinking as thoughts, weight as mark; not read: "
        "messages[].id",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "loss_mask": [0, 1]},
        "conversations as conversation, loss_mask as marks of turns; of turns: from as role, value as content",
    ),
    (
        "sharegpt",
        {"conversations": [turn("user", "q"), {"from": "function_call", "value": '{"name": "add"}'}]},
        "conversations as conversation; of turns: role, content, from as role, value as calls",
    ),
    (
        "alpaca",
        {"instruction": "q", "context": "c", "response": "a", "history": [["b", "c"]]},
        "instruction as question, context as question, response as answer, history as earlier turns",
    ),
    (
        "prompt_completion",
        {"prompt": "q", "completion": "a", "tools": TOOLS},
        "prompt, completion as answer; not read: tools",
    ),
    (
        "preference",
        {"prompt": "q", "chosen": "a", "rejected": "b", "history": [["b", "c"]], "margin": 1.0},
        "chosen as preferred answer, rejected as rejected answer, prompt as question, history as earlier turns; "
        "not read: margin",
    ),
    (
        "preference",
        {"messages": [turn("user", "q"), turn("assistant", "a")], "rejected_response": "b", "prompt": "p"},
        "messages as conversation, rejected_response as rejected answer; of turns: role, content; not read: prompt",
    ),
    (
        "preference",
        {
            "input": {"messages": [turn("user", "q")], "tools": TOOLS},
            "preferred_output": [turn("assistant", "a")],
            "non_preferred_output": [turn("assistant", "b")],
        },
        "preferred_output as preferred answer, non_preferred_output as rejected answer, input as question; of "
        "turns: role, "
        "content",
    ),
    (
        "labelled",
        {"prompt": "q", "completion": "a", "label": True, "weight": 1},
        "weight as mark, label, completion as answer, prompt as question",
    ),
    (
        "labelled",
        {"messages": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}], "label": False, "prompt": "p"},
        "label, messages as conversation; of turns: from as role, value as content; not read: prompt",
    ),
]


@pytest.mark.parametrize(("format", "row", "told"), TOLD)
def test_what_is_read_of_each_form_is_told(format, row, told):
    """Of rows that are tokenised, in the words of --check."""
    pairs = format in ("preference", "labelled")
    options = {"format": format, "pairs": True} if pairs else {"format": format}
    data = prepare([row], make_tokenizer(TEMPLATE), length=99, num_workers=0, **options)
    assert data.summary.columns == told


@given(rows(), st.sampled_from([None, "tokenizer"]), st.dictionaries(st.sampled_from(["id", "topic"]), WORDS))
def test_a_column_is_told_to_be_read_if_it_decides_the_tokens(row, template, more):
    tokenizer, value = make_tokenizer(TEMPLATE), {**row[0], **row[1], **more}

    def tokens(value):
        try:
            data = prepare([value], tokenizer, length=999, num_workers=0, template=template)
        except ValueError:
            return None, None
        return [(document.tokens.tolist(), document.mask.tolist()) for document in data.documents], data.summary

    whole, summary = tokens(value)
    filled = [name for name, cell in value.items() if cell not in ("", [])]
    columns = {name for name in summary.reads if not name.startswith("messages[]")}
    assert columns | {*summary.unread} == {*filled} and not columns & {*summary.unread}
    for name in filled:
        changed = tokens({key: cell for key, cell in value.items() if key != name})[0] != whole
        assert changed == (name in columns), (name, summary.columns)


def test_prompts_tell_their_columns():
    row = {"prompt": [turn("user", "q")], "answer": "4", "system": "s", "level": 3}
    prompts = read_prompts([row], make_tokenizer(TEMPLATE), DataConfig(train="x"), 99)
    told = "prompt, system as system message; of turns: role, content; given to functions alone: answer, level"
    assert prompts.columns == told


def test_rows_that_a_mark_leaves_out_are_not_asked(tmp_path, capsys):
    tokenizer, left_out = make_tokenizer(TEMPLATE), {"prompt": "out", "masked": True}
    [prompt] = read_prompts([{"prompt": "in"}, left_out], tokenizer, DataConfig(train="x"), 99)
    assert prompt.turns == "in" and "masked = True" in capsys.readouterr().out
    file, notes = tmp_path / "prompts.jsonl", []
    file.write_text(f"{json.dumps(left_out)}\n{json.dumps({'prompt': 'in'})}\n")
    assert answers.read_rows(file, notes.append) == {2: {"prompt": "in"}} and "masked = True" in notes[0]


def test_two_system_messages_are_refused():
    row = {"system": "one", "messages": [turn("system", "two"), turn("user", "q"), turn("assistant", "a")]}
    with pytest.raises(ValueError, match="another system message than column system"):
        prepare([row], make_tokenizer(TEMPLATE), length=99, num_workers=0)
