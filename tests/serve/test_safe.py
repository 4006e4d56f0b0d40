"""The server under clients that mean it harm: it answers the others, and its memory and files return."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import types

import psutil
import pytest

from jaxtune.serve import connections, errors, readers
from jaxtune.serve.readers import Readers
from jaxtune.serve.served import ServedModel
from tests import patience
from tests.patience import wait_until
from tests.serve.running import BASE, ask, engine_of, served_models, serving

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL = {"model": "base", "prompt": "What is 12 + 30?", "max_tokens": 3, "temperature": 0}
MOST = 16 * 2**20  # bytes of a body
FILES = 256


@contextlib.contextmanager
def command(*flags: str):
    """(process, port) of `jaxtune serve`, which may open few files."""
    words = [sys.executable, "-m", "jaxtune", "serve", str(BASE), "--port", "0", "--dtype", "float32", *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
            line = ""
            while "http" not in line:
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
            yield process, int(re.findall(r":(\d+)/v1", line)[0])
        finally:
            process.kill()


class Watch(threading.Thread):
    """Asks /health ten times a second."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self._port, self._over, self.statuses = port, threading.Event(), []

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.statuses.append(ask(self._port, "/health")[0])

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(patience.SECONDS)
        assert not self.is_alive() and {*self.statuses} <= {200}, self.statuses


