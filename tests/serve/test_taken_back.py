"""What the server hands out it takes back: answers with calls, under every template, in both forms of chats."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from jaxtune.conversations.call_ids import new_id, short_id
from jaxtune.conversations.messages import for_template, read_messages
from jaxtune.models.generation.requests import Piece
from jaxtune.serve.bodies import read_chat
from jaxtune.serve.errors import ApiError
from jaxtune.serve.forms import Answer, ResponsesAnswer
from jaxtune.serve.responses import read_responses
from jaxtune.train.data.rendering import packaged
from tests.conversations.test_calls import HERMES, written
from tests.serve.running import stub_model
from tests.train.data.conftest import make_tokenizer

try:
    from openai.types.chat import ChatCompletion as CHAT
    from openai.types.responses import Response as RESPONSE
except ImportError:
    CHAT = RESPONSE = None
FOLDERS = [Path(packaged.__file__).parent / "chat_templates"]
FOLDERS += [Path(os.environ["JAXTUNE_TEST_DATA"]) / "chat_templates"] if "JAXTUNE_TEST_DATA" in os.environ else []
FUNCTION = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
TEMPLATES = {
    f"{folder.parent.name}-{path.stem}": path.read_text()
    for folder in FOLDERS
    for path in sorted(folder.glob("*.jinja"))
    if "tools" in path.read_text()
}
LENGTHS = {"m": 100_000}


def answered(read, asked_body, text, served, form):
    """The answer to a body: the chat's message or the response's items."""
    answer = form(read(asked_body, {"m": served.readable}, LENGTHS), served)
    ids = served.tokenizer(text, add_special_tokens=False)["input_ids"]
    answer.add(0, Piece(0, ids, [0.0] * len(ids), "stop"))
    return answer.whole()


@pytest.mark.parametrize("thoughts", ["", "Hm."])
@pytest.mark.parametrize("words", ["", "Let me look."])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_come_back(name, count, words, thoughts):
    tokenizer = make_tokenizer(TEMPLATES[name])
    served = stub_model("m", None, tokenizer)
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    try:
        opening = read_chat(chat, {"m": served.readable}, LENGTHS).opening
    except ApiError:
        assert "has no place for tools" in TEMPLATES[name] or "no_tools" in TEMPLATES[name]
        return
    reader = served.readable.reader(True)
    form = "gpt-oss" if "<|channel|>analysis" in TEMPLATES[name] else reader.form.name if reader.form else HERMES
    count = 1 if form.startswith("Llama") and words else count
    calls = [written(form, "look", {"at": f"place{number}"}) for number in range(count)]
    text = (words + "".join(calls)) if not form.startswith("Llama") else "; ".join(calls)
    if form == "gpt-oss":
        says = [f"<|channel|>analysis<|message|>{thoughts}<|end|>"] if thoughts else []
        says += [f"<|channel|>commentary<|message|>{words}<|end|>"] if words else []
        text = "<|start|>assistant".join([*says, *calls])
    elif thoughts and reader.thinks and not opening:
        text = f"<think>{thoughts}</think>{text}"
    answer = answered(read_chat, chat, text, served, Answer)
    if CHAT is not None:  # as agents of the openai package send it back
        answer = CHAT.model_validate(answer).model_dump(exclude_unset=True)
    message = answer["choices"][0]["message"]
    assert len(message["tool_calls"]) == count, text
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"seen{n}"}
        for n, call in enumerate(message["tool_calls"])
    ]
    again = read_chat({**chat, "messages": [*chat["messages"], message, *results]}, {"m": served.readable}, LENGTHS)
    prompt = tokenizer.decode(again.rows[0].prompt)
    for number in range(count):
        assert f"place{number}" in prompt and f"seen{number}" in prompt

    body = {"model": "m", "input": [{"role": "user", "content": "x"}], "tools": [{"type": "function", **FUNCTION}]}
    response = answered(read_responses, body, text, served, ResponsesAnswer)
    if RESPONSE is not None:
        response = RESPONSE.model_validate(response).model_dump(exclude_unset=True)
    items = response["output"]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
        for item in items
        if item["type"] == "function_call"
    ]
    assert len(outputs) == count
    read_responses({**body, "input": [*body["input"], *items, *outputs]}, {"m": served.readable}, LENGTHS)


def call(**keys):
    return {"type": "function", "function": {"name": "look", "arguments": {}}, **keys}


@pytest.mark.parametrize(
    "ids", [("call_abc", "call_abd"), ("abcdefghi", "ABCDEFG12"), (None, None), (7, "ü"), ("a" * 9, "é" * 9)]
)
@pytest.mark.parametrize("name", [name for name, text in TEMPLATES.items() if "[TOOL_CALLS]" in text])
def test_ids_from_elsewhere_are_mapped(name, ids):
    """Also in rows for training: each result has its call's id, whatever that was."""
    keys = [{"id": number} if number is not None else {} for number in ids]
    results = [{"tool_call_id": number} if number is not None else {} for number in ids]
    turns = [{"role": "user", "content": "x"}]
    for _ in range(2):
        turns.append({"role": "assistant", "content": "", "tool_calls": [call(**key) for key in keys]})
        turns += [{"role": "tool", "content": f"seen{n}", **key} for n, key in reversed([*enumerate(results)])]
    written_turns = for_template(read_messages(turns), TEMPLATES[name])
    asked = [one["id"] for turn in written_turns for one in turn.get("tool_calls", ())]
    answers = [turn["tool_call_id"] for turn in written_turns if turn["role"] == "tool"]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", number) for number in (*asked, *answers))
    assert answers[:2] == (asked[:2] if ids[0] is None else asked[1::-1]) and len({*asked[:2]}) == 2
    if ids[0] is None:
        assert len({*asked}) == 4
    elif ids[0] == "abcdefghi":
        assert asked == [*ids, *ids]
    assert for_template(written_turns, TEMPLATES[name]) == written_turns
    tokenizer = make_tokenizer(TEMPLATES[name])
    assert "seen1" in tokenizer.apply_chat_template(written_turns, tokenize=False)


def test_ids_are_nine_letters_and_digits():
    ids = {new_id() for _ in range(50)} | {short_id(f"call_{number}") for number in range(50)}
    assert len(ids) == 100 and all(re.fullmatch("[A-Za-z0-9]{9}", number) for number in ids)
    assert short_id("abc") == short_id("abc") and short_id("abcdefghi") == "abcdefghi"
