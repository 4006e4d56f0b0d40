"""A small Qwen3.5, pretrained here on real text: are packed rows worth what single documents are, and which of its
matrices do four bits harm?

    JAX_PLATFORMS=cpu python benchmarks/train/qwen35.py --data FOLDER --output FILE.json

FOLDER holds the test data ($JAXTUNE_TEST_DATA). The model has gated delta nets and, in every fourth layer, gated
attention. It learns English from web pages, dialogues and school problems, in float32, on a CPU in some ten minutes.

Fine-tuning. LoRA on all linears for instructions and answers, by the same documents a step in each arm: one a row with
padding ("alone"); the same in another order ("reordered"), which differs by rounding alone; several a row ("packed");
and, so that one sees what is at stake, packed rows whose borders nobody heeds ("borders ignored"): the same tokens are
predicted, but state, convolution and attention come from the document before. Then packed over frozen weights in NF4.
Each arm ends with its loss on the same held-out documents, one a row.

Four bits. Of each matrix of each layer, it alone in NF4: the error of what the layer adds to its input, relative, at
the inputs of the unchanged model. Of each kind of matrix, all of that kind in NF4: by how much the held-out loss of the
pretrained model rises.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.record import environment, write
from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import copy_structure, get_peft_model, linears
from jaxtune.models.quant import quantize
from jaxtune.models.stack import run_stack
from jaxtune.pallas.formats import NF4, dense
from jaxtune.train import TrainConfig, Trainer
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
)
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.cache import Summary
from jaxtune.train.data.packing import Document, Documents, pack

RANK, DOCUMENTS_PER_STEP = 8, 8
PRETRAINING = ("text/c4_demo.jsonl", "alpaca/gpteacher_roleplay.jsonl", "gsm8k/train.jsonl")
INSTRUCTIONS = ("alpaca/alpaca_small.jsonl", "alpaca/alpaca_en_demo.jsonl")


def config(hidden: int, layers: int) -> dict[str, Any]:
    """Qwen3.5's features in a small shape; the vocabulary is that of the tokenizer of stories260K."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 512,
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32,
        "linear_num_key_heads": hidden // 64, "linear_num_value_heads": hidden // 32, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip


# ---- text


def texts(data: Path, files: Iterable[str]) -> list[str]:
    """The rows of data files, each as one text: all of its values, line by line."""
    found = []
    for name in files:
        for line in (data / "datasets" / name).read_text(encoding="utf-8").splitlines():
            found.append("\n".join(value for value in json.loads(line).values() if isinstance(value, str) and value))
    return found


def documents(rows: Sequence[str], tokenizer: Any, most: int) -> list[Document]:
    """Tokens of each text, of which all are trained on; longer texts are cut."""
    ids = tokenizer(list(rows), add_special_tokens=False)["input_ids"]
    ids = [[tokenizer.bos_token_id, *one, tokenizer.eos_token_id][:most] for one in ids]
    return [Document(np.asarray(one, np.int32), np.ones(len(one), bool)) for one in ids]


class StepBatches:
    """Chosen documents a step, the same ones whether packed or not: stands in for `Batches`, which packs whole sets.

    steps: the documents of each step. length: tokens of a row; longer documents are cut.
    """

    def __init__(self, steps: Sequence[Sequence[Document]], length: int, packed: bool):
        self.length = length
        self.made = [pack(chosen, length, packing=packed)[0] for chosen in steps]
        self.rows_per_step = max(len(batch.tokens) for batch in self.made)
        self.steps_per_epoch = len(steps)
        self.max_documents = None

    def empty(self, rows: int) -> Batch:
        return Batch.empty(rows, self.length)

    def batch_at(self, step: int) -> Batch:
        batch, made = self.empty(self.rows_per_step), self.made[step]
        for field in ("tokens", "targets", "weights", "segment_ids", "positions"):
            getattr(batch, field)[: len(made.tokens)] = getattr(made, field)
        return batch

    def sources_at(self, step: int) -> list[str]:
        return [f"step {step}"]


def without_borders(batches: StepBatches) -> StepBatches:
    """The same rows, each as one document; what is predicted stays."""
    for number, made in enumerate(batches.made):
        there = made.segment_ids > 0
        positions = np.where(there, np.arange(batches.length, dtype=np.int32), 0)
        batches.made[number] = dataclasses.replace(made, segment_ids=there.astype(np.int32), positions=positions)
    return batches


# ---- training


