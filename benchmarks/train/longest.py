"""One optimizer step over one very long document, and proof that nothing overflows there.

    python benchmarks/train/longest.py step  [--length 350208] [--budget-gb 80] --output FILE.json
    python benchmarks/train/longest.py check [--length 350208] [--layers 2]     --output FILE.json

`step` runs one step of the whole model (8B shape, NF4 + LoRA r=32) by the planner's plan: its loss and gradient norm
must be finite. `check` takes a few layers of it at the same length, where tokens x width passes 2^31:

- hidden states of one document, against a forward over tiles of tokens (attention with an online softmax over pairs of
  tiles): the loss of random weights would hardly notice wrong ones;
- the loss and every gradient of a short document at the end of the long row, against that document alone.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from flax import nnx

import jaxtune
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES
from benchmarks.train import step
from jaxtune.models.lora import linears
from jaxtune.models.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.train.data.batches import Batch
from jaxtune.train.loss import loss_sums
from jaxtune.train.planning.devices import allow_pinned_memory, memory_peak_bytes
from jaxtune.train.planning.plan import residuals_text

TOLERANCE = 0.03  # of the norm; rounding to bf16 makes about a third of it, an overflow all


def make_model(options, layers: int | None = None):
    hf = SHAPES[options.shape] | {"max_position_embeddings": options.length}
    if layers is not None:
        hf["num_hidden_layers"] = layers
    if options.tiny:
        hf |= dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        hf |= dict(vocab_size=512)
    model = random_model(hf, jax.random.key(0), options.load_in)
    return jaxtune.get_peft_model(model, r=options.rank, lora_alpha=options.rank)


# ---- the check


def attend_tiles(query, key, value, scale: float):
    """Causal attention of one document over tiles [tiles, 1, t, heads, D]; float32 softmax."""
    _, _, size, heads, dim = query.shape
    kv_heads = key.shape[3]
    index = jnp.arange(size)

    def one(number, q):
        q = q[0].reshape(size, kv_heads, heads // kv_heads, dim)

        def add(other, carry):
            top, total, out = carry
            k, v = key[other, 0], value[other, 0]
            scores = jnp.einsum("tkgd,skd->kgts", q, k, preferred_element_type=jnp.float32) * scale
            hidden = (other == number) & (index[None, :] > index[:, None])
            scores = jnp.where(hidden, -jnp.inf, scores)
            new = jnp.maximum(top, scores.max(-1))
            weights, fade = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            added = jnp.einsum("kgts,skd->kgtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return new, total * fade + weights.sum(-1), out * fade[..., None] + added

        shape = (kv_heads, heads // kv_heads, size)
        start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))
        _, total, out = jax.lax.fori_loop(0, number + 1, add, start)
        out = jnp.moveaxis(out / total[..., None], 2, 0).reshape(1, size, heads, dim)
        return number + 1, out.astype(query.dtype)

    return jax.lax.scan(one, jnp.int32(0), query)[1]


@functools.partial(jax.jit, static_argnums=(0, 5))
def layer_by_tiles(graph, arrays, x, cos, sin, scale: float):
    """One layer over x [tiles, 1, t, hidden]."""
    block = nnx.merge(graph, arrays)
    query, key, value = jax.lax.map(
        lambda tile: block.mixer.project(block.normed("mixer", tile[0]), tile[1:]), (x, cos, sin)
    )
    out = attend_tiles(query, key, value, scale)

    def rest(tile):
        out, x = tile
        mid = block.added("mixer", x, block.mixer.output(out))
        return block.added("mlp", mid, block.mlp.down(*block.mlp.gate_up(block.normed("mlp", mid))))

    return jax.lax.map(rest, (out, x))


def hidden_by_tiles(model, tokens, tile: int):
    """[tiles, 1, t, hidden] after the final norm, of one document without windows."""
    tiles = tokens.shape[1] // tile
    x = jax.lax.map(model.embed, tokens.reshape(tiles, 1, tile))
    (cos, sin), *_ = model.layout(tokens.shape).rotary
    cos, sin = (a.reshape(tiles, 1, tile, -1) for a in (cos, sin))
    for block, spec in zip(model.layers, model.config.layers, strict=True):
        assert spec.window is None
        x = layer_by_tiles(*nnx.split(block), x, cos, sin, model.config.attention_scale)
    return jax.lax.map(model.norm, x)


def difference(one, other) -> float:
    """Of two trees: the largest |a - b| / |b| of any leaf, by norms."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(jnp.linalg.norm((a.astype(jnp.float32) - b.astype(jnp.float32)).ravel()) / jnp.linalg.norm(b.ravel()))
        for a, b in pairs
    )


