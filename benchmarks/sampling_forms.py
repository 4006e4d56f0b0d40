"""Full slots of Llama-3.1-8B, in one process, with one kernel of the decoding step at a time in another form.

    python benchmarks/sampling_forms.py --output FILE.json [--seconds 280] WAY ...

A way is a number of slots and what differs from the tree, such as 256:old or 256:attended_xla (FORMS).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.sampling import full
from benchmarks.shapes import SHAPES
from jaxtune.models.generation import slots as slots_module
from jaxtune.models.generation.slots import programs
from jaxtune.pallas import compat, dispatch, meshes
from jaxtune.pallas.decode_attention.triton import Tile
from jaxtune.pallas.few_rows import drawing, drawing_kernels, reference
from jaxtune.pallas.few_rows import triton as few
from jaxtune.pallas.few_rows.api import products
from jaxtune.train.program.program_cache import use_program_cache

ATTENDED = importlib.import_module("jaxtune.pallas.few_rows.attended")


@triton.jit
def old_chunk_kernel(
    logits,
    temperature,
    logprob_temperature,
    tops,
    places,
    sums,
    blocks,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """chunk_kernel of 7ca2ca30."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    wide = tl.load(logits + row.to(tl.int64) * STRIDE + tokens, mask=tokens < VOCAB, other=float("-inf"))
    wide = wide.to(tl.float32)
    top, place = tl.max(wide, 0, return_indices=True)
    least = tl.where(top == float("-inf"), 0.0, top)
    at = row * CHUNKS + chunk
    tl.store(tops + at, top)
    tl.store(places + at, chunk * CHUNK + place)
    tl.store(sums + at, tl.sum(tl.exp((wide - least) / tl.load(logprob_temperature + row)), 0))
    if DRAWS:
        count: tl.constexpr = CHUNK // BLOCK
        weights = tl.reshape(tl.exp((wide - least) / tl.load(temperature + row)), [count, BLOCK])
        tl.store(blocks + at * count + tl.arange(0, count), tl.sum(weights, 1))


@functools.cache
def representation(kernel, types: tuple[str, ...], constants: tuple, warps: int, stages: int, capability):
    """(the kernel's name, Triton's representation as text)"""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(constants)
    arrays = [name for name in kernel.arg_names if name not in named]
    source = ASTSource(
        kernel,
        signature=dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(arrays, types, strict=True)),
        constexprs=named,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in arrays},
    )
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    with compat._compiling, triton.knobs.cache.scope():
        triton.knobs.cache.dir = triton.knobs.cache.dir or triton.knobs.cache.get_triton_dir("cache")
        built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return built.metadata.name, built.asm["ttir"]


USUAL = compat.triton_graph_call


def by_xla(names, kernel, arguments, out_types, grid, *, warps, stages, aliases=None, **constants):
    """compat.triton_graph_call; kernels whose name begins with one of `names` are compiled and launched by XLA."""
    if not kernel.__name__.startswith(names):
        return USUAL(kernel, arguments, out_types, grid, warps=warps, stages=stages, aliases=aliases, **constants)
    types = tuple(compat._POINTERS[str(array.dtype)] for array in (*arguments, *out_types))
    capability = dispatch.compute_capability()
    name, ir = representation(kernel, types, tuple(constants.items()), warps, stages, capability)
    sizes = {f"grid_{axis}": np.int32(size) for axis, size in zip("xyz", (*grid, 1, 1), strict=False)}
    call = functools.partial(
        jax.ffi.ffi_call("__gpu$xla.gpu.triton", list(out_types), input_output_aliases=dict(aliases or {})),
        name=name,
        ir=ir,
        num_warps=np.int32(warps),
        num_stages=np.int32(stages),
        **sizes,
    )
    return list(meshes.on_each_device(call)(*arguments))


def options(**more):
    usual = slots_module.sampler_options
    return lambda: mock.patch.object(slots_module, "sampler_options", lambda *a, **k: usual(*a, **k) | more)


def put(where, name, value):
    return lambda: mock.patch.object(where, name, value)


def many_tile(tile, splits):
    return put(few, "_MANY", tile), put(few, "_splits", lambda *_: splits)


def with_shared(least: int):
    """More shared memory for each program of the attention, so that fewer share a multiprocessor."""
    usual = compat._assembly

    def built(kernel, *rest):
        made = usual(kernel, *rest)
        if kernel.__name__ != "attended_kernel":
            return made
        return dataclasses.replace(made, shared_bytes=max(least, made.shared_bytes))

    return put(compat, "_assembly", built)


