"""NF4, NVFP4 and FP8 weights against bf16 weights of the same shape, and 8-bit Adam, in one run on one GPU.

    python benchmarks/kernels/quant_matmul.py --output FILE.json [--only TEXT] [--lines TABLE.json]

Both sides are jaxtune's quant_matmul: over an array it is the vendor's GEMM, with the same LoRA (rank 16) through XLA.
"ratio" is bf16 time over the other's. Many tokens: forward and backward to x (and to A and B), wall clock over several
queued calls, the two sides in turns. Few tokens: forward, time of the kernels on the device (CUPTI), over copies of the
weight that together are at least four times the L2. Dequantising and 8-bit Adam: bytes that must move over device
time, as a share of the fastest copy of the run. Products' relative differences are recorded, too.

--lines measures every tile of line_matmul.py (few tokens) beside what is chosen without a table, and adds the fastest
to that table of measured blocks; as the GPU's of jaxtune/pallas/tuned it becomes the choice.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import arguments, compiled, distance, figure, in_turns, normal, queued_ms, record_parts
from jaxtune.pallas import tuning
from jaxtune.pallas.formats import FP8, NF4
from jaxtune.pallas.formats.blockwise8 import dynamic_map
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.pallas.quant_matmul import LoraWeights, line_matmul, mosaic, quant_matmul
from jaxtune.pallas.quant_matmul.shapes import WEIGHTS
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit

L2_BYTES = 60_000_000
RANK = 16
QUEUED = 4  # runs of what is timed by the clock


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


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_nvfp4(rows: int, columns: int, seed) -> NVFP4:
    """Codes and scales drawn at random, as those of a normal weight."""
    codes, scales = jax.random.split(jax.random.key(seed))
    blocks = jax.random.uniform(scales, (rows, columns // 16), jnp.float32, 100, 448)
    return NVFP4(
        jax.random.bits(codes, (rows, columns // 2), jnp.uint8),
        blocks.astype(jnp.float8_e4m3fn),
        jnp.full((1, 1), 30_000.0, jnp.float32),
    )


def copies(rows: int, columns: int, draw: Callable = random_nf4) -> list:
    """Weights that together are at least four times the L2."""
    return [draw(rows, columns, seed) for seed in range(max(2, -(-8 * L2_BYTES // (rows * columns))))]


def copy_gb_per_s(count: int) -> float:
    """Bytes read and written a second of the fastest copy: XLA's elementwise kernel, or a device-to-device memcpy."""
    array = jnp.ones((count,), jnp.bfloat16)
    moved = 2 * array.nbytes
    kernel = compiled(lambda a: a * jnp.bfloat16(1.5), array)
    copy = compiled(jnp.copy, array)
    return max(moved / device_ms(kernel, [(array,)]), moved / queued_ms(copy, array, count=20)) / 1e6


def dequantising(rows: int, columns: int, copy: float, draw: Callable = random_nf4) -> dict:
    weights = copies(rows, columns, draw)
    sides = {
        "kernel": compiled(lambda w: mosaic.dequantize(w, jnp.bfloat16), weights[0]),
        "xla": compiled(lambda w: w.decode(jnp.bfloat16), weights[0]),
    }
    kernel, xla = (program(weights[0]) for program in sides.values())
    ms = {name: device_ms(program, [(w,) for w in weights]) for name, program in sides.items()}
    share = (weights[0].nbytes + 2 * rows * columns) / ms["kernel"] / 1e6 / copy
    return {"shape": [rows, columns], "equal": bool((kernel == xla).all()), "ms": ms, "share_of_copy": share}


