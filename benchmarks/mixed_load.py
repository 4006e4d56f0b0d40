"""A server under mixed load: its slowest /health, and its memory and open files before and after.

    python -m benchmarks.mixed_load --model FOLDER --output FILE.json
        [--minutes 20] [--clients 4] [--flags "--slots 8 --length 256 --dtype float32"]

`jaxtune serve` answers chats, completions, streams that are cancelled, schemas, expressions, scores, adapters that are
loaded, asked and unloaded, and wrong bodies, drawn by each client, while /health is asked four times a second.
FILE.json has the worst seconds of /health, the longest for which the machine did not let this process run, and the
memory and files of the server's processes: up, each minute, and when the load is over.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.record import environment, write
from benchmarks.serving import Server

_CHAT, _TEXTS = "/v1/chat/completions", "/v1/completions"
_WORDS = ("What", "is", "12", "+", "30", "?", "Once", "a", "dog", "ü", "🙂")
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": {"enum": ["red", "blue"]}},
    "required": ["n", "colour"],
    "additionalProperties": False,
}
_WRONG = (b"{", b"", b"[]", b"\xff" * 40, b"[" * 50_000, b'{"model": "nobody", "prompt": "a"}', b'{"prompt": {}}')
# How often each kind of request is drawn.
_KINDS = dict(chat=5, completion=5, cancelled=4, schema=2, expression=2, scores=1, adapter=1, wrong=3)
_SETTLES_SECONDS = 15.0  # after the load, before the last look


class Load:
    """Clients of a server until `over`. statuses: {kind: {status, or an exception's name: count}}."""

    def __init__(self, port: int, model: str, adapters: list[str]):
        self._port, self._model, self._adapters = port, model, adapters
        self.over = threading.Event()
        self.statuses: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in _KINDS}
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        draw = random.Random(number)
        while not self.over.is_set():
            [kind] = draw.choices(list(_KINDS), list(_KINDS.values()))
            try:
                status = str(getattr(self, f"_{kind}")(draw, number))
            except (OSError, http.client.HTTPException) as error:
                status = type(error).__name__
            with self._lock:
                self.statuses[kind][status] += 1

    def asked(self, method: str, path: str, body: object = None, most: int | None = None) -> int:
        """The status of an answer, of which `most` bytes are read before the connection is closed; None: all."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data)
            response = connection.getresponse()
            response.read(most)
            return response.status

    def _text(self, draw: random.Random) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 60)))

    def _completion(self, draw: random.Random, _: int, **more: object) -> int:
        body = {"model": self._model, "prompt": self._text(draw), "max_tokens": draw.randint(1, 40)}
        return self.asked("POST", _TEXTS, body | {"temperature": draw.choice([0, 1])} | more)

    def _chat(self, draw: random.Random, _: int, **more: object) -> int:
        body = {"model": self._model, "messages": [{"role": "user", "content": self._text(draw)}], "max_tokens": 30}
        return self.asked("POST", _CHAT, body | {"stream": draw.random() < 0.5, "n": draw.randint(1, 3)} | more)

    def _cancelled(self, draw: random.Random, _: int) -> int:
        body = {"model": self._model, "prompt": self._text(draw), "max_tokens": 100, "stream": True, "ignore_eos": True}
        return self.asked("POST", _TEXTS, body, most=draw.randint(1, 600))

    def _schema(self, draw: random.Random, number: int) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
        return self._chat(draw, number, response_format=form, max_tokens=100)

    def _expression(self, draw: random.Random, number: int) -> int:
        return self._completion(draw, number, structured_outputs={"regex": f"[0-9]{{{draw.randint(1, 9)}}}"})

    def _scores(self, draw: random.Random, number: int) -> int:
        return self._completion(draw, number, echo=True, logprobs=draw.randint(0, 5))

    def _adapter(self, draw: random.Random, number: int) -> int:
        """Loaded under the client's name, asked, and unloaded."""
        name = f"adapter-{number}"
        loaded = {"lora_name": name, "lora_path": draw.choice(self._adapters)}
        statuses = [self.asked("POST", "/v1/load_lora_adapter", loaded)]
        statuses += [self._completion(draw, number, model=name) for _ in range(2)]
        statuses.append(self.asked("POST", "/v1/unload_lora_adapter", {"lora_name": name}))
        return max(statuses)

    def _wrong(self, draw: random.Random, _: int) -> int:
        return self.asked("POST", draw.choice([_CHAT, _TEXTS]), draw.choice(_WRONG))

    def health(self, seen: dict[str, Any]) -> None:
        """Asks until `over`: the worst seconds and statuses, and the longest that a pause took too long."""
        seen |= {"asked": 0, "worst_seconds": 0.0, "over_1_s": 0, "machine_busy_seconds": 0.0, "statuses": {}}
        while not self.over.is_set():
            began = time.monotonic()
            try:
                status = str(self.asked("GET", "/health"))
            except (OSError, http.client.HTTPException) as error:
                status = type(error).__name__
            took, began = time.monotonic() - began, time.monotonic()
            time.sleep(0.25)
            busy = time.monotonic() - began - 0.25
            seen["asked"] += 1
            seen["over_1_s"] += took > 1
            seen["statuses"][status] = seen["statuses"].get(status, 0) + 1
            seen["worst_seconds"] = round(max(seen["worst_seconds"], took), 3)
            seen["machine_busy_seconds"] = round(max(seen["machine_busy_seconds"], busy), 3)


def processes(parent: int) -> list[int]:
    """A process, its children and theirs."""
    tree = [parent]
    for number in tree:
        for task in Path(f"/proc/{number}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                tree += map(int, task.read_text().split())
    return tree


def look(parent: int) -> dict[str, float]:
    """Resident bytes, open files and threads of the server's processes, and how many these are."""
    total = {"rss_mb": 0.0, "files": 0, "threads": 0, "processes": 0}
    for number in processes(parent):
        with contextlib.suppress(OSError):  # it has ended
            status = Path(f"/proc/{number}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            total["rss_mb"] = round(total["rss_mb"] + int(fields["VmRSS"].split()[0]) / 1e3, 1)
            total["threads"] += int(fields["Threads"])
            total["files"] += len(os.listdir(f"/proc/{number}/fd"))
            total["processes"] += 1
    return total


def save_adapters(model: str, folder: Path) -> list[str]:
    import jaxtune

    base, _ = jaxtune.from_pretrained(model, dtype="float32")
    ranks = {"few": 2, "more": 4}
    for name, rank in ranks.items():
        jaxtune.save_adapter(jaxtune.get_peft_model(base, r=rank), folder / name)
    return list(ranks)


def measured(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    adapters = home / "adapters"
    names = save_adapters(options.model, adapters)
    options.flags += f" --adapters-below {adapters}"
    with Server(options, home, Path(options.output).with_suffix(".log")) as server:
        load = Load(server.port, Path(options.model).name, names)
        seen: dict[str, Any] = {}
        threads = [threading.Thread(target=load.client, args=(number,)) for number in range(options.clients)]
        threads.append(threading.Thread(target=load.health, args=(seen,)))
        memory = {"up": look(server.process)}
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60 * options.minutes
        while (seconds := until - time.monotonic()) > 0:
            load.over.wait(min(60, seconds))
            memory[f"minute {options.minutes - max(until - time.monotonic(), 0) / 60:.0f}"] = look(server.process)
        load.over.set()
        for thread in threads:
            thread.join()
        time.sleep(_SETTLES_SECONDS)
        memory["over"] = look(server.process)
        status = load.asked("GET", "/health")
    answered = {kind: dict(counts) for kind, counts in load.statuses.items()}
    return {"health": seen, "health_after": status, "answers": answered, "memory": memory, "said": server.said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--flags", default="--slots 8 --length 256 --dtype float32")
    parser.add_argument("--seconds", type=float, default=560.0, help="until the server must be up")
    options = parser.parse_args()
    what = {"benchmark": "mixed_load", "minutes": options.minutes, "clients": options.clients, "flags": options.flags}
    with tempfile.TemporaryDirectory() as home:
        record = measured(options, Path(home))
    write(options.output, what | environment() | record)


if __name__ == "__main__":
    main()
