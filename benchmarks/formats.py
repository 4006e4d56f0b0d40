"""Tokens per second of an 8B by the format of its weights, and which bits of a row depend on the rows beside it.

    python benchmarks/formats.py --output FILE.json [--seconds 280] [--before TREE] [CASE ...]

Weights and prompts are random. The cases of a wave make their models and compile at the same time, each in a process of
its own, and then measure one after another. A figure is in the file as soon as it is made.

    bf16, nf4, nvfp4, int8
                        tokens per second of full slots, prefill included, and milliseconds of a decoding step, of rows
                        of 200 + 512 tokens, once and again. bf16 also with `prefills_alone`.
    before              bf16 by the code in TREE, a checkout of another commit.
    fp8                 the same of weights in FP8 whose products round activations (model.compute=fp8), and with keys
                        and values in FP8 (`cache`).
    bits_FORMAT         of 64 rows of 160 forced tokens through two layers: how many tokens have another log-probability
                        than among the 64, for rows alone (in a sampler of 64 slots, and of one), in another slot, and
                        beside other rows.
    long_FORMAT         128 + 2,048 tokens, TensorRT-LLM's shape, in as many slots as fit, in FP8 with such a cache;
                        `sofar` every five seconds.

With TINY=1 in the environment a tiny model is measured, for a try on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("TREE") or str(Path(__file__).resolve().parents[1]))
from benchmarks import figures, mismatch, sampling
from benchmarks.record import write

_TINY = bool(os.environ.get("TINY"))
_NEW, _BITS_ROWS, _BITS_NEW, _LONG = (24, 4, 24, 64) if _TINY else (512, 64, 160, 2048)
_WAVES = (
    ("bf16", "before", "nf4"),
    ("fp8", "nvfp4", "int8"),
    ("long_fp8",),
    ("long_bf16",),
    ("bits_bf16", "bits_fp8", "bits_int8"),
)
_SLOTS = {"bf16": (1, 16, 64, 256), "fp8": (1, 16, 64, 256)} | dict.fromkeys(("nf4", "nvfp4", "int8"), (1, 16))
_SLOTS["before"] = _SLOTS["bf16"]
_MOST_LONG = (1024, 768, 640, 512, 384, 320, 256, 192, 128, 64)  # rows; a sampler's plan has other steps
if _TINY:
    _SLOTS, _MOST_LONG = dict.fromkeys(_SLOTS, (1, 4)), (8,)
_SHARE = {"bf16": 0.38, "before": 0.46, "fp8": 0.4, "nf4": 0.12}  # of the device's memory; 0.2 for others
_GO = "go\n"


def model_of(load_in: str, layers: int | None = None) -> Any:
    """A model of Llama-3.1-8B's shape; `fp8`: its products round activations."""
    import jax

    from benchmarks.random_model import random_model
    from benchmarks.shapes import SHAPES
    from jaxtune.models.files.quant import compute_in_fp8

    load_in = "bf16" if load_in == "before" else load_in
    hf = dict(sampling.TINY if _TINY else SHAPES["llama-3.1-8b"]) | (
        {} if layers is None else {"num_hidden_layers": layers}
    )
    model = random_model(hf, jax.random.key(0), None if load_in == "bf16" else load_in)
    return compute_in_fp8(model) if load_in == "fp8" else model


def wait_for_turn() -> None:
    """Until the parent says that no other case uses the device."""
    figures.say("ready", time.time() - float(os.environ["STARTED"]))
    sys.stdin.readline()


@contextlib.contextmanager
def sampler_of(model: Any, slots: int, options: Mapping[str, Any]) -> Iterator[Any]:
    import jaxtune

    sampler = jaxtune.Sampler(model, slots, 200 + _NEW, **options)
    try:
        yield sampler
    finally:
        getattr(sampler, "close", lambda: None)()  # which other commits may lack


def speed(name: str) -> None:
    model = model_of(name)
    ways: list[tuple[int, dict[str, Any]]] = [(slots, {}) for slots in _SLOTS[name]]
    if name == "bf16":
        ways.append((64, {"prefills_alone": True}))
    if name == "fp8":
        ways += [(slots, {"cache": "fp8"}) for slots in _SLOTS[name]]
    for slots, options in ways:
        with sampler_of(model, slots, options) as sampler:
            sampling.warm_up(sampler, sampling.prompts_of(model, slots), _NEW)
    wait_for_turn()
    for slots, options in ways:
        name = ", ".join([f"{slots} rows", *options])
        figures.say(name, [full(model, slots, **options) for _ in range(2)])