def trainer(model: Decoder, batches: StepBatches, output: Path, rate: float, **optim) -> Trainer:
    """Trains the model on these batches, in float32."""
    steps = batches.steps_per_epoch
    settings = TrainConfig(
        model=ModelConfig(path="here"),
        data=DataConfig(train="rows", length=batches.length),
        steps=steps,
        rows_per_step=batches.rows_per_step,
        precision="fp32",
        optim=OptimConfig(learning_rate=rate, **optim),
        schedule=ScheduleConfig(name="cosine", warmup_steps=max(steps // 20, 1)),
        checkpoint=CheckpointConfig(every_minutes=None),
        evaluation=EvaluationConfig(at_end=False),
        output=str(output),
    )
    rows = TokenDataset(Documents.gather([[1, 2]]), Summary(rows=1, documents=1), batches.length)
    found = Trainer(model, None, settings, train_rows=rows)
    found.batches = found.engine.batches = batches  # type: ignore[assignment]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _loss(graph, state, batch: Batch) -> jax.Array:
    model = nnx.merge(graph, state)
    logits = model(batch.tokens, batch.segment_ids, batch.positions)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return (each * batch.weights).sum()


def held_out_loss(model: Decoder, batch: Batch, rows: int = 16) -> float:
    """Nats of a token, of documents one a row."""
    graph, state = nnx.split(model)
    starts = range(0, len(batch.tokens), rows)
    pieces = [jax.tree.map(lambda array, at=at: array[at : at + rows], batch) for at in starts]
    return sum(float(_loss(graph, state, piece)) for piece in pieces) / float(batch.weights.sum())


def arm_batches(name: str, steps: list[list[Document]], length: int) -> StepBatches:
    """length: of a packed row; a document alone has half."""
    if name == "alone":
        return StepBatches(steps, length // 2, packed=False)
    if name == "reordered":
        return StepBatches([chosen[::-1] for chosen in steps], length // 2, packed=False)
    packed = StepBatches(steps, length, packed=True)
    return without_borders(packed) if name == "borders ignored" else packed


def fine_tuned(base: Decoder, batches: StepBatches, output: Path, rate: float, held_out: Batch) -> dict[str, Any]:
    began = time.perf_counter()
    run = trainer(get_peft_model(base, r=RANK, lora_alpha=RANK), batches, output, rate)
    model = run.train()
    losses = [line["loss"] for line in run.history if "loss" in line]
    return {
        "rows": batches.rows_per_step, "length": batches.length, "held_out": held_out_loss(model, held_out),
        "seconds": time.perf_counter() - began, "losses": losses,
    }  # fmt: skip


def differences(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each arm from "alone": the largest of a step's loss, and that of the held-out loss, signed."""
    plain = arms["alone"]
    return {
        name: {
            "step": float(np.abs(np.subtract(arm["losses"], plain["losses"])).max()),
            "held_out": arm["held_out"] - plain["held_out"],
        }
        for name, arm in arms.items()
        if name != "alone"
    }


# ---- four bits


def in_four_bits(model: Decoder, chosen: Callable[[str], bool]) -> Decoder:
    """A new model, in which the weights of the linears with these names are what NF4 makes of them."""
    model = copy_structure(model)
    for name, linear in linears(model):
        if chosen(name):
            linear.weight = linear.weight.replace(dense(NF4.encode(linear.weight[...])))
    return model


def relative(error: jax.Array, of: jax.Array) -> float:
    return float(jnp.linalg.norm(error) / jnp.linalg.norm(of))


def four_bits(model: Decoder, batch: Batch, show: Callable[[str], None] = print) -> dict[str, Any]:
    """{"matrices": [{"name", "weight_error", "output_error"}], "kinds": {"mixer.matrix": {means of both; "share" of the
    layers' weights; "loss_rises"}}, "all_rises", "loss"}; see the module's docstring."""
    weights = dict(linears(model))
    layout = model.layout(batch.tokens.shape, batch.segment_ids, batch.positions)
    there = (batch.segment_ids > 0)[..., None]
    x, matrices = model.embed(batch.tokens), []
    for index, (layer, spec) in enumerate(zip(model.layers, model.config.layers, strict=True)):
        y, _ = run_stack([layer], (spec,), x, layout)
        for name in weights:
            if not name.startswith(f"model.layers.{index}."):
                continue
            changed = in_four_bits(model, name.__eq__)
            got, _ = run_stack([changed.layers[index]], (spec,), x, layout)
            weight, rounded = weights[name].weight[...], dict(linears(changed))[name].weight[...]
            matrices.append({
                "name": name, "weight_error": relative(rounded - weight, weight),
                "output_error": relative(jnp.where(there, got - y, 0), jnp.where(there, y - x, 0)),
            })  # fmt: skip
        x = y
    total, loss, kinds = sum(w.weight[...].size for w in weights.values()), held_out_loss(model, batch), {}
    for kind in dict.fromkeys(kind_of(name) for name in weights):
        of_kind = [row for row in matrices if kind_of(row["name"]) == kind]
        rises = held_out_loss(in_four_bits(model, lambda name, kind=kind: kind_of(name) == kind), batch) - loss
        kinds[kind] = {
            "weight_error": float(np.mean([row["weight_error"] for row in of_kind])),
            "output_error": float(np.mean([row["output_error"] for row in of_kind])),
            "largest_output_error": max(row["output_error"] for row in of_kind),
            "share": sum(weights[row["name"]].weight[...].size for row in of_kind) / total,
            "loss_rises": rises,
        }  # fmt: skip
        show(f"{kind}: {kinds[kind]}")
    rises = held_out_loss(in_four_bits(model, lambda name: True), batch) - loss
    return {"loss": loss, "all_rises": rises, "kinds": kinds, "matrices": matrices}


def kind_of(name: str) -> str:
    """model.layers.3.self_attn.q_proj -> self_attn.q_proj"""
    return ".".join(name.split(".")[3:])


# ---- the whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder of the test data")
    parser.add_argument("--output", required=True)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="of a packed row; documents have half at most")
    parser.add_argument("--pretrain-steps", type=int, default=240)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--held-out", type=int, default=64, help="documents")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    jax.config.update("jax_default_matmul_precision", "highest")
    began = time.perf_counter()
    work = Path(tempfile.mkdtemp())
    tokenizer = AutoTokenizer.from_pretrained(options.data / "models" / "stories260K")
    draw = np.random.default_rng(0)

    def shuffled(files: Iterable[str], most: int) -> list[Document]:
        rows = texts(options.data, files)
        return documents([rows[index] for index in draw.permutation(len(rows))], tokenizer, most)

    english, asked = shuffled(PRETRAINING, options.length), shuffled(INSTRUCTIONS, options.length // 2)
    held_english, english = english[: options.held_out], english[options.held_out :]
    held_asked, asked = asked[: options.held_out], asked[options.held_out :]
    alone = functools.partial(pack, packing=False)
    held_english = alone(held_english, options.length)[0]
    held_asked = alone(held_asked, options.length // 2)[0]

    def taken(source: list[Document], steps: int) -> list[list[Document]]:
        return [[source[(step * DOCUMENTS_PER_STEP + i) % len(source)] for i in range(DOCUMENTS_PER_STEP)]
                for step in range(steps)]  # fmt: skip

    model = model_from_config(config(options.hidden, options.layers), jax.random.key(0), "float32")
    batches = StepBatches(taken(english, options.pretrain_steps), options.length, packed=True)
    pretraining = trainer(model, batches, work / "pretraining", 3e-3, weight_decay=0.1, beta2=0.95)
    base = pretraining.train()
    save_pretrained(base, work / "base")
    losses = [line["loss"] for line in pretraining.history if "loss" in line]
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(base, nnx.Param))]
    record: dict[str, Any] = {
        "benchmark": "train/qwen35", **environment(),
        "options": {name: value for name, value in vars(options).items() if name not in ("data", "output")},
        "parameters": sum(sizes), "documents_per_step": DOCUMENTS_PER_STEP, "rank": RANK,
        "pretraining": {
            "seconds": time.perf_counter() - began, "tokens": int(sum(made.weights.sum() for made in batches.made)),
            "losses": losses[::10], "held_out": held_out_loss(base, held_english),
        },
    }  # fmt: skip
    print({key: value for key, value in record["pretraining"].items() if key != "losses"}, flush=True)
    del pretraining, model

    record["four_bits"] = four_bits(base, jax.device_put(held_english), lambda line: print(line, flush=True))
    write(options.output, record)
    steps = taken(asked, options.steps)
    record["before"] = held_out_loss(base, held_asked)
    record["arms"] = arms = {}
    for name in ("alone", "packed", "reordered", "borders ignored", "packed, NF4"):
        loaded = from_pretrained(work / "base", dtype="float32")[0]
        loaded = quantize(loaded) if name.endswith("NF4") else loaded
        arms[name] = fine_tuned(loaded, arm_batches(name, steps, options.length), work / name, 2e-3, held_asked)
        record["differences"] = differences(arms)
        write(options.output, record)
        print(name, arms[name]["held_out"], record["differences"].get(name), flush=True)
    assert math.isfinite(arms["packed"]["held_out"])
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
