"""The command under 200 clients of every kind, and a signal in the middle of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys

import pytest

import jaxtune
from tests import patience
from tests.serve.running import BASE

CLIENTS = 200


@pytest.fixture
def process(tmp_path):
    flags = ["--port", "0", "--slots", "8", "--length", "128", "--dtype", "float32", "--grace", "1"]
    command = [sys.executable, "-m", "jaxtune", "serve", str(BASE), *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        yield process
        process.kill()


def question(draw: random.Random) -> dict:
    words = [draw.choice(["What", "is", "12", "+", "30", "?", "ü", "🙂"]) for _ in range(draw.randint(1, 12))]
    return {
        "model": "base",
        "prompt": " ".join(words),
        "max_tokens": draw.choice([1, 5, 20, 40]),
        "temperature": 0,
        "stream": draw.random() < 0.5,
    }


def malformed(draw: random.Random) -> bytes:
    wrong = [b"{", b"", b"[]", b"\xff" * 40, b'{"model": "base"}', b'{"model": "base", "prompt": {}}', b"[" * 50_000]
    return draw.choice(wrong)


async def client(port: int, kind: str, draw: random.Random) -> tuple[str, object, object]:
    """(kind, what was asked, the answer's text or its status; None where the connection was closed)"""
    await asyncio.sleep(draw.random() * 2)
    asked = question(draw)
    data = malformed(draw) if kind == "malformed" else json.dumps(asked).encode()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        )
        writer.write(head.encode() + b"\r\n" + data[: len(data) // 2])
        await writer.drain()
        if kind == "leaves early":
            writer.close()
            return kind, asked, None
        writer.write(data[len(data) // 2 :])
        await writer.drain()
        if kind == "leaves":
            await asyncio.sleep(draw.random() / 10)
            writer.transport.abort()
            return kind, asked, None
        if kind == "slow":
            found = b""
            while piece := await reader.read(64):
                found += piece
                await asyncio.sleep(0.02)
        else:
            found = await reader.read()
        writer.close()
    except OSError:
        return kind, asked, None
    return kind, asked, text_of(found, asked["stream"] and kind != "malformed")


def text_of(response: bytes, stream: bool) -> str | int | None:
    head, _, body = response.partition(b"\r\n\r\n")
    if not head:
        return None
    status = int(head.split()[1])
    if status != 200:
        assert json.loads(body)["error"]["message"]
        return status
    if not stream:
        return json.loads(body)["choices"][0]["text"]
    text = ""
    for line in body.decode().replace("\r\n", "\n").split("\n"):  # chunks of HTTP: a size, and events
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return 503
            text += event["choices"][0]["text"]
    return text if b"[DONE]" in body else None


async def storm(process: subprocess.Popen, port: int) -> list[tuple[str, dict, object]]:
    draw = random.Random(5)
    kinds = ["whole"] * 12 + ["slow", "leaves", "leaves early", "malformed"] * 2
    chosen = [draw.choice(kinds) for _ in range(CLIENTS)]
    clients = [asyncio.create_task(client(port, kind, random.Random(number))) for number, kind in enumerate(chosen)]
    async with asyncio.timeout(patience.SECONDS):
        while sum(task.done() for task in clients) < CLIENTS // 2:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionError):
            while True:  # until whoever comes is too late
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await asyncio.sleep(0.05)
        clients += [asyncio.create_task(client(port, "whole", random.Random(CLIENTS + late))) for late in range(5)]
        return await asyncio.gather(*clients)


@pytest.mark.full
def test_nothing_hangs(process):
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    port = int(lines[1].split(":")[2].split("/")[0])
    found = asyncio.run(storm(process, port))
    assert process.wait(patience.SECONDS) == 0
    assert "Traceback" not in process.stderr.read()

    answered = [(asked, text) for kind, asked, text in found if isinstance(text, str)]
    refused = {text for kind, _, text in found if kind == "malformed"}
    ended = [text for kind, _, text in found if kind in ("whole", "slow") and not isinstance(text, str)]
    assert refused <= {400, 503, None} and 400 in refused and {*ended} <= {503, None}
    assert len(answered) > CLIENTS // 10 and ended[-5:] == [None] * 5
    model, tokenizer = jaxtune.from_pretrained(BASE, dtype="float32")
    prompts = [tokenizer(asked["prompt"])["input_ids"] for asked, _ in answered]
    rows = jaxtune.Sampler(model, 8, 128).run(prompts, [asked["max_tokens"] for asked, _ in answered])
    for (asked, text), row in zip(answered, rows, strict=True):
        assert tokenizer.decode(row.ids, skip_special_tokens=True) == text, asked
