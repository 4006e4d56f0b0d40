"""Where training forward, prefill and decoding give other bits on a GPU, and what decoding takes.

    python benchmarks/exact.py --output FILE.json [--layers 4] [--rows 64] [--parts operations pieces attention | again]

An 8B's shape with fewer layers, bf16, an adapter of rank 16 on every linear; 64 rows of 200 + 256 tokens.

    attention    shares of equal bits of attention's implementations in training and in decoding
    pieces       of each operation that adds up, the share of bits that kernels for few and for many rows have in common
    sampling     tokens/s of the sampler and how far its log-probabilities are from the training forward's
    again        sampling and operations with `deterministic`, then with one sum a product and Triton's attention
    operations   every operation on the same numbers (models/generation/differences.py): how many results, how many
                 have other bits, the largest difference
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
_PROMPT, _NEW = 200, 256
_SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def model_of(layers: int, small: bool) -> Any:
    import jax
    import jax.numpy as jnp

    import jaxtune
    from benchmarks.random_model import random_model
    from jaxtune.models.lora import matrices

    shape = _SHAPE | {"num_hidden_layers": layers}
    if small:
        shape |= {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = jaxtune.get_peft_model(random_model(shape, jax.random.key(0)), r=16)
    for place, (_, linear) in enumerate(matrices(model)):
        assert linear.lora is not None
        b = linear.lora.b
        b.set_value(0.02 * jax.random.normal(jax.random.key(place), b.shape, jnp.float32))
    return model


@contextlib.contextmanager
def replaced(changes: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Attributes have other values within, and programs are compiled anew."""
    import jax

    from jaxtune.models.generation import slots

    before = {where: getattr(*where) for where in changes}
    for where, value in changes.items():
        setattr(*where, value)
    slots.programs.cache_clear()
    jax.clear_caches()
    try:
        yield
    finally:
        for where, value in before.items():
            setattr(*where, value)
        slots.programs.cache_clear()
        jax.clear_caches()


def attention_bits(rows: int) -> dict[str, float]:
    """Shares of equal bits of the newest tokens' attention, of rows of 200 to 455 tokens."""
    import jax
    import jax.numpy as jnp

    from jaxtune.pallas.attention import attention_forward, packed_layout, triton
    from jaxtune.pallas.decode.attention import cache_of, decode_attention, ordered
    from jaxtune.pallas.decode.few_rows import attended

    heads, kv_heads, dim, length, capacity = 32, 8, 128, 456, 512
    draw = (
        jax.random.normal(k, (rows, length, n, dim), jnp.bfloat16)
        for k, n in zip(jax.random.split(jax.random.key(1), 3), (heads, kv_heads, kv_heads))
    )
    query, key, value = draw
    positions = jnp.linspace(200, length - 1, rows).astype(jnp.int32)

    def newest(array):
        return jnp.take_along_axis(array, positions[:, None, None, None], axis=1)[:, 0]

    real = (jnp.arange(length) <= positions[:, None]).astype(jnp.int32)
    caches = [cache_of(array, positions + 1, capacity) for array in (key, value)]
    before = [cache_of(array, positions, capacity) for array in (key, value)]
    new = jnp.concatenate([newest(a).reshape(rows, -1) for a in (query, key, value)], -1)[None]
    options = dict(scale=dim**-0.5)
    ways = {}

    def of_training(query, key, value, real, implementation):
        layout = packed_layout((rows, length), real, max_documents=1)
        return attention_forward(query, key, value, layout, implementation=implementation, **options)[0]

    for name in ("mosaic", "triton", "cudnn", "reference"):
        ways[f"training by {name}"] = lambda name=name: newest(
            jax.jit(of_training, static_argnums=4)(query, key, value, real, name)
        )
    for queries, keys, warps in ((64, 128, 4), (128, 64, 4), (128, 64, 8), (64, 32, 4), (16, 64, 1)):

        def by_tile(queries=queries, keys=keys, warps=warps):
            tiles = triton.TILES[227][128]
            new = dataclasses.replace(tiles, forward=triton.Tile(queries, keys, warps, 3))
            with replaced({(triton, "tiles"): lambda dim: new}):
                return newest(jax.jit(of_training, static_argnums=4)(query, key, value, real, "triton"))

        ways[f"training by triton, {queries} x {keys}, {warps} warps"] = by_tile
    for keys in (64, 128, 32):

        def in_order(keys=keys):
            tiles = triton.TILES[227][128]
            new = dataclasses.replace(tiles, forward=triton.Tile(64, keys, 4, 3))
            with replaced({(triton, "tiles"): lambda dim: new}):
                return jax.jit(functools.partial(ordered.decode, **options))(newest(query), *caches, positions + 1)

        ways[f"decoding in order, {keys}"] = in_order
    ways["decoding by attended"] = lambda: jax.jit(functools.partial(attended, **options))(new, *before, positions)[0]
    ways["decoding by attended, any batch"] = lambda: jax.jit(
        functools.partial(attended, batch_invariant=False, **options)
    )(new, *before, positions)[0]
    for name in ("triton", "mosaic"):
        ways[f"decoding by {name}"] = lambda name=name: jax.jit(
            functools.partial(decode_attention, implementation=name, **options)
        )(newest(query), *caches, positions + 1)
    return shares_of(ways, rows)


