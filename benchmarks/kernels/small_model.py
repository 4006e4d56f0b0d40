"""A LoRA training step and decoding steps of a small model: with its kernels, and as plain JAX computes them.

    python benchmarks/kernels/small_model.py --output FILE.json [--only TEXT] [--shape smollm2-135m] [--layers 4]
                                             [--rows 16] [--length 512] [--seconds 60]

The step has a few of the model's layers with random weights and the Trainer's programs, and runs with all kernels
(`kernels`), with a kernel for each adapter's output instead of one for those that share x (`apart`), and with none but
attention's (`XLA`). Each has its milliseconds by the clock of queued steps, those of the device by category, scope and
kernel from a profile, and how far its loss and gradients are from XLA's: with random B's, for all gradients to count.

Decoding is the products of a layer with adapters, a chain of 12 layers, with kernels and by XLA, and how far a layer's
result is from float32. A part that would begin after --seconds is left out, and says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.train import step  # before JAX: it sets the share of the device's memory

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np

import jaxtune.profile
from benchmarks.kernels.timing import arguments, compiled, distance, figure, in_turns, normal, queued_ms, record_parts
from benchmarks.shapes import SHAPES
from jaxtune.pallas import dispatch
from jaxtune.pallas.decode.few_rows import added_norm, gated_product, products
from jaxtune.pallas.quant_matmul import LoraWeights
from jaxtune.pallas.thin_pair import api as thin_pair
from jaxtune.train.program.leaves import Leaves

RANK, STEPS = 16, 30
CHAIN = 12  # layers of a decoding step
TOKENS = (1, 64)  # of a decoding step
ATTENTION = ("attention", "quant_matmul")  # plain JAX computes all else in the way "XLA"
FAR = 0.02  # of gradients, and of a decoding layer, in bfloat16


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Every operation but ATTENTION runs the last implementation of its table, which is plain JAX."""
    choose = dispatch.choose

    def last(op, table, implementation):
        return choose(op, table, implementation if implementation or op in ATTENTION else [*table][-1])

    with mock.patch.object(dispatch, "choose", last):
        yield


WAYS = {
    "kernels": contextlib.nullcontext,
    "apart": lambda: mock.patch.object(thin_pair, "_TOGETHER", 0),
    "XLA": plainly,
}


def with_random_bs(trainable):
    """The trainable weights, of which those that are all zeros are small random numbers."""
    leaves, tree = jax.tree.flatten(trainable)
    numbers = []
    for index, leaf in enumerate(leaves):
        drawn = 0.02 * jax.random.normal(jax.random.key(index), leaf.shape, leaf.dtype)
        numbers.append(leaf if bool(leaf.any()) else jax.device_put(drawn, leaf.sharding))
    return jax.tree.unflatten(tree, numbers)


def train(way: str, options, results: dict) -> dict:
    """results: gets {way: (loss, gradients on the host)}."""
    texts = f"--shape small --rows {options.rows} --length {options.length} --rank {RANK} --micro-batches 1"
    asked = step.arguments().parse_args(texts.split())
    jax.clear_caches()
    with WAYS[way]():
        begun = time.perf_counter()
        trainer = step.build(asked)
        programs = step.compile_step(trainer, asked)
        state, sums, frozen = trainer.model.first_state(trainer.engine)
        trainer.model.release()
        state = dataclasses.replace(state, trainable=with_random_bs(state.trainable))
        rows = trainer.engine.load_step(0)[0]
        state, sums = trainer.engine.flat(state, sums)
        frozen = Leaves.of(frozen)
        programs, sums, frozen, rows = trainer.engine.first_step(programs, sums, state, frozen, rows, 0, print)
        compile_seconds = time.perf_counter() - begun
    results[way] = float(sums.tree.loss), jax.device_get(jax.tree.leaves(sums.tree.gradients))

    def one(number, state, sums):
        del number
        return programs.update(state, trainer.engine.accumulate(programs, sums, state, frozen, rows))

    for number in range(3):
        state, sums, latest = one(number, state, sums)
    float(latest["loss"])
    begun = time.perf_counter()
    for number in range(STEPS):
        state, sums, latest = one(number, state, sums)
    float(latest["loss"])
    ms = (time.perf_counter() - begun) / STEPS * 1e3
    found: dict = {"prepared_seconds": round(compile_seconds, 1), "ms": round(ms, 3)}
    if jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory() as folder:
            step.profiled(folder, one, state, sums)
            found |= step.parts_of(folder)
            kernels = jaxtune.profile.show(folder).kernels
        found["launches"] = round(sum(row.count for row in kernels))
        largest = sorted(kernels, key=lambda row: -row.ms)[:40]
        found["kernels"] = [[row.name, row.scope, row.phase, row.shape, row.count, round(row.ms, 4)] for row in largest]
    return found


