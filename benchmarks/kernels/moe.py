"""The mixture of experts, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/moe.py --output FILE.json [--only fp8]

gpt-oss-20b (32 experts, 4 a token, 2,880 x 2,880) and Qwen3-30B-A3B (128 experts, 8 a token, 2,048 x 768) at 16,384
tokens in bf16, with a balanced router and with one after Zipf (expert e is as likely as 1 / (e + 1)). A grouped
product is measured beside a dense product of the vendor's with as many rows as there are pairs and
`torch._grouped_mm` over rows without gaps; experts in four bits and in FP8 beside bf16 ones; routing's kernels beside
XLA's. 40 runs of a layer and its gradients are compared bit for bit. TFLOP/s count pairs, not the rows of filled-up
tiles. --only KEY: what has KEY in its name alone (fp8: 4 of 20 parts, about a minute).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")  # the rest is torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.kernels.timing import in_turns, queued_ms
from benchmarks.record import environment, write
from jaxtune.models.config import DecoderConfig, LayerSpec, MoEConfig
from jaxtune.models.layers.experts import ExpertLora, MoE
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8, MXFP4, NF4
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_bias, grouped_matmul, mosaic
from jaxtune.pallas.grouped_matmul.api import gathers
from jaxtune.pallas.quant_matmul import fp8_product, fp8_rounding
from jaxtune.pallas.routing import choose_experts, expert_weights, permute, route, row_weights, unpermute

TOKENS = 16_384
RANK = 16
RUNS = 40
QUEUED = 16  # runs: of four, what it takes to start the first was a tenth of the time


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


def choices(shape: Shape, zipf: bool, tokens: int, seed: int = 0) -> jax.Array:
    """int32[tokens, k]: without replacement, by the Gumbel trick."""
    noise = jax.random.gumbel(jax.random.key(seed), (tokens, shape.experts))
    if zipf:
        noise = noise - jnp.log(jnp.arange(1, shape.experts + 1))
    return choose_experts(noise, shape.k)


_queued = functools.partial(queued_ms, count=QUEUED)


def normal(seed: int, *shape: int, size: float = 1.0) -> jax.Array:
    return _normal(jax.random.key(seed), shape, size)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape, size):
    return (size * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)


# ---- grouped products


# Jitted here, once: balanced and uneven groups have the same shapes, and are the same programs.


@functools.partial(jax.jit, static_argnums=3)
def _product(x, weight, groups, contract):
    return mosaic.product(x, weight, groups, contract)


@functools.partial(jax.jit, static_argnums=2)
def _dense(x, weight, contract):
    return jax.lax.dot_general(x, weight, (((1,), (contract - 1,)), ((), ())))


@functools.partial(jax.jit, static_argnums=1)
def _groups(choice, experts):
    return route(choice, experts).groups


def products(shape: Shape, name: str, zipf: bool, tokens: int) -> dict:
    """Milliseconds of forward and dx: ours, a dense product with as many rows as there are pairs, torch._grouped_mm
    over rows without gaps. They take turns, for the clock falls with the heat."""
    in_size, out_size = shape.products[name]
    choice = choices(shape, zipf, tokens)
    groups = _groups(choice, shape.experts)
    pairs = tokens * shape.k
    flop = 2 * pairs * in_size * out_size
    x, dout, weight = sides(shape, name, groups.rows)
    result: dict = {"rows": groups.rows, "pairs": pairs, "tiles_in_use": int(groups.count), "flop": flop}
    for direction, left, contract in (
        ("forward", x, 1 if shape.gpt_oss else 2), ("dx", dout, 2 if shape.gpt_oss else 1)
    ):  # fmt: skip
        ways = {
            "dense": functools.partial(_queued, _dense, left[:pairs], weight[0], contract),
            "ours": functools.partial(_queued, _product, left, weight, groups, contract),
        }
        ways |= _torch_grouped(np.asarray(groups.sizes), left.shape[1], weight.shape[1:], contract)
        median = in_turns(ways)
        result[direction] = {f"{way}_ms": took for way, took in median.items()} | {
            "tflops": flop / median["ours"] / 1e9,
            "dense_tflops": flop / median["dense"] / 1e9,
        }
        result[direction] |= {f"of_{way}": took / median["ours"] for way, took in median.items() if way != "ours"}
    return result


def _torch_grouped(
    sizes: np.ndarray, columns: int, weight_shape: tuple[int, ...], contract: int
) -> dict[str, Callable]:
    """{"torch": a time of torch._grouped_mm over rows of its own}; nothing where there is no torch with a GPU."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    options = dict(device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    left = torch.randn(int(sizes.sum()), columns, **options)
    weight = torch.randn(len(sizes), *weight_shape, **options)
    weight = weight if contract == 1 else weight.mT

    product = functools.partial(torch._grouped_mm, left, weight, offs=offsets)
    return {"torch": functools.partial(_queued, product, wait=lambda _: torch.cuda.synchronize())}