def check(options) -> dict:
    model = make_model(options, options.layers)
    for _, linear in linears(model):  # adapters that add something
        linear.lora.b.set_value(0.02 * jax.random.normal(jax.random.key(7), linear.lora.b.shape))
    length, tile, short = options.length, options.tile, options.tile
    if length % tile:
        raise ValueError(f"--tile {tile} does not divide --length {length}")
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, model.config.vocab_size)
    plan = ResidualPlan.uniform(RECOMPUTE, options.layers)
    if model.config.moe is None:
        plan = ResidualPlan(plan.layers, tile)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def hidden(trainable, frozen, tokens):
        return nnx.merge(graph, trainable, frozen).hidden_states(tokens, plan=plan)

    ours = jax.jit(hidden)(trainable, frozen, tokens).reshape(-1, 1, tile, model.config.hidden_size)
    theirs = hidden_by_tiles(model, tokens, tile)
    worst = max(difference(ours[i], theirs[i]) for i in range(length // tile))
    del ours, theirs

    def batch_of(tokens, segments):
        weights = (segments == segments[:, -1:]).astype(jnp.float32).at[:, -1].set(0.0)
        return Batch(tokens, jnp.roll(tokens, -1, 1), weights, segments, None)

    def loss(trainable, frozen, batch, plan):
        model = nnx.merge(graph, trainable, frozen)
        total, count, _ = loss_sums(model, batch, max_documents=2, plan=plan)
        return total / count

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=3)
    segments = jnp.where(jnp.arange(length) < length - short, 1, 2)[None]
    ours = gradient(trainable, frozen, batch_of(tokens, segments), plan)
    alone = batch_of(tokens[:, -short:], segments[:, -short:])
    theirs = gradient(trainable, frozen, alone, ResidualPlan(plan.layers))
    record = {
        "layers": options.layers,
        "tile": tile,
        "hidden_states_difference": worst,
        "last_document_loss": float(ours[0]),
        "last_document_loss_alone": float(theirs[0]),
        "last_document_gradient_difference": difference(ours[1], theirs[1]),
    }
    close = abs(record["last_document_loss"] - record["last_document_loss_alone"]) < 0.01
    record["met"] = bool(close and max(worst, record["last_document_gradient_difference"]) < TOLERANCE)
    return record


# ---- the step


def one_step(options) -> dict:
    wanted = step.arguments().parse_args([])
    names = ("shape", "length", "rank", "load_in", "budget_gb")
    vars(wanted).update({name: getattr(options, name) for name in names} | dict(rows=1, plan="auto", steps=1))
    trainer = step.make_trainer(wanted, make_model(options))
    programs = trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, print)
    state, sums, frozen = trainer.model.first_state(trainer.engine)
    trainer.model.release()
    parts, _ = trainer.engine.load_step(0)
    begun = time.perf_counter()
    _, _, latest = programs.update(state, trainer.engine.accumulate(programs, sums, state, frozen, parts))
    loss, norm = float(latest["loss"]), float(latest["grad_norm"])
    planner = trainer.planner
    return {
        "loss": loss,
        "grad_norm": norm,
        "step_seconds": time.perf_counter() - begun,
        "compile_seconds": programs.seconds,
        "residuals": residuals_text(planner.plan.residuals),
        "predicted_step_seconds": planner.forecast.step_seconds,
        "predicted_peak_gb": planner.forecast.peak_bytes / 1e9,
        "compiled_peak_gb": planner.compiled_bytes(programs.accumulate, programs.update) / 1e9,
        "peak_memory_gb": memory_peak_bytes() / 1e9,
        "host_gb": planner.forecast.host_bytes / 1e9,
        "met": bool(latest["finite"]) and math.isfinite(loss) and norm > 0,
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "check"])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--length", type=int, default=350_208)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--load-in", default="nf4")
    parser.add_argument("--layers", type=int, default=2, help="of the check")
    parser.add_argument("--tile", type=int, default=2432, help="tokens of the check's tiles and of its short document")
    parser.add_argument("--budget-gb", type=float, help="of the step; memory.py also holds the allocator to it")
    parser.add_argument("--tiny", action="store_true", help="small matrices, to try it on a CPU")
    parser.add_argument("--cache", help="folder of compiled programs")
    parser.add_argument("--output", required=True)
    return parser


def main() -> int:
    options = arguments().parse_args()
    allow_pinned_memory()
    if options.cache:
        jax.config.update("jax_compilation_cache_dir", options.cache)
    found = one_step(options) if options.what == "step" else check(options)
    where = environment()
    record = {"benchmark": f"train/longest/{options.what}", **where, "shape": options.shape, "length": options.length}
    write(options.output, record | {"adapter_rank": options.rank, "load_in": options.load_in} | found)
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