def full(model: Any, slots: int, **options: Any) -> dict[str, float]:
    prompts = sampling.prompts_of(model, slots)
    with sampler_of(model, slots, options) as sampler:
        sampling.warm_up(sampler, prompts, _NEW)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            sampler.submit(prompt, _NEW, temperature=1.0, index=index, eos_token_ids=())
        tokens, steps = sampling.drain(sampler)
        seconds = time.perf_counter() - began
    assert tokens == slots * _NEW, (tokens, slots)
    whole = [at for at, count in steps if count == slots * 8]
    decode = (whole[-1] - whole[0]) / (8 * (len(whole) - 1))
    return {"tokens_per_second": tokens / seconds, "decode_ms": 1e3 * decode, "seconds": seconds}


def long_rows(load_in: str) -> None:
    import numpy as np

    import jaxtune

    model = model_of(load_in)
    draw = np.random.default_rng(0)
    for most in _MOST_LONG:
        try:
            sampler = jaxtune.Sampler(model, most, 128 + _LONG, cache="fp8" if load_in == "fp8" else None)
            break
        except ValueError:
            continue
    else:
        raise ValueError("not even 64 rows fit")
    slots = sampler.plan.slots
    prompts = draw.integers(3, model.config.vocab_size - 1, (slots, 128)).tolist()
    began = time.perf_counter()
    sampling.warm_up(sampler, prompts, _LONG)
    figures.say("plan", {"plan": str(sampler.plan), "compile_and_start": time.perf_counter() - began})
    wait_for_turn()
    began, tokens, said = time.perf_counter(), 0, 0.0
    sampling.submit(sampler, prompts, _LONG)
    while sampler.pending:
        tokens += sum(len(piece.ids) for piece in sampler.step())
        seconds = time.perf_counter() - began
        if seconds - said > 5 or not sampler.pending:
            said = seconds
            name = "sofar" if sampler.pending else "whole"
            figures.say(name, {"slots": slots, "tokens": tokens, "seconds": seconds, "rate": tokens / seconds})


@dataclasses.dataclass(frozen=True)
class Company:
    """How rows are submitted: in groups, each after the other has ended."""

    groups: list[list[int]]
    slots: int = _BITS_ROWS


def companies() -> dict[str, Company]:
    """Row numbers from 64 on are other rows."""
    rows, others = list(range(_BITS_ROWS)), list(range(_BITS_ROWS, 2 * _BITS_ROWS))
    half = _BITS_ROWS // 2
    mixed = [
        [row for pair in zip(others[:half], rows[at : at + half], strict=True) for row in pair] for at in (0, half)
    ]
    return {
        "together": Company([rows]),
        "together again": Company([rows]),
        "another slot": Company([rows[::-1]]),
        "another batch": Company(mixed),
        "alone": Company([[row] for row in rows]),
        "alone, one slot": Company([[row] for row in rows], 1),
    }


def logprobs_of(sampler: Any, prompts: Sequence[list[int]], groups: Sequence[Sequence[int]]) -> Any:
    """float32[64, 160] of the rows' tokens, which are forced."""
    import numpy as np

    table = np.full((2 * _BITS_ROWS, _BITS_NEW), np.nan, np.float32)
    for group in groups:
        numbers = {sampler.submit(prompts[row], _BITS_NEW, index=row, eos_token_ids=()): row for row in group}
        places = dict.fromkeys(group, 0)
        while sampler.pending:
            for piece in sampler.step():
                row, count = numbers[piece.request], len(piece.logprobs)
                table[row, places[row] : places[row] + count] = piece.logprobs
                places[row] += count
    assert np.isfinite(table[:_BITS_ROWS]).all()
    return table[:_BITS_ROWS]