def sides(shape: Shape, name: str, rows: int):
    """x [rows, in], dout [rows, out] and weight of a product."""
    in_size, out_size = shape.products[name]
    pair = (in_size, out_size) if shape.gpt_oss else (out_size, in_size)
    return normal(1, rows, in_size), normal(2, rows, out_size), normal(3, shape.experts, *pair, size=in_size**-0.5)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _both_ways(x, weight, groups, dout, implementation, transposed):
    options = dict(transposed=transposed, implementation=implementation)
    out, pullback = jax.vjp(lambda x: grouped_matmul(x, weight, groups, **options), x)
    return out, *pullback(dout)


def four_bits(shape: Shape, name: str, tokens: int) -> dict:
    """Experts in NF4 and MXFP4, decoded before the product and ahead of it, beside bf16 ones: forward and dx."""
    groups = _groups(choices(shape, False, tokens), shape.experts)
    x, dout, weight = sides(shape, name, groups.rows)
    result: dict = {}
    for kind in ("nf4", "mxfp4"):
        # MXFP4 is stored as [E, out, in]; bf16 is measured in the same direction.
        transposed = shape.gpt_oss and kind == "nf4"
        array = weight if transposed == shape.gpt_oss else weight.mT
        stored = NF4.encode(array) if kind == "nf4" else _mxfp4(array.shape)
        ways = {"bf16": (array, "mosaic"), "decoded": (stored, "mosaic"), "ahead": (stored, "mosaic_ahead")}
        median = in_turns({
            way: functools.partial(_queued, _both_ways, x, side, groups, dout, implementation, transposed)
            for way, (side, implementation) in ways.items()
        })  # fmt: skip
        for way, took in median.items():
            result[f"{kind}_{way}_ms"] = took
            if way != "bf16":
                result[f"{kind}_{way}_of_bf16"] = median["bf16"] / took
    return result


@functools.partial(jax.jit, static_argnames=("transposed", "fp8", "forward"))
def _one_way(x, weight, groups, dout, lora, transposed, fp8, forward):
    def run(x):
        return grouped_matmul(x, weight, groups, lora, transposed=transposed, fp8=fp8)

    return run(x) if forward else jax.vjp(run, x)[1](dout)


@functools.partial(jax.jit, static_argnames="contract")
def _codes_alone(codes, scale, weight, groups, contract):
    """The kernel without rounding and without the copy that one direction needs."""
    ones = jnp.ones(weight.shape[:2], jnp.float32)
    tiles = groups.tile_expert, groups.tile_sizes
    return fp8_product.by_kernel(codes, scale, None, None, weight, ones, jnp.bfloat16, False, "mosaic", tiles)