def few_tokens(rows: int, columns: int, tokens: int, draw: Callable = random_nf4) -> dict:
    """draw: of rows, columns and a seed."""

    def product(x, weight):
        return quant_matmul(x, [weight])[0]

    packed, x = copies(rows, columns, draw), normal(7, tokens, columns)
    arrays = [normal(seed, rows, columns) for seed in range(-(-2 * L2_BYTES // (rows * columns)))]
    over_array, over_packed = compiled(product, x, arrays[0]), compiled(product, x, packed[0])
    with jax.default_matmul_precision("highest"):
        want = x.astype(jnp.float32) @ packed[0].decode(jnp.float32).T
    times = {
        "bf16": device_ms(over_array, [(x, w) for w in arrays]),
        "codes": device_ms(over_packed, [(x, w) for w in packed]),
    }
    return {
        "shape": [rows, columns],
        "error": distance(over_packed(x, packed[0]), want),
        "ms": times,
        "gb_per_s": packed[0].nbytes / times["codes"] / 1e6,
        "ratio": times["bf16"] / times["codes"],
    }


def tune_lines(rows: int, columns: int, tokens: int, table: Path) -> dict:
    """Adds the fastest tile of a product by lines to the table; {} stands for what is chosen without one."""
    packed, x = copies(rows, columns), normal(7, tokens, columns)

    def prepare():  # one program over all copies; a function of its own each time: jit knows nothing of the tiles
        program = compiled(lambda x, packed: [quant_matmul(x, [w])[0] for w in packed], x, packed)
        return lambda: program(x, packed)

    tiles = [{}, *map(dataclasses.asdict, line_matmul.tiles(rows, columns, tokens))]
    say = functools.partial(print, end="", flush=True)
    return tuning.measure(
        "small_matmul",
        mosaic.small_bucket(packed[0], tokens),
        x.dtype,
        tiles,
        prepare,
        wrong=tuning.as_the_first(),
        say=say,
        path=table,
    )


def many_tokens(rows: int, columns: int, tokens: int, encode: Callable, with_lora: bool) -> dict:
    """encode: of rows, columns; gives the weight in few bits."""

    def both_directions(x, dout, weight, lora):
        def product(x, lora):
            return quant_matmul(x, [weight], [lora], fp8=isinstance(weight, FP8))[0]

        output, pullback = jax.vjp(product, x, lora)
        return output, pullback(dout)

    x, dout, stored, lora = normal(0, tokens, columns), normal(1, tokens, rows), encode(rows, columns), None
    if with_lora:
        a = normal(2, RANK, columns, size=columns**-0.5, dtype=jnp.float32)
        lora = LoraWeights(a, normal(3, rows, RANK, dtype=jnp.float32), None, 2.0)
    sides = {"bf16": (x, dout, stored.decode(jnp.bfloat16), lora), "stored": (x, dout, stored, lora)}
    programs = {name: compiled(both_directions, *given) for name, given in sides.items()}
    results = [jax.tree.leaves(programs[name](*given)) for name, given in sides.items()]
    errors = [distance(got, want) for want, got in zip(*results, strict=True)]
    del results
    ways = {name: functools.partial(queued_ms, programs[name], *given, count=QUEUED) for name, given in sides.items()}
    ms = in_turns(ways, rounds=7)
    return {"shape": [rows, columns], "differences": errors, "ms": ms, "ratio": ms["bf16"] / ms["stored"]}


def adam(count: int, copy: float) -> dict:
    """The 8-bit update of one tensor: reads the gradient and both moments, writes moments, in place, and direction."""
    transform = scale_by_adam_8bit(0.9, 0.999, 1e-8)
    gradients = [jax.random.normal(jax.random.key(i), (count,), jnp.bfloat16) for i in range(2)]
    program = compiled(transform.update, gradients[0], jax.eval_shape(transform.init, gradients[0]), donate_argnums=1)
    state = transform.init(gradients[0])

    def step(gradient):
        nonlocal state
        direction, state = program(gradient, state)
        return direction

    ms = device_ms(step, [(gradient,) for gradient in gradients])
    moved = count * (2 + 4 + 2 * 2) + 4 * 4 * count // 256
    return {"elements": count, "ms": ms, "share_of_copy": moved / ms / 1e6 / copy}


IN_FP8: dict[str, Callable] = {
    "FP8 by rows, with LoRA": lambda rows, columns: FP8.encode(normal(4, rows, columns, size=0.02)),
    "FP8 of 128 x 128, with LoRA": lambda rows, columns: FP8.encode(normal(4, rows, columns, size=0.02), TILE),
}
# Beside NF4, of few tokens.
FEW: dict[str, Callable] = {
    "FP8 by rows": lambda rows, columns, seed: FP8.encode(normal(seed, rows, columns, size=0.02)),
    "FP8 of 128 x 128": lambda rows, columns, seed: FP8.encode(normal(seed, rows, columns, size=0.02), TILE),
    "int8": lambda rows, columns, seed: Int8.encode(normal(seed, rows, columns, size=0.02)),
    "NVFP4": random_nvfp4,
}
# Parts: floor and goal of the geometric mean over the shapes.
BOUNDS = {
    "1 tokens": (2.5, 3.3),
    "16 tokens": (2.0, 3.0),
    "4096 tokens, without LoRA": (0.88, 0.95),
    "4096 tokens, with LoRA": (0.85, 0.95),
    "16384 tokens, without LoRA": (0.95, 0.98),
    "16384 tokens, with LoRA": (0.92, 0.98),
    **{f"16384 tokens, {kind}": () for kind in IN_FP8},
}


def must_show(record: dict) -> Iterator[dict]:
    for name, bounds in BOUNDS.items():
        if name in record:
            mean = statistics.geometric_mean(row["ratio"] for row in record[name])
            kernel = "FP8 product" if "FP8" in name else "NF4 product"
            yield figure(kernel, f"{name}: speed over bf16 weights", mean, *bounds)
    if "dequantise" in record:
        worst = min(row["share_of_copy"] for row in record["dequantise"])
        yield figure("NF4 dequantise", "share of copy bandwidth, worst shape", worst, 0.8, 0.9)
    if "dequantise NVFP4" in record:
        worst = min(row["share_of_copy"] for row in record["dequantise NVFP4"])
        yield figure("NVFP4 dequantise", "share of copy bandwidth, worst shape", worst, 0.8, 0.9)
    if "adam_8bit" in record:
        yield figure("8-bit AdamW", "share of copy bandwidth", record["adam_8bit"]["share_of_copy"], 0.75, 0.9)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--lines", type=Path, metavar="TABLE", help="tiles of the product by lines alone, into this file"
    )
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this, to try the script elsewhere")
    options = parser.parse_args()
    scale = options.scale
    shapes = [(rows // scale, columns // scale) for rows, columns in WEIGHTS]

    def over_shapes(measure: Callable, *rest) -> Callable[[], list[dict]]:
        return lambda: [measure(*shape, *rest) for shape in shapes]

    if options.lines:
        parts = {
            f"{tokens} tokens, each tile": over_shapes(tune_lines, tokens, options.lines) for tokens in (1, 16, 4, 8)
        }
        return record_parts("quant_matmul", options, parts, lambda record: ())
    copy, nf4 = copy_gb_per_s(2**29 // scale**2), functools.partial(random_nf4, seed=0)
    parts: dict[str, Callable] = {"dequantise": over_shapes(dequantising, copy)}
    parts |= {"dequantise NVFP4": over_shapes(dequantising, copy, random_nvfp4)}
    parts |= {"adam_8bit": lambda: adam(2**28 // scale**2, copy)}
    for tokens in (4096, 16384):
        for words, with_lora in (("without", False), ("with", True)):
            parts[f"{tokens} tokens, {words} LoRA"] = over_shapes(many_tokens, tokens // scale, nf4, with_lora)
    for kind, encode in IN_FP8.items():
        parts[f"16384 tokens, {kind}"] = over_shapes(many_tokens, 16384 // scale, encode, True)
    for tokens in (1, 16):
        parts[f"{tokens} tokens"] = over_shapes(few_tokens, tokens)
        parts |= {f"{tokens} tokens, {kind}": over_shapes(few_tokens, tokens, draw) for kind, draw in FEW.items()}
    return record_parts("quant_matmul", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
