"""What the benchmarks of kernels share: operands, times, and a record that is written after every part of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.record import environment, write

OPTIONS = {"xla_gpu_enable_triton_gemm": False}  # as the train step: every product goes to cuBLASLt


def queued_ms(function: Callable, *arguments, count: int, wait: Callable = jax.block_until_ready) -> float:
    """Milliseconds of a call, of `count` queued together after one that is not timed."""
    wait(function(*arguments))
    begun = time.perf_counter()
    for _ in range(count):
        result = function(*arguments)
    wait(result)
    return (time.perf_counter() - begun) / count * 1e3


def median_ms(function: Callable, *arguments, count: int = 16, wait: Callable = jax.block_until_ready) -> float:
    """Of five `queued_ms`."""
    return round(statistics.median(queued_ms(function, *arguments, count=count, wait=wait) for _ in range(5)), 4)


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int = 5) -> dict[str, float]:
    """Median of what each of them returns, called in turns: the longer a GPU works, the slower it gets."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measured in ways.items():
            times[name].append(measured())
    return {name: statistics.median(took) for name, took in times.items()}


def beside_xla(
    programs: Mapping[str, Callable[[], float]],
    results: Mapping[str, Any],
    calls: int,
    moved: Callable[[str], float],
    copy: float,
) -> dict[str, dict[str, float]]:
    """Runs programs in turns. {name: `ms` of one call; `of_copy`, the bytes that must move per second as a share of a
    copy's; `from_xla`, the distance of its results from those of XLA's program, where there are results}.

    A name ends with "XLA" or with a tile, after what is computed and a comma, if there is more than one such thing.

    Args:
      programs: {name: function that returns the milliseconds of a program}.
      results: {name: the arrays that one call gives}.
      calls: how many calls a program makes.
      moved: from a name to the bytes that a call must read and write.
      copy: GB/s of the fastest copy.
    """
    found = {}
    for name, took in in_turns(programs).items():
        ms = took / calls
        found[name] = {"ms": round(ms, 4), "of_copy": round(moved(name) / ms / 1e6 / copy, 3)}
        if name in results:
            what, _, _ = name.rpartition("XLA" if name.endswith("XLA") else "(")
            pairs = zip(jax.tree.leaves(results[name]), jax.tree.leaves(results[what + "XLA"]), strict=True)
            found[name]["from_xla"] = round(max(distance(one, other) for one, other in pairs), 6)
    return found


def normal(seed: int, *shape: int, size: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    return (size * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def distance(got: jax.Array, want: jax.Array) -> float:
    """Relative error by the Frobenius norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@jax.jit
def _checksums(tree) -> list[jax.Array]:
    """uint32 of each array: of all bits, each weighed by its place."""

    def checksum(array):
        width = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(array, width).reshape(-1).astype(jnp.uint32)
        return (bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32)

    return [checksum(array) for array in jax.tree.leaves(tree)]


def same_bits(function: Callable[[], Any], runs: int = 20) -> bool:
    """Whether all runs give the same arrays, bit for bit."""
    found = [_checksums(function()) for _ in range(runs)]
    return len({tuple(map(int, run)) for run in jax.device_get(found)}) == 1


def compiled(function: Callable, *arguments, options: Mapping[str, Any] | None = None, **jit):
    """The program of a function for these arguments. options: the compiler's, on a GPU; default: the train step's."""
    given = OPTIONS if options is None else options
    lowered = jax.jit(function, **jit).lower(*arguments)
    return lowered.compile(compiler_options=dict(given) if jax.default_backend() == "gpu" else None)


def torch_on_gpu():
    """torch, where it is installed and sees a GPU; else None."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def figure(
    kernel: str, what: str, value: float, floor: float | None = None, goal: float | None = None, at_most: bool = False
) -> dict:
    """What a kernel is held to, as `must_show` of a record has it; at_most: less is better."""
    return dict(kernel=kernel, what=what, value=round(value, 4), floor=floor, goal=goal, at_most=at_most)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", default="", metavar="TEXT", help="parts that have this in their name")
    return parser


def record_parts(
    name: str,
    options: argparse.Namespace,
    parts: Mapping[str, Callable[[], Any]],
    must_show: Callable[[dict], Iterable[dict]],
) -> int:
    """Runs the parts one after the other. The record {name of a part: what it returned} is written after each, with
    what must be shown of those that ran: a kernel that hangs costs only its own part.

    must_show: of a record that may lack parts, its `figure`s.
    """
    record: dict = {"benchmark": f"kernels/{name}", **environment()}
    begun = time.perf_counter()
    for key, measure in parts.items():
        if options.only in key:
            record[key] = measure()
            record["must_show"] = list(must_show(record))
            write(options.output, record)
            print(f"{time.perf_counter() - begun:6.1f} s  {key}: {json.dumps(record[key], default=str)}", flush=True)
    for row in record.get("must_show", ()):
        print(json.dumps(row), flush=True)
    return 0
