"""Clients' grammars that would end the server or fill its memory end a child of a reader instead."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.serve import app, bodies, trials
from jaxtune.serve.served import ServedModel
from jaxtune.serve.server import Server
from jaxtune.serve.shares import Shares
from tests.serve.running import ask, engine_of, events, served_models, serving, wait_until

pytest.importorskip("llguidance")
from jaxtune.models.generation import grammars

PROMPT = {"prompt": "a"}
STREAMS = [f"client {number}" for number in range(64)]


def rules(count: int) -> dict:
    lines = (f'r{i}: "a" r{i + 1} | "b" r{i + 1} r{(i * 7) % count}' for i in range(count))
    return {"structured_outputs": {"grammar": "\n".join(["start: r0", *lines, f'r{count}: "x"'])}}


def terminals(count: int) -> dict:
    lines = (f'T{i}: "a" T{i + 1}' for i in range(count))
    return {"structured_outputs": {"grammar": "\n".join(["start: T0", *lines, f'T{count}: "x"'])}}


def schema_of(count: int, key: str = "$defs") -> dict:
    """Definitions that require each other."""
    properties = ({"x": {"$ref": f"#/{key}/d{index + 1}"}} for index in range(count))
    levels = [{"type": "object", "properties": each, "required": ["x"]} for each in properties]
    named = {f"d{index}": level for index, level in enumerate([*levels, {"type": "integer"}])}
    return {key: named, "$ref": f"#/{key}/d0"}


def definitions(count: int, key: str = "$defs") -> dict:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema_of(count, key)}}
    return {"response_format": schema}


def tools(count: int) -> dict:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema_of(count)}}
    return {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}


def options(count: int) -> dict:
    return {"structured_outputs": {"regex": "a?" * count + "b"}}


ATTACKS = {
    "rules": (rules(2673), "at most 500"),
    "fewer rules": (rules(480), "too deeply"),
    "terminals": (terminals(480), "too deeply"),
    "definitions": (definitions(925), "at most 500"),
    "definitions by their old name": (definitions(925, "definitions"), "at most 500"),
    "fewer definitions": (definitions(400), "too deeply"),
    "definitions elsewhere": (definitions(925, "elsewhere"), "too deeply"),
    "tools": (tools(925), "too deeply"),
    "optional characters": (options(30000), "more than"),
}


@pytest.fixture(scope="module")
def served():
    """(port, models); its threads have the least stack that threads have."""
    base = served_models()["base"]
    tokenizer = copy.deepcopy(base.tokenizer)
    template = "{% if tools %}<tool_call>{% endif %}" + str(tokenizer.chat_template)
    vars(tokenizer)["chat_template"] = template
    models = {"base": ServedModel("base", base.model, tokenizer)}
    before = threading.stack_size(2 << 20)
    engine = engine_of(models, slots=len(STREAMS))
    with serving(models, engine) as (port, server):
        yield port, models, server
    assert engine.close(60)
    threading.stack_size(before)


def sent(port: int, body: dict) -> tuple[int, str]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer = ask(port, path, {"model": "base", "max_tokens": 2} | ({} if "messages" in body else PROMPT) | body)
    return status, json.dumps(answer)


def held(server: Server, models: dict) -> dict[str, object]:
    """What requests leave behind, counted: bytes of clients, rows, compiled grammars, processes below this one."""
    gc.collect()
    [api] = {route.endpoint.__self__ for route in server.config.app._app._app.routes}
    parts = {**vars(api), **vars(api._engine)}
    shares = {name: dict(each._amounts) for name, each in parts.items() if isinstance(each, Shares)}
    compiled = [*models["base"]._grammars._compiled]
    children = [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    turns = api._readers._turns
    return {**shares, "compiled": compiled, "processes": len(children), "turns": (turns._free, len(turns._waiting))}


def test_attacks_are_refused_while_64_streams_run_and_memory_returns(served):
    """Each with its status, however often; the streams are those of a calm server, token for token."""
    port, models, server = served
    assert sent(port, options(10))[0] == 200
    long = {"model": "base", **PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    calm = "".join(event["choices"][0]["text"] for event in events(port, "/v1/completions", long))
    before, memory = held(server, models), psutil.Process().memory_info().rss
    with ThreadPoolExecutor(len(STREAMS)) as threads:
        streams = [threads.submit(events, port, "/v1/completions", long | {"user": user}) for user in STREAMS]
        for name, (body, words) in ATTACKS.items():
            for _ in range(2):
                status, answer = sent(port, {"user": "attacker"} | body)
                assert status == 400 and words in answer, (name, answer)
        status, answer = ask(port, "/v1/models", None, Origin="http://localhost, http://evil.example")
        assert status == 403, answer
    for stream in streams:
        found = stream.result()
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(event["choices"][0]["text"] for event in found) == calm
    wait_until(lambda: held(server, models) == before, told=lambda: (held(server, models), before))
    assert psutil.Process().memory_info().rss - memory < 200 << 20


@settings(max_examples=8)
@given(st.sampled_from([rules, terminals, definitions, tools, options]), st.integers(1, 500))
def test_what_passes_the_trial_is_followed(served, attack, count):
    status, answer = sent(served[0], attack(count))
    assert status == 200 or "too deeply" in answer or "is not followed" in answer, answer


def test_what_a_grammar_holds_ends_with_its_answer_and_is_counted(served, monkeypatch):
    port, models, _ = served
    assert sent(port, options(100))[0] == 200

    def kept() -> list[str]:
        gc.collect()
        return [*models["base"]._grammars._compiled]

    wait_until(lambda: not kept())
    monkeypatch.setattr(app, "_MOST_GRAMMARS_BYTES", 1 << 20)
    engine = engine_of(models)
    with serving(models, engine) as (other, _):
        status, answer = sent(other, options(5000))
        assert status == 429 and "grammars" in answer
        assert sent(other, {})[0] == 200
    assert engine.close(60)


def _deeper(level: int = 0) -> tuple[str, object]:
    return _deeper(level + 1)


def _endless() -> tuple[str, object]:
    while True:
        pass


WORK = {
    "an error": (lambda: json.loads("{"), "Expecting"),
    "no end": (_endless, "s of a processor"),
    "memory": (lambda: bytearray(1 << 30), "MiB of memory"),
    "recursion": (_deeper, "recursion"),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "too deeply"),
    "an end": (lambda: os._exit(3), r"ended the process that read it \(3\)"),
}


@pytest.mark.parametrize("name", WORK)
def test_work_that_fails_is_named(name, monkeypatch):
    monkeypatch.setattr(trials, "_SECONDS", 1)
    tried = trials.Trials(lambda asked: WORK[asked][0]() if asked else ("done", None))
    for _ in range(2):
        with pytest.raises(ValueError, match=WORK[name][1]):
            tried(name)
        assert tried("")[0] == "done"
    tried.close()


def test_a_child_takes_the_next_work_unless_it_holds_much():
    kept = []

    def work(count: int) -> tuple[int, object]:
        kept.append(bytearray(os.urandom(count)))
        return os.getpid(), None

    tried = trials.Trials(work)
    first, held = tried(0)
    second, _ = tried(40 << 20)  # more than malloc ever takes of memory that was freed
    third, _ = tried(0)
    assert first == second and third not in (first, os.getpid()) and held < 1 << 20
    tried.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(third, 0)
    assert tried(0)[0] not in (first, third)
    tried.close()


@pytest.mark.parametrize(
    ("key", "value"), [("rules", "a: b\n" * 501), ("definitions", {"$defs": dict.fromkeys(range(501))})]
)
def test_many_rules_and_definitions_are_refused(key, value):
    make = grammars.lark_grammar if key == "rules" else grammars.json_grammar
    with pytest.raises(ValueError, match=f"there are 501 {key}; at most 500"):
        make(value)


def test_what_many_clients_ask_for_is_tried_once_by_a_reader():
    """64 of them with one schema were answered at 0.6 of the rate."""
    models = bodies.with_trials({"base": served_models()["base"].readable})
    tries, tried = [], models["base"].trials
    models["base"] = dataclasses.replace(models["base"], trials=lambda asked: tries.append(asked) or tried(asked))
    for _ in range(3):
        for asked in (definitions(3), definitions(4), options(3)):
            body = {"model": "base", **PROMPT, **asked}
            [row] = bodies.read_completion(body, models, {"base": 256}).rows
            assert row.grammar
    assert len(tries) == 3
    tried.close()
