"""The mixture of experts, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/moe.py --output FILE.json

gpt-oss-20b (32 experts, 4 a token, 2,880 x 2,880) and Qwen3-30B-A3B (128 experts, 8 a token, 2,048 x 768) at 16,384
tokens in bf16, with a balanced router and with one after Zipf (expert e is as likely as 1 / (e + 1)). A grouped
product is measured beside a dense product of the vendor's with as many rows as there are pairs, `jax.lax.ragged_dot`
and `torch._grouped_mm` over rows without gaps. TFLOP/s count pairs, not the rows of filled-up tiles. Everything is
checked first: errors against fp32, and 40 runs of a layer and its gradients bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")  # the rest is torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.record import environment, write
from jaxtune.models.config import DecoderConfig, LayerSpec, MoEConfig
from jaxtune.models.layers.experts import ExpertLora, MoE
from jaxtune.pallas.formats import MXFP4, NF4
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_bias, grouped_matmul, mosaic, reference, triton
from jaxtune.pallas.grouped_matmul.api import gathers
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups, groups_of
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


def milliseconds(function, *arguments, repeats: int = 5, inner: int = 5, **options) -> float:
    """Median over `repeats` of the mean of `inner` runs queued together."""
    function = functools.partial(function, **options)
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(inner):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begun) / inner * 1e3)
    return statistics.median(times)


def normal(seed: int, *shape: int, size: float = 1.0) -> jax.Array:
    return _normal(jax.random.key(seed), shape, size)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape, size):
    return (size * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)


def held(groups: Groups) -> jax.Array:
    """bool[rows]: rows that hold something."""
    row = jnp.arange(groups.rows)
    start = reference.per_tile(groups.starts(), groups)
    size = jnp.where(groups.tile_expert < groups.num_experts, reference.per_tile(groups.sizes, groups), 0)
    return row - jnp.repeat(start, TILE_ROWS) < jnp.repeat(size, TILE_ROWS)


# ---- checks


def errors(shape: Shape) -> dict:
    """Relative errors of out, dx, da, db at 1,024 tokens after Zipf, of the kernel and of XLA's bf16, against fp32."""
    in_size, out_size = shape.products["gate_up"]
    groups = route(choices(shape, True, 1024), shape.experts).groups
    mask = held(groups)[:, None]
    x, dout = normal(1, groups.rows, in_size) * mask, normal(2, groups.rows, out_size) * mask
    pair = (in_size, out_size) if shape.gpt_oss else (out_size, in_size)
    weight = normal(3, shape.experts, *pair, size=in_size**-0.5)
    a, b = normal(4, shape.experts, RANK, in_size, size=in_size**-0.5), normal(5, shape.experts, out_size, RANK)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(implementation, dtype, *arrays):
        x, weight, a, b, dout = (array.astype(dtype) for array in arrays)

        def product(x, a, b):
            options = dict(transposed=shape.gpt_oss, implementation=implementation)
            return grouped_matmul(x, weight, groups, GroupedLora(a, b, 0.5), **options)

        out, pullback = jax.vjp(product, x, a, b)
        return (out, *pullback(dout))

    arrays = (x, weight, a, b, dout)
    exact = run("reference", jnp.float32, *arrays)

    def distances(got):
        return [
            float(jnp.linalg.norm(g.astype(jnp.float32) - e) / jnp.linalg.norm(e))
            for g, e in zip(got, exact, strict=True)
        ]

    mine = distances(run(None, jnp.bfloat16, *arrays))
    theirs = distances(run("reference", jnp.bfloat16, *arrays))
    return {"ours": mine, "xla_bf16": theirs, "ok": all(m <= 2 * t for m, t in zip(mine, theirs, strict=True))}


# ---- grouped products


# Jitted here, once: balanced and uneven groups have the same shapes, and are the same programs.


@functools.partial(jax.jit, static_argnums=(3, 4))
def _product(x, weight, groups, contract, blocks=None):
    return mosaic.product(x, weight, groups, contract, blocks=blocks)


@functools.partial(jax.jit, static_argnums=3)
def _triton_product(x, weight, groups, contract):
    return triton.product(x, weight, groups, contract)


@functools.partial(jax.jit, static_argnums=2)
def _dense(x, weight, contract):
    return jax.lax.dot_general(x, weight, (((1,), (contract - 1,)), ((), ())))


