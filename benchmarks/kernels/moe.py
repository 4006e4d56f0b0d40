"""The mixture of experts, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/moe.py --output FILE.json [--only TEXT]

gpt-oss-20b (32 experts, 4 a token, 2,880 x 2,880) and Qwen3-30B-A3B (128 experts, 8 a token, 2,048 x 768) at 16,384
tokens in bf16, with a balanced router and with one after Zipf (expert e is as likely as 1 / (e + 1)). A grouped
product is measured beside a dense product of the vendor's with as many rows as there are pairs and
`torch._grouped_mm` over rows without gaps; experts in four bits and in FP8 beside bf16 ones. The gradients of experts'
weights, of Qwen1.5-MoE-A2.7B too, are measured beside XLA's, which adds up tiles, and the same two.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")  # the rest is torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.timing import (
    arguments,
    figure,
    in_turns,
    normal,
    queued_ms,
    record_parts,
    torch_on_gpu,
)
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8, MXFP4, NF4
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_matmul, mosaic, mosaic_contract, reference
from jaxtune.pallas.routing import choose_experts, route

TOKENS = 16_384
RANK = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's experts. products: {name: (in, out)}"""

    name: str
    experts: int
    k: int
    hidden: int
    inner: int
    gpt_oss: bool

    @property
    def products(self):
        return {"gate_up": (self.hidden, 2 * self.inner), "down": (self.inner, self.hidden)}


SHAPES = (Shape("gpt-oss-20b", 32, 4, 2880, 2880, True), Shape("qwen3-30b-a3b", 128, 8, 2048, 768, False))
TRAINED = (Shape("qwen1.5-moe-a2.7b", 60, 4, 2048, 1408, False), *SHAPES)  # whose weights' gradients are measured


def choices(shape: Shape, zipf: bool, tokens: int, seed: int = 0) -> jax.Array:
    """int32[tokens, k]: without replacement, by the Gumbel trick."""
    noise = jax.random.gumbel(jax.random.key(seed), (tokens, shape.experts))
    if zipf:
        noise = noise - jnp.log(jnp.arange(1, shape.experts + 1))
    return choose_experts(noise, shape.k)


# Runs in a queue: of four, what it takes to start the first was a tenth of the time.
_queued = functools.partial(queued_ms, count=16)


# ---- grouped products. Jitted here, once: balanced and uneven groups have the same shapes, and are the same programs.


@functools.partial(jax.jit, static_argnums=3)
def _product(x, weight, groups, contract):
    return mosaic.product(x, weight, groups, contract)


@functools.partial(jax.jit, static_argnums=2)
def _dense(x, weight, contract):
    return jax.lax.dot_general(x, weight, (((1,), (contract - 1,)), ((), ())))


_route = jax.jit(route, static_argnums=1)


def operands(shape: Shape, name: str, zipf: bool, tokens: int):
    """The groups of a routing; x [rows, in], dout [rows, out] and weight of a product."""
    groups = _route(choices(shape, zipf, tokens), shape.experts).groups
    in_size, out_size = shape.products[name]
    pair = (in_size, out_size) if shape.gpt_oss else (out_size, in_size)
    weight = normal(3, shape.experts, *pair, size=in_size**-0.5)
    return groups, normal(1, groups.rows, in_size), normal(2, groups.rows, out_size), weight


