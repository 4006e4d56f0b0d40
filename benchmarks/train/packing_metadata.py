"""What it gains to build the packing metadata (document bounds, rotary tables) once a batch and not in every layer.

    python benchmarks/train/packing_metadata.py --output FILE.json [--models NAME,...] [--layers 8]

A gain of 43 % forward, 6 % backward and 14 % of the step was published for a torch stack (Qwen3-14B QLoRA), where every
layer waited for the host to learn the documents' lengths; 11.5 % and 14.8 % of the step were predicted for Llama-3.2-1B
and Qwen3-0.6B. Here the same three shapes, with LoRA r=16 on all linears, in four ways:

  once               what jaxtune does
  per_layer          every layer builds its own, as XLA leaves it: it merges equal work
  per_layer_kept     the same, kept apart by an optimization barrier on the segment ids
  per_layer_host     every layer asks the host for the bounds and waits for the answer

Layers build in the forward only; the backward has what the forward saved, as in the published stack. Nothing is
recomputed. `--layers` cuts the models short, because each way compiles a program of its own: the share of a layer is
the same in a deeper model, that of embedding and head is larger here than there. scans_in_program counts how often the
compiled step scans the segment ids: it shows what XLA merged.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import optimization_barrier

import jaxtune
from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES
from jaxtune.models import stack
from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import model_from_config
from jaxtune.models.quant import quantize
from jaxtune.models.rope import rotary_table
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.attention.shapes import log_normal_segments
from jaxtune.train.data.batches import Batch
from jaxtune.train.loss import loss_sums

# name -> (Hugging Face config, format of the frozen weights, published gain of the step)
MODELS = {
    "qwen3-14b": (SHAPES["qwen3-14b"], "nf4", 0.14),
    "llama-3.2-1b": (SHAPES["llama-3.2-1b"], None, 0.115),
    "qwen3-0.6b": (SHAPES["qwen3-0.6b"], None, 0.148),
}


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


def _from_device(x, segment_ids):
    return x, packed_layout(segment_ids.shape, segment_ids)


def _kept_apart(x, segment_ids):
    x, segment_ids = optimization_barrier((x, segment_ids))
    return _from_device(x, segment_ids)


def _from_host(x, segment_ids):
    x, segment_ids = optimization_barrier((x, segment_ids))
    shape = jax.ShapeDtypeStruct(segment_ids.shape, jnp.int32)
    bounds = jax.pure_callback(_host_bounds, (shape, shape), segment_ids)
    x, bounds = optimization_barrier((x, bounds))  # the layer does not begin before the answer is there
    return x, PackedLayout(*bounds)


ARMS: dict[str, Callable | None] = {
    "once": None,
    "per_layer": _from_device,
    "per_layer_kept": _kept_apart,
    "per_layer_host": _from_host,
}


@contextlib.contextmanager
def arm(name: str, model: Decoder):
    """While tracing: every layer of the forward builds its layout in the arm's way.

    The segment ids travel to the layers as one more pair behind the rotary tables of the batch's layout.
    """
    bounds = ARMS[name]
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


def build_model(shape: dict, load_in: str | None, layers: int) -> Decoder:
    shape = {**shape, "num_hidden_layers": min(layers, shape["num_hidden_layers"])}
    model = model_from_config(shape, jax.random.key(0), "bfloat16")
    if load_in is not None:
        model = quantize(model, load_in)
    return jaxtune.get_peft_model(model, r=16, lora_alpha=16)


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


def milliseconds(run: Callable, arguments: tuple, rounds: int) -> float:
    """Median time of one run that is waited for, as a step's loss is."""
    for _ in range(2):
        jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def measure(name: str, options) -> dict:
    shape, load_in, published = MODELS[name]
    if options.tiny:  # the same code on a machine without a GPU
        shape = {**shape, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "head_dim": 16}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = build_model(shape, load_in, options.layers)
    batch = build_batch(options.rows, options.length, shape["vocab_size"])
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def loss(trainable, frozen, batch):
        total, count, _ = loss_sums(nnx.merge(graph, trainable, frozen), batch)
        return total / count

    arms: dict[str, dict] = {}
    for arm_name in ARMS:
        with arm(arm_name, model):
            # New functions for each arm: jit keeps what it traced by the function.
            forward = jax.jit(lambda *a: loss(*a)).lower(trainable, frozen, batch).compile()
            step = jax.jit(lambda *a: jax.value_and_grad(loss)(*a)).lower(trainable, frozen, batch).compile()
        arguments = (trainable, frozen, batch)
        forward_ms = milliseconds(forward, arguments, options.rounds)
        step_ms = milliseconds(step, arguments, options.rounds)
        arms[arm_name] = {
            "loss": float(step(*arguments)[0]),
            "forward_ms": forward_ms,
            "backward_ms": step_ms - forward_ms,
            "forward_backward_ms": step_ms,
            "scans_in_program": step.as_text().count(" reduce-window("),
        }
    for found in arms.values():
        # The published figures are gains of speed: time of the slower over that of the faster, less one.
        for key in ("forward_ms", "backward_ms", "forward_backward_ms"):
            found[f"gain_of_once_{key.removesuffix('_ms')}"] = found[key] / arms["once"][key] - 1
    return {
        "model": name,
        "layers": len(model.layers),
        "layers_of_the_published_model": MODELS[name][0]["num_hidden_layers"],
        "frozen_weights": load_in or "bfloat16",
        "attention": dispatch.record["attention"][0],
        "published_gain_of_step": published,
        "arms": arms,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    options = parser.parse_args()
    result = {
        "benchmark": "train/packing_metadata",
        **environment(),
        "rows": options.rows,
        "length": options.length,
        "models": [],
    }
    for name in options.models.split(","):
        found = measure(name, options)
        result["models"].append(found)
        write(options.output, result)
        for arm_name, values in found["arms"].items():
            shown = {k: round(v, 4) for k, v in values.items()}
            print(json.dumps({"model": name, "arm": arm_name, **shown}), flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