@functools.partial(jax.jit, static_argnames="transposed")
def _adapted(x, weight, groups, a, b, transposed):
    return grouped_matmul(x, weight, groups, GroupedLora(a, b, 0.5), transposed=transposed)


@functools.partial(jax.jit, static_argnames="transposed")
def _adapted_step(x, weight, groups, a, b, dout, transposed):
    out, pullback = jax.vjp(lambda x, a, b: _adapted(x, weight, groups, a, b, transposed=transposed), x, a, b)
    return (out, *pullback(dout))


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
            "torch": _torch_grouped(np.asarray(groups.sizes), left.shape[1], weight.shape[1:], contract),
        }
        times = {way: [] for way in ways if ways[way] is not None}
        for _ in range(5):
            for way in times:
                times[way].append(ways[way]())
        median = {way: statistics.median(took) for way, took in times.items()}
        result[direction] = {f"{way}_ms": took for way, took in median.items()} | {
            "tflops": flop / median["ours"] / 1e9,
            "dense_tflops": flop / median["dense"] / 1e9,
        }
        result[direction] |= {f"of_{way}": took / median["ours"] for way, took in median.items() if way != "ours"}
    return result


def _queued(function, *arguments, count: int = QUEUED) -> float:
    """Milliseconds of a run, of `count` queued together after one that is not timed."""
    jax.block_until_ready(function(*arguments))
    begun = time.perf_counter()
    for _ in range(count):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / count * 1e3


def _median(function, *arguments) -> float:
    """As _queued, the median of five times."""
    return statistics.median(_queued(function, *arguments) for _ in range(5))


