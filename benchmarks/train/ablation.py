"""What each of the field's claims is worth in a step, each off and on, then all together; published beside ours.

    python benchmarks/train/ablation.py --model NAME --output FILE.json [--arms NAME,...]

  packed layout      metadata of packed rows built once a batch ("on"), or with a round trip to the host in every layer
                     ("layout_host")
  overlapped reload  layer inputs on the host and layers computed again: transfers under compute ("offload"), or each
                     waited for ("serial"); the same plan
  all together       "offload" against "all_off": serial and layout_host

Forward and backward of packed rows under LoRA r=16 on all linears and experts, random weights. A gain is the time of
what is off over that of what is on, less one; five runs of some steps each, and their spread. `--layers` cuts the
models short, because every arm compiles a program of its own: a layer's share is the same in a deeper model, that of
embedding and head is larger here than there. The stored record's other arms (layouts built in every layer without the
host, `ragged_dot`, a loop over experts, which "all_off" has too) are of `08e68ab:benchmarks/train/ablation.py`.

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
from collections.abc import Iterator
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
from benchmarks.kernels.timing import queued_ms
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES
from benchmarks.transfers import transfers
from jaxtune.models import stack
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import experts
from jaxtune.models.residual_plan import residuals_of
from jaxtune.models.rope import rotary_table
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.attention.shapes import log_normal_segments
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
# arm -> (whether every layer asks the host for its layout, transfers, plan)
_OFFLOAD = "recompute, layer_input=offload"
ARMS = {
    "on": (False, "overlapped", "keep"),
    "layout_host": (True, "overlapped", "keep"),
    "offload": (False, "overlapped", _OFFLOAD),
    "serial": (False, "serial", _OFFLOAD),
    "all_off": (True, "serial", _OFFLOAD),
}
# (claim, arm that is off, arm that is on, {model: published gain of the step})
CLAIMS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "packed layout: no round trip to the host a layer", "layout_host", "on",
        {"qwen3-14b": "14.3 %", "llama-3.2-1b": "11.5 % (predicted)", "qwen3-0.6b": "14.8 % (predicted)"},
    ),
    ("overlapped reload: not serial", "serial", "offload", dict.fromkeys(("llama-3.1-8b", "qwen3-14b"), "8 %")),
    ("all together", "all_off", "offload", dict.fromkeys(MODELS, "25 %")),
)  # fmt: skip
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


def _from_host(x, segment_ids):
    x, segment_ids = optimization_barrier((x, segment_ids))
    shape = jax.ShapeDtypeStruct(segment_ids.shape, jnp.int32)
    bounds = jax.pure_callback(_host_bounds, (shape, shape), segment_ids)
    x, bounds = optimization_barrier((x, bounds))  # the layer does not begin before the answer is there
    return x, PackedLayout(*bounds)


@contextlib.contextmanager
def layouts_from_host(model: Decoder) -> Iterator[None]:
    """While tracing: every layer of the forward asks the host for its layout.

    The segment ids travel to the layers as one more pair behind the rotary tables of the batch's layout.
    """
    once, forward, backward = Decoder.layout, stack.layer_forward, stack.layer_backward
    config = model.config

    def with_ids(self, shape, segment_ids=None, positions=None, max_documents=None):
        layout = once(self, shape, segment_ids, positions, max_documents)
        return PackedLayout(layout.doc_start, layout.doc_end, (*layout.rotary, (segment_ids, segment_ids)))

    def build_and_run(graph, spec, wanted, trainable, frozen, x, layout, *rest, **options):
        x, own = _from_host(x, layout.rotary[-1][0])
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


@contextlib.contextmanager
def arm(name: str, model: Decoder) -> Iterator[None]:
    """While tracing: what the arm does in another way than jaxtune."""
    asks_host, how, _ = ARMS[name]
    jax.clear_caches()  # layer functions are traced once a process
    with layouts_from_host(model) if asks_host else contextlib.nullcontext(), transfers(how):
        yield
    jax.clear_caches()


# ---- one arm of one model

_TINY = {"hidden_size": 64, "vocab_size": 512, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}


def build(name: str, layers: int, tiny: bool) -> Decoder:
    """The model, with adapters on all linears and experts."""
    hf = {**SHAPES[name]}
    hf["num_hidden_layers"] = min(layers, hf["num_hidden_layers"])
    if hf.get("layer_types"):
        hf["layer_types"] = hf["layer_types"][: hf["num_hidden_layers"]]
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
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    given = (trainable, frozen, build_batch(options.rows, options.length, model.config.vocab_size))
    settings = compiler_options("gpu" if jax.default_backend() == "gpu" else "cpu", deterministic=False)

    def lowered(name: str) -> list:
        """[the forward, forward and backward]"""
        plan = parse_residuals(ARMS[name][2], len(model.layers), residuals_of(model.layers))

        def loss(trainable, frozen, batch):
            total, count, _ = loss_sums(nnx.merge(graph, trainable, frozen), batch, plan=plan)
            return total / count

        with arm(name, model):
            return [jax.jit(what).lower(*given) for what in (loss, jax.value_and_grad(loss))]

    def record(name: str, programs) -> dict:
        forward, step = (program.result() for program in programs)
        value, gradient = step(*given)

        def runs(program) -> list[float]:
            def waited(*given):  # as a step's loss is waited for
                return jax.block_until_ready(program(*given))

            return [queued_ms(waited, *given, count=options.steps) for _ in range(RUNS)]

        return {
            "model": model_name,
            "arm": name,
            **environment(),
            "layers": len(model.layers),
            "frozen_weights": MODELS[model_name] or "bfloat16",
            "plan": ARMS[name][2],
            "attention": dispatch.record["attention"][0],
            "loss": float(value),
            "gradient_norm": float(jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))),
            "forward_ms": runs(forward),
            "forward_backward_ms": runs(step),
        }

    with ThreadPoolExecutor(COMPILERS) as pool:
        compiled = {
            name: [pool.submit(program.compile, compiler_options=settings) for program in lowered(name)]
            for name in arms
        }
    for name, programs in compiled.items():  # the pool is done: nothing compiles while something is timed
        try:
            yield name, record(name, programs)
        except Exception as error:  # a limit of the library or of the GPU: it belongs in the record
            yield name, {"error": f"{type(error).__name__}: {str(error)[:800]}"}


# ---- all of them


def gains(entries: dict[str, dict]) -> list[dict]:
    """The claims whose two arms were measured: off over on, less one, in the medians of their runs."""
    found = []
    for claim, off, on, published in CLAIMS:
        for model in MODELS:
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
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--model", required=True, choices=list(MODELS))
    parser.add_argument("--arms", default=",".join(ARMS), help="by commas; default: all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="steps of each of the five runs")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    options = parser.parse_args()
    arms = options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(ARMS)}")
    settings = {key: getattr(options, key) for key in ("rows", "length", "layers", "tiny")}
    record = {"benchmark": "train/ablation", "settings": settings, "entries": {}}
    if options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    if record["settings"] != settings:
        parser.error(f"{options.output} is of {record['settings']}: name another file")
    left = [name for name in arms if "loss" not in record["entries"].get(f"{options.model} {name}", {})]
    for name, entry in measure(options.model, left, options):
        record["entries"][f"{options.model} {name}"] = entry
        record["claims"] = gains(record["entries"])
        write(options.output, record)
        times = [statistics.median(entry[key]) for key in ("forward_ms", "forward_backward_ms") if key in entry]
        print(options.model, name, [round(ms, 2) for ms in times] or entry["error"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
