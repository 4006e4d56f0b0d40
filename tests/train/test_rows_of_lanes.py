"""The rows of a step are the same for any number of devices, streamed or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.lora import get_peft_model
from jaxtune.train.config import DataConfig, MeshConfig
from jaxtune.train.folder.record import require_same_run
from jaxtune.train.folder.translations import POSITION, translated
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

TOKENIZER = make_tokenizer()
FIELDS = ("tokens", "targets", "weights", "segment_ids", "positions")


@pytest.fixture(scope="module")
def model():
    return get_peft_model(tiny_model("float32", layers=(LayerSpec(),), vocab_size=len(TOKENIZER)), r=2)


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Two files, of 60 and of 9 rows, with blank lines and with cells of several lines."""
    lines = [
        json.dumps({"prompt": f"Add {n}: ", "completion": "4. " * (1 + n % 3)}) + "\n\n" * (n % 2) for n in range(60)
    ]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    cells = [f'"Say {n}\n\n:","It is\n{n}."' for n in range(9)]
    (tmp_path / "few.csv").write_text("\n".join(["prompt,completion", *cells]))
    return [str(tmp_path / "many.jsonl"), str(tmp_path / "few.csv")]


def trainer_on(model, output: Path, train: Any, devices: int, **data: Any) -> Trainer:
    settings = dict(train=train, length=32, buffer_size=16, cache_dir=str(output / "cache"), num_workers=1) | data
    config = make_config(output, data=DataConfig(**settings), rows_per_step=8, mesh=MeshConfig(data=devices), steps=9)
    return Trainer(model, TOKENIZER, dataclasses.replace(config, micro_batches=2))


def steps_of(trainer: Trainer, first: int, last: int) -> list[list[np.ndarray]]:
    """The arrays of each step as its devices have them, micro-batch by micro-batch."""
    found = []
    for step in range(first, last):
        parts, counts = trainer.engine.load_step(step)
        arrays = [np.asarray(getattr(part, name)) for part in parts for name in FIELDS]
        found.append([*arrays, np.array([counts["tokens"], counts["trained_tokens"]])])
    return found


def assert_equal(one: list[list[np.ndarray]], other: list[list[np.ndarray]]) -> None:
    assert len(one) == len(other) and all(len(a) == len(b) for a, b in zip(one, other, strict=True))
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right, err_msg=f"step {step}")


@pytest.mark.full
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("form", ["stream", "streamed mixture", "mixture", "files"])
def test_any_number_of_devices_trains_on_the_same_rows(model, files, tmp_path, form, packing):
    """Also where a run is resumed on another number of devices."""
    train = (
        tuple((name, weight) for name, weight in zip(files, (3.0, 1.0), strict=True)) if "mix" in form else tuple(files)
    )
    settings = dict(streaming="stream" in form, packing=packing)
    on = {devices: trainer_on(model, tmp_path, train, devices, **settings) for devices in (1, 2, 4)}
    steps = {devices: steps_of(trainer, 0, 9) for devices, trainer in on.items()}
    assert [trainer.mesh.size for trainer in on.values()] == [1, 2, 4]
    assert_equal(steps[1], steps[2])
    assert_equal(steps[1], steps[4])
    assert len({str(trainer.batches.identity()) for trainer in on.values()}) == 1
    position = json.loads(json.dumps(on[1].batches.position(8)))
    resumed = trainer_on(model, tmp_path, train, 2, **settings)
    resumed.batches.resume(8, position)
    assert_equal(steps_of(resumed, 8, 9), steps[1][8:])
    for trainer in (*on.values(), resumed):
        trainer.batches.close()


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_files_of_a_stream_weigh_by_their_rows(model, files, tmp_path, devices):
    trainer = trainer_on(model, tmp_path, tuple(files), devices, streaming=True, packing=False)
    named: list[str] = []
    for step in range(3 * 69 // 8):  # 200 of three passes of 69 rows
        trainer.engine.load_step(step)
        named += trainer.batches.sources_at(step)
    trainer.batches.close()
    ours = [sum(name.startswith(file) for name in named[:138]) for file in files]
    assert ours == [120, 18]


def test_a_stream_of_one_device_of_an_older_version_goes_on_and_one_of_several_is_refused(model, files, tmp_path):
    trainer = trainer_on(model, tmp_path, tuple(files), 2, streaming=True)
    steps = steps_of(trainer, 0, 3)
    resumed = trainer_on(model, tmp_path, tuple(files), 4, streaming=True)
    resumed.batches.resume(2, translated({POSITION: {"0": trainer.batches.position(2)}})[POSITION])
    assert_equal(steps_of(resumed, 2, 3), steps[2:])
    with pytest.raises(ValueError, match="the checkpoint's position in the rows is not one of 1 sets"):
        resumed.batches.resume(2, translated({POSITION: {"0": [1], "1": [1]}})[POSITION])
    record = json.loads(json.dumps(trainer.record()))
    assert not [line for line in require_same_run(record, trainer.record(), tmp_path) if "data" in line]
    del record["version"]
    record["data"]["lanes"] = 2
    with pytest.raises(ValueError, match=r"data.lanes: saved 2, now 1\nAn older version gave each device shards"):
        require_same_run(translated(record), trainer.record(), tmp_path)
    trainer.batches.close()
    resumed.batches.close()
