"""A server that has prepared its programs: the first burst compiles nothing, and an unusual request stops nobody."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tiny_models import adapted_model

import jaxtune
from jaxtune.models.generation import ready
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.programs import kept
from jaxtune.serve.engine import Engine
from jaxtune.serve.loading import AdapterFolder
from jaxtune.serve.readers import Readers
from tests import patience
from tests.compilations import compilations
from tests.serve.running import ask, events, served_models, serving
from tests.serve.test_adapters import LOAD, post

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
SETTINGS = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1, "logprobs": 3},
    {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {"7": 3.0}},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(port, engine) of a server of the packaged model, prepared, whose clients may load an adapter."""
    models = {"base": served_models()["base"]}
    root = tmp_path_factory.mktemp("root")
    jaxtune.save_adapter(adapted_model(models["base"].model, seed=5, r=4), root / "a")

    def prepared(adapters) -> Sampler:
        settings = dict(first_at_once=True, compiles_beside=True, prefix_bytes=10**9)
        sampler = Sampler(models["base"].model, 4, 256, adapters=adapters, adapter_ranks=64, **settings)
        sampler.prepare()
        return sampler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "LATER_SECONDS", float("inf"))
        engine = Engine(prepared, models)
        with (
            Readers(1) as readers,
            serving(models, engine, readers=readers, folder=AdapterFolder(root)) as (port, _),
        ):
            readers.serve({name: each.readable for name, each in models.items()})
            yield port, engine
        assert engine.close(patience.SECONDS)


def asked(port: int, index: int, random: np.random.Generator) -> int:
    """Asks for a completion or a chat, as a stream or not; the number of tokens of its prompt and answer."""
    words = " ".join(random.choice(["What", "is", "12", "+", "30", "ü"], size=random.integers(1, 60)))
    values = {"model": "base", "max_tokens": int(random.integers(1, 40))} | SETTINGS[index % len(SETTINGS)]
    path, body = TEXTS, {"prompt": words} | values
    if index % 3 == 0:
        path, body = CHATS, {"messages": [{"role": "user", "content": words}]} | values
        if "logprobs" in values:
            body |= {"logprobs": True, "top_logprobs": 3}
    if index % 2:
        body |= {"stream_options": {"include_usage": True}}
        return next(event["usage"]["total_tokens"] for event in events(port, path, body) if event.get("usage"))
    status, answer = ask(port, path, body)
    assert status == 200 and isinstance(answer, dict), answer
    return answer["usage"]["total_tokens"]


def burst(port: int, count: int, seed: int) -> list[int]:
    randoms = np.random.default_rng(seed).spawn(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda index: asked(port, index, randoms[index]), range(count)))


def test_the_first_burst_compiles_nothing(server, monkeypatch):
    port, engine = server
    beside = []
    monkeypatch.setattr(ready, "prepare", lambda calls: (beside.append(calls), kept.prepare(calls))[1])
    with compilations([engine._thread]) as names:
        assert min(burst(port, 20, seed=0)) > 1
    assert names == beside == []


@pytest.mark.parametrize(
    "unusual",
    [
        {"prompt": "12", "stop_token_ids": list(range(20, 29))},
        {"prompt": "What is 12 + 30?", "echo": True, "logprobs": 1},
    ],
    ids=["end tokens", "scores"],
)
def test_an_unusual_request_stops_nobody(server, monkeypatch, unusual):
    port, _ = server
    compiles, goes_on = threading.Event(), threading.Event()

    def slow(calls):
        compiles.set()
        assert goes_on.wait(patience.SECONDS)
        return kept.prepare(calls)

    monkeypatch.setattr(ready, "prepare", slow)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ask, port, TEXTS, {"model": "base", "max_tokens": 5} | unusual)
        try:
            assert compiles.wait(patience.SECONDS)
            burst(port, 6, seed=1)
            time.sleep(0.2)
            assert not waits.done()
        finally:
            goes_on.set()
        status, answer = waits.result()
    assert status == 200 and answer["usage"]["completion_tokens"] >= 1


def test_an_adapter_that_is_loaded_stops_nobody(server, monkeypatch):
    """Until its programs are compiled, its answers wait, also scores, and the others go on."""
    port, _ = server
    compiles, goes_on = threading.Event(), threading.Event()

    def slow(calls):
        compiles.set()
        assert goes_on.wait(patience.SECONDS)
        return kept.prepare(calls)

    monkeypatch.setattr(ready, "prepare", slow)
    body = {"model": "a", "prompt": "What is 12 + 30?", "max_tokens": 5, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        assert post(port, LOAD, lora_name="a", lora_path="a")[0] == 200
        waiting = [pool.submit(ask, port, TEXTS, body | more) for more in ({}, {"echo": True, "logprobs": 1})]
        try:
            assert compiles.wait(patience.SECONDS)
            burst(port, 6, seed=2)
            time.sleep(0.2)
            assert not any(each.done() for each in waiting)
        finally:
            goes_on.set()
        (status, answer), (scored_status, scored) = (each.result() for each in waiting)
    assert status == scored_status == 200
    assert scored["choices"][0]["text"] == body["prompt"] + answer["choices"][0]["text"]
    burst(port, 6, seed=3)


def test_a_program_that_failed_is_tried_again(monkeypatch):
    """After a time, in which it is refused."""
    size = ready.Look(8, 4)
    shapes: Any = Mock(calls=lambda size: [])
    failures = [MemoryError("of the test")]

    def prepare(calls):
        if failures:
            raise failures.pop()

    monkeypatch.setattr(ready, "prepare", prepare)
    monkeypatch.setattr(ready, "AGAIN_SECONDS", 0.2)
    queue = ready._Queue(shapes)
    thread = threading.Thread(target=queue.run, daemon=True)
    thread.start()
    with queue.changed:
        queue.want([size], 0.0)
        assert queue.changed.wait_for(lambda: size in queue._failed, 30)
        with pytest.raises(RuntimeError, match="of the test"):
            queue.want([size], 0.0)
    time.sleep(0.3)
    with queue.changed:
        queue.want([size], 0.0)
        assert queue.changed.wait_for(lambda: size in queue.ready, 30)
        queue.closed = True
        queue.changed.notify_all()
    thread.join(30)