def compared(results: dict) -> dict:
    """{way: relative distances from XLA's: of the loss, of all gradients, and the largest of one}."""
    loss, gradients = results["XLA"]
    found = {}
    for way in results.keys() - {"XLA"}:
        pairs = list(zip(results[way][1], gradients, strict=True))
        squares = [(np.square(np.float64(a) - b).sum(), np.square(np.float64(b)).sum()) for a, b in pairs]
        far = float(np.sqrt(sum(square for square, _ in squares) / sum(whole for _, whole in squares)))
        largest = max(float(np.sqrt(square / whole)) for square, whole in squares if whole)
        found[way] = {"loss": abs(results[way][0] / loss - 1), "gradients": far, "largest": largest}
    return found


def decode(tokens: int, options) -> dict:
    shape = SHAPES[options.shape]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {"q": (heads, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, heads)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}

    def layer(seed: int):
        """{name: (weight, a, b)}, and the two norms' weights."""
        matrices = {}
        for number, (name, (out, size)) in enumerate(sizes.items()):
            first = 30 * seed + 3 * number
            scales = (size**-0.5, size**-0.5, 0.02)
            arrays = zip(((out, size), (RANK, size), (out, RANK)), scales, strict=True)
            matrices[name] = [normal(first + i, *dims, size=scale) for i, (dims, scale) in enumerate(arrays)]
        return matrices, normal(30 * seed + 28, hidden), normal(30 * seed + 29, hidden)

    def result(x, layers, way):
        normed = x
        for matrices, first_norm, second_norm in layers:
            weights = {name: weight for name, (weight, _, _) in matrices.items()}
            loras = {name: LoraWeights(a, b, scale=2.0) for name, (_, a, b) in matrices.items()}

            def multiplied(x, *names, weights=weights, loras=loras):
                return products(x, [weights[n] for n in names], [loras[n] for n in names], implementation=way)

            projected = multiplied(normed, "q", "k", "v").sum(0).astype(x.dtype)
            # The values, to each query head of theirs, in place of attention's result.
            attended = jnp.tile(projected[:, heads + keys :], (1, heads // keys))
            x, normed = added_norm(x, multiplied(attended, "o"), first_norm, eps=1e-5)
            gated = gated_product(
                normed, weights["gate"], weights["up"], "silu", [loras["gate"], loras["up"]], implementation=way
            )
            x, normed = added_norm(x, multiplied(gated, "down"), second_norm, eps=1e-5)
        return x

    x, layers = normal(0, tokens, hidden), [layer(seed) for seed in range(1, CHAIN + 1)]
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), (x, layers[:1]))
    exact = jax.jit(functools.partial(result, way="reference"))(*wide)
    programs, found = {}, {}
    for name, way in (("kernels", "triton"), ("XLA", "reference")):
        if way == "triton" and jax.default_backend() != "gpu":
            continue
        program = compiled(functools.partial(result, way=way), x, layers)
        programs[name] = functools.partial(queued_ms, program, x, layers, count=20)
        one = compiled(functools.partial(result, way=way), x, layers[:1])(x, layers[:1])
        found[name] = {"from_float32": round(distance(one, exact), 5)}
    for name, ms in in_turns(programs).items():
        found[name]["us_of_a_layer"] = round(1e3 * ms / CHAIN, 2)
    return found


def must_show(record: dict) -> Iterator[dict]:
    for way, found in record.get("train, from XLA", {}).items():
        if isinstance(found, dict):
            yield figure("small_model", f"gradients with {way} from XLA's", found["gradients"], FAR, at_most=True)
    for tokens in TOKENS:
        found = record.get(f"decode, {tokens} rows", {})
        if "kernels" in found:
            far = found["kernels"]["from_float32"]
            yield figure("small_model", f"a decoding layer of {tokens} rows from float32", far, FAR, at_most=True)
            ratio = found["XLA"]["us_of_a_layer"] / found["kernels"]["us_of_a_layer"]
            yield figure("small_model", f"a decoding layer of {tokens} rows, over XLA's", ratio, 1.0)
    if "ms" in record.get("train, XLA", {}):
        ratio = record["train, XLA"]["ms"] / record["train, kernels"]["ms"]
        yield figure("small_model", "a training step, over XLA's", ratio, 1.0)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=60, help="after which no part begins")
    options = parser.parse_args()
    SHAPES["small"] = SHAPES[options.shape] | {"num_hidden_layers": options.layers}
    begun, results = time.perf_counter(), {}

    def in_time(part: Callable[[], dict]) -> Callable[[], dict]:
        def run():
            late = time.perf_counter() - begun > options.seconds
            return {"left_out": f"after {options.seconds:g} s"} if late else part()

        return run

    def training(way: str) -> dict:
        return {f"train, {way}": in_time(functools.partial(train, way, options, results))}

    decoding = {f"decode, {tokens} rows": in_time(functools.partial(decode, tokens, options)) for tokens in TOKENS}
    parts = {**training("kernels"), **training("XLA"), **decoding, **training("apart")}
    parts["train, from XLA"] = lambda: compared(results) if "XLA" in results else {}
    return record_parts("small_model", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
