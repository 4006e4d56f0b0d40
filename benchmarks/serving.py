"""A server's first minute: seconds until it is up, to a first answer, and tokens/s of the first bursts of clients.

    python -m benchmarks.serving --model FOLDER --output FILE.json
        [--clients 64] [--tokens 256] [--bursts 3] [--prompts 20,60] [--adapters 0] [--seconds 560]
        [--flags "--slots 64"]

`jaxtune serve` is started twice with a home folder of its own: the first start compiles, the second has all caches.
Each answers one request of 16 tokens, then bursts of --clients streams of --tokens tokens after prompts of drawn
lengths, all at the same time, and then as many bursts of such streams that follow a JSON schema. With --adapters a
third start also serves as many random adapters, and clients of bursts ask base and adapters in turns. FILE.json is
written after each start; FILE.log has what the servers print, with the table of phases.

  --prompts: the least tokens of a prompt, and one more than the most.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import queue
import re
import shlex
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.processes import ROOT
from benchmarks.record import commit_here, write

STARTS = ("first", "second")
_FIRST_TOKENS = 16
_VOCABULARY = (100, 250)  # of prompts' ids: a byte tokenizer has them, too
_END_SECONDS = 60
_RANK = 16  # of adapters
_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 10_000}  # which no stream fulfils before its end


class Server:
    """`jaxtune serve` as a context, with `up_seconds` from its start to the line with its address."""

    def __init__(self, options: argparse.Namespace, home: Path, log: Path, adapters: Sequence[Path] = ()):
        self._options, self._home, self._log, self._adapters = options, home, log, adapters

    def __enter__(self) -> Server:
        variables = {"HOME": str(self._home), "PYTHONUSERBASE": site.getuserbase(), "HF_HUB_OFFLINE": "1"}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | variables | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        for name in ("JAX_COMPILATION_CACHE_DIR", "JAXTUNE_CACHE", "XDG_CACHE_HOME"):
            environment.pop(name, None)
        words = ["serve", str(self._options.model), "--port", "0", "--timing", *shlex.split(self._options.flags)]
        words += [word for folder in self._adapters for word in ("--adapter", f"{folder.name}={folder}")]
        began = time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen([sys.executable, "-m", "jaxtune", *words], env=environment, text=True, **pipes)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()
        self.said = ""
        while (line := lines.get(timeout=self._options.seconds)) is not None:
            if address := re.search(r"http://[^/]*:(\d+)/v1", line):
                self.port, self.up_seconds = int(address[1]), time.monotonic() - began
                return self
            self.said = line.strip() if "slots of" in line else self.said
        raise RuntimeError(f"the server ended with {self._process.wait()}; {self._log} has what it said")

    @property
    def process(self) -> int:
        return self._process.pid

    def _read(self, lines: queue.SimpleQueue[str | None]) -> None:
        assert self._process.stdout is not None
        with self._log.open("a", encoding="utf-8") as file:
            for line in self._process.stdout:
                file.write(line)
                file.flush()
                lines.put(line)
        lines.put(None)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(_END_SECONDS)

    def _events(self, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._options.seconds)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def answered(self, model: str, prompt: list[int], tokens: int, temperature: float, **more) -> tuple[float, int]:
        """(seconds to the first tokens, tokens) of one stream. more: further keys of the request."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        body |= more
        began, first, count = time.monotonic(), None, 0
        for event in self._events(body | {"stream_options": {"include_usage": True}}):
            first = time.monotonic() - began if first is None else first
            count = (event.get("usage") or {}).get("completion_tokens", count)
        return first or 0.0, count

    def models(self) -> list[str]:
        """The base first."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models")
            return [card["id"] for card in json.loads(connection.getresponse().read())["data"]]


def write_adapter(folder: Path, model: Path, seed: int) -> None:
    """A PEFT folder with random values for all linears of a Llama's layers."""
    config, random = json.loads((model / "config.json").read_text(encoding="utf-8")), np.random.default_rng(seed)
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    linears = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    linears |= {"o_proj": (queries, hidden), "gate_proj": (hidden, wide), "up_proj": (hidden, wide)}
    linears |= {"down_proj": (wide, hidden)}
    tensors = {}
    for layer, (name, (inputs, outputs)) in itertools.product(range(config["num_hidden_layers"]), linears.items()):
        part = "self_attn" if name[0] in "qkvo" else "mlp"
        for side, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK))):
            name_of_side = f"base_model.model.model.layers.{layer}.{part}.{name}.lora_{side}.weight"
            tensors[name_of_side] = (random.standard_normal(shape, np.float32) / 100).astype(np.float16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": _RANK}
    settings |= {"target_modules": list(linears), "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def measured(options: argparse.Namespace, home: Path, log: Path, adapters: Sequence[Path] = ()) -> dict[str, Any]:
    random = np.random.default_rng(0)

    def prompt() -> list[int]:
        return random.integers(*_VOCABULARY, size=random.integers(*options.prompts)).tolist()

    with Server(options, home, log, adapters) as server, ThreadPoolExecutor(options.clients) as pool:
        figures: dict[str, Any] = {"up_seconds": server.up_seconds, "said": server.said}
        names = server.models()
        began = time.monotonic()
        server.answered(names[0], prompt(), _FIRST_TOKENS, 0.0)
        figures["first_answer_seconds"] = time.monotonic() - began

        def burst(**more: object) -> dict[str, float]:
            asked = [(names[client % len(names)], prompt()) for client in range(options.clients)]
            began = time.monotonic()
            answers = list(pool.map(lambda asks: server.answered(*asks, options.tokens, 1.0, **more), asked))
            seconds = time.monotonic() - began
            tokens, firsts = sum(count for _, count in answers), [first for first, _ in answers]
            first = float(np.median(firsts))
            return {"seconds": seconds, "tokens_per_second": tokens / seconds, "median_first_token_seconds": first}

        schema = {"type": "json_schema", "json_schema": {"name": "strings", "schema": _SCHEMA}}
        figures["bursts"] = [burst() for _ in range(options.bursts)]
        figures["bursts_with_schema"] = [burst(response_format=schema) for _ in range(options.bursts)]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--output"):
        parser.add_argument(name, type=lambda text: Path(text).resolve(), required=True)
    for name, default in (("--clients", 64), ("--tokens", 256), ("--bursts", 3), ("--adapters", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument(
        "--prompts",
        type=lambda text: [*map(int, text.split(","))],
        default=[20, 60],
        help="their least and most tokens",
    )
    parser.add_argument("--seconds", type=float, default=560, help="the longest that a start or an answer may take")
    parser.add_argument("--flags", default="", help="further flags of jaxtune serve")
    options = parser.parse_args()
    facts = {name: getattr(options, name) for name in ("clients", "tokens", "prompts", "flags")} | {
        "model": str(options.model)
    }
    record: dict[str, Any] = {"benchmark": "serving", "commit": commit_here(), **facts, "starts": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log = options.output.with_suffix(".log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="serving_") as folder:
        adapters = [Path(folder, f"adapter{number}") for number in range(options.adapters)]
        for number, adapter in enumerate(adapters):
            write_adapter(adapter, options.model, number)
        for start, served in [*((start, ()) for start in STARTS), *[("adapters", adapters)] * bool(adapters)]:
            record["starts"][start] = figures = measured(options, Path(folder), log, served)
            write(options.output, record)
            rates, of_schema = (
                ", ".join(f"{burst['tokens_per_second']:,.0f}" for burst in figures[bursts])
                for bursts in ("bursts", "bursts_with_schema")
            )
            up, first = figures["up_seconds"], figures["first_answer_seconds"]
            words = f"{start} start: up after {up:.1f} s, first answer {first:.2f} s, bursts {rates} tokens/s"
            print(f"{words}, with a schema {of_schema}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
