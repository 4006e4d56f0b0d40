"""Where the time of the sampler goes: the kernels of its programs, by name, on one GPU.

    python benchmarks/sampling_profile.py --output FILE.json [--layers N] [--case 8b] [--slots 64 128 256 1]

For each number of slots, prompts of 200 tokens: `prefill` from the first prompt to the first round's tokens, and
`decode`, rounds of eight steps in the middle of 512 new tokens. `lognormal` is a stretch of the benchmark of that name
(benchmarks/sampling.py): rows of unequal lengths over 64 slots, refilled as they end. Each is traced once, after a run
of the same programs. `span_ms` is from the first kernel's begin to the last one's end, `busy_ms` the time in which a
kernel runs, `kernels` the names with the most time: [milliseconds, how many]; `host_ms` is by the clock, the same
stretch without a trace. For decode all are of one step.
"""

from __future__ import annotations

import argparse
import collections
import glob
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from jax.profiler import ProfileData

import jaxtune
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.sampling import CASES, drain, prompts_of, warm_up
from benchmarks.shapes import SHAPES

_ROUNDS = 4  # that are traced
_MOST = 28  # kernels of a table


def kernels(folder: str) -> list[tuple[str, float, float]]:
    """(name, begin, end) in nanoseconds of each kernel and copy on the first GPU in a folder's trace."""
    file = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
    found = []
    for plane in ProfileData.from_file(file).planes:
        if plane.name.startswith("/device:GPU:0"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [(event.name, event.start_ns, event.start_ns + event.duration_ns) for event in line.events]
    return sorted(found, key=lambda kernel: kernel[1])


def table(rows: list[tuple[str, float, float]], per: int) -> dict:
    """The kernels' times by name. per: how many steps they are of."""
    if not rows:
        return {"failed": "the trace has no kernels"}
    total: dict[str, float] = collections.defaultdict(float)
    count, busy, until = collections.Counter(), 0.0, rows[0][1]
    for name, begin, end in rows:
        name = re.sub(r"[._]\d+$", "", name)
        total[name] += end - begin
        count[name] += 1
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    most = {
        name[:90]: [round(ns / 1e6 / per, 4), round(count[name] / per, 2)]
        for name, ns in sorted(total.items(), key=lambda row: -row[1])[:_MOST]
    }
    span = until - rows[0][1]
    return {"span_ms": round(span / 1e6 / per, 4), "busy_ms": round(busy / 1e6 / per, 4), "kernels": most}


def traced(run: Callable[[], None], per: int = 1) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        return table(kernels(folder), per)


def full(model, slots: int) -> dict:
    """`prefill` and `decode` of full slots."""
    prompts, sampler = prompts_of(model, slots), jaxtune.Sampler(model, slots, 712)
    warm_up(sampler, prompts, 512)

    def begin() -> list[int]:
        return [sampler.submit(prompt, 512, 1.0, index=i, eos_token_ids=()) for i, prompt in enumerate(prompts)]

    def first() -> None:
        while not any(piece.ids for piece in sampler.step()):  # rows that were cancelled have last pieces without ids
            pass

    def rounds() -> None:
        made = 0
        while made < _ROUNDS:
            made += bool(sampler.step())

    def end(requests: list[int]) -> None:
        for request in requests:
            sampler.cancel(request)
        drain(sampler)

    requests = begin()
    began = time.perf_counter()
    first()
    found: dict = {"prefill_and_round_host_ms": round(1e3 * (time.perf_counter() - began), 3)}
    end(requests)
    requests = begin()
    found["prefill"] = traced(first)
    while len(sampler._requests[requests[0]].tokens) < 440:
        sampler.step()
    began = time.perf_counter()
    rounds()
    found["decode_host_ms"] = round(1e3 * (time.perf_counter() - began) / (8 * _ROUNDS), 4)
    # Two rounds are in flight when the trace begins, and two more when it ends, so that it has as many as are read.
    found["decode"] = traced(rounds, 8 * _ROUNDS)
    end(requests)
    return found


def lognormal(model) -> dict:
    """A stretch of 60 rounds after the first 120."""
    draw = np.random.default_rng(1)
    limits = np.clip(draw.lognormal(np.log(700) - 0.5 * 0.7**2, 0.7, 400), 8, 2048).astype(int).tolist()
    prompts, sampler = prompts_of(model, 400), jaxtune.Sampler(model, 64, 200 + 2048)
    warm_up(sampler, prompts[:64], 2048)
    for _ in sampler.run(prompts[:80], [16 + 8 * (i % 4) for i in range(80)], 1.0, eos_token_ids=()):
        pass  # the programs by which slots are filled again
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        sampler.submit(prompt, limit, temperature=1.0, index=index, eos_token_ids=())
    for _ in range(120):
        sampler.step()
    times, tokens = [], []
    for _ in range(60):
        began, waiting = time.perf_counter(), sampler.waiting
        tokens.append(sum(len(piece.ids) for piece in sampler.step()))
        times.append((time.perf_counter() - began, waiting - sampler.waiting))
    found: dict = {
        "host_ms_of_a_round": round(1e3 * float(np.mean([took for took, _ in times])), 3),
        "tokens_of_a_round": float(np.mean(tokens)),
        "host_ms_by_refills": [[round(1e3 * took, 2), refills] for took, refills in times],
    }

    def sixty() -> None:
        for _ in range(60):
            sampler.step()

    found["rounds_60"] = traced(sixty)
    for request in list(sampler._requests):
        sampler.cancel(request)
    drain(sampler)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--case", default="8b", choices=[name for name, case in CASES.items() if case.slots])
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--slots", type=int, nargs="*", default=[64, 128, 256, 1], help="full slots; 0: lognormal")
    options = parser.parse_args()
    case = CASES[options.case]
    hf = dict(SHAPES[case.shape] if isinstance(case.shape, str) else case.shape)
    if options.layers:
        hf["num_hidden_layers"] = options.layers
    model = random_model(hf, jax.random.key(0), case.load_in)
    record: dict = {"benchmark": "sampling_profile", "case": options.case, **environment()}
    for slots in options.slots:
        began = time.perf_counter()
        name = f"{slots} slots" if slots else "lognormal"
        record[name] = full(model, slots) if slots else lognormal(model)
        record[name]["seconds"] = round(time.perf_counter() - began, 1)
        write(options.output, record)
        print(name, record[name], flush=True)


if __name__ == "__main__":
    main()
