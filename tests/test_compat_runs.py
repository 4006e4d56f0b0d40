"""Runs of scripts for Unsloth and TRL: as many steps of as many rows as there, and a model on disk whatever follows."""

from __future__ import annotations

import copy
import json
import os
import pickle

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

import jaxtune
from jaxtune.compat import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from jaxtune.conversations import dates
from jaxtune.models.lora import linears, matrices
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.data.tokens import workers
from jaxtune.train.folder import record
from tests.test_compat import LABELLED, PREFERENCES, QUESTIONS, folder, load, rows, trainer_of  # noqa: F401


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.full
def test_many_rows_are_tokenised_in_processes_by_default(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(workers, "MANY_CHUNKS", 1)
    monkeypatch.setattr(workers, "FEW_CPUS", 0)
    started = []
    real = workers._Process
    monkeypatch.setattr(workers, "_Process", lambda setup: started.append(1) or real(setup))
    trainer = trainer_of(folder, tmp_path, dataset=rows(1400))
    assert len(trainer.train_dataset) == 1400 and started


def test_a_tokenizer_is_copied_and_sent_as_it_is(folder):  # noqa: F811
    _, tokenizer = load(folder, peft=False)
    tokenizer.pad_token = tokenizer.eos_token
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert other.pad_token == tokenizer.eos_token and other.chat_template == tokenizer.chat_template
        assert isinstance(other("Who are you?", return_tensors="pt").to("cuda")["input_ids"], np.ndarray)
        assert other("Who are you?")["input_ids"] == tokenizer("Who are you?")["input_ids"]


def test_a_tokenizer_that_cannot_be_sent_works_here(folder, tmp_path, capsys):  # noqa: F811
    model, tokenizer = load(folder)
    tokenizer.kept = lambda: None  # which no pickle takes
    trainer = trainer_of(folder, tmp_path, model=model, dataset_num_proc=2, max_steps=1)
    assert len(trainer.train_dataset) == 24
    assert "rows are tokenised in one process, because the tokenizer" in capsys.readouterr().out


def test_forty_steps_are_forty(folder, tmp_path):  # noqa: F811
    """Of preferences too; and shares of steps are rounded up."""
    model, _ = load(folder)

    def config(kind, settings, dataset, **more):
        args = settings(output_dir=str(tmp_path / "run"), **more)
        return kind(model, args=args, train_dataset=dataset).config()

    for kind, settings, dataset in ((DPOTrainer, DPOConfig, PREFERENCES), (KTOTrainer, KTOConfig, LABELLED)):
        made = config(kind, settings, dataset * 10, per_device_train_batch_size=1, gradient_accumulation_steps=4)
        # 120 pairs of 4 an update, 240 answers; three epochs; a tenth of the updates warms up.
        steps = 3 * len(dataset) * 10 // 4
        assert (made.steps, made.rows_per_step, made.data.packing) == (steps, 4, "step")
        assert made.schedule.warmup_steps == steps / 10 and made.schedule.zero_start
        assert made.micro_batches == (4 if kind is KTOTrainer else None)
    made = config(DPOTrainer, DPOConfig, PREFERENCES, num_train_epochs=0.6, warmup_ratio=0.6)
    assert (made.steps, made.schedule.warmup_steps) == (2, 2)  # of 2 an epoch: 1.2, then 1.2
    with pytest.raises(ValueError, match="DPOConfig: packing = True is not supported. Instead: jaxtune train"):
        config(DPOTrainer, DPOConfig, PREFERENCES, packing=True)
    with pytest.raises(ValueError, match="KTOConfig: train_sampling_strategy = 'random' is not supported; supported"):
        config(KTOTrainer, KTOConfig, LABELLED, train_sampling_strategy="random")


@pytest.mark.full
def test_dropout_is_the_models_own_again(folder, tmp_path):  # noqa: F811
    """While preferences are learnt it is off; the model keeps its rates, and so does what is saved."""
    model = FastLanguageModel.get_peft_model(load(folder, peft=False)[0], r=2, lora_dropout=0.5)
    args = DPOConfig(str(tmp_path / "run"), max_steps=2, save_steps=1, learning_rate=1e-2)
    trainer = DPOTrainer(model, args=args, train_dataset=PREFERENCES)

    def rates():
        return {matrix.lora.rate for _, matrix in matrices(model.module) if matrix.lora is not None}

    assert rates() == {0.5}
    trainer.train()
    assert rates() == {0.5}
    for step in (1, 2):
        saved = json.loads((tmp_path / f"run/checkpoint-{step}/adapter_config.json").read_text())
        assert saved["lora_dropout"] == 0.5


@pytest.mark.full
def test_what_trained_is_on_disk_whatever_follows(folder, tmp_path, capsys):  # noqa: F811
    """In checkpoint-N folders that load, of which as many stay as are asked for; and the run goes on from the last."""
    settings = dict(
        save_strategy="steps", save_steps=2, save_total_limit=2, learning_rate=1e-2, per_device_train_batch_size=2
    )
    trainer = trainer_of(folder, tmp_path, max_steps=5, **settings)
    run = tmp_path / "run"
    out = trainer.train()
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    assert f"SFTTrainer: what was trained is in {run / 'checkpoint-5'}" in capsys.readouterr().out
    again, tokenizer = FastLanguageModel.from_pretrained(str(run / "checkpoint-5"), 64, load_in_4bit=False)
    assert tokenizer.chat_template == trainer.tokenizer.chat_template
    for (name, one), (_, other) in zip(linears(again.module), linears(trainer.model.module), strict=True):
        if one.lora is not None:
            np.testing.assert_array_equal(one.lora.b[...], other.lora.b[...], err_msg=name)
    states = [json.loads((run / f"checkpoint-{step}/trainer_state.json").read_text()) for step in (4, 5)]
    assert [state["global_step"] for state in states] == [4, 5] and states[1]["log_history"][-1]["step"] == 5

    trainer.log_metrics("train", out.metrics)
    trainer.save_metrics("train", out.metrics)
    trainer.save_metrics("eval", {"eval_loss": 1.0})
    trainer.save_state()
    trainer.save_model()
    shown = capsys.readouterr().out
    assert "***** train metrics *****" in shown and "train_loss = " in shown
    assert json.loads((run / "all_results.json").read_text()) == out.metrics | {"eval_loss": 1.0}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "trainer_state.json"} <= {
        path.name for path in run.iterdir()
    }
    assert not list(run.glob(".*.tmp"))

    for wrong in (run / "checkpoint-9", tmp_path / "checkpoint-5", run):
        with pytest.raises(ValueError, match=rf"resume_from_checkpoint = '{wrong}' is not .*True, or .*/checkpoint-5"):
            trainer.train(resume_from_checkpoint=str(wrong))
    assert trainer.train(resume_from_checkpoint=str(run / "checkpoint-5")).global_step == 5


