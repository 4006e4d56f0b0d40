"""Where the time of a single row's start goes: Llama-3.1-8B, one slot, a prompt of 200 tokens, on one GPU.

    python benchmarks/sampling_start.py --output FILE.json [--layers N]

`steps`: milliseconds of each Sampler.step until the first tokens, of eight starts one after another. `traced`: of one
more start, under a trace: the kernels' gaps of more than 0.2 ms, and what the host's threads and the driver did for
more than 0.2 ms, [name, begin, milliseconds], from the begin of the trace. The record is written after each of them.
"""

from __future__ import annotations

import argparse
import glob
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

import jax
from jax.profiler import ProfileData

import jaxtune
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.sampling import drain, prompts_of, warm_up
from benchmarks.shapes import SHAPES

_LONG = 0.2  # milliseconds


def start(sampler, prompt) -> list[float]:
    """Milliseconds of each step until the first tokens, of `submit` first, and of the next four steps."""
    marks = [time.perf_counter()]
    request = sampler.submit(prompt, 512, temperature=1.0, eos_token_ids=())
    marks.append(time.perf_counter())
    made = 0
    while made < 5:
        made += any(piece.ids for piece in sampler.step())
        marks.append(time.perf_counter())
    sampler.cancel(request)
    drain(sampler)
    return [round(1e3 * (after - before), 2) for before, after in itertools.pairwise(marks)]


def traced(run) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        run()
        jax.profiler.stop_trace()
        file = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
        lines = [
            (plane.name, line.name, [(e.name, e.start_ns / 1e6, e.duration_ns / 1e6) for e in line.events])
            for plane in ProfileData.from_file(file).planes
            for line in plane.lines
        ]
    begun = min(begin for _, _, events in lines for _, begin, _ in events)
    kernels, host = [], {}
    for plane, line, events in lines:
        if plane.startswith("/device:GPU:0") and line.startswith("Stream"):
            kernels += events
        elif plane.startswith("/host"):
            long = [[name[:120], round(at - begun, 2), round(ms, 2)] for name, at, ms in events if ms > _LONG]
            if long:
                host[f"{plane} {line}"] = sorted(long, key=lambda event: event[1])[:120]
    gaps, until, last = [], None, ""
    for name, at, ms in sorted(kernels, key=lambda event: event[1]):
        if until is not None and at - until > _LONG:
            gaps.append([f"{last[:60]} -> {name[:60]}", round(until - begun, 2), round(at - until, 2)])
        if until is None:
            gaps.append([f"first {name[:60]}", round(at - begun, 2), 0.0])
        if until is None or at + ms > until:
            until, last = at + ms, name
    return {"gaps": gaps, "last": None if until is None else round(until - begun, 2), "host": host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    options = parser.parse_args()
    hf = dict(SHAPES["llama-3.1-8b"])
    if options.layers:
        hf["num_hidden_layers"] = options.layers
    began = time.perf_counter()
    model = random_model(hf, jax.random.key(0), None)
    record: dict = {"benchmark": "sampling_start", "layers": options.layers, **environment()}
    sampler = jaxtune.Sampler(model, 1, 712)
    prompts = prompts_of(model, 1)
    warm_up(sampler, prompts, 512)
    record["seconds_before"] = round(time.perf_counter() - began, 1)
    record["steps"] = []
    for _ in range(8):
        record["steps"].append(start(sampler, prompts[0]))
    print(record["steps"], flush=True)
    write(options.output, record)
    record["traced"] = traced(lambda: start(sampler, prompts[0]))
    write(options.output, record)
    print(record["traced"]["gaps"], flush=True)


if __name__ == "__main__":
    main()