def shares_of(ways: dict[str, Any], rows: int) -> dict[str, Any]:
    """Shares of equal bits in the first `rows` rows, for each pair of ways; an error's text for one that is refused."""
    results, shares = {}, {}
    for name, way in ways.items():
        try:
            results[name] = way()[:rows]
        except Exception as error:
            shares[name] = f"{type(error).__name__}: {str(error)[:200]}"
    for (left, a), (right, b) in itertools.combinations(results.items(), 2):
        shares[f"{left} = {right}"] = round(float((a == b).mean()), 6)
    return shares


def pieces(rows: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from jaxtune.models.generation.xla_options import AS_TRAINED
    from jaxtune.pallas.decode.few_rows import added_norm, chosen_token, placed
    from jaxtune.pallas.decode.few_rows import triton as few
    from jaxtune.pallas.gated import thin
    from jaxtune.pallas.linear_cross_entropy import linear_token_losses
    from jaxtune.pallas.normed_heads import normed
    from jaxtune.pallas.normed_heads.reference import rotated
    from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

    many, hidden, inner, vocabulary, rank = 16384, 4096, 14336, 128256, 16

    def draw(number, *shape, scale=1.0):
        return (scale * jax.random.normal(jax.random.key(number), shape, jnp.float32)).astype(jnp.bfloat16)

    def trained(function, *operands):
        return jax.jit(function, compiler_options=AS_TRAINED)(*operands)

    def undivided(*operands):
        with replaced({(few, "_undivided"): lambda count, loras, programs: True}):
            return jax.jit(lambda *a: few.products(*a)[0])(*operands)

    x, table = draw(0, many, hidden), {}
    joined = jnp.concatenate([draw(n, rank, hidden, scale=hidden**-0.5) for n in (1, 3, 4)])
    tall = jnp.pad(joined, ((0, 64 - len(joined)), (0, 0)))
    thin_ways = {
        f"XLA, {n} rows": lambda n=n: trained(lambda x, w: jnp.dot(x, w.T), x[:n], joined)
        for n in (rows, 512, 2048, many)
    }
    thin_ways |= {
        f"one sum, {n} rows": lambda n=n: undivided(x[:n], [tall])[:, : len(joined)] for n in (rows, 128, many)
    }
    table["x A^T"] = shares_of(thin_ways, rows)
    for name, columns, out in (("output", hidden, hidden), ("down", inner, hidden), ("query", hidden, hidden + 2048)):
        left = draw(5, many // 4, columns)
        weight = draw(6, out, columns, scale=columns**-0.5)
        lora = LoraWeights(draw(7, rank, columns, scale=columns**-0.5), draw(8, out, rank, scale=0.1), None, 2.0)
        ways: dict[str, Any] = {
            f"{what}training's, {n} rows": lambda n=n, lora=given, left=left, weight=weight: trained(
                lambda x, w, lora: quant_matmul(x, [w], [lora])[0], left[:n], weight, lora
            )
            for what, given in (("", None), ("adapted, ", lora))
            for n in (rows, 512, many // 4)
        }
        ways |= {
            f"{what}one sum, {rows} rows": lambda given=given, left=left, weight=weight: undivided(
                left[:rows], [weight], given
            )
            for what, given in (("", ()), ("adapted, ", [lora]))
        }
        every = shares_of(ways, rows)
        table[name] = {k: v for k, v in every.items() if " = " not in k or k.count("adapted") != 1}
    weight = 1 + draw(9, hidden, scale=0.1)
    options: Any = dict(eps=1e-5, offset=0.0, float32=False)
    norms = {
        f"XLA, {n} rows": lambda n=n: trained(lambda x, w: normed(x, w, *options.values()), x[:n], weight)
        for n in (rows, 512, many)
    }
    norms |= {
        f"added_norm, {n} rows": lambda n=n: jax.jit(
            lambda x, w: added_norm(x, jnp.zeros((1, *x.shape), x.dtype), w, **options)[1]
        )(x[:n], weight)
        for n in (rows, many)
    }
    table["norm"] = shares_of(norms, rows)
    gate, up, down_a = draw(10, many, inner), draw(11, many, inner), draw(12, rank, inner)
    activated: dict[str, Any] = {
        f"thin kernel, {n} rows": lambda n=n: jax.jit(lambda g, u, a: thin.by_kernel(g, u, a, "silu", "gated")[0])(
            gate[:n], up[:n], down_a
        )
        for n in (rows, 512, many)
    }
    activated["XLA in steps"] = lambda: trained(lambda g, u: jax.nn.silu(g) * u, gate[:rows], up[:rows])
    activated["XLA in float32"] = lambda: trained(
        lambda g, u: (jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32)).astype(g.dtype),
        gate[:rows],
        up[:rows],
    )
    activated["kernel in steps"] = lambda: jax.jit(lambda g, u: few.activated(g, u, "silu"))(gate[:rows], up[:rows])
    table["activation"] = shares_of(activated, rows)
    heads = draw(13, 1, rows, 48 * 128)
    angles = jax.random.uniform(jax.random.key(14), (rows, 64), jnp.float32, 0, 500)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    cache = jnp.zeros((rows, 8, 128, 128), jnp.bfloat16)
    rotations: dict[str, Any] = {
        "XLA": lambda: trained(
            lambda h, c, s: jnp.asarray(rotated(False, h, c, s)).reshape(rows, 32, 128),
            heads.reshape(rows, 1, 48, 128)[:, :, :32],
            cos[:, None],
            sin[:, None],
        ),
        "placed": lambda: jax.jit(
            lambda h, c: placed(h, c, c, jnp.zeros(rows, jnp.int32), (cos, sin), None, **options)[0]
        )(heads, cache),
    }
    table["rotation"] = shares_of(rotations, rows)
    head, state = draw(15, vocabulary, hidden, scale=hidden**-0.5), draw(16, 1, 2048, hidden)
    product = functools.partial(jnp.einsum, "nd,vd->nv", preferred_element_type=jnp.float32)
    logits = {f"XLA, {n} rows": lambda n=n: trained(product, state[0, :n], head) for n in (rows, 512, 1024)}
    table["logits"] = shares_of(logits, rows)
    known = trained(product, state[0, :rows], head)
    unit = jnp.ones(rows, jnp.float32)
    tokens = known.argmax(-1)

    def loss(n):
        targets = jnp.zeros((1, n), jnp.int32).at[0, :rows].set(tokens)
        run = functools.partial(linear_token_losses, head_gradient=False)
        return -trained(run, state[:, :n], head, targets, jnp.ones((1, n), jnp.float32))[0]

    logprobs: dict[str, Any] = {f"loss, {n} rows": lambda n=n: loss(n) for n in (rows, 512, 1024, 2048)}
    logprobs["chosen_token"] = lambda: jax.jit(lambda l: chosen_token(l, vocabulary, unit, unit, None)[1])(known)
    table["log-probability"] = shares_of(logprobs, rows)
    return table


def sampled(model: Any, prompts: list[list[int]], deterministic: bool) -> dict[str, Any]:
    import numpy as np

    import jaxtune
    from jaxtune.models.generation.generate import training_logprobs

    with jaxtune.Sampler(model, len(prompts), _PROMPT + _NEW, deterministic=deterministic) as sampler:
        seconds = []
        for _ in range(3):
            begun = time.monotonic()
            rows = list(sampler.run(prompts, _NEW, temperature=1.0, eos_token_ids=()))
            seconds.append(time.monotonic() - begun)
    trained = np.array(training_logprobs(model, prompts, [row.ids for row in rows], _NEW))
    apart = np.array([row.logprobs for row in rows]) - trained
    return {
        "seconds": [round(s, 3) for s in seconds],
        "tokens_per_second": round(len(prompts) * _NEW / min(seconds[1:])),
        "tokens": apart.size,
        "other_bits": int((apart != 0).sum()),
        "mean": float(np.abs(apart).mean()),
        "largest": float(np.abs(apart).max()),
        "ids": [row.ids for row in rows],
    }


def operations(model: Any, prompts: list[list[int]], answers: list[list[int]], same_choices: bool) -> dict[str, Any]:
    from jaxtune.models.generation.differences import differences

    table: dict[str, list] = {}
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    for found in differences(model, texts, [len(p) for p in prompts], same_choices=same_choices):
        line = table.setdefault(f"{found.phase}: {found.operation}", [0, 0, 0.0])
        line[0] += found.numbers
        line[1] += found.differing
        line[2] = max(line[2], found.largest)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parts = ("operations", "pieces", "attention", "again")
    parser.add_argument("--parts", nargs="+", choices=parts, default=["operations", "pieces", "attention"])
    parser.add_argument("--small", action="store_true", help="a shape for a CPU")
    options = parser.parse_args()
    import jax
    import numpy as np

    from jaxtune.system.program_cache import use_program_cache

    use_program_cache()
    begun, record = time.monotonic(), {}

    def say(name: str, value: Any) -> None:
        record[name] = value
        Path(options.output).write_text(json.dumps(record, indent=1))
        shown = {k: v for k, v in value.items() if k != "ids"}
        print(
            f"[{time.monotonic() - begun:4.0f} s] {name}\n" + "\n".join(f"    {k}: {v}" for k, v in shown.items()),
            flush=True,
        )

    say("device", {"kind": jax.devices()[0].device_kind, "jax": jax.__version__})
    gpu = jax.default_backend() == "gpu"
    model = model_of(options.layers, options.small)
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(3, model.config.vocab_size, _PROMPT - n % 16).tolist() for n in range(options.rows)]
    same = "again" in options.parts
    found = sampled(model, prompts, same)
    answers = found.pop("ids")
    say("sampling, deterministic" if same else "sampling", found)
    if "operations" in options.parts:
        say("operations", operations(model, prompts, answers, False))
    if gpu and "pieces" in options.parts:
        for name, shares in pieces(options.rows).items():
            say(f"pieces: {name}", shares)
    if gpu and "attention" in options.parts:
        say("attention", attention_bits(options.rows))
    if gpu and same:
        import jaxtune.models.layers.attention as layers_attention
        from jaxtune.pallas.decode.few_rows import triton as few

        one_sum = {
            (few, "_undivided"): lambda count, loras, programs: True,
            (layers_attention, "attention_forward"): functools.partial(
                layers_attention.attention_forward, implementation="triton"
            ),
        }
        with replaced(one_sum):
            say("operations, one sum, attention by triton, deterministic", operations(model, prompts, answers, True))
            again = sampled(model, prompts, True)
            again.pop("ids")
            say("sampling, one sum, attention by triton, deterministic", again)
    say("seconds", {"all": round(time.monotonic() - begun)})


if __name__ == "__main__":
    main()
