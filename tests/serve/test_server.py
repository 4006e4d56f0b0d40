"""`jaxtune serve`: its answers are those of generate, streams are whole answers in pieces, and limits hold."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import time

import numpy as np
import pytest

import jaxtune
from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.engine import Engine
from tests import patience
from tests.patience import wait_until
from tests.serve.running import ask, engine_of, events, readers_of, served_models, serving

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def models():
    return served_models()


@pytest.fixture(scope="module")
def engine(models):
    engine = engine_of(models)
    yield engine
    assert engine.close(30)


@pytest.fixture(scope="module")
def port(models, engine):
    with serving(models, engine) as (port, _):
        yield port


def tokens(models, messages=QUESTION) -> list[int]:
    return models["base"].tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def text(models, ids) -> str:
    return models["base"].tokenizer.decode(ids, skip_special_tokens=True)


def chat(port, **body):
    status, answer = ask(port, CHAT, {"model": "base", "messages": QUESTION, **body})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("name", ["base", "mine"])
def test_an_answer_is_that_of_generate(models, port, name):
    prompt = tokens(models)
    [ids], [logprobs] = jaxtune.generate(models[name].model, [prompt], 24, output_logprobs=True)
    answer = chat(port, model=name, temperature=0, top_p=0.5, max_tokens=24, logprobs=True, top_logprobs=2)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text(models, ids), "refusal": None}
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [models["base"].tokenizer.decode([one]) for one in ids]
    np.testing.assert_allclose([entry["logprob"] for entry in entries], logprobs, atol=1e-4)
    for entry in entries:  # the likeliest token is the chosen one
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][1]["logprob"] <= entry["logprob"]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert answer["model"] == name and choice["finish_reason"] == ("stop" if len(ids) < 24 else "length")
    other = models["mine" if name == "base" else "base"].model
    assert jaxtune.generate(other, [prompt], 24) != [ids]


def test_sampled_answers_are_those_of_generate_by_seed(models, port):
    settings = dict(temperature=1.3, top_p=0.9, top_k=40)
    expected = jaxtune.generate(models["base"].model, [tokens(models)] * 3, 12, seed=7, **settings)
    answer = chat(port, n=3, seed=7, max_completion_tokens=12, **settings)
    found = [choice["message"]["content"] for choice in answer["choices"]]
    assert found == [text(models, ids) for ids in expected] and len(set(found)) > 1
    assert chat(port, max_tokens=12, temperature=2)["choices"] != chat(port, max_tokens=12, temperature=2)["choices"]


def test_a_last_message_is_continued(models, port):
    """What the model says of its own accord is what it says after the first half of it."""
    greedy = dict(temperature=0, max_tokens=12)
    words = chat(port, **greedy)["choices"][0]["message"]["content"]
    half = models["base"].tokenizer.decode(models["base"].tokenizer(words)["input_ids"][:4])
    messages = [*QUESTION, {"role": "assistant", "content": half.rstrip()}]
    tokenizer = models["base"].tokenizer
    prompt = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    [ids] = jaxtune.generate(models["base"].model, [prompt], 12)
    said = chat(port, messages=messages, continue_final_message=True, add_generation_prompt=False, **greedy)
    assert said["choices"][0]["message"] == {"role": "assistant", "content": text(models, ids), "refusal": None}
    assert said["usage"]["prompt_tokens"] == len(prompt)
    body = {"model": "base", "messages": QUESTION, "add_generation_prompt": False, **greedy}
    assert events(port, CHAT, body)[0]["choices"][0]["delta"] == {"role": "user", "content": ""}


def test_prompts_of_text_and_of_tokens_are_continued(models, port):
    prompts = ["Once upon a time", "The number"]
    ids = [models["base"].tokenizer(prompt)["input_ids"] for prompt in prompts]
    answers, logprobs = jaxtune.generate(models["base"].model, ids, 9, output_logprobs=True)
    for given in (prompts, ids):
        body = {"model": "base", "prompt": given, "max_tokens": 9, "temperature": 0, "logprobs": 3}
        status, answer = ask(port, PLAIN, body)
        assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert [choice["text"] for choice in answer["choices"]] == [text(models, one) for one in answers]
        for choice, expected in zip(answer["choices"], logprobs, strict=True):
            np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-4)
            assert len(choice["logprobs"]["text_offset"]) == 9
            assert [max(top, key=top.__getitem__) for top in choice["logprobs"]["top_logprobs"]] == choice["logprobs"][
                "tokens"
            ]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    status, answer = ask(port, PLAIN, {"model": "base", "prompt": "Once"})
    assert answer["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("stop", [None, ["and", "zz"]])
def test_a_stream_is_the_whole_answer_in_pieces(models, port, stop):
    body = {"temperature": 1.2, "seed": 3, "n": 2, "max_tokens": 40, "logprobs": True, "stop": stop}
    whole = chat(port, **body)
    asked = {"model": "base", "messages": QUESTION, **body, "stream_options": {"include_usage": True}}
    *chunks, last = events(port, CHAT, asked)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""} and len(parts) > (2 if stop else 4)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        entries = [entry for part in parts for entry in (part.get("logprobs") or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert not stop or not any(one in choice["message"]["content"] for one in stop)
    pieces = events(port, PLAIN, {"model": "base", "prompt": "Once", "temperature": 0, "max_tokens": 20})
    _, answer = ask(port, PLAIN, {"model": "base", "prompt": "Once", "temperature": 0, "max_tokens": 20})
    assert "".join(one["choices"][0]["text"] for one in pieces) == answer["choices"][0]["text"]


def test_a_stop_string_ends_the_text_before_it(models, port):
    [ids] = jaxtune.generate(models["base"].model, [tokens(models)], 24)
    whole = text(models, ids)
    stop = whole[8:11]
    answer = chat(port, temperature=0, max_tokens=24, stop=stop)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < len(ids)


def test_models_are_listed(models, port):
    _, listed = ask(port, "/v1/models")
    assert [(one["id"], one["parent"], one["max_model_len"]) for one in listed["data"]] == [
        ("base", None, 256),
        ("mine", "base", 256),
    ]
    assert ask(port, "/v1/models/mine") == (200, listed["data"][1])
    assert ask(port, "/health") == (200, {"status": "ok"})


GOOD = {"model": "base", "messages": QUESTION}
WRONG = [
    (b"{", 400, None, "not JSON"),
    (b"\xff\xfe", 400, None, "not JSON"),
    (b"[" * 100_000, 400, None, "not JSON"),
    ([], 400, None, "must be a JSON object"),
    ({"messages": QUESTION}, 400, "model", "is missing"),
    ({"model": "base"}, 400, "messages", "is missing"),
    (GOOD | {"model": "m\ud800"}, 404, "model", "there are base, mine"),
    (GOOD | {"model": "bose"}, 404, "model", "there are base, mine"),
    (GOOD | {"messages": []}, 400, "messages", "at least 1"),
    (GOOD | {"messages": [{"role": "king", "content": ""}]}, 400, "messages.0.role", "rename it to system"),
    (GOOD | {"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content", "list of parts"),
    (GOOD | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "text"),
    (GOOD | {"messages": [{"role": "tool", "content": "3"}]}, 400, "messages", "roles are system, user and assistant"),
    (GOOD | {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages.0.content", "not valid Unicode"),
    (GOOD | {"temperatur": 1}, 400, "temperatur", "did you mean temperature?"),
    (GOOD | {"top-p": 1}, 400, "top-p", "did you mean top_p?"),
    (GOOD | {"stream": True, "stream_options": {"n_": 1}}, 400, "stream_options.n_", "leave it out"),
    (GOOD | {"temperature": "1"}, 400, "temperature", "valid number"),
    (GOOD | {"temperature": float("nan")}, 400, "temperature", "less than or equal to 2"),
    (GOOD | {"top_p": 0}, 400, "top_p", "greater than 0"),
    (GOOD | {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "less than or equal to 20"),
    (GOOD | {"top_logprobs": 2}, 400, "top_logprobs", "set logprobs to true"),
    (GOOD | {"n": 1000}, 400, "n", "at most 128|less than or equal to 128"),
    (GOOD | {"max_tokens": True}, 400, "max_tokens", "valid integer"),
    (GOOD | {"stop": ["a", ""]}, 400, "stop", "1 to 256 characters"),
    (GOOD | {"frequency_penalty": 2.1}, 400, "frequency_penalty", "less than or equal to 2"),
    (GOOD | {"presence_penalty": -3}, 400, "presence_penalty", "greater than or equal to -2"),
    (GOOD | {"logit_bias": {"a": 1}}, 400, "logit_bias", "'a' is no token id"),
    (GOOD | {"logit_bias": {"1": 101}}, 400, "logit_bias", "less than or equal to 100"),
    (GOOD | {"logit_bias": {"99999": 1}}, 400, None, "outside the vocabulary"),
    (GOOD | {"stop_token_ids": [-1]}, 400, "stop_token_ids.0", "greater than or equal to 0"),
    (GOOD | {"min_tokens": -1}, 400, "min_tokens", "greater than or equal to 0"),
    (GOOD | {"reasoning_effort": "much"}, 400, "reasoning_effort", "'none', 'minimal'"),
    (GOOD | {"reasoning_effort": "low"}, 400, "reasoning_effort", "does not read it"),
    (GOOD | {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "has no place for tools"),
    (GOOD | {"chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs", "not the template's own"),
    (GOOD | {"response_format": {"type": "json"}}, 400, "response_format.type", "'json_object'"),
    (GOOD | {"tool_choice": "required"}, 400, "tool_choice", "no such tool"),
    (GOOD | {"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message", "to false"),
    (GOOD | {"max_tokens": 1000}, 400, None, "need 1015 positions"),
    (GOOD | {"messages": [{"role": "user", "content": "a b c " * 900}]}, 400, None, "shorten"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), WRONG)
def test_what_is_wrong_is_said_by_its_key(port, body, status, param, words):
    found, answer = ask(port, CHAT, body)
    error = answer["error"]
    assert (found, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert any(word in error["message"] for word in words.split("|")), error


@pytest.mark.parametrize("prompt", [3, [], [1, "x"], [[]], "", [10**30], [-1], "\ud800", ["a"] * 200])
def test_a_wrong_prompt_is_refused(port, prompt):
    status, answer = ask(port, PLAIN, {"model": "base", "prompt": prompt})
    assert status == 400 and "prompt" in answer["error"]["message"]
    status, answer = ask(port, PLAIN, {"model": "base", "prompt": "a", "logprobs": 21})
    assert status == 400 and answer["error"]["param"] == "logprobs"


@pytest.mark.full
def test_what_clients_say_in_vain_is_ignored(models, port):
    body = {"user": "me", "metadata": {}, "frequency_penalty": 0, "logit_bias": {}, "n": None, "store": False}
    answer = chat(port, max_tokens=3, tools=[], response_format={"type": "text"}, top_k=-1, **body)
    assert len(answer["choices"]) == 1
    long = chat(port, messages=[{"role": "user", "content": "Say a"}], max_tokens=None, temperature=0)
    assert long["usage"]["total_tokens"] <= 256


def test_too_long_a_prompt_has_openai_s_code_and_too_large_a_body_none_of_its_time(port):
    _, answer = ask(port, CHAT, GOOD | {"max_tokens": 1000})
    assert answer["error"]["code"] == "context_length_exceeded"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413 and b"16,777,216" in response.read()
    connection.close()


@pytest.mark.parametrize(
    "headers",
    [{"Host": "example.com"}, {"Origin": "https://example.com"}, {"Origin": "null"}, {"Host": "127.0.0.1.example.com"}],
)
def test_no_page_of_another_site_is_answered(port, headers):
    status, answer = ask(port, "/v1/models", **headers)
    assert status == 403 and "this server" in answer["error"]["message"]
    assert ask(port, "/v1/models", Host=f"localhost:{port}", Origin="http://127.0.0.1:1")[0] == 200


def test_a_key_is_asked_of_everybody(models, engine):
    with serving(models, engine, key="open sesame") as (port, _):
        for given in ({}, {"Authorization": "Bearer open"}, {"Authorization": "open sesame"}):
            status, answer = ask(port, "/v1/models", **given)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert ask(port, "/v1/models", Authorization="Bearer open sesame")[0] == 200
        assert ask(port, "/health")[0] == 200


def test_a_key_may_have_any_characters(models, engine):
    with serving(models, engine, key="öffne dich") as (port, _):
        assert ask(port, "/v1/models", Authorization="Bearer öffne dich".encode())[0] == 200
        assert ask(port, "/v1/models", Authorization="Bearer öffne Dich".encode())[0] == 401


def raw_request(body: dict, path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def pending(engine: Engine) -> int:
    return engine._sampler.pending


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(models, engine, port, stream):
    body = GOOD | {"max_tokens": 230, "n": 4, "temperature": 2, "stream": stream, "repetition_penalty": 3.0}
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(raw_request(body))
        wait_until(lambda: pending(engine) > 0)
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: pending(engine) == 0)
    assert engine._rows.total == 0 and not engine._of_request


def test_an_answer_that_takes_too_long_is_ended(models, engine):
    with serving(models, engine, seconds=0.02) as (port, _):
        body = GOOD | {"max_tokens": 200, "n": 8, "temperature": 2.0}
        status, answer = ask(port, CHAT, body)
        assert status == 504 and answer["error"]["code"] == "timeout"
    wait_until(lambda: pending(engine) == 0)


def test_the_server_goes_on_after_the_engine_failed(models, engine, port, monkeypatch, capsys):
    def fails(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: of the test")

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "step", fails)
        status, answer = ask(port, CHAT, GOOD | {"max_tokens": 3})
        assert status == 500 and "RESOURCE_EXHAUSTED" in answer["error"]["message"]
        assert ask(port, "/health")[0] == 503
    assert "RESOURCE_EXHAUSTED" in capsys.readouterr().err
    assert chat(port, max_tokens=3)["choices"] and ask(port, "/health")[0] == 200


def test_a_sampler_for_which_memory_is_gone_is_no_fault_of_the_request(models):
    own = engine_of({"base": models["base"]}, length=128)

    def too_little(adapters):
        raise ValueError("Sampler: too little memory")

    with serving(models, own) as (port, _):
        own._sampler, own._make = None, too_little
        status, answer = ask(port, CHAT, GOOD | {"max_tokens": 3})
        assert status == 500 and "too little memory" in answer["error"]["message"] and ask(port, "/health")[0] == 503
        own._make = lambda adapters: Sampler(models["base"].model, 2, 64)
        assert chat(port, max_tokens=3)["choices"] and own.plan.length == 64
    assert own.close(patience.SECONDS)


def test_more_rows_than_may_wait_are_refused(models, engine, port, monkeypatch):
    monkeypatch.setattr(engine._rows, "most", 7)
    status, answer = ask(port, CHAT, GOOD | {"n": 4})
    assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded"


def test_a_client_leaves_others_as_much_as_it_has(engine, port, monkeypatch):
    """Of rows, and of memory for pictures and for bodies."""
    shares = engine._rows
    monkeypatch.setattr(shares, "most", 8)
    assert shares.take("greedy", 4)
    greedy, other = GOOD | {"max_tokens": 2, "user": "greedy"}, GOOD | {"max_tokens": 2, "user": "other"}
    status, answer = ask(port, CHAT, greedy)
    assert status == 429 and "4 answers wait or are being made, 4 of them for this client" in answer["error"]["message"]
    assert ask(port, CHAT, other | {"n": 2})[0] == 200 and ask(port, CHAT, other | {"n": 3})[0] == 429
    shares.give_back("greedy", 1)
    assert ask(port, CHAT, greedy)[0] == 200
    shares.give_back("greedy", 3)
    assert shares.total == 0


def test_answers_have_a_grace_after_a_signal_and_then_an_error(models, engine, monkeypatch):
    """The engine is made anew: one that was ended takes no more."""
    monkeypatch.setattr("jaxtune.serve.server._CLOSING_SECONDS", patience.SECONDS)  # of a busy machine
    own = engine_of({"base": models["base"]})
    try:
        with serving(models, own, grace=0.2) as (port, server):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(raw_request(GOOD | {"max_tokens": 230, "n": 64, "temperature": 2, "stream": True}))
                assert client.recv(100).startswith(b"HTTP/1.1 200")
                server.handle_exit(signal.SIGTERM, None)
                data = b""
                while piece := client.recv(1 << 16):
                    data += piece
            assert b"the server is stopping" in data and b"[DONE]" not in data
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", port))
    finally:
        assert own.close(patience.SECONDS)  # a program may be compiling


@pytest.fixture
def patient(monkeypatch):
    """A server that waits for a program that compiles, where it would end the process: here that of the tests."""
    monkeypatch.setattr("jaxtune.serve.server._THREAD_SECONDS", patience.SECONDS)


def test_a_second_signal_ends_at_once(models, patient):
    from jaxtune.serve.server import Server, listen

    own = engine_of({"base": models["base"]})
    with listen("127.0.0.1", 0) as listener:
        server = Server(own, listener, None, 60.0, 60.0, readers_of(models))
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            server.run_until_signal()


def test_a_second_signal_ends_answers_that_have_begun(models, patient):
    from jaxtune.serve.server import Server, listen

    own = engine_of({"base": models["base"]})

    def ask_and_interrupt():
        wait_until(lambda: server.started)
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(raw_request(GOOD | {"max_tokens": 230, "n": 64, "temperature": 2, "stream": True}))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            server.handle_exit(signal.SIGINT, None)
            time.sleep(0.5)
            server.handle_exit(signal.SIGTERM, None)
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(1 << 16):
                    data.append(piece)

    data: list[bytes] = []
    with listen("127.0.0.1", 0) as listener:
        server = Server(own, listener, None, patience.SECONDS, patience.SECONDS, readers_of(models))
        client = threading.Thread(target=ask_and_interrupt)
        client.start()
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            server.run_until_signal()
        client.join(patience.SECONDS)
    assert not client.is_alive() and b"[DONE]" not in b"".join(data)