def tile_of_many(*tile):
    return (put(few, "_MANY", few.Tile(*tile)),)


NO_PARTS = put(few, "splits_of_many", lambda *_: 1)
NO_PASS = put(few, "activated_refusal", lambda *_: "not in this run")
OLD_CHUNK = put(drawing_kernels, "chunk_kernel", old_chunk_kernel)
FORMS = {
    "new": (),
    "old": (NO_PARTS, NO_PASS, OLD_CHUNK),
    "no_parts": (NO_PARTS,),
    "no_pass": (NO_PASS,),
    "old_chunk": (OLD_CHUNK,),
    "attended_xla": (put(compat, "triton_graph_call", functools.partial(by_xla, ("attended",))),),
    "all_xla": (put(compat, "triton_graph_call", functools.partial(by_xla, ("",))),),
    "old_all_xla": (
        NO_PARTS,
        NO_PASS,
        OLD_CHUNK,
        put(compat, "triton_graph_call", functools.partial(by_xla, ("",))),
    ),
    "qkv_128_64_2": many_tile(few.Tile(128, 64, 8, 4), 2),
    "qkv_t128_8w": tile_of_many(128, 64, 8, 6, 128),
    "qkv_t128_4w": tile_of_many(128, 64, 4, 6, 128),
    "qkv_t128_deep": tile_of_many(128, 128, 8, 3, 128),
    "qkv_t128_64": tile_of_many(64, 64, 4, 4, 128),
    "qkv_64_128_1": many_tile(few.Tile(64, 128, 4, 2), 1),
    "concurrent": (options(xla_gpu_command_buffer_scheduling_mode="CONCURRENT"),),
    "cublaslt": (options(xla_gpu_enable_cublaslt=True),),
    "no_triton_gemm": (options(xla_gpu_enable_triton_gemm=False),),
    "attended_8": (with_shared(28160),),
    "four_warps": (put(ATTENDED, "_MANY_TILES", {}),),
}


def checks() -> dict:
    """Largest differences between the new forms and plain JAX, at the sizes of a step, and times of the pieces."""
    keys = jax.random.split(jax.random.key(1), 8)
    logits = 3 * jax.random.normal(keys[0], (256, 128256), jnp.float32)
    heat = jnp.where(jnp.arange(256) % 2 == 0, 1.0, 0.7)
    numbers = jax.random.uniform(keys[1], (256,)).at[3].set(-1.0)
    ones = jnp.ones(256)
    got, want = (
        jax.jit(lambda x, own=own: own(x, 128256, heat, ones, numbers))(logits)
        for own in (drawing._by_kernels, drawing.reference_chosen_token)
    )
    gate, up = (jax.random.normal(key, (256, 14336), jnp.bfloat16) for key in keys[2:4])
    passes = [jax.jit(lambda g, u, own=own: own.activated(g, u, "silu"))(gate, up) for own in (few, reference)]
    weight = 0.02 * jax.random.normal(keys[4], (4096, 14336), jnp.bfloat16)
    parts = jax.jit(lambda x, w: products(x, [w]).sum(0).astype(jnp.bfloat16))(gate, weight)
    whole = jax.jit(lambda x, w: reference.products(x, [w])[0])(gate, weight)
    wide = jax.jit(lambda x, w: jnp.einsum("ni,oi->no", x, w, preferred_element_type=jnp.float32))(gate, weight)

    def error(a):
        return float(jnp.linalg.norm(a.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))

    return {
        "tokens that differ": int((got[0] != want[0]).sum()),
        "log-probabilities": float(jnp.abs(got[1] - want[1]).max()),
        "peaks": float(jnp.abs(got[2] - want[2]).max()),
        "activated, numbers that differ": int((passes[0] != passes[1]).sum()),
        "down, relative to float32: parts, whole": [error(parts), error(whole)],
    }


