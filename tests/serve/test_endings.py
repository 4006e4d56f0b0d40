"""The end of the server: every client has a whole answer or is told, whatever the engine does, and nothing aborts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from drawn import DRAWS

from jaxtune.models.generation.sampler import Sampler
from jaxtune.serve.errors import ApiError
from tests import patience
from tests.patience import wait_until
from tests.serve.running import BASE, ask, engine_of, served_models, serving

PLAIN = "/v1/completions"
LONG = {"model": "base", "prompt": "What is 12 + 30?", "max_tokens": 100, "temperature": 1.5, "n": 2}
STOPPING = "the server is stopping"


@pytest.fixture(scope="module")
def models():
    return {"base": served_models()["base"]}


def answered(port: int, body: dict) -> str:
    """How a client's request ended: "refused" before it was taken, "whole", "told", or what else came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience.SECONDS)
    with contextlib.closing(connection):
        try:
            connection.request("POST", PLAIN, json.dumps(body))
            response = connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected):
            return "refused"
        try:
            data = response.read().decode()
        except (http.client.IncompleteRead, ConnectionError) as cut:
            return f"cut: {cut!r}"
    last = data.rstrip("\n").rpartition("\n\n")[2] if body.get("stream") else data
    if STOPPING in last:
        return "told"
    return "whole" if response.status == 200 and (last == "data: [DONE]" or "choices" in last) else data


@pytest.mark.full
def test_clients_are_told_at_the_end_of_the_grace_though_the_engine_is_at_work(models, monkeypatch):
    """As in a compile of minutes: the engine's thread hears nothing."""
    own, at_work, goes_on = engine_of(models), threading.Event(), threading.Event()
    step = Sampler.step

    def slow(sampler):
        if at_work.is_set() or sampler._number < 5:  # until all rows of the first three requests are there
            return []
        at_work.set()
        goes_on.wait(patience.SECONDS)
        return step(sampler)

    monkeypatch.setattr(Sampler, "step", slow)
    ends: dict[str, str] = {}

    def client(name: str, **body) -> threading.Thread:
        thread = threading.Thread(target=lambda: ends.update({name: answered(port, LONG | body)}))
        thread.start()
        return thread

    with serving(models, own, grace=0.5) as (port, server):
        clients = [client("stream", stream=True), client("whole"), client("one", n=1)]
        assert at_work.wait(patience.SECONDS)
        clients.append(client("submitted while it is at work", stream=True))
        wait_until(lambda: len(own._awaited) == 1)
        server.handle_exit(signal.SIGTERM, None)
        for thread in clients:
            thread.join(patience.SECONDS)
        assert list(ends.values()) == ["told"] * 4
    goes_on.set()
    assert own.close(patience.SECONDS)
    assert not own._open and not own._awaited


def test_what_is_awaited_ends_with_the_engine(models):
    own = engine_of(models)

    async def run():
        assert await own.unless_ended(asyncio.sleep(0, 3)) == 3
        waits = asyncio.ensure_future(own.unless_ended(asyncio.sleep(100)))
        late = asyncio.ensure_future(asyncio.wait_for(own.unless_ended(asyncio.sleep(100)), 0.01))
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await late
        own.end(ApiError(503, "it ends"))
        for work in (waits, own.unless_ended(asyncio.sleep(100)), own.submit("base", [])):
            with pytest.raises(ApiError, match="it ends"):
                await work

    asyncio.run(run())
    assert own.close(patience.SECONDS) and not own._awaited


@pytest.mark.full
def test_a_request_of_a_failed_round_cancels_no_other(models, monkeypatch):
    """The next sampler numbers its requests from 0 again."""
    own = engine_of(models, slots=2)
    step, fails = Sampler.step, threading.Event()

    def failing(sampler):
        if not fails.is_set():
            wait_until(lambda: own._commands.qsize() > 0)  # the innocent one is submitted during the round that fails
            fails.set()
            raise RuntimeError("of the test")
        return step(sampler)

    monkeypatch.setattr(Sampler, "step", failing)
    ends: list[tuple[int, object]] = []
    with serving(models, own) as (port, _):
        body = {"model": "base", "prompt": "a", "max_tokens": 3}
        guilty = threading.Thread(target=lambda: ends.append(ask(port, PLAIN, body)))
        guilty.start()
        wait_until(lambda: own._of_request or fails.is_set())
        status, answer = ask(port, PLAIN, body)
        guilty.join(patience.SECONDS)
        assert ends[0][0] == 500 and status == 200 and answer["choices"]
    assert own.close(patience.SECONDS)


def ended(number: signal.Signals, seconds: float, grace: float = 1.0) -> tuple[int, str, list[str]]:
    """(exit code, stderr, how each client ended) of a server that gets a signal some time after its clients."""
    flags = ["--port", "0", "--slots", "4", "--length", "256", "--dtype", "float32", "--grace", str(grace)]
    command = [sys.executable, "-m", "jaxtune", "serve", str(BASE), *flags]
    ends: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            assert server.stdout is not None
            line = ""
            while "http" not in line:
                line = server.stdout.readline()
                assert line, server.stderr and server.stderr.read()
            port = int(re.findall(r":(\d+)/v1", line)[0])
            bodies = [LONG | {"stream": index % 2 == 0, "max_tokens": (3, 100, 200)[index % 3]} for index in range(6)]
            threads = [threading.Thread(target=lambda body=b: ends.append(answered(port, body))) for b in bodies]
            for thread in threads:
                thread.start()
            time.sleep(seconds)
            server.send_signal(number)
            _, errors = server.communicate(timeout=patience.SECONDS)
            for thread in threads:
                thread.join(patience.SECONDS)
        finally:
            server.kill()
    return server.returncode, errors, ends


MOMENTS = [
    (number, 0.05 + 0.6 * moment, grace)
    for moment, grace in zip(range(10), (0, 1, 0.3, 3, 1, 0, 2, 1, 0.5, 1), strict=True)
    for number in (signal.SIGINT, signal.SIGTERM)
]
CASES = MOMENTS if DRAWS else [MOMENTS[4], (signal.SIGHUP, 3.0, 0.5)]


@pytest.mark.parametrize(("number", "seconds", "grace"), CASES)
@pytest.mark.full
def test_a_signal_at_any_moment(number, seconds, grace):
    code, errors, ends = ended(number, seconds, grace)
    assert code == 0, errors
    assert not re.search("terminate called|Fatal|Traceback|Abort", errors), errors
    assert len(ends) == 6 and set(ends) <= {"refused", "whole", "told"}, ends