def _torch_grouped(sizes: np.ndarray, columns: int, weight_shape: tuple[int, ...], contract: int):
    """As _queued, of torch._grouped_mm over rows of its own; None where there is no torch with a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    options = dict(device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    left = torch.randn(int(sizes.sum()), columns, **options)
    weight = torch.randn(len(sizes), *weight_shape, **options)
    weight = weight if contract == 1 else weight.mT

    def run(count: int = QUEUED) -> float:
        torch._grouped_mm(left, weight, offs=offsets)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            torch._grouped_mm(left, weight, offs=offsets)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count * 1e3

    return run


def adapters(shape: Shape, name: str, tokens: int) -> dict:
    """What adapters of rank 16 add to a product forward, and to forward, dx, da and db."""
    in_size, out_size = shape.products[name]
    groups = _groups(choices(shape, False, tokens), shape.experts)
    x, dout, weight = sides(shape, name, groups.rows)
    a, b = normal(4, shape.experts, RANK, in_size), normal(5, shape.experts, out_size, RANK)
    return {
        "forward_ms": milliseconds(_adapted, x, weight, groups, a, b, transposed=shape.gpt_oss),
        "step_ms": milliseconds(_adapted_step, x, weight, groups, a, b, dout, transposed=shape.gpt_oss),
    }


def triton_runs(shape: Shape, name: str, tokens: int) -> dict:
    """Milliseconds of Triton's product with its gradients, beside Mosaic's, and whether 40 runs are bitwise one."""
    in_size, out_size = shape.products[name]
    groups = _groups(choices(shape, True, tokens), shape.experts)
    mask = held(groups)[:, None]
    x, dout, weight = sides(shape, name, groups.rows)
    a, b = normal(4, shape.experts, RANK, in_size, size=in_size**-0.5), normal(5, shape.experts, out_size, RANK)
    options = dict(transposed=shape.gpt_oss)
    result: dict = {}
    got = {}
    for way in ("triton", "mosaic"):

        @jax.jit
        def step(x, a, b, dout, weight, groups, way=way):
            def product(x, a, b):
                return grouped_matmul(x, weight, groups, GroupedLora(a, b, 0.5), implementation=way, **options)

            out, pullback = jax.vjp(product, x, a, b)
            return (out, *pullback(dout))

        arguments = (x * mask, a, b, dout * mask, weight, groups)
        runs = [_checksums(step(*arguments)) for _ in range(RUNS)]
        result[f"{way}_bitwise_over_40_runs"] = len({tuple(map(int, run)) for run in jax.device_get(runs)}) == 1
        result[f"{way}_ms"] = milliseconds(step, *arguments, repeats=3)
        got[way] = step(*arguments)
    result["apart"] = [
        float(jnp.linalg.norm((t - m).astype(jnp.float32)) / jnp.linalg.norm(m.astype(jnp.float32)))
        for t, m in zip(got["triton"], got["mosaic"], strict=True)
    ]
    return result


def variants(shape: Shape, name: str, tokens: int) -> dict:
    """TFLOP/s of the forward by how the kernel cuts its work."""
    in_size, out_size = shape.products[name]
    groups = _groups(choices(shape, False, tokens), shape.experts)
    x, _, weight = sides(shape, name, groups.rows)
    flop = 2 * tokens * shape.k * in_size * out_size
    result = {}
    contract = 1 if shape.gpt_oss else 2
    for blocks in mosaic.CANDIDATES:
        if out_size % blocks.columns == 0:
            took = milliseconds(_product, x, weight, groups, contract, blocks, repeats=3)
            key = f"{blocks.columns} columns, {blocks.stages} stages, band {blocks.band}, lead {blocks.lead}"
            result[key] = flop / took / 1e9
    try:
        took = milliseconds(_triton_product, x, weight, groups, contract, repeats=3)
        result["triton"] = flop / took / 1e9
    except Exception as error:
        result["triton"] = f"{type(error).__name__}: {error}"[:300]
    return result


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
    """Experts in NF4 and MXFP4, decoded before the product and ahead of it, beside bf16 ones: forward and dx, and their
    relative errors against products of the same values in fp32."""
    groups = _groups(choices(shape, False, tokens), shape.experts)
    x, dout, weight = sides(shape, name, groups.rows)
    result: dict = {}
    for kind in ("nf4", "mxfp4"):
        # MXFP4 is stored as [E, out, in]; bf16 is measured in the same direction.
        transposed = shape.gpt_oss and kind == "nf4"
        array = weight if transposed == shape.gpt_oss else weight.mT
        stored = NF4.encode(array) if kind == "nf4" else _mxfp4(array.shape)
        ways: dict = {"bf16": (array, "mosaic"), "decoded": (stored, "mosaic"), "ahead": (stored, "mosaic_ahead")}
        times: dict = {way: [] for way in ways}
        for way in ways:  # one that does not run says so, and does not take the others with it
            try:
                _queued(_both_ways, x, ways[way][0], groups, dout, ways[way][1], transposed)
            except Exception as error:
                result[f"{kind}_{way}_error"] = f"{type(error).__name__}: {error}"[:300]
                del times[way]
        for _ in range(5):
            for way in times:
                times[way].append(_queued(_both_ways, x, ways[way][0], groups, dout, ways[way][1], transposed))
        median = {way: statistics.median(took) for way, took in times.items()}
        for way, took in median.items():
            result[f"{kind}_{way}_ms"] = took
            if way != "bf16":
                result[f"{kind}_{way}_of_bf16"] = median["bf16"] / took
        if "ahead" in times:
            result |= {f"{kind}_{key}": same for key, same in _ahead_bits(x, stored, groups, dout, transposed).items()}
        result[f"{kind}_errors"] = _four_bit_errors(stored, transposed)
    return result


def _ahead_bits(x, stored, groups, dout, transposed: bool) -> dict:
    """Whether 40 runs, forward and dx, are bitwise one, and the same as with weights that were decoded before."""
    runs = [_checksums(_both_ways(x, stored, groups, dout, "mosaic_ahead", transposed)) for _ in range(RUNS)]
    decoded = _checksums(_both_ways(x, stored, groups, dout, "mosaic", transposed))
    found, want = {tuple(map(int, run)) for run in jax.device_get(runs)}, tuple(map(int, jax.device_get(decoded)))
    return {"ahead_bitwise_over_40_runs": len(found) == 1, "ahead_bitwise_as_decoded": found == {want}}


@functools.partial(jax.jit, static_argnums=0)
def _mxfp4(shape) -> MXFP4:
    keys = jax.random.split(jax.random.key(7))
    codes = jax.random.bits(keys[0], (*shape[:-1], shape[-1] // 2), jnp.uint8)
    return MXFP4(codes, jax.random.randint(keys[1], (*shape[:-1], shape[-1] // 32), 116, 122).astype(jnp.uint8))


def _four_bit_errors(stored, transposed: bool) -> dict:
    """Relative errors of out and dx for 256 rows of the first two experts, of each way."""
    own = (
        NF4.encode(stored.decode(jnp.float32)[:2])
        if isinstance(stored, NF4)
        else MXFP4(stored.codes[:2], stored.scales[:2])
    )
    exact = own.decode(jnp.float32)
    groups = groups_of(jnp.array([100, 156], jnp.int32), 256)
    mask = held(groups)[:, None]
    in_size, out_size = exact.shape[1:] if transposed else exact.shape[:0:-1]
    x, dout = normal(1, groups.rows, in_size) * mask, normal(2, groups.rows, out_size) * mask

    def run(weight, dtype, implementation):
        return _both_ways(x.astype(dtype), weight, groups, dout.astype(dtype), implementation, transposed)

    want = run(exact, jnp.float32, "reference")
    errors = {}
    for way, implementation in {"decoded": "mosaic", "ahead": "mosaic_ahead"}.items():
        try:
            got = run(own, jnp.bfloat16, implementation)
        except Exception as error:
            errors[way] = f"{type(error).__name__}: {error}"[:300]
            continue
        errors[way] = [float(jnp.linalg.norm(g - w) / jnp.linalg.norm(w)) for g, w in zip(got, want, strict=True)]
    return errors


def ragged_dot(shape: Shape, name: str, tokens: int) -> dict:
    in_size, out_size = shape.products[name]
    choice = choices(shape, False, tokens)
    sizes = _groups(choice, shape.experts).sizes
    x, dout = normal(1, choice.size, in_size), normal(2, choice.size, out_size)
    weight = normal(3, shape.experts, in_size, out_size)
    run = jax.jit(jax.lax.ragged_dot)
    forward = milliseconds(run, x, weight, sizes, repeats=2, inner=1)
    dx = milliseconds(run, dout, weight.mT, sizes, repeats=2, inner=1)
    return {"forward_ms": forward, "dx_ms": dx}


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
def _layer_forward(graph, trained, frozen, x, choice):
    return _mixture(nnx.merge(graph, trained, frozen), x, choice)


@functools.partial(jax.jit, static_argnums=0)
def _layer_step(graph, trained, frozen, x, choice, dout):
    out, pullback = jax.vjp(lambda trained, x: _mixture(nnx.merge(graph, trained, frozen), x, choice), trained, x)
    return out, pullback(dout)


def _moved(x, routing):
    """x's rows, where the products do not bring them themselves."""
    return () if gathers("mosaic") else permute(x[0], routing)


