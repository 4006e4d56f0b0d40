"""Exact match against what the model itself says."""

from __future__ import annotations

import io
import json
import shlex
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_models import over, tiny_model

from jaxtune import generate
from jaxtune.train.config import DataConfig, EvaluationConfig
from jaxtune.train.data import prepare
from jaxtune.train.data.rendering import packaged
from jaxtune.train.display.next_commands import next_commands
from jaxtune.train.evaluation import evaluate, held_out_answers
from jaxtune.train.evaluation.evaluate import exact_match
from tests.train.data.conftest import make_tokenizer


def conversation(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), initializer_range=0.5)


QUESTIONS = ["Who are you?", "Name a colour.", "What is the sum of two and two, of course?", "Add them: blue, red", "4"]


def own_answers(model, tokenizer):
    """What the model says, by a way of its own: the chat template's prompt, one row at a time."""
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|im_start|>", "<|eos|>")]
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        (ids,) = generate(model, [prompt], 9, eos_token_ids=[])
        end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        answers.append(tokenizer.decode(ids[:end], skip_special_tokens=True).strip())
    return answers


@pytest.mark.parametrize(("batch_size", "sizes"), [(2, ()), (8, ()), (2, (2, 1)), (1, (1, 2))])
def test_score_counts_the_right_answers(model, tokenizer, batch_size, sizes):
    own = own_answers(model, tokenizer)
    assert len(set(own)) == len(own) and all(own)
    wanted = [own[0], own[1] + "x", f"  {own[2]}\n", own[4], own[4]]
    rows = [conversation(question, answer) for question, answer in zip(QUESTIONS, wanted, strict=True)]
    asked = over(model, *sizes) if sizes else model
    score, answers = exact_match(asked, tokenizer, rows, max_new_tokens=9, batch_size=batch_size)
    assert score == 3 / 5
    assert [answer for _, _, answer in answers] == own
    assert [question for question, _, _ in answers] == QUESTIONS
    assert [expected for _, expected, _ in answers] == [answer.strip() for answer in wanted]


def test_earlier_turns_belong_to_the_prompt(model, tokenizer):
    row = conversation("Who are you?", "I am a bot.")
    longer = {"messages": [*row["messages"], *conversation("4", "x")["messages"]]}
    _, ((question, _, with_history),) = exact_match(model, tokenizer, [longer], max_new_tokens=9)
    _, ((_, _, alone),) = exact_match(model, tokenizer, [conversation("4", "x")], max_new_tokens=9)
    assert question == "4" and with_history != alone


ROWS = {
    "prompts": {"prompt": "Name a colour:", "completion": " red"},
    "alpaca": {"instruction": "Name one", "input": "of two", "output": "red"},
    "tools": {
        "messages": conversation("Add them", "4")["messages"],
        "tools": [{"name": "sum", "description": "adds", "parameters": {}}],
    },
}
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + packaged.PACKAGED["chatml"].text


def sampled_by(monkeypatch, answers) -> None:
    """Puts `answers(prompts, eos_token_ids=...)`, which gives the ids of all rows, in place of a Sampler's run."""

    class Answers:
        def __init__(self, model, **_):
            pass

        def run(self, prompts, max_new_tokens, *, eos_token_ids, pictures):
            for index, ids in enumerate(answers(prompts, eos_token_ids=eos_token_ids)):
                yield SimpleNamespace(index=index, ids=ids)

    monkeypatch.setattr(evaluate, "Sampler", Answers)


@pytest.mark.parametrize(
    ("form", "template"), [("prompts", None), ("prompts", "chatml"), ("alpaca", None), ("tools", TOOLS)]
)
def test_rows_of_every_form_are_asked_as_they_are_trained(tokenizer, tmp_path, monkeypatch, form, template):
    model = SimpleNamespace(config=SimpleNamespace(context_length=512), source=None)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[form]) + "\n")
    data = DataConfig(train="none", eval=str(tmp_path / "rows.jsonl"), length=64, template=template)
    asked = []
    sampled_by(monkeypatch, lambda prompts, **_: asked.extend(prompts) or [[]])
    exact_match(model, tokenizer, held_out_answers.answered(data, 1)[0], max_new_tokens=1, template=template)
    (trained,) = prepare([ROWS[form]], tokenizer, length=64, template=template).documents
    assert asked == [trained.tokens[: int(trained.mask.argmax())].tolist()]
    (tmp_path / "merged").mkdir()
    ((_, command),) = next_commands(tmp_path, data, str(tmp_path), asked=True)
    raw = template is None and form != "tools"
    assert ("--raw" in command) == raw
    if raw:
        assert tokenizer(shlex.split(command)[-1])["input_ids"] == asked[0]