def timed(ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    return {f"{way}_ms": took for way, took in in_turns(ways).items()}


def products(shape: Shape, name: str, zipf: bool, tokens: int) -> dict:
    """Forward and dx: ours, a dense product with as many rows as there are pairs, torch._grouped_mm over rows without
    gaps."""
    groups, x, dout, weight = operands(shape, name, zipf, tokens)
    pairs = tokens * shape.k
    result: dict = {"rows": groups.rows, "pairs": pairs, "tiles_in_use": int(groups.count)}
    for direction, left, contract in (
        ("forward", x, 1 if shape.gpt_oss else 2),
        ("dx", dout, 2 if shape.gpt_oss else 1),
    ):
        ways = {
            "dense": functools.partial(_queued, _dense, left[:pairs], weight[0], contract),
            "ours": functools.partial(_queued, _product, left, weight, groups, contract),
        }
        ways |= _torch_grouped(np.asarray(groups.sizes), left.shape[1], weight.shape[1:], contract)
        found = timed(ways)
        result[direction] = found | {"tflops": 2 * pairs * weight[0].size / found["ours_ms"] / 1e9}
    return result


def _torch_grouped(sizes: np.ndarray, columns: int, weight_shape, contract: int) -> dict[str, Callable]:
    """{"torch": a time of torch._grouped_mm over rows of its own}; nothing where there is no torch with a GPU."""
    torch = torch_on_gpu()
    if torch is None:
        return {}
    options = dict(device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    left = torch.randn(int(sizes.sum()), columns, **options)
    weight = torch.randn(len(sizes), *weight_shape, **options)
    product = functools.partial(torch._grouped_mm, left, weight if contract == 1 else weight.mT, offs=offsets)
    return {"torch": functools.partial(_queued, product, wait=lambda _: torch.cuda.synchronize())}


@functools.partial(jax.jit, static_argnums=3)
def _gradient(left, right, groups, kernel):
    product = mosaic_contract.weight_gradient if kernel else reference.contract_rows
    return product(left, right, groups, jnp.bfloat16)


@jax.jit
def _dense_gradient(left, right):
    return jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())))


def gradients(shape: Shape, name: str, zipf: bool, tokens: int) -> dict:
    """The gradient of the weights: ours, XLA's, which adds the product of each tile to a float32 sum, a dense product
    over as many rows as there are pairs, torch._grouped_mm over rows without gaps."""
    groups, x, dout, _ = operands(shape, name, zipf, tokens)
    left, right = (x, dout) if shape.gpt_oss else (dout, x)
    pairs = tokens * shape.k
    ways = {
        "dense": functools.partial(_queued, _dense_gradient, left[:pairs], right[:pairs]),
        "ours": functools.partial(_queued, _gradient, left, right, groups, True),
        "xla": functools.partial(_queued, _gradient, left, right, groups, False),
    }
    ways |= _torch_gradient(np.asarray(groups.sizes), left.shape[1], right.shape[1])
    found = timed(ways)
    tflops = 2 * pairs * left.shape[1] * right.shape[1] / found["ours_ms"] / 1e9
    return {"rows": groups.rows, "pairs": pairs, **found, "tflops": tflops}