@pytest.mark.full
def test_a_run_that_saves_nothing_by_the_way_leaves_its_model(folder, tmp_path):  # noqa: F811
    """Also twice in one folder, and with the best weights of its evaluations; another program's folder stays."""
    settings = dict(max_steps=3, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    args = SFTConfig(str(tmp_path / "run"), save_strategy="no", greater_is_better=True, learning_rate=1e-2, **settings)
    for _ in range(2):
        trainer = SFTTrainer(load(folder)[0], args=args, train_dataset=rows(8), eval_dataset=rows(3))
        trainer.train()
        best = trainer.state.best_global_step
        assert best is not None and best < 3
        found = sorted((tmp_path / "run").glob("checkpoint-*"))
        assert found == [tmp_path / f"run/checkpoint-{step}" for step in (best, 3)]
        assert trainer.state.best_model_checkpoint == os.fspath(found[0])
        held = [jaxtune.load_adapter(load(folder, peft=False)[0].module, path) for path in found]
        b = [next(linear.lora.b[...] for _, linear in linears(one) if linear.lora is not None) for one in held]
        assert not np.array_equal(*b)
    (found[1] / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="holds checkpoint-3, which jaxtune did not write: name another folder"):
        trainer.train()


@pytest.mark.full
def test_an_iterable_data_set_is_streamed_for_max_steps(folder, tmp_path):  # noqa: F811
    stream = Dataset.from_list(rows(64)).to_iterable_dataset(num_shards=4)
    with pytest.raises(ValueError, match="SFTConfig: max_steps = -1: train_dataset is an IterableDataset"):
        trainer_of(folder, tmp_path, stream)
    settings = dict(max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1)
    trainer = trainer_of(folder, tmp_path, stream, **settings)
    output = trainer.train()
    assert output.global_step == 3 and output.metrics["epoch"] == 1.0
    assert trainer.train_dataset is not None and trainer._prepared.train_data is None
    texts = [{"name": "I am a bot."} for _ in range(20)]
    named = Dataset.from_list(texts).to_iterable_dataset()
    for arguments in (dict(dataset_text_field="name"), dict()):
        formatting = None if arguments else (lambda row: row["name"])
        args = SFTConfig(output_dir=str(tmp_path / "named"), save_strategy="no", max_steps=1, **arguments)
        one = SFTTrainer(load(folder)[0], args=args, train_dataset=named, formatting_func=formatting)
        assert next(iter(one._rows["train"])) == {"text": "I am a bot."}
    with pytest.raises(ValueError, match="set save_strategy and eval_strategy to 'steps' or 'no'"):
        trainer_of(folder, tmp_path / "other", stream, max_steps=2, save_strategy="epoch").train()


def numbered(count):
    for number in range(count):
        yield {"text": f"I am number {number}."}


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{}, {"train_sampling_strategy": "sequential"}, {"packing": True, "max_length": 96}],
    ids=["default", "sequential", "packed"],
)
def test_a_stream_keeps_its_order_as_in_transformers(folder, tmp_path, settings):  # noqa: F811
    """Over its end, too; one that shuffles itself has an order of its own for each pass."""
    plain = IterableDataset.from_generator(numbered, gen_kwargs={"count": 40})
    shards = Dataset.from_list(list(numbered(40))).to_iterable_dataset(num_shards=4)
    for stream in (plain, shards, shards.shuffle(seed=3, buffer_size=16)):
        want = []
        for epoch in range(2):
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(epoch)
            want += [row["text"] for row in stream]
        trainer = trainer_of(folder, tmp_path, stream, max_steps=9, per_device_train_batch_size=8, **settings)
        source = trainer._trainer().batches
        assert trainer.config().data.buffer_size == (1_000 if "packing" in settings else 10_000)
        found = []
        for step in range(10):
            batch = source.batch_at(step)
            for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
                for segment in range(1, segments.max() + 1):
                    found.append(trainer.tokenizer.decode(tokens[segments == segment], skip_special_tokens=True))
        source.close()
        if "packing" in settings:  # packed as in TRL, the longest first; so all of a pass come before the next
            assert sorted(found[:40]) == sorted(want[:40]) and sorted(found[40:80]) == sorted(want[40:])
        else:
            assert found[:80] == want


def test_the_day_that_a_template_writes_is_that_of_the_first_start(folder, tmp_path, monkeypatch):  # noqa: F811
    model, tokenizer = load(folder)
    tokenizer.chat_template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + tokenizer.chat_template
    monkeypatch.setattr(dates, "today", lambda: "2026-11-28")
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_steps=2)
    trainer = SFTTrainer(model, args=args, train_dataset=rows(), processing_class=tokenizer)
    first = trainer.config()
    assert first.data.today == "2026-11-28"
    monkeypatch.setattr(dates, "today", lambda: "2026-11-29")
    assert trainer.config() == first and trainer._prepared.config.data.today == "2026-11-28"
    assert "Today: 28 Nov 2026" in tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    (tmp_path / "run").mkdir(exist_ok=True)
    record.write_config(tmp_path / "run", config_to_dict(first))
    other = SFTTrainer(model, args=trainer.args, train_dataset=rows(), processing_class=tokenizer)
    assert other.config("auto").data.today == "2026-11-28"
    args = SFTConfig(output_dir=str(tmp_path / "other"), max_steps=2)
    other = SFTTrainer(model, args=args, train_dataset=rows(), processing_class=tokenizer)
    assert other.config("auto").data.today == "2026-11-29"
