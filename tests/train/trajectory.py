"""The trajectory that both sides train: rows, start of the adapter, settings. numpy only, but inside functions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from random_weights import random_tensor, write_checkpoint
from tiny import CONFIGS

GOLDEN = Path(__file__).resolve().parent.parent / "goldens" / "trajectory.npz"
STEPS, WARMUP_STEPS, DOCUMENTS_PER_STEP = 50, 5, 8
RANK, ALPHA, PEAK, WEIGHT_DECAY, MAX_GRAD_NORM = 8, 16, 5e-3, 0.1, 1.0
LENGTHS = {"tiny": 32, "stories260K": 128}  # longer documents are cut; packed rows are twice as long


def learning_rate(step: int) -> float:
    """Of the update number `step` (from 0): linear warm-up, then linearly to zero at STEPS."""
    if step < WARMUP_STEPS:
        return PEAK * (step + 1) / WARMUP_STEPS
    return PEAK * (STEPS - step) / (STEPS - WARMUP_STEPS)


def start_of_a(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A of the adapter of the linear `name` (model.layers.0.self_attn.q_proj); B starts at zero."""
    return random_tensor(f"{name}.lora_A.weight", shape)


def tiny_checkpoint(folder: Path, family: str) -> Path:
    from checks import shapes_of

    write_checkpoint(folder, CONFIGS[family], shapes_of(CONFIGS[family]))
    return folder


def tiny_rows() -> list[list[int]]:
    """60 documents that follow a rule four times in five."""
    draw = np.random.default_rng(11)
    follower = draw.permutation(np.arange(3, 128))
    rows = []
    for _ in range(60):
        tokens = [int(draw.integers(3, 128))]
        for _ in range(int(draw.integers(5, 60))):
            follows = draw.random() < 0.8
            tokens.append(int(follower[tokens[-1] - 3]) if follows else int(draw.integers(3, 128)))
        rows.append(tokens)
    return rows


def stories(test_data: Path) -> tuple[Path, Path]:
    """(folder of the model, file of the rows) in the test data."""
    return test_data / "models" / "stories260K", test_data / "datasets" / "text" / "tinystories_first60.jsonl"


def story_texts(test_data: Path) -> list[str]:
    return [json.loads(line)["text"] for line in stories(test_data)[1].read_text(encoding="utf-8").splitlines()]


def step_documents(step: int, count: int) -> list[int]:
    """Which of `count` documents a step trains on."""
    return [(step * DOCUMENTS_PER_STEP + i) % count for i in range(DOCUMENTS_PER_STEP)]


def ours(model_folder: Path, data, output: Path, packed: bool, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """(losses, gradient norms) of jaxtune's Trainer, float64[steps]; data: a TokenDataset."""
    import jax.numpy as jnp

    from jaxtune.models.hf import from_pretrained
    from jaxtune.models.lora import get_peft_model, linears
    from jaxtune.train.config import (
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        ModelConfig,
        OptimConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from jaxtune.train.trainer import Trainer

    model = get_peft_model(from_pretrained(model_folder, dtype="float32")[0], r=RANK, lora_alpha=ALPHA)
    for name, linear in linears(model):
        linear.lora.a.set_value(jnp.asarray(start_of_a(name, linear.lora.a.shape)))
    batches = step_batches(data, packed, steps)
    config = TrainConfig(
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(train="rows", length=batches.length, packing=packed),
        steps=steps,
        rows_per_step=batches.rows_per_step,
        precision="fp32",
        max_grad_norm=MAX_GRAD_NORM,
        optim=OptimConfig(learning_rate=PEAK, weight_decay=WEIGHT_DECAY),
        schedule=ScheduleConfig(name="linear", warmup_steps=WARMUP_STEPS),
        checkpoint=CheckpointConfig(every_minutes=None),
        evaluation=EvaluationConfig(at_end=False),
        output=str(output),
    )
    trainer = Trainer(model, None, config, train_rows=batches)
    trainer.train()
    return tuple(np.asarray([line[key] for line in trainer.history]) for key in ("loss", "grad_norm"))


def step_batches(data, packed: bool, steps: int = STEPS):
    """The source of a run of chosen documents a step, where `Batches` packs whole sets: the same ones whether packed or
    not, in rows twice as long if packed."""
    from jaxtune.train.data.batches import BatchSource
    from jaxtune.train.data.packing.packing import pack

    documents = [data.documents[index] for index in range(len(data.documents))]
    cut = [type(d)(d.tokens[: data.length], d.mask[: data.length]) for d in documents]
    slots = 2 * data.length if packed else data.length
    made = []
    for step in range(steps):
        chosen = [cut[index] for index in step_documents(step, len(cut))]
        made.append(pack(chosen, slots, packing=packed)[0])

    class StepBatches(BatchSource):
        rows_per_step = max(len(batch.tokens) for batch in made)
        length = slots

        def batch_at(self, step: int, model=None):
            batch = self.empty(self.rows_per_step)
            for field in ("tokens", "targets", "weights", "segment_ids", "positions"):
                getattr(batch, field)[: len(made[step].tokens)] = getattr(made[step], field)
            return batch

    return StepBatches()
