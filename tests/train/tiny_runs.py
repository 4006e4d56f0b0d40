"""Tiny runs of the real Trainer: rows of random tokens, a random model, and a config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.lora import get_peft_model
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.step_spec import StepSpec

VOCAB = 48
LENGTH = 16


def documents(count: int, seed: int = 0, longest: int = LENGTH) -> list[Document]:
    """Documents of 2 to `longest` tokens; of each, a random share in front is a prompt that is not trained on.

    Every token is a fixed function of the one before, with a little noise: there is something to learn.
    """
    draw = np.random.default_rng(seed)
    follower = np.random.default_rng(0).permutation(VOCAB)  # one rule for all: held-out rows can be learnt from others
    made = []
    for _ in range(count):
        size = int(draw.integers(2, longest + 1))
        tokens = [int(draw.integers(VOCAB))]
        while len(tokens) < size:
            tokens.append(int(follower[tokens[-1]]) if draw.random() < 0.9 else int(draw.integers(VOCAB)))
        mask = np.arange(size) >= draw.integers(1, size)
        made.append(Document(np.asarray(tokens, np.int32), mask))
    return made


def dataset(made: list[Document], length: int = LENGTH, packing: bool = True) -> TokenDataset:
    return TokenDataset(Documents.gather(made), Summary(rows=len(made), documents=len(made)), length, packing)


def make_config(output: Path | str, **changes) -> TrainConfig:
    """fp32, four rows a step, no checkpoint, evaluation or weight decay, unless `changes` says otherwise."""
    settings = dict(
        model=ModelConfig(path="a model that the test made"),
        data=DataConfig(train="rows that the test made", length=LENGTH),
        steps=4,
        rows_per_step=4,
        precision="fp32",
        optim=OptimConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every_minutes=None),
        evaluation=EvaluationConfig(at_end=False),
        output=str(output),
    )
    return TrainConfig(**(settings | changes))


def lora_model(dtype="float32", layers: int = 1, **settings):
    """One layer by default: compiling is what takes the time of a test."""
    model = tiny_model(dtype, layers=(LayerSpec(),) * layers)
    return get_peft_model(model, **(dict(r=4, lora_alpha=8) | settings))


def arrays(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def assert_same(one, other):
    one, other = arrays(one), arrays(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def tiny_budget(tmp_path, **changes):
    """(config whose budget has no room for keeping everything in one micro-batch, model)."""
    model, config = lora_model(layers=2), make_config(tmp_path, rows_per_step=8, steps=4, **changes)
    parts = step_cost(model, StepSpec.of(config))
    most = choose(parts, StepSpec.of(config), find_device("cpu"), None).peak_bytes
    return dataclasses.replace(config, memory=MemoryConfig(budget_gb=0.75 * most / 2**30)), model
