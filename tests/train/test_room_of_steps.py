"""A device of several without a block for a program: the run plans again, moves arrays, or ends; none waits for it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxtune.models.placement import partition
from jaxtune.models.programs import room
from jaxtune.train.config import MemoryConfig, MeshConfig
from jaxtune.train.trainer import Trainer
from tests.train.test_several_processes import recipe, run_all
from tests.train.tiny_runs import dataset, documents, lora_model, make_config, tiny_budget

__all__ = ["recipe"]
NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."


class Pools:
    """Allocators with limits; a hold fails whose number is in `refused`, as if one of its devices had no block."""

    def __init__(self, monkeypatch, refused):
        self.holds, hold = 0, room.hold

        def held(devices, sizes):
            self.holds += 1
            if self.holds in refused:
                raise jax.errors.JaxRuntimeError(NO_MEMORY)
            hold(devices, sizes)

        monkeypatch.setattr(room, "hold", held)
        monkeypatch.setattr(room, "_SMALL", 2**40)
        monkeypatch.setattr(room, "_stats", lambda device: {"bytes_limit": 2**40, "bytes_in_use": 2**39})


def trainer_of(folder):
    config, model = tiny_budget(folder, mesh=MeshConfig(fsdp=2))
    return Trainer(model, None, dataclasses.replace(config, memory=MemoryConfig()), dataset(documents(60)))


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.history]


def test_a_first_step_for_which_a_device_has_no_block_is_planned_again(tmp_path, monkeypatch, capsys):
    plain = losses(trainer_of(tmp_path / "plain"))
    pools = Pools(monkeypatch, {1})
    monkeypatch.setattr(room, "_few", lambda devices, need: None)
    trainer = trainer_of(tmp_path / "refused")
    first = trainer.planner.plan
    np.testing.assert_allclose(losses(trainer), plain, rtol=1e-5)
    assert capsys.readouterr().err.count("the first step ran out of memory; planning again") == 1
    assert trainer.planner.plan != first and pools.holds == 3  # of two plans' steps, and an update


def test_a_program_tells_its_memory_once(monkeypatch):
    """XLA reads it from all of a program's instructions, whenever it is asked."""
    Pools(monkeypatch, set())
    numbers = jax.numpy.arange(8.0)
    program, asked = jax.jit(lambda x: 2 * x).lower(numbers).compile(), []

    class Counting:
        def memory_analysis(self):
            asked.append(self)
            return program.memory_analysis()

        def __call__(self, *arguments):
            return program(*arguments)

    secured = room.secured(Counting(), jax.devices()[:1])
    sizes = secured.memory_analysis().output_size_in_bytes
    assert (secured(numbers) == 2 * numbers).all() and sizes == secured.memory_analysis().output_size_in_bytes == 32
    assert len(asked) == 1


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_run_whose_arrays_moved_makes_the_same_bits(share, tmp_path, monkeypatch, capsys):
    on_host, moved = partition.on_host, []
    plain = losses(trainer_of(tmp_path / "plain"))
    pools = Pools(monkeypatch, {1, 3})
    monkeypatch.setattr(partition, "on_host", lambda array: np.array(on_host(array)))

    def few(devices, need):
        keys = sorted(room.buffers(devices)[0], key=room._address)
        moved.append(keys[int(len(keys) * (1 - share)) :])
        return moved[-1]

    monkeypatch.setattr(room, "_few", few)
    trainer = trainer_of(tmp_path / "moved")
    assert losses(trainer) == plain
    assert "planning again" not in capsys.readouterr().err
    assert len(moved) == 2 and min(map(len, moved)) > 20 and pools.holds == 4


def test_an_evaluation_for_which_a_device_has_no_block_ends(tmp_path, monkeypatch):
    config = make_config(tmp_path, mesh=MeshConfig(data=2))
    rows = dataset(documents(8))
    trainer = Trainer(lora_model(), None, config, rows, rows, trains=False)
    want = trainer.evaluate()
    Pools(monkeypatch, {1})
    monkeypatch.setattr(room, "_few", lambda devices, need: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        trainer.evaluate()
    assert trainer.evaluate() == want


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2])
def test_all_processes_end_where_one_has_no_block(recipe, tmp_path, number):
    """For the first step, and for the update after it."""
    ended = run_all(recipe, tmp_path / "run", ["mesh.data=2"], [("no room", 0), ("no room", number)])
    for (code, words), whose in zip(ended, ["in another process: ", ""], strict=True):
        assert code and f"{whose}RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes" in words, words