def _torch_gradient(sizes: np.ndarray, left_size: int, right_size: int) -> dict[str, Callable]:
    """As _torch_grouped, of the gradient [E, left_size, right_size]."""
    torch = torch_on_gpu()
    if torch is None:
        return {}
    options = dict(device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    left, right = (torch.randn(int(sizes.sum()), size, **options) for size in (left_size, right_size))
    product = functools.partial(torch._grouped_mm, left.mT, right, offs=offsets)
    return {"torch": functools.partial(_queued, product, wait=lambda _: torch.cuda.synchronize())}


@functools.partial(jax.jit, static_argnames=("implementation", "transposed", "fp8"))
def _both_ways(x, weight, groups, dout, lora, implementation, transposed, fp8):
    options = dict(transposed=transposed, implementation=implementation, fp8=fp8)
    out, pullback = jax.vjp(lambda x: grouped_matmul(x, weight, groups, lora, **options), x)
    return out, *pullback(dout)


def few_bits(shape: Shape, name: str, kind: str, tokens: int) -> dict:
    """Experts in few bits beside bf16 ones: forward and dx. NF4 and MXFP4 are decoded before the product and ahead of
    it; FP8 is decoded before it, or multiplies as it is stored, with scales by rows and of 128 x 128 (where these
    divide the sizes), with an adapter on either side."""
    groups, x, dout, weight = operands(shape, name, False, tokens)
    in_size, out_size = shape.products[name]
    # MXFP4 is stored as [E, out, in]; bf16 is measured in the same direction.
    transposed = shape.gpt_oss and kind != "mxfp4"
    array = weight if transposed == shape.gpt_oss else weight.mT
    lora = None
    if kind == "fp8":
        a = normal(4, shape.experts, RANK, in_size, size=in_size**-0.5)
        lora = GroupedLora(a, normal(5, shape.experts, out_size, RANK))
        ways = {"bf16": (array, None, False)} | {
            way: (FP8.encode(array), None, way == "rows") for way in ("rows", "decoded")
        }
        if in_size % 128 == out_size % 128 == 0:
            ways["blocks"] = (FP8.encode(array, TILE), None, True)
    else:
        stored = NF4.encode(array) if kind == "nf4" else _mxfp4(array.shape)
        ways = {"bf16": (array, "mosaic", False), "decoded": (stored, "mosaic", False)}
        ways["ahead"] = (stored, "mosaic_ahead", False)
    calls = {
        way: functools.partial(_queued, _both_ways, x, side, groups, dout, lora, implementation, transposed, fp8)
        for way, (side, implementation, fp8) in ways.items()
    }
    return timed(calls) | {"chosen": {op: chosen for op, chosen in dispatch.record.items() if "experts" in op}}


@functools.partial(jax.jit, static_argnums=0)
def _mxfp4(shape) -> MXFP4:
    keys = jax.random.split(jax.random.key(7))
    codes = jax.random.bits(keys[0], (*shape[:-1], shape[-1] // 2), jnp.uint8)
    return MXFP4(codes, jax.random.randint(keys[1], (*shape[:-1], shape[-1] // 32), 116, 122).astype(jnp.uint8))


# (kind, way, in words, (floor, goal))
EXPERTS = (
    ("nf4", "ahead", "NF4", (0.85, 0.95)),
    ("nf4", "decoded", "NF4 decoded before", ()),
    ("mxfp4", "ahead", "MXFP4", (0.85, 0.95)),
    ("mxfp4", "decoded", "MXFP4 decoded before", ()),
    ("fp8", "rows", "FP8 by rows", ()),
    ("fp8", "blocks", "FP8 of 128 x 128", ()),
    ("fp8", "decoded", "FP8 decoded before", ()),
)


def must_show(record: dict) -> Iterator[dict]:
    """Of each model, the worse of its two products."""
    for model in (shape.name for shape in TRAINED):

        def parts(kind: str, ends: Sequence[str], model=model) -> list[dict]:
            """Those of the model, or none where one was not measured."""
            found = [record.get(f"{kind} {model} {end}") for end in ends]
            return [part for part in found if part is not None] if None not in found else []

        def worse(found: list[dict], slow: str, fast: str) -> float | None:
            """Speed of `fast` over that of `slow`; either may be missing."""
            found = [part for part in found if {f"{slow}_ms", f"{fast}_ms"} <= part.keys()]
            return min((part[f"{slow}_ms"] / part[f"{fast}_ms"] for part in found), default=None)

        names, modes = ("gate_up", "down"), ("balanced", "zipf")
        for mode, floors in zip(modes, ((0.8, 0.92), (0.7, 0.85)), strict=True):
            found = parts("products", [f"{name} {mode}" for name in names])
            others = (("dense", "a dense product", floors), ("torch", "torch's grouped product", (1.0, 1.2)))
            for (key, other, bounds), way in itertools.product(others, ("forward", "dx")):
                if value := worse([part[way] for part in found], key, "ours"):
                    what = f"{model}, {mode}, {way}: speed over {other}, worse of two"
                    yield figure("grouped product", what, value, *bounds)
            found = parts("gradients", [f"{name} {mode}" for name in names])
            for key, other in (("dense", "a dense product"), ("torch", "torch's grouped product"), ("xla", "XLA")):
                if value := worse(found, key, "ours"):
                    what = f"{model}, {mode}, gradient of the weight: speed over {other}, worse of two"
                    yield figure("grouped product", what, value)
        for kind, way, words, bounds in EXPERTS:
            if value := worse(parts(f"experts in {kind}", names), "bf16", way):
                what = f"{model}, experts in {words}: speed over bf16 experts, worse of two"
                yield figure("grouped product", what, value, *bounds)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    parts: dict[str, Callable] = {}
    modes = (("balanced", False), ("zipf", True))
    for shape in SHAPES:
        for mode, zipf in modes:
            given = zipf, options.tokens
            for name in shape.products:
                parts[f"products {shape.name} {name} {mode}"] = functools.partial(products, shape, name, *given)
        for name in shape.products:
            for kind in ("nf4", "mxfp4", "fp8"):
                key = f"experts in {kind} {shape.name} {name}"
                parts[key] = functools.partial(few_bits, shape, name, kind, options.tokens)
    for shape, (mode, zipf) in itertools.product(TRAINED, modes):
        for name in shape.products:
            key = f"gradients {shape.name} {name} {mode}"
            parts[key] = functools.partial(gradients, shape, name, zipf, options.tokens)
    return record_parts("moe", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