def bits(load_in: str) -> None:
    import numpy as np

    import jaxtune
    from jaxtune.models.generation import slots

    model, draw = model_of(load_in, layers=2), np.random.default_rng(0)
    most = model.config.vocab_size - 1
    prompts = [draw.integers(3, most, count).tolist() for count in draw.integers(70, 240, 2 * _BITS_ROWS)]
    tokens = draw.integers(3, most, (2 * _BITS_ROWS, _BITS_NEW))
    wait_for_turn()
    with mismatch.replaced(slots, _chosen=mismatch.forced([tokens])):
        for options in ({}, {"prefills_alone": True}, {"deterministic": True}):
            result: dict[str, Any] = {"tokens": _BITS_ROWS * _BITS_NEW}
            expected: Any = None
            for name, company in companies().items():
                with jaxtune.Sampler(model, company.slots, 512, **options) as sampler:
                    logprobs = logprobs_of(sampler, prompts, company.groups)
                expected = logprobs if expected is None else expected
                differs = logprobs.view(np.int32) != expected.view(np.int32)
                apart = np.abs(logprobs.astype(np.float64) - expected)
                result[name] = {
                    "differ": int(differs.sum()),
                    "of_first_tokens": int(differs[:, 0].sum()),
                    "mean": float(apart.mean()),
                    "largest": float(apart.max()),
                }
                figures.say(", ".join(options) or "default", result)


def child(name: str) -> None:
    kind, _, load_in = name.partition("_")
    {"bits": bits, "long": long_rows}.get(kind, lambda _: speed(name))(load_in)


class Case:
    """A running case; `record` gets what it says."""

    def __init__(self, name: str, cache: str, alone: bool, keep: Any, before: str | None):
        self.record: dict[str, Any] = {}
        self.ready = threading.Event()
        share = 0.92 if alone else _SHARE.get(name, 0.2)
        variables = {"STARTED": str(time.time()), "JAX_COMPILATION_CACHE_DIR": cache}
        variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": str(share)}
        if name == "before":
            variables |= {"TREE": str(before), "PYTHONPATH": f"{before}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, __file__, "--child", name, "--output", "-"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, cwd=figures.ROOT, env=os.environ | variables, **pipes)
        threading.Thread(target=self._read, args=(keep,), daemon=True).start()

    def _read(self, keep: Any) -> None:
        for line in self.process.stdout or ():
            if line.startswith("FIGURE "):
                name, value = json.loads(line.removeprefix("FIGURE "))
                self.record[name] = value
                keep()
                if name == "ready":
                    self.ready.set()
        if code := self.process.wait():
            self.record["failed"] = f"exit code {code}"
            keep()
        self.ready.set()

    def go(self) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.write(_GO)
            self.process.stdin.flush()


def main() -> None:
    names = [name for wave in _WAVES for name in wave]
    parser = figures.arguments(str(__doc__), names, "none", 280)
    parser.add_argument("--before", help="a checkout of another commit")
    options: argparse.Namespace = parser.parse_args()
    if options.child:
        child(options.child)
        return
    probe = "import json; from benchmarks.record import environment; print(json.dumps(environment()))"
    told = subprocess.run([sys.executable, "-c", probe], cwd=figures.ROOT, capture_output=True, text=True, check=True)
    record = json.loads(told.stdout.splitlines()[-1]) | {"benchmark": "formats", "cases": {}}
    lock, ends = threading.Lock(), time.monotonic() + options.seconds

    def keep() -> None:
        with lock:
            write(options.output, record)

    with tempfile.TemporaryDirectory() as cache:
        for wave in _WAVES:
            wanted = [name for name in wave if not options.cases or name in options.cases]
            wanted = [name for name in wanted if options.before or name != "before"]
            if ends - time.monotonic() < figures.LEAST_SECONDS:
                break
            cases = [Case(name, cache, len(wave) == 1, keep, options.before) for name in wanted]
            record["cases"] |= {name: case.record for name, case in zip(wanted, cases, strict=True)}
            together = wave[0].startswith("bits")
            for case in cases:
                case.ready.wait(max(0.0, ends - time.monotonic()))
            for case in cases:
                case.go()
                if not together:
                    finish(case, ends)
            for name, case in zip(wanted, cases, strict=True):
                finish(case, ends)
                print(name, json.dumps(case.record), flush=True)
            keep()


def finish(case: Case, ends: float) -> None:
    """Waits for its end, or ends it when the time is over."""
    try:
        case.process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        case.process.kill()
        case.process.wait()


if __name__ == "__main__":
    main()