@jax.jit
def _routing_forward(x, choice, logits, rows):
    """All that a layer's forward does beside its products and activation."""
    routing = route(choice, logits.shape[1])
    weights = row_weights(expert_weights(logits, choice, renormalize=True), routing)
    return choose_experts(logits, choice.shape[1]), weights, _moved(x, routing), unpermute(rows, routing)


@jax.jit
def _routing_step(x, choice, logits, rows, drows, dout):
    """And its backward."""
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


@functools.partial(jax.jit, static_argnums=3)
def _gathered(x, weight, groups, contract, tokens=None):
    return mosaic.product(x, weight, groups, contract, tokens=tokens)


def gathering(shape: Shape, zipf: bool, tokens: int) -> dict:
    """Milliseconds of the two products that bring tokens' rows themselves, gate_up's forward and down's dx, beside the
    same over rows that lie in order, in turns; and of adapters' thin products; and whether the bits are the same."""
    routing = _route(choices(shape, zipf, tokens), shape.experts)
    groups, row_tokens = routing.groups, routing.source // shape.k
    x = normal(1, tokens, shape.hidden)
    rows = _permute(x, routing)
    first, second = ((1, 2), (2, 1))[not shape.gpt_oss]
    calls = {
        "gate_up": (sides(shape, "gate_up", groups.rows)[2], first),
        "down_dx": (sides(shape, "down", groups.rows)[2], second),
        "thin": (normal(4, shape.experts, 64, shape.hidden), 2),
    }
    result: dict = {}
    for name, (weight, contract) in calls.items():
        ways = {"gathered": (x, weight, groups, contract, row_tokens), "in_order": (rows, weight, groups, contract)}
        out = [_gathered(*ways[way]) for way in ways]
        result[f"{name}_bitwise_as_in_order"] = bool((out[0] == out[1]).all())
        del out
        times: dict = {way: [] for way in ways}
        for _ in range(5):
            for way in times:
                times[way].append(_queued(_gathered, *ways[way]))
        result |= {f"{name}_{way}_ms": statistics.median(took) for way, took in times.items()}
    return result


