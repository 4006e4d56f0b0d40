"""A server in a thread of the test's process, and what asks it."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from tiny_models import adapted_model

import jaxtune
from jaxtune.models.ends import with_end_tokens
from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.engine import Engine
from jaxtune.serve.loading import AdapterFolder
from jaxtune.serve.readers import Readers
from jaxtune.serve.served import ServedModel
from jaxtune.serve.server import Server, listen
from tests import patience
from tests.patience import wait_until

BASE = Path(jaxtune.__file__).parent / "quickstart" / "base"


def served_models() -> dict[str, ServedModel]:
    """The packaged model in float32, alone and with a random adapter."""
    model, tokenizer = jaxtune.from_pretrained(BASE, dtype="float32")
    base = ServedModel("base", with_end_tokens(model, tokenizer), tokenizer)
    adapted = with_end_tokens(adapted_model(model, r=4), tokenizer)
    return {"base": base, "mine": ServedModel("mine", adapted, tokenizer, "base")}


def stub_model(name, model, tokenizer) -> ServedModel:
    """A ServedModel of stand-ins."""
    return ServedModel(name, model, tokenizer)


def engine_of(models: dict[str, ServedModel], slots: int = 4, length: int = 256, **settings) -> Engine:
    base = next(iter(models.values())).model
    settings = dict(first_at_once=True, prefix_bytes=10**9) | settings
    return Engine(lambda adapters: Sampler(base, slots, length, adapters=adapters, **settings), models)


_readers: dict[tuple, Readers] = {}


def readers_of(models: dict[str, ServedModel]) -> Readers:
    key = tuple((name, id(served.tokenizer)) for name, served in models.items())
    if key not in _readers:
        _readers[key] = readers = Readers(2)
        readers.serve({name: served.readable for name, served in models.items()})
        atexit.register(readers.close)
    return _readers[key]


@contextlib.contextmanager
def serving(
    models: dict[str, ServedModel],
    engine: Engine,
    key: str | None = None,
    seconds: float = patience.SECONDS,
    grace: float = 5.0,
    readers: Readers | None = None,
    folder: AdapterFolder | None = None,
) -> Iterator[tuple[int, Server]]:
    """(port, server); the engine is left as it is. readers: None: those of all servers of these tokenizers."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server(engine, listener, key, seconds, grace, readers or readers_of(models), folder)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield port, server
    finally:
        server.should_exit = True
        thread.join(patience.SECONDS)
        assert not thread.is_alive()


def ask(port: int, path: str, body: object = None, **headers: str) -> tuple[int, object]:
    """(status, JSON) of a request; bytes are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def events(port: int, path: str, body: dict) -> list[dict]:
    """The events of a stream, which ends with [DONE]."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.read())


def events_of(data: bytes) -> list[dict]:
    *found, last, rest = data.decode().split("\n\n")
    assert last == "data: [DONE]" and not rest
    return [json.loads(one.removeprefix("data: ")) for one in found]
