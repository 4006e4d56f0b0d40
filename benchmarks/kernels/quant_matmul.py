"""NF4 weights against bf16 weights of the same shape, in one run on one GPU.

    python benchmarks/kernels/quant_matmul.py --output FILE.json [--parts bandwidth,many,few,lines] [--table FILE]

Both sides are jaxtune's quant_matmul: over an array it is the vendor's GEMM, with the same LoRA (rank 16) through XLA.
"ratio" is bf16 time over NF4 time. Many tokens: forward and backward to x (and to A and B), wall clock over several
queued calls, the two sides in turns. Few tokens: forward, time of the kernels on the device (CUPTI), over copies of the
weight that together are at least four times the L2. Dequantising and 8-bit Adam: bytes that must move over device
time, as a share of the fastest copy of the run. Every case is checked first.

A part that is no record but a decision, by name only: "lines" (few tokens) measures every tile of line_matmul.py beside
what is chosen today. --table writes the GPU's table of measured
blocks (jaxtune/pallas/tuned) with what was fastest; there it becomes the choice. What was measured is written after
each part: a kernel that hangs costs only its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import resources
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import queued_ms
from benchmarks.record import environment, write
from jaxtune.pallas import dispatch, tuning
from jaxtune.pallas.formats import NF4, blockwise8
from jaxtune.pallas.formats.blockwise8 import dynamic_map
from jaxtune.pallas.quant_matmul import LoraWeights, line_matmul, mosaic, quant_matmul
from jaxtune.pallas.quant_matmul.shapes import WEIGHTS
from jaxtune.train.adam8 import scale_by_adam_8bit

OPTIONS = {"xla_gpu_enable_triton_gemm": False}  # as the train step: every product goes to cuBLASLt
L2_BYTES = 60_000_000
RANK = 16
COMPILERS = 8
QUEUED = 4  # runs of what is timed by the clock
WORST = 0.01  # relative error of a 16-bit product: more is a wrong kernel
RECORD, DECISIONS = ("bandwidth", "many", "few"), ("lines",)


def compiled(function, *arguments, **options):
    # A function of its own for each trace: the blocks in force are no part of what jit knows it by.
    lowered = jax.jit(lambda *a: function(*a), **options).lower(*arguments)
    return lowered.compile(compiler_options=OPTIONS if jax.default_backend() == "gpu" else None)


def device_ms(program, argument_sets, rounds: int = 3) -> float:
    """Mean time of a call's kernels on the device; wall clock where there is no CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    jax.block_until_ready([program(*arguments) for arguments in argument_sets])
    cupti = getattr(profiler.mosaic_gpu_lib, "_mosaic_gpu_ext", None) if jax.default_backend() == "gpu" else None
    if cupti is not None:
        cupti._cupti_init()
    begun = time.perf_counter()
    results = [program(*arguments) for _ in range(rounds) for arguments in argument_sets]
    jax.block_until_ready(results)
    total = (time.perf_counter() - begun) * 1e3
    if cupti is not None:
        total = sum(ms for _, ms in cupti._cupti_get_timings(True))
    return total / rounds / len(argument_sets)


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_nf4(rows: int, columns: int, seed) -> NF4:
    """Codes, absmax codes and nested absmax drawn at random: what quantising a normal weight would give, sooner."""
    codes, absmax, nested = jax.random.split(jax.random.key(seed), 3)
    blocks = rows * columns // 64
    return NF4(
        jax.random.bits(codes, (rows * columns // 2,), jnp.uint8),
        jax.random.bits(absmax, (blocks,), jnp.uint8),
        jax.random.uniform(nested, (-(-blocks // 256),), jnp.float32, 0.005, 0.01),
        jnp.asarray(dynamic_map(signed=True)),
        jnp.float32(0.03),
        (rows, columns),
        "bfloat16",
    )


def distance(got, want) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def copy_gb_per_s(count: int) -> float:
    """Bytes read and written a second of the fastest copy: XLA's elementwise kernel, or a device-to-device memcpy."""
    array = jnp.ones((count,), jnp.bfloat16)
    moved = 2 * array.nbytes
    kernel = compiled(lambda a: a * jnp.bfloat16(1.5), array)
    copy = compiled(jnp.copy, array)
    return max(moved / device_ms(kernel, [(array,)]), moved / queued_ms(copy, array, count=20)) / 1e6


def dequantising(rows: int, columns: int, copy: float) -> dict:
    weights = [random_nf4(rows, columns, seed) for seed in range(max(2, -(-4 * L2_BYTES // (rows * columns // 2))))]
    program = compiled(lambda w: mosaic.dequantize(w, jnp.bfloat16), weights[0])
    plain = compiled(lambda w: w.decode(jnp.bfloat16), weights[0])
    moved = weights[0].nbytes + 2 * rows * columns
    same = bool((program(weights[0]) == plain(weights[0])).all())
    times = {"kernel": device_ms(program, [(w,) for w in weights]), "xla": device_ms(plain, [(w,) for w in weights])}
    rates = {name: moved / ms / 1e6 for name, ms in times.items()}
    return {
        "shape": [rows, columns],
        "equal_to_decode": same,
        "ms": times,
        "gb_per_s": rates,
        "share_of_copy": rates["kernel"] / copy,
    }


def variants(tiles: Sequence, run: Callable, arguments: Sequence[tuple], want) -> list[dict]:
    """Each tile's error and device time over all of `arguments`; why not, where it does not run or is wrong.

    run: (tile, *arguments) -> the product; want: that of the first arguments.
    """
    found = []
    with ThreadPoolExecutor(COMPILERS) as pool:
        programs = [pool.submit(compiled, functools.partial(run, tile), *arguments[0]) for tile in tiles]
        wait(programs)  # nothing compiles while another one is timed
    for tile, waiting in zip(tiles, programs, strict=True):
        row: dict[str, Any] = {"tile": dataclasses.asdict(tile)}
        print("   ", tile, flush=True)
        try:
            program = waiting.result()
            row["error"] = distance(program(*arguments[0]), want)
            row |= {"ms": device_ms(program, arguments)} if row["error"] <= WORST else {"refused": "wrong"}
        except Exception as error:  # what does not fit this GPU is a finding
            row["refused"] = f"{type(error).__name__}: {str(error)[:200]}"
        found.append(row)
    return found


def fastest(untuned_ms: float, found: list[dict]) -> dict:
    """The table's entry: the blocks of the fastest variant, or {} where what is chosen without a table is faster."""
    tried = [[{}, untuned_ms], *([row["tile"], row.get("ms", row.get("refused"))] for row in found)]
    blocks, ms = min((pair for pair in tried if isinstance(pair[1], float)), key=lambda pair: pair[1])
    return {"blocks": blocks, "milliseconds": ms, "tried": tried}


def few_tokens(rows: int, columns: int, tokens: int, with_tiles: bool) -> dict:
    def product(x, weight):
        return quant_matmul(x, [weight])[0]

    def by_lines(tile, x, weight):
        return mosaic.small_matmul(x, weight, tile)

    size = rows * columns
    arrays = [
        jax.random.normal(jax.random.key(i), (rows, columns), jnp.bfloat16)
        for i in range(-(-4 * L2_BYTES // (2 * size)))
    ]
    packed = [random_nf4(rows, columns, i) for i in range(-(-4 * L2_BYTES * 2 // size))]
    x = jax.random.normal(jax.random.key(7), (tokens, columns), jnp.bfloat16)
    over_array, over_packed = compiled(product, x, arrays[0]), compiled(product, x, packed[0])
    with jax.default_matmul_precision("highest"):
        want = x.astype(jnp.float32) @ packed[0].decode(jnp.float32).T
    errors = {
        "kernel": distance(over_packed(x, packed[0]), want),
        "xla": distance(x @ packed[0].decode(jnp.bfloat16).T, want),
    }
    times = {
        "bf16": device_ms(over_array, [(x, w) for w in arrays]),
        "nf4": device_ms(over_packed, [(x, w) for w in packed]),
    }
    row = {
        "shape": [rows, columns],
        "tokens": tokens,
        "errors": errors,
        "ms": times,
        "nf4_gb_per_s": packed[0].nbytes / times["nf4"] / 1e6,
        "ratio": times["bf16"] / times["nf4"],
    }
    if not with_tiles:
        return row
    with tuning.forced("small_matmul", {}):  # whatever a table says
        untuned = device_ms(compiled(product, x, packed[0]), [(x, w) for w in packed])
    found = variants(line_matmul.tiles(rows, columns, tokens), by_lines, [(x, w) for w in packed], want)
    entry = fastest(untuned, found)
    return row | {
        "variants": found,
        "best_ratio": times["bf16"] / entry["milliseconds"],
        "table": {tuning._key("small_matmul", mosaic.small_bucket(packed[0], tokens), x.dtype): entry},
    }


def many_tokens(rows: int, columns: int, tokens: int, with_lora: bool) -> dict:
    def both_directions(x, dout, weight, lora):
        output, pullback = jax.vjp(lambda x, lora: quant_matmul(x, [weight], [lora])[0], x, lora)
        return output, pullback(dout)

    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, columns), jnp.bfloat16)
    dout = jax.random.normal(keys[1], (tokens, rows), jnp.bfloat16)
    packed = random_nf4(rows, columns, 0)
    lora = None
    if with_lora:
        a, b = (jax.random.normal(k, s, jnp.float32) for k, s in zip(keys[2:], ((RANK, columns), (rows, RANK))))
        lora = LoraWeights(a * columns**-0.5, b, None, 2.0)
    sides = {"bf16": (x, dout, packed.decode(jnp.bfloat16), lora), "nf4": (x, dout, packed, lora)}
    programs = {name: compiled(both_directions, *arguments) for name, arguments in sides.items()}
    results = [jax.tree.leaves(programs[name](*arguments)) for name, arguments in sides.items()]
    errors = [distance(got, want) for want, got in zip(*results, strict=True)]
    del results
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(7):
        for name, arguments in sides.items():
            times[name].append(queued_ms(programs[name], *arguments, count=QUEUED))
    ratios = [sixteen / four for sixteen, four in zip(times["bf16"], times["nf4"], strict=True)]
    return {
        "shape": [rows, columns],
        "tokens": tokens,
        "lora": with_lora,
        "differences": errors,
        "ms": {name: statistics.median(each) for name, each in times.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def adam(count: int, copy: float) -> dict:
    """The 8-bit update of one tensor: reads the gradient and both moments, writes moments, in place, and direction."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    transform = scale_by_adam_8bit(beta1, beta2, eps)
    gradients = [jax.random.normal(jax.random.key(i), (count,), jnp.bfloat16) for i in range(2)]
    program = compiled(transform.update, gradients[0], jax.eval_shape(transform.init, gradients[0]), donate_argnums=1)
    _, state = program(gradients[0], transform.init(gradients[0]))

    @jax.jit
    def written_out(gradient, state):
        g = blockwise8.in_blocks(gradient)
        m = beta1 * blockwise8.decode(state.m, state.m_absmax, signed=True) + (1 - beta1) * g
        v = beta2 * blockwise8.decode(state.v, state.v_absmax, signed=False) + (1 - beta2) * g * g
        direction = m / (1 - beta1**2) / (jnp.sqrt(v / (1 - beta2**2)) + eps)
        codes = blockwise8.encode(m, signed=True)[0], blockwise8.encode(v, signed=False)[0]
        return direction.reshape(-1), *codes

    want, *codes = written_out(gradients[1], state)
    direction, state = program(gradients[1], state)
    other_codes = [float((got != want).mean()) for got, want in zip((state.m, state.v), codes, strict=True)]
    error = distance(direction, want)
    del direction, want, codes

    def step(gradient):
        nonlocal state
        direction, state = program(gradient, state)
        return direction

    ms = device_ms(step, [(gradient,) for gradient in gradients])
    moved = count * (2 + 4 + 2 * 2) + 4 * 4 * count // 256
    return {
        "elements": count,
        "direction_difference": error,
        "codes_that_differ": other_codes,
        "ms": ms,
        "gb_per_s": moved / ms / 1e6,
        "share_of_copy": moved / ms / 1e6 / copy,
    }


def summary(rows: list[dict], which: str = "ratio") -> dict:
    ratios = [row[which] for row in rows]
    return {"geometric_mean": math.exp(statistics.mean(map(math.log, ratios))), "worst": min(ratios)}


# Tokens and adapters: floor and goal of the geometric mean over the shapes.
BOUNDS = {
    "1 tokens": (2.5, 3.3), "16 tokens": (2.0, 3.0), "4096 tokens, without LoRA": (0.88, 0.95),
    "4096 tokens, with LoRA": (0.85, 0.95), "16384 tokens, without LoRA": (0.95, 0.98),
    "16384 tokens, with LoRA": (0.92, 0.98),
}  # fmt: skip


def must_show(record: dict) -> list[dict]:
    """What the kernels are held to: [{kernel, what, value, floor, goal, at_most}] of what was measured."""
    rows = [
        ("NF4 product", f"{case}: speed over bf16 weights", record["summary"][case]["geometric_mean"], floor, goal)
        for case, (floor, goal) in BOUNDS.items()
        if case in record["summary"]
    ]
    if "adam_8bit" in record:
        worst = min(entry["share_of_copy"] for entry in record["dequantise"])
        rows += [
            ("NF4 dequantise", "share of copy bandwidth, worst shape", worst, 0.8, 0.9),
            ("8-bit AdamW", "share of copy bandwidth", record["adam_8bit"]["share_of_copy"], 0.75, 0.9),
        ]
    return [dict(zip(("kernel", "what", "value", "floor", "goal"), row)) | {"at_most": False} for row in rows]


def write_table(path: str, entries: dict) -> None:
    """The packaged table of this GPU with these entries in it."""
    name = tuning._file_name(jax.devices()[0].device_kind)
    packaged = resources.files("jaxtune.pallas") / "tuned" / name
    table = json.loads(packaged.read_text(encoding="utf-8")) if packaged.is_file() else {"entries": {}}
    write(path, table | {"entries": table["entries"] | entries})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--parts", default=",".join(RECORD), help="of the run, by commas")
    parser.add_argument("--table", help="file for the table of measured blocks with what was fastest in this run")
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this, to try the script elsewhere")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if set(parts) - {*RECORD, *DECISIONS}:
        parser.error(f"--parts {options.parts}: there are {', '.join((*RECORD, *DECISIONS))}")
    scale = options.scale
    shapes = [(rows // scale, columns // scale) for rows, columns in WEIGHTS]
    copy = copy_gb_per_s(2**29 // scale**2)
    record = {"benchmark": "kernels/quant_matmul", **environment(), "copy_gb_per_s": copy}
    record |= {"products": [], "summary": {}}
    print(f"copy {copy:.0f} GB/s", flush=True)

    def keep(name: str, rows: list[dict]) -> None:
        record["products"] += rows
        record["summary"][name] = summary(rows)
        if "best_ratio" in rows[0]:
            record["summary"][f"{name}, fastest tiles"] = summary(rows, "best_ratio")
        shown = {key: value for key, value in record["summary"].items() if key.startswith(name)}
        print(name, [round(row["ratio"], 3) for row in rows], shown, flush=True)
        record["must_show"] = must_show(record)
        record["implementation"] = dispatch.record["quant_matmul"]
        write(options.output, record)
        if options.table:
            write_table(options.table, {k: v for row in record["products"] for k, v in row.get("table", {}).items()})

    if "bandwidth" in parts:
        record["dequantise"] = [dequantising(*shape, copy) for shape in shapes]
        for row in record["dequantise"]:
            print(row["shape"], row["equal_to_decode"], f"{row['share_of_copy']:.3f} of copy", row["ms"], flush=True)
        record["adam_8bit"] = adam(2**28 // scale**2, copy)
        print("8-bit Adam", record["adam_8bit"], flush=True)
        record["must_show"] = must_show(record)
        write(options.output, record)
    if "many" in parts:
        for tokens in (4096, 16384):
            for with_lora in (False, True):
                rows = [many_tokens(*shape, tokens // scale, with_lora) for shape in shapes]
                keep(f"{tokens} tokens, {'with' if with_lora else 'without'} LoRA", rows)
    if "few" in parts:
        for tokens in (1, 16):
            keep(f"{tokens} tokens", [few_tokens(*shape, tokens, False) for shape in shapes])
    if "lines" in parts:
        for tokens in (1, 16, 4, 8):
            keep(f"{tokens} tokens, each tile", [few_tokens(*shape, tokens, True) for shape in shapes])
    print(json.dumps(record["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
