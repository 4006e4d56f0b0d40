"""What the steps of a run are given is nowhere else: a caller that keeps it has it twice in the device's memory."""

from __future__ import annotations

import gc

import jax
import pytest

from jaxtune.train.config import CheckpointConfig, OptimConfig
from jaxtune.train.engine.programs import Engine
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config


def live_bytes(trainer: Trainer, monkeypatch) -> list[int]:
    """Bytes of all living arrays after each step's micro-batches are dispatched, beside those before the run."""

    def living() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())

    live, before, accumulate = [], living(), Engine.accumulate

    def accumulated(engine, *arguments):
        sums = accumulate(engine, *arguments)
        live.append(living() - before)
        return sums

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "accumulate", accumulated)
        trainer.train()
    return live


@pytest.mark.parametrize("name", ("adamw", "muon", "adamw_8bit"))
def test_a_resumed_run_has_its_state_once(name, tmp_path, monkeypatch):
    """Twice, it also lay in the room for the next rows, and a 12 GB card found no block for the second step."""

    def trainer(steps: int) -> Trainer:
        saves = CheckpointConfig(every_steps=2, every_minutes=None)
        config = make_config(tmp_path / "run", steps=steps, checkpoint=saves, optim=OptimConfig(name=name))
        return Trainer(lora_model(layers=2), None, config, dataset(documents(16)), keeps_model=False)

    whole = live_bytes(trainer(2), monkeypatch)
    resumed = live_bytes(trainer(4), monkeypatch)
    assert len(whole) == len(resumed) == 2 and resumed[1] <= whole[1]