def in_fp8(shape: Shape, name: str, tokens: int) -> dict:
    """Experts in FP8 that multiply as they are stored, with scales by rows and of 128 x 128 (where these divide the
    sizes), and decoded before each product, beside bf16 ones: forward and dx, each with an adapter; rounding,
    transposing and the kernel over codes apart; and relative errors against bf16's."""
    groups = _groups(choices(shape, False, tokens), shape.experts)
    x, dout, plain = sides(shape, name, groups.rows)
    held = jnp.arange(groups.rows) % 128 < jnp.repeat(groups.tile_sizes, 128)
    x, dout = x * held[:, None], dout * held[:, None]
    in_size, out_size = shape.products[name]
    lora = GroupedLora(
        normal(4, shape.experts, RANK, in_size, size=in_size**-0.5), normal(5, shape.experts, out_size, RANK)
    )
    weights = {"bf16": plain, "rows": FP8.encode(plain), "decoded": FP8.encode(plain)}
    if in_size % 128 == out_size % 128 == 0:
        weights["blocks"] = FP8.encode(plain, TILE)
    result: dict = {}
    for direction in ("forward", "dx"):

        def call(way, direction=direction):
            fp8 = way in ("rows", "blocks")
            return _one_way(
                x, weights[way], groups, dout, lora, transposed=shape.gpt_oss, fp8=fp8, forward=direction == "forward"
            )

        ways = {way: functools.partial(_queued, call, way) for way in weights}
        along = 2 if (direction == "forward") != shape.gpt_oss else 1
        left = x if direction == "forward" else dout
        codes, scale = jax.jit(fp8_product.rounded)(left)
        side = weights["rows"].codes if along == 2 else jnp.array(weights["rows"].codes.mT)
        ways["codes"] = functools.partial(_queued, _codes_alone, codes, scale, side, groups, along)
        ways["rounding"] = functools.partial(_queued, jax.jit(lambda left: fp8_rounding.rounded([left], None)), left)
        if along == 1:
            ways["transposing"] = functools.partial(_queued, jax.jit(lambda w: w.codes.mT), weights["rows"])
        median = in_turns(ways)
        exact = call("bf16")
        result[direction] = {f"{way}_ms": took for way, took in median.items()}
        result[direction] |= {f"{way}_over_bf16": median["bf16"] / median[way] for way in weights if way != "bf16"}
        result[direction] |= {f"{way}_error": float(_distance(call(way), exact)) for way in weights if way != "bf16"}
    result["chosen"] = dispatch.record["fp8_matmul of experts"]
    return result


@jax.jit
def _distance(one, other):
    one, other = (jax.tree.leaves(each)[0].astype(jnp.float32) for each in (one, other))
    return jnp.linalg.norm(one - other) / jnp.linalg.norm(other)


