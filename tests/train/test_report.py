"""What a run says of its rows before it starts."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from tiny_models import tiny_model

from jaxtune.models.config import RopeConfig
from jaxtune.train.config import DataConfig, PlanConfig
from jaxtune.train.data import prepare
from jaxtune.train.display import model_report, rows_report
from jaxtune.train.planning.devices import find_device
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import VOCAB, dataset, documents, lora_model, make_config

ROWS = [{"prompt": f"Add {i}: ", "completion": "It is 4."} for i in range(6)]


def summary(train, held_out=None, context=64, warmup=0) -> str:
    return rows_report.data_summary(train, held_out, train.batches(2), 3, warmup, context)


def test_each_warning_has_its_line_and_is_said_once():
    late = {"prompt": "Add them. " * 20, "completion": "4"}
    data = prepare([*ROWS, late, {"prompt": "\x1b[2J"}], make_tokenizer(), length=64, on_bad_row="skip")
    train, held_out = data.split(2)
    lines = summary(train, held_out).splitlines()
    assert [line.split(":")[0] for line in lines[:2] + lines[3:]] == [
        "training rows",
        "evaluation rows",
        "warning",
        "warning",
    ]
    assert sum("1 bad rows left out" in line for line in lines) == 1
    assert "1 of " in lines[-1] and "documents dropped" in lines[-1]
    assert summary(prepare(ROWS, make_tokenizer(), length=64)).count("warning") == 0


def test_held_out_rows_that_are_trained_on_are_warned_of():
    train = prepare(ROWS, make_tokenizer(), length=64)
    others = [{"prompt": f"Sum {i}: ", "completion": "It is 4."} for i in range(6)]  # as long, and end alike
    assert "warning" not in summary(train, prepare(others, make_tokenizer(), length=64))
    held_out = prepare([*others, ROWS[4], ROWS[1]], make_tokenizer(), length=64)
    said = "warning: evaluation rows: 2 of 8 documents are also trained on: their loss says nothing about others"
    assert said in summary(train, held_out).splitlines()
    pairs = [{"prompt": f"Add {i}: ", "chosen": "It is 4.", "rejected": "Who?"} for i in range(4)]
    both = [prepare(rows, make_tokenizer(), length=64, format="preference", pairs=True) for rows in (pairs, pairs[:1])]
    assert both[1].documents.also_in(both[0].documents) == 2


@pytest.mark.full
def test_a_row_longer_than_the_models_context_is_warned_of(tmp_path):
    data = prepare(ROWS, make_tokenizer(), length=1024)
    said = "warning: data.length = 1,024 is more than the 512 positions that the model was made for"
    assert said in summary(data, context=512)
    assert "warning" not in summary(data, context=1024)
    # A document that long is an error; packed rows of shorter ones are not.
    model = lora_model()
    model.config = dataclasses.replace(model.config, vocab_size=VOCAB, max_position_embeddings=8)
    config = make_config(tmp_path)
    with pytest.raises(
        ValueError, match=r"data.length = 16: the longest document has 1\d tokens, .* at most 8 positions"
    ):
        Trainer(model, None, config, dataset(documents(20)))
    Trainer(model, None, config, dataset(documents(20, longest=8)))


def test_a_warm_up_that_outlasts_the_run_is_warned_of():
    data = prepare(ROWS, make_tokenizer(), length=64)
    assert "warning" not in summary(data, warmup=3)
    assert "warning: schedule.warmup_steps = 4, of 3 steps in all" in summary(data, warmup=4)


def test_a_stretched_context_counts_in_full():
    config = dataclasses.replace(lora_model().config, max_position_embeddings=4096)
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=4096)
    for rope, expected in (
        (RopeConfig(), 4096),
        (yarn, 16384),
        (dataclasses.replace(yarn, original_max_position_embeddings=0), 16384),
        (dataclasses.replace(yarn, factor=0.5), 4096),
        (RopeConfig(kind="longrope", factor=32.0, original_max_position_embeddings=128), 4096),
        (RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=8192), 4096),
    ):
        assert dataclasses.replace(config, rotary=(rope,)).context_length == expected


def test_every_key_of_data_reaches_the_rows():
    keys = {field.name for field in dataclasses.fields(DataConfig)} - {
        "train",
        "eval",
        "eval_rows",
        "streaming",
        "buffer_size",
        "template_arguments",  # which the run's tokenizer has
        *("images", "remote_images", "max_pixels"),  # which `pictures` has
    }
    assert keys <= set(inspect.signature(prepare).parameters)


@pytest.mark.full
def test_the_start_of_a_run_on_a_gpu_says_how_long_it_takes(tmp_path, capsys):
    config = make_config(tmp_path, steps=2, plan=PlanConfig(dollars_per_hour=2.0))
    trainer = Trainer(lora_model(), None, config, dataset(documents(12)))
    trainer.planner.device = find_device("NVIDIA H200")
    trainer.train()
    said = "".join(capsys.readouterr())
    assert said.count("2 steps take 0:00, for 0.00 dollars, evaluations and saves not counted") == 1


def test_a_large_model_on_a_cpu_is_warned_of(monkeypatch):
    model = tiny_model()
    assert model_report.cpu_note(model) == ""
    monkeypatch.setattr(model_report, "LARGE_FOR_A_CPU", 10)
    note = model_report.cpu_note(model)
    assert re.search(r"no GPU was found, and 0\.0 B parameters on a CPU .*doctor' says what is missing", note)
    monkeypatch.setattr(model_report.jax, "default_backend", lambda: "gpu")
    assert model_report.cpu_note(model) == ""