def microseconds(function, arrays, calls: int) -> float:
    """Of one of `calls` calls within a jitted function of the arrays, by the clock."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(20):
            out = run(*arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / 20 / calls * 1e6)
    return round(min(times), 2)


TILES = (
    (64, 64, 4, 4, 256, 1),
    (128, 64, 8, 6, 128, 1),
    (128, 64, 8, 4, 128, 1),
    (128, 64, 4, 6, 128, 1),
    (128, 128, 8, 3, 128, 1),
    (64, 64, 4, 4, 128, 1),
    (64, 128, 4, 3, 128, 1),
    (64, 128, 4, 2, 256, 1),
    (128, 64, 8, 4, 256, 2),
    (128, 64, 8, 3, 256, 2),
    (64, 64, 4, 4, 256, 2),
)


def pieces(say) -> None:
    """Microseconds of one piece of a step of 256 rows, in a program of twelve, each with arrays of its own."""
    calls, rows = 12, 256

    def drawn(number, *shape, dtype=jnp.bfloat16):
        return 0.02 * jax.random.normal(jax.random.key(number), shape, dtype)

    def product(name, sizes, inner, tiles):
        weights = [[drawn(10 * i + j, size, inner) for j, size in enumerate(sizes)] for i in range(calls)]
        x, width = drawn(999, rows, inner), sum(sizes)

        def kernel(tile):
            *tile, splits = tile
            dtype = x.dtype if splits == 1 else jnp.float32
            run = functools.partial(few._multiplied, loras=(), tile=few.Tile(*tile), splits=splits, activation=0)
            return lambda x, weights: [run(x, each, width=width, dtype=dtype) for each in weights]

        if len(sizes) == 1:
            for splits in (1, 2, 4):
                forms = [functools.partial(reference.products, splits=splits)]
                if splits == 1:
                    forms = [reference.products]
                run = lambda x, weights, own=forms[0]: [own(x, each) for each in weights]  # noqa: E731
                say(f"{name}, XLA, {splits} parts", lambda run=run: microseconds(run, (x, weights), calls))
        else:
            run = lambda x, weights: [reference.each_product(x, each, ()) for each in weights]  # noqa: E731
            say(f"{name}, XLA", lambda: microseconds(run, (x, weights), calls))
        for tile in tiles:
            say(f"{name}, {tile}", lambda tile=tile: microseconds(kernel(tile), (x, weights), calls))

    product("qkv", (4096, 1024, 1024), 4096, TILES)
    halves = ((128, 64, 8, 6, 128, 2), (128, 64, 4, 6, 128, 2), (128, 64, 8, 4, 256, 4), (64, 64, 4, 4, 128, 1))
    product("o", (4096,), 4096, halves)
    product("down", (4096,), 14336, halves[:3])
    product("gate, up", (14336, 14336), 4096, ())
    pairs = [[drawn(100 + 2 * i + j, rows, 14336) for j in range(2)] for i in range(calls)]
    for block, form in ((0, reference), (1024, few), (2048, few), (4096, few)):

        def run(pairs, form=form, block=block):
            with mock.patch.object(few, "_BLOCK", block):
                return [form.activated(*pair, "silu") for pair in pairs]

        say(f"activated, block {block}", lambda run=run: microseconds(run, (pairs,), calls))
    x, weight = drawn(1, rows, 4096), drawn(2, 4096)
    for splits, dtype in ((1, jnp.bfloat16), (2, jnp.float32)):
        parts = [drawn(200 + i, splits, rows, 4096, dtype=dtype) for i in range(calls)]
        norms = lambda parts: [few.added_norm(x, p, weight, eps=1e-5, offset=0.0, float32=False) for p in parts]  # noqa: E731
        say(f"added_norm, {splits} parts", lambda norms=norms, parts=parts: microseconds(norms, (parts,), calls))
    logits = [drawn(300 + i, rows, 128256, dtype=jnp.float32) for i in range(3)]
    ones, numbers = jnp.ones(rows), jnp.linspace(0, 0.99, rows)
    for name, kernel in (("new", drawing_kernels.chunk_kernel), ("old", old_chunk_kernel)):
        with mock.patch.object(drawing_kernels, "chunk_kernel", kernel):
            choose = lambda logits: [drawing._by_kernels(each, 128256, ones, ones, numbers) for each in logits]  # noqa: E731
            say(f"chosen_token, {name}", lambda choose=choose: microseconds(choose, (logits,), 3))


ATTENTIONS = (
    ((16, 1, 3), 0, False),
    ((16, 1, 3), 28160, False),
    ((16, 1, 3), 32256, False),
    ((16, 1, 2), 28160, False),
    ((16, 1, 7), 0, False),
    ((32, 1, 2), 0, False),
    ((32, 4, 3), 0, False),
    ((32, 2, 3), 0, False),
    ((16, 1, 3), 0, True),
    ((32, 4, 3), 0, True),
    ((16, 1, 3), 0, False),
)


def attentions(say) -> None:
    """Microseconds of the attention of 256 rows over 456 keys, in a program of four, with caches of their own."""
    rows, layers = 256, 4
    parts = [0.3 * jax.random.normal(jax.random.key(i), (1, rows, 6144), jnp.bfloat16) for i in range(layers)]
    angles = jax.random.normal(jax.random.key(9), (rows, 64), jnp.float32)
    caches = [
        [0.3 * jax.random.normal(jax.random.key(20 + 2 * i + j), (rows, 8, 768, 128), jnp.bfloat16) for j in range(2)]
        for i in range(layers)
    ]
    positions = jnp.full(rows, 455, jnp.int32)
    wanted: list = []

    for tile, shared, launched in ATTENTIONS:

        def measure(tile=tile, shared=shared, launched=launched) -> dict:
            nonlocal caches

            def layers_of(parts, caches, angles, positions):
                made = []
                for part, (keys, values) in zip(parts, caches, strict=True):
                    made.append(
                        ATTENDED._by_kernel(
                            part,
                            keys,
                            values,
                            positions,
                            (jnp.cos(angles), jnp.sin(angles)),
                            None,
                            tile=Tile(*tile),
                            rounding=dict(eps=1e-5, offset=0.0, float32=False),
                            masking=dict(scale=128**-0.5, window=None, soft_cap=None, sinks=None),
                        )
                    )
                return [out for out, *_ in made], [cache for _, *cache in made]

            with contextlib.ExitStack() as stack:
                if shared:
                    stack.enter_context(with_shared(shared)())
                if launched:
                    stack.enter_context(
                        mock.patch.object(compat, "triton_graph_call", functools.partial(by_xla, ("attended",)))
                    )
                run = jax.jit(layers_of, donate_argnums=1)
                outs, caches = run(parts, caches, angles, positions)
            jax.block_until_ready(outs)
            wanted.append(outs[0])
            times = []
            for _ in range(3):
                began = time.perf_counter()
                for _ in range(20):
                    outs, caches = run(parts, caches, angles, positions)
                jax.block_until_ready(outs)
                times.append((time.perf_counter() - began) / 20 / layers * 1e6)
            apart = jnp.abs(outs[0].astype(jnp.float32) - wanted[0].astype(jnp.float32)).max()
            return {"us": round(min(times), 2), "largest difference": float(apart)}

        say(f"attention, {tile}, {shared} bytes{', by XLA' if launched else ''}", measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("ways", nargs="+")
    given = parser.parse_args()
    given.bandwidth, given.flops = 4.8e12, 650e12
    use_program_cache()
    record: dict = {"benchmark": "sampling_forms", **environment()}
    began = time.perf_counter()
    try:
        record["checks"] = checks()
    except Exception as error:
        record["checks"] = f"{type(error).__name__}: {str(error)[:1000]}"
    print(record["checks"], flush=True)
    if "pieces" in given.ways or "attentions" in given.ways:

        def say(name, measure):
            try:
                record[name] = measure()
            except Exception as error:
                record[name] = f"{type(error).__name__}: {str(error)[:500]}"
            print(name, record[name], round(time.perf_counter() - began, 1), flush=True)
            write(given.output, record)

        for name, measure in (("pieces", pieces), ("attentions", attentions)):
            if name in given.ways:
                measure(say)
    given.ways = [way for way in given.ways if ":" in way]
    model = random_model(SHAPES["llama-3.1-8b"], jax.random.key(0), None)
    for number, way in enumerate(given.ways):
        if time.perf_counter() - began > given.seconds - 22:
            print("no time left for", way, flush=True)
            continue
        count, form = way.split(":")
        jax.clear_caches()
        programs.cache_clear()
        name = f"{number} {way}"
        try:
            with contextlib.ExitStack() as stack:
                for patch in FORMS[form]:
                    stack.enter_context(patch())
                record[name] = full(model, int(count), given)
        except Exception as error:
            record[name] = f"{type(error).__name__}: {str(error)[:1000]}"
        record["seconds"] = round(time.perf_counter() - began, 1)
        print(name, record[name], record["seconds"], flush=True)
        write(given.output, record)


if __name__ == "__main__":
    main()
