"""Speed of generation: a published shape with random weights made on the device.

    python benchmarks/generate.py [--shape llama-3.1-8b] [--rows decode_bf16,decode_batch,prefill,decode_nf4]
                                  [--profile FOLDER] --output FILE.json

  decode_bf16   tokens/s of one row in bfloat16, and the bytes of the weights that a token reads, over the time of a
                token, as a share of the memory's bandwidth
  decode_nf4    the same with the layers' weights in NF4
  decode_batch  tokens/s of 32 rows in bfloat16
  prefill       tokens/s of prompts, beside the forward pass of training over the same tokens

A token's time is the difference of two runs of `generate` that differ by 127 tokens, over 127: prefill and the host's
part of a call fall out of it. The best of five runs, for nothing but the device should be in it. The file is written
after each row, and rows that it has are not run again. With --profile, one run of each row of decoding is traced
afterwards, and the row says its kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtune.profile
from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES
from jaxtune.models.decoder import Decoder
from jaxtune.models.generate import generate
from jaxtune.train.data.batches import Batch
from jaxtune.train.loss import Forward
from jaxtune.train.programs import compiler_options

RUNS = 5
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}  # bytes/s, by the data sheets
NEW = (129, 256)  # tokens of the two runs; one bucket, so one program


def best(run: Callable[[], object]) -> float:
    """Seconds, after a first run that compiles."""
    run()
    seconds = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def prompts(model: Decoder, batch: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, length)).tolist()


def read_bytes(model: Decoder) -> int:
    """Bytes of weights that a token reads: all but an embedding that is no head."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    tied = model.head is None
    return total if tied else total - sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.embedding)))


def decode(model: Decoder, batch: int, length: int = 128) -> dict:
    rows = prompts(model, batch, length)

    def run(new: int) -> Callable[[], object]:
        return lambda: generate(model, rows, max_new_tokens=new, eos_token_ids=[])

    short, long = (best(run(new)) for new in NEW)
    seconds = (long - short) / (NEW[1] - NEW[0])
    return {"batch": batch, "prompt": length, "token_seconds": seconds, "tokens_per_second": batch / seconds}


def kernels(model: Decoder, batch: int, length: int, folder: Path) -> dict:
    """Of a traced run of `decode`, by token: the kernels that take longest, [name, scope, shape, calls, us], the sum of
    all, and the time in which nothing ran."""
    rows, tokens = prompts(model, batch, length), NEW[0]
    with jaxtune.profile.capture(folder):
        generate(model, rows, max_new_tokens=tokens, eos_token_ids=[])
    report = jaxtune.profile.show(folder)
    found = sorted(report.kernels, key=lambda row: -row.ms)
    return {
        "kernels": sum(row.count for row in found) / tokens,
        "kernels_us": 1e3 * sum(row.ms for row in found) / tokens,
        "idle_us": 1e3 * report.idle.ms / tokens,
        "longest": [
            [row.name, row.scope, row.shape, round(row.count / tokens, 2), round(1e3 * row.ms / tokens, 2)]
            for row in found[:24]
        ],
    }


def one_row(model: Decoder) -> dict:
    measured, weights = decode(model, 1), read_bytes(model)
    bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
    share = None if bandwidth is None else weights / measured["token_seconds"] / bandwidth
    return measured | {"weights_gb": weights / 1e9, "share_of_bandwidth": share}


def prefill(model: Decoder, batch: int = 8, length: int = 2048) -> dict:
    rows = prompts(model, batch, length)
    seconds = best(lambda: generate(model, rows, max_new_tokens=1, eos_token_ids=[]))
    tokens = jnp.asarray(rows, jnp.int32)
    whole = jnp.ones_like(tokens)
    where = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    data = Batch(tokens, tokens, whole.astype(jnp.float32), whole, where)
    parts = nnx.split(model)

    def hidden(state, data):
        return Forward(max_documents=1).frozen(nnx.merge(parts[0], state), data)

    options = compiler_options(jax.devices()[0].platform, False)
    forward = jax.jit(hidden).lower(parts[1], data).compile(compiler_options=options)
    training = best(lambda: jax.block_until_ready(forward(parts[1], data)))
    count = batch * length
    return {
        "batch": batch, "prompt": length, "tokens_per_second": count / seconds,
        "training_forward_tokens_per_second": count / training, "of_training_forward": training / seconds,
    }  # fmt: skip


def must_show(rows: dict[str, dict]) -> list[dict]:
    """The figures that are asked for, of the rows that there are."""
    found = {}
    if share := rows.get("decode_bf16", {}).get("share_of_bandwidth"):
        found["decode of one row in bf16: share of the memory's bandwidth"] = share, 0.65
    if "prefill" in rows:
        found["prefill: of the training forward's rate"] = rows["prefill"]["of_training_forward"], 0.9
    for name, what, floor in (("decode_nf4", "NF4 over bf16", 1.8), ("decode_batch", "32 rows over one", 20.0)):
        if {name, "decode_bf16"} <= rows.keys():
            over = rows[name]["tokens_per_second"] / rows["decode_bf16"]["tokens_per_second"]
            found[f"decode: tokens/s of {what}"] = over, floor
    return [
        dict(what=what, value=value, floor=floor, goal=None, at_most=False) for what, (value, floor) in found.items()
    ]


# row -> (format of the layers' weights, what is measured)
ROWS: dict[str, tuple[str | None, Callable[[Decoder], dict]]] = {
    "decode_bf16": (None, one_row),
    "decode_batch": (None, lambda model: decode(model, 32)),
    "prefill": (None, prefill),
    "decode_nf4": ("nf4", one_row),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--profile", type=Path, help="folder for traces of decoding")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    path = Path(options.output)
    record = json.loads(path.read_text()) if path.exists() else {}
    record = {"benchmark": "generate", **environment(), "shape": options.shape, "rows": record.get("rows", {})}
    model, made = None, None
    for name in options.rows.split(","):
        load_in, measure = ROWS[name]
        if name in record["rows"]:
            continue
        begun = time.perf_counter()
        if model is None or made != load_in:
            model = None  # its memory, before the next one's is taken
            model, made = random_model(SHAPES[options.shape], jax.random.key(0), load_in), load_in
        record["rows"][name] = measure(model) | {"commit": record["commit"]}
        record["must_show"] = must_show(record["rows"])
        write(path, record)
        print(name, f"{time.perf_counter() - begun:.0f} s", json.dumps(record["rows"][name]), flush=True)
        if options.profile and name.startswith("decode"):
            row = record["rows"][name]
            row["profile"] = kernels(model, row["batch"], row["prompt"], options.profile / name)
            write(path, record)
            print(name, f"traced, {time.perf_counter() - begun:.0f} s", json.dumps(row["profile"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