@functools.partial(jax.jit, static_argnums=(1, 2))
def _route_each(many, experts, way):
    sort = route_by_sorting if way == "sorting" else functools.partial(route, implementation=way)
    return [sort(choice, experts) for choice in many]


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
        try:
            pairs = zip(*(jax.tree.leaves(call(way)) for way in ("mosaic", "reference")), strict=True)
            result[f"{name}_bitwise_as_reference"] = all(bool((mine == theirs).all()) for mine, theirs in pairs)
            times: dict = {way: [] for way in ("reference", "mosaic")}
            for _ in range(5):
                for way in times:
                    times[way].append(_queued(call, way) / count)
            result |= {f"{name}_{way}_ms": statistics.median(took) for way, took in times.items()}
        except Exception as error:
            result[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    return result


def layer_times(shape: Shape, zipf: bool, tokens: int) -> dict:
    """Milliseconds of a layer, of what routing takes in it, and whether 40 runs are bitwise one.

    Routing's share twice: by what a layer does beside its products and activation, run alone, with the choice of
    experts; and by what a layer takes more than its products and activation over rows that are sorted already."""
    graph, trained, frozen = nnx.split(layer(shape), only_adapters, ...)
    x, dout = normal(1, 1, tokens, shape.hidden), normal(2, 1, tokens, shape.hidden)
    choice = choices(shape, zipf, tokens)
    routing = _route(choice, shape.experts)
    logits = normal(3, tokens, shape.experts).astype(jnp.float32)
    rows, drows = (normal(seed, routing.groups.rows, shape.hidden) for seed in (4, 5))
    many = jnp.stack([choices(shape, zipf, tokens, seed) for seed in range(8)])
    weights = jnp.where(routing.source < choice.size, 1 / shape.k, 0.0)
    steps: dict = {
        "step_ms": (_layer_step, graph, trained, frozen, x, choice, dout),
        "step_without_routing_ms": (_sorted_step, graph, trained, frozen, rows, weights, routing.groups, drows),
    }
    times: dict = {name: [] for name in steps}
    for _ in range(5):
        for name, call in steps.items():
            times[name].append(_queued(*call))
    result: dict = {name: statistics.median(took) for name, took in times.items()} | {
        "forward_ms": _median(_layer_forward, graph, trained, frozen, x, choice),
        "routing_forward_ms": _median(_routing_forward, x, choice, logits, rows),
        "routing_step_ms": _median(_routing_step, x, choice, logits, rows, drows, dout),
        "route_by_counting_ms": _median(_route_each, many, shape.experts, "reference") / 8,
        "route_by_sorting_ms": _median(_route_each, many, shape.experts, "sorting") / 8,
    }
    result["routing_share_of_forward"] = result["routing_forward_ms"] / result["forward_ms"]
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


def route_by_sorting(choice: jax.Array, num_experts: int):
    """The same layout by XLA's sort of (expert, pair) in one key; to see which is faster."""
    flat = choice.reshape(-1)
    pairs = flat.size
    order = jax.lax.sort(flat * pairs + jnp.arange(pairs, dtype=jnp.int32), is_stable=False)
    starts = jnp.searchsorted(order, jnp.arange(num_experts + 1, dtype=jnp.int32) * pairs).astype(jnp.int32)
    groups = groups_of(jnp.diff(starts), pairs)
    row = jnp.arange(groups.rows, dtype=jnp.int32)
    expert = jnp.repeat(jnp.minimum(groups.tile_expert, num_experts - 1), TILE_ROWS)
    at = row - groups.starts()[expert]
    source = jnp.where(at < groups.sizes[expert], (order % pairs)[jnp.minimum(starts[expert] + at, pairs - 1)], pairs)
    slots = jnp.zeros(pairs, jnp.int32).at[source].set(row, mode="drop", unique_indices=True)
    return slots.reshape(choice.shape), source, groups


def ways_to_run(shape: Shape, tokens: int) -> dict:
    """A layer without adapters as sorted segments, as a loop over experts with masks, and over ragged_dot."""
    module = layer(shape)
    x, dout = normal(1, 1, tokens, shape.hidden), normal(2, 1, tokens, shape.hidden)
    choice = choices(shape, False, tokens)
    logits = normal(3, tokens, shape.experts).astype(jnp.float32)
    gate_up, down = (m.stored_weight for m in (module.experts.gate_up_proj, module.experts.down_proj))
    gate_up, down = (w if shape.gpt_oss else w.mT for w in (gate_up, down))
    weights = expert_weights(logits, choice, renormalize=True)

    def loop(x):
        def add(total, expert):
            up_weight, down_weight, index = expert
            weight = jnp.where(choice == index, weights, 0.0).sum(1)
            inner = module._activated(x[0] @ up_weight) * weight[:, None]
            return total + (inner.astype(x.dtype) @ down_weight).astype(jnp.float32), None

        start = jnp.zeros(x.shape[1:], jnp.float32)
        each = (gate_up, down, jnp.arange(shape.experts))
        return jax.lax.scan(jax.checkpoint(add), start, each)[0].astype(x.dtype)

    def ragged(x):
        order = jnp.argsort(choice.reshape(-1), stable=True)
        sizes = route(choice, shape.experts).groups.sizes
        rows = x[0][order // shape.k]
        inner = module._activated(jax.lax.ragged_dot(rows, gate_up, sizes)) * weights.reshape(-1)[order][:, None]
        out = jax.lax.ragged_dot(inner.astype(x.dtype), down, sizes)
        return out[jnp.argsort(order)].reshape(x.shape[1], shape.k, -1).sum(1)

    def segments(x):
        routing = route(choice, shape.experts)
        rows = grouped_matmul(permute(x[0], routing), gate_up, routing.groups, transposed=True)
        inner = (module._activated(rows) * row_weights(weights, routing)[:, None]).astype(x.dtype)
        return unpermute(grouped_matmul(inner, down, routing.groups, transposed=True), routing)

    result = {}
    for name, function in {"sorted": segments, "loop": loop, "ragged_dot": ragged}.items():

        def both(x, dout, function=function):
            out, pullback = jax.vjp(function, x)
            return out, pullback(dout[0])

        result[f"{name}_forward_ms"] = milliseconds(jax.jit(function), x, repeats=2, inner=1)
        result[f"{name}_step_ms"] = milliseconds(jax.jit(both), x, dout, repeats=2, inner=1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument(
        "--parts", default="errors,products,layer,variants,adapters,ways,ragged_dot,four_bits,routing,gathering,triton"
    )
    options = parser.parse_args()
    parts, tokens = options.parts.split(","), options.tokens
    record: dict = {"benchmark": "moe", **environment(), "tokens": tokens}
    begun = time.perf_counter()

    def note(key, function, *arguments):
        try:
            record[key] = function(*arguments)
        except Exception as error:  # one part must not take the others with it
            record[key] = {"error": f"{type(error).__name__}: {error}"[:600]}
        write(options.output, record)
        print(f"{time.perf_counter() - begun:6.1f} s  {key}: {json.dumps(record[key], default=str)}", flush=True)

    def selected():
        """(key, function, arguments) of all parts, the most telling first."""
        gpt_oss, qwen3 = SHAPES
        modes = {False: "balanced", True: "zipf"}
        yield "errors", f"errors {gpt_oss.name}", errors, (gpt_oss,)
        for name in ("gate_up", "down"):
            for shape in SHAPES:
                for zipf, mode in modes.items():
                    yield "products", f"{shape.name} {name} {mode}", products, (shape, name, zipf, tokens)
        for zipf, mode in modes.items():
            yield "layer", f"layer {gpt_oss.name} {mode}", layer_times, (gpt_oss, zipf, tokens)
        for shape in SHAPES:
            for name in ("gate_up", "down"):
                yield "four_bits", f"four bits {shape.name} {name}", four_bits, (shape, name, tokens)
        for shape in SHAPES:
            for zipf, mode in modes.items():
                yield "routing", f"routing {shape.name} {mode}", routing_kernels, (shape, zipf, tokens)
                yield "gathering", f"gathering {shape.name} {mode}", gathering, (shape, zipf, tokens)
        for shape in SHAPES:
            for name in ("gate_up", "down"):
                yield "variants", f"variants {shape.name} {name}", variants, (shape, name, tokens)
        yield "adapters", f"adapters {gpt_oss.name} gate_up", adapters, (gpt_oss, "gate_up", tokens)
        for zipf, mode in modes.items():
            yield "layer", f"layer {qwen3.name} {mode}", layer_times, (qwen3, zipf, tokens)
        for shape in SHAPES:
            yield "triton", f"triton {shape.name} down", triton_runs, (shape, "down", tokens // 4)
        yield "ways", f"ways {gpt_oss.name}", ways_to_run, (gpt_oss, tokens)
        yield "ragged_dot", f"ragged_dot {gpt_oss.name} gate_up", ragged_dot, (gpt_oss, "gate_up", tokens)
        yield "errors", f"errors {qwen3.name}", errors, (qwen3,)

    for part, key, function, arguments in selected():
        if part in parts:
            note(key, function, *arguments)


if __name__ == "__main__":
    main()
