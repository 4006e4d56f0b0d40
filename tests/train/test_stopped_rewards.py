"""A run of sampled answers that SIGTERM stops in a reward, a tool, an environment or its sampler: saved at once, and
resumed to the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtune.conversations.calls import Call
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.config import CheckpointConfig
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.loop.saving import TrainingInterrupted
from jaxtune.train.sampled.tool_formats import ToolFormat
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.test_tools import trainer_of

STEPS = 6
# `stalls` names what waits until the signal is there, once.
OWN = """
import asyncio, time
from pathlib import Path

HERE = Path(__file__).parent
def stalls(what):
    if (HERE / "stalls").read_text() != what:
        return False
    (HERE / "stalls").write_text("")
    (HERE / "began").write_text("")
    return True

def wait(what):
    if stalls(what):
        time.sleep(600)
        (HERE / "over").write_text(what)

async def wait_later(what):
    if stalls(what):
        await asyncio.sleep(600)
        (HERE / "over").write_text(what)

def roll(sides: int) -> int:
    '''Rolls a die.

    Args:
        sides: of the die.
    '''
    wait("tool")
    return sides // 2

async def look(sides: int) -> int:
    '''Looks at a die.

    Args:
        sides: of the die.
    '''
    await wait_later("async tool")
    return sides // 2

class Game:
    def reset(self, goal, **row):
        wait("reset")
        self.goal = goal

    def add(self, number: int) -> int:
        '''Adds.

        Args:
            number: what is added.
        '''
        wait("environment")
        return number

    def get_reward(self):
        wait("get_reward")
        return float(self.goal)

def even(completion_ids, **columns):
    wait("reward")
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

async def odd(completion_ids, **columns):
    await wait_later("async reward")
    return [sum(token % 3 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
CALLS = {"tool": ("roll", "sides"), "async tool": ("look", "sides"), "environment": ("add", "number")}


class Stop:
    """Sends SIGTERM a moment after the file `began` is there."""

    def __init__(self, began: Path):
        self._file = began

    def __enter__(self) -> Stop:
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        return self

    def _send(self) -> None:
        patience.wait_until(self._file.exists)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        self._thread.join()


@pytest.fixture
def calling(monkeypatch):
    """Has each turn of the model call a tool, whatever it writes: {"calls": (tool's name, its parameter)}."""
    said: dict[str, tuple[str, str]] = {}
    parsed = ToolFormat.parsed

    def calls(self, ids, schemas):
        message, own = parsed(self, ids, schemas)
        return message, [Call(name, {parameter: 4}) for name, parameter in said.values()] or own

    monkeypatch.setattr(ToolFormat, "parsed", calls)
    return said


def run_of(folder: Path, output: str, place: str) -> Trainer:
    file = folder / "own.py"
    objective: dict = dict(reward_funcs=(f"{file}:even", f"{file}:odd"))
    if place in ("tool", "async tool"):
        objective |= dict(tools=(f"{file}:roll", f"{file}:look"), max_tool_calling_iterations=1)
    if place in ("environment", "get_reward", "reset"):
        objective |= dict(environment_factory=f"{file}:Game", max_tool_calling_iterations=1)
    checkpoint = CheckpointConfig(every_steps=None, every_minutes=60, keep=STEPS)
    return trainer_of(folder / output, objective, checkpoint=checkpoint, steps=STEPS)


PLACES = ["async reward", "sampling", "environment", "reward", "get_reward", "reset", "tool", "async tool"]


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_a_run_of_rewards_is_saved_at_a_signal(tmp_path, place, calling):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "stalls").write_text("")
    if place in CALLS:
        calling["calls"] = CALLS[place]
    whole = run_of(tmp_path, "whole", place)
    want = nnx.state(whole.train())
    assert all(line["grad_norm"] > 0 for line in whole.history[2:] if "loss" in line)

    cut = run_of(tmp_path, "cut", place)
    batch_at, step, began, samples = cut.batches.batch_at, Sampler.step, tmp_path / "began", []

    def third(number, *others):
        if number == 2:
            samples.append(number)
            (tmp_path / "stalls").write_text(place)
        return batch_at(number, *others)

    def slow(self):
        if samples and place == "sampling":
            began.write_text("")
            time.sleep(0.4)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut.batches, "batch_at", third)
        patch.setattr(Sampler, "step", slow)
        with Stop(began), pytest.raises(TrainingInterrupted, match=r"SIGTERM after step \d; saved in") as ended:
            cut.train()
    [done] = saved_steps(tmp_path / "cut" / "checkpoints")
    assert f"after step {done};" in str(ended.value) and (
        done == 2 or place in CALLS
    )  # an answer that is cut calls nothing
    assert not (tmp_path / "over").exists()
    got = nnx.state(run_of(tmp_path, "cut", place).train())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
