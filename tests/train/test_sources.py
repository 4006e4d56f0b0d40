"""Runs whose rows are made while they go on: sampled from the model itself, or streamed from shards."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from tiny_models import tiny_model

from jaxtune import generate
from jaxtune.models.config import LayerSpec
from jaxtune.models.lora import get_peft_model
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, DataConfig, OptimConfig
from jaxtune.train.data.batches import Batch, BatchSource, Json
from jaxtune.train.folder.checkpoint import CheckpointError, saved_steps
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import LENGTH, assert_same, lora_model, make_config


class Sampled(BatchSource):
    """Learning from rewards in its smallest form: the model answers prompts, and the wanted tokens are trained on in
    those answers that have more of them than answers had so far, each answer as much as it has more.

    What answers had so far is a running mean, which a resumed run needs, as it needs the number of draws made.
    """

    rows_per_step = 16
    needs_model = True
    length = LENGTH
    wanted = range(24)

    def __init__(self):
        self.mean, self.draws, self.rewards = 0.0, 0, []
        self._positions: dict[int, Json] = {0: None}

    def batch_at(self, step, model=None):
        assert model is not None
        prompts = [[1 + row, 2, 3] for row in range(self.rows_per_step)]
        answers = generate(model(), prompts, 8, 1.0, seed=self.draws, eos_token_ids=())
        self.draws += 1
        batch = Batch.empty(self.rows_per_step, self.length)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            wanted = [token in self.wanted for token in answer]
            text, reward = [*prompt, *answer], sum(wanted) / len(answer)
            self.rewards.append(reward)
            batch.tokens[row, : len(text)], batch.segment_ids[row, : len(text)] = text, 1
            batch.targets[row, : len(text) - 1], batch.positions[row, : len(text)] = text[1:], np.arange(len(text))
            better = max(0.0, reward - self.mean)
            batch.weights[row, len(prompt) - 1 : len(text) - 1] = better * np.float32(wanted) + 1e-3
        self.mean = 0.9 * self.mean + 0.1 * float(np.mean(self.rewards[-self.rows_per_step :]))
        self._positions[step + 1] = {"mean": self.mean, "draws": self.draws}
        return batch

    def position(self, step):
        return self._positions[step]

    def resume(self, step, position):
        assert isinstance(position, dict)
        self.mean, self.draws = float(str(position["mean"])), int(str(position["draws"]))

    def identity(self):
        return {"sampled": f"tokens of {self.wanted}"}


class StopAfter(Callback):
    def __init__(self, step):
        self.step = step

    def between(self, moment):
        if moment.step == self.step:
            moment.stop()


def run(output, source, callbacks=(), **changes):
    settings = dict(steps=8, checkpoint=CheckpointConfig(every_steps=1, every_minutes=None)) | changes
    trainer = Trainer(lora_model(), None, make_config(output, **settings), train_rows=source, callbacks=callbacks)
    return trainer.train(), trainer


@pytest.mark.full
def test_rows_that_are_sampled_from_the_model_are_resumed_to_the_same_bits(tmp_path):
    """Each step's rows are of the weights that the step before has led to."""
    source, settings = Sampled(), dict(steps=24, optim=OptimConfig(learning_rate=3e-2))
    trained, trainer = run(tmp_path / "whole", source, **settings)
    rewards = np.reshape(source.rewards, (24, 16)).mean(1)
    assert rewards[-6:].mean() > rewards[:6].mean() + 0.1  # it has learnt what is rewarded
    assert "epoch" not in trainer.history[0] and trainer.data_summary().startswith("training rows: made during the run")
    half = Sampled()
    run(tmp_path / "run", half, [StopAfter(5)], **settings)
    rest = Sampled()
    again, resumed = run(tmp_path / "run", rest, **settings)
    assert half.rewards + rest.rewards == source.rewards
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in trainer.history[5:]]
    assert_same(again, trained)
    other = Sampled()
    other.wanted = range(8)
    with pytest.raises(
        CheckpointError, match=r"data.sampled: saved 'tokens of range\(0, 24\)', now 'tokens of range\(0, 8\)'"
    ):
        run(tmp_path / "run", other, **settings)


# ---- streams


TOKENIZER = make_tokenizer()


def write_shards(folder, count=3, rows=14):
    folder.mkdir()
    for shard in range(count):
        lines = [
            json.dumps({"prompt": f"Add {shard * rows + row}: ", "completion": f"It is {row}."}) for row in range(rows)
        ]
        (folder / f"part-{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def stream_run(output, rows, callbacks=(), **changes):
    model = get_peft_model(tiny_model("float32", layers=(LayerSpec(),), vocab_size=len(TOKENIZER)), r=2)
    settings = dict(
        steps=12,
        data=DataConfig(train=str(rows), length=64, streaming=True, buffer_size=6),
        checkpoint=CheckpointConfig(every_steps=4, every_minutes=None),
    )
    trainer = Trainer(model, TOKENIZER, make_config(output, **(settings | changes)), callbacks=callbacks)
    return trainer.train(), trainer


class Vanish(Callback):
    """Takes the shards away after a step."""

    def __init__(self, step, folder):
        self.step, self.folder = step, folder

    def between(self, moment):
        if moment.step == self.step:
            shutil.move(self.folder, self.folder.with_name("away"))


@pytest.mark.full
def test_a_run_whose_shards_vanish_saves_what_it_has_and_goes_on_to_the_same_bits(tmp_path):
    """No save is due during the run, so the only one is of the last step; how many steps that is depends on how far the
    rows were read ahead."""
    rows, no_save = write_shards(tmp_path / "rows"), CheckpointConfig(every_steps=100, every_minutes=None)
    trained, whole = stream_run(tmp_path / "whole", rows, checkpoint=no_save)
    output = tmp_path / "run"
    with pytest.raises(ValueError, match=r"part-\d.jsonl: a shard of the stream cannot be read .* the same command"):
        stream_run(output, rows, [Vanish(2, rows)], checkpoint=no_save)
    [saved] = saved_steps(output / "checkpoints")
    assert 2 <= saved < 12
    shutil.move(tmp_path / "away", rows)
    again, resumed = stream_run(output, rows, checkpoint=no_save)
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in whole.history[saved:]]
    assert_same(again, trained)


def test_a_stream_that_has_changed_is_not_gone_on_with(tmp_path):
    rows = write_shards(tmp_path / "rows")
    stream_run(tmp_path / "run", rows, [StopAfter(3)])
    with open(rows / "part-1.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "One more", "completion": "!"}) + "\n")
    with pytest.raises(CheckpointError, match=r"data.shards.part-1.jsonl: saved '\d+ bytes \w+', now '\d+ bytes \w+'"):
        stream_run(tmp_path / "run", rows)