@functools.partial(jax.jit, static_argnums=0)
def _mxfp4(shape) -> MXFP4:
    keys = jax.random.split(jax.random.key(7))
    codes = jax.random.bits(keys[0], (*shape[:-1], shape[-1] // 2), jnp.uint8)
    return MXFP4(codes, jax.random.randint(keys[1], (*shape[:-1], shape[-1] // 32), 116, 122).astype(jnp.uint8))


# ---- the layer


def layer(shape: Shape) -> MoE:
    """The MoE of one layer with adapters on both matrices, the rest frozen."""
    moe = MoEConfig(
        shape.experts, shape.k, shape.inner, router_bias=shape.gpt_oss, expert_bias=shape.gpt_oss,
        transposed=shape.gpt_oss, interleaved=shape.gpt_oss, swiglu_limit=7.0 if shape.gpt_oss else None,
    )  # fmt: skip
    config = DecoderConfig(
        family="llama", vocab_size=8, hidden_size=shape.hidden, intermediate_size=shape.inner, num_heads=1,
        num_kv_heads=1, head_dim=64, layers=(LayerSpec(),), max_position_embeddings=8, attention_scale=1.0, moe=moe,
    )  # fmt: skip
    module = MoE(config, jax.random.key(0), jnp.bfloat16)
    for seed, matrix in enumerate((module.experts.gate_up_proj, module.experts.down_proj)):
        lora = ExpertLora(*matrix.sizes[::2], matrix.sizes[1], RANK, 16.0, jax.random.key(seed))
        lora.b.set_value(0.01 * jax.random.normal(jax.random.key(seed + 5), lora.b.shape))
        matrix.lora = lora
    return module


def only_adapters(path, value) -> bool:
    return "lora" in path


def _mixture(module: MoE, x, choice):
    return module.down(module.gate_up(x, choice), choice, x)


@functools.partial(jax.jit, static_argnums=0)
def _layer_step(graph, trained, frozen, x, choice, dout):
    out, pullback = jax.vjp(lambda trained, x: _mixture(nnx.merge(graph, trained, frozen), x, choice), trained, x)
    return out, pullback(dout)


def _moved(x, routing):
    """x's rows, where the products do not bring them themselves."""
    return () if gathers("mosaic") else permute(x[0], routing)


@jax.jit
def _routing_step(x, choice, logits, rows, drows, dout):
    """All that a layer does, forward and backward, beside its products and activation."""
    routing = route(choice, logits.shape[1])

    def weigh(logits):
        return row_weights(expert_weights(logits, choice, renormalize=True), routing)

    weights, pullback = jax.vjp(weigh, logits)
    out, dx = unpermute(rows, routing), unpermute(drows, routing)
    dlogits = pullback(jnp.arange(weights.size, dtype=weights.dtype))
    return choose_experts(logits, choice.shape[1]), weights, dlogits, _moved(x, routing), _moved(dout, routing), out, dx


@functools.partial(jax.jit, static_argnums=0)
def _sorted_step(graph, trained, frozen, rows, weights, groups, drows):
    """A layer's step but for routing: its products and activation, over rows that are sorted and stay so."""

    def run(trained, rows, weights):
        module = nnx.merge(graph, trained, frozen)
        first, second = module.experts.gate_up_proj, module.experts.down_proj
        options = dict(transposed=first.transposed)
        gate_up = grouped_matmul(rows, first.stored_weight, groups, first.adapter(), derivative_follows=True, **options)
        if first.bias is not None:
            gate_up = grouped_bias(gate_up, first.bias[...], groups)
        inner = (module._activated(gate_up) * weights[:, None]).astype(rows.dtype)
        return grouped_matmul(inner, second.stored_weight, groups, second.adapter(), **options)

    out, pullback = jax.vjp(run, trained, rows, weights)
    return out, pullback(drows)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _route_each(many, experts, way):
    return [route(choice, experts, implementation=way) for choice in many]


_permute = jax.jit(permute, static_argnames="implementation")
_route = jax.jit(route, static_argnums=1)


def routing_kernels(shape: Shape, zipf: bool, tokens: int) -> dict:
    """Milliseconds of sorting and of moving rows there by each implementation, in turns; and whether the Mosaic
    kernels' results are the reference's, bit for bit."""
    choice = choices(shape, zipf, tokens)
    routing = _route(choice, shape.experts)
    x = normal(1, tokens, shape.hidden)
    many = jnp.stack([choices(shape, zipf, tokens, seed) for seed in range(8)])
    calls = {
        "sort": (8, lambda way: _route_each(many, shape.experts, way)),
        "permute": (1, lambda way: _permute(x, routing, implementation=way)),
    }
    result: dict = {}
    for name, (count, call) in calls.items():
        pairs = zip(*(jax.tree.leaves(call(way)) for way in ("mosaic", "reference")), strict=True)
        result[f"{name}_bitwise_as_reference"] = all(bool((mine == theirs).all()) for mine, theirs in pairs)
        median = in_turns({way: functools.partial(_queued, call, way) for way in ("reference", "mosaic")})
        result |= {f"{name}_{way}_ms": took / count for way, took in median.items()}
    return result


def layer_times(shape: Shape, zipf: bool, tokens: int) -> dict:
    """Milliseconds of a layer forward and backward, and whether 40 runs are bitwise one.

    Routing's share twice: by what a layer does beside its products and activation, run alone; and by what a layer takes
    more than its products and activation over rows that are sorted already."""
    graph, trained, frozen = nnx.split(layer(shape), only_adapters, ...)
    x, dout = normal(1, 1, tokens, shape.hidden), normal(2, 1, tokens, shape.hidden)
    choice = choices(shape, zipf, tokens)
    routing = _route(choice, shape.experts)
    logits = normal(3, tokens, shape.experts).astype(jnp.float32)
    rows, drows = (normal(seed, routing.groups.rows, shape.hidden) for seed in (4, 5))
    weights = jnp.where(routing.source < choice.size, 1 / shape.k, 0.0)
    alone = (graph, trained, frozen, rows, weights, routing.groups, drows)
    steps = {
        "step_without_routing_ms": functools.partial(_queued, _sorted_step, *alone),
        "step_ms": functools.partial(_queued, _layer_step, graph, trained, frozen, x, choice, dout),
        "routing_step_ms": functools.partial(_queued, _routing_step, x, choice, logits, rows, drows, dout),
    }
    result: dict = in_turns(steps)
    result["routing_share_of_step"] = result["routing_step_ms"] / result["step_ms"]
    result["routing_share_by_difference"] = 1 - result["step_without_routing_ms"] / result["step_ms"]
    runs = [_checksums(_layer_step(graph, trained, frozen, x, choice, dout)) for _ in range(RUNS)]
    result["bitwise_over_40_runs"] = len({tuple(map(int, run)) for run in jax.device_get(runs)}) == 1
    return result


@jax.jit
def _checksums(tree) -> list[jax.Array]:
    return [_checksum(array) for array in jax.tree.leaves(tree)]


def _checksum(array: jax.Array) -> jax.Array:
    """uint32: of all bits, each weighed by its place."""
    width = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, width).reshape(-1).astype(jnp.uint32)
    return (bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32)


def must_show(record: dict) -> list[dict]:
    """What the kernels are held to: [{kernel, what, value, floor, goal, at_most}]; at_most: less is better."""
    lines: list[dict] = []
    models, modes, names = [shape.name for shape in SHAPES], ("balanced", "zipf"), ("gate_up", "down")

    def line(kernel: str, what: str, value: float, floor=None, goal=None, at_most=False) -> None:
        lines.append(dict(kernel=kernel, what=what, value=value, floor=floor, goal=goal, at_most=at_most))

    for key, beside in (("of_dense", "a dense product"), ("of_torch", "torch's grouped product")):
        for mode in modes:
            floor, goal = (1.0, 1.2) if key == "of_torch" else (0.80, 0.92) if mode == "balanced" else (0.70, 0.85)
            for model in models:
                for way in ("forward", "dx"):
                    found = [record[f"{model} {name} {mode}"][way] for name in names]
                    if all(key in one for one in found):  # torch may be missing
                        what = f"{model}, {mode}, {way}: speed over {beside}, worse of two"
                        line("grouped product", what, min(one[key] for one in found), floor, goal)
    for model in models:
        found = [record[f"four bits {model} {name}"] for name in names]
        for kind in ("nf4", "mxfp4"):
            for way, words, bounds in (("ahead", "", (0.85, 0.95)), ("decoded", " decoded before", (None, None))):
                value = min(one[f"{kind}_{way}_of_bf16"] for one in found)
                what = f"{model}, experts in {kind.upper()}{words}: speed over bf16 experts, worse of two"
                line("grouped product", what, value, *bounds)
        found = [record[f"fp8 {model} {name}"] for name in names]
        for way in ("rows", "blocks", "decoded"):
            times = [(part["bf16_ms"], part.get(f"{way}_ms")) for one in found for part in (one["forward"], one["dx"])]
            if all(took for _, took in times):
                value = sum(bf16 for bf16, _ in times) / sum(took for _, took in times)
                what = f"{model}, experts in FP8, {way}: speed over bf16 experts, both products, forward and dx"
                line("grouped product", what, value)
        layers = [record[f"layer {model} {mode}"] for mode in modes]
        share = max(one[f"routing_share_{how}"] for one in layers for how in ("of_step", "by_difference"))
        line("routing", f"share of an MoE layer's forward+backward, {model}", share, 0.08, 0.04, at_most=True)
        for name in ("sort", "permute"):
            found = [record[f"routing {model} {mode}"] for mode in modes]
            value = min(one[f"{name}_reference_ms"] / one[f"{name}_mosaic_ms"] for one in found)
            line("routing", f"{model}, {name}: speed of our kernel over XLA's", value)
        same = min(one["bitwise_over_40_runs"] for one in layers)
        line("MoE layer", f"{model}: 40 forwards and gradients bitwise one (1: yes)", float(same), 1.0)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--only", default="", help="parts that have this in their name")
    options = parser.parse_args()
    record: dict = {"benchmark": "kernels/moe", **environment(), "tokens": options.tokens}
    calls = {}
    for shape in SHAPES:
        for zipf, mode in ((False, "balanced"), (True, "zipf")):
            for name in shape.products:
                calls[f"{shape.name} {name} {mode}"] = (products, shape, name, zipf)
            calls[f"layer {shape.name} {mode}"] = (layer_times, shape, zipf)
            calls[f"routing {shape.name} {mode}"] = (routing_kernels, shape, zipf)
        for name in shape.products:
            calls[f"four bits {shape.name} {name}"] = (four_bits, shape, name)
            calls[f"fp8 {shape.name} {name}"] = (in_fp8, shape, name)
    begun = time.perf_counter()
    for key, (function, *arguments) in calls.items():
        if options.only not in key:
            continue
        record[key] = function(*arguments, options.tokens)
        write(options.output, record)
        print(f"{time.perf_counter() - begun:6.1f} s  {key}: {json.dumps(record[key], default=str)}", flush=True)
    if not options.only:
        record["must_show"] = must_show(record)
    write(options.output, record)


if __name__ == "__main__":
    main()
