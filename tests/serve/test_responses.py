"""/v1/responses, and the examples of the `openai` package's documentation where it is installed."""

from __future__ import annotations

import http.client
import json

import pytest

from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.requests import Piece
from jaxtune.serve.errors import ApiError
from jaxtune.serve.forms import ResponsesAnswer
from jaxtune.serve.responses import read_responses
from jaxtune.serve.served import Readable
from tests import patience
from tests.serve.running import BASE, ask, engine_of, served_models, serving, stub_model

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
QUESTION = "What is 12 + 30?"
BODY = {"model": "base", "input": QUESTION, "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def models():
    return served_models()


@pytest.fixture(scope="module")
def port(models):
    engine = engine_of(models)
    with serving(models, engine) as (port, _):
        yield port
    assert engine.close(60)


def events(port: int, body: dict) -> list[dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    connection.request("POST", PATH, json.dumps({**body, "stream": True}))
    lines = connection.getresponse().read().decode().split("\n\n")[:-1]
    connection.close()
    pairs = [line.split("\n") for line in lines]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in found]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def test_an_answer_is_a_chats(port):
    status, answer = ask(port, PATH, BODY | {"metadata": {"a": "b"}, "store": False})
    assert status == 200, answer
    messages = [{"role": "user", "content": QUESTION}]
    _, chat = ask(port, CHAT, {"model": "base", "messages": messages, "temperature": 0, "max_tokens": 12})
    [item] = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    is_cut = chat["choices"][0]["finish_reason"] == "length"
    assert answer["status"] == ("incomplete" if is_cut else "completed")
    assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        chat["usage"]["prompt_tokens"],
        chat["usage"]["completion_tokens"],
    )
    assert (answer["metadata"], answer["temperature"], answer["max_output_tokens"]) == ({"a": "b"}, 0, 12)


def test_a_stream_builds_the_answer(port):
    _, whole = ask(port, PATH, BODY)
    found = events(port, BODY)
    assert [event["type"] for event in found[:4]] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    ]
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    assert found[-1]["type"] == f"response.{whole['status']}"
    last = found[-1]["response"]
    assert last["usage"] == whole["usage"] and last["output"][0]["content"] == whole["output"][0]["content"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE)


class _Shows:
    """A tokenizer with a template that has places for thoughts and tools, and shows what it got."""

    chat_template = "tools <tool_call> <think> </think>"

    def __init__(self, tokenizer):
        self._tokenizer, self.turns = tokenizer, []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments, **options):
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, turns, **options):
        self.turns = turns
        return "asked"


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


def test_items_are_turns(tokenizer):
    shows = _Shows(tokenizer)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Add them."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
    ]
    body = {"model": "m", "input": items, "instructions": "Be short.", "tools": [TOOL]}
    read_responses(body, {"m": Readable("m", shows)}, {"m": 99})
    system, user, call, result, said = shows.turns
    assert (system["role"], system["content"], user["content"]) == ("system", "Be short.", "1 + 2")
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert call["reasoning_content"] == "Add them." and (result["role"], result["content"]) == ("tool", "3")
    assert said["content"] == "3"


def test_an_error_in_a_stream_is_an_event(models):
    """After events, by their numbers; the openai package raises at `error`, other clients at the type."""
    served = models["base"]
    answer = ResponsesAnswer(read_responses(BODY, {"base": served.readable}, {"base": 99}), served)
    begun = answer.first_chunks()
    name, data = answer.error_frame(ApiError(504, "too late", code="timeout")).decode().strip().split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"], event["sequence_number"]) == ("event: error", "error", len(begun))
    assert (event["code"], event["message"], event["param"]) == ("timeout", "too late", None)
    assert event["error"]["message"] == "too late"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_are_items(tokenizer, stream):
    shows = _Shows(tokenizer)
    asked = read_responses({"model": "m", "input": "a", "tools": [TOOL]}, {"m": Readable("m", shows)}, {"m": 99})
    text = '<think>Add them.</think>I look.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer(text)["input_ids"]
    answer = ResponsesAnswer(asked, stub_model("m", None, shows))
    if stream:
        found = [event for token in ids[:-1] for event in answer.chunks(0, Piece(0, [token], [0.0], None))]
        found += answer.chunks(0, Piece(0, ids[-1:], [0.0], "stop"))
        deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == "Add them."
        done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    else:
        answer.add(0, Piece(0, ids, [0.0] * len(ids), "stop"))
        done = answer.whole()["output"]
    thought, said, call = done
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Add them.")
    assert (said["type"], said["content"][0]["text"]) == ("message", "I look.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1})
    assert answer.whole()["output"] == done and answer.whole()["status"] == "completed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input.0.type"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"text": {"format": {"type": "json"}}}, "response_format.type"),
        ({"temperature": 3.0}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperatur": 1.0}, "temperatur"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(tokenizer, body, param):
    with pytest.raises(ApiError) as error:
        read_responses({"model": "m", "input": "a", **body}, {"m": Readable("m", tokenizer)}, {"m": 99})
    assert error.value.status == 400 and error.value.param == param


def test_the_openai_package(port):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    response = client.responses.create(model="base", instructions="Be short.", input=QUESTION, max_output_tokens=9)
    assert isinstance(response.output_text, str) and response.usage.output_tokens <= 9
    found = [*client.responses.create(model="base", input=QUESTION, max_output_tokens=9, temperature=0, stream=True)]
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert found[-1].type in ("response.completed", "response.incomplete")
    assert "".join(deltas) == found[-1].response.output_text
    settings = dict(model="base", messages=[{"role": "user", "content": QUESTION}], max_tokens=9)
    [choice] = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2).choices
    assert choice.message.content is not None and len(choice.logprobs.content[0].top_logprobs) == 2
    chunks = [*client.chat.completions.create(**settings, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason in ("stop", "length")
    plain = client.completions.create(model="base", prompt=QUESTION, echo=True, logprobs=1, max_tokens=1)
    assert plain.choices[0].text.startswith(QUESTION) and plain.choices[0].logprobs.token_logprobs[0] is None
    assert [model.id for model in client.models.list()] == ["base", "mine"]
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="base", prompt="a", top_p=3.0)


@pytest.mark.parametrize(
    "body",
    [
        {"stream_options": {"include_obfuscation": False}},
        {"include": ["reasoning.encrypted_content"]},
        {"include": []},
        {"max_tool_calls": 3},
        {"text": {"verbosity": "medium"}},
        {"store": False, "truncation": "disabled", "service_tier": "auto", "metadata": {"a": "b"}, "background": False},
    ],
)
def test_what_agents_send_and_asks_for_nothing(body):
    served = stub_model("m", None, load_tokenizer(BASE))
    asked = {"model": "m", "input": "x"}
    rows = [read_responses(each, {"m": served.readable}, {"m": 999}).rows[0] for each in (asked, asked | body)]
    assert rows[0].prompt == rows[1].prompt
    for refused in ({"include": ["message.output_text.logprobs"]}, {"text": {"verbosity": "low"}}):
        with pytest.raises(ApiError, match="include|verbosity"):
            read_responses(asked | refused, {"m": served.readable}, {"m": 999})
