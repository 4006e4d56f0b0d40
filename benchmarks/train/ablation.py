"""What each of the field's claims is worth in a step, each off and on, then all together; published beside ours.

    python benchmarks/train/ablation.py --model NAME --output FILE.json [--arms NAME,...]

  packed layout      metadata of packed rows built once a batch ("on"), or in every layer, kept apart by a barrier
                     ("layout_kept") or with a round trip to the host ("layout_host")
  overlapped reload  layer inputs on the host and layers computed again: transfers under compute ("offload"), or each
                     waited for ("serial"); the same plan
  sorted routing     tokens sorted into their experts' segments ("on"), `jax.lax.ragged_dot` over such rows ("ragged"),
                     or a loop over the experts, each over all tokens under a mask ("loop")
  all together       "offload" against "all_off": serial, layout_host, and loop where there are experts

Forward and backward of packed rows under LoRA r=16 on all linears and experts, random weights. A gain is the time of
what is off over that of what is on, less one; five runs of some steps each, and their spread, (largest - smallest) /
median. `--layers` cuts the models short, because every arm compiles a program of its own: a layer's share is the same
in a deeper model, that of embedding and head is larger here than there.

A call compiles the programs of a model's arms side by side, then times one arm after the other. What was measured is
added to the file and is not run again, so that several calls make one record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import optimization_barrier

import jaxtune
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES
from benchmarks.transfers import transfers
from jaxtune.models import stack
from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.experts import ExpertLinear, MoE
from jaxtune.models.lora import experts
from jaxtune.models.residual_plan import residuals_of
from jaxtune.models.rope import rotary_table
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.attention.shapes import log_normal_segments
from jaxtune.pallas.formats import dense
from jaxtune.pallas.routing import expert_weights
from jaxtune.train.data.batches import Batch
from jaxtune.train.loss import loss_sums
from jaxtune.train.planning.plan import parse_residuals
from jaxtune.train.programs import compiler_options

# model -> format of the frozen weights
MODELS = {
    "llama-3.2-1b": None,
    "qwen3-0.6b": None,
    "llama-3.1-8b": None,
    "qwen3-14b": "nf4",
    "qwen3-32b": "nf4",
    "gpt-oss-20b": None,
}
# arm -> (how layouts are built, how experts are computed, whether transfers overlap, plan)
_OFFLOAD = "recompute, layer_input=offload"
ARMS = {
    "on": ("once", "sorted", True, "keep"),
    "layout_kept": ("per_layer_kept", "sorted", True, "keep"),
    "layout_host": ("per_layer_host", "sorted", True, "keep"),
    "ragged": ("once", "ragged", True, "keep"),
    "loop": ("once", "loop", True, "keep"),
    "offload": ("once", "sorted", True, _OFFLOAD),
    "serial": ("once", "sorted", False, _OFFLOAD),
    "all_off": ("per_layer_host", "loop", False, _OFFLOAD),
}
# (claim, arm that is off, arm that is on, models it is of, {model: published gain of the step})
_ALL = tuple(MODELS)
_LAYOUT = {"qwen3-14b": "14.3 %", "llama-3.2-1b": "11.5 % (predicted)", "qwen3-0.6b": "14.8 % (predicted)"}
CLAIMS: tuple[tuple[str, str, str, tuple[str, ...], dict[str, str]], ...] = (
    ("packed layout: once, not in every layer", "layout_kept", "on", _ALL, {}),
    ("packed layout: no round trip to the host a layer", "layout_host", "on", _ALL, _LAYOUT),
    ("overlapped reload: not serial", "serial", "offload", _ALL, dict.fromkeys(("llama-3.1-8b", "qwen3-14b"), "8 %")),
    ("sorted routing: not ragged_dot", "ragged", "on", ("gpt-oss-20b",), {}),
    ("sorted routing: not a loop over experts", "loop", "on", ("gpt-oss-20b",), {"gpt-oss-20b": "10-15 %"}),
    ("all together", "all_off", "offload", _ALL, dict.fromkeys(_ALL, "25 %")),
)
RUNS = 5
COMPILERS = 6


# ---- the arms


def _host_bounds(segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """doc_start, doc_end int32[rows, length], as the host finds them."""
    starts, ends = np.empty_like(segment_ids), np.empty_like(segment_ids)
    for row, ids in enumerate(np.asarray(segment_ids)):
        edges = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1], [True]]))
        runs = np.diff(edges)
        starts[row], ends[row] = np.repeat(edges[:-1], runs), np.repeat(edges[1:], runs)
    index = np.arange(segment_ids.shape[1], dtype=np.int32)
    real = segment_ids != 0
    return np.where(real, starts, index).astype(np.int32), np.where(real, ends, index).astype(np.int32)


def _kept_apart(x, segment_ids):
    x, segment_ids = optimization_barrier((x, segment_ids))
    return x, packed_layout(segment_ids.shape, segment_ids)


def _from_host(x, segment_ids):
    x, segment_ids = optimization_barrier((x, segment_ids))
    shape = jax.ShapeDtypeStruct(segment_ids.shape, jnp.int32)
    bounds = jax.pure_callback(_host_bounds, (shape, shape), segment_ids)
    x, bounds = optimization_barrier((x, bounds))  # the layer does not begin before the answer is there
    return x, PackedLayout(*bounds)


_LAYOUTS: dict[str, Callable | None] = {
    "once": None, "per_layer_kept": _kept_apart, "per_layer_host": _from_host
}  # fmt: skip


@contextlib.contextmanager
def layouts(name: str, model: Decoder) -> Iterator[None]:
    """While tracing: every layer of the forward builds its layout in this way.

    The segment ids travel to the layers as one more pair behind the rotary tables of the batch's layout.
    """
    bounds = _LAYOUTS[name]
    if bounds is None:
        yield
        return
    once, forward, backward = Decoder.layout, stack.layer_forward, stack.layer_backward
    config = model.config

    def with_ids(self, shape, segment_ids=None, positions=None, max_documents=None):
        layout = once(self, shape, segment_ids, positions, max_documents)
        return PackedLayout(layout.doc_start, layout.doc_end, (*layout.rotary, (segment_ids, segment_ids)))

    def build_and_run(graph, spec, wanted, trainable, frozen, x, layout, *rest, **options):
        x, own = bounds(x, layout.rotary[-1][0])
        tables = tuple(
            rotary_table(rope, config.head_dim, config.max_position_embeddings, own.positions())
            for rope in config.rotary
        )
        own = PackedLayout(own.doc_start, own.doc_end, tables)
        return forward(graph, spec, wanted, trainable, frozen, x, own, *rest, **options)

    def run_back(graph, spec, trainable, frozen, saved, doutput, layout, *rest, **options):
        saved_layout = PackedLayout(layout.doc_start, layout.doc_end, layout.rotary[:-1])
        return backward(graph, spec, trainable, frozen, saved, doutput, saved_layout, *rest, **options)

    with (
        mock.patch.object(Decoder, "layout", with_ids),
        mock.patch.object(stack, "layer_forward", build_and_run),
        mock.patch.object(stack, "layer_backward", run_back),
    ):
        yield


def _precision(dtype):
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _matrices(linear: ExpertLinear, dtype):
    """(weight [E, in, out], bias [E, out] or None, (a [E, in, r], b [E, r, out]) or None, scale)"""
    weight = dense(linear.stored_weight, dtype).astype(dtype)
    weight = weight if linear.transposed else weight.mT
    bias = None if linear.bias is None else linear.bias[...].astype(jnp.float32)
    if linear.lora is None:
        return weight, bias, None, 1.0
    lora = linear.lora.weights()
    return weight, bias, (lora.a.mT.astype(dtype), lora.b.mT.astype(dtype)), lora.scale


def ragged_gate_up(self: MoE, x: jax.Array, choice: jax.Array) -> jax.Array:
    """[pairs, 2 * expert_size], pairs sorted by expert without gaps."""
    order, _, sizes, expert = _sorted(choice, self.moe.num_experts)
    rows = x.reshape(-1, x.shape[-1])[order // choice.shape[1]]
    return _ragged(rows, self.experts.gate_up_proj, sizes, expert, jnp.ones(len(order)))


def ragged_down(self: MoE, gate_up: jax.Array, choice: jax.Array, x: jax.Array) -> jax.Array:
    weights = expert_weights(self.router(x.reshape(-1, x.shape[-1])), choice, renormalize=self.moe.renormalize)
    order, back, sizes, expert = _sorted(choice, self.moe.num_experts)
    weights = weights.reshape(-1)[order]
    inner = (self._activated(gate_up) * weights[:, None]).astype(x.dtype)
    out = _ragged(inner, self.experts.down_proj, sizes, expert, weights)
    return out[back].reshape(*choice.shape, -1).astype(jnp.float32).sum(1).astype(x.dtype).reshape(x.shape)


def _sorted(choice, num_experts: int):
    """(order of the pairs by expert, its inverse, int32[E] sizes, expert of each sorted pair)"""
    flat = choice.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)  # of padding, E, none
    return order, jnp.argsort(order), sizes, flat[order]


def _ragged(rows, linear: ExpertLinear, sizes, expert, weights):
    weight, bias, lora, scale = _matrices(linear, rows.dtype)

    def product(x, w):
        return jax.lax.ragged_dot(x, w, sizes, precision=_precision(x.dtype), preferred_element_type=x.dtype)

    out = product(rows, weight).astype(jnp.float32)
    if lora is not None:
        out += scale * product(product(rows, lora[0]), lora[1]).astype(jnp.float32)
    if bias is not None:
        out += weights[:, None] * bias.at[expert].get(mode="fill", fill_value=0)
    return jnp.where(expert[:, None] < len(sizes), out, 0).astype(rows.dtype)


def loop_gate_up(self: MoE, x: jax.Array, choice: jax.Array) -> jax.Array:
    """Nothing: in a loop every expert's own is gone before the next one's is there."""
    return jnp.zeros((0, 2 * self.moe.expert_size), x.dtype)


def loop_down(self: MoE, gate_up: jax.Array, choice: jax.Array, x: jax.Array) -> jax.Array:
    """Expert by expert over all tokens; in the backward each is computed again, as their products would fill memory."""
    tokens = x.reshape(-1, x.shape[-1])
    weights = expert_weights(self.router(tokens), choice, renormalize=self.moe.renormalize)
    linears = (self.experts.gate_up_proj, self.experts.down_proj)
    parts = [_matrices(linear, x.dtype) for linear in linears]

    def product(rows, matrices, scale, factor):
        weight, bias, lora = matrices

        def dot(a, b):
            return jnp.matmul(a, b, precision=_precision(a.dtype), preferred_element_type=a.dtype)

        out = dot(rows, weight).astype(jnp.float32)
        if lora is not None:
            out += scale * dot(dot(rows, lora[0]), lora[1]).astype(jnp.float32)
        if bias is not None:
            out += factor[:, None] * bias
        return out.astype(rows.dtype)

    @jax.checkpoint
    def one(total, step):
        expert, *matrices = step
        own = jnp.where(choice == expert, weights, 0.0).sum(1)
        wide = product(tokens, matrices[0], parts[0][3], jnp.ones_like(own))
        inner = (self._activated(wide) * own[:, None]).astype(x.dtype)
        return total + product(inner, matrices[1], parts[1][3], own).astype(jnp.float32), None

    steps = (jnp.arange(self.moe.num_experts), *(part[:3] for part in parts))
    total = jax.lax.scan(one, jnp.zeros(tokens.shape, jnp.float32), steps)[0]
    return total.astype(x.dtype).reshape(x.shape)


_EXPERTS = {"ragged": (ragged_gate_up, ragged_down), "loop": (loop_gate_up, loop_down)}


@contextlib.contextmanager
def arm(name: str, model) -> Iterator[None]:
    """While tracing: what the arm does in another way than jaxtune."""
    layout, how, overlapped, _ = ARMS[name]
    jax.clear_caches()  # layer functions are traced once a process
    with contextlib.ExitStack() as patches:
        patches.enter_context(layouts(layout, model))
        if how in _EXPERTS:
            for method, function in zip(("gate_up", "down"), _EXPERTS[how], strict=True):
                patches.enter_context(mock.patch.object(MoE, method, function))
        patches.enter_context(transfers("overlapped" if overlapped else "serial"))
        yield
    jax.clear_caches()


# ---- one arm of one model

_TINY = {"hidden_size": 64, "vocab_size": 512, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}


def build(name: str, layers: int, tiny: bool):
    """The model, with adapters on all linears and experts."""
    hf = {**SHAPES[name]}
    layers = min(layers, hf["num_hidden_layers"])
    hf["num_hidden_layers"] = layers
    if hf.get("layer_types"):
        hf["layer_types"] = hf["layer_types"][:layers]
    if tiny:
        hf |= {key: value for key, value in _TINY.items() if key in hf}
    model = random_model(hf, jax.random.key(0), MODELS[name])
    names = [name for name, _ in experts(model)]
    return jaxtune.get_peft_model(model, r=16, lora_alpha=16, target_parameters=names)


def build_batch(rows: int, length: int, vocab_size: int) -> Batch:
    """Random tokens in documents of log-normal lengths (mean 512, sigma 0.8, at most the row)."""
    segments = log_normal_segments(rows, length, mean=min(512, length // 4), sigma=0.8)
    tokens = np.random.default_rng(0).integers(0, vocab_size, segments.shape, np.int32)
    targets = np.roll(tokens, -1, 1)
    weights = np.ones(segments.shape, np.float32)
    weights[:, -1] = 0
    weights[:, :-1][segments[:, 1:] != segments[:, :-1]] = 0
    positions = np.arange(length, dtype=np.int32) - _host_bounds(segments)[0]
    return jax.device_put(Batch(tokens, targets, weights, segments, positions))


def measure(model_name: str, arms: list[str], options) -> Iterator[tuple[str, dict]]:
    """(arm, its record, or {"error": why there is none}) of one model."""
    model = build(model_name, options.layers, options.tiny)
    batch = build_batch(options.rows, options.length, model.config.vocab_size)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    arguments = (trainable, frozen, batch)
    settings = compiler_options("gpu" if jax.default_backend() == "gpu" else "cpu", deterministic=False)

    def lowered(name: str) -> list:
        """[the forward, forward and backward]"""
        plan = parse_residuals(ARMS[name][3], len(model.layers), residuals_of(model.layers))

        def loss(trainable, frozen, batch):
            total, count, _ = loss_sums(nnx.merge(graph, trainable, frozen), batch, plan=plan)
            return total / count

        with arm(name, model):
            return [jax.jit(what).lower(*arguments) for what in (loss, jax.value_and_grad(loss))]

    def runs(program) -> list[float]:
        for _ in range(2):
            jax.block_until_ready(program(*arguments))
        found = []
        for _ in range(RUNS):
            begun = time.perf_counter()
            for _ in range(options.steps):
                jax.block_until_ready(program(*arguments))  # as a step's loss is waited for
            found.append((time.perf_counter() - begun) / options.steps * 1e3)
        return found

    def record(name: str, programs) -> dict:
        forward, step = (program.result() for program in programs)
        value, gradient = step(*arguments)
        return {
            "model": model_name,
            "arm": name,
            **environment(),
            "layers": len(model.layers),
            "layers_of_the_model": SHAPES[model_name]["num_hidden_layers"],
            "frozen_weights": MODELS[model_name] or "bfloat16",
            "plan": ARMS[name][3],
            "attention": dispatch.record["attention"][0],
            "loss": float(value),
            "gradient_norm": float(jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))),
            "forward_ms": runs(forward),
            "forward_backward_ms": runs(step),
        }

    def why_not(error: Exception) -> dict:  # a limit of the library or of the GPU: it belongs in the record
        return {"error": f"{type(error).__name__}: {str(error)[:800]}"}

    compiled = {}
    with ThreadPoolExecutor(COMPILERS) as pool:
        for name in arms:
            try:
                programs = lowered(name)
            except Exception as error:
                yield name, why_not(error)
                continue
            compiled[name] = [pool.submit(program.compile, compiler_options=settings) for program in programs]
    for name, programs in compiled.items():  # the pool is done: nothing compiles while something is timed
        try:
            yield name, record(name, programs)
        except Exception as error:
            yield name, why_not(error)


# ---- all of them


def arms_of(model: str) -> list[str]:
    """Those that a claim needs."""
    wanted = {arm for _, off, on, models, _ in CLAIMS if model in models for arm in (off, on)}
    return [arm for arm in ARMS if arm in wanted]


def gains(entries: dict[str, dict]) -> list[dict]:
    """The claims whose two arms were measured: off over on, less one, in the medians of their runs."""
    found = []
    for claim, off, on, models, published in CLAIMS:
        for model in models:
            both = [entries.get(f"{model} {name}", {}) for name in (off, on)]
            if not all("forward_backward_ms" in entry for entry in both):
                continue
            row: dict = {"claim": claim, "model": model, "published": published.get(model), "off": off, "on": on}
            row["loss_differs_by"] = abs(both[0]["loss"] - both[1]["loss"])
            for key in ("forward_ms", "forward_backward_ms"):
                slow, fast = (statistics.median(entry[key]) for entry in both)
                # Of the ratio, were the slowest run of one beside the fastest of the other.
                least = min(both[0][key]) / max(both[1][key]) - 1
                most = max(both[0][key]) / min(both[1][key]) - 1
                row[key.replace("_ms", "_gain")] = slow / fast - 1
                row[key.replace("_ms", "_gain_range")] = [least, most]
            found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--model", required=True, choices=list(MODELS))
    parser.add_argument("--arms", help="by commas; default: those that the claims of the model need")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="steps of each of the five runs")
    parser.add_argument("--again", action="store_true", help="arms that failed, once more")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    options = parser.parse_args()
    arms = options.arms.split(",") if options.arms else arms_of(options.model)
    if unknown := set(arms) - set(ARMS):
        parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(ARMS)}")
    output = Path(options.output)
    record = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    settings = {key: getattr(options, key) for key in ("rows", "length", "layers", "tiny")}
    if record and record["settings"] != settings:
        parser.error(f"{output} is of {record['settings']}: name another file")
    record = {"benchmark": "train/ablation", "settings": settings, "entries": record.get("entries", {})}
    done = {name: record["entries"].get(f"{options.model} {name}") for name in arms}
    left = [name for name, entry in done.items() if entry is None or ("error" in entry and options.again)]
    for name, entry in measure(options.model, left, options):
        record["entries"][f"{options.model} {name}"] = entry
        record["claims"] = gains(record["entries"])
        write(output, record)
        times = [statistics.median(entry[key]) for key in ("forward_ms", "forward_backward_ms") if key in entry]
        print(options.model, name, [round(ms, 2) for ms in times] or entry["error"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