def many(unit: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """A body of about 16 MiB."""
    items = unit + (b"," + unit) * ((MOST - len(before) - len(after) - len(unit)) // (len(unit) + 1))
    return before + items + after


WRONG = {
    "objects for messages": (CHAT, many(b"{}", b'{"model":"base","messages":[', b"]}")),
    "numbers for messages": (CHAT, many(b"1", b'{"model":"base","messages":[', b"]}")),
    "lists for messages": (CHAT, many(b"[]", b'{"model":"base","messages":[', b"]}")),
    "tools": (CHAT, many(b"1", b'{"model":"base","messages":[{"role":"user","content":"a"}],"tools":[', b"]}")),
    "stops": (PLAIN, many(b'""', b'{"model":"base","prompt":"a","stop":[', b"]}")),
    "fractions for tokens": (PLAIN, many(b"1.5", b'{"model":"base","prompt":[', b"]}")),
    "lists for tokens": (PLAIN, many(b"[]", b'{"model":"base","prompt":[', b"]}")),
    "tokens": (PLAIN, many(b"1", b'{"model":"base","prompt":[', b"]}")),
    "keys": (PLAIN, b"{" + b",".join(b'"%07d":1' % number for number in range(MOST // 12)) + b"}"),
    "nesting": (PLAIN, b"[" * MOST),
    "no JSON": (PLAIN, b"\xff" * MOST),
    "a long prompt": (PLAIN, json.dumps({"model": "base", "prompt": "a b, " * (MOST // 5 - 20)}).encode()),
    "spaces": (PLAIN, json.dumps({"model": "base", "prompt": " " * (MOST - 100)}).encode()),
    "a long message": (
        CHAT,
        json.dumps({"model": "base", "messages": [{"role": "user", "content": "ü" * (MOST // 6 - 100)}]}).encode(),
    ),
    "long prompts": (PLAIN, json.dumps({"model": "base", "prompt": ["a " * (MOST // 260)] * 128}).encode()),
}


@pytest.mark.full
def test_half_open_connections_and_large_wrong_bodies():
    with command("--slots", "4", "--length", "256") as (process, port):
        assert ask(port, PLAIN, SMALL)[0] == 200
        own = psutil.Process(process.pid)
        files, memory = own.num_fds(), own.memory_info().rss
        with Watch(port) as watch:
            half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
            for number, client in enumerate(half_open):
                with contextlib.suppress(OSError):
                    client.sendall(b"GET /health HTTP/1.1\r\nX: " if number % 2 else os.urandom(40))
            assert ask(port, PLAIN, SMALL)[0] == 200
            statuses = {}

            def send(name: str) -> None:
                statuses[name] = ask(port, WRONG[name][0], WRONG[name][1])

            for pair in zip([*WRONG][::2], [*WRONG][1::2], strict=False):
                clients = [threading.Thread(target=send, args=(name,)) for name in pair]
                for client in clients:
                    client.start()
                for client in clients:
                    client.join(patience.SECONDS)
                assert ask(port, PLAIN, SMALL)[0] == 200
        assert watch.statuses
        assert {status for status, _ in statuses.values()} == {400}, statuses
        assert all(len(answer["error"]["message"]) < 1000 for _, answer in statuses.values())
        for client in half_open:
            client.close()
        wait_until(lambda: own.num_fds() <= files)
        assert own.memory_info().rss < memory + 150e6
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience.SECONDS) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.fixture(scope="module")
def models():
    return {"base": served_models()["base"]}


@pytest.fixture(scope="module")
def engine(models):
    engine = engine_of(models)
    yield engine
    assert engine.close(patience.SECONDS)


def closed(client: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while client.recv(1000):
            pass
    return True


def test_a_head_has_a_time(models, engine, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with serving(models, engine) as (port, _):
        address = "127.0.0.1", port
        silent, half, again = (socket.create_connection(address, timeout=patience.SECONDS) for _ in range(3))
        half.sendall(b"GET /health HTTP/1.1\r\nX: ")
        again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        assert closed(silent) and closed(half)
        again.sendall(b"GET /health HTTP/1.1\r\nX: ")  # the idle one is still there, and another head begins
        assert closed(again)


def test_connections_have_a_limit_that_requests_do_not_feel(models, engine, monkeypatch, capsys):
    monkeypatch.setattr(connections, "most_connections", lambda: 5)
    with serving(models, engine) as (port, server):
        clients = [socket.create_connection(("127.0.0.1", port), timeout=patience.SECONDS) for _ in range(5)]
        wait_until(lambda: len(server.server_state.connections) == 5)
        assert ask(port, "/health")[0] == 200
        assert closed(clients[0])
        slow = [socket.create_connection(("127.0.0.1", port), timeout=patience.SECONDS) for _ in range(5)]
        for client in slow:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        wait_until(lambda: sum(not one.is_idle for one in server.server_state.connections) == 5)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(port, "/health")
        for client in slow:
            client.close()
        wait_until(lambda: not server.server_state.connections)
        assert ask(port, "/health")[0] == 200
    assert "5 connections are open" in capsys.readouterr().err


def test_a_host_that_names_health_is_no_key(models, engine):
    with serving(models, engine, key="open sesame") as (port, _):
        assert ask(port, "/v1/models", Host=f"127.0.0.1:{port}/health?")[0] in (401, 403)


def test_health_says_nothing_of_an_error_without_the_key(models, engine):
    with serving(models, engine, key="open sesame") as (port, _):
        engine.failure = "XlaRuntimeError: of the test"
        try:
            assert ask(port, "/health") == (503, {"status": "failing"})
            assert ask(port, "/health", Authorization="Bearer open")[1] == {"status": "failing"}
            assert ask(port, "/health", Authorization="Bearer open sesame")[1]["error"] == engine.failure
        finally:
            engine.failure = None


class _Panics:
    """A tokenizer that fails as the library does."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, text, **options):
        if "panic" in str(text):
            raise type("PanicException", (BaseException,), {})("retry-limit-in-match over")
        return self._tokenizer(text, **options)


def test_readers_that_do_not_start_or_end_while_idle_start_again(models, monkeypatch):
    """As where memory runs out: no request is refused for it."""
    start, failures = subprocess.Popen, [BlockingIOError(11, "no more processes")]

    def popen(*arguments, **options):
        if failures:
            raise failures.pop()
        return start(*arguments, **options)

    monkeypatch.setattr(readers.subprocess, "Popen", popen)
    monkeypatch.setattr(readers, "_AGAIN_SECONDS", 0.01)
    body = json.dumps({"model": "base", "prompt": "a"}).encode()
    with Readers(1) as own:
        own.serve({"base": models["base"].readable})
        for _ in range(2):
            reading = asyncio.run(own.read("/tokenize", body, {"base": 256}))
            assert isinstance(reading, dict) and reading["count"]
            process = own._readers[0]._process
            assert process is not None
            process.kill()
            process.wait()


TEMPLATES = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "wide": "{{ '%1000000000d' % 5 }}{{ '%1000000000d' % 5 }}{{ '%1000000000d' % 5 }}",
    "centred": "{{ 'a'|center(10**9) }}{{ 'a'|center(10**9) }}{{ 'a'|center(10**9) }}",
    "doubled": "{% set n = namespace(a='aa') %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
}


@pytest.mark.parametrize("name", ["panic", *TEMPLATES])
def test_a_template_or_tokenizer_that_never_ends_or_swells(models, engine, monkeypatch, name):
    """In one process, which the next request needs."""
    import copy

    monkeypatch.setattr(readers, "_SECONDS", 5.0)
    tokenizer = copy.deepcopy(models["base"].tokenizer)
    tokenizer.chat_template = TEMPLATES.get(name, "{{ messages[0].content }}")
    hostile = {"base": ServedModel("base", models["base"].model, tokenizer)}
    readable = _Panics(tokenizer) if name == "panic" else tokenizer
    with Readers(1) as own:
        own.serve({"base": ServedModel("base", models["base"].model, readable).readable})
        called = []
        render = tokenizer.apply_chat_template
        tokenizer.apply_chat_template = lambda *rest, **options: (called.append(rest), render(*rest, **options))[1]
        with serving(hostile, engine, readers=own) as (port, _), Watch(port):
            body = {"model": "base", "messages": [{"role": "user", "content": "panic"}], "max_tokens": 3}
            status, answer = ask(port, CHAT, body)
            assert status == 400 and re.search(
                "longer than|[Mm]emory|ended the process|fails", answer["error"]["message"]
            )
            assert ask(port, PLAIN, SMALL)[0] == 200
        assert not called, "in the process that answers the others"


def test_many_log_probabilities_stop_nobody(models, monkeypatch):
    """Their JSON is made beside the event loop, by calls of which each keeps Python's lock for a small part."""
    from jaxtune.models.generation.requests import Piece
    from jaxtune.serve.forms import Answer
    from jaxtune.serve.requests import ParsedRequest, Row

    row = Row([1], 3000, 0.0, 0, 0, 0, 1.0, 0.0, 1.0, (), 20)
    asked = ParsedRequest("base", [row] * 16, 1, "chat", False, False, True)
    answer, tops = Answer(asked, models["base"]), [[(token, -1.0) for token in range(20)]] * 3000
    for index in range(16):
        answer.add(index, Piece(0, [5] * 3000, [-1.0] * 3000, "length", tops))
    whole, sizes, encode = answer.whole(), [], errors._ENCODER.encode

    def measured(value: object) -> str:
        sizes.append(len(text := encode(value)))
        return text

    monkeypatch.setattr(errors, "_ENCODER", types.SimpleNamespace(encode=measured))
    assert json.loads(errors.encoded(whole, large=True)) == json.loads(json.dumps(whole))
    assert sum(sizes) > 10**7 and max(sizes) < 10**4


@pytest.mark.parametrize("moment", [0.3, 2.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.full
def test_a_signal_before_it_serves(number, moment):
    words = [
        sys.executable,
        "-c",
        f"""
import os, sys, threading
from jaxtune import cli
threading.Timer({moment}, lambda: os.kill(os.getpid(), {int(number)})).start()
sys.exit(cli.main(["serve", {str(BASE)!r}, "--port", "0", "--dtype", "float32"]))
""",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience.SECONDS, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_in_a_file(tmp_path, capsys):
    from jaxtune.commands.serve import _key_in

    file = tmp_path / "key"
    file.write_text("open sesame\n")
    assert _key_in(file) == "open sesame"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file.write_text("a\nb\n")
    for wrong in (file, pipe, tmp_path / "none"):
        with pytest.raises(ValueError, match="--api-key-file"):
            _key_in(wrong)


def test_readers_have_no_device():
    """So they start in seconds and take no memory of one."""
    code = "import sys, jaxtune.serve.reading; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=patience.SECONDS).returncode == 0