def test_an_answer_that_is_only_a_call_is_not_asked_for(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"name": "sum", "arguments": {}}]}
    rows = [{"messages": [{"role": "user", "content": "2 + 2"}, call]}, conversation("4", "x")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train="none", eval=str(tmp_path / "rows.jsonl"), length=64)
    (asked,), _ = held_out_answers.answered(data, 2)
    assert asked.messages[-1]["content"] == "x"


@pytest.mark.parametrize("line", ["{", json.dumps({"messages": 3})])
def test_a_bad_row_is_an_error_unless_it_is_skipped(line, tmp_path):
    (tmp_path / "rows.jsonl").write_text(line + "\n" + json.dumps(conversation("4", "x")))
    data = DataConfig(train="none", eval=str(tmp_path / "rows.jsonl"), format="messages")
    with pytest.raises(ValueError, match="rows.jsonl:1: "):
        held_out_answers.answered(data, 2)


def test_rows_that_are_not_asked_are_counted_beside_the_score(tokenizer, tmp_path, monkeypatch):
    """Those that cannot be read, do not fit, or end with no answer, up to the last row that is asked."""
    question = {"messages": [{"role": "user", "content": "2 + 2"}]}
    lines = ["{", json.dumps({"messages": 3}), json.dumps(question), json.dumps(conversation("4", "x")), "{"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = DataConfig(train="none", eval=str(tmp_path / "rows.jsonl"), format="messages", on_bad_row="skip")
    model = SimpleNamespace(config=SimpleNamespace(context_length=512), source=None)
    sampled_by(monkeypatch, lambda prompts, **_: [[]])
    said = io.StringIO()
    for limit in (1, 2):
        wanted = EvaluationConfig(exact_match_rows=limit)
        held_out_answers.answer(model, tokenizer, wanted, data, Console(file=said, width=200), SimpleNamespace(rows=1))
    first, second = [line for line in said.getvalue().splitlines() if "exact match" in line]
    assert first.endswith("0.0 % of 1 held-out questions (3 rows without an answer left out)")
    assert second.endswith("(4 rows without an answer left out)")


THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}OPEN"
    "{{ m.reasoning_content or '' }}CLOSE{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)


@pytest.mark.parametrize(
    ("opens", "closes", "prompt", "says"),
    [
        ("<think>\n", "\n</think>\n\n", "<think>\n", "\n</think>\n\nblue"),  # Qwen3.5
        ("<think>\n", "\n</think>\n\n", "<think>\n", "hm: red\n</think>\n\nblue"),
        ("<think>\n", "\n</think>\n\n", "", "<think>\n\n</think>\n\nblue"),  # Qwen3
        ("<think>\n", "\n</think>\n\n", "<think>\n", "blue"),
        ("<|eos|>", "final<|bos|>", "", "<|eos|>final<|bos|>blue"),  # gpt-oss: a channel between special tokens
        ("<|eos|>", "final<|bos|>", "", "<|eos|>hm: red<|im_start|>assistant<|eos|>final<|bos|>blue"),
        ("<think>\n", "\n</think>\n\n", "<think>\n", "after </think> comes red\n</think>\n\nblue"),  # names the mark
        ("", "", "", "blue"),
    ],
)
def test_what_was_thought_is_no_part_of_an_answer(model, monkeypatch, opens, closes, prompt, says):
    template = THOUGHT.replace("OPEN", opens).replace("CLOSE", closes).replace("PROMPT", prompt)
    tokenizer = make_tokenizer(template)

    def generated(prompts, eos_token_ids):
        ids = tokenizer(says + "<|im_end|>", add_special_tokens=False)["input_ids"]
        return [ids[: next(i for i, token in enumerate(ids) if token in eos_token_ids)] for _ in prompts]

    sampled_by(monkeypatch, generated)
    right = conversation("Name a colour.", "blue")
    thought = {"messages": [right["messages"][0], right["messages"][1] | {"reasoning_content": "hm"}]}
    score, answers = exact_match(model, tokenizer, [right, thought, conversation("Name a colour.", "red")])
    assert score == 2 / 3 and [answer for _, _, answer in answers] == ["blue"] * 3


def test_errors(model, tokenizer):
    with pytest.raises(ValueError, match="there are no rows"):
        exact_match(model, tokenizer, [])
    with pytest.raises(ValueError, match="row 0 does not end with"):
        exact_match(model, tokenizer, [{"messages": [{"role": "user", "content": "Hello"}]}])
    with pytest.raises(ValueError, match="shorten one of them"):
        exact_match(model, tokenizer, [conversation("red " * 200, "x")])
